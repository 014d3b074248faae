"""The tuner's measurements on workers of a cluster: each form beside the default one, on a machine of the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from repaconv.artefacts import ImageSize, Ratio
from repaconv.farm.cluster import Tls, connected, require_result, run_jobs
from repaconv.farm.jobs import Model, resolved
from repaconv.farm.remote import job_of
from repaconv.files import sha256_of
from repaconv.pipeline.tuning import Measurer
from repaconv.steps.common import Progress, silent


def on_workers(
    scheduler: str,
    *,
    target: str,
    threads: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    tls: Tls | None = None,
    wait_s: float = 30,
    progress: Progress = silent,
) -> Measurer:
    """What `repaconv.pipeline.tuning.tune` measures with, there; arguments as `bench_on`'s.

    The measurer raises:
        EnvironmentProblem: If the cluster does not answer or has no such worker.
        Refused: If a job fails there.
    """

    def measure(reference: Path, others: Mapping[str, Path], rounds: int, *, image_size: ImageSize) -> dict[str, Ratio]:
        sha256s = {path: sha256_of(path) for path in (reference, *others.values())}
        jobs = {
            name: job_of(
                resolved(target),
                (Model(name="form", sha256=sha256s[path]), Model(name="default form", sha256=sha256s[reference])),
                threads=threads,
                batch=batch,
                image_size=image_size,
                rounds=rounds,
                seed=seed,
            )
            for name, path in others.items()
        }
        contents = {digest: path.read_bytes() for path, digest in sha256s.items()}
        with connected(scheduler, tls or Tls()) as client:
            landed = run_jobs(client, jobs.values(), contents, wait_s=wait_s, progress=progress)
        found = {each.job.id: require_result(each).ratio for each in landed}
        return {name: ratio for name, job in jobs.items() if (ratio := found[job.id]) is not None}

    return measure

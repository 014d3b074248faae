"""Measurements for `tune` on cluster workers: each candidate model interleaved with that of the default preset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from repaconv.core.files import sha256_of
from repaconv.core.progress import Progress, silent
from repaconv.distributed.benchmark_jobs import Job, Model, target_definition
from repaconv.distributed.dask_cluster import JobOutcome, connect, require_result, run_jobs
from repaconv.distributed.options import ClusterOptions
from repaconv.graph.onnx_files import read_graph
from repaconv.results import ImageSize, Ratio
from repaconv.stages.bench.benchmark_subjects import fixed_batch_of
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.tune.options import TuneOptions
from repaconv.stages.tune.speed_measurements import Measurer


def measurer_on_workers(cluster: ClusterOptions, options: TuneOptions, *, progress: Progress = silent) -> Measurer:
    """Return the function that `repaconv.stages.tune.stage.tune_by` measures with, on workers of the cluster.

    The measurer raises:
        EnvironmentProblem: If the cluster does not answer or has no worker of the target.
        Refused: If the default preset does not run on the worker.
    """
    target = target_definition(options.target)

    def measure(
        reference: Path, others: Mapping[str, Path], rounds: int, *, image_size: ImageSize | None
    ) -> dict[str, Ratio | str]:
        sha256s = {path: sha256_of(path) for path in (reference, *others.values())}
        default = Model(name="default preset", sha256=sha256s[reference])
        batch = options.batch or fixed_batch_of(read_graph(reference))
        how = BenchOptions(
            threads=options.threads, batch=batch, image_size=image_size, rounds=rounds, seed=options.seed
        )
        jobs = {
            name: Job.of(target, (Model(name="form", sha256=sha256s[path]), default), how)
            for name, path in others.items()
        }
        contents = {digest: path.read_bytes() for path, digest in sha256s.items()}
        with connect(cluster) as client:
            landed = run_jobs(client, jobs.values(), contents, wait_s=cluster.wait_s, progress=progress)
            if not any(each.result for each in landed):  # in every job the default preset runs as well
                alone = Job.of(target, (default,), how)
                require_result(run_jobs(client, [alone], contents, wait_s=cluster.wait_s, progress=progress)[0])
        found = {each.job.id: _ratio_or_reason(each) for each in landed}
        return {name: ratio for name, job in jobs.items() if (ratio := found[job.id]) is not None}

    return measure


def _ratio_or_reason(landed: JobOutcome) -> Ratio | str | None:
    """The speedup that a job measured, or why it failed, as the end of the search's description."""
    if landed.result is None:
        return f"it does not run on {landed.worker or 'its worker'}: {landed.problem}"
    return landed.result.ratio

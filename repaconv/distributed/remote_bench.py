"""Benchmark on another machine: on a worker of a Dask cluster, or on a board via ssh."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import payload_of, sha256_of
from repaconv.core.progress import Progress, silent
from repaconv.distributed.benchmark_jobs import Job, Model, target_definition
from repaconv.distributed.dask_cluster import connect, require_result, run_jobs
from repaconv.distributed.options import ClusterOptions
from repaconv.results import BenchArtefact, CollectArtefact
from repaconv.stages.bench.benchmark_subjects import BenchmarkSubjects, choose_subjects
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.bundle.collect import evaluated_result
from repaconv.stages.bundle.options import BundleOptions
from repaconv.stages.bundle.stage import bundle_by
from repaconv.stages.shared.exports_of_run import Export
from repaconv.stages.shared.option_dataclasses import as_image_size
from repaconv.stages.shared.result_provenance import with_files

# Timeout on the board: if the connection drops, the process there keeps running.
BOARD_TIMEOUT_S = 3600
TIMED_OUT = 124
"""The exit code of `timeout` for a command that it stopped."""


def bench_on_worker(
    cluster: ClusterOptions, options: BenchOptions, run: str | Path | None = None, *, progress: Progress = silent
) -> BenchArtefact:
    """Measure the ONNX model of a run on a cluster worker of the target, interleaved with the training-time network.

    Raises:
        EnvironmentProblem: If the cluster does not answer or has no such worker.
        Refused: If the job fails on the worker, or the model is missing or was changed.
        UsageProblem: If there is no ONNX model.
    """
    taken = run_folder.find_run(Path(run) if run else None)
    known, export = _models_to_send(taken, options, progress)
    variant = export.variant.full
    place = taken.bench_json(variant)
    require_replaceable(place, "bench")
    paths = [each.path for each in known.subjects]
    models = tuple(Model(name=each.name, sha256=sha256_of(each.path)) for each in known.subjects)
    contents = {model.sha256: path.read_bytes() for model, path in zip(models, paths, strict=True)}
    fixed = known.fixed_batch if options.protocol is None else known.batch_of_network
    size = as_image_size(options.image_size) or known.size
    how = replace(options, image_size=size, batch=options.batch or fixed)
    job = Job.of(target_definition(options.target), models, how)
    with connect(cluster) as client:
        landed = run_jobs(client, [job], contents, wait_s=cluster.wait_s, progress=progress)[0]
    done = require_result(landed)
    where = f"on the worker {landed.worker}" + (f", attempt {landed.attempts}" if landed.attempts > 1 else "")
    ours = {
        "unverified": known.overridden,
        "options": (*cluster.words(), *options.words()),
        "variant": variant,
        "note": "; ".join(part for part in (done.note, known.note, where) if part),
    }
    done = done.model_copy(update=ours)
    replace_artifact(place, done)
    return with_files(done, paths, [place])


def _models_to_send(run: run_folder.Run, options: BenchOptions, progress: Progress) -> tuple[BenchmarkSubjects, Export]:
    """Return the models to send to the worker.

    Raises:
        UsageProblem: If there is no ONNX model, or it is too large to send.
    """
    known = choose_subjects(
        run,
        None,
        options.against,
        options.allow_unverified,
        progress,
        target=options.target,
        precision=options.precision,
        batch=options.batch,
        image_size=as_image_size(options.image_size),
    )
    if known.export is None:
        raise UsageProblem(
            f"{options.target} runs PyTorch modules in memory, which are not sent to workers.",
            hint="Measure on that machine itself, or give a target that runs ONNX models.",
            code="remote.no-graph",
        )
    if known.export.artefact.data is not None:
        raise UsageProblem(
            "a model above 2 GiB is not sent to workers.",
            hint="Run bench on that machine itself.",
            code="remote.too-large",
        )
    return known, known.export


def bench_by_ssh(
    host: str,
    options: BenchOptions,
    run: str | Path | None = None,
    *,
    count: int | None = None,
    progress: Progress = silent,
) -> CollectArtefact:
    """Send a bundle to a board, run it there, fetch its result and verify it.

    The user's ssh and its configuration are used. The board needs Python 3.6, tar and trtexec. If it has ``flock``, it
    runs one job at a time.

    Args:
        host: The host for ssh, e.g. ``nvidia@orin``.
        options: Only the target, the precision, the batch size and ``allow_unverified`` are used, for the bundle.
        run: The run folder; the newest if None.
        count: Number of images.
        progress: See `Progress`.

    Raises:
        EnvironmentProblem: If the board cannot be reached, or has no trtexec of the target's version.
        Refused: If the result is damaged, or the build failed on the board.
    """
    bundled = {name: getattr(options, name) for name in ("target", "precision", "batch", "allow_unverified")}
    made = bundle_by(BundleOptions(**bundled, count=count), run, progress=progress)
    taken, _ = run_folder.run_and_model(Path(run) if run else None)
    slot = taken.collected_json(made.variant)
    result = taken.engine(made.variant, ".result.tar.gz")
    require_replaceable(slot, "collect", result)
    _on_the_board(
        host,
        run_folder.Run(taken.folder / run_folder.BUILD).payload(made.payload),
        made.bundle_sha256,
        result,
        progress,
    )
    progress("collect", 0, 0)
    found, _ = evaluated_result(result, taken.folder, slot)
    replace_artifact(slot, found.model_copy(update={"other_files": (payload_of(result, slot.parent),)}))
    return with_files(found, [*map(Path, found.input_files)], [*map(Path, made.output_files), result, slot])


def _on_the_board(host: str, bundled: Path, sha256: str, result: Path, progress: Progress) -> None:
    """Send a bundle to the board, run it, and fetch its result.

    Raises:
        EnvironmentProblem: If the board cannot be reached, or cannot run the bundle.
    """
    with _folder_on(host, f"repaconv-{sha256[:16]}") as folder:
        progress(f"send to {host}", 0, 0)
        with bundled.open("rb") as file:
            _ssh(host, f"tar xzf - --strip-components=1 -C {folder}", stdin=file)
        progress(f"build and measure on {host}", 0, 0)
        alone = "$(command -v flock >/dev/null && echo flock repaconv.lock)"
        run_it = f"{alone} timeout {BOARD_TIMEOUT_S} python3 {folder}/run.py -o {folder}/result.tar.gz"
        code, words = _ssh(host, run_it, may_fail=True)
        if code in (3, 4):
            raise EnvironmentProblem(
                f"{host} cannot run the bundle: {words}.",
                hint="Bundle for the JetPack version of the board; `repaconv targets` lists them.",
                code="remote.board",
            )
        gone, _ = _ssh(host, f"test -f {folder}/result.tar.gz", may_fail=True)
        if gone or code not in (0, 1, 5):  # wrong outputs and a failed build have a result
            late = (
                f"it was stopped after {BOARD_TIMEOUT_S // 60} minutes" if code == TIMED_OUT else words or "no reason"
            )
            raise EnvironmentProblem(
                f"the bundle gave no result on {host} (exit code {code}): {late}.",
                hint="Run it there manually to see why: `repaconv bundle`, then its README.txt.",
                code="remote.board-failed",
            )
        progress(f"bring back from {host}", 0, 0)
        write_payload(result, _ssh_bytes(host, f"cat {folder}/result.tar.gz"))


@contextmanager
def _folder_on(host: str, name: str) -> Iterator[str]:
    """Create a new folder on the board and remove it afterwards, so that calls with the same bundle do not collide."""
    folder = shlex.quote(_ssh_bytes(host, f"mktemp -d {name}.XXXXXX").decode("utf-8", "replace").strip())
    try:
        yield folder
    finally:
        with suppress(EnvironmentProblem):  # the board is unreachable; the original error reports that
            _ssh(host, f"rm -rf {folder}")


def _ssh(host: str, command: str, *, stdin: Any = subprocess.DEVNULL, may_fail: bool = False) -> tuple[int, str]:
    """Run a command on the board; return its exit code and the last line of stderr."""
    done = subprocess.run(_ssh_command(host, command), stdin=stdin, capture_output=True, check=False)
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [""]
    words = lines[-1].removeprefix("error: ").rstrip(".")
    if done.returncode == 255 or (done.returncode and not may_fail):
        raise _ssh_error(host, words, done.returncode)
    return done.returncode, words


def _ssh_bytes(host: str, command: str) -> bytes:
    done = subprocess.run(_ssh_command(host, command), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise _ssh_error(host, done.stderr.decode("utf-8", "replace").strip(), done.returncode)
    return done.stdout


def _ssh_command(host: str, command: str) -> list[str]:
    """Return the ssh command line. BatchMode disables prompts, which cannot be answered here."""
    if host.startswith("-"):
        raise UsageProblem(f"{host!r} is not a host name.", hint="E.g. --host nvidia@orin.", code="remote.host")
    return ["ssh", "-o", "BatchMode=yes", host, "sh", "-c", shlex.quote(command)]


def _ssh_error(host: str, why: str, code: int) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"ssh to {host} failed (exit code {code}): {why or 'it gave no reason'}.",
        hint=f"`ssh {host} true` must work without a prompt; configure the connection in your ssh config.",
        code="remote.unreachable",
    )

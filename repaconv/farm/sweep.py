"""sweep: checkpoints x targets x precisions x batches, measured here or on a cluster, resumed where it stopped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from repaconv import runs
from repaconv.artefact import SCHEMA_VERSION, BenchArtefact, FoldArtefact, ImageSize, Record, SweepArtefact, SweepRow
from repaconv.errors import EnvironmentProblem, Refused, RepaconvError, UsageProblem
from repaconv.farm.cluster import Landed, Tls, connected, run_jobs
from repaconv.farm.jobs import Job, Model, resolved, run_job
from repaconv.farm.remote import job_of
from repaconv.files import canonical_json, read_artefact, sha256_of, sha256_of_bytes, stage_of, write_artefact
from repaconv.pipeline import export, fold
from repaconv.pipeline.common import Progress, made_by, silent, with_files
from repaconv.pipeline.exports import export_for
from repaconv.replacing import put, require_ours
from repaconv.toml import Lines, first_problem, read_toml, why_unreadable


class Entry(Record):
    """One checkpoint, as `fold` takes it; ``set`` is what the file does not tell."""

    checkpoint: str
    method: str = "auto"
    set: dict[str, str | float | int] = Field(default={})
    weights: str | None = None


class Matrix(Record):
    """A sweep: every model for every target in every precision at every batch."""

    models: tuple[Entry, ...] = Field(min_length=1)
    targets: tuple[str, ...] = ("x86-64",)
    precisions: tuple[Literal["fp32", "fp16", "bf16", "int8"], ...] = ("fp32",)
    batches: tuple[int, ...] = (1,)
    threads: int | None = None
    rounds: int | None = None
    seed: int = 0


class Cell(Record):
    """One place in the matrix; ``model`` is the entry's name, which no other entry has."""

    model: str
    target: str
    precision: str
    batch: int


class Done(Record):
    """What is kept of a cell: which job it was, and its result."""

    schema_version: int = SCHEMA_VERSION
    stage: str = "cell"
    cell: Cell
    job: str
    worker: str
    attempts: int
    result: BenchArtefact


def read_matrix(path: Path) -> Matrix:
    """Read a matrix, .toml or .yaml.

    Raises:
        EnvironmentProblem: If it is .yaml and PyYAML is not installed.
        UsageProblem: If it is not a matrix, with the line that is wrong where it is known.
    """
    lines: Lines | None = None
    if path.suffix in (".yaml", ".yml"):
        table = _read_yaml(path)
    else:
        table, lines = read_toml(path, "matrix")
    try:
        return Matrix.model_validate(table)
    except ValidationError as error:
        raise UsageProblem(
            first_problem(error, str(path), lines), hint="See README, sweep.", code="sweep.invalid"
        ) from error


def sweep(
    matrix: str | Path,
    *,
    scheduler: str | None = None,
    tls: Tls | None = None,
    wait_s: float = 30,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> SweepArtefact:
    """Fold and export what is missing, measure what was not, and put all of it side by side.

    Args:
        matrix: A .toml or .yaml file; paths in it are relative to it.
        scheduler: A cluster's address; this machine when None.
        tls: For the cluster.
        wait_s: How long to wait for a worker of a target that has none.
        out: The folder; ``repaconv-out/sweep-<matrix>`` when None.
        progress: See `Progress`.

    Returns:
        The artefact. A cell that failed says why and fails nothing else; what is done stays done, whatever ends this.

    Raises:
        EnvironmentProblem: If the cluster does not answer or lacks a kind of worker.
        UsageProblem: If the matrix is not one, or a file is there already that is somebody else's.
    """
    path = Path(matrix)
    wanted = read_matrix(path)
    folder = Path(out) if out else runs.OUT / f"sweep-{path.stem}"
    target_path = folder / "sweep.json"
    rows: dict[Cell, SweepRow] = {}
    jobs: dict[str, tuple[Cell, Job]] = {}
    contents: dict[str, Path] = {}
    cells = [
        (entry, Cell(model=name, target=target, precision=precision, batch=batch))
        for name, entry in _named(wanted.models).items()
        for target in wanted.targets
        for precision in wanted.precisions
        for batch in wanted.batches
    ]
    require_ours(target_path, "sweep")
    for _, cell in cells:
        require_ours(_place(folder, cell), "cell")
    for number, (entry, cell) in enumerate(cells):
        progress(f"prepare {cell.model} for {cell.target}, {cell.precision}", number, len(cells))
        try:
            model, size = _model(entry, cell, path.parent, folder)
        except RepaconvError as problem:
            rows[cell] = _row(cell, problem=f"{problem.message} {problem.hint}".strip())
            continue
        named = Model(name=f"{cell.model}, {cell.precision}", sha256=sha256_of(model))
        job = job_of(
            resolved(cell.target),
            (named,),
            batch=cell.batch,
            image_size=size,
            threads=wanted.threads,
            rounds=wanted.rounds,
            seed=wanted.seed,
        )
        kept = _kept(folder, cell)
        if kept is not None and kept.job == job.id:
            rows[cell] = _row(cell, kept)
            continue
        jobs[job.id] = (cell, job)
        contents[named.sha256] = model

    def landed(found: Landed) -> None:
        cell = jobs[found.job.id][0]
        if found.result is None:
            rows[cell] = _row(cell, problem=found.problem)
            return
        done = Done(
            cell=cell,
            job=found.job.id,
            worker=found.worker,
            attempts=found.attempts,
            result=BenchArtefact.model_validate(found.result),
        )
        write_artefact(_place(folder, cell), done)
        rows[cell] = _row(cell, done)

    resumed = len([row for row in rows.values() if not row.problem])
    if jobs and scheduler:
        with connected(scheduler, tls or Tls()) as client:
            loaded = {sha256: file.read_bytes() for sha256, file in contents.items()}
            ordered = [job for _, job in jobs.values()]
            run_jobs(client, ordered, loaded, wait_s=wait_s, progress=progress, landed=landed)
    else:
        _here(jobs, contents, landed, progress)
    artefact = SweepArtefact(
        made_by=made_by(),
        verdict="failed" if any(row.problem for row in rows.values()) else "passed",
        matrix=path.name,
        resumed=resumed,
        rows=tuple(rows[cell] for _, cell in cells),
    )
    put(target_path, artefact)
    return with_files(artefact, [path], [target_path])


def _here(jobs: Mapping[str, tuple[Cell, Job]], contents: Mapping[str, Path], landed: Any, progress: Progress) -> None:
    """One after the other on this machine."""
    for number, (cell, job) in enumerate(jobs.values()):
        progress(f"{cell.model} on {cell.target}, {cell.precision}, batch {cell.batch}", number, len(jobs))
        try:
            needed = {model.sha256: contents[model.sha256].read_bytes() for model in job.models}
            landed(Landed(job, run_job(job.model_dump(mode="json"), needed), "", "this machine", 1))
        except RepaconvError as problem:
            landed(Landed(job, None, problem.message, "this machine", 1))


def _named(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    """Entries by names of their own: the checkpoint's stem, and as much more as tells them apart."""
    told = {" ".join([entry.checkpoint, *_told(entry)]): entry for entry in entries}
    stems = [Path(entry.checkpoint).stem for entry in told.values()]
    longer = [" ".join([Path(entry.checkpoint).stem, *_told(entry)]) for entry in told.values()]
    return {
        next((row[n] for row in (stems, longer) if row.count(row[n]) == 1), whole): entry
        for n, (whole, entry) in enumerate(told.items())
    }


def _told(entry: Entry) -> list[str]:
    """What an entry says besides its checkpoint."""
    method = [] if entry.method == "auto" else [entry.method]
    weights = [] if entry.weights is None else [f"weights={entry.weights}"]
    return [*method, *weights, *(f"{name}={value}" for name, value in sorted(entry.set.items()))]


def _model(entry: Entry, cell: Cell, beside: Path, folder: Path) -> tuple[Path, ImageSize]:
    """The cell's ONNX model, and the size of its images; folded and exported if it was not.

    Raises:
        RepaconvError: Whatever the fold or the export refuses, or fails at.
    """
    checkpoint = beside / entry.checkpoint
    key = {
        "entry": entry.model_dump(mode="json", exclude={"checkpoint"}),
        "checkpoint": sha256_of(checkpoint) if checkpoint.is_file() else "",
        "made_by": made_by(),
    }
    digest = sha256_of_bytes(canonical_json(key).encode())
    run = runs.Run(folder / "models" / f"{checkpoint.stem}-{digest[:16]}")
    if stage_of(run.fold_json) != "fold":
        settings = {name: str(value) for name, value in entry.set.items()}
        fold(checkpoint, method=entry.method, settings=settings, weights=entry.weights, out=run.folder)
    folded = read_artefact(run.fold_json, FoldArtefact)
    try:
        return _graph(run, folded, cell), folded.image_size
    except (UsageProblem, Refused):  # not there yet, or gone
        export(run.folder, target=cell.target, precision=cell.precision)
        return _graph(run, folded, cell), folded.image_size


def _graph(run: runs.Run, folded: FoldArtefact, cell: Cell) -> Path:
    found = export_for(run, folded, cell.target, cell.precision)
    runs.require_sound(run, folded, (found.artefact, found.path), unverified=False)
    return runs.graph_of(run, found.artefact)


def _place(folder: Path, cell: Cell) -> Path:
    """Where a cell's result is kept; names may hold what files' names may not."""
    digest = sha256_of_bytes(cell.model_dump_json().encode())[:16]
    name = re.sub(r"[^\w.=@-]", "_", f"{cell.model}-{cell.target}-{cell.precision}-{cell.batch}")
    return folder / "results" / f"{name}-{digest}.json"


def _kept(folder: Path, cell: Cell) -> Done | None:
    path = _place(folder, cell)
    return read_artefact(path, Done) if path.is_file() else None


def _row(cell: Cell, done: Done | None = None, problem: str = "") -> SweepRow:
    latency = done.result.latencies[0] if done else None
    return SweepRow(
        model=cell.model,
        target=cell.target,
        precision=cell.precision,
        batch=cell.batch,
        p50_ms=latency.p50_ms if latency else None,
        p95_ms=latency.p95_ms if latency else None,
        quality=done.result.quality.verdict if done else "",
        worker=done.worker if done else "",
        attempts=done.attempts if done else 0,
        problem=problem,
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise EnvironmentProblem(
            f"{path} is YAML, and PyYAML is not installed.",
            hint="pip install 'repaconv[farm]', or write it as TOML.",
            code="runtime.missing",
        ) from error
    try:
        table = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"the matrix {path} cannot be read: {why_unreadable(error)}.",
            hint="Check its path.",
            code="matrix.unreadable",
        ) from error
    except yaml.YAMLError as error:
        raise UsageProblem(
            f"{path} is not YAML: {' '.join(str(error).split())}.", hint="See README, sweep.", code="sweep.invalid"
        ) from error
    if not isinstance(table, dict):
        raise UsageProblem(f"{path} is not a matrix.", hint="See README, sweep.", code="sweep.invalid")
    return table

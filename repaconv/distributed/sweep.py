"""sweep: checkpoints x targets x precisions x batches, measured here or on a cluster, resumed where it stopped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key
from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, RepaconvError, UsageProblem
from repaconv.core.file_replacement import put, require_ours
from repaconv.core.files import (
    alone_in,
    canonical_json,
    read_artefact,
    sha256_of,
    sha256_of_bytes,
    stage_of,
    write_artefact,
)
from repaconv.core.progress import Progress, silent
from repaconv.core.toml_positions import Lines, first_problem, read_toml, why_unreadable
from repaconv.distributed.benchmark_jobs import Job, Model, resolved, run_job
from repaconv.distributed.dask_cluster import Landed, connected, landed_of, run_jobs
from repaconv.distributed.options import ClusterOptions
from repaconv.results import SCHEMA_VERSION, BenchArtefact, FoldArtefact, ImageSize, Record, SweepArtefact, SweepRow
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.export.stage import export
from repaconv.stages.fold.stage import fold
from repaconv.stages.recipe.recipe_file import own_file
from repaconv.stages.shared.common_checks import load_target, made_by, with_files
from repaconv.stages.shared.option_definitions import by_name
from repaconv.stages.shared.run_exports import export_for

# --- The matrix of a sweep: what its file may say, and the cells that come of it.


class Entry(Record):
    """One checkpoint, graph or folder, as `fold` takes it; ``set`` is what the file does not tell."""

    checkpoint: str
    arch: str | None = None
    method: str = "auto"
    set: dict[str, str | float | int] = Field(default={})
    weights: str | None = None


class Matrix(Record):
    """A sweep: every model for every target in every precision at every batch."""

    models: tuple[Entry, ...] = Field(min_length=1)
    targets: tuple[str, ...] = Field(("x86-64",), min_length=1)
    precisions: tuple[Literal["fp32", "fp16", "bf16", "int8"], ...] = Field(("fp32",), min_length=1)
    batches: tuple[PositiveInt, ...] = Field((1,), min_length=1)
    threads: PositiveInt | None = None
    rounds: int | None = Field(None, ge=2)
    seed: int = Field(0, ge=0)


class Cell(Record):
    """One place in the matrix, with its words; ``model`` is the entry's name, which no other entry has."""

    model: str
    target: str
    precision: str
    batch: int


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
            first_problem(error, str(path), lines), hint="See docs/how-to/cluster.md.", code="sweep.invalid"
        ) from error


def cells_of(matrix: Matrix) -> list[tuple[Entry, Cell]]:
    """All of them in order."""
    return [
        (entry, Cell(model=name, target=target, precision=precision, batch=batch))
        for name, entry in _named(matrix.models).items()
        for target in matrix.targets
        for precision in matrix.precisions
        for batch in matrix.batches
    ]


def loadable(target: str, beside: Path) -> str:
    """A matrix's target as `load_target` takes it: a file's path is relative to the matrix."""
    return str(beside / target) if target.partition("@")[0].endswith(".toml") else target


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
    arch = [] if entry.arch is None else [entry.arch]
    return [*method, *arch, *weights, *(f"{name}={value}" for name, value in sorted(entry.set.items()))]


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
            f"{path} is not YAML: {' '.join(str(error).split())}.",
            hint="See docs/how-to/cluster.md.",
            code="sweep.invalid",
        ) from error
    if not isinstance(table, dict):
        raise UsageProblem(
            f"{path} does not contain a matrix of models, targets, precisions and batch sizes.",
            hint="See docs/how-to/cluster.md.",
            code="sweep.invalid",
        )
    return table


# --- sweep: checkpoints x targets x precisions x batches, measured here or on a cluster, resumed where it stopped.


class Done(Record):
    """What is kept of a cell: which job it was, by what and on what kind of machine it was done, and its result."""

    schema_version: int = SCHEMA_VERSION
    stage: str = "cell"
    cell: Cell
    job: str
    by: dict[str, str] = Field(default={})
    worker: str
    attempts: int
    result: BenchArtefact


def sweep_by(
    cluster: ClusterOptions, matrix: str | Path, *, out: str | Path | None = None, progress: Progress = silent
) -> SweepArtefact:
    """Fold and export what is missing, measure what was not, and put all of it side by side.

    Args:
        matrix: A .toml or .yaml file; paths in it are relative to it.
        order: What is asked for.
        out: The folder; ``repaconv-out/sweep-<matrix>`` when None.
        progress: See `Progress`.

    Returns:
        The artefact. A cell that failed says why and fails nothing else; what is done stays done, whatever ends this,
        and is measured again only where it was inconclusive, or came from another machine, runtime or version.

    Raises:
        EnvironmentProblem: If the cluster does not answer or lacks a kind of worker.
        UsageProblem: If the matrix is not one, or a file is there already that is somebody else's.
    """
    path = Path(matrix)
    folder = Path(out) if out else run_folder.OUT / f"sweep-{path.stem}"
    with alone_in(folder):
        return _swept(_Sweep(read_matrix(path), path.parent, folder, cluster), path, progress)


def _swept(state: _Sweep, path: Path, progress: Progress) -> SweepArtefact:
    cluster = state.cluster
    state.require_ours()
    for number, (entry, cell) in enumerate(state.cells):
        progress(f"prepare {cell.model} for {cell.target}, {cell.precision}", number, len(state.cells))
        state.prepare(entry, cell)
    resumed = len([row for row in state.rows.values() if not row.problem])
    if state.jobs and cluster.scheduler:
        with connected(cluster) as client:
            loaded = {sha256: file.read_bytes() for sha256, file in state.contents.items()}
            ordered = [job for _, job in state.jobs.values()]
            run_jobs(client, ordered, loaded, wait_s=cluster.wait_s, progress=progress, landed=state.landed)
    else:
        _here(state.jobs, state.contents, state.landed, progress)
    artefact = SweepArtefact(
        made_by=made_by(),
        verdict="failed" if any(row.problem for row in state.rows.values()) else "passed",
        options=cluster.words(),
        matrix=path.name,
        resumed=resumed,
        rows=tuple(state.rows[cell] for _, cell in state.cells),
    )
    put(state.artefact, artefact)
    return with_files(artefact, [path], [state.artefact])


sweep = by_name(sweep_by, ClusterOptions)


class _Sweep:
    """A sweep on its way: what each cell needs, and what is known of it."""

    def __init__(self, matrix: Matrix, beside: Path, folder: Path, cluster: ClusterOptions) -> None:
        self.matrix, self.beside, self.folder, self.cluster = matrix, beside, folder, cluster
        self.cells = cells_of(matrix)
        self.artefact = folder / "sweep.json"
        self.rows: dict[Cell, SweepRow] = {}
        self.jobs: dict[str, tuple[list[Cell], Job]] = {}
        self.here: dict[str, dict[str, str]] = {}
        self.contents: dict[str, Path] = {}

    def require_ours(self) -> None:
        """Refuse to write over what is somebody else's."""
        require_ours(self.artefact, "sweep")
        for _, cell in self.cells:
            require_ours(_place(self.folder, cell), "cell")

    def prepare(self, entry: Entry, cell: Cell) -> None:
        """Its row, if it is known already or cannot be measured; else its job."""
        try:
            target = loadable(cell.target, self.beside)
            self.here[cell.target] = _by(target, self.cluster.scheduler)
            model, size = _model(entry, cell, target, self.beside, self.folder)
        except RepaconvError as problem:
            self.rows[cell] = _row(cell, problem=f"{problem.message} {problem.hint}".strip())
            return
        named = Model(name=f"{cell.model}, {cell.precision}", sha256=sha256_of(model))
        asked = {name: getattr(self.matrix, name) for name in ("threads", "rounds", "seed")}
        job = Job.of(resolved(target), (named,), BenchOptions(batch=cell.batch, image_size=size, **asked))
        kept = _kept(self.folder, cell)
        if (
            kept is not None
            and (kept.job, kept.by) == (job.id, self.here[cell.target])
            and not kept.result.inconclusive
        ):
            self.rows[cell] = _row(cell, kept)
            return
        self.jobs.setdefault(job.id, ([], job))[0].append(cell)
        self.contents[named.sha256] = model

    def landed(self, found: Landed) -> None:
        """Keep a result for each cell that it is of."""
        for cell in self.jobs[found.job.id][0]:
            if found.result is None:
                self.rows[cell] = _row(cell, problem=found.problem)
                continue
            done = Done(
                cell=cell,
                job=found.job.id,
                by=self.here[cell.target],
                worker=found.worker,
                attempts=found.attempts,
                result=found.result,
            )
            write_artefact(_place(self.folder, cell), done)
            self.rows[cell] = _row(cell, done)


def _here(
    jobs: Mapping[str, tuple[list[Cell], Job]], contents: Mapping[str, Path], landed: Any, progress: Progress
) -> None:
    """One after the other on this machine."""
    for number, ((cell, *_), job) in enumerate(jobs.values()):
        progress(f"{cell.model} on {cell.target}, {cell.precision}, batch {cell.batch}", number, len(jobs))
        try:
            needed = {model.sha256: contents[model.sha256].read_bytes() for model in job.models}
            landed(landed_of(job, run_job(job.model_dump(mode="json"), needed), "this machine", 1))
        except RepaconvError as problem:
            landed(Landed(job, None, problem.message, "this machine", 1))


def _by(target: str, scheduler: str | None) -> dict[str, str]:
    """What a figure depends on besides its job. Of a cluster's machines that is known only once they have answered.

    Raises:
        EnvironmentProblem: If this machine is to measure, and has not got the target's runtime.
    """
    if scheduler:
        return {**made_by(), "machine": "a worker"}
    engine = plugins.load(plugins.ENGINES, load_target(target).runtime)
    return {**made_by(), "machine": machine_key(fingerprint(())), "runtime": f"{engine.name} {engine.version()}"}


def _digests(path: Path) -> str:
    """Of a file, or of all files of a folder; empty if there is neither."""
    if path.is_dir():
        found = {each.name: sha256_of(each) for each in sorted(path.iterdir()) if each.is_file()}
        return sha256_of_bytes(canonical_json(found).encode())
    return sha256_of(path) if path.is_file() else ""


def _model(entry: Entry, cell: Cell, target: str, beside: Path, folder: Path) -> tuple[Path, ImageSize | None]:
    """The cell's ONNX model, and the size of its images; folded and exported if it was not.

    Raises:
        RepaconvError: Whatever the fold or the export refuses, or fails at.
    """
    checkpoint, own = beside / entry.checkpoint, own_file(entry.arch or "")
    key = {
        "entry": entry.model_dump(mode="json", exclude={"checkpoint"}),
        "checkpoint": _digests(checkpoint),
        **({"code": _digests(beside / own)} if own else {}),
        "made_by": made_by(),
    }
    digest = sha256_of_bytes(canonical_json(key).encode())
    run = run_folder.Run(folder / "models" / f"{checkpoint.stem}-{digest[:16]}")
    if stage_of(run.fold_json) != "fold":
        settings = {name: str(value) for name, value in entry.set.items()}
        arch = str(beside / own) + str(entry.arch)[len(own) :] if own else entry.arch
        fold(checkpoint, method=entry.method, arch=arch, settings=settings, weights=entry.weights, out=run.folder)
    folded = run_folder.fold_of(run)
    try:
        return _graph(run, folded, target, cell.precision), folded.image_size
    except (UsageProblem, Refused):  # not there yet, or gone
        export(run.folder, target=target, precision=cell.precision)
        return _graph(run, folded, target, cell.precision), folded.image_size


def _graph(run: run_folder.Run, folded: FoldArtefact, target: str, precision: str) -> Path:
    found = export_for(run, folded, target, precision)
    run_folder.require_sound(run, folded, (found.artefact, found.path), unverified=False)
    return run_folder.graph_of(run, found.artefact)


def _place(folder: Path, cell: Cell) -> Path:
    """Where a cell's result is kept; names may hold what files' names may not."""
    digest = sha256_of_bytes(cell.model_dump_json().encode())[:16]
    name = re.sub(r"[^\w.=@-]", "_", f"{cell.model}-{cell.target}-{cell.precision}-{cell.batch}")
    return folder / "results" / f"{name}-{digest}.json"


def _kept(folder: Path, cell: Cell) -> Done | None:
    with suppress(Refused):  # none, or of another version
        return read_artefact(_place(folder, cell), Done)
    return None


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

"""Sweep: benchmark all combinations of models, targets, precisions and batch sizes, on this machine or a cluster."""

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
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import (
    canonical_json,
    lock_folder,
    read_artefact,
    require_no_tilde,
    sha256_of,
    sha256_of_bytes,
    stage_of,
    write_artefact,
)
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import files_of
from repaconv.core.toml_positions import Positions, first_problem, read_toml, text_of_file, why_unreadable
from repaconv.distributed.benchmark_jobs import Job, Model, run_job, target_definition
from repaconv.distributed.dask_cluster import JobOutcome, connect, outcome_of, run_jobs
from repaconv.distributed.options import ClusterOptions
from repaconv.graph.onnx_files import external_files_of, is_graph
from repaconv.results import SCHEMA_VERSION, BenchArtefact, FoldArtefact, ImageSize, Record, SweepArtefact, SweepRow
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.export.stage import export
from repaconv.stages.fold.stage import fold
from repaconv.stages.recipe.recipe_file import own_file
from repaconv.stages.shared.common_options import MOST_ROUNDS
from repaconv.stages.shared.exports_of_run import export_for
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target

# The matrix of a sweep: its file format and its cells


class Entry(Record):
    """One checkpoint, ONNX model or folder, with the options of `fold`; ``set`` are model settings missing from it.

    ``inputs`` are the images (.npz) that calibrate and evaluate its exports in lower precision.
    """

    checkpoint: str
    arch: str | None = None
    method: str = "auto"
    set: dict[str, str | float | int] = Field(default={})
    weights: str | None = None
    inputs: str | None = None


class Matrix(Record):
    """The lists of a sweep: every model is measured for every target, precision and batch size."""

    models: tuple[Entry, ...] = Field(min_length=1)
    targets: tuple[str, ...] = Field(("x86-64",), min_length=1)
    precisions: tuple[Literal["fp32", "fp16", "bf16", "int8"], ...] = Field(("fp32",), min_length=1)
    batches: tuple[PositiveInt, ...] = Field((1,), min_length=1)
    threads: PositiveInt | None = None
    rounds: int | None = Field(None, ge=2, le=MOST_ROUNDS)
    seed: int = Field(0, ge=0)


class Cell(Record):
    """One combination in the matrix. ``model`` is a name that is unique among the models."""

    model: str
    target: str
    precision: str
    batch: int


def read_matrix(path: Path) -> Matrix:
    """Read a matrix from a .toml or .yaml file.

    Raises:
        EnvironmentProblem: If it is .yaml and PyYAML is not installed.
        UsageProblem: If it is not a valid matrix; names the line if it is known.
        Refused: If a path in it begins with ``~``, which only a shell replaces.
    """
    lines: Positions | None = None
    if path.suffix in (".yaml", ".yml"):
        table = _read_yaml(path)
    else:
        table, lines = read_toml(path, "matrix")
    try:
        matrix = Matrix.model_validate(table)
    except ValidationError as error:
        raise _no_matrix(first_problem(error, str(path), lines)) from error
    targets = [target for target in matrix.targets if target.partition("@")[0].endswith(".toml")]
    of_models = (
        file for each in matrix.models for file in (each.checkpoint, own_file(each.arch or ""), each.inputs or "")
    )
    for named in (*targets, *of_models):
        require_no_tilde(Path(named), path.parent)
    return matrix


def _no_matrix(message: str) -> UsageProblem:
    return UsageProblem(
        message,
        hint="A matrix as TOML, each key on a line: models = [{checkpoint = 'ckpt.pth'}], targets = ['x86-64'], "
        "precisions = ['fp32', 'int8'], batches = [1, 8].",
        code="sweep.invalid",
    )


def cells_of(matrix: Matrix) -> list[tuple[Entry, Cell]]:
    """Return all cells in order, each with its model."""
    return [
        (entry, Cell(model=name, target=target, precision=precision, batch=batch))
        for name, entry in _unique_names(matrix.models).items()
        for target in matrix.targets
        for precision in matrix.precisions
        for batch in matrix.batches
    ]


def target_path(target: str, matrix_folder: Path) -> str:
    """Return a target as `load_target` takes it: the path of a target file is relative to the matrix."""
    return str(matrix_folder / target) if target.partition("@")[0].endswith(".toml") else target


def _unique_names(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    """Give each model a unique name: the checkpoint's stem, with its other settings if stems repeat."""
    described = {" ".join([entry.checkpoint, *_settings_of(entry)]): entry for entry in entries}
    stems = [Path(entry.checkpoint).stem for entry in described.values()]
    longer = [" ".join([Path(entry.checkpoint).stem, *_settings_of(entry)]) for entry in described.values()]
    return {
        next((row[n] for row in (stems, longer) if row.count(row[n]) == 1), whole): entry
        for n, (whole, entry) in enumerate(described.items())
    }


def _settings_of(entry: Entry) -> list[str]:
    """Return the settings of a model besides its checkpoint."""
    method = [] if entry.method == "auto" else [entry.method]
    weights = [] if entry.weights is None else [f"weights={entry.weights}"]
    arch = [] if entry.arch is None else [entry.arch]
    inputs = [] if entry.inputs is None else [f"inputs={entry.inputs}"]
    return [*method, *arch, *weights, *inputs, *(f"{name}={value}" for name, value in sorted(entry.set.items()))]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise EnvironmentProblem(
            f"{path} is YAML, and PyYAML is not installed.",
            hint="pip install 'repaconv[cluster]', or write it as TOML.",
            code="runtime.missing",
        ) from error
    try:
        table = yaml.safe_load(text_of_file(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"the matrix {path} cannot be read: {why_unreadable(error)}.",
            hint="Check its path.",
            code="matrix.unreadable",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date may be none, and lists too deep
        raise _no_matrix(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(table, dict):
        raise _no_matrix(f"{path} does not contain a matrix of models, targets, precisions and batch sizes.")
    return table


# Running a sweep


class StoredResult(Record):
    """The stored result of a cell, with its job and the versions and kind of machine that it depends on."""

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
    """Fold and export the missing models, measure the missing cells, and return all results in one table.

    Args:
        cluster: The cluster; without a scheduler, this machine measures.
        matrix: A .toml or .yaml file; paths in it are relative to its folder.
        out: The output folder; ``repaconv-out/sweep-<matrix>`` if None.
        progress: See `Progress`.

    Returns:
        The artifact. A failed cell has its problem, and the other cells are measured anyway. An interrupted sweep
        resumes: a cell is measured again only if its result was inconclusive or came from another machine, runtime or
        version.

    Raises:
        EnvironmentProblem: If the cluster does not answer or has no worker of a target.
        UsageProblem: If the matrix is invalid, or an output file exists that repaconv did not write.
    """
    path = Path(matrix)
    folder = Path(out) if out else run_folder.OUT / f"sweep-{run_folder.utf8_stem(path)}"
    with lock_folder(folder):
        return _run_sweep(_Sweep(read_matrix(path), path.parent, folder, cluster), path, progress)


def _run_sweep(state: _Sweep, path: Path, progress: Progress) -> SweepArtefact:
    cluster = state.cluster
    state.require_ours()
    for number, (entry, cell) in enumerate(state.cells):
        progress(f"prepare {cell.model} for {cell.target}, {cell.precision}", number, len(state.cells))
        state.prepare(entry, cell)
    resumed = len([row for row in state.rows.values() if not row.problem])
    if state.jobs and cluster.scheduler:
        with connect(cluster) as client:
            loaded = {sha256: file.read_bytes() for sha256, file in state.contents.items()}
            ordered = [job for _, job in state.jobs.values()]
            run_jobs(client, ordered, loaded, wait_s=cluster.wait_s, progress=progress, landed=state.landed)
    else:
        _run_locally(state.jobs, state.contents, state.landed, progress)
    artefact = SweepArtefact(
        made_by=made_by(),
        verdict="failed" if any(row.problem for row in state.rows.values()) else "passed",
        options=cluster.words(),
        matrix=path.name,
        resumed=resumed,
        rows=tuple(state.rows[cell] for _, cell in state.cells),
    )
    replace_artifact(state.artefact, artefact)
    return with_files(artefact, [path], [state.artefact])


sweep = by_name(sweep_by, ClusterOptions)


class _Sweep:
    """The state of a running sweep: the jobs that remain and the results so far."""

    def __init__(self, matrix: Matrix, matrix_folder: Path, folder: Path, cluster: ClusterOptions) -> None:
        self.matrix, self.matrix_folder, self.folder, self.cluster = matrix, matrix_folder, folder, cluster
        self.cells = cells_of(matrix)
        self.artefact = folder / "sweep.json"
        self.rows: dict[Cell, SweepRow] = {}
        self.jobs: dict[str, tuple[list[Cell], Job]] = {}
        self.here: dict[str, dict[str, str]] = {}
        self.contents: dict[str, Path] = {}

    def require_ours(self) -> None:
        """Refuse to overwrite files that repaconv did not write."""
        require_replaceable(self.artefact, "sweep")
        for _, cell in self.cells:
            require_replaceable(_result_path(self.folder, cell), "cell")

    def prepare(self, entry: Entry, cell: Cell) -> None:
        """Add the row of a cell if its result is stored or it cannot be measured; otherwise add its job."""
        try:
            target = target_path(cell.target, self.matrix_folder)
            self.here[cell.target] = _environment_of(target, self.cluster.scheduler)
            model, size = _model(entry, cell, target, self.matrix_folder, self.folder)
        except RepaconvError as problem:
            self.rows[cell] = _row(cell, problem=f"{problem.message} {problem.hint}".strip())
            return
        named = Model(name=f"{cell.model}, {cell.precision}", sha256=sha256_of(model))
        asked = {name: getattr(self.matrix, name) for name in ("threads", "rounds", "seed")}
        job = Job.of(target_definition(target), (named,), BenchOptions(batch=cell.batch, image_size=size, **asked))
        kept = _stored_result(self.folder, cell)
        if (
            kept is not None
            and (kept.job, kept.by) == (job.id, self.here[cell.target])
            and not kept.result.inconclusive
        ):
            self.rows[cell] = _row(cell, kept)
            return
        self.jobs.setdefault(job.id, ([], job))[0].append(cell)
        self.contents[named.sha256] = model

    def landed(self, found: JobOutcome) -> None:
        """Store an outcome for each cell of the job."""
        for cell in self.jobs[found.job.id][0]:
            if found.result is None:
                self.rows[cell] = _row(cell, problem=found.problem)
                continue
            done = StoredResult(
                cell=cell,
                job=found.job.id,
                by=self.here[cell.target],
                worker=found.worker,
                attempts=found.attempts,
                result=found.result,
            )
            write_artefact(_result_path(self.folder, cell), done)
            self.rows[cell] = _row(cell, done)


def _run_locally(
    jobs: Mapping[str, tuple[list[Cell], Job]], contents: Mapping[str, Path], landed: Any, progress: Progress
) -> None:
    """Run the jobs one after the other on this machine."""
    for number, ((cell, *_), job) in enumerate(jobs.values()):
        progress(f"{cell.model} on {cell.target}, {cell.precision}, batch {cell.batch}", number, len(jobs))
        try:
            needed = {model.sha256: contents[model.sha256].read_bytes() for model in job.models}
            landed(outcome_of(job, run_job(job.model_dump(mode="json"), needed), "this machine", 1))
        except RepaconvError as problem:
            landed(JobOutcome(job, None, problem.message, "this machine", 1))


def _environment_of(target: str, scheduler: str | None) -> dict[str, str]:
    """Return what a result depends on besides its job: versions, and this machine. Of a cluster the machine is unknown.

    Raises:
        EnvironmentProblem: If this machine is to measure but does not have the target's runtime.
    """
    if scheduler:
        return {**made_by(), "machine": "a worker"}
    engine = plugins.load(plugins.ENGINES, load_target(target).runtime)
    return {**made_by(), "machine": machine_key(fingerprint(())), "runtime": f"{engine.name} {engine.version()}"}


def _content_hash(path: Path) -> str:
    """Return the hash of a file, a graph's with its external weights, an index's with its parts, or of all files of a
    folder; empty if it does not exist."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if path.is_file() and is_graph(path):
        with suppress(Refused):  # no ONNX file: the fold reports it
            files += [path.parent / name for name in external_files_of(path)]
    with suppress(Refused):
        files += files_of(path)[1:]
    folder = path if path.is_dir() else path.parent
    found = {str(each.relative_to(folder)): sha256_of(each) for each in files if each.is_file()}
    if not path.is_dir() and len(found) < 2:
        return found.get(path.name, "")
    return sha256_of_bytes(canonical_json(found).encode("utf-8", "surrogateescape"))


def _model(entry: Entry, cell: Cell, target: str, matrix_folder: Path, folder: Path) -> tuple[Path, ImageSize | None]:
    """Return the ONNX model of a cell, and its image size; fold and export it first if it is missing.

    Raises:
        RepaconvError: If the fold or the export fails.
    """
    checkpoint, own = matrix_folder / entry.checkpoint, own_file(entry.arch or "")
    images = matrix_folder / entry.inputs if entry.inputs else None
    key = {
        "entry": entry.model_dump(mode="json", exclude={"checkpoint", "inputs"}),
        "checkpoint": _content_hash(checkpoint),
        **({"code": _content_hash(matrix_folder / own)} if own else {}),
        **({"inputs": _content_hash(images)} if images else {}),
        "made_by": made_by(),
    }
    digest = sha256_of_bytes(canonical_json(key).encode())
    run = run_folder.Run(folder / "models" / f"{run_folder.utf8_stem(checkpoint)}-{digest[:16]}")
    if stage_of(run.fold_json) != "fold":
        settings = {name: str(value) for name, value in entry.set.items()}
        arch = str(matrix_folder / own) + str(entry.arch)[len(own) :] if own else entry.arch
        with run_folder.newest_kept():
            fold(checkpoint, method=entry.method, arch=arch, settings=settings, weights=entry.weights, out=run.folder)
    folded = run_folder.fold_of(run)
    try:
        return _graph(run, folded, target, cell.precision), folded.image_size
    except (UsageProblem, Refused):  # missing
        evaluated_on = {"inputs": images} if images and cell.precision != "fp32" else {}
        export(run.folder, target=target, precision=cell.precision, **evaluated_on)
        return _graph(run, folded, target, cell.precision), folded.image_size


def _graph(run: run_folder.Run, folded: FoldArtefact, target: str, precision: str) -> Path:
    found = export_for(run, folded, target, precision)
    run_folder.require_passed_checks(run, folded, (found.artefact, found.path), unverified=False)
    return run_folder.onnx_model_of(run, found.artefact)


def _result_path(folder: Path, cell: Cell) -> Path:
    """Return the path of a cell's stored result. Characters that file names must not contain are replaced."""
    digest = sha256_of_bytes(cell.model_dump_json().encode())[:16]
    name = re.sub(r"[^\w.=@-]", "_", f"{cell.model}-{cell.target}-{cell.precision}-{cell.batch}")
    return folder / "results" / f"{name}-{digest}.json"


def _stored_result(folder: Path, cell: Cell) -> StoredResult | None:
    with suppress(Refused):  # missing, or of another version
        return read_artefact(_result_path(folder, cell), StoredResult)
    return None


def _row(cell: Cell, done: StoredResult | None = None, problem: str = "") -> SweepRow:
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

"""The matrix of a sweep: what its file may say, and the cells that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from repaconv.artefacts import Record
from repaconv.errors import EnvironmentProblem, UsageProblem
from repaconv.toml import Lines, first_problem, read_toml, why_unreadable


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

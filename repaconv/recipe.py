"""A recipe: what to do with one checkpoint and what must hold, as TOML that is committed beside the code.

checkpoint = "weights/deit.pth"

[set]
num_heads = 3

[verify]
inputs = "weights/deit.npz"
require = ["recorded"]

[export]
precisions = ["fp32", "int8"]

[bench]
baseline = "baselines.json"
max_regression = 0.05
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from repaconv.artefacts import Record
from repaconv.errors import UsageProblem
from repaconv.toml import first_problem, line_of, read_toml


class _Section(Record):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VerifySection(_Section):
    """What the links are run on, and what is allowed; see `repaconv.verify`."""

    inputs: str | None = None
    images: str | None = None
    classes: str | None = None
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    rtol: dict[str, float] = Field(default={})
    atol: dict[str, float] = Field(default={})
    require: tuple[str, ...] = ()
    engine: str | None = None


class ExportSection(_Section):
    """Which graphs are made; see `repaconv.export`."""

    target: str = "x86-64"
    precisions: tuple[Literal["fp32", "fp16", "bf16", "int8"], ...] = ("fp32",)
    batch: int | None = Field(default=None, ge=1)
    image_size: int | tuple[int, int] | None = None
    simplify: bool = True
    with_preprocessing: bool = False
    inputs: str | None = None
    images: str | None = None


class BenchSection(_Section):
    """What is measured, and how much slower than the baseline it may be; see `repaconv.bench`.

    ``target`` is that of the export where it is left out. ``against`` is a model that runs beside it, the training form
    if left out; ``require`` fails where there is no baseline to judge by.
    """

    target: str | None = None
    precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    against: str | None = None
    threads: int | None = Field(default=None, ge=1)
    batch: int | None = Field(default=None, ge=1)
    rounds: int | None = Field(default=None, ge=10)
    baseline: str | None = None
    require: bool = False
    max_regression: float = Field(default=0.05, gt=0)


class Recipe(_Section):
    """One checkpoint's way. Paths are relative to the recipe's folder.

    ``force`` takes settings that contradict the checkpoint; the gate then says so.
    """

    checkpoint: str
    method: str = "auto"
    force: bool = False
    weights: str | None = None
    out: str | None = None
    form: str = "default"
    set: dict[str, str | int | float | bool | list[int]] = Field(default={})
    verify: VerifySection = VerifySection()
    export: ExportSection | None = ExportSection()
    bench: BenchSection | None = None

    @property
    def settings(self) -> dict[str, str]:
        """``[set]`` as the command line would give it."""
        return {
            name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in self.set.items()
        }


IDLE: tuple[tuple[str, tuple[str, ...], Callable[[Any], Any], str], ...] = (
    ("verify", ("count",), lambda verify: verify.inputs, "an .npz is taken whole"),
    ("verify", ("seed",), lambda verify: verify.inputs or verify.images, "it is of random images"),
    ("verify", ("classes",), lambda verify: not verify.images, "it names the classes of images"),
    ("export", ("inputs", "images"), lambda export: set(export.precisions) <= {"fp32"}, "float32 has no ranges"),
    ("bench", ("require", "max_regression"), lambda bench: not bench.baseline, "there is no baseline"),
)
"""Keys of a section that do nothing where the others are so, and why; they are refused, as options are."""


def read_recipe(path: Path) -> tuple[Recipe, dict[tuple[str, ...], int]]:
    """A recipe, and the line of each of its keys.

    Raises:
        UsageProblem: If it cannot be read, with the line that is wrong.
    """
    plain, lines = read_toml(path, "recipe")
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        keys = tuple(str(key) for key in first["loc"])
        known = f"Known here: {', '.join(_known(keys))}." if first["type"] == "extra_forbidden" else "See README.md."
        raise UsageProblem(first_problem(error, str(path), lines), hint=known, code="recipe.invalid") from error
    for section, keys, where, why in IDLE:
        given = getattr(recipe, section)
        idle = [key for key in keys if given is not None and key in given.model_fields_set]
        if idle and where(given):
            raise UsageProblem(
                f"{path}:{line_of(lines, (section, idle[0]))}: {section}.{idle[0]} would do nothing here: {why}.",
                hint="Leave it out.",
                code="recipe.idle",
            )
    return recipe, lines


def _known(keys: tuple[str, ...]) -> list[str]:
    sections: dict[str, Any] = {"verify": VerifySection, "export": ExportSection, "bench": BenchSection}
    return list((sections.get(keys[0], Recipe) if len(keys) > 1 else Recipe).model_fields)

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from repaconv.artefacts import Record
from repaconv.errors import UsageProblem, nearest
from repaconv.orders.knobs import Knob, knobs
from repaconv.orders.stages import BenchOrder, ExportOrder, Target, VerifyOrder
from repaconv.toml import Lines, line_of, problems, read_toml

Precision = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class ExportSection(ExportOrder):
    """Which graphs are made: one a precision."""

    precisions: Annotated[tuple[Precision, ...], Knob("In which the graph is exported, each apart.")] = ("fp32",)


@dataclass(frozen=True, kw_only=True)
class BenchSection(BenchOrder):
    """What is measured, and how much slower than the baseline it may be.

    ``target`` is that of the export where it is left out.
    """

    target: Target = ""
    precision: Annotated[Precision, Knob("Which of the run's ONNX models.")] = "fp32"
    rounds: Annotated[int | None, Knob("Measured, interleaved rounds.", least=10)] = None
    require: Annotated[bool, Knob("Fail where there is no baseline to judge by.")] = False
    max_regression: Annotated[float, Knob("How much longer than the baseline it may take."), Field(gt=0)] = 0.05


SECTIONS = {"verify": VerifyOrder, "export": ExportSection, "bench": BenchSection}

NOT_HERE = {
    "verify": ("checkpoint", "drift", "out"),
    "export": ("precision", "form", "unverified"),
    "bench": ("form", "update_baseline", "accept_inconclusive", "unverified", "out"),
}
"""What a section's order may be asked for elsewhere, and no recipe says."""


class Recipe(Record):
    """One checkpoint's, ONNX graph's or Hugging Face folder's way. Paths are relative to the recipe's folder.

    ``sha256`` pins the checkpoint: another file is refused.
    ``arch`` is what builds a network of no known method, as ``fold --arch`` has it; a ``FILE.py:FUNCTION`` is run.
    ``force`` takes settings that contradict the checkpoint; the gate then says so.
    """

    checkpoint: str
    arch: str | None = None
    method: str = "auto"
    force: bool = False
    weights: str | None = None
    sha256: str | None = None
    out: str | None = None
    form: str = "default"
    set: dict[str, str | int | float | bool | list[int]] = Field(default={})
    verify: VerifyOrder = VerifyOrder()
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


UNKNOWN = (": extra inputs", ": unexpected keyword argument")
"""What pydantic says of a key that there is not; `_unknown` says it better."""


class Wrong(NamedTuple):
    """One thing that is wrong with a recipe."""

    line: int
    message: str
    hint: str
    code: str


class RecipeProblem(UsageProblem):
    """All that is wrong with a recipe, by line."""

    def __init__(self, wrong: Sequence[Wrong]) -> None:
        self.wrong = tuple(sorted(wrong))
        message = "\n".join(each.message for each in self.wrong)
        super().__init__(message, hint=self.wrong[0].hint, code=self.wrong[0].code)


def read_recipe(path: Path) -> tuple[Recipe, Lines]:
    """A recipe, and the line of each of its keys.

    Raises:
        UsageProblem: If it cannot be read.
        RecipeProblem: Of all that is wrong in it.
    """
    plain, lines = read_toml(path, "recipe")
    wrong = _unknown(plain, path, lines)
    recipe = None
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        found = [Wrong(*each, "See docs/how-to/ci.md.", "recipe.invalid") for each in problems(error, str(path), lines)]
        wrong += [each for each in found if not any(kind in each.message for kind in UNKNOWN)]
    if recipe and not wrong:
        wrong = _idle(recipe, plain, path, lines)
    if recipe is None or wrong:
        raise RecipeProblem(wrong)
    return recipe, lines


def _idle(recipe: Recipe, plain: dict[str, Any], path: Path, lines: Lines) -> list[Wrong]:
    """Keys that would do nothing."""
    found = []
    for section, keys, where, why in IDLE:
        given = getattr(recipe, section)
        for key in (key for key in keys if key in plain.get(section, {})):
            if where(given):
                line = line_of(lines, (section, key))
                told = f"{path}:{line}: {section}.{key} would do nothing here: {why}."
                found.append(Wrong(line, told, "Leave it out.", "recipe.idle"))
    return found


def _unknown(plain: dict[str, Any], path: Path, lines: Lines) -> list[Wrong]:
    """Keys that there are not, with those that there are."""
    tables = {name: [each.name for each in knobs(order)] for name, order in SECTIONS.items()}
    known: dict[tuple[str, ...], list[str]] = {(): list(Recipe.model_fields)}
    known |= {(name,): [key for key in keys if key not in NOT_HERE[name]] for name, keys in tables.items()}
    found = []
    for table, keys in known.items():
        given = plain.get(table[0]) if table else plain
        for key in given if isinstance(given, dict) else ():
            if key not in keys:
                line = line_of(lines, (*table, key))
                told = f"{path}:{line}: {'.'.join((*table, key))}: extra inputs are not permitted."
                hint = f"{nearest(key, keys)}Known here: {', '.join(keys)}."
                found.append(Wrong(line, told, hint, "recipe.invalid"))
    return found


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors that complete TOML: what a section may have, in the words of its options."""
    found = Recipe.model_json_schema()
    for name, order in SECTIONS.items():
        keys = found["$defs"][order.__name__]["properties"]
        for each in knobs(order):
            if each.name in NOT_HERE[name]:
                del keys[each.name]
            else:
                keys[each.name]["description"] = each.knob.help
    return found

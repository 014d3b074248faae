"""A recipe is a TOML file that says what to do with one checkpoint and what must hold.

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

import copy
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError

from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.core.files import exists, require_no_tilde
from repaconv.core.toml_positions import InvalidToml, Position, Positions, Problem, position_of, problems, read_toml
from repaconv.deprecation import Deprecation
from repaconv.results import Record, TaskName
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.build.options import BuildOptions
from repaconv.stages.bundle.options import BundleOptions
from repaconv.stages.convert.options import ConvertOptions
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.shared.common_options import CLASSES_OF_IMAGES, Target, is_tune_result
from repaconv.stages.shared.option_dataclasses import (
    NoEffect,
    Option,
    OptionField,
    Options,
    deprecations,
    options_of,
    setting_text,
)
from repaconv.stages.verify.options import VerifyOptions

# Sections and keys

Precision = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class VerifySection(VerifyOptions):
    """What is verified, on which images, and how accurate every version of the network must be.

    The limits are not options of `verify`: they are compared with its result each time.
    """

    min_top1: Annotated[
        float | None,
        Option("Lowest top-1 accuracy in percent, e.g. 75.0; needs images with labels.", recorded=False),
        Field(gt=1, le=100),
    ] = None
    max_drop: Annotated[
        float,
        Option(
            "How many points the top-1 accuracy may be below [reference] top1; with labels of another task, how many "
            "points its metric may be below that of the original network.",
            recorded=False,
        ),
        Field(ge=0, lt=100),
    ] = 1.0
    max_disagreement: Annotated[
        float | None,
        Option(
            "Largest share of changed top-1 predictions of a lossy version, e.g. 0.05, or of what changes in the "
            "network's task.",
            recorded=False,
        ),
        Field(ge=0, le=1),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExportSection(ExportOptions):
    """Which ONNX models are exported: one per precision."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(("simplifier",), lambda options: not options.simplify, "no simplifier is run"),
        NoEffect(
            ("inputs", "images", "classes", "keep_fp32"),
            lambda options: set(options.precisions) <= {"fp32"} and not is_tune_result(options.preset),
            "it is for a lower precision, and precisions has none",
        ),
        CLASSES_OF_IMAGES,
    )

    precisions: Annotated[tuple[Precision, ...], Option("Precisions to export; one ONNX model each.")] = ("fp32",)


@dataclass(frozen=True, kw_only=True)
class BenchSection(BenchOptions):
    """What is measured, and how much slower than the baseline it may be.

    ``target`` is the export's if it is left out.
    """

    target: Target = ""
    precision: Annotated[Precision, Option("Precision of the ONNX model to measure.")] = "fp32"
    rounds: Annotated[int | None, Option("Number of measured, interleaved rounds.", least=10)] = None
    require: Annotated[bool, Option("Fail if there is no baseline to compare with.")] = False
    max_regression: Annotated[float, Option("Largest latency increase over the baseline, e.g. 0.05."), Field(gt=0)] = (
        0.05
    )


@dataclass(frozen=True, kw_only=True)
class BuildSection(BuildOptions):
    """Which engine is built; ``target`` is the export's if it is left out."""

    target: Target = ""
    precision: Annotated[Precision, Option("Precision of the engine and of its ONNX model.")] = "fp32"


@dataclass(frozen=True, kw_only=True)
class BundleSection(BundleOptions):
    """What is packed for a board; ``target`` is the export's, the images are those of verify, if they are left out."""

    target: Target = ""


@dataclass(frozen=True, kw_only=True)
class ReportSection(Options):
    """The report of the run."""

    format: Annotated[Literal["html", "markdown", "json"], Option("Format of the report.")] = "html"
    paper: Annotated[bool, Option("Include the figures of the paper.")] = True


SECTIONS: dict[str, type[Options]] = {
    "convert": ConvertOptions,
    "verify": VerifySection,
    "export": ExportSection,
    "build": BuildSection,
    "bundle": BundleSection,
    "bench": BenchSection,
    "report": ReportSection,
}

NOT_IN_RECIPES: dict[str, tuple[str, ...]] = {
    "convert": ("settings", "weights", "out", "force"),
    "build": ("preset", "allow_unverified"),
    "bundle": ("checkpoint", "preset", "allow_unverified", "out"),
    "report": (),
    "verify": ("task", "checkpoint", "drift", "out"),
    "export": ("task", "precision", "preset", "allow_unverified"),
    "bench": ("preset", "update_baseline", "accept_inconclusive", "allow_unverified", "out"),
}
"""Options of a section's stage that a recipe may not set."""


OPTIONAL = ("reference", "convert", "export", "build", "bundle", "bench", "report")
"""Sections that a recipe may leave out; ``false`` removes one that the extended recipe has."""


class Reference(Record):
    """Published figures of the network, and what to expect here; only ``top1`` is enforced."""

    source: str = Field(description="Source of the figures: a paper and its table.")
    model: str = Field(default="", description="Name of the model in the source.")
    top1: float | None = Field(
        default=None,
        description="Top-1 accuracy in percent, e.g. 81.3; enforced where the images of [verify] have labels.",
        gt=1,
        le=100,
    )
    parameters: str = Field(default="", description="Number of parameters, as printed in the source.")
    macs: str = Field(default="", description="Number of MACs, as printed in the source.")
    speed: str = Field(default="", description="Speed, as printed in the source.")
    expect: str = Field(default="", description="What to expect from this recipe.")


class Recipe(Record):
    """What to do with one checkpoint, ONNX graph or Hugging Face folder.

    Paths are relative to the recipe's folder.
    """

    checkpoint: str = Field(description="Checkpoint, ONNX model or Hugging Face folder.")
    extends: str | None = Field(default=None, description="Recipe whose keys are used where this one has none.")
    arch: str | None = Field(
        default=None,
        description="How to build the network: timm:NAME, torchvision:NAME, or FILE.py:FUNCTION (which runs that "
        "file).",
    )
    task: TaskName | None = Field(
        default=None, description="What the network is for; decides by what lower precision is evaluated."
    )
    method: str = Field(default="auto", description="Method of the checkpoint, or auto to recognize it.")
    force: bool = Field(
        default=False,
        description="Accept settings that contradict the checkpoint, and a fold of which no output can be compared; "
        "results record it.",
    )
    weights: str | None = Field(
        default=None, description="Set of weights to read, if the file has several, e.g. model_ema."
    )
    sha256: str | None = Field(
        default=None, description="SHA-256 of the checkpoint; any other file is refused.", pattern="^[0-9a-fA-F]{64}$"
    )
    out: str | None = Field(default=None, description="Run folder; the default is repaconv-out/<name of the recipe>.")
    preset: str = Field(
        default="default", description="How graphs are written: default, official, fastest-known or tune's file."
    )
    set: dict[str, str | int | float | bool | list[int]] = Field(
        default={}, description="Settings that the checkpoint lacks, by name."
    )
    reference: Reference | None = Field(default=None, description="Published figures of this network.")
    convert: ConvertOptions | None = Field(
        default=None, description="Convert the network (lossy) instead of folding it."
    )
    verify: VerifySection = Field(default=VerifySection(), description="What is verified, on which images.")
    export: ExportSection | None = Field(
        default=ExportSection(), description="Which ONNX models are exported; false for none."
    )
    build: BuildSection | None = Field(
        default=None, description="Engine to build, if the target's runtime is installed."
    )
    bundle: BundleSection | None = Field(default=None, description="Bundle for a board that builds its own engines.")
    bench: BenchSection | None = Field(
        default=None, description="What is measured, and the baseline that it is compared with."
    )
    report: ReportSection | None = Field(default=ReportSection(), description="The report; false for none.")

    @property
    def settings(self) -> dict[str, str]:
        """``[set]`` as the command line would give it."""
        return {name: setting_text(value) for name, value in self.set.items()}


FORMER = (Deprecation("form", "preset", removed_in="0.3.0"),)
"""Top-level keys that were renamed; their former names are still read."""


def own_file(arch: str) -> str:
    """The Python file of ``FILE.py:FUNCTION``; empty for a library's architecture."""
    file = arch.partition(":")[0]
    return file if file.endswith(".py") else ""


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors that complete TOML; descriptions are those of the options."""
    found = Recipe.model_json_schema()
    for name in OPTIONAL:  # TOML has no null
        kinds = found["properties"][name]["anyOf"]
        found["properties"][name]["anyOf"] = [{"const": False} if kind == {"type": "null"} else kind for kind in kinds]
    for name, options in SECTIONS.items():
        keys = found["$defs"][options.__name__]["properties"]
        for each in options_of(options):
            if each.name in NOT_IN_RECIPES[name]:
                del keys[each.name]
            else:
                keys[each.name]["description"] = each.definition.help
    return found


# Reading and validation

TOP1_WITH_LABELS = "verify.labels are of another task than classes, and max_drop limits what is lost of its metric"
WITHOUT_EFFECT: tuple[tuple[str, tuple[str, ...], Callable[[Any], Any], str], ...] = (
    (
        "verify",
        ("min_top1", "max_drop"),
        lambda recipe: not (recipe.verify.inputs or recipe.verify.images),
        "random images have no labels; give verify.images or verify.inputs",
    ),
    (
        "verify",
        ("max_drop",),
        lambda recipe: (
            (recipe.verify.inputs or recipe.verify.images)
            and _reference_top1(recipe) is None
            and not recipe.verify.labels
        ),
        "there is no [reference] top1",
    ),
    ("verify", ("min_top1",), lambda recipe: recipe.verify.labels, TOP1_WITH_LABELS),
    ("reference", ("top1",), lambda recipe: recipe.verify.labels, TOP1_WITH_LABELS),
    ("", ("method", "arch"), lambda recipe: recipe.convert, "convert says what is made of it"),
    ("bench", ("require",), lambda recipe: not recipe.bench.baseline, "there is no baseline"),
)
"""Keys without effect in some situation, and why; the options declare the others themselves (`NO_EFFECT`)."""

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Types of pydantic's error about an unknown key; `_unknown` reports it with the known keys."""


class RecipeError(NamedTuple):
    """One error in a recipe."""

    at: Position
    text: str
    hint: str
    code: str

    @property
    def message(self) -> str:
        """The error with its place."""
        return f"{self.at}: {self.text}"


class RecipeProblem(UsageProblem):
    """All errors in a recipe, in the order of its lines."""

    def __init__(self, wrong: Sequence[RecipeError]) -> None:
        self.wrong = tuple(sorted(wrong, key=lambda each: (each.at.file, each.at)))
        message = "; ".join(each.message for each in self.wrong)
        super().__init__(message, hint=self.wrong[0].hint, code=self.wrong[0].code)


def read_recipe(path: Path) -> tuple[Recipe, Positions]:
    """Read a recipe, and the place of each of its keys.

    Raises:
        UsageProblem: If it cannot be read.
        RecipeProblem: If it has errors; all of them are reported.
    """
    found = check_recipe(path)
    if found.wrong:
        raise RecipeProblem(found.wrong)
    return found.recipe, found.lines


class CheckedRecipe(NamedTuple):
    """A recipe without its invalid values, the place of each key, and all errors in it.

    An invalid value is left out of ``recipe``, so that the files it names can be checked in the same pass.
    """

    recipe: Recipe
    lines: Positions
    wrong: tuple[RecipeError, ...]


def check_recipe(path: Path) -> CheckedRecipe:
    """Read a recipe, and find all errors in it.

    Raises:
        UsageProblem: If it cannot be read.
        RecipeProblem: If it is not TOML, or extends a file that does not exist.
    """
    try:
        plain, lines = _with_base(path, ())
    except InvalidToml as problem:
        description = problem.message.partition(": ")[2]
        raise RecipeProblem([RecipeError(problem.at, description, _line_hint(problem.at), problem.code)]) from problem
    where = str(path)
    recipe, invalid = _valid_part(
        {key: None if _is_disabled(key, value) else value for key, value in plain.items()}, where, lines
    )
    unknown = dict(_unknown(plain, where, lines))
    faulty = {keys[0] for keys in (*unknown, *(each.keys for each in invalid)) if keys}
    wrong = [*unknown.values()]
    wrong += [RecipeError(each.at, each.message, _remedy(each), "recipe.invalid") for each in invalid]
    return CheckedRecipe(recipe, lines, (*wrong, *_keys_without_effect(recipe, plain, where, lines, faulty)))


def _valid_part(plain: dict[str, Any], where: str, lines: Positions) -> tuple[Recipe, list[Problem]]:
    """The recipe without its invalid values, and their errors; unknown keys are reported by `_unknown`."""
    try:
        return Recipe.model_validate(plain), []
    except ValidationError as error:
        found = problems(error, where, lines)
    rest = copy.deepcopy(plain)
    for each in found:
        _drop(rest, each.keys)
    recipe, more = _valid_part({"checkpoint": "", **rest}, where, lines)
    return recipe, [each for each in (*found, *more) if each.error["type"] not in UNKNOWN]


def _drop(table: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Remove an invalid value; if the key is missing, its table; if a table on the way is missing, the first key."""
    *above, last = keys
    inner: Any = table
    for key in above:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if isinstance(inner, dict) and last in inner:
        del inner[last]
    else:
        table.pop(keys[0], None)


def _is_disabled(key: str, value: Any) -> bool:
    """Whether a section is set to ``false``."""
    return key in OPTIONAL and value is False


# Recipes that extend another


def _with_base(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], Positions]:
    """A recipe's table merged over the one that it extends, whose paths are made relative to this recipe.

    Raises:
        RecipeProblem: If the extended file does not exist, or extends this recipe.
    """
    plain, lines = _with_current_names(*read_toml(path, "recipe"))
    base = plain.get("extends")
    if not isinstance(base, str):
        return plain, lines
    other, at = path.parent / base, position_of(lines, ("extends",), str(path))
    try:
        require_no_tilde(Path(base), path.parent)
    except Refused as problem:
        raise RecipeProblem([RecipeError(at, f"extends: {problem.message}", problem.hint, problem.code)]) from problem
    if not exists(other) or not other.is_file():
        recipes = sorted(each.name for each in other.parent.glob("*.toml")) if exists(other.parent) else []
        hint = f"{did_you_mean(other.name, recipes)}Paths are relative to the recipe's folder."
        raise RecipeProblem([RecipeError(at, f"extends: there is no {other}.", hint, "recipe.missing")])
    if other.resolve() in (path.resolve(), *(each.resolve() for each in above)):
        text = f"extends: {base} extends this recipe itself."
        raise RecipeProblem([RecipeError(at, text, "Let one of them stand alone.", "recipe.extends")])
    below, places = _with_base(other, (*above, path))
    away = os.path.relpath(other.parent, path.parent)
    return _merged(_relocated(below, away, other.parent), plain), {**places, **lines}


def _with_current_names(plain: dict[str, Any], lines: Positions) -> tuple[dict[str, Any], Positions]:
    """A recipe's table and the places of its keys, with deprecated keys under their current names."""
    known: dict[tuple[str, ...], Deprecation] = {(old.what,): old for old in FORMER}
    known |= {
        (section, name): old for section, options in SECTIONS.items() for name, old in deprecations(options).items()
    }
    former = {keys: (*keys[:-1], old.use) for keys, old in known.items()}
    for keys in known.keys() & lines.keys():
        known[keys]._replace(what=f"the recipe key {'.'.join(keys)}", use=".".join(former[keys])).warn()

    def current(value: Any, above: tuple[str, ...] = ()) -> Any:
        if not isinstance(value, dict) or len(above) > 1:
            return value
        named = {(*above, name): each for name, each in value.items()}
        return {former.get(keys, keys)[-1]: current(each, keys) for keys, each in named.items()}

    return current(plain), {former.get(keys, keys): at for keys, at in lines.items()}


def _merged(below: Any, above: Any) -> Any:
    """Merge two tables key by key; a value of ``above`` that is not a table replaces the one below."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _relocated(plain: Mapping[str, Any], away: str, folder: Path) -> dict[str, Any]:
    """The table with its paths, which are relative to a folder, relative to another recipe's folder."""
    found = {}
    for key, value in plain.items():
        if isinstance(value, dict) and key in SECTIONS:
            found[key] = {name: _relocated_value(each, away, folder, key, name) for name, each in value.items()}
        else:
            found[key] = _relocated_value(value, away, folder, "", key)
    return found


def _relocated_value(value: Any, away: str, folder: Path, section: str, key: str) -> Any:
    """A value, relative to the other folder if it is a path."""
    if not isinstance(value, str) or not _is_path(value, section, key):
        return value
    try:
        require_no_tilde(Path(value), folder)
    except Refused:  # reported as it was written, unless the other recipe replaces it
        return value
    return Path(os.path.normpath(Path(away, value))).as_posix()


def _is_path(value: str, section: str, key: str) -> bool:
    """Whether the value of a key, at the top of a recipe or in a section, is a path."""
    if section:
        paths = {each.name for each in options_of(SECTIONS[section]) if each.is_path}
        return key in paths or (key == "target" and value.endswith(".toml"))
    if key == "checkpoint":
        return "://" not in value  # an address is no path
    if key == "arch":
        return bool(own_file(value))
    return key == "out" or (key == "preset" and value.endswith(".json"))


def paths_in(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """All paths that a recipe names, with their keys."""
    found = [("", name, getattr(recipe, name)) for name in Recipe.model_fields if name not in SECTIONS]
    for section in SECTIONS:
        if (options := getattr(recipe, section)) is not None:
            found += [(section, each.name, getattr(options, each.name)) for each in keys_of(section)]
    for section, key, value in found:
        if isinstance(value, (str, Path)) and _is_path(str(value), section, key):
            yield (section, key) if section else (key,), str(value)


# Errors


def _keys_without_effect(
    recipe: Recipe, plain: Mapping[str, Any], where: str, lines: Positions, faulty: Container[str]
) -> Iterator[RecipeError]:
    """Keys that have no effect; sections with an invalid key are skipped, since that key may give them one."""
    for section, keys, idle, why in WITHOUT_EFFECT:
        table: Any = plain.get(section) if section else plain
        known = not any(each in faulty for each in (section or "convert", "reference"))
        for key in keys if isinstance(table, dict) and known and idle(recipe) else ():
            if key in table:
                named = (section, key) if section else (key,)
                text = f"{'.'.join(named)} would do nothing here: {why}."
                yield RecipeError(position_of(lines, named, where), text, "Leave it out.", "recipe.idle")
    for section in SECTIONS:
        table, options = plain.get(section), getattr(recipe, section)
        for rule in options.NO_EFFECT if isinstance(table, dict) and section not in faulty and options else ():
            for key in rule.options:
                if key in table and rule.where(options):
                    text = f"{section}.{key} would do nothing here: {rule.why}."
                    yield RecipeError(position_of(lines, (section, key), where), text, "Leave it out.", "recipe.idle")


def _reference_top1(recipe: Recipe) -> float | None:
    return recipe.reference.top1 if recipe.reference else None


def _unknown(plain: Mapping[str, Any], where: str, lines: Positions) -> Iterator[tuple[tuple[str, ...], RecipeError]]:
    """Unknown keys, each with the known ones."""
    known: dict[tuple[str, ...], list[str]] = {(): list(Recipe.model_fields)}
    known |= {(name,): [each.name for each in keys_of(name)] for name in SECTIONS}
    for table, keys in known.items():
        given = plain.get(table[0]) if table else plain
        for key in given if isinstance(given, dict) else ():
            if key not in keys:
                text = f"{'.'.join((*table, key))}: unknown key."
                hint = f"{did_you_mean(key, keys)}{_elsewhere(key, table)}Known here: {', '.join(keys)}."
                wrong = RecipeError(position_of(lines, (*table, key), where), text, hint, "recipe.invalid")
                yield (*table, key), wrong


def _elsewhere(key: str, table: tuple[str, ...]) -> str:
    """A hint that names the sections that have such a key."""
    sections = [f"[{name}]" for name in SECTIONS if (name,) != table and key in [each.name for each in keys_of(name)]]
    return f"It is a key of {', '.join(sections)}. " if sections else ""


def keys_of(section: str) -> list[OptionField]:
    """The options that a section may set."""
    return [each for each in options_of(SECTIONS[section]) if each.name not in NOT_IN_RECIPES[section]]


def _remedy(problem: Problem) -> str:
    """Return what to write instead: the nearest value if there are a few, otherwise the meaning of the key."""
    if problem.error["type"] == "missing":
        return f'Write it, e.g. {problem.keys[-1]} = "...".'
    if problem.error["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", str(problem.error["ctx"]["expected"]))
        return f"{did_you_mean(str(problem.error['input']), known)}Known: {', '.join(known)}."
    means = _description(*problem.keys[:2])
    return f"It means: {means}" if means else "`repaconv new-recipe CKPT` writes a recipe with all keys."


def _description(section: str, key: str = "") -> str | None:
    """Description of a key, from its option or the schema."""
    if section in SECTIONS and key:
        return next((each.definition.help for each in keys_of(section) if each.name == key), None)
    fields = Reference.model_fields if section == "reference" and key else Recipe.model_fields
    name = key if section == "reference" and key else section
    return fields[name].description if name in fields else None


def _line_hint(at: Position) -> str:
    """The text of the wrong line."""
    lines = Path(at.file).read_text("utf-8").splitlines() or [""]
    return f"Mend that line: {lines[min(at.line, len(lines)) - 1].strip()}"

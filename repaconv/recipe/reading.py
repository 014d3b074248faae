"""A recipe from its file, and the files that it extends; all that is wrong is told at once, each with its place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from repaconv.errors import UsageProblem, nearest
from repaconv.orders.knobs import Asked, former_names, knobs
from repaconv.recipe.keys import FORMER, NOT_HERE, OPTIONAL, SECTIONS, Recipe, Reference, own_file
from repaconv.toml import At, Lines, NoToml, Problem, place_of, problems, read_toml

IDLE: tuple[tuple[str, tuple[str, ...], Callable[[Any], Any], str], ...] = (
    ("verify", ("count",), lambda verify: verify.inputs, "an .npz is taken whole"),
    ("verify", ("seed",), lambda verify: verify.inputs or verify.images, "it is of random images"),
    ("verify", ("classes",), lambda verify: not verify.images, "it names the classes of images"),
    ("export", ("inputs", "images"), lambda export: set(export.precisions) <= {"fp32"}, "float32 has no ranges"),
    ("", ("method", "arch"), lambda recipe: recipe.convert, "convert says what is made of it"),
    ("bench", ("require", "max_regression"), lambda bench: not bench.baseline, "there is no baseline"),
)
"""Keys of a section that do nothing where the others are so, and why; they are refused, as options are."""

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic says of a key that there is not; `_unknown` says it better."""


class Wrong(NamedTuple):
    """One thing that is wrong with a recipe."""

    at: At
    told: str
    hint: str
    code: str

    @property
    def message(self) -> str:
        """With its place."""
        return f"{self.at}: {self.told}"


class RecipeProblem(UsageProblem):
    """All that is wrong with a recipe, in the order of its lines."""

    def __init__(self, wrong: Sequence[Wrong]) -> None:
        self.wrong = tuple(sorted(wrong, key=lambda each: (each.at.file, each.at)))
        message = "; ".join(each.message for each in self.wrong)
        super().__init__(message, hint=self.wrong[0].hint, code=self.wrong[0].code)


def read_recipe(path: Path) -> tuple[Recipe, Lines]:
    """A recipe, and the place of each of its keys.

    Raises:
        UsageProblem: If it cannot be read.
        RecipeProblem: Of all that is wrong in it.
    """
    try:
        plain, lines = _whole(path, ())
    except NoToml as problem:
        told = problem.message.partition(": ")[2]
        raise RecipeProblem([Wrong(problem.at, told, _mend(problem.at), problem.code)]) from problem
    where, recipe = str(path), None
    wrong = list(_unknown(plain, where, lines))
    try:
        recipe = Recipe.model_validate({key: None if _off(key, value) else value for key, value in plain.items()})
    except ValidationError as error:
        found = [each for each in problems(error, where, lines) if each.error["type"] not in UNKNOWN]
        wrong += [Wrong(each.at, each.told, _remedy(each), "recipe.invalid") for each in found]
    if recipe and not wrong:
        wrong = list(_idle(recipe, plain, where, lines))
    if recipe is None or wrong:
        raise RecipeProblem(wrong)
    return recipe, lines


def _off(key: str, value: Any) -> bool:
    """Whether a section is left out."""
    return key in OPTIONAL and value is False


# --- extends --------------------------------------------------------------------------------------------


def _whole(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], Lines]:
    """A recipe's table with what it extends below it, whose paths are seen from here.

    Raises:
        RecipeProblem: If what it extends is not there, or is itself.
    """
    plain, lines = _with_current_names(*read_toml(path, "recipe"))
    base = plain.get("extends")
    if not isinstance(base, str):
        return plain, lines
    other, at = path.parent / base, place_of(lines, ("extends",), str(path))
    if other.resolve() in (path.resolve(), *(each.resolve() for each in above)):
        told = f"extends: {base} extends this recipe itself."
        raise RecipeProblem([Wrong(at, told, "Let one of them stand alone.", "recipe.extends")])
    if not other.is_file():
        beside = sorted(each.name for each in other.parent.glob("*.toml"))
        hint = f"{nearest(other.name, beside)}Paths are relative to the recipe's folder."
        raise RecipeProblem([Wrong(at, f"extends: there is no {other}.", hint, "recipe.missing")])
    below, places = _whole(other, (*above, path))
    away = os.path.relpath(other.parent, path.parent)
    return _over(_moved(below, away), plain), {**places, **lines}


def _with_current_names(plain: dict[str, Any], lines: Lines) -> tuple[dict[str, Any], Lines]:
    """A recipe's table and the places of its keys, with the keys of the previous release under their names of today."""
    former: dict[tuple[str, ...], tuple[str, ...]] = {(old,): (new,) for old, new in FORMER.items()}
    former |= {
        (section, old): (section, new)
        for section, order in SECTIONS.items()
        for old, new in former_names(order).items()
    }

    def current(value: Any, above: tuple[str, ...] = ()) -> Any:
        if not isinstance(value, dict) or len(above) > 1:
            return value
        named = {(*above, name): each for name, each in value.items()}
        return {former.get(keys, keys)[-1]: current(each, keys) for keys, each in named.items()}

    return current(plain), {former.get(keys, keys): at for keys, at in lines.items()}


def _over(below: Any, above: Any) -> Any:
    """Tables are joined key by key; all else is replaced."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def _moved(plain: Mapping[str, Any], away: str) -> dict[str, Any]:
    """The same with its paths as they are seen from a recipe elsewhere."""
    found = {}
    for key, value in plain.items():
        if isinstance(value, dict) and key in SECTIONS:
            found[key] = {name: _path(each, away, key, name) for name, each in value.items()}
        else:
            found[key] = _path(value, away, "", key)
    return found


def _path(value: Any, away: str, section: str, key: str) -> Any:
    """A value, moved if it is a path."""
    if not isinstance(value, str) or (key == "checkpoint" and "://" in value):  # an address is one from anywhere
        return value
    paths = {"checkpoint", "out"} if not section else {each.name for each in knobs(SECTIONS[section]) if each.is_path}
    path = key in paths or (key == "target" and value.endswith(".toml"))
    path |= not section and ((key == "arch" and bool(own_file(value))) or (key == "form" and value.endswith(".json")))
    return Path(os.path.normpath(Path(away, value))).as_posix() if path else value


# --- what is wrong --------------------------------------------------------------------------------------


def _idle(recipe: Recipe, plain: Mapping[str, Any], where: str, lines: Lines) -> Iterator[Wrong]:
    """Keys that would do nothing."""
    for section, keys, idle, why in IDLE:
        given = getattr(recipe, section) if section else recipe
        table: Any = plain.get(section) if section else plain
        for key in keys if isinstance(table, dict) and idle(given) else ():
            if key in table:
                named = (section, key) if section else (key,)
                told = f"{'.'.join(named)} would do nothing here: {why}."
                yield Wrong(place_of(lines, named, where), told, "Leave it out.", "recipe.idle")


def _unknown(plain: Mapping[str, Any], where: str, lines: Lines) -> Iterator[Wrong]:
    """Keys that there are not, with those that there are."""
    known: dict[tuple[str, ...], list[str]] = {(): list(Recipe.model_fields)}
    known |= {(name,): [each.name for each in keys_of(name)] for name in SECTIONS}
    for table, keys in known.items():
        given = plain.get(table[0]) if table else plain
        for key in given if isinstance(given, dict) else ():
            if key not in keys:
                told = f"{'.'.join((*table, key))}: extra inputs are not permitted."
                hint = f"{nearest(key, keys)}{_elsewhere(key, table)}Known here: {', '.join(keys)}."
                yield Wrong(place_of(lines, (*table, key), where), told, hint, "recipe.invalid")


def _elsewhere(key: str, table: tuple[str, ...]) -> str:
    """In which sections there is such a key, where it is not this one."""
    sections = [f"[{name}]" for name in SECTIONS if (name,) != table and key in [each.name for each in keys_of(name)]]
    return f"It is a key of {', '.join(sections)}. " if sections else ""


def keys_of(section: str) -> list[Asked]:
    """What a section may have."""
    return [each for each in knobs(SECTIONS[section]) if each.name not in NOT_HERE[section]]


def _remedy(problem: Problem) -> str:
    """What to write instead: the nearest value where there are a few, else what the key means."""
    if problem.error["type"] == "missing":
        return f'Write it, e.g. {problem.keys[-1]} = "...".'
    if problem.error["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", str(problem.error["ctx"]["expected"]))
        return f"{nearest(str(problem.error['input']), known)}Known: {', '.join(known)}."
    means = _means(*problem.keys[:2])
    return f"It means: {means}" if means else "See docs/how-to/recipes.md."


def _means(section: str, key: str = "") -> str | None:
    """What a key is for, in the words of its option or of the schema."""
    if section in SECTIONS and key:
        return next((each.knob.help for each in keys_of(section) if each.name == key), None)
    fields = Reference.model_fields if section == "reference" and key else Recipe.model_fields
    name = key if section == "reference" and key else section
    return fields[name].description if name in fields else None


def _mend(at: At) -> str:
    """What stands there."""
    lines = Path(at.file).read_text().splitlines() or [""]
    return f"Mend that line: {lines[min(at.line, len(lines)) - 1].strip()}"

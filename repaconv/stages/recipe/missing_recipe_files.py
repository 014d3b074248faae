"""Check that everything a recipe names exists before any work: targets, files, the user's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from repaconv.core import plugins
from repaconv.core.errors import Refused, RepaconvError, UsageProblem, did_you_mean
from repaconv.core.files import exists, require_no_tilde
from repaconv.core.toml_positions import Positions, position_of
from repaconv.onnx_export.fp16_and_int8 import QUANTIZERS
from repaconv.onnx_export.onnx_simplifiers import TOOLS
from repaconv.stages.recipe.recipe_file import Precision, Recipe, RecipeError, own_file, paths_in
from repaconv.stages.shared.common_options import is_tune_result
from repaconv.stages.shared.fetched_files import address_of
from repaconv.stages.shared.preset_choice import require_known_preset
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.tolerances import LINKS, tolerance

READ_FILES = {
    "convert": ("inputs", "images", "classes"),
    "verify": ("inputs", "images", "classes", "labels", "engine"),
    "export": ("inputs", "images", "classes"),
    "bundle": ("inputs", "images"),
    "bench": ("against",),
}
"""Keys of files and folders that are read, by section."""


def missing(recipe: Recipe, path: Path, lines: Positions) -> list[RecipeError]:
    """Everything that the recipe names and that does not exist, each with its place."""
    tildes = {each.keys: each for each in _tildes(recipe, path)}
    found = [*_targets(recipe, path), *_files(recipe, path), *_names(recipe), *_preset(recipe, path), *_links(recipe)]
    found = [*tildes.values(), *(each for each in found if each.keys not in tildes)]
    return [RecipeError(position_of(lines, each.keys, str(path)), *each[1:]) for each in found]


def no_checkpoint(recipe: Recipe, path: Path, lines: Positions) -> list[RecipeError]:
    """The error of a missing checkpoint, reported together with other errors; alone, `fold` refuses the input."""
    source = path.parent / recipe.checkpoint
    if not recipe.checkpoint or address_of(recipe.checkpoint) or exists(source):
        return []
    if any(each.keys == ("checkpoint",) for each in _tildes(recipe, path)):  # which `missing` reports
        return []
    text = f"checkpoint: there is no {source}."
    hint = "Paths are relative to the recipe's folder."
    return [RecipeError(position_of(lines, ("checkpoint",), str(path)), text, hint, "checkpoint.missing")]


class _Missing(NamedTuple):
    keys: tuple[str, ...]
    message: str
    hint: str
    code: str


def _tildes(recipe: Recipe, path: Path) -> Iterator[_Missing]:
    """Paths that begin with ``~``, which only a shell replaces."""
    for keys, name in paths_in(recipe):
        try:
            require_no_tilde(Path(name), path.parent)
        except Refused as problem:
            yield _Missing(keys, f"{'.'.join(keys)}: {problem.message}", problem.hint, problem.code)


def _targets(recipe: Recipe, path: Path) -> Iterator[_Missing]:
    for section in ("export", "build", "bundle", "bench"):
        name = getattr(getattr(recipe, section), "target", "")
        try:
            load_target(str(path.parent / name) if name.endswith(".toml") else name) if name else None
        except RepaconvError as problem:
            text = f"{section}.target: {problem.message}"
            yield _Missing((section, "target"), text, problem.hint, problem.code)


def _files(recipe: Recipe, path: Path) -> Iterator[_Missing]:
    """Missing files of all keys but the checkpoint; see `no_checkpoint`."""
    named: list[tuple[tuple[str, ...], Any]] = [(("arch",), own_file(recipe.arch or ""))]
    named += [
        ((section, key), getattr(getattr(recipe, section), key, None))
        for section, keys in READ_FILES.items()
        for key in keys
    ]
    named += [(("bench", "baseline"), recipe.bench and recipe.bench.baseline)]
    for keys, name in named:
        yield from _of_wrong_kind(keys, path.parent / name) if name else ()
        if name and keys != ("bench", "baseline") and not exists(path.parent / name):
            text = f"{'.'.join(keys)}: there is no {path.parent / name}."
            folder = (path.parent / name).parent
            known = [each.name for each in folder.iterdir()] if exists(folder) and folder.is_dir() else []
            near = did_you_mean(Path(name).name, known)
            yield _Missing(keys, text, f"{near}Paths are relative to the recipe's folder.", "recipe.missing")


def _of_wrong_kind(keys: tuple[str, ...], place: Path) -> Iterator[_Missing]:
    """A file where a folder of images is read, or a folder where a file is."""
    wanted, found = ("folder", "file") if keys[-1] == "images" else ("file", "folder")
    is_wrong = exists(place) and (place.is_file() if wanted == "folder" else place.is_dir())
    if is_wrong and keys[-1] in ("images", "inputs", "classes", "baseline"):
        yield _Missing(keys, f"{'.'.join(keys)}: {place} is a {found}.", f"Give a {wanted}.", "recipe.missing")


def _names(recipe: Recipe) -> Iterator[_Missing]:
    """Unknown names of methods, links, simplifiers and quantizers."""
    verify, simplifiers = recipe.verify, ("auto", *TOOLS)
    methods = ("auto", *plugins.registered(plugins.METHODS))
    exported: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = []
    if recipe.export:
        exported = [
            (("export", "simplifier"), recipe.export.simplifier, simplifiers),
            (("export", "quantizer"), recipe.export.quantizer or QUANTIZERS[0], QUANTIZERS),
        ]
    for keys, name, known in (
        (("method",), recipe.method, methods),
        *((("verify", "require"), name, LINKS) for name in verify.require),
        *((("verify", "rtol", name), name, LINKS) for name in verify.rtol or ()),
        *((("verify", "atol", name), name, LINKS) for name in verify.atol or ()),
        *exported,
    ):
        if name not in known:
            text = f"{'.'.join(keys)}: there is no {name!r}."
            yield _Missing(keys, text, f"{did_you_mean(name, known)}Known: {', '.join(known)}.", "recipe.unknown")


def _preset(recipe: Recipe, path: Path) -> Iterator[_Missing]:
    """A preset that is neither known by its name nor a file."""
    try:
        require_known_preset(recipe.preset, path.parent)
    except (Refused, UsageProblem) as problem:
        yield _Missing(("preset",), f"preset: {problem.message}", problem.hint, problem.code)


def _links(recipe: Recipe) -> Iterator[_Missing]:
    """Tolerances that no link can have, and required links of an export that no step of the recipe makes."""
    verify = recipe.verify
    limits = [("rtol", name, {"rtol": {name: value}}) for name, value in (verify.rtol or {}).items()]
    limits += [("atol", name, {"atol": {name: value}}) for name, value in (verify.atol or {}).items()]
    for kind, name, given in limits:
        try:
            tolerance(name, rtol=given.get("rtol"), atol=given.get("atol")) if name in LINKS else None
        except UsageProblem as problem:
            text = f"verify.{kind}.{name}: {problem.message}"
            yield _Missing(("verify", kind, name), text, problem.hint, problem.code)
    if recipe.export and is_tune_result(recipe.export.preset):
        return  # it sets the precision of its export
    precisions = recipe.export.precisions if recipe.export else ()
    for name in recipe.verify.require:
        precision = "fp32" if name == "onnx" else name
        if precision not in get_args(Precision) or precision in precisions:
            continue
        made = ["onnx" if each == "fp32" else each for each in precisions]
        other = f", or require {' or '.join(map(repr, made))} instead" if made else ""
        text = f"verify.require: {name!r} is the link of an export in {precision}, which the recipe does not make."
        hint = f"Add {precision!r} to export.precisions{other}." if recipe.export else "Remove export = false."
        yield _Missing(("verify", "require"), text, hint, "recipe.unknown")


def key_of(problem: RepaconvError, lines: Positions) -> tuple[str, ...]:
    """The recipe's key that an error of `fold` is about; empty if it is about the stage as a whole."""
    if problem.code.startswith("arch."):
        return ("arch",)
    given = [keys for keys in lines if len(keys) == 2 and keys[0] == "set"]
    candidates = ((keys, text) for text in (problem.message, problem.hint) for keys in given)
    return next((keys for keys, text in candidates if re.search(rf"\b{re.escape(keys[1])}\b", text)), ())


def in_recipe(hint: str) -> str:
    """A hint for the command line, reworded for a recipe."""
    hint = re.sub(r"repaconv fold (?:'[^']*'|\S+) (--(?:arch|weights|method)) ", r"\1 = ", hint)
    return re.sub(r"--(arch|weights|method|force)\b", r"the recipe's \1", hint).replace("--set", "[set]")

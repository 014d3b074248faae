"""What a recipe names and must be there before any work: targets, files, the user's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repaconv.errors import RepaconvError
from repaconv.recipe import Recipe, Wrong
from repaconv.steps.common import load_target
from repaconv.toml import Lines, line_of

READ = (("verify", ("inputs", "images", "classes")), ("export", ("inputs", "images")), ("bench", ("against",)))
"""Keys of files and folders that are read, by section."""


def missing(recipe: Recipe, path: Path, lines: Lines) -> list[Wrong]:
    """What is not there, by line."""
    return [*_targets(recipe, path, lines), *_files(recipe, path, lines)]


def _targets(recipe: Recipe, path: Path, lines: Lines) -> Iterator[Wrong]:
    for section in ("export", "bench"):
        name = getattr(getattr(recipe, section), "target", "")
        try:
            load_target(str(path.parent / name) if name.endswith(".toml") else name) if name else None
        except RepaconvError as problem:
            line = line_of(lines, (section, "target"))
            yield Wrong(line, f"{path}:{line}: {section}.target: {problem.message}", problem.hint, problem.code)


def _files(recipe: Recipe, path: Path, lines: Lines) -> Iterator[Wrong]:
    """The checkpoint says itself that it is gone: its refusal is that of the input."""
    named: list[tuple[tuple[str, ...], Any]] = [(("arch",), own_file(recipe.arch or ""))]
    named += [((section, key), getattr(getattr(recipe, section), key, None)) for section, keys in READ for key in keys]
    for keys, name in named:
        if name and not (path.parent / name).exists():
            line = line_of(lines, keys)
            told = f"{path}:{line}: {'.'.join(keys)}: there is no {path.parent / name}."
            yield Wrong(line, told, "Paths are relative to the recipe's folder.", "recipe.missing")


def own_file(arch: str) -> str:
    """The Python file of ``FILE.py:FUNCTION``; empty for a library's architecture."""
    file = arch.partition(":")[0]
    return file if file.endswith(".py") else ""


def key_of(problem: RepaconvError, lines: Lines) -> tuple[str, ...]:
    """The recipe's key that an error of fold is about; empty where its stage's own is meant."""
    if problem.code.startswith("arch."):
        return ("arch",)
    given = [keys for keys in lines if len(keys) == 2 and keys[0] == "set"]
    told = ((keys, text) for text in (problem.message, problem.hint) for keys in given)
    return next((keys for keys, text in told if re.search(rf"\b{re.escape(keys[1])}\b", text)), ())


def in_recipe(hint: str) -> str:
    """A hint for the command line in the words of a recipe."""
    return re.sub(r"--(arch|weights|method|force)\b", r"the recipe's \1", hint).replace("--set", "[set]")

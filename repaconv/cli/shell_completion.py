"""Shell completion: the values offered for each parameter. Files are left to the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

Completion = Callable[[str], list[str]]


def completion_of(parameter: str) -> Completion | None:
    """Return the completion function of a parameter of that name, in any command. Does not import torch."""
    known = COMPLETED.get(parameter)
    if known is None:
        return None

    def offered(incomplete: str) -> list[str]:
        return sorted({name for name in known() if name.startswith(incomplete)})

    return offered


def finished_words(environment: Mapping[str, str]) -> list[str]:
    """Return the words of the line to complete, without the program's name and without the last, unfinished word.

    Args:
        environment: The environment variables that contain the line: bash and other shells use different ones.
    """
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or ""
    return f"{line}|".split()[1:-1]


def runs() -> Iterator[str]:
    """Return the run folders in the current folder and in repaconv-out/."""
    return (str(found.parent) for pattern in ("*/fold.json", "repaconv-out/*/fold.json") for found in _here(pattern))


def recipes() -> Iterator[str]:
    """Return the TOML files in the current folder and in recipes/."""
    patterns = ("*.toml", "recipes/*.toml", "recipes/*/*.toml")
    return (str(found) for pattern in patterns for found in _here(pattern) if found.name != "pyproject.toml")


def methods() -> Iterable[str]:
    """Return the names of all registered methods."""
    from repaconv.core import plugins

    return plugins.registered(plugins.METHODS)


def targets() -> Iterable[str]:
    """Return the names of all registered targets. TOML files are completed by the shell."""
    from repaconv.core import plugins

    return plugins.registered(plugins.TARGETS)


def precisions() -> Iterable[str]:
    """Return the precisions of exports and engines."""
    return "fp32", "fp16", "bf16", "int8"


def runtimes() -> Iterable[str]:
    """Return the names of all registered engines."""
    from repaconv.core import plugins

    return plugins.registered(plugins.ENGINES)


def _here(pattern: str) -> Iterator[Path]:
    return Path().glob(pattern)


COMPLETED: dict[str, Callable[[], Iterable[str]]] = {
    "run": runs,
    "runs": runs,
    "model": runs,
    "source": runs,
    "reference": runs,
    "candidate": runs,
    "recipe": recipes,
    "recipes": recipes,
    "method": methods,
    "target": targets,
    "precision": precisions,
    "runtimes": runtimes,
}
"""The values offered, by the name of the parameter."""

"""What a shell offers where Tab is pressed; what is offered nowhere is left to the shell, which knows files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from typer.models import CommandInfo

from repaconv.core import plugins

Completion = Callable[[str], list[str]]


def completion_of(parameter: str) -> Completion | None:
    """What completes a parameter of that name, in any command; nothing of torch is imported for it."""
    known = COMPLETED.get(parameter)
    if known is None:
        return None

    def offered(incomplete: str) -> list[str]:
        return sorted({name for name in known() if name.startswith(incomplete)})

    return offered


def named_alone(commands: Sequence[CommandInfo], environment: Mapping[str, str]) -> list[CommandInfo]:
    """The command that stands in the line, where Tab was pressed behind it: building the others takes most of the time.

    Args:
        commands: All of them, with their names.
        environment: What the shell's script says: the line, by bash or by another shell.
    """
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or ""
    behind = len(line.split()) > 1 and len(f"{line}|".split()) > 2
    named = [each for each in commands if behind and name_of(each) == line.split()[1]]
    return named or list(commands)


def name_of(command: CommandInfo) -> str:
    """As it is typed."""
    return str(command.name or getattr(command.callback, "__name__", ""))


def runs() -> Iterator[str]:
    """Folders with a fold, here and in repaconv-out/."""
    return (str(found.parent) for pattern in ("*/fold.json", "repaconv-out/*/fold.json") for found in _here(pattern))


def recipes() -> Iterator[str]:
    """TOML files, here and in recipes/."""
    patterns = ("*.toml", "recipes/*.toml", "recipes/*/*.toml")
    return (str(found) for pattern in patterns for found in _here(pattern) if found.name != "pyproject.toml")


def methods() -> Iterable[str]:
    """Of all packages that are installed."""
    return plugins.registered(plugins.METHODS)


def targets() -> Iterable[str]:
    """Devices by name; a TOML file of one's own is the shell's."""
    return plugins.registered(plugins.TARGETS)


def precisions() -> Iterable[str]:
    """Of exports and engines."""
    return "fp32", "fp16", "bf16", "int8"


def runtimes() -> Iterable[str]:
    """Engines."""
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
"""By the name of the parameter."""

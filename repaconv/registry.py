"""Plug-ins by entry point: methods, backbones, rewrites, engines, targets. Ours are registered the same way."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from repaconv import extras
from repaconv.errors import EnvironmentProblem, UsageProblem, nearest

METHODS = "repaconv.methods"
BACKBONES = "repaconv.backbones"
REWRITES = "repaconv.rewrites"
ENGINES = "repaconv.engines"
TARGETS = "repaconv.targets"
EXTRAS = "extras"
"""Among the rows, what may be installed besides."""
GROUPS = (METHODS, BACKBONES, REWRITES, ENGINES, TARGETS)


class PluginRow(NamedTuple):
    """One registered plug-in as ``doctor`` shows it.

    ``problem`` is empty when it loads; ``note`` says of a runtime which version is here, or why it is not.
    """

    group: str
    name: str
    value: str
    problem: str
    note: str = ""


def registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name, sorted, none of them loaded."""
    return dict(_registered(group, tuple(sys.path)))


@cache
def _registered(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Kept while the path is the same: looking through all that is installed takes milliseconds."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def load(group: str, name: str) -> Any:
    """Load one plug-in.

    Raises:
        UsageProblem: If nothing of that name is registered.
        EnvironmentProblem: If it is registered but cannot be imported.
    """
    points = registered(group)
    kind = group.rpartition(".")[2].rstrip("s")
    if name not in points:
        raise UsageProblem(
            f"unknown {kind} {name!r}.",
            hint=nearest(name, points)
            + f"Known: {', '.join(points) or 'none, because repaconv is not installed in this environment'}.",
            code=f"{kind}.unknown",
        )
    try:
        return points[name].load()
    except Exception as error:
        raise EnvironmentProblem(
            f"the {kind} {name!r} ({points[name].value}) cannot be loaded: {error}.",
            hint="`repaconv doctor` lists all plug-ins; update or remove the package that brings this one.",
            code=f"{kind}.broken",
        ) from error


def rows() -> list[PluginRow]:
    """Try every plug-in of every group; a broken one is a row, never a crash."""
    found = []
    for group in GROUPS:
        for name, point in registered(group).items():
            try:
                plugin = load(group, name)
                found.append(PluginRow(group, name, point.value, "", _runtime(plugin) if group == ENGINES else ""))
            except EnvironmentProblem as error:
                found.append(PluginRow(group, name, point.value, error.message))
    return found + [_extra(extra) for extra in extras.EXTRAS]


def _extra(extra: extras.Extra) -> PluginRow:
    lacks = extra.missing()
    here = "here" if extra.packages else "nothing more is needed"
    if lacks:
        here = f"{', '.join(lacks)} not here: {extra.line}"
    return PluginRow(EXTRAS, extra.name, ", ".join(extra.packages), "", f"{extra.purpose}: {here}")


def _runtime(engine: Any) -> str:
    try:
        return str(engine.version())
    except EnvironmentProblem as error:
        return f"not on this machine: {error.message}"

"""Find a target by its name or file, and the default rewrites for it on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins

if TYPE_CHECKING:
    from repaconv.engines.targets import Target


def load_target(name: str | Target) -> Target:
    """A target by its registered name or the path of its .toml file; ``name@variant`` selects a variant."""
    from repaconv.engines.targets import Target, from_file

    if isinstance(name, Target):
        return name
    name, _, variant = name.partition("@")
    target: Any = from_file(Path(name)) if name.endswith(".toml") else plugins.load(plugins.TARGETS, name)
    assert isinstance(target, Target)
    return target.variant(variant) if variant else target


def default_rewrites(device: Target, method: str) -> tuple[str, ...]:
    """Names of the rewrites in a method's default preset on a target, for this machine's CPU."""
    from repaconv.benchmark.cpu_isa_level import isa_level

    return device.form(method, isa_level(device.architecture))

"""Find a target by its name or file, and the default rewrites for it on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins
from repaconv.core.files import require_valid_name

if TYPE_CHECKING:
    from repaconv.engines.targets import Target


def load_target(name: str | Target) -> Target:
    """A target by its registered name or the path of its .toml file; ``name@variant`` selects a variant.

    Raises:
        UsageProblem: If there is no such target or variant, or the file is not a valid target.
        Refused: If the path cannot be a file's.
    """
    from repaconv.engines.targets import Target, from_file

    if isinstance(name, Target):
        return name
    name, _, variant = name.partition("@")
    if is_file := name.endswith(".toml"):
        require_valid_name(Path(name))
    target: Any = from_file(Path(name)) if is_file else plugins.load(plugins.TARGETS, name)
    assert isinstance(target, Target)
    return target.variant(variant) if variant else target


def default_rewrites(device: Target, method: str) -> tuple[str, ...]:
    """Names of the rewrites in a method's default preset on a target, for this machine's CPU."""
    from repaconv.benchmark.cpu_isa_level import isa_level

    return device.form(method, isa_level(device.architecture))

"""Devices as data, one TOML file each; a name here is a file's, in capitals: ``ORIN_NANO`` is orin-nano.toml."""

from typing import Any

from repaconv.targets.schema import Target as Target
from repaconv.targets.schema import from_file as from_file
from repaconv.targets.schema import packaged


def __getattr__(name: str) -> Any:
    """Read a packaged target when it is first asked for."""
    if not name.isupper():
        raise AttributeError(f"module 'repaconv.targets' has no attribute {name!r}")
    return packaged(name.lower().replace("_", "-"))

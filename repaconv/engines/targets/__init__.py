"""Target devices, one TOML file each. The attribute `ORIN_NANO` is the target in orin-nano.toml."""

from typing import Any

from repaconv.engines.targets.schema import Target as Target
from repaconv.engines.targets.schema import from_file as from_file
from repaconv.engines.targets.schema import packaged


def __getattr__(name: str) -> Any:
    """Load a packaged target on first access."""
    if not name.isupper():
        raise AttributeError(f"module 'repaconv.engines.targets' has no attribute {name!r}")
    return packaged(name.lower().replace("_", "-"))

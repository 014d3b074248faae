"""Optional network libraries such as timm: a test is skipped where its library is not installed."""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType

import pytest
from zoo_networks import load_torchvision


def library(name: str) -> ModuleType:
    """The module. torchvision lacks operators next to a torch of another build; they are defined before the import."""
    with suppress(ImportError):
        load_torchvision()
    return pytest.importorskip(name)

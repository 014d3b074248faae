"""Other makers' libraries of networks, where they are installed."""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType

import pytest
from zoo_networks import load_torchvision


def library(name: str) -> ModuleType:
    """It; beside a torch of another build torchvision, on which all stand, lacks operators: they are defined here."""
    with suppress(ImportError):
        load_torchvision()
    return pytest.importorskip(name)

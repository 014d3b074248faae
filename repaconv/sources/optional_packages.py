"""Import packages that repaconv does not require, and say how to install what is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from repaconv.core.errors import EnvironmentProblem, root_cause

NOT_EXTRAS = ("ultralytics",)
"""Packages that are no extra of repaconv: Ultralytics has the AGPL, and its users are to decide on that."""


def package(name: str) -> Any:
    """Import an optional package.

    Raises:
        EnvironmentProblem: The package is not installed or does not load.
    """
    with loading(name):
        return importlib.import_module(name)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Report import errors of an optional package that occur within the context.

    transformers imports its modules only when a network is looked up.

    Raises:
        EnvironmentProblem: The package is not installed or does not load.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        said = str(root_cause(error)).splitlines() or [type(error).__name__]
        why = "is not installed" if missing else f"does not load: {said[0].rstrip('.')}"
        builds = "torchvision's compiled operators are for one build of torch: install both from one index."
        wanted = name if name in NOT_EXTRAS else f"'repaconv[{name}]'"
        raise EnvironmentProblem(
            f"{name} {why}.", hint=f"pip install {wanted}" if missing else builds, code=f"{name}.missing"
        ) from error

"""Put the import of modules off until something of them is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

UNUSED_BY_ONNX_IR = ("sympy", "onnx_ir._symbolic_shapes")
"""onnx-ir imports sympy for arithmetic on sizes, which takes more than half of its time, and hardly any graph needs
it."""


def defer_imports(names: Sequence[str]) -> None:
    """Make later imports of these modules run their code at the first access to an attribute.

    That changes the import system of the whole process, so it is for processes of our own.
    """
    sys.meta_path.insert(0, _Deferred(names))


class _Deferred(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if found is not None and found.loader is not None:
            found.loader = LazyLoader(found.loader)
        return found

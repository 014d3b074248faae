"""Import onnx-ir without sympy until onnx-ir uses it, for arithmetic on symbolic sizes.

Importing sympy takes as long as importing the rest of onnx-ir, and most graphs need none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE, DEFERRED = "onnx_ir", ("sympy", "onnx_ir._symbolic_shapes")
"""The package, and the modules that it imports and does not use at first."""


def defer_sympy() -> None:
    """Make onnx-ir import sympy at its first use.

    While onnx-ir is imported, other modules take the place of `DEFERRED`, and import those at the first access to an
    attribute. They are known to onnx-ir alone: whoever imports sympy later gets sympy.

    That changes the import system of the process, so it is for processes of our own.
    """
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target) if fullname == PACKAGE else None
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader)
        return found


class _Loader(Loader):
    """Runs the package by its own loader, with other modules in the place of `DEFERRED`."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        placed = [_Deferred(name) for name in DEFERRED if name not in sys.modules]
        sys.modules.update({each.__name__: each for each in placed})
        try:
            self._own.exec_module(module)
        finally:
            for each in placed:
                each.remove()


class _Deferred(ModuleType):
    """A module that is imported at the first access to one of its attributes."""

    def remove(self) -> None:
        """Let the next import of the module find the real one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for those
            raise AttributeError(name)
        self.remove()
        return getattr(import_module(self.__name__), name)

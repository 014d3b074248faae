"""Deprecations: what is going, what to use in its place, and the version of repaconv in which it is removed.

`tests/test_deprecations.py` fails once repaconv has that version, so that no deprecation outlives it. The version is
therefore always written as a literal, ``removed_in="0.3.0"``. docs/releasing.md says how long a former name is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])


class Deprecation(NamedTuple):
    """A name that still works, and is going.

    Attributes:
        what: The name, as its user writes it.
        use: What to use in its place.
        removed_in: The first version without it.
    """

    what: str
    use: str
    removed_in: str

    def __str__(self) -> str:
        """Return the message for the user."""
        return f"{self.what} is deprecated: use {self.use}. It is removed in repaconv {self.removed_in}."

    def warn(self, stacklevel: int = 2) -> None:
        """Give a `DeprecationWarning`.

        Args:
            stacklevel: As in `warnings.warn`: 2 is the line that called the function that calls this method.
        """
        warnings.warn(str(self), DeprecationWarning, stacklevel=stacklevel + 1)


def former_names(module: str, today: Mapping[str, Any], *, removed_in: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module in which classes or functions were renamed: a former name gives a warning.

    Assign it ``if not TYPE_CHECKING``, or mypy would take every name for one of that module.

    Args:
        module: The module's ``__name__``.
        today: Former name to the class or function of today.
        removed_in: The first version without the former names.
    """

    def find(name: str) -> Any:
        if name not in today:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        Deprecation(f"{module}.{name}", today[name].__name__, removed_in).warn()
        return today[name]

    return find


def former_attribute(former: str, today: str, *, removed_in: str) -> Any:
    """Make the property of a class by the former name of an attribute or method: reading it gives a warning.

    Args:
        former: The former name.
        today: The name of today.
        removed_in: The first version without the former name.
    """

    def find(owner: Any) -> Any:
        kind = type(owner).__name__
        Deprecation(f"{kind}.{former}", f"{kind}.{today}", removed_in).warn()
        return getattr(owner, today)

    return property(find, doc=f"Former name of `{today}`.")


def deprecated(use: str, *, removed_in: str) -> Callable[[Marked], Marked]:
    """Decorate a function or class that is going: every call gives a `DeprecationWarning`.

    Args:
        use: What to use in its place.
        removed_in: The first version without it.
    """

    def mark(old: Marked) -> Marked:
        deprecation = Deprecation(f"{old.__module__}.{old.__qualname__}", use, removed_in)
        return _before_calls(old, lambda named: deprecation.warn(3))

    return mark


def renamed_argument(former: str, today: str, *, removed_in: str) -> Callable[[Marked], Marked]:
    """Decorate a function or class of which an argument was renamed: by its former name it gives a warning.

    Args:
        former: The former name.
        today: The name of today.
        removed_in: The first version without the former name.
    """

    def mark(owner: Marked) -> Marked:
        what = f"{owner.__module__}.{owner.__qualname__}({former}=...)"
        deprecation = Deprecation(what, f"{today}=...", removed_in)

        def rename(named: dict[str, Any]) -> None:
            if former in named:
                deprecation.warn(3)
                named[today] = named.pop(former)

        return _before_calls(owner, rename)

    return mark


def _before_calls(marked: Marked, act: Callable[[dict[str, Any]], None]) -> Marked:
    """Do something with the named arguments before every call of a function, or of the constructor of a class."""
    from functools import wraps

    any_marked: Any = marked  # as mypy has no type for the constructor of any class
    target = any_marked.__init__ if isinstance(marked, type) else any_marked

    @wraps(target)
    def call(*arguments: Any, **named: Any) -> Any:
        act(named)
        return target(*arguments, **named)

    if not isinstance(marked, type):
        return call  # type: ignore[return-value]  # of the same signature
    any_marked.__init__ = call
    return marked

"""What a pickle's opcodes may do: fill and alter what is inert, and nothing else.

The machine is the standard library's own in Python: its steps can be looked at there, while the one in C takes as much
memory as a pickle claims to need, and alters whatever is on its stack.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import IO, Any, NoReturn

NESTED = 10_000
"""Tuples in one tuple, counted wherever they stand: hashing one walks them all, and as deep as they lie."""

_Unpickler: Any = pickle._Unpickler


class Placeholder:
    """Inert stand-in for a global outside the allow-list; keeps arguments and state as data."""

    qualified_name = ""
    args: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Store what a constructor or function would have been called with."""
        self.args = args
        self.state = kwargs or None

    def __setitem__(self, key: object, value: object) -> None:
        """Let a dict-like object be filled, into nothing."""

    def append(self, value: object) -> None:
        """Let a list-like object be filled, into nothing."""

    def extend(self, values: object) -> None:
        """Let a list-like object be filled, into nothing."""

    def add(self, value: object) -> None:
        """Let a set-like object be filled, into nothing."""


class Machine(_Unpickler):  # type: ignore[misc]
    """Reads a pickle; ``find_class`` and ``persistent_load`` say what there is in its world."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Nothing is read yet."""
        super().__init__(stream, encoding="utf-8")
        self._nested: dict[int, tuple[tuple[object, ...], int]] = {}

    def get_extension(self, code: int) -> NoReturn:
        """Numbers for classes are another process's."""
        raise pickle.UnpicklingError(f"extension {code} is of another process")

    def load_build(self) -> None:
        """State goes into stand-ins; a dict's (torch keeps the versions of modules there) is left out."""
        state = self.stack.pop()
        altered = self.stack[-1]
        if isinstance(altered, Placeholder):
            altered.state = state
        elif not isinstance(altered, OrderedDict):
            raise pickle.UnpicklingError(f"the pickle tries to alter a {type(altered).__name__}")

    def load_setitem(self) -> None:
        """One entry."""
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([(key, value)])

    def load_setitems(self) -> None:
        """All entries above the mark."""
        items = self.pop_mark()
        self._fill(zip(items[::2], items[1::2], strict=True))

    def _fill(self, entries: Any) -> None:
        filled = self.stack[-1]
        if not isinstance(filled, (dict, Placeholder)):
            raise pickle.UnpicklingError(f"the pickle tries to fill a {type(filled).__name__}")
        for key, value in entries:
            filled[key] = value

    def load_tuple(self) -> None:
        """Of all above the mark."""
        items = tuple(self.pop_mark())
        self.append(self._weighed(items))

    def load_some(self, count: int) -> None:
        """A tuple of the last one, two or three."""
        self.stack[-count:] = [self._weighed(tuple(self.stack[-count:]))]

    def _weighed(self, items: tuple[object, ...]) -> tuple[object, ...]:
        """The tuple, unless there are too many in it; those that hold others are kept, so that no id comes twice."""
        inner = [self._nested.get(id(item), (item, 1))[1] for item in items if isinstance(item, tuple)]
        if inner:
            self._nested[id(items)] = items, 1 + sum(inner)
            if sum(inner) >= NESTED:
                raise pickle.UnpicklingError(f"a tuple of more than {NESTED:,} tuples")
        return items

    dispatch = {  # noqa: RUF012 - as the library has it
        **_Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.TUPLE[0]: load_tuple,
        pickle.TUPLE1[0]: lambda self: self.load_some(1),
        pickle.TUPLE2[0]: lambda self: self.load_some(2),
        pickle.TUPLE3[0]: lambda self: self.load_some(3),
        pickle.BYTEARRAY8[0]: _Unpickler.load_binbytes8,  # it would be made as long as it claims to be
    }

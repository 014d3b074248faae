"""The one language of shapes: a size is a number, or a product of names and a number; a name stands for one size.

Names of a graph's inputs are believed; on any other value a size has the name that it is computed to have, or one that
nobody else's has (`repaconv.graph.shape_inference`). So two sizes that are equal here are equal at every call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Free:
    """A size that is known at a call alone: a product of names, sorted, and a number."""

    names: tuple[str, ...]
    number: int = 1

    def __str__(self) -> str:
        """As a file has it."""
        return "*".join([*self.names, *([str(self.number)] if self.number != 1 else [])])


Size = int | Free
Sizes = tuple[Size, ...]


def product(parts: Iterable[Size]) -> Size:
    """Of sizes."""
    names, number = factors(parts)
    return Free(tuple(sorted(names)), number) if names else number


def factors(parts: Iterable[Size]) -> tuple[list[str], int]:
    """The names in a product of sizes, in their order, and its number."""
    every = list(parts)
    names = [name for part in every if isinstance(part, Free) for name in part.names]
    return names, math.prod(part.number if isinstance(part, Free) else part for part in every)


def shifted(size: Size, by: int) -> Size:
    """A size and a number more."""
    if isinstance(size, int):
        return size + by
    if by == 0 or len(size.names) != 1 or by % size.number:
        return size if by == 0 else Free((f"({size}{by:+})",))
    inner, more, part = _windows(size.names[0])
    return product((size.number, _name(inner, more + by // size.number * part, part)))


def parted(size: Size, by: int) -> Size:
    """How often a number of 1 or more goes into a size, whole times: floor(size / by)."""
    if by == 1:
        return size
    if isinstance(size, int):
        return size // by
    if len(size.names) != 1 or size.number != 1:
        return Free((f"(({size}+0)//{by})",))
    inner, more, part = _windows(size.names[0])
    return _name(inner, more, part * by)


_WINDOWS = re.compile(r"\((?:\((?P<of>.+)(?P<then>[+-]\d+)\)//(?P<by>\d+)|(?P<plain>.+)(?P<more>[+-]\d+))\)")


def _windows(name: str) -> tuple[str, int, int]:
    """A name as floor((inner + more) / part): windows of windows are windows, and what is equal is called so.

    floor((floor((x + a) / p) + b) / q) = floor((x + a + b p) / (p q))
    """
    found = _WINDOWS.fullmatch(name)
    if found is None:
        return name, 0, 1
    if found["of"] is not None:
        inner, more, part = _windows(found["of"])
        return inner, more + int(found["then"]) * part, part * int(found["by"])
    inner, more, part = _windows(found["plain"])
    return inner, more + int(found["more"]) * part, part


def _name(inner: str, more: int, part: int) -> Size:
    if part > 1:
        return Free((f"(({inner}{more:+})//{part})",))
    return Free((f"({inner}{more:+})",)) if more else size_of(inner)


def is_free(size: Size) -> bool:
    """Whether it is known at a call alone."""
    return isinstance(size, Free)


def rank_of(value: ir.Value | None) -> int:
    """How many axes a value has; 0 as well where that is not known."""
    return len(sizes(value) or ())


def as_numbers(shape: Iterable[Size]) -> list[int] | None:
    """Sizes that are all known; None if one is free."""
    found = list(shape)
    known = [size for size in found if isinstance(size, int)]
    return known if len(known) == len(found) else None


@cache
def size_of(text: str) -> Size:
    """What a file calls a size; what stands in brackets is one name."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "*" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return product(int(part) if part.isdigit() else Free((part,)) for part in parts)


def sizes(value: ir.Value | None) -> Sizes | None:
    """The shape of a value; None where the rank is unknown, and an unnamed size is nobody else's."""
    if value is None or value.shape is None:
        return None
    return tuple(
        dim if isinstance(dim, int) else size_of(dim.value) if dim.value else Free((f"?{id(value)}.{axis}",))
        for axis, dim in enumerate(value.shape)
    )


def set_shape(value: ir.Value, shape: Iterable[Size] | None, like: ir.Value | None = None) -> None:
    """Write down a value's shape if it is known, and the type of another."""
    import onnx_ir as ir

    if shape is not None:
        value.shape = ir.Shape([size if isinstance(size, int) else ir.SymbolicDim(str(size)) for size in shape])
    if like is not None and like.dtype is not None:
        value.dtype = like.dtype


def target_of(before: Sizes, shape: Sizes) -> list[int] | None:
    """A Reshape's target: one free size is -1, others are 0 where they are those of the input at the same place.

    None where more than one is left.
    """
    free = [axis for axis, size in enumerate(shape) if is_free(size)]
    copied = [axis for axis in free if shape[axis : axis + 1] == before[axis : axis + 1]] if len(free) > 1 else []
    if len(free) - len(copied) > 1:
        return None
    return [size if isinstance(size, int) else 0 if axis in copied else -1 for axis, size in enumerate(shape)]


def groups(before: Sizes, after: Sizes) -> list[tuple[list[int], list[int]]] | None:
    """Which axes of a Reshape's input become which of its output: the smallest groups of equal product.

    Returns:
        Pairs of neighbouring axes, in order, or None if that cannot be told.
    """
    named = _in_primes(before, after)
    if named is None:
        return None
    left, right = named
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) or j < len(right):
        ours, theirs = [i] if i < len(left) else [], [j] if j < len(right) else []
        a, b = (left[i] if ours else 1), (right[j] if theirs else 1)
        i, j = i + len(ours), j + len(theirs)
        while a != b:
            if a < b and i < len(left):
                a, ours, i = a * left[i], [*ours, i], i + 1
            elif b < a and j < len(right):
                b, theirs, j = b * right[j], [*theirs, j], j + 1
            else:
                return None
        found.append((ours, theirs))
    return found


def _in_primes(before: Sizes, after: Sizes) -> tuple[list[int], list[int]] | None:
    """Names as primes; where one is left on each side and all else is equal, they are one."""
    ours, theirs = factors(before)[0], factors(after)[0]
    names = sorted({*ours, *theirs})
    only = [[n for n in side if n not in other] for side, other in ((ours, theirs), (theirs, ours))]
    if sorted(ours) != sorted(theirs):
        if len(only[0]) != 1 or len(only[1]) != 1 or len(ours) != len(theirs):
            return None
        names.remove(only[1][0])
    primes = dict(zip(names, _PRIMES, strict=False))
    if len(names) > len(primes) or 0 in (*before, *after):
        return None
    if only[1] and only[0]:
        primes[only[1][0]] = primes[only[0][0]]
    left, right = ([_number(size, primes) for size in side] for side in (before, after))
    return (left, right) if math.prod(left) == math.prod(right) else None


def _number(size: Size, values: dict[str, int]) -> int:
    return size if isinstance(size, int) else size.number * math.prod(values[name] for name in size.names)


_PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099)

"""Symbolic shapes: a size is a number, or a product of names and a number; one name means one size.

Names of a graph's inputs are trusted, and so is what a file says of other values in terms of them. Any other size is
computed from them, or has a unique name (`repaconv.graph.shape_inference`). Sizes that are equal here are therefore
equal in every inference, for images that are not smaller than a window over them.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class SymbolicSize:
    """A size known only at inference: a product of names (sorted) and a number."""

    names: tuple[str, ...]
    number: int = 1

    def __str__(self) -> str:
        """Return the size as written in a file."""
        return "*".join([*self.names, *([str(self.number)] if self.number != 1 else [])])


Size = int | SymbolicSize
Sizes = tuple[Size, ...]


def product(parts: Iterable[Size]) -> Size:
    """Return the product of sizes."""
    names, number = factors(parts)
    return SymbolicSize(tuple(sorted(names)), number) if names and number else number


def known_product(parts: Iterable[Size]) -> int:
    """Return the product of those sizes that are known numbers; 1 if there is none."""
    return math.prod(part for part in parts if isinstance(part, int))


def factors(parts: Iterable[Size]) -> tuple[list[str], int]:
    """Return the names in a product of sizes, in their order, and its number."""
    every = list(parts)
    names = [name for part in every if isinstance(part, SymbolicSize) for name in part.names]
    return names, math.prod(part.number if isinstance(part, SymbolicSize) else part for part in every)


def size_plus(size: Size, by: int) -> Size:
    """Return a size plus a number."""
    if isinstance(size, int):
        return size + by
    if by == 0 or len(size.names) != 1 or by % size.number:
        return size if by == 0 else SymbolicSize((f"({size}{by:+})",))
    inner, more, part = as_window(size.names[0])
    return product((size.number, _name(inner, more + by // size.number * part, part)))


def floor_divided(size: Size, by: int) -> Size:
    """Return floor(size / by) for an integer ``by`` of 1 or more."""
    if by == 1:
        return size
    if isinstance(size, int):
        return size // by
    if size.number % by == 0:
        return product((SymbolicSize(size.names), size.number // by))
    if len(size.names) != 1 or size.number != 1:
        return SymbolicSize((f"(({size}+0)//{by})",))
    inner, more, part = as_window(size.names[0])
    return _name(inner, more, part * by)


def may_be_negative(size: Size) -> bool:
    """Return whether a computed size may be below 0 where all sizes that it is computed from are at least 1."""
    if isinstance(size, int):
        return size < 0
    return is_of_difference(size) or any(as_window(name)[1] < -1 for name in size.names)


def is_of_difference(size: Size) -> bool:
    """Return whether a size is computed from a difference of sizes, or from a negative multiple of one."""
    if isinstance(size, int):
        return size < 0
    return size.number < 0 or any(map(_is_of_difference, size.names))


def _is_of_difference(name: str) -> bool:
    inner, _, _ = as_window(name)
    if inner == name:
        return name.startswith("(") and "-" in name  # computed, and no name of an input
    return is_of_difference(parse_size(inner))


def limit_of_ratio(a: Size, b: Size) -> float | None:
    """Return what a / b approaches as the one name grows that both follow from; None if there is no such name.

    It is 1/8 for floor((h + 31) / 32) and floor((h + 3) / 4).
    """
    if a == b:
        return 1.0
    if isinstance(a, int) or isinstance(b, int):
        return a / b if isinstance(a, int) and isinstance(b, int) and b else None
    if len(a.names) != 1 or len(b.names) != 1 or not b.number:
        return None
    (inner, _, part), (other, _, by) = as_window(a.names[0]), as_window(b.names[0])
    return a.number * by / (b.number * part) if inner == other else None


_WINDOWS = re.compile(r"\((?:\((?P<of>.+)(?P<then>[+-]\d+)\)//(?P<by>\d+)|(?P<plain>.+)(?P<more>[+-]\d+))\)")


def as_window(name: str) -> tuple[str, int, int]:
    """Read a name as floor((inner + more) / part); it is its own inner one if it is no such expression.

    Nested floors are combined, so that equal sizes have equal names:
    floor((floor((x + a) / p) + b) / q) = floor((x + a + b p) / (p q))
    """
    found = _WINDOWS.fullmatch(name)
    if found is None or not _is_closed(found["of"] or found["plain"]):
        return name, 0, 1
    inner, more, part = as_window(found["of"] or found["plain"])
    more += int(found["then"] or found["more"]) * part
    return inner, more, part * int(found["by"] or 1)


def _is_closed(text: str) -> bool:
    """Return whether every bracket of a text is closed in it, and none that it did not open."""
    depths = [*accumulate((letter == "(") - (letter == ")") for letter in text)]
    return min(depths) >= 0 and depths[-1] == 0


def _name(inner: str, more: int, part: int) -> Size:
    if part > 1:
        return SymbolicSize((f"(({inner}{more:+})//{part})",))
    return SymbolicSize((f"({inner}{more:+})",)) if more else parse_size(inner)


def is_dynamic(size: Size) -> bool:
    """Return whether a size is known only at inference."""
    return isinstance(size, SymbolicSize)


def rank_of(value: ir.Value | None) -> int:
    """Return the rank of a value; 0 also if unknown."""
    return 0 if value is None or value.shape is None else len(value.shape)


def as_numbers(shape: Iterable[Size]) -> list[int] | None:
    """Return the sizes as integers, or None if one is dynamic."""
    found = list(shape)
    known = [size for size in found if isinstance(size, int)]
    return known if len(known) == len(found) else None


@cache
def parse_size(text: str) -> Size:
    """Parse a size as this package writes it; a bracketed expression is one name."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "*" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    numbers = re.compile(r"-?\d+" if len(parts) > 1 else r"\d+")
    return product(int(part) if numbers.fullmatch(part) else SymbolicSize((part,)) for part in parts)


def parse_expression(text: str, names: Collection[str]) -> Size | None:
    """Parse a size as exporters write it in Python, ``((height - 1)//4) + 1``; None if it is no such expression.

    Args:
        text: The expression.
        names: The names that it may be made of.
    """
    if len(text) > LONGEST_EXPRESSION or not text.isascii() or "#" in text:
        return None
    with suppress(SyntaxError, ValueError):
        return _computed(ast.parse(text, mode="eval").body, names)
    return None


LONGEST_EXPRESSION = 400
"""Length of the longest text that is read as an expression."""


def _computed(expression: ast.expr, names: Collection[str]) -> Size:
    """Return the size that an expression computes; raises ValueError for one that is no sum, product or quotient."""
    match expression:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.Name(id=name) if name in names:
            return SymbolicSize((name,))
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _computed(left, names), _computed(right, names)
            match operator:
                case ast.Mult() if 0 not in (a, b):
                    return product((a, b))
                case ast.Add() if isinstance(b, int):
                    return size_plus(a, b)
                case ast.Add() if isinstance(a, int):
                    return size_plus(b, a)
                case ast.Sub() if isinstance(b, int):
                    return size_plus(a, -b)
                case ast.FloorDiv() if isinstance(b, int) and b > 0:
                    return floor_divided(a, b)
    raise ValueError("The expression is no size that can be read.")


def sizes(value: ir.Value | None) -> Sizes | None:
    """Return the shape of a value, or None if its rank is unknown. An unnamed dimension gets a unique name."""
    shape = None if value is None else value.shape
    if shape is None:
        return None
    dims = shape.dims
    for dim in dims:  # almost all are numbers, and this is called a hundred thousand times
        if type(dim) is not int:
            break
    else:
        return cast("Sizes", dims)
    found: list[Size] = []
    for axis, dim in enumerate(dims):
        if isinstance(dim, int):
            found.append(dim)
        else:
            name = dim.value
            found.append(parse_size(name) if name else SymbolicSize((f"?{id(value)}.{axis}",)))
    return tuple(found)


def set_shape(value: ir.Value, shape: Iterable[Size] | None, like: ir.Value | None = None) -> None:
    """Record the shape of a value, if given, and copy the element type of another."""
    import onnx_ir as ir

    if shape is not None:
        value.shape = ir.Shape([size if isinstance(size, int) else ir.SymbolicDim(str(size)) for size in shape])
    if like is not None and like.dtype is not None:
        value.dtype = like.dtype


def shaped_like(value: ir.Value, like: ir.Value) -> ir.Value:
    """Record the shape and element type of another value for this one, and return this one."""
    set_shape(value, sizes(like), like)
    return value


def reshape_target(before: Sizes, shape: Sizes) -> list[int] | None:
    """Return the target of a Reshape from shape ``before`` to ``shape``, or None if it cannot be written.

    One dynamic size is written as -1. Further ones are 0 if the input has the same size at the same axis. An axis of no
    entries is a 0 too, and leaves open what -1 stands for.
    """
    free = [axis for axis, size in enumerate(shape) if is_dynamic(size)]
    alike = [axis for axis, size in enumerate(shape) if (size,) == tuple(before[axis : axis + 1])]
    empty = {axis for axis, size in enumerate(shape) if size == 0}
    copied = [axis for axis in free if axis in alike] if len(free) > 1 or empty else []
    if len(free) - len(copied) > (0 if empty else 1) or not empty.issubset(alike):
        return None
    return [size if isinstance(size, int) else 0 if axis in copied else -1 for axis, size in enumerate(shape)]


def reshape_groups(before: Sizes, after: Sizes) -> list[tuple[list[int], list[int]]] | None:
    """Match the axes of a Reshape's input to those of its output, in the smallest groups of equal product.

    Returns:
        Pairs of adjacent axes, in order, or None if they cannot be determined.
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
    """Replace names by primes. If exactly one unmatched name is left on each side, both are the same size."""
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

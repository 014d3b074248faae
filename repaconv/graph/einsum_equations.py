"""Read the equation of an Einsum node: one letter per axis of every operand, and the size of every letter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import attribute
from repaconv.graph.symbolic_shapes import Size, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Equation:
    """The equation of an Einsum in which no operand has a letter twice; an axis of an ellipsis has a digit.

    Attributes:
        operands: The letters of every operand, one per axis.
        output: Those of the output.
        size: The size of every letter.
    """

    operands: tuple[str, ...]
    output: str
    size: Mapping[str, Size]

    @property
    def summed(self) -> tuple[str, ...]:
        """The letters of every operand that only this operand has, and that the output lacks."""
        others = ("".join(self.operands[:place] + self.operands[place + 1 :]) for place in range(len(self.operands)))
        pairs = zip(self.operands, others, strict=True)
        return tuple("".join(each for each in own if each not in other + self.output) for own, other in pairs)

    @property
    def contracted(self) -> str:
        """The letters that several operands have, and that the output lacks."""
        shared = dict.fromkeys("".join(self.operands))
        return "".join(each for each in shared if each not in "".join((self.output, *self.summed)))

    @property
    def remaining(self) -> tuple[str, ...]:
        """The letters of every operand after the sums over those that only this operand has."""
        pairs = zip(self.operands, self.summed, strict=True)
        return tuple("".join(each for each in own if each not in sums) for own, sums in pairs)

    @property
    def is_matrix_product(self) -> bool:
        """Whether there are two operands with contracted letters, of which one has rows or columns."""
        return len(self.operands) == 2 and bool(self.contracted) and len({*map(frozenset, self.remaining)}) == 2


def equation_of(node: ir.Node) -> Equation | None:
    """Return the equation of an Einsum.

    None if a rank is unknown, if an operand has a letter twice (a diagonal), or if a letter has several sizes: one of
    them may be 1, or they may not be known to be equal.
    """
    text = str(attribute(node, "equation", "")).replace(" ", "")
    left, arrow, right = text.partition("->")
    shapes = [sizes(value) for value in node.inputs]
    terms = left.split(",")
    if len(terms) != len(shapes):
        return None
    operands, size = [], dict[str, Size]()
    for term, shape in zip(terms, shapes, strict=True):
        letters = None if shape is None else _letters(term, len(shape))
        if letters is None or any(size.setdefault(*pair) != pair[1] for pair in zip(letters, shape or (), strict=True)):
            return None
        operands.append(letters)
    longest = max((_digits(letters) for letters in operands), key=len)
    output = _letters(right, len(right.replace("...", longest))) if arrow else _implied(operands, longest)
    if output is None or not {*longest} <= {*output} <= {*size}:
        return None
    return Equation(tuple(operands), output, size)


def _letters(term: str, rank: int) -> str | None:
    """The letters of an operand, one per axis; the last axis of an ellipsis is 0, and the one before it is 1."""
    before, dots, after = term.partition("...")
    extra = rank - len(before + after)
    if not (before + after).isalpha() and before + after:
        return None
    if extra < 0 or extra > 10 or (extra and not dots):
        return None
    letters = before + "9876543210"[10 - extra :] + after
    return letters if len({*letters}) == len(letters) else None


def _digits(letters: str) -> str:
    return "".join(filter(str.isdigit, letters))


def _implied(operands: list[str], ellipsis: str) -> str | None:
    """The output of an equation without arrow: an ellipsis, and in alphabetical order what one operand alone has.

    None if there are capital letters and others: ONNX Runtime sorts them otherwise than NumPy.
    """
    letters = [each for each in "".join(operands) if not each.isdigit()]
    if len({each.isupper() for each in letters}) > 1:
        return None
    return ellipsis + "".join(sorted(each for each in letters if letters.count(each) == 1))

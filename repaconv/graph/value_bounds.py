"""The numbers that a value lies between, whatever the input of the graph."""

from __future__ import annotations

from math import inf, isnan
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import attribute, constant, input_at, scalar
from repaconv.graph.operator_facts import SELECTIONS, VIEWS

if TYPE_CHECKING:
    import onnx_ir as ir

Bounds = tuple[float, float]
"""The least and the largest number that a value may have."""

UNKNOWN: Bounds = (-inf, inf)
_ALWAYS: dict[str, Bounds] = {
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos", "Sign"), (-1.0, 1.0)),
    **dict.fromkeys(("Abs", "Exp", "Sqrt", "Softplus", "ReduceL1", "ReduceL2", "ReduceSumSquare"), (0.0, inf)),
}
"""Operators whose results are within these bounds for every input."""
_WITHIN_INPUT = frozenset(
    (
        *(*VIEWS, *SELECTIONS, "GlobalMaxPool", "GlobalAveragePool", "ReduceMean"),
        *("Expand", "Tile", "DepthToSpace", "SpaceToDepth"),
    )
)
"""Operators that select or average numbers of their first input."""
_WITHIN_INPUTS = ("Concat", "Max", "Min", "Where")
"""Operators whose every result is a number of one of their inputs."""
MOST_STEPS = 64
"""Length of the longest chain of operators before a value that is followed."""


class ValueBounds:
    """The bounds of values of one graph, each computed once. NaN counts as within all bounds."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, Bounds] = {}

    def of(self, value: ir.Value | None, steps: int = MOST_STEPS) -> Bounds:
        """The bounds of a value; `UNKNOWN` if nothing is known of it."""
        if value is None or not steps:
            return UNKNOWN
        if value not in self._known:
            low, high = self._of_constant(value) or self._of_node(value, steps - 1)
            self._known[value] = UNKNOWN if isnan(low) or isnan(high) else (low, high)
        return self._known[value]

    @staticmethod
    def _of_constant(value: ir.Value) -> Bounds | None:
        numbers = constant(value)
        if numbers is None or not numbers.size or numbers.dtype.kind not in "fiu":
            return None if numbers is None else UNKNOWN
        return float(numbers.min()), float(numbers.max())

    def _of_node(self, value: ir.Value, steps: int) -> Bounds:
        node = value.producer()
        if node is None or node.domain:
            return UNKNOWN
        if node.op_type in _ALWAYS:
            return _ALWAYS[node.op_type]
        if node.op_type in ("Relu", "Clip"):
            least, most = limits_of(node) or UNKNOWN
            low, high = self.of(node.inputs[0], steps)
            return min(max(low, least), most), min(max(high, least), most)
        if node.op_type in ("AveragePool", "MaxPool", "Pad", "Resize"):
            return self._of_image(node, steps)
        if node.op_type in _WITHIN_INPUT:
            return self.of(node.inputs[0], steps)
        given = [self.of(x, steps) for x in (node.inputs[1:] if node.op_type == "Where" else node.inputs)]
        lows, highs = [low for low, _ in given], [high for _, high in given]
        if node.op_type in _WITHIN_INPUTS:
            return (max if node.op_type == "Max" else min)(lows), (min if node.op_type == "Min" else max)(highs)
        if node.op_type in ("Add", "Sum"):
            return sum(lows), sum(highs)
        if node.op_type == "Mul":
            return _product(*given, square=node.inputs[0] is node.inputs[1])
        return UNKNOWN

    def _of_image(self, node: ir.Node, steps: int) -> Bounds:
        """The bounds of a pool, Pad or Resize, which may add other numbers to those of its input."""
        low, high = self.of(node.inputs[0], steps)
        if node.op_type == "MaxPool" and any(size > 1 for size in attribute(node, "dilations", ())):
            return -inf, high  # a window with gaps may have nothing but padding
        if node.op_type == "AveragePool" and attribute(node, "count_include_pad", 0):
            return min(low, 0.0), max(high, 0.0)
        if node.op_type == "Pad" and attribute(node, "mode", "constant") == "constant":
            fill = scalar(node.inputs[2]) if input_at(node, 2) is not None else 0.0
            return UNKNOWN if fill is None else (min(low, fill), max(high, fill))
        crops = attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
        if node.op_type == "Resize" and (crops or attribute(node, "mode", "nearest") == "cubic"):
            return UNKNOWN
        return low, high


def _product(one: Bounds, other: Bounds, *, square: bool) -> Bounds:
    with np.errstate(invalid="ignore"):
        ends = np.nan_to_num(np.outer(one, other), nan=0.0, posinf=inf, neginf=-inf)  # 0 times infinity bounds by 0
    return 0.0 if square else float(ends.min()), float(ends.max())


def limits_of(node: ir.Node) -> Bounds | None:
    """The least and largest number that a Relu or Clip returns; None for other nodes, and if they are not constant."""
    if node.domain or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return 0.0, inf
    given = [input_at(node, place) for place in (1, 2)]
    least, most = (bound if x is None else scalar(x) for x, bound in zip(given, UNKNOWN, strict=True))
    return None if least is None or most is None or not least <= most else (least, most)

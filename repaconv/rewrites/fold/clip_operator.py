"""clip: limit a value once: write maxima and minima with numbers as Relu or Clip, and join those in series.

Converters from TensorFlow and Keras write ReLU6 as Max and Min, or as Relu and Min. ONNX Runtime computes a Relu or a
Clip inside the convolution before it, and neither of the two others. A node that limits a value which is within these
limits anyway is removed: RAFT applies a Relu to the sum of two outputs of Relu.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, both_keep_names, is_read_once, nodes_of, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import shaped_like, sizes
from repaconv.graph.value_bounds import ValueBounds, limits_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

LIMITS = ("Max", "Min", "Relu", "Clip")


class _Limit(NamedTuple):
    """A node's input, and the least and the largest number that the node lets through."""

    x: ir.Value
    least: float
    most: float


def apply(model: ir.Model) -> Iterator[Change]:
    """Write one Relu or Clip for two nodes that limit a value, and remove those that change nothing; in place."""
    bounds = ValueBounds()
    for node in nodes_of(model, *LIMITS):
        outer = _limit(node)
        if outer is None:
            continue
        x, write = outer.x, Writer(model, node)
        before = x.producer()
        inner = _limit(before) if before is not None and is_read_once(x) else None
        low, high = bounds.of(x)
        if outer.least <= low and high <= outer.most and not both_keep_names(node.outputs[0], x):
            new, what = x, f"{node.op_type} of what is within its limits -> nothing"
        elif before is not None and inner is not None:
            least, most = (min(max(limit, outer.least), outer.most) for limit in inner[1:])
            if not least < most:  # one number, which is not even NaN where the value is
                continue
            new = shaped_like(_written(write, inner.x, least, most), x)
            operator = new.producer()
            assert operator is not None
            what = f"{before.op_type}, {node.op_type} -> {operator.op_type}"
        elif node.op_type == "Max" and outer.least == 0:
            new, what = shaped_like(write("Relu", x), x), "Max -> Relu"
        else:
            continue
        write.replace(node.outputs[0], new)
        model.graph.remove(node, safe=True)  # so that it reads nothing
        yield Change(rewrite=CLIP.name, place=node.name or "", description=what)
    clean(model)


def _written(write: Writer, x: ir.Value, least: float, most: float) -> ir.Value:
    if (least, most) == (0, inf):
        return write("Relu", x)
    lower = write.constant(least, x) if least > -inf else None
    return write("Clip", x, lower, *([write.constant(most, x)] if most < inf else []))


def _limit(node: ir.Node) -> _Limit | None:
    """The value that a node limits to numbers; None for other nodes."""
    x = node.inputs[0] if node.inputs else None
    if node.domain or node.op_type not in LIMITS or x is None:
        return None
    limits = limits_of(node)
    if node.op_type in ("Max", "Min"):
        values = [value for value in node.inputs if value is not None and scalar(value) is None]
        numbers = [one for value in node.inputs if (one := scalar(value)) is not None]
        if len(values) != 1 or len(numbers) != 1 or not sizes(values[0]) == sizes(node.outputs[0]) is not None:
            return None
        x, number = values[0], numbers[0]
        limits = (number, inf) if node.op_type == "Max" else (-inf, number)
    known = x.dtype is not None and x.dtype.name in ("FLOAT", "DOUBLE", "FLOAT16")
    return _Limit(x, *limits) if known and limits is not None and limits[0] <= limits[1] else None


CLIP = Rewrite("clip", "a Relu, Clip, Max or Min with numbers that changes nothing or reads another one", apply, 12)

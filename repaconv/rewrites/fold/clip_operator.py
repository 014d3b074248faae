"""clip: write the maximum of a value and zero as Relu, and its maximum and minimum with two numbers as Clip.

Converters from TensorFlow and Keras write ReLU6 as Max and Min, or as Relu and Min. ONNX Runtime computes a Relu or a
Clip inside the convolution before it, and neither of the two others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, is_read_once, nodes_of, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import shaped_like, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

LIMITS = ("Max", "Min", "Relu")


def apply(model: ir.Model) -> Iterator[Change]:
    """Write Relu or Clip wherever Max, Min and Relu compute it; in place."""
    for node in nodes_of(model, *LIMITS):
        outer = _limit(node)
        if outer is None:
            continue
        x, number = outer
        before = x.producer()
        inner = _limit(before) if before is not None and is_read_once(x) else None
        write = Writer(model, node)
        if before is not None and inner is not None and (before.op_type == "Min") != (node.op_type == "Min"):
            least, most = (inner[1], number) if node.op_type == "Min" else (number, inner[1])
            if not least <= most:  # a Clip returns the maximum then, and the other order the minimum; NaN is neither
                continue
            new = write("Clip", inner[0], write.constant(least, x), write.constant(most, x))
            what = f"{before.op_type}, {node.op_type} -> Clip"
        elif node.op_type == "Max" and number == 0:
            new, what = write("Relu", x), "Max -> Relu"
        else:
            continue
        write.replace(node.outputs[0], shaped_like(new, x))
        yield Change(rewrite=CLIP.name, place=node.name or "", description=what)
    clean(model)


def _limit(node: ir.Node) -> tuple[ir.Value, float] | None:
    """The value of which a node takes the maximum or minimum with a number, and the number; None for other nodes."""
    x = node.inputs[0] if node.inputs else None
    if node.domain or node.op_type not in LIMITS or x is None:
        return None
    number = 0.0
    if node.op_type != "Relu":
        values = [value for value in node.inputs if value is not None and scalar(value) is None]
        numbers = [one for value in node.inputs if (one := scalar(value)) is not None]
        if len(values) != 1 or len(numbers) != 1:
            return None
        x, number = values[0], numbers[0]
    known = x.dtype is not None and x.dtype.name in ("FLOAT", "DOUBLE", "FLOAT16")
    return (x, number) if known and sizes(x) == sizes(node.outputs[0]) is not None else None


CLIP = Rewrite("clip", "the maximum and minimum of a value and two numbers, or its maximum with zero", apply, 12)

"""norm-in-place: write a norm over a whole sample as its formula, so that an image need not be reshaped to a row.

n = (x - m) / sqrt(mean((x - m)^2) + eps),  m = mean(x) over a sample
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer, attribute, constant, nodes_of, only_reader
from repaconv.graph.operator_facts import EPSILON
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, sizes
from repaconv.graph.view_chains import view_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _norm_in_place(model: ir.Model) -> Iterator[Change]:
    """Replace norms over a whole sample by their formula, which does not need the sample as a row."""
    for norm in nodes_of(model, "InstanceNormalization", "GroupNormalization"):
        ends = _input_and_output(norm)
        scale, shift = constant(norm.inputs[1]), constant(norm.inputs[2])
        if ends is None or scale is None or shift is None:
            continue
        (x, out), write = ends, Writer(model, norm)
        rank = rank_of(x)
        axes = write.constant(list(range(1, rank)))
        apart = write("Sub", x, write("ReduceMean", x, axes, keepdims=1))
        spread = write("ReduceMean", write("Mul", apart, apart), axes, keepdims=1)
        epsilon = write.constant(attribute(norm, "epsilon", EPSILON))
        new = write("Div", apart, write("Sqrt", write("Add", spread, epsilon)))
        column = (-1, *(1,) * (rank - 2))
        if (scale != 1).any():
            new = write("Mul", new, write.constant(scale.reshape(column)))
        if shift.any():
            new = write("Add", new, write.constant(shift.reshape(column)))
        new.shape = x.shape
        write.replace(out, new)
        description = (
            f"a norm over all {'x'.join(map(str, (sizes(x) or ())[1:]))} numbers, without a Reshape to one row"
        )
        yield Change(rewrite="norm-in-place", place=norm.name or "", description=description)


def _input_and_output(norm: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The input of a norm over a whole sample, and its output in the same shape; None if the norm is another one.

    An InstanceNormalization of one channel reads the sample as a row. A GroupNormalization of one group reads it
    unchanged.
    """
    out, given = norm.outputs[0], sizes(norm.inputs[0])
    if given is None or len(given) < 3:
        return None
    if norm.op_type == "GroupNormalization":
        per_channel = norm.inputs[1] is not None and sizes(norm.inputs[1]) == given[1:2]
        one = attribute(norm, "num_groups", 0) == 1 and per_channel
        return (norm.inputs[0], out) if one and norm.inputs[0] is not None else None
    view = view_of(norm.inputs[0]) if given[1] == 1 and norm.inputs[0] is not None else None
    if view is None or not view.in_order:
        return None
    image = sizes(view.source)
    if image is None or len(image) < 3 or image[0] != given[0]:
        return None
    while sizes(out) != image:
        after = only_reader(out, "Reshape", "Squeeze", "Unsqueeze", "Flatten")
        if after is None:
            return None
        out = after.outputs[0]
    return view.source, out


NORM_IN_PLACE = Rewrite(
    "norm-in-place",
    "a norm over a whole sample that is reshaped to one row: written as a formula, which the runtime recognizes",
    _norm_in_place,
    opset=18,
    order=37,
    keeps=True,
)

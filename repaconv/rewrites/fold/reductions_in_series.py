"""reductions: reduce several axes at once, where a reduction reads another one by the same operator.

    mean over columns of the mean over rows = mean over rows and columns

FocalNet computes the mean of an image in two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import axes_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, input_at, made_by, nodes_of, only_reader
from repaconv.graph.operator_facts import REDUCTIONS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Let each reduction reduce the axes of the one that it reads as well, if nothing else reads that; in place."""
    for node in nodes_of(model, *REDUCTIONS):  # in the order of the graph, so that three become one
        before = made_by(node.inputs[0], node.op_type)
        axes = _axes(before, node) if before is not None else None
        if before is None or axes is None:
            continue
        write, keepdims = Writer(model, node), int(attribute(node, "keepdims", 1))
        if input_at(node, 1) is None:
            new = write(node.op_type, before.inputs[0], axes=axes, keepdims=keepdims)
        else:
            new = write(node.op_type, before.inputs[0], write.constant(axes), keepdims=keepdims)
        set_shape(new, sizes(node.outputs[0]), node.outputs[0])
        write.replace(node.outputs[0], new)
        description = f"two {node.op_type} -> one along {len(axes)} axes"
        yield Change(rewrite=IN_SERIES.name, place=node.name or "", description=description)
    clean(model)


def _axes(first: ir.Node, second: ir.Node) -> list[int] | None:
    """The axes that two reductions reduce together; None if one reduction cannot replace both."""
    value, rank = first.outputs[0], rank_of(first.inputs[0])
    keeps = [int(attribute(node, "keepdims", 1)) for node in (first, second)]
    sources = [input_at(node, 1) is None for node in (first, second)]
    floats = value.dtype is not None and value.dtype.is_floating_point()  # a mean of integers is rounded
    if only_reader(value) is None or keeps[0] != keeps[1] or sources[0] != sources[1] or not rank or not floats:
        return None
    own, others = axes_of(first, rank), axes_of(second, rank if keeps[0] else rank_of(value))
    if not own or not others or (sources[0] and not ("axes" in first.attributes and "axes" in second.attributes)):
        return None
    left = [axis for axis in range(rank) if keeps[0] or axis not in own]
    return sorted({*own, *(left[axis] for axis in others)})


IN_SERIES = Rewrite(
    "reductions", "two reductions in series by the same operator, if only the second reads the first", apply
)

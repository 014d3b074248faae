"""Numbers that are moved for nothing: moves that undo each other, a transpose before a mean or before a product.

mean_h(transpose(x)) = mean over the axis where h lies in x
q transpose(k, 0 2 3 1) = q transpose(transpose(k, 0 2 1 3), 0 1 3 2)      the product turns its second factor itself
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import axes_of, perm_of
from repaconv.graph.nodes_and_constants import Writer, attribute, is_constant, made_by, nodes_of
from repaconv.graph.operator_facts import MOVES, REDUCTIONS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import Sizes, is_free, rank_of, sizes
from repaconv.graph.tensor_views import reshaped, turned_last
from repaconv.graph.view_chains import chain_of, seen
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _no_moves(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, *MOVES):
        for value in node.outputs:
            found = None if value.is_graph_output() else _unmoved(value)
            if found is None:
                continue
            source, shape, told = found
            write = Writer(model, node)
            new = reshaped(write, source, shape)
            assert new is not None
            write.replace(value, new)
            yield Change(rewrite="no-moves", place=node.name or "", description=told)


def _unmoved(value: ir.Value) -> tuple[ir.Value, Sizes, str] | None:
    """The tensor, the farther the better, that a moved one is but for its shape; and that."""
    chain = chain_of(value)
    for length in range(len(chain), 1, -1):
        source = chain[length - 1]
        view = seen(chain[:length])
        if view is None or not view.in_order or is_constant(source):
            continue
        if sizes(source) == view.shape:
            return source, view.shape, f"{length - 1} moves that undo each other"
        if length > 2 and sum(map(is_free, view.shape)) < 2:
            return source, view.shape, f"{length - 1} moves as one Reshape"
    return None


def _reduced_in_place(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, *REDUCTIONS):
        turned = made_by(node.inputs[0], "Transpose")
        rank = rank_of(node.inputs[0])
        axes = axes_of(node, rank) if rank and len(node.inputs) > 1 else None
        if turned is None or not axes:
            continue
        perm = perm_of(turned, rank)
        gone = sorted(perm[axis] for axis in axes)
        kept = [axis for axis in perm if axis not in gone]
        if kept != sorted(kept) or attribute(node, "keepdims", 1):
            continue
        write = Writer(model, node)
        write.replace(node.outputs[0], write(node.op_type, turned.inputs[0], write.constant(gone), keepdims=0))
        yield Change(
            rewrite="reduce-in-place", place=node.name or "", description=f"over the axes {gone}, not transposed before"
        )


def _turned_twice(model: ir.Model) -> Iterator[Change]:
    """Rows of channels stay rows when heads come apart; a product reads them turned at no cost."""
    for node in nodes_of(model, "Transpose"):
        out = node.outputs[0]
        products = all(user.op_type == "MatMul" and place == 1 and not user.domain for user, place in out.uses())
        if products and not out.is_graph_output() and turned_last(model, node):
            yield Change(rewrite="turn-in-product", place=node.name or "", description="heads apart first, then turned")


NO_MOVES = Rewrite(
    "no-moves",
    "reshapes, transposes, slices and the like that leave all numbers in order",
    _no_moves,
    order=99,
    keeps=True,
)
REDUCE_IN_PLACE = Rewrite(
    "reduce-in-place",
    "a reduction without kept axes behind a transpose that leaves the other axes in order",
    _reduced_in_place,
    opset=18,
    order=55,
    keeps=True,
)
TURN_IN_PRODUCT = Rewrite(
    "turn-in-product",
    "the second factor of a product, moved and turned by one Transpose: by two, of which the product does the last",
    _turned_twice,
    order=100,
    keeps=True,
)

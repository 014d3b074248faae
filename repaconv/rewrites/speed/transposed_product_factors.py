"""turn-in-product: split the Transpose of a product's second factor so that the runtime fuses half of it.

q transpose(k, 0 2 3 1) = q transpose(transpose(k, 0 2 1 3), 0 1 3 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.tensor_views import split_last_transpose
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _turned_twice(model: ir.Model) -> Iterator[Change]:
    """Split transposes so that the first one moves whole rows; the product reads the second one at no cost."""
    for node in nodes_of(model, "Transpose"):
        out = node.outputs[0]
        products = all(user.op_type == "MatMul" and place == 1 and not user.domain for user, place in out.uses())
        if products and not out.is_graph_output() and split_last_transpose(model, node):
            yield Change(
                rewrite="turn-in-product",
                place=node.name or "",
                description="two Transposes: of whole rows, then of the last two axes, which the product does",
            )


TURN_IN_PRODUCT = Rewrite(
    "turn-in-product",
    "a Transpose of the second factor of a product that moves heads and swaps the last two axes: two Transposes",
    _turned_twice,
    order=100,
    keeps=True,
)

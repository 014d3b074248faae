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
            yield Change(rewrite="turn-in-product", place=node.name or "", description="heads apart first, then turned")


TURN_IN_PRODUCT = Rewrite(
    "turn-in-product",
    "the second factor of a product, moved and turned by one Transpose: by two, of which the product does the last",
    _turned_twice,
    order=100,
    keeps=True,
)

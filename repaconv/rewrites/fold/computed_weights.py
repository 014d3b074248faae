"""weights: a weight that the graph computes from constants alone becomes one constant.

Some networks compute a kernel from their parameters in every inference: the branches of OREPA (Hu et al. 2022) and of
ECB (Zhang et al. 2021) are added as kernels; SPAN (Wan et al. 2023) multiplies the kernels of its three convolutions.
No other rewrite recognizes a layer whose weight is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import is_constant, nodes_of
from repaconv.graph.operator_facts import PRODUCTS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.shape_folding import fold_shapes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


SAVED = "repaconv.saved"
"""Metadata key: how many nodes were removed when constants were folded, if none of the nodes computed a weight.

`repaconv.rewrites.fold.computed_shapes` reports them.
"""


def apply(model: ir.Model) -> Iterator[Change]:
    """Fold all constants, and report the products whose weight or bias has become one; in place."""
    products = [(node, place) for node in nodes_of(model, *PRODUCTS) for place in range(len(node.inputs))]
    given = [(node, place) for node, place in products if node.inputs[place] is not None]
    computed = [(node, place) for node, place in given if not is_constant(node.inputs[place])]
    clean(model)
    before = len(model.graph)
    fold_shapes(model)
    found = dict.fromkeys(node for node, place in computed if is_constant(node.inputs[place]))
    if not found:
        model.meta[SAVED] = before - len(model.graph)
    for node in found:
        if node.graph is model.graph:  # the layer itself was not folded to a constant
            yield Change(
                rewrite=WEIGHTS.name, place=node.name or "", description="a computed weight or bias -> a constant"
            )


WEIGHTS = Rewrite("weights", "where a weight is computed from constants alone, and is not larger than they are", apply)

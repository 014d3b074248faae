"""unshare: keep weights that several products share, instead of folding a separate copy for each.

A convolution that is applied to several feature maps, each followed by its own BatchNormalization, has one weight.
Folded, it has one weight per feature map, and the number of multiplications stays the same. `KEEP_SHARED` marks such
weights, so that no rewrite folds them. If all products that share a weight have the same neighboring operators and
constants, the fold gives them the same new weight, which stays shared; such weights are not marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from repaconv.graph.compute_costs import multiplies
from repaconv.graph.models_in_onnx_ir import merge_equal_constants
from repaconv.graph.nodes_and_constants import OPAQUE, attributes_key, is_constant, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.shape_folding import fold_shapes
from repaconv.results import Change
from repaconv.rewrites.fold.recombination_after_folds import share

if TYPE_CHECKING:
    import onnx_ir as ir

UNSHARE = "unshare"
"""The name under which the fold of shared weights is reverted."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Mark shared weights whose products have different neighbors, so that no rewrite reads them; the graph stays."""
    fold_shapes(model)
    merge_equal_constants(model)
    share(model)
    for value in model.graph.initializers.values():
        readers = [node for node, place in value.uses() if multiplies(node, place)]
        if len(readers) > 1 and is_constant(value) and len({_surroundings(node) for node in readers}) > 1:
            value.meta[OPAQUE] = True
    yield from ()


def _surroundings(product: ir.Node) -> tuple[Any, ...]:
    """The operators directly before and after a product, with their attributes and constants."""
    data = next((value for value in product.inputs[:1] if value is not None), None)
    return _kind(data.producer() if data is not None else None), _kind(only_reader(product.outputs[0]))


def _kind(node: ir.Node | None) -> tuple[Any, ...]:
    if node is None:
        return ()
    constants = [(place, value.name) for place, value in enumerate(node.inputs) if value and is_constant(value)]
    return node.domain, node.op_type, attributes_key(node), tuple(constants)


KEEP_SHARED = Rewrite(UNSHARE, "weights of several products in unlike surroundings stay one weight", apply, keeps=True)

"""unshare: weights that several products share, and the fold that leaves them shared.

A convolution that reads several feature maps, with a BatchNormalization for each, has one weight; folded, it has one
for each map, and multiplies as often as before. `KEEP_SHARED` marks such weights, so that no rewrite looks at them.
Where the surroundings of all products that share a weight are alike, so is what a fold makes of them, and it stays one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from repaconv.graph.compute_costs import multiplies
from repaconv.graph.model_rewriting import without_copies
from repaconv.graph.nodes_and_constants import OPAQUE, is_constant, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.shape_constants import settle
from repaconv.results import Change
from repaconv.rewrites.fold.operator_regrouping import share

if TYPE_CHECKING:
    import onnx_ir as ir

UNSHARE = "unshare"
"""What is reverted where a fold leaves these weights as they are."""


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graph.rewrite_contract.Apply`; nothing is changed but marked."""
    settle(model)
    without_copies(model)
    share(model)
    for value in model.graph.initializers.values():
        readers = [node for node, place in value.uses() if multiplies(node, place)]
        if len(readers) > 1 and is_constant(value) and len({_surroundings(node) for node in readers}) > 1:
            value.meta[OPAQUE] = True
    yield from ()


def _surroundings(product: ir.Node) -> tuple[Any, ...]:
    """What is directly before and after a product, with its constants."""
    data = next((value for value in product.inputs[:1] if value is not None), None)
    return _kind(data.producer() if data is not None else None), _kind(only_reader(product.outputs[0]))


def _kind(node: ir.Node | None) -> tuple[Any, ...]:
    if node is None:
        return ()
    entries = sorted((name, str(entry.value)) for name, entry in node.attributes.items())
    constants = [(place, value.name) for place, value in enumerate(node.inputs) if value and is_constant(value)]
    return node.domain, node.op_type, tuple(entries), tuple(constants)


KEEP_SHARED = Rewrite(UNSHARE, "weights of several products in unlike surroundings stay one weight", apply, keeps=True)

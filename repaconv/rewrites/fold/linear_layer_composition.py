"""affine: compose, add up and absorb linear operators over channels wherever this costs no more multiplications.

`repaconv.rewrites.fold.linear_graph` has the equations. The rewrite covers BatchNormalization in inference mode, linear
layers and 1x1 convolutions, per-channel scales and shifts, affines of norms, splits and concats of channels, constant
masks, and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph import activation_patterns
from repaconv.graph.canonical_form import normalize, shorten_views
from repaconv.graph.channel_axes import IMAGE, LAST
from repaconv.graph.models_in_onnx_ir import clean, merge_equal_constants
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.rotary_embedding_patterns import embedding_nodes
from repaconv.results import Change
from repaconv.rewrites.fold import (
    factors_before_products,
    norm_affines,
    operators_before_expands,
    operators_past_means,
    operators_past_views,
)
from repaconv.rewrites.fold.linear_graph_from_onnx import linear_graph
from repaconv.rewrites.fold.linear_graph_to_onnx import emit

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Fold the linear graph along the last axis and along axis 1, until nothing changes; in place."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    normalize(model)
    activation_patterns.group(model)
    norm_affines.split(model)
    changes: dict[str, Change] = {}
    for _ in range(ROUNDS):
        made = list(_round(model))
        changes |= {change.place: change for change in made}
        merge_equal_constants(model)
        if not CommonSubexpressionEliminationPass()(model).modified and not made:
            break
    operators_past_views.back_to_norms(model)
    clean(model)
    norm_affines.merge(model)
    activation_patterns.ungroup(model)
    yield from changes.values()


def _round(model: ir.Model) -> Iterator[Change]:
    embeddings = embedding_nodes(model)
    for place, operator in factors_before_products.move_before_products(model):
        yield Change(rewrite=AFFINE.name, place=place, description=f"{operator} -> a factor of the product before")
    operators_past_views.move_before_views(model, embeddings)
    shorten_views(model)
    clean(model)
    for layer in operators_past_means.move_past_means(model):
        yield Change(rewrite=AFFINE.name, place=layer, description=f"{layer} moved after a mean, to fewer numbers")
    for layer in operators_before_expands.move_before_expands(model):
        yield Change(rewrite=AFFINE.name, place=layer, description=f"{layer} moved before an Expand, to fewer numbers")
    for axis in (LAST, IMAGE):
        graph = linear_graph(model, axis, embeddings)
        graph.fold()
        yield from emit(model, graph, axis, AFFINE.name)
        graph.clear()
        shorten_views(model)
        clean(model)


ROUNDS = 6
"""Most rounds. Each round folds what the round before has made equal; two or three are usual."""

AFFINE = Rewrite(
    "affine", "along one axis of channels, for maps with constants that nothing else reads in between", apply
)

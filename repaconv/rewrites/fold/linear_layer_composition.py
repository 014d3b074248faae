"""affine: what is linear over channels is composed, added up and taken in, wherever that is cheaper.

See `repaconv.rewrites.fold.linear_graph` for the equations. It is exact for BatchNormalization that has learnt, linear
layers and 1x1 convolutions, per-channel scales and shifts, norms' affines, splits and concats of channels, constant
masks, and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph import activation_patterns
from repaconv.graph.canonical_form import normalise, one_view
from repaconv.graph.channel_axes import IMAGE, LAST
from repaconv.graph.model_rewriting import clean, without_copies
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change
from repaconv.rewrites.fold import norm_affines, operators_past_means, operators_past_views
from repaconv.rewrites.fold.linear_graph_from_onnx import linear_graph
from repaconv.rewrites.fold.linear_graph_to_onnx import emit

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graph.rewrite_contract.Apply`."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    normalise(model)
    activation_patterns.group(model)
    norm_affines.split(model)
    told: dict[str, Change] = {}
    for _ in range(ROUNDS):
        made = list(_round(model))
        told |= {change.place: change for change in made}
        without_copies(model)
        if not CommonSubexpressionEliminationPass()(model).modified and not made:
            break
    operators_past_views.back_to_norms(model)
    clean(model)
    norm_affines.merge(model)
    activation_patterns.ungroup(model)
    yield from told.values()


def _round(model: ir.Model) -> Iterator[Change]:
    operators_past_views.before_views(model)
    one_view(model)
    clean(model)
    for layer in operators_past_means.behind_means(model):
        yield Change(rewrite=AFFINE.name, place=layer, description=f"{layer} acts on a mean, not on all that it is of")
    for axis in (LAST, IMAGE):
        graph = linear_graph(model, axis)
        graph.fold()
        yield from emit(model, graph, axis, AFFINE.name)
        graph.let_go()
        one_view(model)
        clean(model)


ROUNDS = 6
"""Each finds what the one before has made equal; two or three are usual."""

AFFINE = Rewrite(
    "affine", "along one axis of channels, for maps with constants that nothing else reads in between", apply
)

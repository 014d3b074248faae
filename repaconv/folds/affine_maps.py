"""affine: what is linear over channels is composed, added up and taken in, wherever that is cheaper.

See `repaconv.folds.linear` for the equations. It is exact for BatchNormalization that has learnt, linear layers
and 1x1 convolutions, per-channel scales and shifts, norms' affines, splits and concats of channels, constant masks, and
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.artefacts import Change
from repaconv.folds import means, moves, norms
from repaconv.folds.edges import linear_graph
from repaconv.folds.emit import emit
from repaconv.graphs import activations
from repaconv.graphs.channels import IMAGE, LAST
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import clean, without_copies
from repaconv.graphs.normal import normalise, one_view

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    normalise(model)
    activations.group(model)
    norms.split(model)
    told: dict[str, Change] = {}
    for _ in range(ROUNDS):
        made = list(_round(model))
        told |= {change.place: change for change in made}
        without_copies(model)
        if not CommonSubexpressionEliminationPass()(model).modified and not made:
            break
    moves.back_to_norms(model)
    clean(model)
    norms.merge(model)
    activations.ungroup(model)
    yield from told.values()


def _round(model: ir.Model) -> Iterator[Change]:
    moves.before_views(model)
    one_view(model)
    clean(model)
    for layer in means.behind_means(model):
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

"""affine: what is linear over channels is composed, added up and taken in, wherever that is cheaper.

See `repaconv.forms.linear` for the equations. It is exact for BatchNormalization that has learnt, linear layers and 1x1
convolutions, per-channel scales and shifts, norms' affines, splits and concats along channels, constant masks, and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.artefact import Change
from repaconv.forms import activations, moves, norms
from repaconv.forms.contract import Rewrite
from repaconv.forms.edges import IMAGE, LAST, linear_graph
from repaconv.forms.emit import emit
from repaconv.forms.graph import clean
from repaconv.forms.normal import normalise, one_view

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.forms.contract.Apply`."""
    normalise(model)
    activations.group(model)
    norms.split(model)
    moves.before_views(model)
    one_view(model)
    clean(model)
    moves.behind_means(model)
    for axis in (LAST, IMAGE):
        graph = linear_graph(model, axis)
        graph.fold()
        yield from emit(model, graph, axis, AFFINE.name)
        one_view(model)
        clean(model)
    norms.merge(model)
    activations.ungroup(model)


AFFINE = Rewrite("affine", "along one axis of channels, for maps with constants that nothing else reads in between", apply)

"""shapes: leave out nodes that compute what is known already, or what follows from the shapes of the inputs.

Exporters write a size that a network's code reads as a chain of Shape, Gather, Cast and Concat. An Expand that its
reader would repeat, and axes that a reduction drops for its reader to add, are left out as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.model_rewriting import clean
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.shape_folding import fold_shapes
from repaconv.results import Change
from repaconv.rewrites.fold.computed_weights import SAVED

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Fold shapes; in place. It is a change if that leaves nodes out, besides those that nothing reads."""
    saved = model.meta.pop(SAVED, None)
    if saved is None:
        clean(model)
        before = len(model.graph)
        fold_shapes(model)
        saved = before - len(model.graph)
    if saved > 0:
        what = "1 node" if saved == 1 else f"{saved} nodes"
        yield Change(
            rewrite=SHAPES.name,
            place="",
            description=f"{what} removed: their results are known, or follow from the shapes of the inputs",
        )


SHAPES = Rewrite("shapes", "what depends on shapes and constants alone", apply, keeps=True)

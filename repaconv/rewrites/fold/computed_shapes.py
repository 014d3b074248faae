"""shapes: remove nodes whose results are known, or follow from the shapes of the graph's inputs.

If a network's code reads a size, exporters write a chain of Shape, Gather, Cast and Concat. Two more kinds of nodes are
removed: an Expand whose reader broadcasts anyway, and an Unsqueeze that adds the axes which a reduction dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.shape_folding import fold_shapes
from repaconv.results import Change
from repaconv.rewrites.fold.computed_weights import SAVED

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Fold shapes; in place. A change is reported if nodes are removed, not counting nodes that nothing reads."""
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

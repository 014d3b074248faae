"""nodes: shorter chains of views, and one node in place of equal ones, where no other fold changes the graph.

The other folds bring the graph into canonical form to read it (`repaconv.graph.canonical_form`), and merge equal
computations. Where they fold something, the smaller graph is written with it. Where they fold nothing, this rewrite
reports what became smaller, so that it is written as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.canonical_form import NODES_KEY
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Report how many nodes fewer the graph has than before its first canonical form, if it has fewer; in place."""
    clean(model)
    saved = model.meta.get(NODES_KEY, 0) - len(model.graph)
    if saved > 0:
        what = "1 node" if saved == 1 else f"{saved} nodes"
        description = f"{what} removed: shorter chains of views, and one node in place of equal ones"
        yield Change(rewrite=FEWER_NODES.name, place="", description=description)


FEWER_NODES = Rewrite(
    "nodes",
    "chains of views with a shorter equivalent, and equal nodes; only where nothing else folds",
    apply,
    keeps=True,
    alone=True,
)

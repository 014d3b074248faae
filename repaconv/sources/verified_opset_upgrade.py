"""An old graph brought to the opset that folds read, by ONNX's own converter, its weights no inputs; that is proved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core.errors import first_line
from repaconv.graph.onnx_files import opset_of
from repaconv.graph.opset_upgrade import raised
from repaconv.results import Link
from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.folded_graph_verification import GIVEN, proved

if TYPE_CHECKING:
    import onnx

RAISED = "ONNX at opset {}"


class Raised(NamedTuple):
    """The graph to fold, the links to it from the graph as given, and what was left alone and why."""

    graph: Evaluated
    links: tuple[Link, ...] = ()
    left: tuple[str, ...] = ()

    def proved(self, source: Path, given: Evaluated) -> Raised:
        """With the links; the graph as given, left alone, where the converter's computes something else.

        Raises:
            Refused: If the graph as given does not run, or if nothing could be compared.
        """
        if self.graph is given:
            return self
        links = proved(source, given, self.graph, ends=(GIVEN, RAISED.format(opset_of(self.graph.model))))
        if any(link.verdict == "failed" for link in links):
            why = f"{_old(given.model)}, and what ONNX's converter makes of it computes something else"
            return Raised(given, (), (why,))
        return self._replace(links=links)


def to_oldest(given: Evaluated) -> Raised:
    """The graph at the oldest opset that folds read; itself where it is of that, or cannot be brought to it."""
    try:
        newer = raised(given.model)
    except Exception as error:  # the converter's own, of many classes
        why = first_line(error)
        return Raised(given, (), (f"{_old(given.model)}, and ONNX's converter fails on it ({why}); export it anew",))
    return Raised(given if newer is given.model else Evaluated(newer))


def _old(given: onnx.ModelProto) -> str:
    return f"the graph is of opset {opset_of(given)}, where Softmax and Squeeze meant something else"

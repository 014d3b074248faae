"""Convert an ONNX graph of an old opset to the oldest opset that folds support, and verify the conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core.errors import first_line
from repaconv.graph.onnx_files import opset_of
from repaconv.graph.opset_upgrade import upgraded
from repaconv.results import Link
from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.folded_graph_verification import GIVEN, proved

if TYPE_CHECKING:
    import onnx

RAISED = "ONNX at opset {}"


class Raised(NamedTuple):
    """The graph to fold after the opset upgrade.

    Attributes:
        graph: The upgraded graph, or the original one.
        links: The comparisons of the original graph with the upgraded one.
        left: Why the graph was not upgraded, if it should have been.
    """

    graph: Evaluated
    links: tuple[Link, ...] = ()
    left: tuple[str, ...] = ()

    def proved(self, source: Path, given: Evaluated) -> Raised:
        """Verify the upgraded graph; return the original graph instead if the two compute different things.

        Args:
            source: The graph's file, for messages.
            given: The original graph.

        Raises:
            Refused: The original graph does not run, or nothing could be compared.
        """
        if self.graph is given:
            return self
        links = proved(source, given, self.graph, ends=(GIVEN, RAISED.format(opset_of(self.graph.model))))
        if any(link.verdict == "failed" for link in links):
            why = f"{_opset_message(given.model)}, and what ONNX's converter makes of it computes something else"
            return Raised(given, (), (why,))
        return self._replace(links=links)


def to_oldest(given: Evaluated) -> Raised:
    """Convert a graph to the oldest opset that folds support; newer graphs and failed conversions stay as they are."""
    try:
        newer = upgraded(given.model)
    except Exception as error:  # the converter raises many classes
        why = first_line(error)
        return Raised(
            given, (), (f"{_opset_message(given.model)}, and ONNX's converter fails on it ({why}); export it anew",)
        )
    return Raised(given if newer is given.model else Evaluated(newer))


def _opset_message(given: onnx.ModelProto) -> str:
    return f"the graph is of opset {opset_of(given)}, where Softmax and Squeeze meant something else"

"""onnxsim, trusted only as far as ONNX Runtime agrees: before against after, else the graph stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.artefact import Link
from repaconv.exporters.to_onnx import restore_names

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Simplified:
    """The graph to go on with, whether it is the simplified one, who simplified, and the proof."""

    model: onnx.ModelProto
    accepted: bool
    simplifier: str
    link: Link


def simplify(model: onnx.ModelProto, compare: Callable[[onnx.ModelProto], Link]) -> Simplified:
    """Simplify and compare. A graph that computes something else is thrown away; its link says failed.

    Args:
        model: The exported graph.
        compare: Judges the simplified graph by the exported one, on the same inputs.
    """
    try:
        import onnxsim

        name = f"onnxsim {onnxsim.__version__}"
        smaller, _ = onnxsim.simplify(model)
        restore_names(smaller, model)
        link = compare(smaller)
    except Exception as error:  # native code over a foreign graph: whatever it raises, the graph stays
        return Simplified(model, False, "none", not_done(f"onnxsim failed: {str(error).splitlines()[0]}"))
    if link.verdict != "passed":
        note = "its graph was thrown away, the one before it is what was written"
        return Simplified(model, False, name, link.model_copy(update={"note": note}))
    return Simplified(smaller, True, name, link)


def not_done(note: str) -> Link:
    """The link of a graph that was not simplified."""
    return Link(
        name="simplified",
        reference="ONNX as exported",
        candidate="ONNX simplified",
        tolerance=None,
        metrics=None,
        verdict="not verified",
        note=note,
    )

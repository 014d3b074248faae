"""onnxsim, trusted only as far as ONNX Runtime agrees: before against after, else the graph stays."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.core.errors import first_line
from repaconv.graph.onnx_files import opset_of, restore_names
from repaconv.onnx_export.opset_lowering import lower
from repaconv.onnx_export.torch_exporter import check
from repaconv.results import Link

if TYPE_CHECKING:
    import onnx

SIMPLIFIERS = ("auto", "onnxsim")
"""What ``--simplifier`` may be; both are onnxsim since onnxslim was removed."""
FORMS_OWN = ["fuse_qkv"]
"""Of onnxsim's passes those that undo what a form has written: whether layers of one input are one is for it to say."""


@dataclass(frozen=True)
class Simplified:
    """The graph to go on with, whether it is a simplified one, who simplified, and the proof."""

    model: onnx.ModelProto
    accepted: bool
    simplifier: str
    link: Link


def simplify(
    model: onnx.ModelProto,
    compare: Callable[[onnx.ModelProto], Link],
    lacks: Collection[str] = (),
) -> Simplified:
    """Simplify and compare. A graph that computes something else is thrown away; its link says failed.

    Args:
        model: The exported graph.
        compare: Judges a simplified graph by the exported one, on the same inputs.
        lacks: Operators that the target does not know: where onnxsim fuses nodes to one, it is written out again.
    """
    try:
        import onnxsim

        smaller, _ = onnxsim.simplify(model, skipped_optimizers=FORMS_OWN)
        if {node.op_type for node in smaller.graph.node} & set(lacks):
            smaller = lower(smaller, opset_of(smaller), lacks)
        restore_names(smaller, model)
        _without_empty_ends(smaller)
        check(smaller)
        link = compare(smaller)
    except ImportError:
        return Simplified(model, False, "none", not_done("onnxsim is not installed"))
    except Exception as error:  # native code over a foreign graph: whatever it raises, the graph stays
        return Simplified(model, False, "none", not_done(f"onnxsim failed: {first_line(error)}"))
    name = f"onnxsim {onnxsim.__version__}"
    if link.verdict == "passed":
        return Simplified(smaller, True, name, link.model_copy(update={"note": ""}))
    thrown_away = "the simplified graph was discarded; the unsimplified one was written"
    note = "; ".join(filter(None, [link.note, thrown_away]))
    return Simplified(model, False, name, link.model_copy(update={"note": note}))


def _without_empty_ends(model: onnx.ModelProto) -> None:
    """Leave out the names of inputs that are not given, behind all that are: onnxsim writes them where it drops one."""
    for node in model.graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()


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

"""onnxsim and onnxslim, trusted only as far as ONNX Runtime agrees: before against after, else the graph stays."""

from __future__ import annotations

import logging
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

TOOLS = ("onnxsim", "onnxslim")
"""In the order in which they are tried; the second where the first is not there or fails."""
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
    tools: tuple[str, ...] = TOOLS,
    lacks: Collection[str] = (),
) -> Simplified:
    """Simplify and compare. A graph that computes something else is thrown away; its link says failed.

    Args:
        model: The exported graph.
        compare: Judges a simplified graph by the exported one, on the same inputs.
        tools: Of `TOOLS`, tried one after the other until one runs through. One that runs through and is wrong ends it:
            that is something to know.
        lacks: Operators that the target does not know: where a tool fuses nodes to one, it is written out again.
    """
    problems: list[str] = []
    for tool in tools:
        try:
            smaller, name = _run(tool, model)
            if {node.op_type for node in smaller.graph.node} & set(lacks):
                smaller = lower(smaller, opset_of(smaller), lacks)
            restore_names(smaller, model)
            _without_empty_ends(smaller)
            check(smaller)
            link = compare(smaller)
        except ImportError:
            problems.append(f"{tool} is not installed")
            continue
        except Exception as error:  # native code over a foreign graph: whatever it raises, the graph stays
            problems.append(f"{tool} failed: {first_line(error)}")
            continue
        if link.verdict == "passed":
            return Simplified(smaller, True, name, link.model_copy(update={"note": "; ".join(problems)}))
        thrown_away = "the simplified graph was discarded; the unsimplified one was written"
        return Simplified(model, False, name, link.noted(thrown_away))
    return Simplified(model, False, "none", not_done("; ".join(problems)))


def _run(tool: str, model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """A new graph, and who made it."""
    if tool == "onnxslim":
        import onnx
        import onnxslim

        level = logging.getLogger().level
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        try:
            smaller = onnxslim.slim(copied)
        finally:
            logging.getLogger().setLevel(level)
        return smaller, f"onnxslim {onnxslim.__version__}"
    import onnxsim

    smaller, _ = onnxsim.simplify(model, skipped_optimizers=FORMS_OWN)
    return smaller, f"onnxsim {onnxsim.__version__}"


def _without_empty_ends(model: onnx.ModelProto) -> None:
    """Leave out the names of inputs that are not given, behind all that are: onnxsim writes them where it drops one."""
    for node in model.graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()


def not_done(note: str) -> Link:
    """The link of a graph that was not simplified."""
    return Link.concluded(
        "not_run", note=note, name="simplified", reference="ONNX as exported", candidate="ONNX simplified"
    )

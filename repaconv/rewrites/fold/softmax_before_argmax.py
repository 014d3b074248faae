"""argmax: choose the class of the highest score, not of the highest probability.

    argmax(softmax(x)) = argmax(x)

A Softmax along the axis that an ArgMax chooses along keeps the order of the scores. Segmentation networks that give a
class for each pixel are exported with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import attribute, is_read_once, made_by, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Let each ArgMax read the scores of a Softmax or LogSoftmax that nothing else reads; in place.

    An ArgMin stays: most of the lowest probabilities are rounded to the same zero.
    """
    for node in nodes_of(model, "ArgMax"):
        softmax = made_by(node.inputs[0], "Softmax", "LogSoftmax")
        if softmax is None or not is_read_once(softmax.outputs[0]):
            continue
        rank = rank_of(softmax.outputs[0])
        if not rank or int(attribute(node, "axis", 0)) % rank != int(attribute(softmax, "axis", -1)) % rank:
            continue
        node.replace_input_with(0, softmax.inputs[0])
        yield Change(rewrite=ARGMAX.name, place=node.name or "", description=f"{softmax.op_type} before it -> nothing")
    clean(model)


ARGMAX = Rewrite("argmax", "a Softmax of which an ArgMax alone reads the largest", apply)

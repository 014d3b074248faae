"""pool-padding: write a zero Pad before a MaxPool so that ONNX Runtime does not merge it into the pool.

ONNX Runtime 1.31 turns a Pad before a MaxPool into the pool's own padding, which is minus infinity instead of zero. If
all numbers of a window are negative, the maximum changes. ONNX Runtime does not merge a Pad that names its axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import Writer, attribute, constant, made_by, nodes_of, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

NAMED = 18
"""The first opset in which Pad can name its axes."""
NEVER_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Abs", "Exp")
"""Operators whose outputs are never negative, so that padded zeros change no maximum."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Name the axes of every zero Pad that a MaxPool reads, unless its input is never negative; in place."""
    if model.graph.opset_imports.get("", 0) < NAMED:
        return
    for node in nodes_of(model, "Pad"):
        out, given = node.outputs[0], [*node.inputs, None, None]
        widths = constant(given[1])
        if widths is None or given[3] is not None or attribute(node, "mode", "constant") != "constant":
            continue
        harmless = made_by(given[0], *NEVER_NEGATIVE) or (given[2] is not None and scalar(given[2]) != 0)
        if harmless or not any(user.op_type == "MaxPool" for user in out.consumers()):
            continue
        before, behind = np.split(widths, 2)
        axes = np.flatnonzero(before | behind)
        if not axes.size:
            continue
        write = Writer(model, node)
        around = write.exactly(np.concatenate([before[axes], behind[axes]]).astype(np.int64))
        new = write("Pad", given[0], around, given[2], write.exactly(axes.astype(np.int64)), mode="constant")
        set_shape(new, sizes(out), out)
        write.replace(out, new)
        yield Change(
            rewrite="pool-padding", place=node.name or "", description="zeros before a maximum, which names its axes"
        )


POOL_PADDING = Rewrite(
    "pool-padding", "a Pad of zeros that a MaxPool reads, behind what may be negative", apply, keeps=True
)

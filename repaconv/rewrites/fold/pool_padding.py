"""pool-padding: write a Pad before a pool as the pool's own padding, or so that ONNX Runtime does not merge them.

A pool's own padding is minus infinity. Zeros do the same where no number is negative (Keras pads so after Relu), if
every window has a pixel of the image: max(a, 0) = a. Elsewhere zeros may be the maximum. ONNX Runtime 1.31 merges them
there, too, unless the Pad names its axes.

An AveragePool that counts its padding takes zeros: PyTorch's older exporter writes each of its padded averages as both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, input_at, made_by, nodes_of, scalar
from repaconv.graph.operator_facts import MOVES, POOLS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, shaped_like, sizes
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import pad_value, spatial_padding

if TYPE_CHECKING:
    import onnx_ir as ir

NAMED = 18
"""The first opset in which Pad can name its axes."""
NEVER_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Abs", "Exp")
"""Operators whose outputs are never negative, so that padded zeros change no maximum."""
KEEPING = (*MOVES, "Concat", "Add", "Mul", *POOLS)
"""Operators whose outputs are never negative if no input is."""
DEPTH = 8
"""Operators before a value that are looked at."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Merge every Pad into the pools that read it, or let it name its axes if MaxPools read its zeros; in place."""
    named = model.graph.opset_imports.get("", 0) >= NAMED
    for node in nodes_of(model, "Pad"):
        readers, fill = {user.op_type for user in node.outputs[0].consumers()}, pad_value(node)
        if fill == 0 and "AveragePool" in readers:
            yield from _merged(model, node, "AveragePool")
        if "MaxPool" not in readers:
            continue
        if fill == -np.inf or (fill == 0 and _is_never_negative(node.inputs[0])):
            yield from _merged(model, node, "MaxPool")
        elif fill == 0 and named:
            yield from _with_axes(model, node)
    clean(model)


def _merged(model: ir.Model, node: ir.Node, operator: str) -> Iterator[Change]:
    """Write the Pad as padding of all its readers, if they are pools whose windows all have a pixel of the image."""
    out, pads = node.outputs[0], spatial_padding(node)
    pools = list(out.consumers())
    sums = [_total_padding(pool, pads, operator) if pool.graph is model.graph else None for pool in pools]
    whole = [each for each in sums if each is not None]
    if out.is_graph_output() or len(whole) < len(pools):
        return
    for pool, total in zip(pools, whole, strict=True):
        write = Writer(model, pool)
        known = {name: entry.value for name, entry in pool.attributes.items() if name != "auto_pad"}
        counted = {"count_include_pad": 1} if operator == "AveragePool" else {}
        new = shaped_like(write(operator, node.inputs[0], **{**known, "pads": total, **counted}), pool.outputs[0])
        write.replace(pool.outputs[0], new)
        yield Change(rewrite=POOL_PADDING.name, place=node.name or "", description=f"padding of {pool.name}")


def _total_padding(pool: ir.Node, pads: list[int] | None, operator: str) -> list[int] | None:
    """The total padding of a Pad and the pool after it; None if one ``operator`` cannot pad so, or it is another."""
    kernel = list(attribute(pool, "kernel_shape", ()))
    own = list(attribute(pool, "pads", None) or [0] * (2 * len(kernel)))
    plain = attribute(pool, "auto_pad", "NOTSET") in ("NOTSET", "VALID") and not attribute(pool, "ceil_mode", 0)
    if pool.domain or pool.op_type != operator or len(pool.outputs) > 1 or not plain:
        return None
    if operator == "AveragePool" and any(own) and not attribute(pool, "count_include_pad", 0):
        return None
    if pads is None or len(pads) != len(own) or any(step != 1 for step in attribute(pool, "dilations", ())):
        return None
    total = [mine + other for mine, other in zip(own, pads, strict=True)]
    return total if all(width < side for width, side in zip(total, 2 * kernel, strict=True)) else None


def _is_never_negative(value: ir.Value | None, depth: int = DEPTH) -> bool:
    """Whether an operator before a value guarantees that none of its numbers is negative."""
    if made_by(value, *NEVER_NEGATIVE):
        return True
    if (clip := made_by(value, "Clip")) is not None:
        least, most = scalar(input_at(clip, 1)), input_at(clip, 2)
        reached = 0.0 if most is None else scalar(most)  # a Clip whose maximum is below its minimum returns the maximum
        return least is not None and least >= 0 and reached is not None and reached >= 0
    node = made_by(value, *KEEPING) if depth else None
    if node is None:
        return False
    read = node.inputs if node.op_type in ("Concat", "Add", "Mul") else node.inputs[:1]  # others are indices or shapes
    return all(_is_never_negative(each, depth - 1) for each in read)


def _with_axes(model: ir.Model, node: ir.Node) -> Iterator[Change]:
    """Let a Pad of zeros name its axes."""
    out, widths = node.outputs[0], constant(node.inputs[1])
    if widths is None or input_at(node, 3) is not None or attribute(node, "mode", "constant") != "constant":
        return
    before, after = np.split(widths, 2)
    axes = np.flatnonzero(before | after)
    if not axes.size:
        return
    write = Writer(model, node)
    around = write.exactly(np.concatenate([before[axes], after[axes]]).astype(np.int64))
    new = write("Pad", node.inputs[0], around, input_at(node, 2), write.exactly(axes.astype(np.int64)), mode="constant")
    set_shape(new, sizes(out), out)
    write.replace(out, new)
    yield Change(
        rewrite=POOL_PADDING.name,
        place=node.name or "",
        description="a Pad of zeros before MaxPools, with its axes as an input",
    )


POOL_PADDING = Rewrite(
    "pool-padding",
    "a Pad of zeros or minus infinity that MaxPools read, or of zeros that AveragePools read",
    apply,
    keeps=True,
)

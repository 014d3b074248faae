"""rms-norm: replace LayerNorm by RMSNorm on residual streams whose mean over channels is made zero.

    LN(x) = RMS(x - mean_c(x)),    mean_c(x) = 0 if everything added to x has zero mean over channels

A linear layer is centered by subtracting the mean over outputs from its weight and bias. Convolutions and constants are
centered in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from repaconv.graph.axis_tracking import FULL, axis_after, axis_before
from repaconv.graph.nodes_and_constants import (
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    is_read,
    nodes_of,
    shape_of_constant,
)
from repaconv.graph.operator_facts import EPSILON, MOVES
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass
class Stream:
    """The values of one residual stream, and the nodes that write and normalize it.

    Attributes:
        axes: The axis of channels of each value, counted from 0.
        writers: Layers to center.
        constants: Constant inputs of nodes to center: (node, input position, axis).
        norms: LayerNorms that read the stream.
    """

    axes: dict[ir.Value, int] = field(default_factory=dict)
    writers: list[ir.Node] = field(default_factory=list)
    constants: list[tuple[ir.Node, int, int]] = field(default_factory=list)
    norms: list[ir.Node] = field(default_factory=list)


Failed = set[tuple["ir.Value", int]]
"""Values and their axes of channels in streams that cannot be centered."""


def stream_of(norm: ir.Node, failed: Failed) -> Stream | None:
    """The residual stream that a norm reads, with every value added to it; None if part of it cannot be centered.

    Then its values are added to ``failed``, so that the other norms of the stream need not follow it again.
    """
    stream = Stream()
    if _follow(norm, stream, failed):
        return stream
    failed.update(stream.axes.items())
    return None


def _follow(norm: ir.Node, stream: Stream, failed: Failed) -> bool:
    """Collect the stream that a norm reads; return whether all of it can be centered."""
    first = norm.inputs[0]
    rank = rank_of(first)
    if first is None or not rank:
        return False
    todo = [(first, rank - 1)]
    while todo:
        value, axis = todo.pop()
        if value in stream.axes:
            if stream.axes[value] != axis:
                return False
            continue
        stream.axes[value] = axis
        if (value, axis) in failed:
            return False
        before, after = _written(value, axis, stream), _read(value, axis, stream)
        if before is None or after is None:
            return False
        todo += before + after
    return True


def _written(value: ir.Value, axis: int, stream: Stream) -> list[tuple[ir.Value, int]] | None:
    """The values of the stream that a value is computed from; None if it cannot be centered."""
    node, shape = value.producer(), sizes(value)
    width = shape[axis] if shape is not None else None
    if node is None or node.domain != "" or shape is None or not isinstance(width, int) or width < 2:
        return None
    if _is_layer(node, axis, len(shape)):
        stream.writers.append(node)
        return []
    if node.op_type == "LayerNormalization":
        return [] if _centred_norm(node, axis, len(shape)) else None
    found = []
    for index in _parts(node):
        entry = node.inputs[index]
        at = axis_before(node, index, axis)
        if entry is None or at is None or at == FULL:
            return None
        if is_constant(entry):
            stream.constants.append((node, index, at))
        else:
            found.append((entry, at))
    return found or (None if not _parts(node) else [])


def _read(value: ir.Value, axis: int, stream: Stream) -> list[tuple[ir.Value, int]] | None:
    """The values of the stream that are computed from a value; None if something reads its mean."""
    if value.is_graph_output():
        return None
    found = []
    for node, index in value.uses():
        if node.domain or node.graph is not value.graph:
            return None
        if node.op_type == "LayerNormalization" and index == 0 and _over(node, value, axis):
            if node not in stream.norms:
                stream.norms.append(node)
            continue
        if index not in _parts(node):
            return None
        for place, output in enumerate(node.outputs):
            at = axis_after(node, index, axis, place)
            if at is None:
                return None
            found.append((output, at))
    return found


def _parts(node: ir.Node) -> list[int]:
    """The positions of inputs that a node only adds, concatenates or moves."""
    if node.domain != "":
        return []
    if node.op_type in ("Add", "Concat"):
        return list(range(len(node.inputs)))
    return [0] if node.op_type in (*MOVES, "Expand") else []


def _over(norm: ir.Node, value: ir.Value, axis: int) -> bool:
    """Whether a LayerNorm normalizes over exactly the channels."""
    rank = rank_of(value)
    return axis == rank - 1 and attribute(norm, "axis", -1) % rank == axis and len(norm.outputs) == 1


def _centred_norm(norm: ir.Node, axis: int, rank: int) -> bool:
    """Whether the output of a LayerNorm has zero mean: one scale for all channels, and no shift."""
    scale = constant(norm.inputs[1])
    shifted = input_at(norm, 2) is not None
    over = attribute(norm, "axis", -1) % rank == axis == rank - 1
    return over and scale is not None and not shifted and bool((scale == scale.flat[0]).all())


def _is_layer(node: ir.Node, axis: int, rank: int) -> bool:
    weight = shape_of_constant(node.inputs[1]) if node.op_type in ("MatMul", "Gemm", "Conv") else None
    if weight is None:
        return False
    if node.op_type == "Conv":
        bias = shape_of_constant(node.inputs[2]) if len(node.inputs) > 2 else weight
        return axis == 1 and attribute(node, "group", 1) == 1 and bias is not None
    if node.op_type == "Gemm":
        bias = shape_of_constant(node.inputs[2]) if len(node.inputs) > 2 else weight
        return axis == 1 and bias is not None and len(bias) > 0 and bias[-1] == (sizes(node.outputs[0]) or (None,))[-1]
    return axis == rank - 1 and len(weight) == 2


def _centre(write: Writer, node: ir.Node, index: int, axis: int) -> None:
    """Subtract the mean over an axis from a constant input of a node."""
    numbers = constant(node.inputs[index])
    assert numbers is not None
    node.replace_input_with(index, write.constant(numbers - numbers.mean(axis, keepdims=True), like=node.inputs[index]))


def _centre_layer(write: Writer, node: ir.Node) -> None:
    outputs = 1 if node.op_type == "MatMul" or not attribute(node, "transB", 0) else 0
    _centre(write, node, 1, 0 if node.op_type == "Conv" else outputs)
    if input_at(node, 2) is not None:
        _centre(write, node, 2, -1)


def _rms_norms(model: ir.Model) -> Iterator[Change]:
    done: set[ir.Node] = set()
    failed: Failed = set()
    for norm in nodes_of(model, "LayerNormalization"):
        stream = stream_of(norm, failed) if norm not in done and is_read(norm.outputs[0]) else None
        if stream is None:
            continue
        for writer in dict.fromkeys(stream.writers):
            _centre_layer(Writer(model, writer), writer)
        for node, index, axis in stream.constants:
            _centre(Writer(model, node), node, index, axis)
        for read in stream.norms:
            done.add(read)
            _write_rms(model, read)
        count = len(stream.writers) + len(stream.constants)
        yield Change(
            rewrite="rms-norm",
            place=norm.name or "",
            description=f"{len(stream.norms)} norms without their mean, {count} layers before them with a mean of zero",
        )


def _write_rms(model: ir.Model, norm: ir.Node) -> None:
    write = Writer(model, norm)
    settings = {
        "axis": -1,
        "epsilon": attribute(norm, "epsilon", EPSILON),
        "stash_type": attribute(norm, "stash_type", 1),
    }
    out = write("RMSNormalization", norm.inputs[0], norm.inputs[1], **settings)
    shift = input_at(norm, 2)
    write.replace(norm.outputs[0], out if shift is None else write("Add", out, shift))


RMS_NORM = Rewrite(
    "rms-norm",
    "LayerNorms over channels of a sum of linear layers, convolutions and constants, if only norms read the sum",
    _rms_norms,
    opset=23,
    order=85,
)

"""Which numbers of one tensor another one holds: chains of reshapes, transposes, splits and slices, read by example.

The chain is run on the positions 0, 1, 2, ... of its source, so any way to write the same layout is the same.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.forms.graph import Array, attribute, constant, dims, scalar

if TYPE_CHECKING:
    import onnx_ir as ir

MOVES = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Split", "Slice", "Gather")
ELEMENTWISE = ("Gelu", "Relu", "Sigmoid", "Tanh", "Erf", "HardSwish", "Softplus", "LeakyRelu", "Elu", "Abs", "Exp")


class Read(NamedTuple):
    """A node that computes with a moved value: the chain from that up to its source; None is an output of the graph."""

    chain: list[ir.Value]
    node: ir.Node | None


def reads(source: ir.Value) -> list[Read]:
    """All that is computed from a tensor, behind whatever moves or scales it."""
    found: list[Read] = []
    todo = [[source]]
    while todo:
        chain = todo.pop()
        if chain[0].is_graph_output():
            found.append(Read(chain, None))
        for node, _ in chain[0].uses():
            if _moves(node):
                todo += [[output, *chain] for output in node.outputs]
            else:
                found.append(Read(chain, node))
    return found


def columns_of(chain: list[ir.Value]) -> set[int] | None:
    """The columns of its source, along the last axis, that a value holds."""
    read, shape = layout(chain), dims(chain[-1])
    if read is None or not shape or shape[-1] is None:
        return None
    return {int(column) for column in np.unique(read.positions % shape[-1])}


class Layout(NamedTuple):
    """A value as positions in its source, with a free batch taken as 1, times a number.

    Attributes:
        source: Where the numbers come from.
        positions: In the source, in the value's shape.
        factor: That they are multiplied by on the way.
    """

    source: ir.Value
    positions: Array
    factor: float


def chain_of(value: ir.Value) -> list[ir.Value]:
    """The value, what it was moved or scaled from, and so on, up to what computes it."""
    chain = [value]
    while (node := chain[-1].producer()) is not None and _moves(node):
        chain.append(node.inputs[1] if node.op_type == "Mul" and scalar(node.inputs[0]) is not None else node.inputs[0])
    return chain


def layout(chain: list[ir.Value]) -> Layout | None:
    """The first value of a chain in terms of its last; None where a shape is not known."""
    source, factor = chain[-1], 1.0
    positions = example(source)
    for value in reversed(chain[:-1]):
        node = value.producer()
        assert node is not None
        if node.op_type in ("Mul", "Div"):
            by = scalar(node.inputs[1]) if scalar(node.inputs[1]) is not None else scalar(node.inputs[0])
            assert by is not None
            factor = factor / by if node.op_type == "Div" else factor * by
        elif positions is not None:
            positions = move(node, value, positions)
    return None if positions is None else Layout(source, positions, factor)


def example(value: ir.Value) -> Array | None:
    """The positions in a tensor, in its shape; one free dimension, the first, is taken as 1."""
    shape = dims(value)
    if shape is None or not shape or any(dim is None for dim in shape[1:]):
        return None
    sizes = [dim or 1 for dim in shape]
    return np.arange(np.prod(sizes, dtype=np.int64)).reshape(sizes)


def move(node: ir.Node, value: ir.Value, x: Array) -> Array | None:
    """What a node of `MOVES` makes of x; None where that depends on what is not constant."""
    rest = [constant(entry) for entry in node.inputs[1:] if entry is not None]
    if node.op_type in ("Reshape", "Flatten"):
        shape = dims(value)
        if shape is None or shape.count(None) > 1 or x.size % prod(dim or 1 for dim in shape):
            return None  # rows [B N, c] do not say what N is
        reshaped: Array = x.reshape([-1 if dim is None else dim for dim in shape])
        return reshaped
    if node.op_type == "Transpose":
        turned: Array = x.transpose(attribute(node, "perm", None))
        return turned
    if node.op_type == "Identity":
        return x
    if any(entry is None for entry in rest):
        return None
    if node.op_type == "Unsqueeze":
        return np.expand_dims(x, tuple(int(axis) for axis in rest[0]))  # type: ignore[union-attr]
    if node.op_type == "Squeeze":
        axes = tuple(int(axis) for axis in rest[0]) if rest else ()  # type: ignore[union-attr]
        squeezed: Array = x.squeeze(axes)
        return squeezed if axes else None
    if node.op_type == "Gather":
        return np.take(x, rest[0].astype(np.int64), axis=attribute(node, "axis", 0))  # type: ignore[union-attr]
    if node.op_type == "Split":
        return _split(node, value, x, rest)
    return _slice(x, rest)


def _split(node: ir.Node, value: ir.Value, x: Array, rest: list[Array | None]) -> Array | None:
    axis, count = attribute(node, "axis", 0), len(node.outputs)
    sizes = rest[0] if rest else None
    if sizes is None and x.shape[axis] % count:
        return None
    sizes = np.full(count, x.shape[axis] // count) if sizes is None else sizes
    place = list(node.outputs).index(value)
    begin = int(sizes[:place].sum())
    return x.take(np.arange(begin, begin + int(sizes[place])), axis=axis)


def _slice(x: Array, rest: list[Array | None]) -> Array | None:
    starts, ends = rest[0], rest[1]
    assert starts is not None
    assert ends is not None
    axes = rest[2] if len(rest) > 2 and rest[2] is not None else np.arange(len(starts))
    steps = rest[3] if len(rest) > 3 and rest[3] is not None else np.ones_like(starts)
    picked = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            return None
        picked[int(axis)] = slice(int(start), int(end), int(step))
    found: Array = x[tuple(picked)]
    return found


def _moves(node: ir.Node) -> bool:
    if node.domain != "":
        return False
    if node.op_type in ("Mul", "Div"):
        first, second = (scalar(entry) for entry in node.inputs)
        return second is not None or (node.op_type == "Mul" and first is not None)
    return node.op_type in MOVES

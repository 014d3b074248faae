"""What every node of a graph has to do at each call: operations, bytes to move, and the type it multiplies in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graphs.costs import flops_in
from repaconv.graphs.integers import SMALL
from repaconv.graphs.nodes import made_by, only_reader
from repaconv.graphs.operators import INTEGER_PRODUCTS, PRODUCTS, QUANTISING, SELECTIONS, VIEWS
from repaconv.graphs.shapes import as_numbers, sizes

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

UNCOUNTED = frozenset(("Einsum", "ConvTranspose", "DeformConv", "LSTM", "GRU", "RNN", "If", "Loop", "Scan"))
"""Operators that multiply in ways which are not counted here."""
FREE = frozenset(VIEWS) - {"Transpose"} | frozenset((*QUANTISING, "Shape", "Size", "Constant", "ConstantOfShape"))
"""What names numbers anew, or says of what type they are, and moves none."""
TYPES = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16", "INT8": "int8", "UINT8": "int8"}

HALVES = ("fp16", "bf16")
"""What takes half as many bytes as float32; tf32 takes as many."""


class Work(NamedTuple):
    """One node's: ``flops`` of its product, 0 of all else; ``bytes`` read and written, each once.

    Both are None where its shapes, or what it computes, are not known. ``precision`` is the type that it multiplies in,
    or has.
    """

    name: str
    operator: str
    precision: str
    flops: int | None
    bytes: int | None

    @property
    def multiplies(self) -> bool:
        """Whether it is one of those next to which all else is free."""
        return self.operator in (*PRODUCTS, *INTEGER_PRODUCTS)


def inputs_of(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """What a graph is given at each call; older files list their weights among the inputs."""
    weights = {entry.name for entry in proto.graph.initializer}
    return [entry for entry in proto.graph.input if entry.name not in weights]


def fix_shape(proto: onnx.ModelProto, shape: Sequence[int]) -> None:
    """Give the one input of a graph this shape, in place; what was said of later shapes is forgotten."""
    (taken,) = inputs_of(proto)
    for dim, size in zip(taken.type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size
    del proto.graph.value_info[:]
    for entry in proto.graph.output:
        entry.type.tensor_type.ClearField("shape")


def works(model: ir.Model, lowered: str | None = None) -> Iterator[Work]:
    """Node by node, in order, without those that cost nothing.

    Args:
        model: Its sizes are known as far as they can be.
        lowered: What the runtime computes float32 in.
    """
    for node in model.graph:
        if not _is_free(node):
            known = node.domain == "" and node.op_type not in UNCOUNTED
            yield Work(
                name=node.name or node.op_type,
                operator=node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}",
                precision=_lowered(_precision(node), lowered),
                flops=_flops(node) if known else None,
                bytes=_bytes(node, lowered) if known else None,
            )


def _is_free(node: ir.Node) -> bool:
    """Whether a runtime does it before the first call, by naming alone, or with sizes instead of numbers."""
    if node.domain == "" and node.op_type in FREE:
        return True
    given = [value for value in node.inputs if value is not None]
    return bool(given) and all(value.const_value is not None or _is_size(value) for value in given)


def _is_size(value: ir.Value) -> bool:
    """Whether it is a small integer tensor, as sizes and places are, that the graph computes itself."""
    shape = None if (found := sizes(value)) is None else as_numbers(found)
    whole = value.dtype is not None and value.dtype.name == "INT64"
    return whole and shape is not None and prod(shape) <= SMALL and not value.is_graph_input()


def _flops(node: ir.Node) -> int | None:
    return flops_in(node) if node.op_type in (*PRODUCTS, *INTEGER_PRODUCTS) else 0


def _precision(node: ir.Node) -> str:
    """Of a product that of its two sides: int8 where both are quantised; of all else that of what it gives."""
    if node.op_type in INTEGER_PRODUCTS:
        return "int8"
    sides = [_type(_stored(value)) for value in node.inputs[:2]] if node.op_type in PRODUCTS else []
    if sides and all(side == "int8" for side in sides):
        return "int8"
    return _type(node.outputs[0])


def _stored(value: ir.Value | None) -> ir.Value | None:
    """The quantised tensor that a value stands for, behind views; else the value."""
    seen = value
    while (view := made_by(seen, *VIEWS)) is not None:
        seen = view.inputs[0]
    quantised = made_by(seen, "DequantizeLinear")
    return quantised.inputs[0] if quantised is not None else value


def _type(value: ir.Value | None) -> str:
    name = "" if value is None or value.dtype is None else value.dtype.name
    return TYPES.get(name, name.lower())


def _lowered(precision: str, lowered: str | None) -> str:
    return lowered if lowered and precision == "fp32" else precision


def _bytes(node: ir.Node, lowered: str | None) -> int | None:
    """All inputs read and all outputs written; of a selection only what is selected is read."""
    written = [_size(_kept(value), lowered) for value in node.outputs if value.uses() or value.is_graph_output()]
    selects = node.op_type in SELECTIONS
    read = written if selects else [_size(_stored(value), lowered) for value in node.inputs if value is not None]
    known = [count for count in (*written, *read) if count is not None]
    return sum(known) if len(known) == len(written) + len(read) else None


def _kept(value: ir.Value) -> ir.Value:
    """What of a value is written: its quantised tensor, where nothing else is read of it."""
    quantised = only_reader(value, "QuantizeLinear")
    return quantised.outputs[0] if quantised is not None else value


def _size(value: ir.Value | None, lowered: str | None) -> int | None:
    """Bytes of a value; None where its shape or its type is not known."""
    shape = as_numbers(found) if (found := sizes(value)) is not None else None
    if value is None or shape is None or value.dtype is None:
        return None
    width = 2 if lowered in HALVES and _type(value) == "fp32" else value.dtype.itemsize
    return ceil(prod(shape) * width)

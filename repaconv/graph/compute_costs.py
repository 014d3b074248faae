"""Count what a graph costs: parameters, multiply-accumulates per image, and per node FLOPs, bytes and precision."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.einsum_equations import equation_of
from repaconv.graph.models_in_onnx_ir import read
from repaconv.graph.nodes_and_constants import Array, attribute, constant, is_read, made_by, nodes_of, only_reader
from repaconv.graph.onnx_files import flops_of
from repaconv.graph.operator_facts import (
    COUNTED_PRODUCTS,
    IMAGE_NORMS,
    INTEGER_PRODUCTS,
    PRODUCTS,
    QUANTIZING,
    RANDOM,
    RECURRENT_GATES,
    ROW_NORMS,
    SELECTIONS,
    VIEWS,
)
from repaconv.graph.shape_arithmetic import MOST_SHAPE_ENTRIES
from repaconv.graph.symbolic_shapes import Size, Sizes, as_numbers, sizes

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def parameters(model: ir.Model) -> int:
    """Count the trained parameters: the entries of floating constants with more than one entry.

    Each constant counts as often as the file stores it. Not counted are the ones and zeros of a norm without affine
    parameters, the statistics of a BatchNormalization, masks, copies of a constant for every image of a fixed
    batch, and repeated entries of a lookup table.

    Args:
        model: As `repaconv.graph.models_in_onnx_ir.as_stored` returns it: a constant that several nodes share occurs
            once.
    """
    fixed = fixed_values(model)
    return sum(_parameters_in(value, list(_uses(value, fixed))) for value in model.graph.initializers.values())


def fixed_values(model: ir.Model) -> set[ir.Value]:
    """Return all constants and all values computed from constants only, such as the Transpose of a weight."""
    found = {value for value in model.graph.initializers.values() if not value.is_graph_input()}
    for node in model.graph:
        if node.inputs and node.op_type not in RANDOM and all(value is None or value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def _uses(value: ir.Value, fixed: set[ir.Value]) -> Iterator[tuple[ir.Node, int]]:
    """Yield the nodes that compute with a constant, looking through nodes that have constant inputs only."""
    todo, seen = [value], {value}
    while todo:
        for node, place in todo.pop().uses():
            if any(out in fixed for out in node.outputs):
                todo += [out for out in node.outputs if out not in seen]
                seen.update(node.outputs)
            else:
                yield node, place


def _parameters_in(value: ir.Value, used: list[tuple[ir.Node, int]]) -> int:
    if value.const_value is None or value.is_graph_input() or not value.const_value.dtype.is_floating_point():
        return 0
    if all(node.op_type in PRODUCTS for node, _ in used):  # avoids reading the largest constants
        return value.const_value.size if value.const_value.size > 1 and used else 0
    numbers = constant(value)
    uses = [(node, place) for node, place in used if not _is_neutral(node, place, numbers)]
    if numbers is None or numbers.size < 2 or not uses:
        return 0
    if all(node.op_type == "Concat" for node, _ in uses) and len(numbers) > 1 and (numbers == numbers[:1]).all():
        return int(numbers[0].size)
    if numbers.ndim > 1 and min(numbers.shape[-2:]) > 1 and all(node.op_type == "Add" for node, _ in uses):
        distinct = len(np.unique(numbers))
        if 2 * distinct <= numbers.size:  # relative positions from a table; with two values, a mask
            return distinct if distinct > 2 else 0
    return int(numbers.size)


def _is_neutral(node: ir.Node, place: int, numbers: Array | None) -> bool:
    if numbers is None:
        return True
    if node.op_type == "BatchNormalization":
        return place > 2
    return (
        node.op_type in (*ROW_NORMS, *IMAGE_NORMS) and place > 0 and bool((numbers == (1 if place == 1 else 0)).all())
    )


class Matrices(NamedTuple):
    """Entries of the constants that products multiply by: as stored, and counted once per product that reads them."""

    held: int
    read: int


def constant_factors(model: ir.Model) -> dict[tuple[ir.Node, int], list[ir.Value]]:
    """Return the constants that products multiply by, by the node and the index of its input.

    Args:
        model: See `parameters`.
    """
    fixed = fixed_values(model)
    found: dict[tuple[ir.Node, int], list[ir.Value]] = {}
    for value in model.graph.initializers.values():
        for use in _uses(value, fixed):
            if value.const_value is not None and multiplies(*use):
                found.setdefault(use, []).append(value)
    return found


def matrices(factors: Mapping[tuple[ir.Node, int], Sequence[ir.Value]]) -> Matrices:
    """Count the entries of the constants that products multiply by, of `constant_factors`."""
    entries = [
        (value, value.const_value.size)
        for values in factors.values()
        for value in values
        if value.const_value is not None
    ]
    return Matrices(sum(dict(entries).values()), sum(size for _, size in entries))


def multiplies(node: ir.Node, place: int) -> bool:
    """Return whether a node multiplies by the input at this index."""
    if node.domain == "" and node.op_type == "Einsum":
        return bool(_flops_of_einsum(node))
    last = 2 if node.op_type in RECURRENT_GATES else 1
    return node.domain == "" and node.op_type in COUNTED_PRODUCTS and place <= last


def macs(model: ir.Model) -> int | None:
    """Count the multiply-accumulates of one image in products, convolutions, attention and recurrent layers.

    A dynamic dimension counts as 1. None if some shape is unknown.
    """
    found = list(_macs(model))
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def macs_at_ones(model: ir.Model, names: Collection[str]) -> int | None:
    """Count the multiply-accumulates of one inference in which the dynamic dimensions of these names are 1.

    None if some shape is unknown, or depends on them otherwise than as a product.
    """
    for node in nodes_of(model, *COUNTED_PRODUCTS):
        for value in (*node.inputs, *node.outputs):
            for size in sizes(value) or ():
                if not isinstance(size, int) and not set(size.names) <= set(names):
                    return None
    return macs(model)


def macs_at(proto: onnx.ModelProto, at: Mapping[str, int]) -> int | None:
    """Count the multiply-accumulates of one inference at given sizes of the dynamic dimensions.

    Args:
        proto: The graph; it is not modified.
        at: Size by dimension name, or by ``input[axis]`` for a dimension without a name.
    """
    return macs(_at_sizes(proto, at))


def known_macs_at(proto: onnx.ModelProto, at: Mapping[str, int]) -> int:
    """Count the multiply-accumulates as `macs_at` does, ignoring nodes of unknown shape."""
    return known_macs(_at_sizes(proto, at))


def largest_product_at(proto: onnx.ModelProto, at: Mapping[str, int]) -> int:
    """How many numbers the largest result of a MatMul has at given sizes, if one multiplies two computed values.

    Scores of attention grow with the square of the number of tokens, and so faster than any other value.

    Args:
        proto: The graph; it is not modified.
        at: As for `macs_at`.

    Returns:
        0 if none multiplies two computed values, or if no shape is known.
    """
    weights = {weight.name for weight in proto.graph.initializer}
    if not any(node.op_type == "MatMul" and weights.isdisjoint(node.input) for node in proto.graph.node):
        return 0
    shapes = [sizes(node.outputs[0]) for node in nodes_of(_at_sizes(proto, at), "MatMul")]
    return max((prod(known) for shape in shapes if shape and (known := as_numbers(shape))), default=0)


def _at_sizes(proto: onnx.ModelProto, at: Mapping[str, int]) -> ir.Model:
    """The graph with these sizes of the dynamic dimensions, and the shapes that follow; without large weights."""
    from repaconv.graph.graph_without_weights import weights_as_inputs
    from repaconv.graph.shape_folding import fold_shapes

    fixed = weights_as_inputs(proto)
    for value in fixed.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                size = at.get(dim.dim_param or f"{value.name}[{axis}]")
                if size is not None:
                    dim.dim_value = size
    graph = read(fixed)
    fold_shapes(graph)
    return graph


def known_macs_of_file(proto: onnx.ModelProto) -> int:
    """Count the multiply-accumulates of a graph from its file, ignoring nodes of unknown shape."""
    return known_macs(read(proto))


def known_macs(model: ir.Model) -> int:
    """Count the multiply-accumulates of a graph, ignoring nodes of unknown shape."""
    return sum(count or 0 for count in _macs(model))


def _macs(model: ir.Model) -> Iterator[int | None]:
    for node in model.graph:
        if node.domain == "" and node.op_type in COUNTED_PRODUCTS:
            flops = flops_in(node)
            yield None if flops is None else flops // 2


def flops_in(node: ir.Node) -> int | None:
    """Return two FLOPs per multiply-accumulate of a node; None if some shape is unknown.

    A dynamic dimension counts as 1.
    """
    if node.op_type == "Einsum":
        return _flops_of_einsum(node)
    first = 1 if node.op_type in RECURRENT_GATES else 2 if node.op_type in COUNTED_PRODUCTS else len(node.inputs)
    inputs = [sizes(value) for value in node.inputs[:first]]
    outputs = [sizes(value) for value in [value for value in node.outputs if value.name][:1]]
    if None in inputs or None in outputs:
        return None
    shapes = _numbers(outputs)
    if node.op_type in RECURRENT_GATES and attribute(node, "layout", 0) == 1:
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes if len(shape) > 2]
    return flops_of(node.op_type, _numbers(inputs), shapes)


def _flops_of_einsum(node: ir.Node) -> int | None:
    """Return the FLOPs of an Einsum that is a matrix product; 0 for a product of entries, and for three operands."""
    if any(sizes(value) is None for value in node.inputs):
        return None
    found = equation_of(node)
    if found is None or not found.is_matrix_product:
        return 0
    letters = {*"".join(found.operands)}.difference(*found.summed)
    return 2 * prod(_number(found.size[each]) for each in letters)


def _numbers(shapes: list[Sizes | None]) -> list[tuple[int, ...]]:
    return [tuple(_number(size) for size in shape or ()) for shape in shapes]


def _number(size: Size) -> int:
    return size if isinstance(size, int) else size.number


# Work per node and inference: FLOPs, memory traffic and precision.

UNCOUNTED = frozenset(("DeformConv", "If", "Loop", "Scan"))
"""Operators that multiply, but whose FLOPs are not counted here."""
FREE = frozenset(VIEWS) - {"Transpose"} | frozenset((*QUANTIZING, "Shape", "Size", "Constant", "ConstantOfShape"))
"""Operators that move no data at run time: they only rename, reshape or retype it."""
TYPES = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16", "INT8": "int8", "UINT8": "int8"}

HALVES = ("fp16", "bf16")
"""Types of two bytes. TF32 takes four, like float32."""


class Work(NamedTuple):
    """The work of one node: FLOPs of its product (0 for other operators), and bytes read and written, each once.

    Both are None if shapes or the operator are unknown. ``precision`` is the type in which it multiplies, or the
    type of its output.
    """

    name: str
    operator: str
    precision: str
    flops: int | None
    bytes: int | None

    @property
    def multiplies(self) -> bool:
        """Whether the node is a matrix product or convolution, which dominate the run time."""
        return self.operator in (*COUNTED_PRODUCTS, *INTEGER_PRODUCTS)


def runtime_inputs(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a graph that are not weights; older files list weights among the inputs."""
    weights = {entry.name for entry in proto.graph.initializer}
    return [entry for entry in proto.graph.input if entry.name not in weights]


def fix_shape(proto: onnx.ModelProto, shape: Sequence[int]) -> None:
    """Set the shape of a graph's only input, in place, and clear the recorded shapes of all other values."""
    (taken,) = runtime_inputs(proto)
    for dim, size in zip(taken.type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size
    del proto.graph.value_info[:]
    for entry in proto.graph.output:
        entry.type.tensor_type.ClearField("shape")


def node_works(model: ir.Model, lowered: str | None = None) -> Iterator[Work]:
    """Yield the work of each node in order, except nodes that cost nothing.

    Args:
        model: A graph with inferred shapes.
        lowered: The type in which the runtime computes float32, or None for float32.
    """
    for node in model.graph:
        if not _is_free(node):
            known = node.domain == "" and node.op_type not in UNCOUNTED and not _is_unknown_einsum(node)
            yield Work(
                name=node.name or node.op_type,
                operator=node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}",
                precision=_lowered(_precision(node), lowered),
                flops=_flops(node) if known else None,
                bytes=_bytes(node, lowered) if known else None,
            )


def _is_free(node: ir.Node) -> bool:
    """Return whether a node costs nothing per inference: a view, a constant computation, or shape arithmetic."""
    if node.domain == "" and node.op_type in FREE:
        return True
    given = [value for value in node.inputs if value is not None]
    return bool(given) and all(value.const_value is not None or _is_size(value) for value in given)


def _is_size(value: ir.Value) -> bool:
    """Return whether a value is a small integer tensor that the graph computes, as shapes and indices are."""
    shape = None if (found := sizes(value)) is None else as_numbers(found)
    whole = value.dtype is not None and value.dtype.name == "INT64"
    return whole and shape is not None and prod(shape) <= MOST_SHAPE_ENTRIES and not value.is_graph_input()


def _flops(node: ir.Node) -> int | None:
    return flops_in(node) if node.op_type in (*COUNTED_PRODUCTS, *INTEGER_PRODUCTS) else 0


def _is_unknown_einsum(node: ir.Node) -> bool:
    """Return whether a node is an Einsum of three operands and more, or of an equation or shapes that are not read."""
    return node.op_type == "Einsum" and (len(node.inputs) > 2 or equation_of(node) is None)


def _precision(node: ir.Node) -> str:
    """Return the type of a node: int8 for a product of two quantized inputs, else the type of its output."""
    if node.op_type in INTEGER_PRODUCTS:
        return "int8"
    sides = [_type(_quantized_source(value)) for value in node.inputs[:2]] if node.op_type in PRODUCTS else []
    if sides and all(side == "int8" for side in sides):
        return "int8"
    return _type(node.outputs[0])


def _quantized_source(value: ir.Value | None) -> ir.Value | None:
    """Return the quantized tensor before a DequantizeLinear and views, or the value itself."""
    seen = value
    while (view := made_by(seen, *VIEWS)) is not None:
        seen = view.inputs[0]
    quantized = made_by(seen, "DequantizeLinear")
    return quantized.inputs[0] if quantized is not None else value


def _type(value: ir.Value | None) -> str:
    name = "" if value is None or value.dtype is None else value.dtype.name
    return TYPES.get(name, name.lower())


def _lowered(precision: str, lowered: str | None) -> str:
    return lowered if lowered and precision == "fp32" else precision


def _bytes(node: ir.Node, lowered: str | None) -> int | None:
    """Count bytes of all inputs and outputs; a selection reads only what it selects."""
    written = [_size(_written_value(value), lowered) for value in node.outputs if is_read(value)]
    selects = node.op_type in SELECTIONS
    read = (
        written if selects else [_size(_quantized_source(value), lowered) for value in node.inputs if value is not None]
    )
    known = [count for count in (*written, *read) if count is not None]
    return sum(known) if len(known) == len(written) + len(read) else None


def _written_value(value: ir.Value) -> ir.Value:
    """Return the quantized tensor that is written in place of a value, if only a QuantizeLinear reads the value."""
    quantized = only_reader(value, "QuantizeLinear")
    return quantized.outputs[0] if quantized is not None else value


def _size(value: ir.Value | None, lowered: str | None) -> int | None:
    """Return the size of a value in bytes, or None if its shape or type is unknown."""
    shape = as_numbers(found) if (found := sizes(value)) is not None else None
    if value is None or shape is None or value.dtype is None:
        return None
    width = 2 if lowered in HALVES and _type(value) == "fp32" else value.dtype.itemsize
    return ceil(prod(shape) * width)

"""What a graph costs: its parameters, and the multiply-accumulates of one image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graphs.graph import read
from repaconv.graphs.nodes import Array, constant
from repaconv.graphs.operators import IMAGE_NORMS, PRODUCTS, RANDOM, ROW_NORMS
from repaconv.graphs.shapes import Size, Sizes, sizes
from repaconv.onnxfile import flops_of

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def parameters(model: ir.Model) -> int:
    """Numbers that were learnt: floating constants of more than one number, each as often as the file holds it.

    What a norm without affine must be given (ones, zeros), a BatchNormalization's statistics, masks, and copies of a
    constant for every image of a fixed batch, or of a table's entries, are none.

    Args:
        model: As `repaconv.graphs.graph.as_stored` has it: what several nodes share is one constant.
    """
    fixed = fixed_values(model)
    return sum(_learnt(value, list(_uses(value, fixed))) for value in model.graph.initializers.values())


def fixed_values(model: ir.Model) -> set[ir.Value]:
    """Constants, and what is computed of constants alone, such as the Transpose of a weight."""
    found = {value for value in model.graph.initializers.values() if not value.is_graph_input()}
    for node in model.graph:
        if node.inputs and node.op_type not in RANDOM and all(value is None or value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def _uses(value: ir.Value, fixed: set[ir.Value]) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that compute something with a constant, or with what is computed of constants and of it."""
    todo, seen = [value], {value}
    while todo:
        for node, place in todo.pop().uses():
            if any(out in fixed for out in node.outputs):
                todo += [out for out in node.outputs if out not in seen]
                seen.update(node.outputs)
            else:
                yield node, place


def _learnt(value: ir.Value, used: list[tuple[ir.Node, int]]) -> int:
    if value.const_value is None or value.is_graph_input() or not value.const_value.dtype.is_floating_point():
        return 0
    if all(node.op_type in PRODUCTS for node, _ in used):  # the largest are not looked at
        return value.const_value.size if value.const_value.size > 1 and used else 0
    numbers = constant(value)
    uses = [(node, place) for node, place in used if not _is_neutral(node, place, numbers)]
    if numbers is None or numbers.size < 2 or not uses:
        return 0
    if all(node.op_type == "Concat" for node, _ in uses) and len(numbers) > 1 and (numbers == numbers[:1]).all():
        return int(numbers[0].size)
    if numbers.ndim > 1 and min(numbers.shape[-2:]) > 1 and all(node.op_type == "Add" for node, _ in uses):
        distinct = len(np.unique(numbers))
        if 2 * distinct <= numbers.size:  # a table of relative positions, looked up; of two values, a mask
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
    """Numbers that products multiply by: as the file holds them, and again for each product that reads them."""

    held: int
    read: int


def matrices(model: ir.Model) -> Matrices:
    """What a graph holds of them.

    Args:
        model: See `parameters`.
    """
    fixed, held, read = fixed_values(model), 0, 0
    for value in model.graph.initializers.values():
        readers = sum(multiplies(node, place) for node, place in _uses(value, fixed))
        if value.const_value is not None and readers:
            held += value.const_value.size
            read += value.const_value.size * readers
    return Matrices(held, read)


def multiplies(node: ir.Node, place: int) -> bool:
    """Whether a node multiplies by what it reads at a place."""
    return node.domain == "" and node.op_type in PRODUCTS and place < 2


def macs(model: ir.Model) -> int | None:
    """Multiply-accumulates of one image in products, convolutions and attention; None where some shape is not known.

    A free size is 1: of a product of free sizes and numbers the numbers count.
    """
    found = list(_macs(model))
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def macs_at(proto: onnx.ModelProto, at: Mapping[str, int]) -> int | None:
    """Multiply-accumulates of a call whose dynamic dimensions have these values.

    Args:
        proto: The graph; it stays as it is.
        at: By name, or ``input[axis]`` where a dimension has none.
    """
    from repaconv.graphs.bare import bare
    from repaconv.graphs.settling import settle

    fixed = bare(proto)
    for value in fixed.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                size = at.get(dim.dim_param or f"{value.name}[{axis}]")
                if size is not None:
                    dim.dim_value = size
    graph = read(fixed)
    settle(graph)
    return macs(graph)


def macs_of(proto: onnx.ModelProto) -> int:
    """The same of a graph as its file has it, to compare two forms of it: what is not known counts as nothing."""
    return macs_in(read(proto))


def macs_in(model: ir.Model) -> int:
    """Multiply-accumulates as far as shapes are known."""
    return sum(count or 0 for count in _macs(model))


def _macs(model: ir.Model) -> Iterator[int | None]:
    for node in model.graph:
        if node.domain == "" and node.op_type in PRODUCTS:
            flops = flops_in(node)
            yield None if flops is None else flops // 2


def flops_in(node: ir.Node) -> int | None:
    """Two for each multiply-accumulate of a product, at free sizes of 1; None where some shape is not known."""
    inputs = [sizes(value) for value in (node.inputs[:2] if node.op_type in PRODUCTS else node.inputs)]
    outputs = [sizes(value) for value in node.outputs[:1]]
    if None in inputs or None in outputs:
        return None
    return flops_of(node.op_type, _numbers(inputs), _numbers(outputs))


def _numbers(shapes: list[Sizes | None]) -> list[tuple[int, ...]]:
    return [tuple(_number(size) for size in shape or ()) for shape in shapes]


def _number(size: Size) -> int:
    return size if isinstance(size, int) else size.number

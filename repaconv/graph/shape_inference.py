"""Shapes of a whole graph, in one pass from the inputs on: exporters leave much to be found, and simplifiers more."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from repaconv.graph.integer_values import INTS, Integers
from repaconv.graph.nodes_and_constants import attribute
from repaconv.graph.symbolic_shapes import (
    Free,
    Size,
    as_numbers,
    factors,
    is_free,
    parted,
    product,
    set_shape,
    shifted,
    size_of,
    sizes,
)

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def name_sizes(model: ir.Model) -> None:
    """Give every free size a name: an input's own, or one that is nobody else's; in place.

    What a file calls the sizes of other values is believed as far as it is made of the inputs' names: tools number
    what they do not know (``unk__0``), each from 0 on, and graphs are put together.
    """
    import onnx_ir as ir

    for value in model.graph.inputs:
        if value.shape is not None:
            set_shape(value, [_told(value, axis) for axis in range(len(value.shape))])
    known = {name for value in model.graph.inputs for size in sizes(value) or () for name in WORD.findall(str(size))}
    for node in model.graph:
        for value in node.outputs:
            told = sizes(value) or ()
            own = [is_free(size) and not known.issuperset(WORD.findall(str(size))) for size in told]
            if any(own):
                value.shape = ir.Shape([None if new else dim for new, dim in zip(own, value.shape or (), strict=True)])


WORD = re.compile(r"[^\W\d][\w.]*|\?")
"""A name in what a size is written as."""


def _told(value: ir.Value, axis: int) -> Size:
    """A size as a value's shape has it; one without a name gets one that is nobody else's."""
    dim = value.shape[axis] if value.shape is not None and axis < len(value.shape) else None
    if isinstance(dim, int) and dim >= 0:
        return dim
    return size_of(dim.value) if dim is not None and not isinstance(dim, int) and dim.value else _own(value, axis)


def _own(value: ir.Value, axis: int) -> Free:
    """A size that is nobody else's."""
    return Free((f"{value.name}.{axis}",))


def infer(model: ir.Model, *, only_new: bool = False) -> None:
    """Write down every shape that can be known; in place.

    Args:
        model: Its free sizes have names.
        only_new: Values that have a shape keep it.
    """
    known = Integers()
    for node in model.graph:
        told = all(value.shape is not None and value.dtype is not None for value in node.outputs)
        follow(known, node, model.graph.opset_imports.get("", 18), anew=not (only_new and told))


def follow(known: Integers, node: ir.Node, opset: int, *, anew: bool = True) -> None:
    """Shapes of a node's outputs, unless they stay, and its value where that is made of shapes."""
    rule = INTS.get(node.op_type) if node.domain == "" else None
    if rule and (found := rule(known, node)) is not None:
        known[node.outputs[0]] = found
        if node.outputs[0].dtype is None:
            _infer(known, node, opset)
        set_shape(node.outputs[0], (len(found),) if isinstance(found, list) else ())
        return
    if not anew:
        return
    shaped = _SHAPES.get(node.op_type) if node.domain == "" else None
    if shaped and (shape := shaped(known, node)) is not None:
        if node.outputs[0].dtype is None:
            _infer(known, node, opset)
        set_shape(node.outputs[0], shape)
        if node.op_type == "Range":
            node.outputs[0].dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
        elif node.op_type != "ConstantOfShape" and node.outputs[0].dtype is None and node.inputs[0] is not None:
            node.outputs[0].dtype = node.inputs[0].dtype
        return
    _infer(known, node, opset)


def _infer(known: Integers, node: ir.Node, opset: int) -> None:
    """By ONNX's own rules, of this node alone; what they cannot tell stays as the file said it."""
    import onnx_ir as ir

    if node.domain or any(
        entry.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for entry in node.attributes.values()
    ):
        return
    if any(value is not None and (value.shape is None or value.dtype is None) for value in node.inputs):
        return
    kinds = tuple(None if value is None else (int(value.dtype or 0), _dims(value)) for value in node.inputs)
    data = tuple(_entries(known, value) for value in node.inputs)
    attributes = tuple(ir.serde.serialize_attribute(entry).SerializeToString() for entry in node.attributes.values())
    found = _told_by_onnx(node.op_type, opset, attributes, kinds, data, len(node.outputs))
    for value, told in zip(node.outputs, found, strict=True):
        if told is None:
            continue
        kind, dims = told
        if value.shape is not None and len(value.shape) != len(dims):
            value.shape = None
        set_shape(value, [_inferred(dim, value, axis) for axis, dim in enumerate(dims)])
        value.dtype = ir.DataType(kind)


Dims = tuple[int | str, ...]
Kind = tuple[int, Dims]
"""ONNX's number of a type, and a shape."""


@lru_cache(maxsize=8192)
def _told_by_onnx(
    operator: str,
    opset: int,
    attributes: tuple[bytes, ...],
    kinds: tuple[Kind | None, ...],
    data: tuple[tuple[int, ...] | int | None, ...],
    count: int,
) -> tuple[Kind | None, ...]:
    """Type and shape of every output of a node; layers of a network are alike, so that most were asked for before.

    Args:
        operator: ONNX's own.
        opset: Of the graph.
        attributes: As a file has them.
        kinds: Of every input; None for one that is left out.
        data: Of every input that is a small integer tensor and known, its entries, or one number.
        count: Of outputs.
    """
    import onnx

    names = ["" if kind is None else str(place) for place, kind in enumerate(kinds)]
    node = onnx.helper.make_node(operator, names, [f"o{place}" for place in range(count)])
    node.attribute.extend(onnx.AttributeProto.FromString(entry) for entry in attributes)
    types = {
        name: onnx.helper.make_tensor_type_proto(kind[0], kind[1])
        for name, kind in zip(names, kinds, strict=True)
        if kind
    }
    known = {name: _tensor(name, numbers) for name, numbers in zip(names, data, strict=True) if numbers is not None}
    try:
        schema = onnx.defs.get_schema(operator, opset, "")
        imports = [onnx.helper.make_opsetid("", opset)]
        found = onnx.shape_inference.infer_node_outputs(schema, node, types, known, opset_imports=imports)
    except Exception:  # an operator that this onnx does not know, or types that do not fit: nothing is learnt
        return (None,) * count
    return tuple(_kind_of(found.get(name)) for name in node.output)


def _kind_of(told: onnx.TypeProto | None) -> Kind | None:
    if told is None or not told.HasField("tensor_type") or not told.tensor_type.HasField("shape"):
        return None
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in told.tensor_type.shape.dim)
    return told.tensor_type.elem_type, tuple(dims)


def _dims(value: ir.Value) -> Dims:
    return tuple(size if isinstance(size, int) else str(size) for size in sizes(value) or ())


def _entries(known: Integers, value: ir.Value | None) -> tuple[int, ...] | int | None:
    """A small integer tensor, if all of it is known."""
    import onnx_ir as ir

    found = known.int_of(value) if value is not None and value.dtype == ir.DataType.INT64 else None
    entries = as_numbers(found if isinstance(found, list) else [found]) if found is not None else None
    if entries is None:
        return None
    return tuple(entries) if isinstance(found, list) else entries[0]


def _tensor(name: str, numbers: tuple[int, ...] | int) -> onnx.TensorProto:
    import onnx

    entries, shape = ([numbers], []) if isinstance(numbers, int) else (list(numbers), [len(numbers)])
    return onnx.helper.make_tensor(name, onnx.TensorProto.INT64, shape, entries)


def _inferred(dim: int | str, value: ir.Value, axis: int) -> Size:
    if isinstance(dim, int):
        return dim
    return size_of(dim) if dim else _told(value, axis)


def _reshape(known: Integers, node: ir.Node) -> list[Size] | None:
    before, target = sizes(node.inputs[0]), known.int_of(node.inputs[1])
    if before is None or not isinstance(target, list):
        return None
    copies = not attribute(node, "allowzero", 0)
    wanted = [before[i] if size == 0 and copies else size for i, size in enumerate(target)]
    have, had = factors(before)
    want, taken = factors(tuple(size for size in wanted if size != -1))
    strange = [name for name in want if name not in have]
    if len(strange) == 1 and len(have) == len(want) == 1 and had == taken and -1 not in wanted:
        return [Free((have[0],)) if size == Free((strange[0],)) else size for size in wanted]  # what else could it be
    for name in want:
        if name in have:
            have.remove(name)
        elif -1 not in wanted:
            return wanted
        else:
            return [_own(node.outputs[0], i) if size == -1 else size for i, size in enumerate(wanted)]
    if -1 not in wanted:
        return wanted
    if not taken or had % taken:
        return None
    share = had // taken
    inferred = product([*(Free((name,)) for name in have), share])
    return [inferred if size == -1 else size for size in wanted]


def _expand(known: Integers, node: ir.Node) -> list[Size] | None:
    before, target = sizes(node.inputs[0]), known.int_of(node.inputs[1])
    if before is None or not isinstance(target, list):
        return None
    length = max(len(before), len(target))
    ours = (1,) * (length - len(before)) + before
    theirs = [1] * (length - len(target)) + target
    return [_met(a, b, _own(node.outputs[0], i)) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]


def _met(a: Size, b: Size, other: Free) -> Size:
    """What two sizes are when broadcast: of two that are free either may be 1, so it is neither."""
    if a == b or b == 1:
        return a
    if a == 1 or isinstance(b, int):
        return b
    return a if isinstance(a, int) else other


def _range(known: Integers, node: ir.Node) -> list[Size] | None:
    start, limit, step = (known.int_of(value) for value in node.inputs)
    return [limit] if start == 0 and step == 1 and isinstance(limit, (int, Free)) else None


def _of_shape(known: Integers, node: ir.Node) -> list[Size] | None:
    found = known.int_of(node.inputs[0])
    return found if isinstance(found, list) else None


def _windowed(_known: Integers, node: ir.Node) -> list[Size] | None:
    """Of a convolution or a pool over an image of free size, where its windows are said by numbers."""
    before, kernel = sizes(node.inputs[0]), attribute(node, "kernel_shape", None)
    weight = sizes(node.inputs[1]) if node.op_type == "Conv" else None
    kernel = kernel if kernel is not None or weight is None else as_numbers(weight[2:])
    fixed = before is None or not any(map(is_free, before[2:])) or len(node.outputs) > 1
    if fixed or before is None or kernel is None or attribute(node, "ceil_mode", 0):
        return None
    axes = len(kernel)
    auto, pads = attribute(node, "auto_pad", "NOTSET"), attribute(node, "pads", [0] * 2 * axes)
    if auto not in ("NOTSET", "VALID") or len(before) != axes + 2:
        return None
    steps, strides = (attribute(node, name, [1] * axes) for name in ("dilations", "strides"))
    ends = [pads[i] + pads[i + axes] - steps[i] * (kernel[i] - 1) for i in range(axes)]
    places = [_places(*one) for one in zip(before[2:], ends, strides, strict=True)]
    return [before[0], before[1] if weight is None else weight[0], *places]


def _places(size: Size, end: int, stride: int) -> Size:
    """How many windows fit where the last may start ``end`` behind the last place; what is equal is called so."""
    return parted(shifted(size, end - 1 + stride), stride)


_SHAPES: dict[str, Callable[[Integers, ir.Node], list[Size] | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "Range": _range,
    "ConstantOfShape": _of_shape,
    **dict.fromkeys(("Conv", "AveragePool", "MaxPool"), _windowed),
}

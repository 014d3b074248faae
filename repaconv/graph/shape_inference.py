"""Infer the shapes of a whole graph, with symbolic sizes, in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import attribute, constant, has_subgraphs, input_at
from repaconv.graph.shape_arithmetic import INTS, Integers, entries_of
from repaconv.graph.symbolic_shapes import (
    Size,
    Sizes,
    SymbolicSize,
    as_numbers,
    factors,
    floor_divided,
    is_dynamic,
    may_be_negative,
    parse_expression,
    parse_size,
    product,
    set_shape,
    size_plus,
    sizes,
)

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def name_sizes(model: ir.Model) -> None:
    """Give every dynamic dimension a name, in place: its own name for a graph input, else a unique one.

    A name that the file gives to a dimension of another value is kept only if it is made of the names of inputs.
    Tools number unknown dimensions from 0 on (``unk__0``), so equal names may mean different sizes in a merged
    graph.
    """
    import onnx_ir as ir

    for value in model.graph.inputs:
        if value.shape is not None:
            set_shape(value, [_recorded_size(value, axis) for axis in range(len(value.shape))])
    names = {str(size) for value in model.graph.inputs for size in sizes(value) or () if is_dynamic(size)}
    words = {word for name in names for word in WORD.findall(name)}
    for value in (value for node in model.graph for value in node.outputs):
        if value.shape is not None and any(map(is_dynamic, sizes(value) or ())):
            value.shape = ir.Shape([_size_text(dim, names, words) for dim in value.shape])


def _size_text(dim: int | ir.SymbolicDim, names: Collection[str], words: Collection[str]) -> int | str | None:
    """Return what a file says of a dimension in terms of the inputs' names; None if it says nothing that is known."""
    if isinstance(dim, int):
        return dim
    text = dim.value or ""
    if not text or text in names:
        return text or None
    size = parse_expression(text, names)
    if size is not None:
        return None if may_be_negative(size) else size if isinstance(size, int) else str(size)
    return f"({text})" if {*WORD.findall(text)}.issubset(words) else None


WORD = re.compile(r"[^\W\d][\w.]*|\?")
"""Matches a name in the text of a size."""


def _recorded_size(value: ir.Value, axis: int) -> Size:
    """Return a dimension as recorded; one without a name gets a unique name."""
    dim = value.shape[axis] if value.shape is not None and axis < len(value.shape) else None
    if isinstance(dim, int) and dim >= 0:
        return dim
    return (
        parse_size(dim.value)
        if dim is not None and not isinstance(dim, int) and dim.value
        else _unique_size(value, axis)
    )


def _unique_size(value: ir.Value, axis: int) -> SymbolicSize:
    """Return a dynamic size with a unique name."""
    return SymbolicSize((f"{value.name}.{axis}",))


def infer(model: ir.Model, *, only_new: bool = False) -> None:
    """Infer and record every shape of a graph, in place.

    Args:
        model: A graph whose dynamic dimensions have names (see `name_sizes`).
        only_new: Keep the shapes of values that have one.
    """
    known = Integers()
    for node in model.graph:
        is_known = all(value.shape is not None and value.dtype is not None for value in node.outputs)
        infer_node(known, node, model.graph.opset_imports.get("", 18), anew=not (only_new and is_known))


def infer_node(known: Integers, node: ir.Node, opset: int, *, anew: bool = True) -> None:
    """Infer the output shapes of a node unless ``anew`` is False, and its value if it is shape arithmetic."""
    floats = node.outputs[0].dtype is not None and node.outputs[0].dtype.is_floating_point()
    rule = INTS.get(node.op_type) if node.domain == "" and not floats else None
    if rule and (found := rule(known, node)) is not None:
        known[node.outputs[0]] = found
        if node.outputs[0].dtype is None:
            _infer(known, node, opset)
        set_shape(node.outputs[0], (len(found),) if isinstance(found, list) else ())
        return
    if not anew:
        return
    if node.domain == MICROSOFT or (node.op_type in NORMS_OF_MICROSOFT and not node.domain):
        _infer_of_microsoft(known, node, opset)
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


def _infer_of_microsoft(known: Integers, node: ir.Node, opset: int) -> None:
    """Infer the output of an operator that ONNX Runtime's optimizer writes; unknown shapes keep what the file recorded.

    A fused convolution has the shape of the convolution, and a fused product that of the product. All others have the
    shape of their first input. Further outputs of a norm are that shape, too, or left unknown.
    """
    import onnx_ir as ir

    x, out = node.inputs[0], node.outputs[0]
    if x is None or sizes(x) is None:
        return
    if node.op_type in AS_FIRST_INPUT or node.op_type in NORMS_OF_MICROSOFT:
        for value in (out, *node.outputs[SUM_OF_SKIP:]):
            set_shape(value, sizes(x), x)
        return
    plain = PLAIN_OPERATOR.get(node.op_type)
    inputs = [_as_multiplied(node, place, value) for place, value in enumerate(node.inputs[:3])] if plain else []
    if plain is None or any(value is None for value in inputs[:2]):
        return
    kept = [entry for name, entry in node.attributes.items() if name in PLAIN_ATTRIBUTES.get(plain, ())]
    copy = ir.Node("", plain, [value for value in inputs if value is not None], kept)
    copy.outputs[0].name = out.name
    infer_node(known, copy, opset)
    set_shape(out, sizes(copy.outputs[0]), copy.outputs[0])


def _as_multiplied(node: ir.Node, place: int, value: ir.Value | None) -> ir.Value | None:
    """A value of an input's shape, turned as a FusedMatMul multiplies it; None if it transposes the batch as well.

    It is not the input itself, which would count the node whose shape is inferred among its readers.
    """
    import onnx_ir as ir

    if value is None:
        return None
    alike, shape = ir.Value(name=value.name), sizes(value)
    side = "AB"[place] if node.op_type == "FusedMatMul" and place < len("AB") else ""
    if side and attribute(node, f"transBatch{side}", 0):
        return None
    if side and shape is not None and len(shape) > 1 and attribute(node, f"trans{side}", 0):
        shape = (*shape[:-2], shape[-1], shape[-2])
    set_shape(alike, shape, value)
    return alike


def _infer(known: Integers, node: ir.Node, opset: int) -> None:
    """Run ONNX's shape inference on one node; unknown shapes keep what the file recorded."""
    import onnx_ir as ir

    if node.domain or has_subgraphs(node):
        return
    if any(value is not None and (value.shape is None or value.dtype is None) for value in node.inputs):
        return
    kinds = tuple(None if value is None else (int(value.dtype or 0), _dims(value)) for value in node.inputs)
    data = tuple(_entries(known, value) for value in node.inputs)
    attributes = tuple(ir.serde.serialize_attribute(entry).SerializeToString() for entry in node.attributes.values())
    found = _infer_with_onnx(node.op_type, opset, attributes, kinds, data, len(node.outputs))
    for value, inferred in zip(node.outputs, found, strict=True):
        if inferred is None:
            continue
        kind, dims = inferred
        if value.shape is not None and len(value.shape) != len(dims):
            value.shape = None
        set_shape(value, [_inferred(dim, value, axis) for axis, dim in enumerate(dims)])
        value.dtype = ir.DataType(kind)


Dims = tuple[int | str, ...]
Kind = tuple[int, Dims]
"""ONNX type number and shape."""


@lru_cache(maxsize=8192)
def _infer_with_onnx(
    operator: str,
    opset: int,
    attributes: tuple[bytes, ...],
    kinds: tuple[Kind | None, ...],
    data: tuple[tuple[int, ...] | int | None, ...],
    count: int,
) -> tuple[Kind | None, ...]:
    """Infer type and shape of every output of a node. Layers repeat, so most calls hit the cache.

    Args:
        operator: Operator of ONNX's default domain.
        opset: Opset of the graph.
        attributes: Serialized attributes.
        kinds: Type and shape of every input; None for an omitted one.
        data: Entries of every input that is a known small integer tensor, or one number for a scalar.
        count: Number of outputs.
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
    except Exception:  # an operator unknown to this onnx, or types that do not match
        return (None,) * count
    return tuple(_kind_of(found.get(name)) for name in node.output)


def _kind_of(type_proto: onnx.TypeProto | None) -> Kind | None:
    if type_proto is None or not type_proto.HasField("tensor_type") or not type_proto.tensor_type.HasField("shape"):
        return None
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in type_proto.tensor_type.shape.dim)
    return type_proto.tensor_type.elem_type, tuple(dims)


def _dims(value: ir.Value) -> Dims:
    return tuple(size if isinstance(size, int) else str(size) for size in sizes(value) or ())


def _entries(known: Integers, value: ir.Value | None) -> tuple[int, ...] | int | None:
    """Return the entries of a small integer tensor if all are numbers, else None."""
    import onnx_ir as ir

    found = known.int_of(value) if value is not None and value.dtype == ir.DataType.INT64 else None
    entries = as_numbers(entries_of(found)) if found is not None else None
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
    return parse_size(dim) if dim else _recorded_size(value, axis)


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
        return [
            SymbolicSize((have[0],)) if size == SymbolicSize((strange[0],)) else size for size in wanted
        ]  # the only match
    for name in want:
        if name in have:
            have.remove(name)
        elif -1 not in wanted:
            return wanted
        else:
            return [_unique_size(node.outputs[0], i) if size == -1 else size for i, size in enumerate(wanted)]
    if -1 not in wanted:
        return wanted
    if not taken or had % taken:
        return None
    share = had // taken
    inferred = product([*(SymbolicSize((name,)) for name in have), share])
    return [inferred if size == -1 else size for size in wanted]


def _expand(known: Integers, node: ir.Node) -> list[Size] | None:
    before, target = sizes(node.inputs[0]), known.int_of(node.inputs[1])
    if before is None or not isinstance(target, list):
        return None
    length = max(len(before), len(target))
    ours = (1,) * (length - len(before)) + before
    theirs = [1] * (length - len(target)) + target
    return [
        _broadcast_size(a, b, _unique_size(node.outputs[0], i))
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]


def _tile(known: Integers, node: ir.Node) -> list[Size] | None:
    """Infer the output shape of a Tile, of which ONNX's own inference leaves dynamic sizes and repeats open."""
    before, repeats = sizes(node.inputs[0]), known.int_of(node.inputs[1])
    if before is None or not isinstance(repeats, list) or len(repeats) != len(before):
        return None
    if any(map(may_be_negative, repeats)):
        return None
    return [product([size, count]) for size, count in zip(before, repeats, strict=True)]


def _broadcast_size(a: Size, b: Size, other: SymbolicSize) -> Size:
    """Return the broadcast of two sizes. Either of two dynamic sizes may be 1, so their result is a new size."""
    if a == b or b == 1:
        return a
    if a == 1 or isinstance(b, int):
        return b
    return a if isinstance(a, int) else other


def _range(known: Integers, node: ir.Node) -> list[Size] | None:
    start, limit, step = (known.int_of(value) for value in node.inputs)
    if start != 0 or step != 1 or not isinstance(limit, (int, SymbolicSize)) or may_be_negative(limit):
        return None
    return [limit]


def _of_shape(known: Integers, node: ir.Node) -> list[Size] | None:
    found = known.int_of(node.inputs[0])
    return found if isinstance(found, list) else None


def _windowed(_known: Integers, node: ir.Node) -> list[Size] | None:
    """Infer the output shape of a convolution or pooling over an image with dynamic size and constant windows."""
    before, kernel = sizes(node.inputs[0]), attribute(node, "kernel_shape", None)
    weight = sizes(node.inputs[1]) if node.op_type == "Conv" else None
    kernel = kernel if kernel is not None or weight is None else as_numbers(weight[2:])
    fixed = before is None or not any(map(is_dynamic, before[2:])) or len(node.outputs) > 1
    if fixed or before is None or kernel is None or attribute(node, "ceil_mode", 0):
        return None
    axes = len(kernel)
    auto, pads = attribute(node, "auto_pad", "NOTSET"), attribute(node, "pads", [0] * 2 * axes)
    if len(before) != axes + 2:
        return None
    steps, strides = (attribute(node, name, [1] * axes) for name in ("dilations", "strides"))
    if auto.startswith("SAME"):
        kernel, pads = [1] * axes, [0] * 2 * axes  # as many windows as of one pixel
    ends = [pads[i] + pads[i + axes] - steps[i] * (kernel[i] - 1) for i in range(axes)]
    places = [_places(*one) for one in zip(before[2:], ends, strides, strict=True)]
    return [before[0], before[1] if weight is None else weight[0], *places]


def _places(size: Size, end: int, stride: int) -> Size:
    """Count the windows: floor((size + end - 1 + stride) / stride). Equal counts get equal names."""
    return floor_divided(size_plus(size, end - 1 + stride), stride)


def _resized(known: Integers, node: ir.Node) -> list[Size] | None:
    """Infer the output shape of a Resize or Upsample."""
    before = sizes(node.inputs[0])
    if before is None:
        return None
    axes = [int(axis) % len(before) for axis in attribute(node, "axes", range(len(before)))]
    to_sizes = input_at(node, 3) is not None
    return _to_sizes(known, node, before, axes) if to_sizes else _by_scales(node, before, axes)


def _to_sizes(known: Integers, node: ir.Node, before: Sizes, axes: Sequence[int]) -> list[Size] | None:
    wanted = known.int_of(node.inputs[3])
    stretches = attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    if not stretches or not isinstance(wanted, list) or len(wanted) != len(axes):
        return None
    after = list(before)
    for axis, size in zip(axes, wanted, strict=True):
        after[axis] = size
    return after


def _by_scales(node: ir.Node, before: Sizes, axes: Sequence[int]) -> list[Size] | None:
    place = 2 if node.op_type == "Resize" and len(node.inputs) > 2 else 1
    given = constant(node.inputs[place]) if len(node.inputs) > place else attribute(node, "scales", None)
    if given is None:
        return None
    factors_of = dict(zip(axes, np.asarray(given, np.float64), strict=False))
    if len(factors_of) < np.size(given) or not factors_of:
        return None
    unknown = [_recorded_size(node.outputs[0], axis) for axis in range(len(before))]
    return [_times(size, factors_of.get(axis, 1.0), unknown[axis]) for axis, size in enumerate(before)]


def _times(size: Size, factor: float, unknown: Size) -> Size:
    """A size times a factor, rounded down; ``unknown`` where runtimes may round differently."""
    if factor == int(factor):
        return product([size, int(factor)])
    if not isinstance(size, int):
        return unknown
    exact = size * factor
    return int(exact) if abs(exact - round(exact)) > 1e-4 * size else unknown


def _as_input(_known: Integers, node: ir.Node) -> tuple[Size, ...] | None:
    """Infer the output shape of a normalization, which ONNX's own inference leaves open."""
    return sizes(node.inputs[0])


MICROSOFT = "com.microsoft"
"""The domain of the operators that ONNX Runtime's optimizer writes. Source: its ContribOperators.md."""
AS_FIRST_INPUT = (
    *("BiasGelu", "FastGelu", "Gelu", "QuickGelu"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)
NORMS_OF_MICROSOFT = ("SimplifiedLayerNormalization",)
"""Operators that it writes into ONNX's own domain, which does not have them."""
SUM_OF_SKIP = 3
"""The output of a SkipLayerNormalization that is the sum of its inputs."""
PLAIN_OPERATOR = {"FusedConv": "Conv", "FusedGemm": "Gemm", "FusedMatMul": "MatMul"}
"""The operator of ONNX that a fused one begins with."""
PLAIN_ATTRIBUTES = {
    "Conv": ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"),
    "Gemm": ("alpha", "beta", "transA", "transB"),
}

_SHAPES: dict[str, Callable[[Integers, ir.Node], Sequence[Size] | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "ConstantOfShape": _of_shape,
    **dict.fromkeys(("Conv", "AveragePool", "MaxPool"), _windowed),
    **dict.fromkeys(("GroupNormalization", "MeanVarianceNormalization"), _as_input),
    **dict.fromkeys(("Resize", "Upsample"), _resized),
}

"""Sizes of a graph's dynamic input dimensions that its weights decide, e.g. the channels of an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import constants_of
from repaconv.graph.operator_facts import ARITHMETIC, DEFAULT_DOMAIN, ROW_NORMS, UNARY

if TYPE_CHECKING:
    import onnx

Dims = tuple[int | str, ...]
_SAME = UNARY | {"Cast", "Clip", "Dropout", "Identity", "QuantizeLinear", "DequantizeLinear"}


def fix_sizes_from_weights(model: onnx.ModelProto) -> None:
    """Fix the dynamic dimensions of inputs of which the graph takes one size only, in place.

    Exporters declare the channels of an image as dynamic (Optimum: ``pixel_values`` [batch_size, num_channels, height,
    width]), while the first convolution takes 3. Dimensions that share a name are not fixed.
    """
    stored = {weight.name for weight in model.graph.initializer}
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input if value.name not in stored}
    names = Counter(dim.dim_param for dims in inputs.values() for dim in dims if dim.dim_param)
    sizes = {
        name: tuple(dim.dim_value if dim.HasField("dim_value") else f"{name}[{axis}]" for axis, dim in enumerate(dims))
        for name, dims in inputs.items()
    }
    only = input_sizes_from_weights(model, sizes, strict=True)
    for name, dims in inputs.items():
        for axis, dim in enumerate(dims):
            if sizes[name][axis] in only and names[dim.dim_param] < 2:
                dim.dim_value = only[sizes[name][axis]]


def input_sizes_from_weights(
    model: onnx.ModelProto, inputs: Mapping[str, Dims], *, strict: bool = False
) -> dict[str, int]:
    """Return the sizes that weights demand of dynamic dimensions, such as the channels of an image.

    Inputs are followed through elementwise operators, transposes and pads of pixels to the first layers that read them.

    Args:
        model: The graph.
        inputs: The dimensions of its inputs, by name; a dynamic one is given by its name.
        strict: Whether to return only sizes that are the only ones possible. Otherwise they are the likely ones: an
            added constant of several numbers also takes one number, and a Pad may pad channels.
    """
    weights = {name: tuple(weight.dims) for name, weight in constants_of(model.graph).items()}
    known, found = {name: dims for name, dims in inputs.items() if dims}, dict[str, int]()
    for node in model.graph.node if known else ():
        if node.domain not in DEFAULT_DOMAIN or not node.input:
            continue
        place = next((place for place, name in enumerate(node.input[:2]) if name in known), None)
        if place is None:
            continue
        dims = known[node.input[place]]
        others = [weights.get(name) for name in node.input]
        for axis, size in _demanded(node, place, dims, others, strict=strict):
            if -len(dims) <= axis < len(dims) and isinstance(dim := dims[axis], str):
                found.setdefault(dim, size)
        if (after := _dims_after(node, place, dims, others, strict=strict)) is not None:
            known[node.output[0]] = after
    return found


def _demanded(
    node: onnx.NodeProto, place: int, dims: Dims, weights: Sequence[tuple[int, ...] | None], *, strict: bool
) -> list[tuple[int, int]]:
    """The axes of a node's input whose sizes its weights decide, and the sizes."""
    kind, number = node.op_type, {entry.name: entry.i for entry in node.attribute}
    other = weights[1 - place] if len(weights) > 1 else None
    if other is None or (place and kind not in ("MatMul", *ARITHMETIC)):
        return []
    if kind == "Conv" and len(other) > 2:
        return [(1, other[1] * number.get("group", 1))]
    if kind in ("ConvTranspose", "BatchNormalization", "InstanceNormalization"):
        return [(1, other[0])]
    if kind == "MatMul" and len(other) > 1:
        return [(-2, other[-1])] if place else [(-1, other[-2])]
    if kind == "Gemm":
        return [(0 if number.get("transA") else 1, other[1 if number.get("transB") else 0])]
    if strict:
        return []
    if kind in ROW_NORMS:
        return [(axis - len(other), size) for axis, size in enumerate(other) if size > 1]
    if kind in ARITHMETIC and len(other) <= len(dims):
        return [(axis - len(other), size) for axis, size in enumerate(other) if size > 1]
    return []


def _dims_after(
    node: onnx.NodeProto, place: int, dims: Dims, weights: Sequence[tuple[int, ...] | None], *, strict: bool
) -> Dims | None:
    """The dimensions of a node's output if they are those of its input; None where that is unknown."""
    if node.op_type in _SAME and not place:
        return dims
    if node.op_type in ARITHMETIC and (other := weights[1 - place]) is not None and len(other) <= len(dims):
        others = (*[1] * (len(dims) - len(other)), *other)
        return tuple(0 if strict and size > 1 else dim for dim, size in zip(dims, others, strict=True))
    if node.op_type == "Transpose":
        order = next((list(entry.ints) for entry in node.attribute if entry.name == "perm"), [])
        order = order or list(range(len(dims)))[::-1]
        return tuple(dims[axis] for axis in order) if len(order) == len(dims) else None
    if node.op_type == "Pad" and not place and len(dims) > 2 and not strict:
        return (*dims[:2], *[0] * (len(dims) - 2))  # pixels of unknown number; images and channels are rarely padded
    return None

"""convolution: fold scales, shifts, other convolutions and parallel branches into convolutions of any kernel size.

    s (w * x + b) + t = (s w) * x + (s b + t)

The steps, which `apply` repeats until none of them changes the graph:

- `absorb_scales_and_shifts` (`repaconv.rewrites.fold.scales_after_convolutions`): what follows a convolution.
- `move_borders_into_padding`: an explicitly written border.
- `fold_channel_orders`: channels that are reordered or normalized before a convolution.
- `compose_in_series`: convolutions in series, and scales before a convolution.
- `merge_parallel`: parallel convolutions whose outputs are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.algebra.channel_maps import Vector, channel_vector
from repaconv.algebra.convolution_kernels import (
    Kernel,
    composed,
    composed_size,
    eye,
    fits,
    size_of,
    summed,
)
from repaconv.graph import activation_patterns
from repaconv.graph.canonical_form import normalize
from repaconv.graph.channel_axes import IMAGE, affine_of, scale_and_shift
from repaconv.graph.constants_of_dynamic_shape import broadcast_constant, slice_assignment
from repaconv.graph.index_selections import Places, perm_of, selection_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    is_constant,
    is_read,
    is_read_once,
    made_by,
    nodes_of,
    only_reader,
    shape_of_constant,
)
from repaconv.graph.operator_facts import ARITHMETIC, SELECTIONS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import as_numbers, shaped_like, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import LEAST_RANK, kernel_of, pad_value, scale_of, spatial_padding
from repaconv.rewrites.fold.scales_after_convolutions import absorb_scales_and_shifts, readers_after

if TYPE_CHECKING:
    import onnx_ir as ir


# --- Explicitly written borders that equal what a 1x1 convolution would compute there become its padding.
#
#     (W x + b, with b written around it) = W (x, with zeros around it) + b
#
# Diverse Branch Block (Ding et al. 2021, fig. 3) needs this. Zero padding after the shift of a BatchNorm differs from
# zero padding before it, so its training-time architecture writes what BatchNorm makes of zeros into the border. With
# the padding moved into the 1x1 convolution, the next convolution has no padding, and the two can be composed. If no
# convolution reads it (the keys and values of HaloNet), the border would only be multiplied as well.


def move_borders_into_padding(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Replace borders that equal a convolution's bias by padding of that convolution; in place."""
    for pad in tuple(model.graph):
        conv = made_by(pad.inputs[0], "Conv") if pad.op_type == "Pad" and not pad.domain else None
        kernel = kernel_of(conv) if conv is not None else None
        if conv is None or kernel is None or not kernel.acts_by_place or not is_read_once(conv.outputs[0]):
            continue
        pads, found = spatial_padding(pad), _border_after_pad(pad)
        if pads is None or found is None:
            continue
        last, border = found
        if only_reader(last, "Conv", "AveragePool") is None:
            continue
        bias = np.zeros(len(kernel.weight)) if kernel.bias is None else kernel.bias
        if border.shape != bias.shape or not np.allclose(border, bias, rtol=_rounding(last), atol=0):
            continue
        write = Writer(model, pad)
        new = shaped_like(write("Conv", *conv.inputs, **kernel.around(pads).attributes), pad.outputs[0])
        write.replace(last, new)
        yield Change(rewrite=rewrite, place=conv.name or "", description="a border of its bias -> its padding")


def _rounding(value: ir.Value) -> float:
    """The relative tolerance for two computations of one bias, by dtype."""
    import onnx_ir as ir

    return {ir.DataType.DOUBLE: 1e-12, ir.DataType.FLOAT: 1e-6}.get(value.dtype or ir.DataType.UNDEFINED, 0.0)


def _border_after_pad(pad: ir.Node) -> tuple[ir.Value, Array] | None:
    """The value after all assignments to the result of a Pad, and the constant of each channel in its border.

    Returns:
        None if the border is not constant per channel, or an assignment writes anything else.
    """
    value, pads, fill = pad.outputs[0], spatial_padding(pad), pad_value(pad)
    shape = sizes(value) or ()
    if pads is None or fill is None or len(pads) != 2 * (len(shape) - 2) or not isinstance(shape[1], int):
        return None
    axes = len(shape) - 2
    sides = [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)]
    size = [one if isinstance(one, int) else sum(side) + 1 for one, side in zip(shape, sides, strict=True)][1:]
    image = np.full((1, *size), fill)
    inner: Any = (..., *(slice(pads[axis], size[axis + 1] - pads[axis + axes]) for axis in range(axes)))
    image[inner] = np.nan
    perm = list(range(image.ndim))
    while is_read_once(value) and (node := next(iter(value.uses())).node).inputs[0] is value and not node.domain:
        if node.op_type == "Transpose":
            perm = [perm[axis] for axis in perm_of(node, image.ndim)]
        elif node.op_type == "ScatterND":
            written, numbers = slice_assignment(node), broadcast_constant(node.inputs[2])
            if written is None or numbers is None or perm[written[0]] == 0:
                return None
            axis, numbers = perm[written[0]], numbers.transpose(np.argsort(perm))
            if not isinstance(shape[axis], int) and not _all_within(written[1], -sides[axis][1], sides[axis][0]):
                return None
            dynamic = [i for i, one in enumerate(shape) if not isinstance(one, int) and i != axis]
            if any(numbers.shape[i] > 1 for i in {0, *dynamic}):
                return None
            np.moveaxis(image, axis, 0)[written[1]] = np.moveaxis(numbers, axis, 0)
        else:
            break
        value = node.outputs[0]
    outside = np.ones(size[1:], dtype=bool)
    outside[inner] = False
    border = image[0][:, outside]
    done = perm == sorted(perm) and np.isnan(image[inner]).all() and (border == border[:, :1]).all()
    return (value, border[:, 0]) if done else None


def _all_within(places: Places, start: int, end: int) -> bool:
    return bool(((places >= start) & (places < end)).all())


# --- A convolution reads channels in the order that they had before they were reordered, such as RGB before BGR.
#
#     W * z + b = V * x + c,    z[i] = s[i] x[place[i]] + t[i],    V[:, place[i]] += W[:, i] s[i],    c = b + sum W t
#
# Channels may be scaled and shifted on the way, together or each on its own (`transform_input` of Inception). If the
# convolution has padding, which is 0 and not t, the shifts stay before it: W * z = (W s) * (x + t / s). Pixels,
# which have few channels, are normalized in this way even if their order stays.


FIRST_BLOCK = 8
"""Channels from which on ONNX Runtime computes convolutions in blocks of channels: an Add in between is slow there."""


class _Channels(NamedTuple):
    """An image of which each channel is a scaled and shifted channel of another value.

    Attributes:
        source: The other value.
        axes: For each axis of the image, the axis of the other value.
        places: For each channel, the channel of the other value.
        scale: The factor of each channel.
        shift: What is added to each channel.
    """

    source: ir.Value
    axes: tuple[int, ...]
    places: Places
    scale: Vector
    shift: Vector

    @property
    def width(self) -> int | None:
        """How many channels the other value has; None if that is dynamic."""
        width = (sizes(self.source) or ())[self.axes[1]]
        return width if isinstance(width, int) else None


def fold_channel_orders(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Let every convolution read channels in the order that they had before they were reordered; in place."""
    for node in nodes_of(model, "Conv"):
        x = node.inputs[0]
        shape = sizes(x) or ()
        if x is None or len(shape) < 3 or not isinstance(shape[1], int) or node.graph is not model.graph:
            continue
        width = shape[1]
        whole = _Channels(x, tuple(range(len(shape))), np.arange(width), np.ones(width), np.zeros(width))
        found = _before_selections(whole, width) or _before_normalization(whole, width, node)
        kernel = kernel_of(node) if found is not None else None
        if found is None or kernel is None or kernel.groups != 1:
            continue
        own = found.width
        if own is None or own > width:
            continue
        image: _Channels | None = _past_transposes(found)
        if image is not None and kernel.is_padded and image.shift.any():
            image = _with_padded_shifts(model, node, image, own)
        if image is None:
            continue
        one = kernel.of_scaled(image.scale, image.shift if image.shift.any() else None)
        weight = np.zeros((len(one.weight), own, *one.weight.shape[2:]))
        for place, column in zip(image.places, np.moveaxis(one.weight, 1, 0), strict=True):
            weight[:, place] += column
        _replace_by_conv(
            model, node, replace(one, weight=weight), transposed(Writer(model, node), image.source, image.axes)
        )
        what = "scale of channels" if np.array_equal(image.places, np.arange(width)) else "order of channels"
        yield Change(rewrite=rewrite, place=node.name or "", description=f"{what} -> {node.name}")


def _before_selections(image: _Channels, most: int) -> _Channels | None:
    """The channels before the first of all selections that nothing else reads; None if there is no selection.

    From several selections on, it goes back as far as the value has at most so many channels.
    """
    x, axis = image.source, image.axes[1]
    node = x.producer()
    if node is None or node.domain or not is_read_once(x):
        return None
    if node.op_type in SELECTIONS:
        chosen = selection_of(x)
        if chosen is None or not chosen.keeps or chosen.axis != axis:
            return None
        before = image._replace(source=chosen.value, places=chosen.places[image.places])
        further = _before_selections(before, most)
        return further if further is not None and further.width is not None and further.width <= most else before
    if node.op_type == "Concat":
        return _before_concat(image, node, most)
    if node.op_type == "Transpose":
        return _before_selections(_past_transposes(image), most)
    if node.op_type in ("Expand", "Tile"):
        repeated = _before_repetition(image, node)
        return None if repeated is None else _before_selections(repeated, most) or repeated
    scaled = scaled_channels(node, axis)
    if scaled is None:
        return None
    scale, shift = (part[image.places] for part in scaled[1:])
    more = image._replace(source=scaled[0], scale=image.scale * scale, shift=image.scale * shift + image.shift)
    return _before_selections(more, most)


def _before_normalization(image: _Channels, width: int, conv: ir.Node) -> _Channels | None:
    """The channels before all scales and shifts that nothing else reads; None if that would save no operator.

    What needs no Add, and comes after no Transpose, is left to `compose_in_series`.
    """
    passed: list[ir.Node] = []
    image = _past_transposes(image)
    while width < FIRST_BLOCK and is_read_once(image.source) and (node := image.source.producer()) is not None:
        scaled = scaled_channels(node, image.axes[1])
        if scaled is None:
            break
        x, scale, shift = scaled
        image = image._replace(source=x, scale=image.scale * scale, shift=image.scale * shift + image.shift)
        image = _past_transposes(image)
        passed.append(node)
    if image.shift.any() and any(attribute(conv, "pads", ())):
        saves = len(passed) > 1 or any(node.op_type == "BatchNormalization" for node in passed)
    else:
        saves = bool(passed) and list(image.axes) != sorted(image.axes)
    return image if saves else None


def _past_transposes(image: _Channels) -> _Channels:
    """The same channels as those of the value before all Transposes."""
    while (node := made_by(image.source, "Transpose")) is not None and (x := node.inputs[0]) is not None:
        order = perm_of(node, len(image.axes))
        image = image._replace(source=x, axes=tuple(order[axis] for axis in image.axes))
    return image


def _before_repetition(image: _Channels, node: ir.Node) -> _Channels | None:
    """The channels before an Expand or a Tile that repeats them, such as those of a gray image, and nothing else."""
    x, axis = node.inputs[0], image.axes[1]
    before, after = sizes(x), sizes(image.source)
    if x is None or before is None or after is None or len(before) != len(after):
        return None
    if any(one != other for at, (one, other) in enumerate(zip(before, after, strict=True)) if at != axis):
        return None
    width = before[axis]
    return image._replace(source=x, places=image.places % width) if isinstance(width, int) and width else None


def _before_concat(image: _Channels, concat: ir.Node, most: int) -> _Channels | None:
    """The channels before a Concat of channels of one value."""
    axis, shapes = image.axes[1], [sizes(part) or () for part in concat.inputs]
    widths = as_numbers(shape[axis] for shape in shapes) if all(shapes) else None
    if widths is None or int(attribute(concat, "axis", 0)) % len(shapes[0]) != axis:
        return None
    found, start, places = [], 0, image.places.copy()
    scale, shift = image.scale.copy(), image.shift.copy()
    for part, width in zip(concat.inputs, widths, strict=True):
        own = (image.places >= start) & (image.places < start + width)
        assert part is not None
        here = _Channels(part, image.axes, image.places[own] - start, image.scale[own], image.shift[own])
        one = _before_selections(here, most) or here
        places[own], scale[own], shift[own] = one.places, one.scale, one.shift
        found.append((one.source, one.axes))
        start += width
    same = all(one == found[0] for one in found)
    return _Channels(*found[0], places, scale, shift) if same else None


def scaled_channels(node: ir.Node, axis: int) -> tuple[ir.Value, Vector, Vector] | None:
    """The input of a node, and what its channels along an axis are multiplied by and shifted by."""
    found = affine_of(node)
    width = (sizes(node.outputs[0]) or ())[axis] if found is not None else None
    if found is None or not isinstance(width, int) or any(map(is_read, node.outputs[1:])):
        return None
    x, affine = found
    shift = np.zeros_like(affine.scale) if affine.shift is None else affine.shift
    scales, shifts = (channel_vector(part, axis, width) for part in (affine.scale, shift))
    return None if scales is None or shifts is None else (x, scales, shifts)


def _with_padded_shifts(model: ir.Model, node: ir.Node, image: _Channels, width: int) -> _Channels | None:
    """The channels of a value to which the shifts are added; None if not every channel is there once, with a factor."""
    order = np.argsort(image.places)
    if not np.array_equal(image.places[order], np.arange(width)) or not image.scale.all():
        return None
    kind, added = image.source.dtype, (image.shift / image.scale)[order]
    with np.errstate(over="ignore"):
        if kind is None or not np.isfinite(added.astype(kind.numpy())).all():
            return None
    write, axes = Writer(model, node), tuple(range(len(image.axes)))
    x = transposed(write, image.source, image.axes)  # an Add along the last axis is slower
    numbers = added[0] if (added == added[0]).all() else added.reshape(-1, *[1] * (len(axes) - 2))
    new = shaped_like(write("Add", x, write.constant(numbers)), x)
    return image._replace(source=new, axes=axes, shift=np.zeros_like(image.shift))


# --- Convolutions in series are composed if this needs no more multiplications; so are scales before a convolution.
#
#     V * (W * x) = (V W) * x,    W * (s x + t) = (W s) * x + sum W t
#
# Both hold if the second convolution has no padding, or if the first would give zeros there: a 1x1 convolution without
# a bias, a scale without a shift, a Pad with zeros, a row before a column. Two operators that act on each pixel
# separately are left to the `affine` rewrite.


def compose_in_series(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Compose convolutions, averages and scales in series; in place."""
    for node in tuple(model.graph):
        if node.graph is not model.graph or node.domain:  # a composition before it removed the node
            continue
        if node.op_type == "Conv":
            yield from _into_convolution_before(model, node, rewrite)
        elif node.op_type == "ConvTranspose":
            yield from _scale_before_transposed(model, node, rewrite)
        elif node.op_type in (*ARITHMETIC, "Neg", "BatchNormalization"):
            yield from _into_readers(model, node, rewrite)


def _kernel_before(value: ir.Value | None) -> tuple[Kernel, ir.Value] | None:
    """The kernel and input of the operator that computes a value, if nothing else reads the value."""
    found = _layer_before(value)
    kernel = (kernel_of(found[0]) or scale_of(found[0])) if found is not None else None
    return None if kernel is None or found is None else (kernel, found[1])


def _layer_before(value: ir.Value | None) -> tuple[ir.Node, ir.Value] | None:
    """The node that computes a value and its input, if it may be a kernel and nothing else reads the value."""
    node = made_by(value, "Conv", "AveragePool", "Pad", "BatchNormalization", *ARITHMETIC)
    if node is None or value is None or not is_read_once(value):
        return None
    given = node.inputs if node.op_type in ARITHMETIC else node.inputs[:1]
    read = [x for x in given if x is not None and not is_constant(x)]
    return (node, read[0]) if len(read) == 1 else None


def _values_upstream(value: ir.Value) -> Iterator[ir.Value]:
    """The values that `_composed_upstream` may express a value by, nearest first."""
    yield value
    while (found := _layer_before(value)) is not None:
        _, value = found
        yield value


def _composed_upstream(kernel: Kernel, x: ir.Value) -> tuple[Kernel, ir.Value]:
    """Compose a kernel with the operators before its input, also if it grows: a sum may make up for it."""
    while (found := _kernel_before(x)) is not None and (one := composed(kernel, found[0])) is not None:
        kernel, x = one, found[1]
    return kernel, x


def _into_convolution_before(model: ir.Model, node: ir.Node, rewrite: str) -> Iterator[Change]:
    """Compose a convolution with the convolution or Pad before it, if nothing else reads that."""
    x = node.inputs[0]
    first = made_by(x, "Conv", "Pad")
    found = _kernel_before(x) if first is not None else None
    kernel = kernel_of(node) if found is not None else None
    if x is None or kernel is None or first is None or found is None:
        return
    inner, source = found
    if _is_linear_graph_edge(kernel) and _is_linear_graph_edge(inner):
        return
    if composed_size(kernel, inner) > kernel.weight.size + inner.weight.size * _pixel_ratio(kernel, x, node.outputs[0]):
        return
    one = composed(kernel, inner)
    if one is not None:
        _replace_by_conv(model, node, one, source)
        description = f"{first.name} -> Conv {list(one.weight.shape)}"
        yield Change(rewrite=rewrite, place=node.name or "", description=description)


def _scale_before_transposed(model: ir.Model, node: ir.Node, rewrite: str) -> Iterator[Change]:
    """Fold a scale of channels into the transposed convolution that alone reads it; a shift differs at the border."""
    x, shape = node.inputs[0], shape_of_constant(node.inputs[1])
    first = x.producer() if x is not None and is_read_once(x) else None
    if x is None or first is None or first.domain or shape is None or shape[0] != (sizes(x) or (None, None))[1]:
        return
    found = scaled_channels(first, 1)
    if found is None or found[2].any():
        return
    weight = constant(node.inputs[1])
    assert weight is not None
    write = Writer(model, node)
    scaled = write.constant(weight * found[1].reshape(-1, *[1] * (weight.ndim - 1)), node.inputs[1])
    node.replace_input_with(0, found[0])
    node.replace_input_with(1, scaled)
    yield Change(rewrite=rewrite, place=first.name or "", description=f"{first.op_type} -> {node.name} after it")


def _is_linear_graph_edge(kernel: Kernel) -> bool:
    """Whether the kernel is an edge of a linear graph, which the `affine` rewrite folds; none is along one axis."""
    return kernel.acts_by_place and (kernel.groups == 1 or kernel.is_diagonal) and len(kernel.taps) != 1


def _pixel_ratio(second: Kernel, between: ir.Value, out: ir.Value) -> float:
    """How many pixels the first convolution computes for one pixel of the second, at least."""
    places = [sizes(value) or () for value in (between, out)]
    known = [[size for size in shape[2:] if isinstance(size, int)] for shape in places]
    if all(len(numbers) == len(shape) - 2 for numbers, shape in zip(known, places, strict=True)):
        return prod(known[0]) / max(prod(known[1]), 1)
    return float(all(end <= 0 for end in second.reach))  # with more padding, the second computes more than the first


def _into_readers(model: ir.Model, node: ir.Node, rewrite: str) -> Iterator[Change]:
    """Fold a per-channel scale and shift into all convolutions that read it, if nothing else does.

    They may read what pools, crops and the like make of it, if the scale and shift act on that as well. A scale alone
    acts on products as well, such as an image times a gate that is computed of it.
    """
    found, scale = scale_and_shift(node, IMAGE, LEAST_RANK), scale_of(node)
    reading = readers_after(node) if found is not None and scale is not None else None
    if found is None or scale is None or reading is None:
        return
    readers, are_apart = reading
    kernels = [kernel_of(reader) for reader in readers]
    if not are_apart and all(kernel is not None and _is_linear_graph_edge(kernel) for kernel in kernels):
        return
    made = [composed(kernel, scale) if kernel is not None else None for kernel in kernels]
    whole = [one for one in made if one is not None]
    if len(whole) < len(readers):
        return
    node.outputs[0].replace_all_uses_with(found.x)
    for reader, one in zip(readers, whole, strict=True):
        x = reader.inputs[0]
        assert x is not None
        _replace_by_conv(model, reader, one, x)
        yield Change(rewrite=rewrite, place=node.name or "", description=f"{node.op_type} -> {reader.name} after it")


def _replace_by_conv(model: ir.Model, node: ir.Node, kernel: Kernel, x: ir.Value) -> None:
    """Replace a convolution by another one that reads x."""
    write = Writer(model, node)
    write.replace(node.outputs[0], _conv(write, kernel, x, node.outputs[0]))
    model.graph.remove(node, safe=True)


def _conv(write: Writer, kernel: Kernel, x: ir.Value, out: ir.Value) -> ir.Value:
    """Write a kernel of x as a Conv, for another value of the same shape."""
    parts = [write.constant(part) for part in (kernel.weight, kernel.bias) if part is not None]
    return shaped_like(write("Conv", x, *parts, **kernel.attributes), out)


# --- Parallel kernels of one value that are added become one kernel if this needs no more multiplications.
#
#     W * x + V * x + P(x) + x = (W + V + P + I) * x
#
# The kernels may have different sizes, also at the border: smaller kernels are padded with zeros, and the image is zero
# outside. An average that does not count its padding is no convolution at the border, and is not merged.


class _Term(NamedTuple):
    """A term of a sum: a kernel of a source, with a sign.

    Attributes:
        value: The value that is added or subtracted.
        sign: 1 or -1.
        source: The input of the kernel; the value itself if it is computed by no kernel.
        kernel: The kernel; the identity for the value itself.
        operator: The ONNX operator of the kernel; empty for the value itself.
    """

    value: ir.Value
    sign: float
    source: ir.Value
    kernel: Kernel
    operator: str


_Terms = tuple[_Term, ...]


def merge_parallel(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Merge parallel kernels in every sum; in place."""
    for node in reversed(tuple(model.graph)):
        if node.graph is model.graph and _is_sum(node) and not _is_inner(node.outputs[0]):
            yield from _merge_terms(model, node, rewrite)


def _is_sum(node: ir.Node | None) -> bool:
    if node is None or node.domain or node.op_type not in ("Add", "Sub", "Sum"):
        return False
    shape = sizes(node.outputs[0])
    whole = all(value is not None and not is_constant(value) and sizes(value) == shape for value in node.inputs)
    return shape is not None and len(shape) > 2 and isinstance(shape[1], int) and whole


def _is_inner(value: ir.Value) -> bool:
    return is_read_once(value) and _is_sum(next(iter(value.uses())).node)


def _terms(value: ir.Value, sign: float) -> Iterator[_Term]:
    node = value.producer()
    assert node is not None
    for place, term in enumerate(node.inputs):
        assert term is not None
        own = -sign if place and node.op_type == "Sub" else sign
        if _is_sum(term.producer()) and is_read_once(term):
            yield from _terms(term, own)
        else:
            yield _term(term, own)


def _term(value: ir.Value, sign: float) -> _Term:
    """The term for a value: its kernel if it is computed by one and nothing else reads it, otherwise the identity."""
    found, shape = _layer_before(value), sizes(value)
    if found is not None and found[0].op_type != "Pad":
        node, x = found
        kernel = kernel_of(node) or scale_of(node)
        if kernel is not None:
            return _Term(value, sign, x, kernel, node.op_type)
    assert shape is not None
    width = shape[1]
    assert isinstance(width, int)
    return _Term(value, sign, value, eye(width, len(shape)), "")


def _merge_terms(model: ir.Model, top: ir.Node, rewrite: str) -> Iterator[Change]:
    terms = _with_common_sources(tuple(_terms(top.outputs[0], 1.0)))
    found = [
        some
        for source in {term.source: None for term in terms}
        for some in _sets_to_merge(terms, source, top.outputs[0])
    ]
    if not found:
        return
    write, total = Writer(model, top), None
    for some in found:
        total = _added(write, total, _written(write, some, top.outputs[0]), 1.0)
        place = next(term.value.producer() for term in some if term.operator == "Conv")
        description = " + ".join(term.operator or "x" for term in some)
        yield Change(
            rewrite=rewrite, place=(place.name if place is not None else "") or "", description=f"{description} -> Conv"
        )
    for term in terms:
        if all(term not in some for some in found):
            total = _added(write, total, term.value, term.sign)
    assert total is not None
    write.replace(top.outputs[0], total)


def _with_common_sources(terms: _Terms) -> _Terms:
    """Rewrite terms as kernels of an earlier value that other terms are kernels of, through several operators."""
    places, lines = range(len(terms)), [set(_values_upstream(term.source)) for term in terms]
    deep = list(terms)
    for place in places:
        if any(lines[place] & lines[other] for other in places if other != place):
            kernel, x = _composed_upstream(terms[place].kernel, terms[place].source)
            deep[place] = terms[place]._replace(kernel=kernel, source=x)

    def others(mine: int) -> set[ir.Value]:
        return {one.source for place in places if place != mine for one in (terms[place], deep[place])}

    return tuple(deep[place] if deep[place].source in others(place) else terms[place] for place in places)


def _added(write: Writer, total: ir.Value | None, value: ir.Value, sign: float) -> ir.Value:
    if total is None:
        return value
    return shaped_like(write("Add" if sign > 0 else "Sub", total, value), value)


def _written(write: Writer, terms: _Terms, out: ir.Value) -> ir.Value:
    """Write the sum of the terms as one Conv."""
    kernel = summed([term.kernel.then(np.full(len(term.kernel.weight), term.sign), None) for term in terms])
    return _conv(write, kernel, terms[0].source, out)


def _sets_to_merge(terms: _Terms, source: ir.Value, out: ir.Value) -> list[_Terms]:
    """The sets of terms of one source that are merged: greedily, in pairs, the pair that saves most first."""
    sets: list[_Terms] = [(term,) for term in terms if term.source is source]
    shapes = [sizes(value) for value in (source, out)]
    fixed = all(shape is not None and all(isinstance(size, int) for size in shape[2:]) for shape in shapes)
    while len(sets) > 1:
        first, second = max(combinations(sets, 2), key=lambda pair: _gain(*pair, fixed=fixed))
        if _gain(first, second, fixed=fixed) < 0:
            break
        sets = [*(some for some in sets if some not in (first, second)), first + second]
    return [some for some in sets if len(some) > 1]


def _gain(a: _Terms, b: _Terms, *, fixed: bool) -> int:
    """Multiplications per pixel saved by merging two sets of terms; negative if they cannot be merged."""
    kernels = [term.kernel for term in a + b]
    if all(term.operator != "Conv" for term in a + b) or not all(fits(kernels[0], one, fixed=fixed) for one in kernels):
        return -1
    before = sum(size_of([term.kernel for term in some]) if len(some) > 1 else some[0].kernel.learnt for some in (a, b))
    return before - size_of(kernels)


# --- The rewrite: scales and shifts after a convolution, and the rewrites above, until nothing changes.


STEPS = (absorb_scales_and_shifts, move_borders_into_padding, fold_channel_orders, compose_in_series, merge_parallel)


def apply(model: ir.Model) -> Iterator[Change]:
    """Fold scales, shifts, borders, orders of channels, series and parallel branches into convolutions; in place."""
    normalize(model)
    activation_patterns.group(model, "Erf", "Pow")  # the half of GELU stays in it, or no runtime would know it again
    again = True
    while again:
        made = [change for step in STEPS for change in step(model, CONVOLUTION.name)]
        clean(model)
        yield from made
        again = bool(made)
    activation_patterns.ungroup(model)


CONVOLUTION = Rewrite(
    "convolution", "after convolutions with constant weights, if nothing else reads what is computed of them", apply
)

"""Convolutions in a row: two become one where that multiplies no more; a scale before one goes into it.

    V * (W * x) = (V W) * x,    W * (s x + t) = (W s) * x + sum W t

Both hold where the second reads no padding, or where what it would read there is zero: behind a 1x1 without a bias,
behind a scale without a shift. What acts on each place by itself, before what does so too, is left to `linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from repaconv.artefacts import Change
from repaconv.folds.kernels import Kernel, composed, composed_size, eye, kernel_of, scale_of
from repaconv.graphs.channels import IMAGE, per_channel
from repaconv.graphs.nodes import Writer, constant, made_by
from repaconv.graphs.shapes import set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def composed_in_row(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Compose them, in place."""
    for node in tuple(model.graph):
        if node.graph is model.graph and not node.domain:
            if node.op_type == "Conv":
                yield from _behind(model, node, rewrite)
            elif node.op_type in ("Mul", "Div", "Add", "Sub", "BatchNormalization"):
                yield from _before(model, node, rewrite)


def before(value: ir.Value | None) -> tuple[Kernel, ir.Value] | None:
    """The kernel that a value is of another, if nothing else reads it."""
    found = _layer_before(value)
    kernel = (kernel_of(found[0]) or scale_of(found[0])) if found is not None else None
    return None if kernel is None or found is None else (kernel, found[1])


def _layer_before(value: ir.Value | None) -> tuple[ir.Node, ir.Value] | None:
    """What gives a value that nothing else reads, and what it reads, if it may be a kernel."""
    node = made_by(value, "Conv", "AveragePool", "BatchNormalization")
    if node is None or value is None or node.inputs[0] is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    return node, node.inputs[0]


def line_of(value: ir.Value) -> Iterator[ir.Value]:
    """All that `reduced` may make a value a kernel of; no numbers are looked at."""
    yield value
    while (found := _layer_before(value)) is not None:
        _, value = found
        yield value


def reduced(kernel: Kernel, x: ir.Value) -> tuple[Kernel, ir.Value]:
    """A kernel of a value as one of what that comes from, through all that can be composed with it, if cheaply."""
    while (found := before(x)) is not None:
        inner, source = found
        one = composed(kernel, inner) if kernel.is_pointwise or inner.is_pointwise else None
        if one is None:
            break
        kernel, x = one, source
    return kernel, x


def _behind(model: ir.Model, node: ir.Node, rewrite: str) -> Iterator[Change]:
    """A convolution behind another that nothing else reads."""
    x, kernel = node.inputs[0], kernel_of(node)
    first = made_by(x, "Conv")
    found = before(x) if first is not None else None
    if x is None or kernel is None or first is None or found is None:
        return
    inner, source = found
    if _by_place(kernel) and _by_place(inner):
        return
    if composed_size(kernel, inner) > kernel.weight.size + inner.weight.size * _share(kernel, x, node.outputs[0]):
        return
    one = composed(kernel, inner)
    if one is not None:
        _write(model, node, one, source)
        told = f"{first.name} -> Conv {list(one.weight.shape)}"
        yield Change(rewrite=rewrite, place=node.name or "", description=told)


def _by_place(kernel: Kernel) -> bool:
    """Whether it is an edge of a `linear` graph."""
    return kernel.acts_by_place and (kernel.groups == 1 or kernel.is_diagonal)


def _share(second: Kernel, between: ir.Value, out: ir.Value) -> float:
    """How many places the first computes for one of the second, at least."""
    places = [sizes(value) or () for value in (between, out)]
    known = [[size for size in shape[2:] if isinstance(size, int)] for shape in places]
    if all(len(numbers) == len(shape) - 2 for numbers, shape in zip(known, places, strict=True)):
        return prod(known[0]) / max(prod(known[1]), 1)
    return float(all(end <= 0 for end in second.reach))  # padded beyond that, the second computes more than the first


def _before(model: ir.Model, node: ir.Node, rewrite: str) -> Iterator[Change]:
    """A scale and a shift a channel of which convolutions alone read."""
    found, out = _scale(node), node.outputs[0]
    readers = [user for user, place in out.uses() if user.op_type == "Conv" and not user.domain and place == 0]
    if found is None or not readers or len(readers) < len(out.uses()) or out.is_graph_output():
        return
    scale, x = found
    kernels = [kernel_of(reader) for reader in readers]
    if all(kernel is not None and _by_place(kernel) for kernel in kernels):
        return
    made = [composed(kernel, scale) if kernel is not None else None for kernel in kernels]
    whole = [one for one in made if one is not None]
    if len(whole) < len(readers) or any(reader.graph is not model.graph for reader in readers):
        return
    for reader, one in zip(readers, whole, strict=True):
        _write(model, reader, one, x)
        yield Change(rewrite=rewrite, place=node.name or "", description=f"{node.op_type} -> {reader.name} behind it")


def _scale(node: ir.Node) -> tuple[Kernel, ir.Value] | None:
    """The scale and shift that a node is of an image."""
    if node.op_type == "BatchNormalization":
        kernel = scale_of(node)
        return None if kernel is None or node.inputs[0] is None else (kernel, node.inputs[0])
    out, shape = node.outputs[0], sizes(node.outputs[0])
    for place in (0, 1):
        x, numbers = node.inputs[place], constant(node.inputs[1 - place])
        vector = per_channel(numbers, out, IMAGE)
        if x is None or vector is None or shape is None or sizes(x) != shape or x.dtype != out.dtype:
            continue
        one = replace(eye(len(vector), len(shape)), learnt=len(vector))
        if node.op_type in ("Mul", "Div"):
            if node.op_type == "Div" and (place or not vector.all()):
                return None
            return one.then(1 / vector if node.op_type == "Div" else vector, None), x
        sign = -1.0 if node.op_type == "Sub" and place else 1.0
        shift = -vector if node.op_type == "Sub" and not place else vector
        return one.then(sign + 0 * vector, shift), x
    return None


def _write(model: ir.Model, node: ir.Node, kernel: Kernel, x: ir.Value) -> None:
    """A convolution in place of another; what it read goes if nothing else reads that."""
    write = Writer(model, node)
    parts = [write.constant(part) for part in (kernel.weight, kernel.bias) if part is not None]
    new = write("Conv", x, *parts, **kernel.attributes)
    set_shape(new, sizes(node.outputs[0]), node.outputs[0])
    write.replace(node.outputs[0], new)
    model.graph.remove(node, safe=True)

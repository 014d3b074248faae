"""winograd: compute 3x3 convolutions with 16 products for 2x2 pixels, where the plain sum takes 36.

For the 4x4 pixels d that 2x2 output pixels y depend on (Winograd 1980; Lavin and Gray, CVPR 2016, equation 8):

    y = A' [(G w G') . (B' d B)] A

"." multiplies entry by entry and sums over input channels: 16 convolutions with 1x1 kernels. B' and A' only add and
subtract. Here they are written for *phases*: x_rs[i, j] = x[2 i + r, 2 j + s], four images of half the height and width.
Elementwise operators act on each phase separately, so that images stay in phases from one convolution to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.activation_patterns import group, is_activation, ungroup
from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, is_constant
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

    Phases = tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
    """Phases of an image by row parity and column parity."""

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
"""The transform of the kernel. B' is in `_Images.transformed`, and A' in `_Images.convolve`."""

PLAIN, PRODUCTS = 36, 16
"""Multiply-accumulates of a 3x3 convolution for 2x2 output pixels of one pair of channels, and those left of them."""
FROM_PHASES, FROM_IMAGE, TO_PHASES, TO_IMAGE = 200, 400, 200, 500
"""What the transforms of 2x2 pixels of an input or output channel take, in multiply-accumulates that take as long."""
NODES = 14e6
"""What running so many nodes takes, in multiply-accumulates that take as long."""
LEAST_SPEEDUP = 1.1
"""Estimated speedup from which a convolution is rewritten. The estimate's numbers are fits to measured speedups of 0.3 to
1.9 (AVX2, 16 to 384 channels, 14x14 to 112x112 pixels)."""

TOGETHER = ("Add", "Sub", "Mul", "Sum", "Max", "Min", "PRelu", "Clip")
"""Elementwise operators of several inputs."""


def _winograd(model: ir.Model) -> Iterator[Change]:
    if not any(map(_is_possible, model.graph)):
        return
    group(model)
    nodes = list(model.graph)
    plan = _plan(nodes)
    images = _Images(model)
    for node in nodes:
        if node in plan.convolutions:
            phases = images.convolve(node)
            channels, height, width = static_grid(node.outputs[0]) or (0, 0, 0)
            description = f"{channels} channels of {height} x {width} pixels with 16 products for 36"
            yield Change(rewrite=WINOGRAD.name, place=node.name or "", description=description)
        elif node in plan.elementwise:
            phases = images.apply(node)
        else:
            continue
        images.record(node, phases, joined=_is_read_whole(node.outputs[0], plan))
    ungroup(model)


# Which convolutions are rewritten


@dataclass
class _Plan:
    """What is computed in phases.

    Attributes:
        convolutions: The convolutions that are rewritten.
        elementwise: The nodes that are applied to each phase.
    """

    convolutions: set[ir.Node]
    elementwise: set[ir.Node] = field(default_factory=set)

    def __contains__(self, node: ir.Node | None) -> bool:
        return node in self.convolutions or node in self.elementwise


def _plan(nodes: list[ir.Node]) -> _Plan:
    """The convolutions that gain, each with what its neighbors leave in phases."""
    convolutions = {node for node in nodes if _is_possible(node)}
    while True:
        plan = _with_elementwise(nodes, convolutions)
        gaining = {conv for conv in convolutions if _estimated_speedup(conv, plan) >= LEAST_SPEEDUP}
        if gaining == convolutions:
            return plan
        convolutions = gaining


def _with_elementwise(nodes: list[ir.Node], convolutions: set[ir.Node]) -> _Plan:
    """A plan with the elementwise nodes from one of these convolutions to another, and the activations behind each."""
    wanted: set[ir.Value] = set()
    for node in reversed(nodes):
        if node in convolutions:
            wanted.add(_read_image(node))
        elif node.outputs and node.outputs[0] in wanted:
            wanted.update(_images_of(node))
    plan = _Plan(convolutions)
    for node in nodes:
        images = _images_of(node)
        ready = [value for value in images if value.producer() in plan]
        alone = len(images) == len(ready) == 1 and len(images[0].uses()) == 1 and not images[0].is_graph_output()
        if ready and (alone or node.outputs[0] in wanted):
            plan.elementwise.add(node)
    return plan


def _is_possible(node: ir.Node) -> bool:
    """Whether a node is a 3x3 convolution whose output has the size of its input, both even."""
    if node.op_type != "Conv" or node.domain or any(not is_constant(value) for value in node.inputs[1:]):
        return False
    before, after = static_grid(node.inputs[0]), static_grid(node.outputs[0])
    return (
        before is not None
        and after is not None
        and (sizes(node.inputs[1]) or ())[2:] == (3, 3)
        and attribute(node, "group", 1) == 1
        and set(attribute(node, "strides", (1,))) == set(attribute(node, "dilations", (1,))) == {1}
        and (set(attribute(node, "pads", (0,))) == {1} or attribute(node, "auto_pad", "").startswith("SAME"))
        and not any(size % 2 for size in before[1:])
    )


def _images_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that an elementwise node, or a Concat of channels, reads pixel by pixel; [] of other nodes."""
    whole = static_grid(node.outputs[0]) if len(node.outputs) == 1 else None
    given = [value for value in node.inputs if value is not None]
    if whole is None or any(size % 2 for size in whole[1:]):
        return []
    if not node.domain and node.op_type == "Concat" and attribute(node, "axis", 0) in (IMAGE, IMAGE - 4):
        return given
    if not is_activation(node) and (node.domain or node.op_type not in TOGETHER):
        return []
    images = [value for value in given if static_grid(value) == whole]
    others = [sizes(value) for value in given if value not in images]
    return images if all(shape is not None and set(shape[-2:]) <= {1} for shape in others) else []


def _read_image(conv: ir.Node) -> ir.Value:
    assert conv.inputs[0] is not None
    return conv.inputs[0]


def _is_read_whole(value: ir.Value, plan: _Plan) -> bool:
    """Whether something reads a value that is computed in phases as one image."""
    return value.is_graph_output() or any(user not in plan for user in value.consumers())


def _estimated_speedup(conv: ir.Node, plan: _Plan) -> float:
    after = conv.outputs[0]
    while not _is_read_whole(after, plan) and (follower := _only_activation(after)) is not None:
        after = follower.outputs[0]
    read, (made, height, width) = static_grid(conv.inputs[0]), static_grid(conv.outputs[0]) or (0, 0, 0)
    assert read is not None
    tiles = height * width / 4
    before = FROM_PHASES if _read_image(conv).producer() in plan else FROM_IMAGE
    behind = TO_IMAGE if _is_read_whole(after, plan) else TO_PHASES
    transforms = before * read[0] + behind * made
    return PLAIN * read[0] * made * tiles / ((PRODUCTS * read[0] * made + transforms) * tiles + NODES)


def _only_activation(value: ir.Value) -> ir.Node | None:
    users = value.consumers()
    return users[0] if len(users) == 1 and is_activation(users[0]) else None


# The transforms


@dataclass
class _Images:
    """Images that are kept in phases while a graph is rewritten.

    Attributes:
        model: The model that is rewritten.
        phases: The phases of each image that has them.
        before: The transformed inputs of convolutions, by image.
        filters: The constants of `_along`, by taps, axis and channels.
    """

    model: ir.Model
    phases: dict[ir.Value, Phases] = field(default_factory=dict)
    before: dict[ir.Value, list[list[ir.Value]]] = field(default_factory=dict)
    filters: dict[tuple[tuple[int, ...], int, int], ir.Value] = field(default_factory=dict)

    def record(self, node: ir.Node, phases: Phases, *, joined: bool) -> None:
        """Remember the phases of a node's output; if ``joined``, whatever reads the output reads an image of them."""
        value = node.outputs[0]
        self.phases[value] = phases
        if joined:
            write = Writer(self.model, node)
            image = _joined(write, phases, value)
            write.replace(value, image)
            self.phases[image] = phases

    def apply(self, node: ir.Node) -> Phases:
        """Apply an elementwise node to every phase."""
        write = Writer(self.model, node)
        images = {value: self._of(write, value) for value in _images_of(node)}
        made = static_grid(node.outputs[0])
        assert made is not None

        def phase(row: int, column: int) -> ir.Value:
            given = [images[value][row][column] if value in images else value for value in node.inputs]
            like = next(each for each, value in zip(given, node.inputs, strict=True) if value in images)
            return _sized(write.copy(node, *given), like, made[0])

        return (phase(0, 0), phase(0, 1)), (phase(1, 0), phase(1, 1))

    def convolve(self, conv: ir.Node) -> Phases:
        """Write a convolution; returns the phases of its output."""
        write = Writer(self.model, conv)
        weight = constant(conv.inputs[1])
        assert weight is not None
        kernels = np.einsum("ak,oikl,bl->aboi", G, weight, G)[..., None, None]
        given = self._transformed(write, _read_image(conv))

        def add(one: ir.Value, other: ir.Value) -> ir.Value:
            return _sized(write("Add", one, other), one, len(weight))

        def less(one: ir.Value, other: ir.Value) -> ir.Value:
            return add(self._along(write, other, (-1,), 2), one)

        def product(row: int, column: int, sign: int = 1) -> ir.Value:
            bias = conv.inputs[2:] if (row, column) == (1, 1) else ()  # it reaches all four phases
            made = write("Conv", given[row][column], write.constant(sign * kernels[row, column]), *bias)
            return _sized(made, given[row][column], len(weight))

        # A' is [1 1 1 0; 0 1 -1 -1]. What several sums share is added once, and the last addend of each is a
        # convolution, so that runtimes compute it, the sum and the activation in one pass.
        pairs = [(product(row, 1), product(row, 2)) for row in range(4)]
        shared = [(add(*pair), less(*pair)) for pair in pairs]
        inner = [(add(product(row, 0), shared[row][0]), add(product(row, 3, -1), shared[row][1])) for row in (1, 2)]
        left, right = zip(*inner, strict=True)
        return (
            (
                add(product(0, 0), add(shared[0][0], add(*left))),
                add(product(0, 3, -1), add(shared[0][1], add(*right))),
            ),
            (
                add(product(3, 0, -1), less(less(*left), shared[3][0])),
                add(product(3, 3), less(less(*right), shared[3][1])),
            ),
        )

    def _of(self, write: Writer, image: ir.Value) -> Phases:
        """The phases of an image."""
        if image not in self.phases:
            rows = [self._along(write, image, taps, 2, stride=2) for taps in PARITIES]
            (a, b), (c, d) = ([self._along(write, row, taps, 3, stride=2) for taps in PARITIES] for row in rows)
            self.phases[image] = (a, b), (c, d)
        return self.phases[image]

    def _transformed(self, write: Writer, image: ir.Value) -> list[list[ir.Value]]:
        """B' d B of a convolution's input: 4x4 images of half the height and width."""
        if image not in self.before:
            if image in self.phases:
                columns = [self._from_phases(write, *pair, 2) for pair in zip(*self.phases[image], strict=True)]
                self.before[image] = [self._from_phases(write, *pair, 3) for pair in zip(*columns, strict=True)]
            else:
                rows = self._from_image(write, image, 2)
                self.before[image] = [self._from_image(write, row, 3) for row in rows]
        return self.before[image]

    def _from_phases(self, write: Writer, even: ir.Value, odd: ir.Value, axis: int) -> list[ir.Value]:
        """B' = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1] along an axis, for pixels odd[i - 1], even[i], odd[i], even[i + 1]."""
        both = _sized(write("Add", even, odd), even)
        apart = _sized(write("Add", self._along(write, even, (-1,), axis), odd), even)
        first, last = (self._along(write, one, (1, -1), axis, pads=pads) for one, pads in ((odd, (1, 0)), (even, (0, 1))))
        return [first, both, apart, last]

    def _from_image(self, write: Writer, image: ir.Value, axis: int) -> list[ir.Value]:
        """The same for pixels 2 i - 1 to 2 i + 2 of an image."""
        taps = (((1, 0, -1), (1, 0)), ((1, 1), (0, 0)), ((-1, 1), (0, 0)), ((1, 0, -1), (0, 1)))
        return [self._along(write, image, each, axis, stride=2, pads=pads) for each, pads in taps]

    def _along(
        self,
        write: Writer,
        image: ir.Value,
        taps: tuple[int, ...],
        axis: int,
        *,
        stride: int = 1,
        pads: tuple[int, int] = (0, 0),
    ) -> ir.Value:
        """Write a depthwise convolution along an axis: runtimes keep images in their blocked layout there."""
        grid = static_grid(image)
        assert grid is not None
        key, kernel = (taps, axis, grid[0]), (len(taps), 1) if axis == 2 else (1, len(taps))
        if key not in self.filters:
            weights: Array = np.broadcast_to(np.reshape(taps, (1, 1, *kernel)), (grid[0], 1, *kernel)).astype(float)
            self.filters[key] = write.constant(weights)
        steps, around = ([stride, 1], [pads[0], 0, pads[1], 0]) if axis == 2 else ([1, stride], [0, pads[0], 0, pads[1]])
        made = write("Conv", image, self.filters[key], group=grid[0], strides=steps, pads=around, kernel_shape=kernel)
        shape = list(sizes(image) or ())
        shape[axis] = (grid[axis - 1] + sum(pads) - len(taps)) // stride + 1
        set_shape(made, shape)
        return made


PARITIES = ((1,), (0, 1))
"""Taps that keep every other pixel, the even or the odd ones."""


def _joined(write: Writer, phases: Phases, like: ir.Value) -> ir.Value:
    """Write the image of these phases: one below the other by rows, then side by side by one Transpose of all pixels."""
    columns = [write("Concat", top, bottom, axis=3) for top, bottom in zip(*phases, strict=True)]
    pixels = write("Reshape", write("Concat", *columns, axis=0), write.constant([2, -1]))
    grid = static_grid(like)
    assert grid is not None
    return write("Reshape", write("Transpose", pixels, perm=[1, 0]), write.constant([-1, *grid]))


def _sized(value: ir.Value, like: ir.Value, channels: int | None = None) -> ir.Value:
    """Record the shape of a value: that of another, with so many channels."""
    batch, width, *places = sizes(like) or ()
    set_shape(value, (batch, channels or width, *places))
    return value


WINOGRAD = Rewrite(
    "winograd",
    "a 3x3 convolution of an image of known, even size to one of equal size, of so many channels that it is faster",
    _winograd,
    order=96,
    keeps=True,
)

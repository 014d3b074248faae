"""winograd: compute 3x3 convolutions with 16 products for 2x2 pixels, where the plain sum takes 36.

For the 4x4 pixels d that 2x2 output pixels y depend on (Winograd 1980; Lavin and Gray, CVPR 2016, equation 8):

    y = A' [(G w G') . (B' d B)] A

"." multiplies entry by entry and sums over input channels: 16 convolutions with 1x1 kernels. B' and A' only add and
subtract. They are written for *phases*: x_rs[i, j] = x[2 i + r, 2 j + s], four images of half the height and width.
Elementwise operators act on each phase separately, so that images stay in phases from one convolution to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.activation_patterns import group, is_activation, ungroup
from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, is_constant, made_by, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

    Phases = tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
    """Phases of an image by row parity and column parity."""
    Terms = list[ir.Value | None]
    """Transformed images; None is zero."""

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
"""The transform of the kernel. B' = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1] is written in `_Images._from_phases`, and
A' in `_Images.convolve`."""

PLAIN, PRODUCTS = 36, 18
"""Multiply-accumulates of a 3x3 convolution for 2x2 output pixels of one pair of channels, and those that take as long
as its 16 products."""
FROM_PHASES, FROM_IMAGE, TO_PHASES, TO_IMAGE = 175, 325, 175, 425
"""What the transforms of 2x2 pixels of an input or output channel take, in multiply-accumulates that take as long."""
ROW, NODES = 2500, 2e6
"""What beginning a row of pixels of a channel takes, and what running so many nodes takes, in the same unit."""
LEAST_SPEEDUP = 1.15
"""Estimated speedup from which a convolution is rewritten.

The numbers of the estimate are fits to measured speedups of 0.4 to 1.9, within 0.25 of each: ONNX Runtime with AVX2,
one thread, 24 to 384 channels, 14x14 to 112x112 pixels.
"""
REPEATING = frozenset(
    (
        *(("asymmetric", "floor"), ("asymmetric", "round_prefer_floor")),
        *product(("half_pixel", "pytorch_half_pixel"), ("round_prefer_floor", "round_prefer_ceil")),
    )
)
"""Coordinates and rounding of a nearest Resize by 2 that repeats every pixel."""

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
        made = [value for value in images if value.producer() in plan]
        alone = len(images) == 1 and only_reader(images[0]) is node
        together = len(images) > 1 and _has_phases(node.outputs[0])
        needed = node.outputs[0] in wanted and _has_phases(node.outputs[0])
        if (made == images and (alone or together)) or (needed and (made or any(map(_repeated, images)))):
            plan.elementwise.add(node)
    return plan


def _is_possible(node: ir.Node) -> bool:
    """Whether a node is a 3x3 convolution whose output has the size of its input."""
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
    )


def _images_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that an elementwise node, or a Concat of channels, reads pixel by pixel; [] of other nodes."""
    whole = static_grid(node.outputs[0]) if len(node.outputs) == 1 else None
    given = [value for value in node.inputs if value is not None]
    if whole is None:
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


def _has_phases(image: ir.Value) -> bool:
    """Whether the phases of an image have equal sizes. Those of 7 rows are of 4, with a row that is no part of it."""
    return not any(size % 2 for size in (static_grid(image) or (0, 1, 1))[1:])


def _repeated(image: ir.Value) -> ir.Value | None:
    """The image of half the height and width whose every pixel is repeated in both directions, if this is one."""
    node = made_by(image, "Resize")
    large, small = static_grid(image), static_grid(node.inputs[0]) if node else None
    if node is None or large is None or small is None or (small[0], 2 * small[1], 2 * small[2]) != large:
        return None
    scales = constant(node.inputs[2]) if len(node.inputs) == 3 else None
    coordinates = attribute(node, "coordinate_transformation_mode", "half_pixel")
    rounding = attribute(node, "nearest_mode", "round_prefer_floor")
    repeats = attribute(node, "mode", "nearest") == "nearest" and (coordinates, rounding) in REPEATING
    return node.inputs[0] if repeats and scales is not None and list(scales) == [1, 1, 2, 2] else None


def _is_read_whole(value: ir.Value, plan: _Plan) -> bool:
    """Whether something reads a value that is computed in phases as one image."""
    if value.is_graph_output() or any(user not in plan for user in value.consumers()):
        return True
    return not _has_phases(value) and any(user in plan.convolutions for user in value.consumers())


def _estimated_speedup(conv: ir.Node, plan: _Plan) -> float:
    after = conv.outputs[0]
    while not _is_read_whole(after, plan) and (follower := _only_activation(after)) is not None:
        after = follower.outputs[0]
    read, (made, height, width) = static_grid(conv.inputs[0]), static_grid(conv.outputs[0]) or (0, 0, 0)
    assert read is not None
    rows, columns = -(-height // 2), -(-width // 2)
    image = _read_image(conv)
    in_phases = (image.producer() in plan and _has_phases(image)) or _repeated(image) is not None
    before = FROM_PHASES if in_phases else FROM_IMAGE
    behind = TO_IMAGE if _is_read_whole(after, plan) else TO_PHASES
    transforms = columns * (before * read[0] + behind * made) + ROW * (read[0] + made)
    new = rows * (columns * PRODUCTS * read[0] * made + transforms) + NODES
    return PLAIN / 4 * height * width * read[0] * made / new


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
        filters: The constants of `_along`, by taps, axis and channels.
        filtered: What `_along` wrote, by its arguments.
    """

    model: ir.Model
    phases: dict[ir.Value, Phases] = field(default_factory=dict)
    filters: dict[tuple[tuple[int, ...], int, int], ir.Value] = field(default_factory=dict)
    filtered: dict[tuple[ir.Value, tuple[int, ...], int, int, tuple[int, int]], ir.Value] = field(default_factory=dict)

    def record(self, node: ir.Node, phases: Phases, *, joined: bool) -> None:
        """Remember the phases of a node's output; if ``joined``, whatever reads the output reads an image of them."""
        value = node.outputs[0]
        self.phases[value] = phases
        if joined:
            write = Writer(self.model, node)
            image = _joined(write, phases, value)
            write.replace(value, image)
            if _has_phases(image):
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
        parts = self._parts(conv)
        given = [self._transformed(write, part) for part in parts]
        bounds = np.cumsum([0, *((static_grid(part) or (0,))[0] for part in parts)])

        def add(one: ir.Value | None, other: ir.Value | None) -> ir.Value | None:
            return _sized(write("Add", one, other), one) if one and other else one or other

        def less(one: ir.Value | None, other: ir.Value | None) -> ir.Value | None:
            return add(other and self._along(write, other, (-1,), 2), one)

        def product(row: int, column: int, sign: int = 1, bias: Sequence[ir.Value | None] = ()) -> ir.Value | None:
            whole = None
            for part, first, end in zip(given, bounds[:-1], bounds[1:], strict=True):
                if (image := part[row][column]) is not None:
                    kernel = write.constant(sign * kernels[row, column][:, first:end])
                    whole = add(_sized(write("Conv", image, kernel, *bias), image, len(weight)), whole)
                    bias = ()
            return whole

        # A' is [1 1 1 0; 0 1 -1 -1]. What several sums share is added once, and the last addend of each is a
        # convolution, so that runtimes compute it, the sum and the activation in one pass. All four sums have m11.
        pairs = [(product(row, 1, bias=conv.inputs[2:] if row == 1 else ()), product(row, 2)) for row in range(4)]
        shared = [(add(*pair), less(*pair)) for pair in pairs]
        inner = [(add(product(row, 0), shared[row][0]), add(product(row, 3, -1), shared[row][1])) for row in (1, 2)]
        left, right = zip(*inner, strict=True)
        a = add(product(0, 0), add(shared[0][0], add(*left)))
        b = add(product(0, 3, -1), add(shared[0][1], add(*right)))
        c = add(product(3, 0, -1), less(less(*left), shared[3][0]))
        d = add(product(3, 3), less(less(*right), shared[3][1]))
        assert a is not None
        assert b is not None
        assert c is not None
        assert d is not None
        return (a, b), (c, d)

    def _parts(self, conv: ir.Node) -> list[ir.Value]:
        """What a convolution reads: one image, or the parts of a Concat, if of one of them some products are zero."""
        image = _read_image(conv)
        concat = made_by(image, "Concat")
        parts = _images_of(concat) if concat else []
        return parts if any(_repeated(part) for part in parts) else [image]

    def _of(self, write: Writer, image: ir.Value) -> Phases:
        """The phases of an image."""
        if image not in self.phases:
            if source := _repeated(image):
                a = b = c = d = source
            else:
                rows = [self._along(write, image, taps, 2, stride=2) for taps in PARITIES]
                (a, b), (c, d) = ([self._along(write, row, taps, 3, stride=2) for taps in PARITIES] for row in rows)
            self.phases[image] = (a, b), (c, d)
        return self.phases[image]

    def _transformed(self, write: Writer, image: ir.Value) -> list[Terms]:
        """B' d B of a convolution's input: 4x4 images of half the height and width."""
        if image in self.phases or _repeated(image):
            pairs = zip(*self._of(write, image), strict=True)
            left, right = (self._from_phases(write, even, odd, 2) for even, odd in pairs)
            return [self._from_phases(write, *pair, 3) for pair in zip(left, right, strict=True)]
        return [self._from_image(write, row, 3) for row in self._from_image(write, image, 2)]

    def _from_phases(self, write: Writer, even: ir.Value | None, odd: ir.Value | None, axis: int) -> Terms:
        """B' along an axis, for pixels odd[i - 1], even[i], odd[i], even[i + 1]."""
        if even is None or odd is None:
            return [None] * 4
        if even is odd:
            both, apart = self._along(write, even, (2,), axis), None
        else:
            both = _sized(write("Add", even, odd), even)
            apart = _sized(write("Add", self._along(write, even, (-1,), axis), odd), even)
        first = self._along(write, odd, (1, -1), axis, pads=(1, 0))
        last = self._along(write, even, (1, -1), axis, pads=(0, 1))
        return [first, both, apart, last]

    def _from_image(self, write: Writer, image: ir.Value, axis: int) -> Terms:
        """B' along an axis, for pixels 2 i - 1 to 2 i + 2 of an image; a missing last pixel is zero."""
        odd = (static_grid(image) or (0, 0, 0))[axis - 1] % 2
        taps = (((1, 0, -1), (1, odd)), ((1, 1), (0, odd)), ((-1, 1), (0, odd)), ((1, 0, -1), (0, 1 + odd)))
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
        key = (image, taps, axis, stride, pads)
        if key not in self.filtered:
            channels, *places = static_grid(image) or (0, 0, 0)
            kernel = (len(taps), 1) if axis == 2 else (1, len(taps))
            if (taps, axis, channels) not in self.filters:
                weights: Array = np.broadcast_to(np.reshape(taps, (1, 1, *kernel)), (channels, 1, *kernel)).astype(
                    float
                )
                self.filters[taps, axis, channels] = write.constant(weights)
            steps, around = [1, 1], [0, 0, 0, 0]
            steps[axis - 2], around[axis - 2], around[axis] = stride, *pads
            how = {"group": channels, "kernel_shape": kernel, "strides": steps, "pads": around}
            made = write("Conv", image, self.filters[taps, axis, channels], **how)
            places[axis - 2] = (places[axis - 2] + sum(pads) - len(taps)) // stride + 1
            set_shape(made, ((sizes(image) or ())[0], channels, *places))
            self.filtered[key] = made
        return self.filtered[key]


PARITIES = ((1,), (0, 1))
"""Taps that keep every other pixel, the even or the odd ones."""


def _joined(write: Writer, phases: Phases, like: ir.Value) -> ir.Value:
    """Write the image of these phases: rows one below the other, then columns side by side by one Transpose."""
    columns = [write("Concat", top, bottom, axis=3) for top, bottom in zip(*phases, strict=True)]
    pixels = write("Reshape", write("Concat", *columns, axis=0), write.constant([2, -1]))
    channels, height, width = static_grid(like) or (0, 0, 0)
    even = write.constant([-1, channels, height + height % 2, width + width % 2])
    image = write("Reshape", write("Transpose", pixels, perm=[1, 0]), even)
    if _has_phases(like):
        return image
    return write("Slice", image, write.constant([0, 0]), write.constant([height, width]), write.constant([2, 3]))


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
    fp32_only=True,
)

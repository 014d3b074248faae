"""winograd: compute 3x3 convolutions with 16 products for 2x2 pixels, where the plain sum takes 36.

For the 4x4 pixels d that 2x2 output pixels y depend on (Winograd 1980; Lavin and Gray, CVPR 2016, equation 8):

    y = A^T [(G w G^T) . (B^T d B)] A

    G = [1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1]
    B^T = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1],   A^T = [1 1 1 0; 0 1 -1 -1]

"." multiplies entry by entry and sums over input channels: 16 convolutions with 1x1 kernels. B and A add and subtract.

They are written for *phases*: x_rs[i, j] = x[2 i + r, 2 j + s], four images of half the height and width. Along one
axis the output pixels 2 i and 2 i + 1 depend on the input pixels 2 i - 1 to 2 i + 2: odd[i - 1], even[i], odd[i] and
even[i + 1]. Elementwise operators act on each phase separately, so images stay in phases between convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.activation_patterns import group, is_activation, ungroup
from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, is_constant, made_by, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, shaped_like, sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

    Phases = tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
    """Phases of an image, by parity of the row and of the column."""
    Terms = list[ir.Value | None]
    """Images of which products are taken; None is zero."""

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
EVEN, ODD = (1,), (0, 1)
"""Filters that keep every other pixel if applied with stride 2."""
ROWS, COLUMNS = 2, 3
"""Axes of an image."""

# The estimate of a convolution's speedup. Its unit is the time of one multiply-accumulate. The numbers are fits to
# measured speedups of 0.4 to 1.9, within 0.25 of each: ONNX Runtime with AVX2, one thread, 24 to 384 channels, 14x14 to
# 112x112 pixels. With AVX-512 (AMD EPYC, Zen 5) it is within 0.35 of what was measured, from 7x7 pixels on.
PLAIN_COST, PRODUCTS_COST = 36, 18
"""A plain convolution, and the 16 products, for 2x2 pixels of one pair of channels."""
FROM_PHASES, FROM_IMAGE, TO_PHASES, TO_IMAGE = 175, 325, 175, 425
"""The transforms for 2x2 pixels of an input channel, and of an output channel."""
ROW_START, NODE_OVERHEAD = 2500, 2e6
"""Beginning a row of pixels of a channel, and running all nodes of a convolution."""
WEIGHT_READ, PLAIN_WEIGHTS, PRODUCTS_WEIGHTS = 10, 9, 16
"""Reading a weight, which matters for few pixels, and the weights of one pair of channels, plain and for products."""
LEAST_SPEEDUP = 1.15
"""Estimated speedup from which a convolution is rewritten."""

SEVERAL_INPUTS = ("Add", "Sub", "Mul", "Sum", "Max", "Min", "PRelu", "Clip")
"""Elementwise operators of several inputs."""
REPEATING = (
    ("asymmetric", "floor"),
    ("asymmetric", "round_prefer_floor"),
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
    ("pytorch_half_pixel", "round_prefer_floor"),
    ("pytorch_half_pixel", "round_prefer_ceil"),
)
"""Coordinates and rounding of a nearest Resize by 2 that repeats every pixel."""


def _winograd(model: ir.Model) -> Iterator[Change]:
    if not any(map(_may_gain, model.graph)):
        return
    group(model)
    nodes = list(model.graph)
    plan = _plan(nodes)
    phases = _PhaseWriter(model)
    for node in nodes:
        if node in plan.convolutions:
            made = phases.convolve(node)
            channels, height, width = _grid(node.outputs[0])
            description = f"{channels} channels of {height} x {width} pixels by Winograd's algorithm"
            yield Change(rewrite=WINOGRAD.name, place=node.name or "", description=description)
        elif node in plan.elementwise:
            made = phases.apply(node)
        else:
            continue
        phases.record(node, made, joined=_is_read_as_image(node.outputs[0], plan))
    ungroup(model)


# Which convolutions are rewritten


@dataclass
class _NodesInPhases:
    """What is computed in phases.

    Attributes:
        convolutions: The convolutions that are rewritten.
        elementwise: The nodes that are applied to each phase.
    """

    convolutions: set[ir.Node]
    elementwise: set[ir.Node] = field(default_factory=set)

    def __contains__(self, node: ir.Node | None) -> bool:
        return node in self.convolutions or node in self.elementwise


def _plan(nodes: list[ir.Node]) -> _NodesInPhases:
    """The convolutions that gain, each with what its neighbors leave in phases."""
    convolutions = {node for node in nodes if _may_gain(node)}
    while True:
        plan = _with_elementwise(nodes, convolutions)
        gaining = {conv for conv in convolutions if _estimated_speedup(conv, plan) >= LEAST_SPEEDUP}
        if gaining == convolutions:
            return plan
        convolutions = gaining


def _with_elementwise(nodes: list[ir.Node], convolutions: set[ir.Node]) -> _NodesInPhases:
    """A plan with the elementwise nodes that are applied to phases.

    These are activations that alone read such an image, of odd size, too: the row or column beyond the image is cut off
    when the phases are joined. Of even size, also nodes that read only such images, since one is joined then and not
    several, and nodes that read one and whose output a convolution needs in phases.
    """
    needed: set[ir.Value] = set()
    for node in reversed(nodes):
        if node in convolutions:
            needed.add(_image_of(node))
        elif node.outputs and node.outputs[0] in needed:
            needed.update(_images_of(node))
    plan = _NodesInPhases(convolutions)
    for node in nodes:
        images = _images_of(node)
        if not images:
            continue
        in_phases = [image for image in images if image.producer() in plan]
        if len(images) == 1:
            joins_fewer = images == in_phases and only_reader(images[0]) is node
        else:
            joins_fewer = images == in_phases and _is_even(node.outputs[0])
        reached = bool(in_phases) or any(map(_before_repeating, images))
        if joins_fewer or (reached and node.outputs[0] in needed and _is_even(node.outputs[0])):
            plan.elementwise.add(node)
    return plan


def _may_gain(node: ir.Node) -> bool:
    """Whether a node is a 3x3 convolution from an image to one of equal size that gains if both are in phases."""
    if node.op_type != "Conv" or node.domain or any(v is not None and not is_constant(v) for v in node.inputs[1:]):
        return False
    before, after = static_grid(node.inputs[0]), static_grid(node.outputs[0])
    return (
        before is not None
        and after is not None
        and (sizes(node.inputs[1]) or ())[2:] == (3, 3)
        and attribute(node, "group", 1) == 1
        and set(attribute(node, "strides", (1,))) == set(attribute(node, "dilations", (1,))) == {1}
        and (set(attribute(node, "pads", (0,))) == {1} or attribute(node, "auto_pad", "").startswith("SAME"))
        and _speedup(node, FROM_PHASES, TO_PHASES) >= LEAST_SPEEDUP
    )


def _estimated_speedup(conv: ir.Node, plan: _NodesInPhases) -> float:
    image, made = _image_of(conv), conv.outputs[0]
    in_phases = (image.producer() in plan and _is_even(image)) or _before_repeating(image) is not None
    while (reader := only_reader(made)) is not None and is_activation(reader) and reader in plan:
        made = reader.outputs[0]
    return _speedup(
        conv, FROM_PHASES if in_phases else FROM_IMAGE, TO_IMAGE if _is_read_as_image(made, plan) else TO_PHASES
    )


def _speedup(conv: ir.Node, read_cost: float, write_cost: float) -> float:
    """The estimated speedup with these costs of the transforms."""
    (read, *_), (made, height, width) = _grid(_image_of(conv)), _grid(conv.outputs[0])
    rows, columns = -(-height // 2), -(-width // 2)
    transforms = columns * (read_cost * read + write_cost * made) + ROW_START * (read + made)
    weights = WEIGHT_READ * read * made
    new = rows * (columns * PRODUCTS_COST * read * made + transforms) + PRODUCTS_WEIGHTS * weights + NODE_OVERHEAD
    return (PLAIN_COST / 4 * height * width * read * made + PLAIN_WEIGHTS * weights) / new


def _images_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that an elementwise node, or a Concat of channels, reads pixel by pixel; [] of other nodes."""
    whole = static_grid(node.outputs[0]) if len(node.outputs) == 1 else None
    given = [value for value in node.inputs if value is not None]
    if whole is None:
        return []
    if not node.domain and node.op_type == "Concat" and attribute(node, "axis", 0) in (IMAGE, IMAGE - 4):
        return given if all(map(static_grid, given)) else []
    if not is_activation(node) and (node.domain or node.op_type not in SEVERAL_INPUTS):
        return []
    images = [value for value in given if static_grid(value) == whole]
    others = [sizes(value) for value in given if value not in images]
    return images if all(shape is not None and set(shape[-2:]) <= {1} for shape in others) else []


def _image_of(conv: ir.Node) -> ir.Value:
    assert conv.inputs[0] is not None
    return conv.inputs[0]


def _grid(image: ir.Value) -> tuple[int, int, int]:
    """Channels, height and width of an image whose sizes are known."""
    found = static_grid(image)
    assert found is not None
    return found


def _is_even(image: ir.Value) -> bool:
    """Whether height and width are even, so that the phases have no pixels beyond the image."""
    _, height, width = _grid(image)
    return height % 2 == width % 2 == 0


def _before_repeating(image: ir.Value) -> ir.Value | None:
    """If an image repeats every pixel of another one in both directions, the other one."""
    node = made_by(image, "Resize")
    large, small = static_grid(image), static_grid(node.inputs[0]) if node else None
    if node is None or large is None or small is None or (small[0], 2 * small[1], 2 * small[2]) != large:
        return None
    scales = constant(node.inputs[2]) if len(node.inputs) == 3 else None
    coordinates = attribute(node, "coordinate_transformation_mode", "half_pixel")
    rounding = attribute(node, "nearest_mode", "round_prefer_floor")
    repeats = attribute(node, "mode", "nearest") == "nearest" and (coordinates, rounding) in REPEATING
    return node.inputs[0] if repeats and scales is not None and list(scales) == [1, 1, 2, 2] else None


def _is_read_as_image(value: ir.Value, plan: _NodesInPhases) -> bool:
    """Whether something reads an image that is computed in phases as one image."""

    def reads_phases(node: ir.Node) -> bool:
        if node in plan.convolutions:
            return value is node.inputs[0] and _is_even(value)
        return node in plan.elementwise and value in _images_of(node)

    return value.is_graph_output() or not all(map(reads_phases, value.consumers()))


# The transforms


@dataclass
class _PhaseWriter:
    """Writes convolutions and elementwise nodes in phases.

    Attributes:
        model: The model that is rewritten.
        phases: The phases of each image that has them.
        filters: The constants of `_filtered`, by type, taps, axis and channels.
        filtered: What `_filtered` wrote, by its arguments. Nothing is computed twice.
    """

    model: ir.Model
    phases: dict[ir.Value, Phases] = field(default_factory=dict)
    filters: dict[tuple[ir.DataType | None, tuple[int, ...], int, int], ir.Value] = field(default_factory=dict)
    filtered: dict[tuple[ir.Value, tuple[int, ...], int, int, tuple[int, int]], ir.Value] = field(default_factory=dict)

    def record(self, node: ir.Node, phases: Phases, *, joined: bool) -> None:
        """Remember the phases of a node's output; if ``joined``, whatever reads the output reads an image of them."""
        value = node.outputs[0]
        self.phases[value] = phases
        if joined:
            write = Writer(self.model, node)
            image = _joined(write, phases, value)
            write.replace(value, image)
            if _is_even(image):
                self.phases[image] = phases

    def apply(self, node: ir.Node) -> Phases:
        """Apply an elementwise node to every phase; once to those that are equal."""
        write = Writer(self.model, node)
        images = {value: self._phases_of(write, value) for value in _images_of(node)}
        written: dict[tuple[ir.Value | None, ...], ir.Value] = {}

        def phase(row: int, column: int) -> ir.Value:
            given = tuple(images[value][row][column] if value in images else value for value in node.inputs)
            if given not in written:
                written[given] = _sized(write.copy(node, *given), node.outputs[0])
            return written[given]

        return (phase(0, 0), phase(0, 1)), (phase(1, 0), phase(1, 1))

    def convolve(self, conv: ir.Node) -> Phases:
        """Write a convolution; returns the phases of its output."""
        write = Writer(self.model, conv)
        weight = constant(conv.inputs[1])
        assert weight is not None
        kernels = np.einsum("ak,oikl,bl->aboi", G, weight, G)[..., None, None]
        parts = self._parts(conv)
        terms = [self._input_transform(write, part) for part in parts]
        ends = np.cumsum([_grid(part)[0] for part in parts])

        def add(one: ir.Value | None, other: ir.Value | None) -> ir.Value | None:
            return _sized(write("Add", one, other), conv.outputs[0]) if one and other else one or other

        def minus(one: ir.Value | None, other: ir.Value | None) -> ir.Value | None:
            return add(other and self._filtered(write, other, (-1,), ROWS), one)

        def m(row: int, column: int, sign: int = 1) -> ir.Value | None:
            """A product, summed over the parts. (1, 1) is in the sums of all four phases: the bias is added there."""
            whole, bias = None, conv.inputs[2:] if (row, column) == (1, 1) else ()
            for part, kernel in zip(terms, np.split(sign * kernels[row, column], ends[:-1], axis=1), strict=True):
                if (image := part[row][column]) is not None:
                    product = write("Conv", image, write.constant(kernel), *bias)
                    whole, bias = add(_sized(product, conv.outputs[0]), whole), ()
            return whole

        # A^T m A: first along columns, where even is m0 + m1 + m2 and odd is m1 - m2 - m3, then along rows. What
        # several phases share is added once, and the last addend of each is a product: runtimes compute it, the sum
        # and an activation in one pass.
        pairs = [(m(row, 1), m(row, 2)) for row in range(4)]
        even, odd = [add(*pair) for pair in pairs], [minus(*pair) for pair in pairs]
        even_1, even_2 = (add(m(row, 0), even[row]) for row in (1, 2))
        odd_1, odd_2 = (add(m(row, 3, -1), odd[row]) for row in (1, 2))
        y = (
            add(m(0, 0), add(even[0], add(even_1, even_2))),
            add(m(0, 3, -1), add(odd[0], add(odd_1, odd_2))),
            add(m(3, 0, -1), minus(minus(even_1, even_2), even[3])),
            add(m(3, 3), minus(minus(odd_1, odd_2), odd[3])),
        )
        y00, y01, y10, y11 = (phase for phase in y if phase is not None)
        return (y00, y01), (y10, y11)

    def _parts(self, conv: ir.Node) -> list[ir.Value]:
        """What a convolution reads: the inputs of a Concat if one repeats pixels, since that one needs 9 products."""
        concat = made_by(_image_of(conv), "Concat")
        parts = _images_of(concat) if concat else []
        return parts if any(map(_before_repeating, parts)) else [_image_of(conv)]

    def _phases_of(self, write: Writer, image: ir.Value) -> Phases:
        if image not in self.phases:
            if repeated := _before_repeating(image):
                self.phases[image] = (repeated, repeated), (repeated, repeated)
            else:
                rows = [self._filtered(write, image, taps, ROWS, stride=2) for taps in (EVEN, ODD)]
                x = [[self._filtered(write, row, taps, COLUMNS, stride=2) for taps in (EVEN, ODD)] for row in rows]
                self.phases[image] = (x[0][0], x[0][1]), (x[1][0], x[1][1])
        return self.phases[image]

    def _input_transform(self, write: Writer, image: ir.Value) -> list[Terms]:
        """B^T d B: 4x4 images of half the height and width."""
        if image in self.phases or _before_repeating(image):
            columns = zip(*self._phases_of(write, image), strict=True)
            left, right = (self._of_phases(write, even, odd, ROWS) for even, odd in columns)
            return [self._of_phases(write, *pair, COLUMNS) for pair in zip(left, right, strict=True)]
        return [self._of_image(write, row, COLUMNS) for row in self._of_image(write, image, ROWS)]

    def _of_phases(self, write: Writer, even: ir.Value | None, odd: ir.Value | None, axis: int) -> Terms:
        """B^T along an axis. Repeated pixels are one image: odd - even is zero then, and three products are left."""
        if even is None or odd is None:
            return [None] * 4
        if even is odd:
            both, apart = self._filtered(write, even, (2,), axis), None
        else:
            both = shaped_like(write("Add", even, odd), even)
            apart = shaped_like(write("Add", self._filtered(write, even, (-1,), axis), odd), even)
        first = self._filtered(write, odd, (1, -1), axis, pads=(1, 0))
        last = self._filtered(write, even, (1, -1), axis, pads=(0, 1))
        return [first, both, apart, last]

    def _of_image(self, write: Writer, image: ir.Value, axis: int) -> list[ir.Value]:
        """B^T along an axis of an image that is not in phases; of an odd size the missing last pixel is zero."""
        odd = _grid(image)[axis - 1] % 2
        filters = (((1, 0, -1), (1, odd)), ((1, 1), (0, odd)), ((-1, 1), (0, odd)), ((1, 0, -1), (0, 1 + odd)))
        return [self._filtered(write, image, taps, axis, stride=2, pads=pads) for taps, pads in filters]

    def _filtered(
        self,
        write: Writer,
        image: ir.Value,
        taps: tuple[int, ...],
        axis: int,
        *,
        stride: int = 1,
        pads: tuple[int, int] = (0, 0),
    ) -> ir.Value:
        """Filter every channel along an axis, by a depthwise convolution: it keeps the runtime's layout in blocks."""
        key = (image, taps, axis, stride, pads)
        if key not in self.filtered:
            channels, *places = _grid(image)
            kernel = (len(taps), 1) if axis == ROWS else (1, len(taps))
            weights = (write.dtype, taps, axis, channels)
            if weights not in self.filters:
                same: Array = np.broadcast_to(np.reshape(taps, (1, 1, *kernel)), (channels, 1, *kernel))
                self.filters[weights] = write.constant(same.astype(float))
            steps, around = [1, 1], [0, 0, 0, 0]
            steps[axis - 2], around[axis - 2], around[axis] = stride, *pads
            how = {"group": channels, "kernel_shape": kernel, "strides": steps, "pads": around}
            made = write("Conv", image, self.filters[weights], **how)
            places[axis - 2] = (places[axis - 2] + sum(pads) - len(taps)) // stride + 1
            set_shape(made, (*(sizes(image) or ())[:1], channels, *places))
            self.filtered[key] = made
        return self.filtered[key]


def _joined(write: Writer, phases: Phases, like: ir.Value) -> ir.Value:
    """Write the image of these phases: rows one below the other, then columns side by side by one Transpose."""
    columns = [write("Concat", top, bottom, axis=COLUMNS) for top, bottom in zip(*phases, strict=True)]
    pixels = write("Reshape", write("Concat", *columns, axis=0), write.constant([2, -1]))
    channels, height, width = _grid(like)
    even = write.constant([-1, channels, height + height % 2, width + width % 2])
    image = write("Reshape", write("Transpose", pixels, perm=[1, 0]), even)
    if _is_even(like):
        return image
    start, end, axes = (write.constant(numbers) for numbers in ([0, 0], [height, width], [ROWS, COLUMNS]))
    return write("Slice", image, start, end, axes)


def _sized(phase: ir.Value, whole: ir.Value) -> ir.Value:
    """Record the shape of a phase of an image."""
    channels, height, width = _grid(whole)
    set_shape(phase, (*(sizes(whole) or ())[:1], channels, -(-height // 2), -(-width // 2)))
    return phase


WINOGRAD = Rewrite(
    "winograd",
    "a 3x3 convolution that keeps the image size, which is known, with enough channels to be faster",
    _winograd,
    order=96,
    keeps=True,
    fp32_only=True,
)

"""Random inputs for an ONNX graph, of the kind that its first operators expect.

The input of an embedding gets indices over the whole table, a mask zeros and ones, an image pixels from 0 to 255. An
input that the graph normalizes gets values that are standard normal after the normalization. Values far from what the
graph was made for would saturate it, and a comparison would then show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.onnx_files import constants_of, dims_of, split_evenly
from repaconv.graph.operator_facts import DEFAULT_DOMAIN

if TYPE_CHECKING:
    import onnx


# Inputs that are parameters of an operator: axes, shapes, sizes, scales. Few random values are valid, so that a valid
# one is derived from the shapes that the graph declares.

Dims = Sequence[int | str]
Value = Sequence[int] | Sequence[float] | float | None
TO_THE_END = 2**31 - 1
"""End of a Slice that reaches the end of the axis."""
MOST_KERNEL_SHAPES = 4096
"""Maximum number of kernel shapes that are tried for a Col2Im."""


@dataclass(frozen=True)
class ParameterInput:
    """A graph input that a node reads as a parameter.

    Attributes:
        node: The node.
        place: Index of the parameter among the node's inputs.
        shapes: Declared shapes of the graph's values, by name.
        constants: Constant inputs of the node, by name.
        sizes: Sizes of the dynamic dimensions, by name.
        length: Number of elements of the parameter, 1 for a scalar; None if it is dynamic.
    """

    node: onnx.NodeProto
    place: int
    shapes: Mapping[str, Dims]
    constants: Mapping[str, Array]
    sizes: Mapping[str, int]
    length: int | None

    def dims(self, name: str) -> list[int] | None:
        """Return a value's shape at these sizes; None if it is not completely known."""
        found = [self.sizes.get(dim) if isinstance(dim, str) else dim for dim in self.shapes.get(name, ["?"])]
        return None if None in found else [dim for dim in found if dim is not None]

    @property
    def before(self) -> list[int] | None:
        """The shape of the node's first input."""
        return self.dims(self.node.input[0])

    @property
    def after(self) -> list[int] | None:
        """The shape of the node's first output."""
        return self.dims(self.node.output[0])

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute of the node, or the default."""
        import onnx

        found = (entry for entry in self.node.attribute if entry.name == name)
        return next((onnx.helper.get_attribute_value(entry) for entry in found), default)

    def constant(self, place: int) -> list[int] | None:
        """Return the integers of another input of the node if it is constant, else None."""
        name = self.node.input[place] if place < len(self.node.input) else ""
        return [int(number) for number in self.constants[name].reshape(-1)] if name in self.constants else None

    def axes(self, place: int) -> list[int]:
        """Return the axes in another input if it is constant, else all axes."""
        every = list(range(len(self.before or ())))
        numbers = self.constant(place)
        return [every[axis] for axis in numbers] if numbers is not None else every


def parameter(at: ParameterInput, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """Return a valid value of a parameter; None if the graph's shapes do not determine one.

    Args:
        at: Where the parameter is read.
        shape: Its shape.
        dtype: Its dtype.
    """
    try:
        found = RULES[at.node.op_type, at.place](at)
        return None if found is None else np.asarray(found, dtype).reshape(shape)
    except (IndexError, ValueError, ZeroDivisionError):  # the shapes do not fit: it gets random values
        return None


def _first_axes(at: ParameterInput) -> Value:
    return list(range(at.length or 1))


def _last_axes(at: ParameterInput) -> Value:
    return [-1 - axis for axis in range(1 if at.length is None else at.length)]


def _axes_of_one(at: ParameterInput) -> Value:
    return [axis for axis, size in enumerate(at.before or ()) if size == 1][: at.length]


def _starts(at: ParameterInput) -> Value:
    """The first position of a Slice: 1 along axes with more than two positions, else 0; the last one backwards."""
    if any(step < 0 for step in at.constant(4) or ()):
        return [-1] * (at.length or 1)
    dims = at.before
    return [0] * (at.length or 1) if dims is None else [int(dims[axis] > 2) for axis in at.axes(3)[: at.length]]


def _ends(at: ParameterInput) -> Value:
    return [-TO_THE_END if step < 0 else TO_THE_END for step in at.constant(4) or [1] * (at.length or 1)]


def _pads(at: ParameterInput) -> Value:
    """The pads of a Pad: as many as the declared shapes differ by, half of them before and half after."""
    before, after, axes = at.before, at.after, at.axes(3)
    if before is None or after is None:
        return None
    more = [after[axis] - before[axis] for axis in axes]
    return [*(size // 2 for size in more), *(size - size // 2 for size in more)]


def _shape(at: ParameterInput) -> Value:
    """The shape of a Reshape: the declared one, or all numbers along the first axis."""
    before, after = at.before, at.after
    if after is not None and (before is None or prod(before) == prod(after)):
        return after
    return [-1] + [1] * (at.length - 1) if at.length else []


def _expanded(at: ParameterInput) -> Value:
    return at.after or at.before


def _resized_sizes(at: ParameterInput) -> tuple[list[int], list[int]] | None:
    """The old and new sizes of the resized axes; height and width are doubled if the graph declares no new sizes."""
    before, after, axes = at.before, at.after, at.attribute("axes", None)
    if before is None:
        return None
    after = after or [size * (2 if axis > 1 else 1) for axis, size in enumerate(before)]
    axes = range(len(before)) if axes is None else axes
    return [before[axis] for axis in axes], [after[axis] for axis in axes]


def _scales(at: ParameterInput) -> Value:
    found = _resized_sizes(at)
    return None if found is None else [more / size for size, more in zip(*found, strict=True)]


def _resize_scales(at: ParameterInput) -> Value:
    """The scales of Resize, its input 2, or input 1 up to opset 10, where there are only two inputs."""
    return _scales(at) if at.place == 2 or len(at.node.input) == 2 else None


def _sizes(at: ParameterInput) -> Value:
    found = _resized_sizes(at)
    return None if found is None else found[1]


def _split_sizes(at: ParameterInput) -> Value:
    axis = at.attribute("axis", 0)
    parts = [at.dims(name) for name in at.node.output]
    if all(part is not None for part in parts):
        return [part[axis] for part in parts if part is not None]
    return None if at.before is None else split_evenly(at.before[axis], len(parts))


def _sequence_split_sizes(at: ParameterInput) -> Value:
    name = at.node.input[1]
    if not at.shapes.get(name) or at.before is None or not at.length:
        return 1
    return split_evenly(at.before[at.attribute("axis", 0)], at.length)


def _affine_grid_size(at: ParameterInput) -> Value:
    """The size [batch, 1, height, width] of AffineGrid, whose output is [batch, height, width, coordinates]."""
    before, after = at.before, at.after
    return None if before is None or after is None else [before[0], 1, *after[1:-1]]


def _col2im_image_shape(at: ParameterInput) -> Value:
    return None if at.after is None else at.after[2:]


def _col2im_kernel_shape(at: ParameterInput) -> Value:
    """The kernel shape of Col2Im that fits its input [batch, channels x kernel size, number of windows]."""
    before, after = at.before, at.after
    if before is None or after is None:
        return None
    image, axes = after[2:], len(after) - 2
    pads = at.attribute("pads", [0] * 2 * axes)
    strides, apart = (at.attribute(name, [1] * axes) for name in ("strides", "dilations"))
    whole = [size + pads[axis] + pads[axis + axes] for axis, size in enumerate(image)]
    for place, window in enumerate(product(*(range(1, size + 1) for size in image))):
        ends = (size - far * (side - 1) - 1 for size, far, side in zip(whole, apart, window, strict=True))
        places = prod(end // stride + 1 for end, stride in zip(ends, strides, strict=True))
        if prod(window) * after[1] == before[1] and places == before[2]:
            return list(window)
        if place > MOST_KERNEL_SHAPES:
            break
    return None


RULES: dict[tuple[str, int], Callable[[ParameterInput], Value]] = {
    ("CumSum", 1): _last_axes,
    ("CumProd", 1): _last_axes,
    **{(f"Reduce{kind}", 1): _last_axes for kind in ("Max", "Min", "Mean", "Sum", "Prod", "L1", "L2")},
    **{(f"Reduce{kind}", 1): _last_axes for kind in ("LogSum", "LogSumExp", "SumSquare")},
    ("Squeeze", 1): _axes_of_one,
    ("Unsqueeze", 1): _first_axes,
    ("Slice", 1): _starts,
    ("Slice", 2): _ends,
    ("Slice", 3): _first_axes,
    ("Slice", 4): lambda at: [1] * (at.length or 1),
    ("Pad", 1): _pads,
    ("Pad", 3): _first_axes,
    ("Reshape", 1): _shape,
    ("Expand", 1): _expanded,
    ("Resize", 1): _resize_scales,
    ("Resize", 2): _resize_scales,
    ("Resize", 3): _sizes,
    ("Upsample", 1): _scales,
    ("Split", 1): _split_sizes,
    ("SplitToSequence", 1): _sequence_split_sizes,
    ("AffineGrid", 1): _affine_grid_size,
    ("Col2Im", 1): _col2im_image_shape,
    ("Col2Im", 2): _col2im_kernel_shape,
    ("NonMaxSuppression", 3): lambda _: 0.5,
    ("Dropout", 1): lambda _: 0.25,
    ("Dropout", 2): lambda _: 0.0,
}
"""The rule for each parameter, by operator and index of the input."""


# Random values

Array = NDArray[Any]

SAMPLE_STRINGS = ("a", "B c", "42", "")
"""Strings for an input whose vocabulary the graph does not show."""

INTEGER_BOUNDS = (10, 2, 1)
"""Exclusive upper bounds of random integers for inputs whose meaning the graph does not show; the first bound with
which the graph runs is used. With 1 they are all 1, not 0."""

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Concat", "Slice", "Split", "Pad", "Resize", "Tile")
_LOGIC = ("Not", "And", "Or", "Xor", "Where", "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
_INDICES = ("Gather", "GatherElements", "OneHot")
_MASK_FACTOR = 1e3
"""An input that is multiplied by at least this factor is taken as a mask that is added to attention scores."""
MOST_NODES_TO_INPUT = 16
"""Number of nodes up to which the use of an input is followed."""
_FLOAT, _BOOL = 1, 9
"""Numbers of ONNX's types; importing onnx for them takes long."""


@dataclass(frozen=True)
class Distribution:
    """The distribution of the random values of an input.

    Attributes:
        index: Exclusive upper bound of indices, if the input is one of indices.
        value: Returns the required value from dynamic dimensions, shape and dtype, or None if there is none.
        words: Strings to choose from, if the input is text.
        mask: Whether the values are 0 and 1.
        range: (lowest, highest) value of a uniform distribution, each broadcastable to the input.
        mean: Mean of the normal distribution that is used otherwise, broadcastable to the input.
        deviation: Its standard deviation, broadcastable to the input.
    """

    index: int | None = None
    value: Callable[[Mapping[str, int], tuple[int, ...], np.dtype[Any]], Array | None] | None = None
    words: tuple[str, ...] = SAMPLE_STRINGS
    mask: bool = False
    range: tuple[Array, Array] | None = None
    mean: Array = field(default_factory=lambda: np.zeros(()))
    deviation: Array = field(default_factory=lambda: np.ones(()))

    def __call__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        generator: np.random.Generator,
        *,
        gain: float,
        below: int,
        unit: bool = False,
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Array:
        """Sample the values of the input.

        Args:
            shape: Shape of the input.
            dtype: Dtype of the input.
            generator: The random generator.
            gain: Factor on the deviation of normal distributions, and on ``unit`` numbers.
            below: Upper bound of integers without known meaning; one of `INTEGER_BOUNDS`.
            unit: Whether numbers from 0 to 1 replace normal ones.
            sizes: Sizes of the graph's dynamic dimensions, by name.
        """
        if self.value is not None and (found := self.value(sizes, shape, dtype)) is not None:
            return found
        if dtype.kind == "O":
            return np.asarray(generator.choice(self.words, shape)).astype(object)
        if dtype.kind == "f" and self.index is None and not self.mask:
            if self.range is not None or unit:
                low, high = self.range or (0.0, gain)
                return np.asarray(low + (high - low) * _uniform(shape, generator)).astype(dtype)
            return np.asarray(self.mean + gain * self.deviation * _normal(shape, generator)).astype(dtype)
        if self.index is not None:
            return _indices(self.index, shape, generator).astype(dtype)
        if self.mask or dtype.kind == "b":
            bits: Array = generator.integers(0, 2, shape)
            if shape and shape[-1] > 1:
                bits[..., 0], bits[..., -1] = 1, 0  # no row is all 1 or all 0
            return bits.astype(dtype)
        if dtype.name == "uint8":
            return np.asarray(np.rint(255 * _uniform(shape, generator))).astype(dtype)
        return np.asarray(generator.integers(0, below, shape) if below > 1 else np.ones(shape)).astype(dtype)


RankedDistribution = tuple[int, Distribution]
"""What a node expects of an input, and how specific that is; 0 is most specific."""


def _indices(count: int, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Random indices into a table: the last and the first one, then as many others as fit."""
    order = [count - 1, 0, *generator.permutation(np.arange(1, max(count - 1, 1)))]
    found = np.resize(order[: max(count, 1)], shape)
    return np.asarray(generator.permutation(found.reshape(-1)).reshape(shape))


def _normal(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Normal values, with a random mean of its own for each image, channel and token.

    Plain noise averages to nearly the same mean everywhere, and a network that averages would not vary.
    """
    found = generator.standard_normal(shape)
    if len(shape) < 3:
        return np.asarray(found)
    inner = [1] * (len(shape) - 2)
    for level in ((shape[0], 1, *inner), (*shape[:2], *inner), (shape[0], *inner, shape[-1])):
        found = found + generator.standard_normal(level)
    return np.asarray(found / 2)


def _uniform(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """The values of `_normal`, squashed to between 0 and 1."""
    return np.asarray(0.5 + 0.5 * np.tanh(_normal(shape, generator)))


@dataclass(frozen=True)
class _AffineValue:
    """A value expressed as scale * input + shift.

    Attributes:
        scale: Broadcastable to the input.
        shift: Broadcastable to the input.
        axes: For each axis of the value, the axis of the input that it is; None if unknown.
    """

    scale: Array
    shift: Array
    axes: tuple[int, ...] | None

    def transposed(self, numbers: Array) -> Array | None:
        """Transpose a constant that is combined with this value to the input's axes; None if these are unknown."""
        if numbers.size == 1:
            return numbers.reshape(())
        if self.axes is None or numbers.ndim > len(self.axes):
            return None
        whole = np.array(numbers, ndmin=len(self.axes))
        return np.asarray(whole.transpose(np.argsort(self.axes)))


def input_distributions(
    model: onnx.ModelProto, held: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Distribution]:
    """Return the distribution of each input of a graph.

    Args:
        model: The graph.
        held: Inputs with fixed values, by name.
    """
    reader = _InputReader(model)
    stored = {weight.name for weight in model.graph.initializer}
    return {
        value.name: Distribution(value=partial(_fixed_value, held[value.name]))
        if value.name in held
        else reader.distribution(value)
        for value in model.graph.input
        if value.name not in stored
    }


def _fixed_value(numbers: Any, _sizes: Mapping[str, int], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A fixed value, repeated for a larger batch."""
    return np.resize(np.asarray(numbers, dtype), shape)


def named_dims_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Return a tensor's dimensions; a dynamic one is given by its name, or as ``value[axis]`` without a name."""
    return tuple(f"{value.name}[{axis}]" if dim is None else dim for axis, dim in enumerate(dims_of(value)))


class _InputReader:
    """Derives the distribution of each input of a graph from the nodes that read it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        from onnx import numpy_helper

        self.stored = constants_of(model.graph)
        self.to_array = numpy_helper.to_array
        self.uses: dict[str, list[tuple[Any, int]]] = {}
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                self.uses.setdefault(name, []).append((node, place))
        values = (*model.graph.input, *model.graph.value_info)
        self.shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
        declared = (value for value in (*values, *model.graph.output) if value.type.tensor_type.HasField("shape"))
        self.dims: dict[str, Dims] = {name: list(tensor.dims) for name, tensor in self.stored.items()}
        self.dims |= {value.name: named_dims_of(value) for value in declared}

    def distribution(self, value: onnx.ValueInfoProto) -> Distribution:
        """Return the most specific distribution that a reader of the input expects; for indices the smallest bound."""
        for node, place in self.uses.get(value.name, []):
            if (node.op_type, place) in RULES and node.domain in DEFAULT_DOMAIN:
                return Distribution(value=partial(self._parameter, node, place, value.name))
        if words := tuple(dict.fromkeys(self._known_strings(value.name))):
            return Distribution(words=words)
        rank = len(value.type.tensor_type.shape.dim)
        start = _AffineValue(np.ones(()), np.zeros(()), tuple(range(rank)))
        expectations = list(self._expectations(value.name, start, MOST_NODES_TO_INPUT))
        tables = [expectation.index for _, expectation in expectations if expectation.index is not None]
        if tables:
            return Distribution(index=min(tables))
        if "mask" in value.name.lower() and value.type.tensor_type.elem_type != _FLOAT:
            return Distribution(mask=True)
        return min(expectations, key=lambda expectation: expectation[0])[1] if expectations else Distribution()

    def _parameter(
        self, node: Any, place: int, name: str, sizes: Mapping[str, int], shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array | None:
        length = prod(shape) if all(isinstance(dim, int) or dim in sizes for dim in self.dims.get(name, ())) else None
        constants = {name: numbers for name in node.input if (numbers := self._constant(name)) is not None}
        return parameter(ParameterInput(node, place, self.dims, constants, sizes, length), shape, dtype)

    def _known_strings(self, name: str) -> Iterator[str]:
        """The strings in attributes of the nodes that read the value."""
        for node, _ in self.uses.get(name, []):
            for entry in node.attribute:
                yield from (text.decode() for text in entry.strings)
                for tensor in [entry.t] if entry.HasField("t") and entry.t.string_data else []:
                    yield from (text.decode() for text in tensor.string_data)

    def _expectations(self, name: str, seen: _AffineValue, depth: int) -> Iterator[RankedDistribution]:
        """Yield what each use of the value expects, up to ``depth`` nodes away."""
        for node, place in self.uses.get(name, []) if depth else []:
            found = self._node_expectation(node, place, seen)
            if found is None:
                continue
            if isinstance(found, tuple):
                yield found
            else:
                for output in node.output:
                    if output not in self.uses and (expectation := self._default_distribution(found)):
                        yield expectation
                    yield from self._expectations(output, found, depth - 1)

    def _node_expectation(self, node: Any, place: int, seen: _AffineValue) -> RankedDistribution | _AffineValue | None:
        """Return what a node expects of its input, or its output as a function of it; None if neither is known."""
        kind = node.op_type
        if kind in _INDICES and place == (0 if kind == "OneHot" else 1):
            return self._index(node, seen)
        if kind in _LOGIC:
            return 1, Distribution(mask=True)
        if kind == "Cast":
            to = next(entry.i for entry in node.attribute if entry.name == "to")
            return (1, Distribution(mask=True)) if to == _BOOL else seen
        if kind in ("Identity", "Dropout") or (kind in _VIEWS and place == 0):
            return seen if kind in ("Identity", "Dropout") else _AffineValue(seen.scale, seen.shift, None)
        if kind == "Transpose":
            perm = next((list(entry.ints) for entry in node.attribute if entry.name == "perm"), None)
            if seen.axes is None:
                return seen
            order = perm or list(range(len(seen.axes)))[::-1]
            return _AffineValue(seen.scale, seen.shift, tuple(seen.axes[i] for i in order))
        if kind in ("Add", "Sub", "Mul", "Div"):
            return self._scaled(node, place, seen)
        return self._range(node, place, seen)

    def _constant(self, name: str) -> Array | None:
        stored = self.stored.get(name)
        return None if stored is None or stored.external_data else np.asarray(self.to_array(stored))

    def _index(self, node: Any, seen: _AffineValue) -> RankedDistribution | None:
        """Indices over a table of known length, before they are scaled and shifted by one number each."""
        if node.op_type == "OneHot":
            depth = self._constant(node.input[1])
            count = None if depth is None else int(depth.reshape(-1)[0])
        else:
            stored = self.stored.get(node.input[0])
            shape = list(stored.dims) if stored is not None else self.shapes.get(node.input[0], [])
            axis = next((entry.i for entry in node.attribute if entry.name == "axis"), 0)
            count = shape[axis] if shape else None
        if not count or seen.scale.ndim or seen.shift.ndim or seen.scale <= 0:
            return None
        return 0, Distribution(index=max(1, int((count - 1 - seen.shift) // seen.scale) + 1))

    def _scaled(self, node: Any, place: int, seen: _AffineValue) -> RankedDistribution | _AffineValue | None:
        """The result of an operation with a constant as a function of the input; a mask for a very large factor."""
        numbers = self._constant(node.input[1 - place])
        if numbers is None:
            return self._default_distribution(seen)
        other = seen.transposed(numbers.astype(np.float64))
        if other is None:
            return _AffineValue(seen.scale, seen.shift, None)
        if node.op_type == "Mul" and np.abs(other).min() >= _MASK_FACTOR:
            return 1, Distribution(mask=True)
        if node.op_type == "Div" and place:
            return None
        if node.op_type == "Div":
            other = 1 / np.where(other == 0, 1, other)
        if node.op_type in ("Mul", "Div"):
            return _AffineValue(seen.scale * other, seen.shift * other, seen.axes)
        if node.op_type == "Sub":
            return _AffineValue(-seen.scale, other - seen.shift, seen.axes) if place else _AffineValue(
                seen.scale, seen.shift - other, seen.axes
            )  # fmt: skip
        return _AffineValue(seen.scale, seen.shift + other, seen.axes)

    def _range(self, node: Any, place: int, seen: _AffineValue) -> RankedDistribution | None:
        """The values in the domain of a node, or those that a BatchNormalization makes standard normal."""
        if node.op_type == "Clip" and place == 0:
            ends = [self._constant(name) if name else None for name in node.input[1:3]]
            if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
                return 3, self._uniform_between(seen, float(ends[0]), float(ends[1]))
        if node.op_type in ("Log", "Sqrt", "Pow", "Reciprocal") and place == 0:
            return 2, self._uniform_between(seen, 0.05, 4.0)
        if node.op_type == "Acosh":
            return 2, self._uniform_between(seen, 1.05, 4.0)
        if node.op_type in ("Acos", "Asin", "Atanh"):
            return 2, self._uniform_between(seen, -0.95, 0.95)
        if node.op_type == "BatchNormalization" and place == 0:
            mean, variance = (self._constant(name) for name in node.input[3:5])
            if mean is not None and variance is not None and seen.axes is not None:
                column = (-1, *[1] * (len(seen.axes) - 2))
                return self._normal(seen, mean.reshape(column), np.sqrt(variance).reshape(column), 3)
        return self._default_distribution(seen)

    def _default_distribution(self, seen: _AffineValue) -> RankedDistribution | None:
        """The distribution for which the value, after scale and shift, is standard normal, or 0 to 1 if only scaled."""
        if seen.shift.any():
            return self._normal(seen, np.zeros(()), np.ones(()), 4)
        if not seen.scale.ndim and 0 < seen.scale < 0.5:
            return 5, self._uniform_between(seen, 0.0, 1.0)
        return 6, Distribution()

    def _normal(self, seen: _AffineValue, mean: Array, deviation: Array, rank: int) -> RankedDistribution | None:
        a, b = seen.transposed(mean), seen.transposed(deviation)
        if a is None or b is None or not np.all(seen.scale):
            return None
        return rank, Distribution(mean=(a - seen.shift) / seen.scale, deviation=b / np.abs(seen.scale))

    def _uniform_between(self, seen: _AffineValue, low: float, high: float) -> Distribution:
        """The uniform input distribution for which the value lies between ``low`` and ``high``."""
        scale = np.where(seen.scale == 0, 1, seen.scale)
        ends = (low - seen.shift) / scale, (high - seen.shift) / scale
        return Distribution(range=(np.minimum(*ends), np.maximum(*ends)))

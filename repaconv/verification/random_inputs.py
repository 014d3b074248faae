"""What a graph expects of its inputs, read from the first operators that they meet, and inputs drawn to that.

An embedding is given indices over its whole table, a mask zeros and ones, pixels 0 to 255, and what the graph
normalises is drawn so that it is standard normal behind that: a value far from what the graph was made for saturates
it, and then nothing shows.
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

from repaconv.graph.onnx_files import split_evenly

if TYPE_CHECKING:
    import onnx


# --- Inputs that say how an operator works and not on what: axes, shapes, sizes, scales. A value that it takes is read
# off the shapes that the graph declares, since few random ones are valid.

Dims = Sequence[int | str]
Value = Sequence[int] | Sequence[float] | float | None
TO_THE_END = 2**31 - 1
"""As the end of a Slice."""
MOST = 4096
"""Windows that are tried for a Col2Im."""


@dataclass(frozen=True)
class Place:
    """Where an input is read as a parameter.

    Attributes:
        node: By which node.
        place: As which of its inputs.
        shapes: Of all values, as far as the graph declares them, by name.
        constants: The graph's constants by name.
        sizes: Dynamic dimensions by name.
        length: How many numbers the parameter has, 1 for a scalar; None where that is dynamic.
    """

    node: onnx.NodeProto
    place: int
    shapes: Mapping[str, Dims]
    constants: Mapping[str, Array]
    sizes: Mapping[str, int]
    length: int | None

    def dims(self, name: str) -> list[int] | None:
        """A value's shape at these sizes; None where something of it is not known."""
        found = [self.sizes.get(dim) if isinstance(dim, str) else dim for dim in self.shapes.get(name, ["?"])]
        return None if None in found else [dim for dim in found if dim is not None]

    @property
    def before(self) -> list[int] | None:
        """Shape of the node's first input."""
        return self.dims(self.node.input[0])

    @property
    def after(self) -> list[int] | None:
        """Shape of its first output."""
        return self.dims(self.node.output[0])

    def attribute(self, name: str, default: Any) -> Any:
        """One of its attributes."""
        import onnx

        found = (entry for entry in self.node.attribute if entry.name == name)
        return next((onnx.helper.get_attribute_value(entry) for entry in found), default)

    def constant(self, place: int) -> list[int] | None:
        """Another of its inputs, where that is constant."""
        name = self.node.input[place] if place < len(self.node.input) else ""
        return [int(number) for number in self.constants[name].reshape(-1)] if name in self.constants else None

    def axes(self, place: int) -> list[int]:
        """The axes that another input says, as far as the graph knows them; else the first."""
        every = list(range(len(self.before or ())))
        told = self.constant(place)
        return [every[axis] for axis in told] if told is not None else every


def parameter(at: Place, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """A value that the operator takes; None where the graph does not tell one."""
    try:
        found = RULES[at.node.op_type, at.place](at)
        return None if found is None else np.asarray(found, dtype).reshape(shape)
    except (IndexError, ValueError, ZeroDivisionError):  # shapes that do not fit: then it is drawn like any other
        return None


def _first_axes(at: Place) -> Value:
    return list(range(at.length or 1))


def _last_axes(at: Place) -> Value:
    return [-1 - axis for axis in range(1 if at.length is None else at.length)]


def _axes_of_one(at: Place) -> Value:
    return [axis for axis, size in enumerate(at.before or ()) if size == 1][: at.length]


def _starts(at: Place) -> Value:
    if any(step < 0 for step in at.constant(4) or ()):
        return [-1] * (at.length or 1)
    dims = at.before
    return [0] * (at.length or 1) if dims is None else [int(dims[axis] > 2) for axis in at.axes(3)[: at.length]]


def _ends(at: Place) -> Value:
    return [-TO_THE_END if step < 0 else TO_THE_END for step in at.constant(4) or [1] * (at.length or 1)]


def _pads(at: Place) -> Value:
    before, after, axes = at.before, at.after, at.axes(3)
    if before is None or after is None:
        return None
    more = [after[axis] - before[axis] for axis in axes]
    return [*(size // 2 for size in more), *(size - size // 2 for size in more)]


def _shape(at: Place) -> Value:
    before, after = at.before, at.after
    if after is not None and (before is None or prod(before) == prod(after)):
        return after
    return [-1] + [1] * (at.length - 1) if at.length else []


def _expanded(at: Place) -> Value:
    return at.after or at.before


def _resized(at: Place) -> tuple[list[int], list[int]] | None:
    """Sizes before and after along the axes that are resized; twice as large where nothing tells."""
    before, after, axes = at.before, at.after, at.attribute("axes", None)
    if before is None:
        return None
    after = after or [size * (2 if axis > 1 else 1) for axis, size in enumerate(before)]
    axes = range(len(before)) if axes is None else axes
    return [before[axis] for axis in axes], [after[axis] for axis in axes]


def _scales(at: Place) -> Value:
    found = _resized(at)
    return None if found is None else [more / size for size, more in zip(*found, strict=True)]


def _resize(at: Place) -> Value:
    """What Resize takes last: scales up to opset 10, where they are the second of two."""
    return _scales(at) if at.place == 2 or len(at.node.input) == 2 else None


def _sizes(at: Place) -> Value:
    found = _resized(at)
    return None if found is None else found[1]


def _parts(at: Place) -> Value:
    axis = at.attribute("axis", 0)
    parts = [at.dims(name) for name in at.node.output]
    if all(part is not None for part in parts):
        return [part[axis] for part in parts if part is not None]
    return None if at.before is None else split_evenly(at.before[axis], len(parts))


def _sequence_parts(at: Place) -> Value:
    name = at.node.input[1]
    if not at.shapes.get(name) or at.before is None or not at.length:
        return 1
    return split_evenly(at.before[at.attribute("axis", 0)], at.length)


def _grid(at: Place) -> Value:
    """Batch, channels, sides: of a grid of [batch, sides, coordinates]."""
    before, after = at.before, at.after
    return None if before is None or after is None else [before[0], 1, *after[1:-1]]


def _image(at: Place) -> Value:
    return None if at.after is None else at.after[2:]


def _window(at: Place) -> Value:
    """Of Col2Im: the window whose columns [batch, channels times window, places] are as many as are given."""
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
        if place > MOST:
            break
    return None


RULES: dict[tuple[str, int], Callable[[Place], Value]] = {
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
    ("Resize", 1): _resize,
    ("Resize", 2): _resize,
    ("Resize", 3): _sizes,
    ("Upsample", 1): _scales,
    ("Split", 1): _parts,
    ("SplitToSequence", 1): _sequence_parts,
    ("AffineGrid", 1): _grid,
    ("Col2Im", 1): _image,
    ("Col2Im", 2): _window,
    ("NonMaxSuppression", 3): lambda _: 0.5,
    ("Dropout", 1): lambda _: 0.25,
    ("Dropout", 2): lambda _: 0.0,
}
"""By operator and input."""


# --- What a graph expects of its inputs, read from the first operators that they meet, and inputs drawn to that.

Array = NDArray[Any]

WORDS = ("a", "B c", "42", "")
"""Strings of no known use."""

NUMBERS = (10, 2, 1)
"""Integers of no known use are drawn below the first of these with which the graph runs; of 1, they are all 1."""

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Concat", "Slice", "Split", "Pad", "Resize", "Tile")
_LOGIC = ("Not", "And", "Or", "Xor", "Where", "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
_INDICES = ("Gather", "GatherElements", "OneHot")
_HUGE = 1e3
"""What is multiplied with as much is a mask that is added to scores."""
DEPTH = 16


@dataclass(frozen=True)
class Draw:
    """How an input is drawn: ``index`` below so many, ``mask``, ``range`` uniform, else normal about ``mean``.

    Numbers are for the input itself, in shapes that broadcast to it. ``value`` gives what it must be, of dynamic
    dimensions, shape and type, or None where that is not known. Strings are some of ``words``.
    """

    index: int | None = None
    value: Callable[[Mapping[str, int], tuple[int, ...], np.dtype[Any]], Array | None] | None = None
    words: tuple[str, ...] = WORDS
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
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Array:
        """One input.

        Args:
            shape: Its shape.
            dtype: Its type.
            generator: Its source.
            gain: A factor on the deviation of what is drawn normally.
            below: Of `NUMBERS`.
            sizes: The graph's dynamic dimensions by name.
        """
        if self.value is not None and (found := self.value(sizes, shape, dtype)) is not None:
            return found
        if dtype.kind == "O":
            return np.asarray(generator.choice(self.words, shape)).astype(object)
        if dtype.kind == "f" and self.index is None and not self.mask:
            if self.range is not None:
                low, high = self.range
                return np.asarray(low + (high - low) * _uniform(shape, generator)).astype(dtype)
            return np.asarray(self.mean + gain * self.deviation * _normal(shape, generator)).astype(dtype)
        if self.index is not None:
            return _indices(self.index, shape, generator).astype(dtype)
        if self.mask or dtype.kind == "b":
            bits: Array = generator.integers(0, 2, shape)
            if shape and shape[-1] > 1:
                bits[..., 0], bits[..., -1] = 1, 0  # along every row something is seen, and not all
            return bits.astype(dtype)
        if dtype.name == "uint8":
            return np.asarray(np.rint(255 * _uniform(shape, generator))).astype(dtype)
        return np.asarray(generator.integers(0, below, shape) if below > 1 else np.ones(shape)).astype(dtype)


def _indices(count: int, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Both ends of a table, then as much of it as there is room for."""
    order = [count - 1, 0, *generator.permutation(np.arange(1, max(count - 1, 1)))]
    found = np.resize(order[: max(count, 1)], shape)
    return np.asarray(generator.permutation(found.reshape(-1)).reshape(shape))


def _normal(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Of images and tokens, each and each of its channels has a level of its own: the means of noise are all alike."""
    found = generator.standard_normal(shape)
    if len(shape) < 3:
        return np.asarray(found)
    inner = [1] * (len(shape) - 2)
    for level in ((shape[0], 1, *inner), (*shape[:2], *inner), (shape[0], *inner, shape[-1])):
        found = found + generator.standard_normal(level)
    return np.asarray(found / 2)


def _uniform(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Likewise, from 0 to 1."""
    return np.asarray(0.5 + 0.5 * np.tanh(_normal(shape, generator)))


@dataclass(frozen=True)
class _Seen:
    """A value as scale * input + shift, while that is known; its axes as those of the input."""

    scale: Array
    shift: Array
    axes: tuple[int, ...] | None

    def turned(self, numbers: Array) -> Array | None:
        """A constant that meets this value, as it lies along the input's axes; None where that is not known."""
        if numbers.size == 1:
            return numbers.reshape(())
        if self.axes is None or numbers.ndim > len(self.axes):
            return None
        whole = numbers.reshape((1,) * (len(self.axes) - numbers.ndim) + numbers.shape)
        return np.asarray(whole.transpose(np.argsort(self.axes)))


def draws(model: onnx.ModelProto, held: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Draw]:
    """How every input of a graph is drawn; those ``held`` always have these values."""
    reader = _Reader(model)
    stored = {weight.name for weight in model.graph.initializer}
    return {
        value.name: Draw(value=partial(_held, held[value.name])) if value.name in held else reader.draw(value)
        for value in model.graph.input
        if value.name not in stored
    }


def _held(numbers: Any, _sizes: Mapping[str, int], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A value as it was given; over again for a larger batch."""
    return np.resize(np.asarray(numbers, dtype), shape)


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """The sizes of a value that is a tensor; of one without a name, its value's and its axis."""
    dims = enumerate(value.type.tensor_type.shape.dim)
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}[{axis}]" for axis, dim in dims
    )


class _Reader:
    def __init__(self, model: onnx.ModelProto) -> None:
        from onnx import numpy_helper

        self.stored = {weight.name: weight for weight in model.graph.initializer}
        self.to_array = numpy_helper.to_array
        self.uses: dict[str, list[tuple[Any, int]]] = {}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                self.stored[node.output[0]] = node.attribute[0].t
            for place, name in enumerate(node.input):
                self.uses.setdefault(name, []).append((node, place))
        values = (*model.graph.input, *model.graph.value_info)
        self.shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
        declared = (value for value in (*values, *model.graph.output) if value.type.tensor_type.HasField("shape"))
        self.dims: dict[str, Dims] = {name: list(tensor.dims) for name, tensor in self.stored.items()}
        self.dims |= {value.name: dims_of(value) for value in declared}

    def draw(self, value: onnx.ValueInfoProto) -> Draw:
        """The most particular wish of all that read it; of indices the smallest table."""
        for node, place in self.uses.get(value.name, []):
            if (node.op_type, place) in RULES and node.domain in ("", "ai.onnx"):
                return Draw(value=partial(self._parameter, node, place, value.name))
        if words := tuple(dict.fromkeys(self._words(value.name))):
            return Draw(words=words)
        rank = len(value.type.tensor_type.shape.dim)
        start = _Seen(np.ones(()), np.zeros(()), tuple(range(rank)))
        wishes = list(self._wishes(value.name, start, DEPTH))
        tables = [wish.index for _, wish in wishes if wish.index is not None]
        if tables:
            return Draw(index=min(tables))
        if "mask" in value.name.lower() and value.type.tensor_type.elem_type != 1:
            return Draw(mask=True)
        return min(wishes, key=lambda wish: wish[0])[1] if wishes else Draw()

    def _parameter(
        self, node: Any, place: int, name: str, sizes: Mapping[str, int], shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array | None:
        length = prod(shape) if all(isinstance(dim, int) or dim in sizes for dim in self.dims.get(name, ())) else None
        constants = {name: numbers for name in node.input if (numbers := self._constant(name)) is not None}
        return parameter(Place(node, place, self.dims, constants, sizes, length), shape, dtype)

    def _words(self, name: str) -> Iterator[str]:
        """The strings that those know that read it."""
        for node, _ in self.uses.get(name, []):
            for entry in node.attribute:
                yield from (text.decode() for text in entry.strings)
                for tensor in [entry.t] if entry.HasField("t") and entry.t.string_data else []:
                    yield from (text.decode() for text in tensor.string_data)

    def _wishes(self, name: str, seen: _Seen, depth: int) -> Iterator[tuple[int, Draw]]:
        """What they read it for, with a rank: 0 is the most particular."""
        for node, place in self.uses.get(name, []) if depth else []:
            found = self._of(node, place, seen)
            if found is None:
                continue
            if isinstance(found, tuple):
                yield found
            else:
                for output in node.output:
                    if output not in self.uses and (wish := self._plain(found)):
                        yield wish
                    yield from self._wishes(output, found, depth - 1)

    def _of(self, node: Any, place: int, seen: _Seen) -> tuple[int, Draw] | _Seen | None:
        """What one node wants of its input, or how its output hangs on that."""
        kind = node.op_type
        if kind in _INDICES and place == (0 if kind == "OneHot" else 1):
            return self._index(node, seen)
        if kind in _LOGIC:
            return 1, Draw(mask=True)
        if kind == "Cast":
            to = next(entry.i for entry in node.attribute if entry.name == "to")
            return (1, Draw(mask=True)) if to == 9 else seen
        if kind in ("Identity", "Dropout") or (kind in _VIEWS and place == 0):
            return seen if kind in ("Identity", "Dropout") else _Seen(seen.scale, seen.shift, None)
        if kind == "Transpose":
            perm = next((list(entry.ints) for entry in node.attribute if entry.name == "perm"), None)
            if seen.axes is None:
                return seen
            order = perm or list(range(len(seen.axes)))[::-1]
            return _Seen(seen.scale, seen.shift, tuple(seen.axes[i] for i in order))
        if kind in ("Add", "Sub", "Mul", "Div"):
            return self._scaled(node, place, seen)
        return self._range(node, place, seen)

    def _constant(self, name: str) -> Array | None:
        stored = self.stored.get(name)
        return None if stored is None or stored.external_data else np.asarray(self.to_array(stored))

    def _index(self, node: Any, seen: _Seen) -> tuple[int, Draw] | None:
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
        return 0, Draw(index=max(1, int((count - 1 - seen.shift) // seen.scale) + 1))

    def _scaled(self, node: Any, place: int, seen: _Seen) -> tuple[int, Draw] | _Seen | None:
        numbers = self._constant(node.input[1 - place])
        if numbers is None:
            return self._plain(seen)
        other = seen.turned(numbers.astype(np.float64))
        if other is None:
            return _Seen(seen.scale, seen.shift, None)
        if node.op_type == "Mul" and np.abs(other).min() >= _HUGE:
            return 1, Draw(mask=True)
        if node.op_type == "Div" and place:
            return None
        if node.op_type == "Div":
            other = 1 / np.where(other == 0, 1, other)
        if node.op_type in ("Mul", "Div"):
            return _Seen(seen.scale * other, seen.shift * other, seen.axes)
        if node.op_type == "Sub":
            return _Seen(-seen.scale, other - seen.shift, seen.axes) if place else _Seen(
                seen.scale, seen.shift - other, seen.axes
            )  # fmt: skip
        return _Seen(seen.scale, seen.shift + other, seen.axes)

    def _range(self, node: Any, place: int, seen: _Seen) -> tuple[int, Draw] | None:
        if node.op_type == "Clip" and place == 0:
            ends = [self._constant(name) if name else None for name in node.input[1:3]]
            if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
                return 3, self._between(seen, float(ends[0]), float(ends[1]))
        if node.op_type in ("Log", "Sqrt", "Pow", "Reciprocal") and place == 0:
            return 2, self._between(seen, 0.05, 4.0)
        if node.op_type == "Acosh":
            return 2, self._between(seen, 1.05, 4.0)
        if node.op_type in ("Acos", "Asin", "Atanh"):
            return 2, self._between(seen, -0.95, 0.95)
        if node.op_type == "BatchNormalization" and place == 0:
            mean, variance = (self._constant(name) for name in node.input[3:5])
            if mean is not None and variance is not None and seen.axes is not None:
                column = (-1, *[1] * (len(seen.axes) - 2))
                return self._normal(seen, mean.reshape(column), np.sqrt(variance).reshape(column), 3)
        return self._plain(seen)

    def _plain(self, seen: _Seen) -> tuple[int, Draw] | None:
        """Behind all scales and shifts: standard normal if it was shifted, 0 to 1 if it was scaled down."""
        if seen.shift.any():
            return self._normal(seen, np.zeros(()), np.ones(()), 4)
        if not seen.scale.ndim and 0 < seen.scale < 0.5:
            return 5, self._between(seen, 0.0, 1.0)
        return 6, Draw()

    def _normal(self, seen: _Seen, mean: Array, deviation: Array, rank: int) -> tuple[int, Draw] | None:
        a, b = seen.turned(mean), seen.turned(deviation)
        if a is None or b is None or not np.all(seen.scale):
            return None
        return rank, Draw(mean=(a - seen.shift) / seen.scale, deviation=b / np.abs(seen.scale))

    def _between(self, seen: _Seen, low: float, high: float) -> Draw:
        """Uniform over what these are in the input, and a little beyond a clip."""
        scale = np.where(seen.scale == 0, 1, seen.scale)
        ends = (low - seen.shift) / scale, (high - seen.shift) / scale
        return Draw(range=(np.minimum(*ends), np.maximum(*ends)))

"""Inputs that say how an operator works and not on what: axes, shapes, sizes, scales. A value that it takes is read off
the shapes that the graph declares, since few random ones are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.onnxfile import split_evenly

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
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

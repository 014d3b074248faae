"""Compute sizes from the shapes of the graph's inputs, so that nothing reads the shape of a value in between.

Exporters take a size where the module's code reads it: ``x.shape[1]`` is the Shape of x. A linear layer or a norm whose
output is read by a Shape has a reader more than the network needs, and could not be folded. A size whose name says how
it follows from the inputs' sizes, floor((height + 3) / 4), is computed from those.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.nodes_and_constants import Writer
from repaconv.graph.shape_arithmetic import Integers
from repaconv.graph.symbolic_shapes import Size, SymbolicSize, as_window, is_dynamic, parse_size, set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def read_sizes_from_inputs(model: ir.Model, known: Integers) -> None:
    """Replace sizes that are read from values in between, in place, where that takes no more nodes; unused ones stay.

    Args:
        model: A graph with inferred shapes.
        known: The values of its shape arithmetic.
    """
    write = _Sizes(model)
    inside = _read_inside(model, known)
    new = {
        value: written
        for node in tuple(model.graph)
        if (value := node.outputs[0]) in inside and _is_used(value, known)
        if (written := write(node, known[value])) is not None
    }
    if write.count <= _left_unread(model, inside, new):
        for value, written in new.items():
            value.replace_all_uses_with(written)


def _read_inside(model: ir.Model, known: Integers) -> set[ir.Value]:
    """The known integers that are computed from the shape of a value that is no input."""
    found: set[ir.Value] = set()
    for node in model.graph:
        if node.outputs[0] not in known:
            continue
        if node.op_type == "Shape":
            inside = node.inputs[0] is not None and node.inputs[0].producer() is not None
        else:
            inside = any(value in found for value in node.inputs)
        found.update(node.outputs if inside else ())
    return found


def _is_used(value: ir.Value, known: Integers) -> bool:
    """Whether something other than known shape arithmetic reads a value that is of int64."""
    import onnx_ir as ir

    used = any(not user.outputs or user.outputs[0] not in known for user in value.consumers())
    return used and value.dtype == ir.DataType.INT64 and not value.is_graph_output()


def _left_unread(model: ir.Model, inside: set[ir.Value], replaced: dict[ir.Value, ir.Value]) -> int:
    """How many of these values nothing reads once some are replaced."""
    left: set[ir.Value] = set()
    for node in reversed(tuple(model.graph)):
        value = node.outputs[0]
        if value in replaced or (
            value in inside
            and not value.is_graph_output()
            and all(user.outputs and user.outputs[0] in left for user in value.consumers())
        ):
            left.add(value)
    return len(left)


class _Window(NamedTuple):
    """A size of an input, and what is computed of it: floor((size + more) / part)."""

    image: ir.Value
    axis: int
    more: int
    part: int


class _Sizes:
    """Writes sizes that are computed from the inputs, each of them once, and counts the nodes."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.count = model, 0
        self.named = {
            size: (value, axis)
            for value in reversed(model.graph.inputs)
            for axis, size in enumerate(sizes(value) or ())
            if is_dynamic(size)
        }
        self.shapes: dict[ir.Value, ir.Value] = {}
        self.lists: dict[tuple[Size, ...], ir.Value] = {}

    def __call__(self, node: ir.Node, wanted: list[Size] | Size) -> ir.Value | None:
        """Write a list of sizes, or a single one, before a node; None where one does not follow from the inputs'."""
        entries = tuple(wanted) if isinstance(wanted, list) else (wanted,)
        if not entries or not all(map(self._follows, entries)):
            return None
        self.write = Writer(self.model, node)
        written = self._list(entries)
        return written if isinstance(wanted, list) else self._made(0, "Squeeze", written)

    def _follows(self, size: Size) -> bool:
        """Whether a size is a number, or a product of such and of windows over the inputs' sizes."""
        return isinstance(size, int) or self._window(size) is not None or self._factors(size) is not None

    def _window(self, size: SymbolicSize) -> _Window | None:
        if size in self.named:
            return _Window(*self.named[size], 0, 1)
        inner, more, part = as_window(size.names[0]) if size == SymbolicSize(size.names[:1]) else ("", 0, 1)
        image = self.named.get(parse_size(inner))
        return None if image is None else _Window(*image, more, part)

    def _factors(self, size: SymbolicSize) -> list[Size] | None:
        """The sizes and the number that a product is made of; None if it is none, or one does not follow."""
        names = [parse_size(name) for name in size.names]
        split = len(names) > 1 or size.number != 1
        return [*names, size.number] if split and all(map(self._follows, names)) else None

    def _list(self, entries: tuple[Size, ...]) -> ir.Value:
        if entries not in self.lists:
            runs = [tuple(run) for _, run in groupby(entries, self._kind)]
            parts = [self._run(run) for run in runs] if len(runs) == 1 else [self._list(run) for run in runs]
            self.lists[entries] = self._made(len(entries), "Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
        return self.lists[entries]

    def _kind(self, size: Size) -> object:
        """Sizes that are next to each other and of the same kind are written together; a product is alone."""
        if isinstance(size, int):
            return int
        window = self._window(size)
        return object() if window is None else window.image

    def _run(self, entries: tuple[Size, ...]) -> ir.Value:
        """Write sizes of one kind."""
        names = [size for size in entries if isinstance(size, SymbolicSize)]
        windows = [window for window in map(self._window, names) if window is not None]
        if windows:
            return self._windows(windows)
        if not names:
            return self.write.constant([size for size in entries if isinstance(size, int)])
        first, *others = [factor for factor in self._factors(names[0]) or () if factor != 1]
        total = self._list((first,))
        for factor in others:
            total = self._made(1, "Mul", total, self._list((factor,)))
        return total

    def _windows(self, windows: list[_Window]) -> ir.Value:
        """Write sizes of one input, and what is computed of them."""
        image, count = windows[0].image, len(windows)
        if image not in self.shapes:
            self.shapes[image] = self._made(len(sizes(image) or ()), "Shape", image)
        axes, more, parts = ([window[place] for window in windows] for place in (1, 2, 3))
        found = self._made(count, "Gather", self.shapes[image], self.write.constant(axes), axis=0)
        if any(more):
            found = self._made(count, "Add", found, self.write.constant(more))
        return self._made(count, "Div", found, self.write.constant(parts)) if max(parts) > 1 else found

    def _made(self, length: int, operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        """Write a node that returns so many integers, or a single one if that is 0."""
        made = self.write(operator, *inputs, **attributes)
        set_shape(made, (length,) if length else ())
        self.count += 1
        return made

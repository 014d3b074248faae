"""Compute sizes from the shapes of the graph's inputs instead of those of intermediate values.

Exporters take a size where the module's code reads it: ``x.shape[1]`` is the Shape of x. A linear layer or a norm whose
output is read by a Shape has a reader more than the network needs, and cannot be folded. A size whose name says how it
follows from the inputs' sizes, floor((height + 3) / 4), is computed from those. The names are trusted
(`repaconv.graph.symbolic_shapes`), but none that several axes have: one of two inputs may be broadcast, and such a name
may say no more than that both axes are dynamic.

Sizes that do not follow from those are read after the norm that follows a linear layer, where they are the same.
"""

from __future__ import annotations

from collections import Counter
from functools import partial, reduce
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.nodes_and_constants import Writer, is_constant, made_by, nodes_of
from repaconv.graph.operator_facts import ARITHMETIC
from repaconv.graph.shape_arithmetic import Integers, entries_of
from repaconv.graph.symbolic_shapes import Size, as_window, is_dynamic, may_be_negative, parse_size, set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
"""Operators into which a norm is folded."""


def read_sizes_from_inputs(model: ir.Model, known: Integers) -> None:
    """Replace the sizes that are read from intermediate values, in place, if that takes no more nodes.

    The nodes that it leaves without readers stay.

    Args:
        model: A graph with inferred shapes, in which every node is read.
        known: The values of its shape arithmetic.
    """
    inside = _from_intermediate_values(model, known)
    if not inside:
        return
    writer = SizeWriter(model)
    new = {
        value: written
        for node in tuple(model.graph)
        if (value := node.outputs[0]) in inside and _is_used(value, known)
        if (written := writer.written_before(node, known[value])) is not None
    }
    if writer.count <= _saved_nodes(model, inside, new):
        for value, written in new.items():
            value.replace_all_uses_with(written)


def read_sizes_after_norms(model: ir.Model) -> None:
    """Read the sizes of a linear layer's output after the norm, or the constant scale or shift, that follows it.

    In place. Both have the same shape, and the layer is left with one reader. The graph may have to be sorted.
    """
    for node in nodes_of(model, "BatchNormalization", *ARITHMETIC):
        computed = [value for value in node.inputs if not is_constant(value)]
        value = computed[0] if len(computed) == 1 else None
        if value is None or made_by(value, *LAYERS) is None or not sizes(value) == sizes(node.outputs[0]) is not None:
            continue
        users = [user for user in value.consumers() if user is not node]
        if all(user.op_type == "Shape" and not user.domain and user.graph is model.graph for user in users):
            for user in users:
                user.replace_input_with(0, node.outputs[0])


def _from_intermediate_values(model: ir.Model, known: Integers) -> set[ir.Value]:
    """The known integers that are computed from the shape of a value that is no input.

    None of them is computed by a Div of what may be negative: names say that it rounds down, which it does not there.
    """
    found: set[ir.Value] = set()
    rounded: set[ir.Value] = set()
    for node in model.graph:
        if node.outputs[0] not in known:
            continue
        divided = known.int_of(node.inputs[0]) if node.op_type == "Div" else None
        negative = divided is not None and any(map(may_be_negative, entries_of(divided)))
        if negative or not rounded.isdisjoint(node.inputs):
            rounded.update(node.outputs)
        elif node.op_type == "Shape":
            found.update(node.outputs if node.inputs[0] is not None and node.inputs[0].producer() is not None else ())
        elif not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _is_used(value: ir.Value, known: Integers) -> bool:
    """Whether a value is an int64 that something other than known shape arithmetic reads."""
    import onnx_ir as ir

    used = any(not user.outputs or user.outputs[0] not in known for user in value.consumers())
    return used and value.dtype == ir.DataType.INT64 and not value.is_graph_output()


def _saved_nodes(model: ir.Model, inside: set[ir.Value], replaced: dict[ir.Value, ir.Value]) -> int:
    """The number of nodes that compute sizes, and that nothing reads once these values are replaced."""
    unread: set[ir.Value] = set()
    for node in reversed(tuple(model.graph)):
        value = node.outputs[0]
        left = value in replaced or all(user.outputs[0] in unread for user in value.consumers())
        if left and value in inside and not value.is_graph_output():
            unread.add(value)
    return len(unread)


class _Window(NamedTuple):
    """What is computed of a size of an input: floor((size + more) / part)."""

    image: ir.Value
    axis: int
    more: int
    part: int


class _Product(NamedTuple):
    """A product of numbers and windows."""

    factors: tuple[Term, ...]


Term = int | _Window | _Product
"""What a size is written as."""


class SizeWriter:
    """Writes sizes that follow from the inputs', each node once.

    Attributes:
        count: The number of nodes that were written.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model, self.count = model, 0
        places = [(size, value, axis) for value in model.graph.inputs for axis, size in enumerate(sizes(value) or ())]
        times = Counter(size for size, *_ in places)
        self.named = {size: (value, axis) for size, value, axis in places if is_dynamic(size) and times[size] == 1}
        self.written: dict[object, ir.Value] = {}

    def written_before(self, node: ir.Node, wanted: list[Size] | Size) -> ir.Value | None:
        """Write a list of sizes or a single one before a node; None if one does not follow from the inputs'."""
        terms = [self._term(size) for size in entries_of(wanted)]
        known = tuple(term for term in terms if term is not None)
        if not known or len(known) < len(terms):
            return None
        self.write = Writer(self.model, node)
        return self._list(known) if isinstance(wanted, list) else self._node(0, "Squeeze", self._list(known))

    def _term(self, size: Size) -> Term | None:
        if isinstance(size, int):
            return size
        if size in self.named:
            return _Window(*self.named[size], 0, 1)
        if len(size.names) == 1 and size.number == 1:
            inner, more, part = as_window(size.names[0])
            place = self.named.get(parse_size(inner))
            return None if place is None or may_be_negative(size) else _Window(*place, more, part)
        factors = (*map(parse_size, size.names), *([size.number] if size.number != 1 else []))
        terms = tuple(term for term in map(self._term, factors) if term is not None)
        return _Product(terms) if len(terms) == len(factors) else None

    def _list(self, terms: tuple[Term, ...]) -> ir.Value:
        """Write terms; numbers that are next to each other together, and so windows over one input."""
        runs = [tuple(run) for _, run in groupby(terms, _kind)]
        if len(runs) > 1:
            return self._node(len(terms), "Concat", *map(self._list, runs), axis=0)
        windows = [term for term in terms if isinstance(term, _Window)]
        if windows:
            return self._windows(windows)
        if isinstance(terms[0], _Product):
            factors = [self._list((factor,)) for factor in terms[0].factors]
            return reduce(partial(self._node, 1, "Mul"), factors)
        return self._constant([term for term in terms if isinstance(term, int)])

    def _windows(self, windows: list[_Window]) -> ir.Value:
        image, count = windows[0].image, len(windows)
        axes, more, parts = ([window[place] for window in windows] for place in (1, 2, 3))
        shape = self._node(len(sizes(image) or ()), "Shape", image)
        found = self._node(count, "Gather", shape, self._constant(axes), axis=0)
        if any(more):
            found = self._node(count, "Add", found, self._constant(more))
        return self._node(count, "Div", found, self._constant(parts)) if max(parts) > 1 else found

    def _node(self, length: int, operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        """Write a node that returns so many integers, or a single one if that is 0; the same node only once."""
        import onnx_ir as ir

        key = operator, inputs, *attributes.items()
        if key not in self.written:
            self.written[key] = self.write(operator, *inputs, **attributes)
            self.written[key].dtype = ir.DataType.INT64
            set_shape(self.written[key], (length,) if length else ())
            self.count += 1
        return self.written[key]

    def _constant(self, numbers: list[int]) -> ir.Value:
        key = tuple(numbers)
        if key not in self.written:
            self.written[key] = self.write.constant(numbers)
        return self.written[key]


def _kind(term: Term) -> object:
    """What is equal for terms that are written together; a product is written alone."""
    if isinstance(term, _Product):
        return id(term)
    return int if isinstance(term, int) else term.image

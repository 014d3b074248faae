"""einsum: write an Einsum as MatMul, or as Conv, Mul, ReduceSum or Transpose where that computes the same.

Exporters keep ``torch.einsum`` as one operator (vit-pytorch, MONAI). ONNX Runtime runs it slower than the Transpose and
MatMul that compute the same, and it hides attention and weights from every other rewrite.

An axis of two operands is one of four kinds: batch (both operands and the output have it), rows (the first operand and
the output), columns (the second one and the output) and contracted (both operands). MatMul takes the first operand as
[batch, rows, contracted] and the second as [batch, contracted, columns]. Rows and columns may be batch axes as well:
MatMul repeats the other operand along them. Of all these configurations the one with the fewest Transposes is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.einsum_equations import Equation, equation_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, is_constant, made_by, nodes_of
from repaconv.graph.operator_facts import ARITHMETIC
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import Size, Sizes, as_numbers, product, set_shape
from repaconv.graph.tensor_views import View
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write every Einsum of one or two operands as other operators, where its equation and sizes allow it; in place."""
    nodes = nodes_of(model, "Einsum")
    weights = {value for node in nodes for value in node.inputs if _is_weight(value)}
    turned: dict[tuple[ir.Value, Axes], ir.Value] = {}
    for node in nodes:
        found = _plan(node, weights)
        if found is None:
            continue
        write = Writer(model, node)
        new = _Product(write, found, turned).written(node)
        if new not in node.inputs:
            set_shape(new, [found.equation.size[each] for each in found.equation.output], node.inputs[0])
        write.replace(node.outputs[0], new)
        done = ", ".join(found.operators) or "its operand"
        yield Change(
            rewrite=EINSUM.name, place=node.name or "", description=f"{attribute(node, 'equation', '')}: {done}"
        )
    clean(model)


def equivalent_nodes(node: ir.Node) -> int:
    """Return how many nodes this rewrite writes for an Einsum; 0 if it stays.

    A Transpose of the last two axes does not count: a MatMul can read its matrix transposed.
    """
    found = _plan(node, {value for value in node.inputs if _is_weight(value)})
    return 0 if found is None else max(1, len(found.operators) - found.swaps)


FLOATS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")
"""Types that MatMul, Mul and ReduceSum take; Conv lacks the last one before opset 22."""
Axes = tuple[str, ...]
"""The letters of every axis; none for an axis of size 1."""


@dataclass(frozen=True)
class _EinsumPlan:
    """The operators that compute an Einsum.

    Attributes:
        equation: Its equation.
        fixed: Whether each operand is a weight, which is written in any order without a node.
        summed: The letters that are summed over first, by operand.
        product: The operator that takes both operands; empty for one operand.
        places: The operands in the order in which the operator takes them.
        inputs: Their axes.
        output: The axes of the product.
        after: The letters that are summed over after the product.
        operators: All operators, in order.
        swaps: Number of Transposes that swap the last two axes before a MatMul.
        cost: The cost, in order to compare plans.
    """

    equation: Equation
    fixed: tuple[bool, ...]
    summed: tuple[str, ...]
    product: str
    places: tuple[int, ...]
    inputs: tuple[Axes, ...]
    output: Axes
    after: str = ""
    operators: tuple[str, ...] = ()
    swaps: int = 0
    cost: int = 0


def _plan(node: ir.Node, weights: Collection[ir.Value | None]) -> _EinsumPlan | None:
    equation = equation_of(node)
    values = [value for value in node.inputs if value is not None]
    kinds = {None if value.dtype is None else value.dtype.name for value in values}
    if equation is None or len(kinds) > 1 or not kinds <= {*FLOATS} or 0 in equation.size.values():
        return None
    fixed = tuple(value in weights for value in values)
    if all(is_constant(value) for value in values):
        return None
    sizes_of = tuple(sorted(equation.size.items()))
    conv = None if "BFLOAT16" in kinds else 0 if _is_near_convolution(node) else LONE_CONV_COST
    return _cheapest(equation.operands, equation.output, sizes_of, fixed, conv)


def _is_near_convolution(node: ir.Node) -> bool:
    """Whether a convolution in place of an Einsum may become one with its neighbors."""
    out = node.outputs[0]
    scaled = any(is_constant(value) for user in out.consumers() for value in user.inputs if user.op_type in ARITHMETIC)
    normed = any(user.op_type in ("BatchNormalization", "Conv") for user in out.consumers())
    return scaled or normed or any(made_by(value, "BatchNormalization", "Conv") for value in node.inputs)


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a constant may be written in another order: it is not needed in its own order as well."""
    if value is None or not is_constant(value) or value.is_graph_output():
        return False
    users = list(value.uses())
    uses = {(use.node.op_type, use.node.domain, use.idx, attribute(use.node, "equation", "")) for use in users}
    return len(uses) == 1 and users[0].node.op_type == "Einsum"


@lru_cache(maxsize=1024)
def _cheapest(
    operands: tuple[str, ...],
    output: str,
    sizes_of: tuple[tuple[str, Size], ...],
    fixed: tuple[bool, ...],
    conv: int | None,
) -> _EinsumPlan | None:
    """The plan of least cost; None if none can be written.

    Args:
        operands: See `Equation`.
        output: The same.
        sizes_of: The sizes of all letters.
        fixed: Whether each operand is a weight.
        conv: The cost of a Conv of few channels; None if it does not take the type of the operands.
    """
    equation = Equation(operands, output, dict(sizes_of))
    found = [plan for each in _plans(equation, fixed, conv) if (plan := _costed(each)) is not None]
    return min(found, key=lambda plan: (plan.cost, plan.product != "Conv", not fixed[plan.places[-1]]), default=None)


def _plans(equation: Equation, fixed: tuple[bool, ...], conv: int | None) -> Iterator[_EinsumPlan]:
    summed, rest, out, whole = equation.summed, equation.remaining, equation.output, tuple(equation.output)
    if len(rest) == 1:
        yield _EinsumPlan(equation, fixed, summed, "", (0,), (whole,), whole)
    if len(rest) != 2:
        return
    if not equation.is_matrix_product:
        for order in (each for each in (*rest, out) if {*each} == {*"".join(rest)}):
            inputs = tuple(_axes(own, tuple(order)) for own in rest)
            yield _EinsumPlan(equation, fixed, summed, "Mul", (0, 1), inputs, tuple(order), equation.contracted)
        return
    for x, w in ((0, 1), (1, 0)):
        if conv is not None and fixed[w] and not any(summed) and _is_of_pixels(rest[x], rest[w], out):
            kernel = (out[1], rest[x][1], *("" for _ in out[2:]))
            plan = _EinsumPlan(equation, fixed, summed, "Conv", (x, w), (tuple(rest[x]), kernel), whole)
            is_small = any(
                size < SLOW_CONV_CHANNELS for size in as_numbers(equation.size[each] for each in rest[w]) or ()
            )
            yield replace(plan, cost=conv if is_small else 0)
    for first, second in ((0, 1), (1, 0)):
        for one, two, made in _products(rest[first], rest[second], out):
            yield _EinsumPlan(equation, fixed, summed, "MatMul", (first, second), (one, two), made)


def _is_of_pixels(x: str, weight: str, out: str) -> bool:
    """Whether the same matrix multiplies the channels of every pixel of [N, C, H, W], or of [N, C, L]."""
    if not 3 <= len(x) == len(out) <= 5 or len(weight) != 2:
        return False
    return x[0] == out[0] and x[2:] == out[2:] and {x[1], out[1]} == {*weight} and x[1] != out[1]


def _axes(own: str, order: Axes) -> Axes:
    """The axes of an operand that is broadcast to axes of this order."""
    found = [axis if axis and axis[0] in own else "" for axis in order]
    while found and not found[0]:
        del found[0]
    return tuple(found)


def _products(x: str, y: str, out: str) -> Iterator[tuple[Axes, Axes, Axes]]:
    """All configurations of a MatMul: the axes of the first and the second operand, and those of the product."""
    left, right = ("".join(each for each in own if each not in other) for own, other in ((x, y), (y, x)))
    inner = [each for each in x if each in y and each not in out]
    for contracted in {"".join(inner): None, "".join(sorted(inner, key=y.index)): None}:
        for rows in _runs(left, out):
            for columns in _runs(right, out):
                others = [each for each in out if each not in rows + columns]
                orders = (others, sorted(others, key=(x + y).index), sorted(others, key=(y + x).index))
                for order in dict.fromkeys(tuple(each) for each in orders):
                    yield (
                        (*_axes(x, order), rows, contracted),
                        (*_axes(y, order), contracted, columns),
                        (*order, rows, columns),
                    )


def _runs(letters: str, out: str) -> list[str]:
    """The letters that may form one axis of a matrix: none, or letters adjacent in an operand or in the output."""
    orders = (letters, "".join(sorted(letters, key=out.index)))
    ends = [(start, end) for start in range(len(letters)) for end in range(start + 1, len(letters) + 1)]
    return ["", *dict.fromkeys(order[start:end] for order in orders for start, end in ends)]


TRANSPOSE, SWAP, RESHAPE, VECTOR, REPEAT = 5, 2, 1, 20, 3
"""Cost of a Transpose, of one that a MatMul absorbs, of a Reshape, of products of vectors instead of matrices, and of a
batch axis along which one of several matrices is repeated: rows in its place make fewer products of larger matrices."""
SLOW_CONV_CHANNELS, LONE_CONV_COST = 16, 3
"""Channels below which ONNX Runtime runs a Conv slower than Reshape, MatMul and Reshape (0.4 of the speed for 6 heads),
and the cost of one that nothing around it folds into."""


def _costed(plan: _EinsumPlan) -> _EinsumPlan | None:
    """The plan with its operators and cost; None if it cannot be written."""
    operators, cost, swaps = list[str](), plan.cost, 0
    for place, axes in zip(plan.places, plan.inputs, strict=True):
        if plan.summed[place]:
            operators.append("ReduceSum")
        own = tuple(plan.equation.remaining[place])
        view = _view(_shaped(own, plan.equation.size), own, axes, plan.equation.size)
        if plan.fixed[place] and not plan.summed[place]:
            continue
        if not view.writable:
            return None
        nodes = view.operators
        perm = view.turned[2]
        swapped = nodes == ["Transpose"] and perm == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]
        is_swap = swapped and plan.product == "MatMul"
        operators += nodes
        swaps += is_swap
        cost += SWAP if is_swap else _cost(nodes)
    operators += [plan.product] * bool(plan.product) + ["ReduceSum"] * bool(plan.after)
    made = tuple(axis for axis in plan.output if not axis or axis not in plan.after)
    last = _view(_shaped(made, plan.equation.size), made, tuple(plan.equation.output), plan.equation.size)
    if plan.product and not last.writable:
        return None
    nodes = last.operators if plan.product else []
    cost += _cost(nodes)
    if plan.product == "MatMul":
        cost += VECTOR * sum(not axis and _has_more(plan, place) for place, axis in enumerate(plan.output[-2:]))
        batches = [{*"".join(axes[:-2])} for axes in plan.inputs]
        cost += REPEAT * sum(len({*"".join(plan.output[:-2])} - batch) for batch in batches if batch)
    return replace(plan, operators=(*operators, *nodes), swaps=swaps, cost=cost)


def _has_more(plan: _EinsumPlan, place: int) -> bool:
    """Whether a factor of a MatMul has an axis that the other one lacks."""
    own, other = ({*"".join(plan.inputs[each])} for each in (place, 1 - place))
    return bool(own - other)


def _cost(nodes: list[str]) -> int:
    return sum(TRANSPOSE if node == "Transpose" else RESHAPE for node in nodes)


def _shaped(axes: Axes, size: Mapping[str, Size]) -> ir.Value:
    """A placeholder value with these axes; only its shape is used."""
    import onnx_ir as ir

    value = ir.Value(name="")
    set_shape(value, _shape(axes, size))
    return value


def _shape(axes: Axes, size: Mapping[str, Size]) -> Sizes:
    return tuple(product(size[each] for each in axis) for axis in axes)


def _view(source: ir.Value, of: Axes, axes: Axes, size: Mapping[str, Size]) -> View:
    """The view of a value with axes ``of`` that has other axes."""
    number = {letter: place for place, letter in enumerate(size)}
    ours, theirs = (tuple(tuple(number[each] for each in axis) for axis in each) for each in (of, axes))
    return View(source, ours, theirs, {place: size[letter] for letter, place in number.items()})


class _Product(NamedTuple):
    """Writes a plan; weights that were written in another order are used again."""

    write: Writer
    plan: _EinsumPlan
    turned: dict[tuple[ir.Value, Axes], ir.Value]

    def written(self, node: ir.Node) -> ir.Value:
        """Write it, and return the value that replaces the output of the Einsum."""
        plan, write, size = self.plan, self.write, self.plan.equation.size
        pairs = zip(plan.places, plan.inputs, strict=True)
        inputs = [self._input(node.inputs[place], place, axes) for place, axes in pairs]
        if not plan.product:
            return inputs[0]
        made = write(plan.product, *inputs)
        set_shape(made, _shape(plan.output, size), node.inputs[0])
        made = self._sum(made, plan.output, plan.after)
        axes = tuple(axis for axis in plan.output if not axis or axis not in plan.after)
        return self._as(made, axes, tuple(plan.equation.output))

    def _input(self, value: ir.Value | None, place: int, axes: Axes) -> ir.Value:
        """An operand with these axes."""
        assert value is not None
        own, summed = tuple(self.plan.equation.operands[place]), self.plan.summed[place]
        if self.plan.fixed[place] and not summed:
            return self._weight(value, own, axes)
        made = self._sum(value, own, summed)
        return self._as(made, tuple(self.plan.equation.remaining[place]), axes)

    def _weight(self, value: ir.Value, own: Axes, axes: Axes) -> ir.Value:
        """A weight with these axes; the weight itself if they are its own."""
        if own == axes:
            return value
        if (value, axes) not in self.turned:
            numbers, shape = constant(value), as_numbers(_shape(axes, self.plan.equation.size))
            assert numbers is not None
            assert shape is not None
            turned = numbers.transpose([own.index(each) for axis in axes for each in axis]).reshape(shape)
            self.turned[value, axes] = self.write.constant(turned, like=value)
        return self.turned[value, axes]

    def _sum(self, value: ir.Value, axes: Axes, summed: str) -> ir.Value:
        """The sum of a value over the axes of some letters."""
        if not summed:
            return value
        places = [place for place, axis in enumerate(axes) if axis and axis in summed]
        made = self.write("ReduceSum", value, self.write.constant(places), keepdims=0)
        left = tuple(axis for place, axis in enumerate(axes) if place not in places)
        set_shape(made, _shape(left, self.plan.equation.size), value)
        return made

    def _as(self, value: ir.Value, own: Axes, axes: Axes) -> ir.Value:
        """A value as a view with other axes."""
        made = _view(value, own, axes, self.plan.equation.size).write(self.write)
        assert made is not None
        return made


EINSUM = Rewrite("einsum", "an Einsum of one or two operands whose sizes are known to be equal", apply, opset=13)

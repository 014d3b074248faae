"""Report linear operators that a fold could not merge with another, and why.

Two linear maps in series are one linear map, and so are linear maps of one value that are added or concatenated. If the
folded graph still has both, something prevents the merge. This module reports the reasons, so that a fold that did
little can be explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.algebra.convolution_kernels import composed_size, is_zero_outside
from repaconv.graph import activation_patterns
from repaconv.graph.channel_axes import IMAGE, LAST, scale_and_shift
from repaconv.graph.nodes_and_constants import attribute, constant, is_constant, made_by, shape_of_constant
from repaconv.graph.operator_facts import IMAGE_NORMS, MOVES, ROW_NORMS
from repaconv.graph.symbolic_shapes import sizes
from repaconv.rewrites.fold.fold_barriers import values_of_infinite_factors, values_of_rounding_sums
from repaconv.rewrites.fold.kernels_from_onnx import is_padded, kernel_of

if TYPE_CHECKING:
    import onnx_ir as ir

PADDED = "the convolution pads with zeros, to which the shift before it is not added"
BORDER = "the convolution pads with zeros, where the one before it would give other numbers"
READ_BESIDE = "the value between them is also read by {}"
_POOLS = ("GlobalAveragePool", "AveragePool", "ReduceMean", "ReduceSum", "Pad")
_THROUGH = (*MOVES, *_POOLS)
"""Linear operators without weights. Operators before and after them are treated as neighbors."""


class LinearNode(NamedTuple):
    """A node that is linear in one input and otherwise has constants.

    Attributes:
        node: The ONNX node.
        data: The input in which it is linear.
        weight: The shape of the weight of a product or convolution; None for a scale or shift.
        shifts: Whether it adds a constant.
    """

    node: ir.Node
    data: ir.Value
    weight: tuple[int, ...] | None
    shifts: bool

    @property
    def name(self) -> str:
        """The node's name as a graph viewer shows it."""
        return self.node.name or f"{self.node.op_type} of {self.node.outputs[0].name}"

    @property
    def has_spatial_kernel(self) -> bool:
        """Whether it is a convolution with a kernel larger than 1x1."""
        return self.weight is not None and not {*self.weight[2:]} <= {1}

    @property
    def is_padded(self) -> bool:
        """Whether it is a convolution with zero padding."""
        return self.weight is not None and is_padded(self.node)

    @property
    def is_grouped(self) -> bool:
        """Whether it is a grouped convolution."""
        return int(attribute(self.node, "group", 1)) > 1


def unfolded_operators(model: ir.Model) -> Iterator[str]:
    """Yield one sentence per reason, with the names of all operators that it concerns.

    Args:
        model: A model with inferred shapes; activations of several nodes are grouped in it, in place.
    """
    activation_patterns.group(model)
    factors = values_of_infinite_factors(model, ("Mul", "Div"))  # weights of others are not read here
    kept = {
        "a sum rounds on purpose there: a large constant is added, and subtracted again": values_of_rounding_sums(
            model
        ),
        "a constant there is infinity or NaN, or divides by zero": factors,
    }
    found: dict[str, list[str]] = {}
    for node in model.graph:
        one = linear(node)
        if one is not None and not _is_bias(one):
            for before, path in _linear_operators_before(one.data):
                if not before.shifts and before.weight is None and one.shifts and one.weight is None:
                    continue  # a scale and its shift, as a norm's
                why = _why_not_composed(before, one, path, kept)
                found.setdefault(f"in a row, since {why}", []).append(f"{one.name} after {before.name}")
        elif node.op_type in ("Add", "Sub", "Concat") and not node.domain and not _is_inner(node):
            for group, source in _parallel_groups(node):
                why = _why_not_merged(group, source, node)
                description = " next to ".join([one.name for one in group] + ["its own input"] * (len(group) == 1))
                found.setdefault(f"with the same input, since {why}", []).append(description)
    for why, names in found.items():
        yield f"linear operators {why}: {'; '.join(dict.fromkeys(names))}"
    yield from _norms(model)


def _norms(model: ir.Model) -> Iterator[str]:
    """Report the norms that remain, and which of them keep their scale and shift."""
    names, affine = [], []
    for node in model.graph:
        if node.op_type in (*ROW_NORMS, *IMAGE_NORMS):
            names.append(node.name or f"{node.op_type} of {node.outputs[0].name}")
            given = [constant(value) for value in node.inputs[1:3]]
            if any(
                numbers is not None and np.any(numbers != neutral)
                for numbers, neutral in zip(given, (1, 0), strict=False)
            ):
                affine.append(names[-1])
    yield from norms_remain(names, affine)


def norms_remain(names: Sequence[str], affine: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for the norms that remain in a folded network, and one for those with a scale or a shift."""
    if names:
        yield f"norms remain, since their statistics depend on the input: {'; '.join(names)}"
    if affine:
        yield (
            "norms keep their scale and shift, since something other than a linear layer or an unpadded convolution "
            f"reads them, or since folding them would enlarge the graph: {'; '.join(affine)}"
        )


def linear(node: ir.Node) -> LinearNode | None:
    """The node as a linear operator with constants: product, convolution, BatchNormalization, channel scale or shift.

    Returns:
        None for any other node.
    """
    if node.domain or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        weight = shape_of_constant(node.inputs[1])
        if weight is not None and not is_constant(node.inputs[0]):
            return LinearNode(node, node.inputs[0], weight, len(node.inputs) > 2)
    if node.op_type == "MatMul":
        for x, other in zip(node.inputs, node.inputs[::-1], strict=True):
            weight = shape_of_constant(other)
            if x is not None and not is_constant(x) and weight is not None and len(weight) == 2:
                return LinearNode(node, x, weight, False)
        return None
    found = scale_and_shift(node, LAST) or scale_and_shift(node, IMAGE)
    return LinearNode(node, found.x, None, found.shift is not None) if found is not None else None


def _is_bias(one: LinearNode) -> bool:
    """Whether the operator is the bias of a product: an Add that alone reads a MatMul."""
    before = one.data.producer()
    return one.node.op_type == "Add" and before is not None and before.op_type == "MatMul" and len(one.data.uses()) == 1


def _layer(value: ir.Value | None) -> LinearNode | None:
    """The linear operator that computes a value; for a product with a bias, the product."""
    node = value.producer() if value is not None else None
    one = linear(node) if node is not None else None
    if one is None or not _is_bias(one):
        return one
    product = one.data.producer()
    inner = linear(product) if product is not None else None
    return inner._replace(shifts=True) if inner is not None else one


def _linear_operators_before(value: ir.Value) -> Iterator[tuple[LinearNode, list[ir.Value]]]:
    """The linear operators before a value, with the values in between, through views, selections, means and sums."""
    todo, seen = [(value, [value])], {value}
    while todo:
        here, path = todo.pop()
        one, node = _layer(here), here.producer()
        if one is not None:
            yield one, path
        elif node is not None and not node.domain and node.op_type in (*_THROUGH, "Add", "Sub", "Concat"):
            several = node.op_type in ("Add", "Sub", "Concat")
            for other in node.inputs if several else node.inputs[:1]:
                if other is not None and other not in seen and not is_constant(other):
                    seen.add(other)
                    todo.append((other, [*path, other]))


def _is_inner(node: ir.Node) -> bool:
    """Whether the node is a term of a larger sum."""
    users = [user for user, _ in node.outputs[0].uses()]
    return len(users) == 1 and users[0].op_type in ("Add", "Sub") and linear(users[0]) is None


def _terms(node: ir.Node, top: ir.Node) -> Iterator[ir.Value]:
    for value in node.inputs:
        inner = value.producer() if value is not None else None
        if value is None:
            continue
        if inner is not None and top.op_type != "Concat" and inner.op_type in ("Add", "Sub") and linear(inner) is None:
            yield from _terms(inner, top) if _is_inner(inner) else [value]
        else:
            yield value


def _parallel_groups(node: ir.Node) -> Iterator[tuple[list[LinearNode], ir.Value]]:
    """Groups of linear operators of the same value that the node adds or concatenates, with that value.

    A single operator counts if its own input is also a term of the sum.
    """
    terms = list(_terms(node, node))
    layers = [_layer(value) or _average(value) for value in terms]
    groups: dict[ir.Value, list[LinearNode]] = {}
    for one in layers:
        if one is not None:
            groups.setdefault(one.data, []).append(one)
    for source, group in groups.items():
        if len(group) > 1 or (source in terms and node.op_type != "Concat"):
            yield group, source


def _average(value: ir.Value) -> LinearNode | None:
    node = made_by(value, "AveragePool")
    return LinearNode(node, node.inputs[0], None, False) if node is not None and node.inputs[0] is not None else None


def _why_not_composed(
    before: LinearNode, one: LinearNode, path: list[ir.Value], kept: Mapping[str, set[ir.Value]]
) -> str:
    """The reason; ``kept`` has the values that nothing is folded across, by the reason why."""
    if any(value.is_graph_output() for value in path):
        return "what is between them is an output of the graph"
    between = [value.producer() for value in path]
    readers = [user for value in path for user, _ in value.uses() if linear(user) is None and user not in between]
    others = sorted({user.op_type for user in readers} - {*_THROUGH, "Concat"})
    kinds = sorted({node.op_type for node in between if node is not None and linear(node) is None})
    if reason := next((why for why, values in kept.items() if not values.isdisjoint(path)), ""):
        return reason
    if one.is_padded and before.shifts:
        return PADDED
    if others:
        return READ_BESIDE.format(", ".join(others))
    if kinds:
        return f"between them is {', '.join(kinds)}"
    if before.weight is not None and one.weight is not None:
        if before.has_spatial_kernel or one.has_spatial_kernel or before.is_grouped or one.is_grouped:
            if len(path[-1].uses()) > 1:
                return "several read the first"
            return BORDER if _is_bound_by_border(before, one) else "one for both would cost more"
        if _costs_more(before, one):
            return "one for both would cost more"
        if any(len(value.uses()) > 1 for value in path):
            return "several read the first"
    return "no rule of the fold reaches them"


def _is_bound_by_border(before: LinearNode, one: LinearNode) -> bool:
    """Whether one convolution for two would cost no more, and would give other numbers at the border."""
    first, second = kernel_of(before.node), kernel_of(one.node)
    if first is None or second is None or is_zero_outside(first, second.pads):
        return False
    return composed_size(second, first) <= first.weight.size + second.weight.size


def _costs_more(before: LinearNode, one: LinearNode) -> bool:
    shapes = [sizes(value) for value in (before.data, one.data, one.node.outputs[0])]
    axis = 1 if one.node.op_type == "Conv" else -1
    widths = [shape[axis] if shape else 0 for shape in shapes]
    a, b, c = (width if isinstance(width, int) else 0 for width in widths)
    return a * c > a * b + b * c


def _why_not_merged(group: list[LinearNode], source: ir.Value, node: ir.Node) -> str:
    if any(one.node.outputs[0].is_graph_output() or len(one.node.outputs[0].uses()) > 1 for one in group):
        return "one of them is read by others as well"
    if any(one.node.op_type == "AveragePool" for one in group):
        return "an average that does not count its padding is no convolution at the border"
    if node.op_type == "Concat" and any(one.has_spatial_kernel or one.is_grouped for one in group):
        return "convolutions larger than 1x1, or of groups of channels, are not joined"
    if node.op_type == "Concat":
        return "joined they would cost as much"
    return "one for all would cost more" if len(group) > 1 else f"{source.name} is read by others as well"

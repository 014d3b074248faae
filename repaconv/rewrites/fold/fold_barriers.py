"""Keep values of the original graph, so that nothing is folded across them.

A fold may move a large constant to a place where the result rounds worse than in the original: `mean(x) - 300` instead
of `mean(x - 300)`. Then the difference `x - 300` is kept, and everything else is folded.

A sum that rounds on purpose is always kept. In FP32, `x + 12582912 - 12582912` is x rounded to an integer. The fold
computes in float64, in which this is x itself, and would remove it.

So is what is multiplied by a constant with infinity or NaN, or divided by one with zero, and the result: infinity times
the zeros of another constant would be NaN, where the original multiplies it by a number that is not zero.

Every rewrite keeps the outputs of a graph. Kept values are therefore outputs while the graph is folded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import constant, is_constant, nodes_of, stored
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

PREFIX = "value:"
"""Prefix of the name of a value in `reverted`; entries without it are names of rewrites."""
VALUES, SUMS = "repaconv.kept_values", "repaconv.kept_sums"
"""Metadata keys: the names of the outputs added for kept values, and for kept sums and products."""
FACTORS = ("Mul", "Div", "MatMul", "Gemm", "Conv", "ConvTranspose")
"""Operators whose first two inputs are multiplied."""
LEAST_ROUNDING_CONSTANT = {"FLOAT": 256.0, "DOUBLE": 256.0, "FLOAT16": 64.0, "BFLOAT16": 64.0}
"""Smallest constant that counts as rounding on purpose, by data type; in float32 it rounds to multiples of 2^-15.
Float32 graphs are folded as float64."""
ALIKE = 2.0**-9
"""Two constants cancel if they differ by at most this share of the larger one."""


def kept_values(reverted: Collection[str]) -> tuple[str, ...]:
    """The names of the kept values among the reverted names."""
    return tuple(name.removeprefix(PREFIX) for name in reverted if name.startswith(PREFIX))


def keep(names: Collection[str]) -> Rewrite:
    """The first rewrite of a fold: it makes the values of these names outputs of the graph."""
    return Rewrite("keep", "everywhere: values that nothing is folded across", partial(_keep, names), keeps=True)


def _keep(names: Collection[str], model: ir.Model) -> Iterator[Change]:
    _make_outputs(model, VALUES, [value for value in _values(model) if value.name in names])
    yield from ()


def _keep_sums(model: ir.Model) -> Iterator[Change]:
    kept = values_of_rounding_sums(model) | values_of_infinite_factors(model)
    _make_outputs(model, SUMS, [value for value in _values(model) if value in kept])
    yield from ()


def _values(model: ir.Model) -> Iterator[ir.Value]:
    return (value for node in model.graph for value in node.outputs)


def _make_outputs(model: ir.Model, key: str, values: Sequence[ir.Value]) -> None:
    added = [value for value in values if not value.is_graph_output()]
    model.graph.outputs.extend(added)
    model.meta[key] = {value.name for value in added}


def values_of_rounding_sums(model: ir.Model) -> set[ir.Value]:
    """All x, x + C and x + C - C of a graph in which the sum rounds on purpose."""
    return {value for one in _values(model) for value in _rounded_on_purpose(one)}


def values_of_infinite_factors(model: ir.Model, operators: Collection[str] = FACTORS) -> set[ir.Value]:
    """All values of a graph that such operators multiply by a constant with infinity or NaN, and the products."""
    return {
        value
        for node in nodes_of(model, *operators)
        if any(is_constant(each) and _is_infinite(node, place) for place, each in enumerate(node.inputs[:2]))
        for value in (*node.inputs, *node.outputs)
        if value is not None and not is_constant(value)
    }


def _is_infinite(node: ir.Node, place: int) -> bool:
    """Whether a constant input of a product or quotient stands for a factor that is not finite."""
    value = node.inputs[place]
    assert value is not None
    numbers = stored(value)
    if node.op_type == "Div" and place and not numbers.all():
        return True
    with np.errstate(all="ignore"):  # a sum of finite numbers may overflow, and is found much sooner than each number
        return not np.isfinite(numbers.sum(dtype=np.float64)) and not np.isfinite(numbers).all()


def _rounded_on_purpose(value: ir.Value) -> tuple[ir.Value, ...]:
    """If a value is x + C and rounds on purpose: x, the value, and each x + C - D; else empty.

    At least one D must be close to C and equal to 2^k or 1.5 x 2^k, as in all code that rounds this way.
    """
    node = value.producer()
    users = [user for user, _ in value.uses() if user.op_type in ("Add", "Sub") and user.graph is value.graph]
    number = _number(node) if node is not None and users else None
    if node is None or number is None or value.dtype is None:
        return ()
    if abs(number) < LEAST_ROUNDING_CONSTANT.get(value.dtype.name, math.inf):
        return ()
    added = -number if node.op_type == "Sub" and constant(node.inputs[1]) is not None else number
    if not any(_cancels(user, added) for user in users):
        return ()
    before = [each for each in node.inputs if each is not None and not is_constant(each)]
    differences = [user.outputs[0] for user in users if _number(user) is not None]
    return (*(before if node.op_type in ("Add", "Sub") else ()), value, *differences)


def _cancels(node: ir.Node, added: float) -> bool:
    number = _number(node)
    if number is None or abs(math.frexp(number)[0]) not in (0.5, 0.75):
        return False
    return abs(added + (number if node.op_type == "Add" else -number)) <= ALIKE * abs(added)


def _number(node: ir.Node) -> float | None:
    """The number in a sum or difference, or in a bias, if it is about the same for all elements; else None."""
    if node.domain or node.op_type not in ("Add", "Sub", "Conv", "ConvTranspose", "Gemm"):
        return None
    given = [constant(each) for each in (node.inputs if node.op_type in ("Add", "Sub") else node.inputs[2:3])]
    numbers = next((each for each in given if each is not None and each.size), None)
    if numbers is None or not np.all(np.isfinite(numbers)):
        return None
    low, high = float(numbers.min()), float(numbers.max())
    return high if high - low <= ALIKE * max(abs(low), abs(high)) else None


def _release(key: str, model: ir.Model) -> Iterator[Change]:
    names, outputs = model.meta.pop(key, ()), model.graph.outputs
    for value in [each for each in outputs if each.name in names]:
        outputs.remove(value)
    for node in nodes_of(model, "Identity") if names else ():  # equal outputs needed an Identity each
        value, source = node.outputs[0], node.inputs[0]
        if source is not None and not value.is_graph_output():
            value.replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
    yield from ()


KEEP_SUMS = Rewrite(
    "keep-sums", "everywhere: sums that round on purpose, and products with infinity", _keep_sums, keeps=True
)
RELEASE, RELEASE_SUMS = (
    Rewrite(name, "everywhere: kept values are values inside the graph again", partial(_release, key), keeps=True)
    for name, key in (("release", VALUES), ("release-sums", SUMS))
)

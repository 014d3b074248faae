"""Keep values of the original graph, so that nothing is folded across them.

A fold may move a large constant to where it rounds worse than in the original: `mean(x) - 300` instead of
`mean(x - 300)`. The value that the constant cancels in is kept then, and everything else is folded. A sum that rounds
on purpose is always kept: `x + 12582912 - 12582912` is x rounded to an integer in FP32, and x itself in float64.

Every rewrite keeps the outputs of a graph; so the value is an output while the graph is folded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import constant, is_constant, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

PREFIX = "value:"
"""Prefix of the name of a value in `reverted`; entries without it are names of rewrites."""
COUNT = "repaconv.kept_values"
"""Metadata key: how many outputs of the graph are such values; they are the last ones."""

ROUNDED_TO = {"FLOAT": 2.0**-23, "DOUBLE": 2.0**-23, "FLOAT16": 2.0**-10, "BFLOAT16": 2.0**-7}
"""Relative step of each data type; float64 has that of float32, which is folded in float64."""
COARSE = 2.0**-15
"""A sum whose numbers have steps of at least so much rounds on purpose, if what was added is subtracted again."""
ALIKE = 2.0**-9
"""Two constants that differ by less than so much of the larger one cancel."""


def kept_values(reverted: Collection[str]) -> tuple[str, ...]:
    """The names of the values among what is reverted."""
    return tuple(name.removeprefix(PREFIX) for name in reverted if name.startswith(PREFIX))


def keep(names: Collection[str]) -> Rewrite:
    """The rewrite before all others: it makes the values of these names, and sums that round, outputs of the graph."""
    return Rewrite("keep", "everywhere: values that nothing is folded across", partial(_keep, names), keeps=True)


def _keep(names: Collection[str], model: ir.Model) -> Iterator[Change]:
    produced = [value for node in model.graph for value in node.outputs]
    rounding = {value for one in produced for value in rounded_on_purpose(one)}
    found = [value for value in produced if value.name in names or value in rounding]
    kept = [value for value in found if not value.is_graph_output()]
    model.graph.outputs.extend(kept)
    model.meta[COUNT] = len(kept)
    yield from ()


def rounded_on_purpose(value: ir.Value) -> tuple[ir.Value, ...]:
    """What is added to, the sum, and the differences, if this value is a sum that rounds on purpose; else empty.

    What is subtracted from it again is 2^k or 1.5 x 2^k, as in all code that rounds so, and so large that the sum has
    coarse steps.
    """
    node = value.producer()
    users = [user for user, _ in value.uses() if user.op_type in ("Add", "Sub")]
    number = _number(node) if node is not None and users else None
    if node is None or number is None or value.dtype is None:
        return ()
    if abs(number) * ROUNDED_TO.get(value.dtype.name, 0.0) < COARSE:
        return ()
    added = -number if node.op_type == "Sub" and constant(node.inputs[1]) is not None else number
    differences = [user.outputs[0] for user in users if _cancels(user, added)]
    if not differences:
        return ()
    before = node.inputs if node.op_type in ("Add", "Sub") else ()
    return (*(each for each in before if each is not None and not is_constant(each)), value, *differences)


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


def _release(model: ir.Model) -> Iterator[Change]:
    if not (count := model.meta.pop(COUNT, 0)):
        return
    del model.graph.outputs[-count:]
    for node in nodes_of(model, "Identity"):  # a value that was equal to another one had to have its own name
        value, source = node.outputs[0], node.inputs[0]
        if source is not None and not value.is_graph_output():
            value.replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
    yield from ()


RELEASE = Rewrite("release", "everywhere: kept values are values inside the graph again", _release, keeps=True)

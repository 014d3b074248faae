"""Find where large numbers cancel in a graph: values that are small next to the other terms of a sum.

A fold across such a value may round worse:

- The value is a sum of large numbers that cancel. The difference of two nearly equal numbers has no rounding error of
  its own. The folded graph sums other multiples of the large numbers instead, and rounds in proportion to their size.
- The value is a small term of a large sum. The fold merges a constant of each into one constant. Its rounding error is
  that of the large constant, and is the same for all numbers of a channel, so that no mean reduces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from repaconv.engines.contract import Array, Feeds
from repaconv.graph.onnx_files import constants_of
from repaconv.graph.operator_facts import EPSILON
from repaconv.verification.comparison import largest_along_least_axis
from repaconv.verification.model_runners import load_onnx, with_outputs
from repaconv.verification.output_metrics import magnitudes

if TYPE_CHECKING:
    import onnx

SUMS = ("Add", "Sub", "BatchNormalization")
EXACT_DIFFERENCE_RATIO = 2.0
"""Two terms that are at least this many times as large as their sum cancel exactly (Sterbenz)."""


def small_values(model: onnx.ModelProto, calls: Sequence[Feeds]) -> list[str]:
    """Names of values that another term of their sum exceeds by a factor of more than `EXACT_DIFFERENCE_RATIO`.

    The value with the largest factor comes first.

    Args:
        model: The graph, in float32.
        calls: Inputs with which it runs.
    """
    from onnx import numpy_helper

    constants = {name: numpy_helper.to_array(weight) for name, weight in constants_of(model.graph).items()}
    sums = [node for node in model.graph.node if node.op_type in SUMS and not node.domain]
    made = {name for node in model.graph.node for name in node.output}
    read = {name for node in sums for name in (*node.input, node.output[0]) if name}
    runner = load_onnx(with_outputs(model, sorted(read & made)))
    found: dict[str, float] = {}
    for feeds in calls:
        values = constants | dict(feeds) | dict(runner.run(feeds))
        for node in sums:
            terms = _terms(node, values)
            for name, times in _times_larger(terms).items() if terms else ():
                found[name] = max(found.get(name, 0.0), times)
    small = (name for name, times in found.items() if times > EXACT_DIFFERENCE_RATIO and name in made)
    return sorted(small, key=lambda name: -found[name])


def _terms(node: onnx.NodeProto, values: dict[str, Array]) -> dict[str, Array]:
    """Return the terms of a node's sum, and the sum, by name; nothing for integers."""
    given = [values[name] for name in node.input]
    if any(array.dtype.kind != "f" for array in given):
        return {}
    terms = dict(zip(node.input, given, strict=True))
    if node.op_type == "BatchNormalization":
        x, *numbers = given
        scale, shift, mean, variance = (one.reshape(-1, *[1] * (x.ndim - 2)) for one in numbers)
        epsilon = next((entry.f for entry in node.attribute if entry.name == "epsilon"), EPSILON)
        factor = scale / np.sqrt(variance + epsilon)
        terms = {node.input[0]: x * factor, node.input[2]: shift - mean * factor}
    return terms | {node.output[0]: values[node.output[0]]}


def _times_larger(terms: dict[str, Array]) -> dict[str, float]:
    """How many times as large as each the largest of all is, by the numbers next to each other, at most."""
    shape = np.broadcast_shapes(*(term.shape for term in terms.values()))
    sizes = {name: np.broadcast_to(magnitudes(term), shape) for name, term in terms.items()}
    most = np.max([*sizes.values()], 0)
    found = {}
    for name, size in sizes.items():
        least, there = largest_along_least_axis(size, most)
        least = np.where(least > 0, least, size.max(initial=0.0))  # a channel may be zero throughout
        found[name] = float(np.max(np.divide(there, least, out=np.zeros(least.shape), where=least > 0), initial=0.0))
    return found

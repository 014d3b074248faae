"""What rounding may do to a graph's outputs: its weights and inputs moved by a few roundings, seeded.

Two graphs that compute the same round differently, and an ill-conditioned one shows it. A graph whose own outputs move
by as much when its numbers do by some units in the last place cannot tell the two apart; see Parker's Monte Carlo
arithmetic, where every operation is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]

# Operators whose constants are weights; those of others may be sizes, limits, places.
_WEIGHTED = ("Conv", "ConvTranspose", "MatMul", "Gemm", "BatchNormalization", "LayerNormalization", "Gather")
_SCALED = ("Add", "Sub", "Mul", "Div")


def moved(
    model: onnx.ModelProto, by: float, seed: int, coarse: Mapping[str, float] = MappingProxyType({})
) -> onnx.ModelProto:
    """The same graph with every number of its weights times 1 +- ``by``; of those in ``coarse``, 1 +- that."""
    from onnx import numpy_helper

    from repaconv.graph.graph_without_weights import outline

    generator = np.random.default_rng(seed)
    read = {name: node.op_type for node in model.graph.node for name in node.input}

    def other(name: str, weight: onnx.TensorProto) -> onnx.TensorProto:
        several = int(np.prod(weight.dims)) > 1
        if read.get(name) in _WEIGHTED or (several and read.get(name) in _SCALED):
            numbers = numpy_helper.to_array(weight)
            if numbers.dtype.kind == "f":
                return numpy_helper.from_array(jittered(numbers, coarse.get(name, by), generator), name)
        return weight

    found = outline(model, (other(weight.name, weight) for weight in model.graph.initializer))
    for node in found.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            node.attribute[0].t.CopyFrom(other(node.output[0], node.attribute[0].t))
    return found


def stored(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """A graph's constants by name, as they lie in it."""
    found = {weight.name: weight for weight in model.graph.initializer}
    constants = (node for node in model.graph.node if node.op_type == "Constant" and node.attribute)
    return found | {node.output[0]: node.attribute[0].t for node in constants}


def jittered(numbers: Array, by: float, generator: np.random.Generator) -> Array:
    """Every floating number times 1 + ``by`` or 1 - ``by``."""
    if numbers.dtype.kind != "f":
        return numbers
    factors = np.array((1 - by, 1 + by), np.result_type(numbers.dtype, np.float32))
    return np.asarray(numbers * factors[generator.integers(0, 2, numbers.shape, np.int8)]).astype(numbers.dtype)


def jittered_feeds(feeds: Mapping[str, Array], by: float, seed: int) -> dict[str, Array]:
    """Inputs moved likewise."""
    generator = np.random.default_rng(seed)
    return {name: jittered(numbers, by, generator) for name, numbers in feeds.items()}

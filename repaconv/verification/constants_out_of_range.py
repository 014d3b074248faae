"""Find folds whose constants float32 cannot hold, and the values between constants whose product it may not hold.

The fold multiplies constants in float64. Two scales of 1e30, or a scale of 1e-30 and a weight of 1e-20, have a product
that is infinity or zero in float32, although each number that the original graph computes may be an ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from repaconv.engines.contract import Array
from repaconv.graph.onnx_files import constants_of

if TYPE_CHECKING:
    import onnx

    from repaconv.graph.float64_rewriting import Float64Graph

FLOAT32 = np.finfo(np.float32)


def is_out_of_range(written: onnx.ModelProto, exact: Float64Graph | None, before: onnx.ModelProto) -> bool:
    """Whether a folded graph has a constant that float32 cannot hold.

    Args:
        written: The folded graph, in float32.
        exact: The same graph in float64; None if it was not folded in float64. Then only infinities show.
        before: The graph that was folded, which may have infinities, too.
    """
    from onnx import numpy_helper

    if exact is None:
        return _has_infinity(written) and not _has_infinity(before)
    held_apart = (weight.numpy() for name, weight in exact.weights.items() if name not in exact.unchanged)
    embedded = (
        numpy_helper.to_array(constant)
        for name, constant in constants_of(exact.model.graph).items()
        if name not in exact.weights
    )
    return any(map(_exceeds_float32, (*_of_floats(embedded), *held_apart)))


def _exceeds_float32(numbers: Array) -> bool:
    """Whether one of the numbers is too large for float32, or all are too small."""
    sizes = np.abs(numbers[np.isfinite(numbers)])
    largest = sizes.max(initial=0.0)
    return bool(largest > FLOAT32.max or 0 < largest < FLOAT32.tiny)


def values_next_to_extreme_constants(model: onnx.ModelProto) -> list[str]:
    """Names of the values that a node with a constant computes or reads, those next to the most extreme one first.

    A constant is the more extreme, the further its largest number is from 1, as a factor.

    Args:
        model: The graph that is folded.
    """
    from onnx import numpy_helper

    exponents: dict[str, float] = {}
    for name, constant in constants_of(model.graph).items():
        for numbers in _of_floats([numpy_helper.to_array(constant)]):
            sizes = np.abs(numbers[np.isfinite(numbers)])
            if (largest := sizes.max(initial=0.0)) > 0:
                exponents[name] = abs(float(np.log2(largest)))
    made = {name for node in model.graph.node for name in node.output if name}
    found: dict[str, float] = {}
    for node in model.graph.node:
        extreme = max((exponents[name] for name in node.input if name in exponents), default=0.0)
        for name in made.intersection((*node.output, *node.input)) if extreme else ():
            found[name] = max(found.get(name, 0.0), extreme)
    return sorted(found, key=lambda name: (-found[name], name))


def _has_infinity(model: onnx.ModelProto) -> bool:
    from onnx import numpy_helper

    arrays = map(numpy_helper.to_array, constants_of(model.graph).values())
    return any(np.isinf(numbers).any() for numbers in _of_floats(arrays))


def _of_floats(arrays: Iterable[Array]) -> Iterable[Array]:
    return (array for array in arrays if array.dtype.kind == "f" and array.size)

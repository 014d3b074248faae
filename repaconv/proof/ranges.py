"""How large the values of a graph get."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.proof.locate import PLACES_AT_ONCE
from repaconv.proof.traces import OnnxTrace

if TYPE_CHECKING:
    import onnx


def largest_values(
    model: onnx.ModelProto, load: Callable[[bytes], Any], batches: Iterable[NDArray[np.float32]]
) -> dict[str, float]:
    """max|value| by name over these images [n, C, H, W]; NaN where a value was."""
    trace = OnnxTrace(model, load, by_module=False)
    found: dict[str, float] = {model.graph.input[0].name: 0.0}
    for images in batches:
        found[model.graph.input[0].name] = max(found[model.graph.input[0].name], float(np.abs(images).max()))
        places = trace.places(images)
        for start in range(0, len(places), PLACES_AT_ONCE):
            for place, value in trace.values(places[start : start + PLACES_AT_ONCE], images).items():
                found[place.name] = float(np.maximum(found.get(place.name, 0.0), np.abs(value).max(initial=0.0)))
    return found

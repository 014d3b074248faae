"""How large the values of a graph get."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Session
from repaconv.proof.locate import PLACES_AT_ONCE
from repaconv.proof.traces import OnnxTrace

if TYPE_CHECKING:
    import onnx


def largest_values(
    model: onnx.ModelProto, load: Callable[[bytes], Session], batches: Iterable[NDArray[np.float32]]
) -> dict[str, float]:
    """max|value| by name over these images [n, C, H, W]; NaN where a value was."""
    trace = OnnxTrace(model, load, by_module=False)
    given = model.graph.input[0].name
    found = {given: 0.0}
    for images in batches:
        feeds = {given: images}
        found[given] = max(found[given], float(np.abs(images).max()))
        places = trace.places(feeds)
        for start in range(0, len(places), PLACES_AT_ONCE):
            for place, value in trace.values(places[start : start + PLACES_AT_ONCE], feeds).items():
                found[place.name] = float(np.maximum(found.get(place.name, 0.0), np.abs(value).max(initial=0.0)))
    return found

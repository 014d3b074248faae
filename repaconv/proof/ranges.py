"""How large the values of a graph get."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from repaconv.engines.contract import Feeds, Session
from repaconv.proof.locate import PLACES_AT_ONCE
from repaconv.proof.runners import named
from repaconv.proof.traces import OnnxTrace

if TYPE_CHECKING:
    import onnx


def largest_values(
    model: onnx.ModelProto, load: Callable[[bytes], Session], calls: Iterable[Feeds]
) -> dict[str, float]:
    """max|value| by name over these calls; NaN where a value was."""
    trace = OnnxTrace(model, load, by_module=False)
    stored = {weight.name for weight in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in stored]
    found = dict.fromkeys(names, 0.0)
    for call in calls:
        feeds = named(names, call)
        found |= {name: max(found[name], float(np.abs(array).max(initial=0.0))) for name, array in feeds.items()}
        places = trace.places(feeds)
        for start in range(0, len(places), PLACES_AT_ONCE):
            for place, value in trace.values(places[start : start + PLACES_AT_ONCE], feeds).items():
                found[place.name] = float(np.maximum(found.get(place.name, 0.0), np.abs(value).max(initial=0.0)))
    return found

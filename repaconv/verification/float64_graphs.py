"""A graph of any origin evaluated in float64, so that there is a truth to hold float32 against.

ONNX Runtime evaluates a float64 copy where it has all kernels, as written: of what it fuses it keeps scales in float32.
It has none for convolutions, most pools and erf. Else onnx's reference implementation does, with operators of our own
where that is slow or wrong (`repaconv.verification.float64_operators`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.engines.contract import Array, Feeds
from repaconv.verification.float64_operators import by_torch
from repaconv.verification.model_runners import load_onnx

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

RUNTIME = "a float64 copy under ONNX Runtime"
REFERENCE = "onnx's reference implementation in float64, convolutions and pools by torch"
LACKED = ("Conv", "ConvTranspose", "GRU", "LSTM")
"""For which it has no kernel, so that nobody need ask it with all the weights; or one that says no when it is run."""
FLOATS = (1, 10, 16)
"""ONNX's numbers of float32, float16 and bfloat16."""
WIDER = dict.fromkeys(FLOATS, 11)
"""Each with that of float64."""


class Float64:
    """A graph in float64; of its weights it holds one copy at most.

    Attributes:
        told: What evaluates it.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Widen it, and open it where ONNX Runtime lacks no kernel."""
        self._run: Callable[[Feeds], Mapping[str, Any]]
        session = None
        with suppress(Exception):  # the runtime's own, of many classes
            if not any(node.op_type in LACKED for node in model.graph.node):
                session = load_onnx(widened(model), as_written=True)
        self._run, self.told = (_evaluated(model), REFERENCE) if session is None else (session.run, RUNTIME)

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Inputs to outputs, floating ones in float64."""
        return dict(self._run({name: wide(array) for name, array in feeds.items()}))


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in float64 throughout, its inputs and outputs included."""
    from repaconv.graph.float64_graph import retyped

    return retyped(model, WIDER)


def _evaluated(model: onnx.ModelProto) -> Callable[[Feeds], Mapping[str, Any]]:
    """It in float64 by onnx's reference implementation; of weights and values only what a node reads is there."""
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    from repaconv.graph.float64_graph import kept_constants
    from repaconv.graph.graph_without_weights import outline

    weights, kept = {weight.name: weight for weight in model.graph.initializer}, kept_constants(model, WIDER)
    evaluator = ReferenceEvaluator(widened(outline(model, ())), new_ops=by_torch())
    names = [output.name for output in model.graph.output]
    steps = list(zip(evaluator.rt_nodes_, _read_last(evaluator.rt_nodes_, names), strict=True))

    def weight(name: str) -> Any:
        array = numpy_helper.to_array(weights[name])
        return array if name in kept or weights[name].data_type not in FLOATS else array.astype(np.float64)

    @np.errstate(all="ignore")  # what is not finite is told by those who compare
    def run(feeds: Feeds) -> dict[str, Any]:
        held: dict[str, Any] = {"": None, **evaluator.rt_inits_, **feeds}
        for node, done in steps:
            if node.need_context():  # control flow, which reads what it does not name
                held.update((name, weight(name)) for name in weights if name not in held)
            given = [held[name] if name in held else weight(name) for name in node.input]
            found = node.run(*given, **({"context": held} if node.need_context() else {}))
            held.update((name, value) for name, value in zip(node.output, found, strict=False) if name)
            for name in done:
                held.pop(name, None)
        return {name: held[name] if name in held else weight(name) for name in names}

    return run


def _read_last(nodes: Sequence[Any], wanted: Sequence[str]) -> list[list[str]]:
    """What no node reads behind each; nothing where control flow may read anything."""
    if any(node.need_context() for node in nodes):
        return [[] for _ in nodes]
    seen, found = {"", *wanted}, list[list[str]]()
    made = {name for node in nodes for name in node.output}
    for node in reversed(nodes):
        last = [name for name in dict.fromkeys((*node.input, *node.output)) if name in made and name not in seen]
        seen.update(last)
        found.append(last)
    return found[::-1]


def wide(array: Array) -> Array:
    """Floating-point numbers in float64."""
    return array.astype(np.float64) if array.dtype.kind == "f" else array

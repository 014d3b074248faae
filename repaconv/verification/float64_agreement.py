"""Whether the float64 evaluation of a graph computes what ONNX Runtime computes, operator by operator.

What FP32 differs from float64 counts as rounding and excuses as much of a candidate. If the float64 evaluation of an
operator computes another function than ONNX Runtime, the difference is no rounding. Of outputs alone the two cannot be
told apart, since rounding of an operator can be amplified by those after it. So every operator is run on the very
values that it has under ONNX Runtime: there rounding is that of one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import first_line
from repaconv.engines.contract import Feeds
from repaconv.results import Tolerance
from repaconv.verification.comparison import Comparison, PerNeighborhood
from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.float64_graphs import Float64, ReferenceEvaluation, wide
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.onnx_model_loading import loaded
from repaconv.verification.rounding import (
    HALF_ROUNDINGS,
    JITTER,
    JITTERED,
    JITTERS,
    MEASURED,
    SATURATED,
    Movement,
    Rounding,
    jittered_feeds,
    movement,
)
from repaconv.verification.tolerances import FLOAT32

if TYPE_CHECKING:
    import onnx

AT_ONCE = 64
"""Nodes whose values are held at a time."""
COORDINATES = ("Resize", "Upsample")
"""Operators that compute coordinates in float32, whatever the type of their values is. The coordinate of pixel n is off
by some n * 2**-24, and neighbors of random images differ by more than their size:"""
OFF = 4 * 2.0**-24
"""What such an operator may be off, for each pixel of the axis. Measured: at most 1.6 * 2**-24."""
ACTIVATIONS = ("Celu", "Elu", "Erf", "Gelu", "Mish", "Selu", "Sigmoid", "Softplus", "Swish", "Tanh")
"""Functions whose kernels round numbers near 1 on the way, so that small values have errors of that size."""
NEAR_ONE = 4 * SATURATED
"""Such an error. ONNX Runtime's Sigmoid is off by 1.3e-7."""
SHOWN = 3
"""Differing operators that are named."""


def graph_rounding(path: Path) -> Callable[[Feeds], Rounding]:
    """Rounding of a graph that no run knows, call by call; nothing where it is not evaluated in float64."""
    given = cache(lambda: Evaluated(loaded(path)))

    def rounding(feeds: Feeds) -> Rounding:
        def measured() -> Iterator[Movement]:
            with suppress(Exception):  # whatever cannot be evaluated in float64, of many classes
                yield movement(given().run(feeds), given().truth(feeds))

        return Rounding(MEASURED, measured, lambda: differing_operators(given().model, given().float64, feeds))

    return rounding


def differing_operators(model: onnx.ModelProto, float64: Float64, feeds: Feeds) -> str:
    """What is to be said of operators whose float64 evaluation is not ONNX Runtime's; empty if there are none.

    A graph that ONNX Runtime itself evaluates in float64 has none.

    Args:
        model: The graph in float32.
        float64: Its evaluator.
        feeds: The inference.
    """
    if float64.reference is None:
        return ""
    try:
        found = list(_differing(model, float64.reference, feeds))
    except Exception as error:  # of either runtime, of many classes
        return f"its float64 evaluation could not be compared with ONNX Runtime ({first_line(error)})"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    named = ", ".join(f"{node.op_type} {node.onnx_node.name or node.output[0]}" for node in found[:SHOWN])
    return f"the float64 evaluation of {named}{more} is not what ONNX Runtime computes" if found else ""


def _differing(model: onnx.ModelProto, reference: ReferenceEvaluation, feeds: Feeds) -> Iterator[Any]:
    made = {name for node in model.graph.node for name in node.output if name}
    read = {name for node in reference.nodes for name in _read_by(node.onnx_node)} | set(reference.outputs)
    between: dict[str, Any] = {}  # of nodes that the graph does not have, which convert values
    for start in range(0, len(reference.nodes), AT_ONCE):
        nodes = reference.nodes[start : start + AT_ONCE]
        wanted = {name for node in nodes for name in (*_read_by(node.onnx_node), *node.output)} & made & read
        values = _values(model, wanted, feeds)
        held = {**feeds, **values, **between}
        held = {name: _wide(value) for name, value in held.items()}
        for node in nodes:
            found = {name: values[name] for name in node.output if name in values}
            if not made.issuperset(name for name in node.output if name):
                between.update(reference.run_node(node, held))
                held.update(between)
            elif found and not _agrees(node, reference, held, found):
                yield node


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those of its subgraphs included."""
    yield from node.input
    for entry in node.attribute:
        for graph in (entry.g, *entry.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _read_by(inner)


def _values(model: onnx.ModelProto, wanted: Iterable[str], feeds: Feeds) -> dict[str, Any]:
    """Values of the graph under ONNX Runtime, by name."""
    import onnx

    from repaconv.graph.graph_without_weights import with_initializers

    shown = with_initializers(model, model.graph.initializer)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted))
    return dict(load_onnx(shown, as_written=True).run(feeds)) if shown.graph.output else {}


def _wide(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide(each) for each in value]
    return wide(value) if isinstance(value, np.ndarray) else value


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


@np.errstate(all="ignore")
def _agrees(node: Any, reference: ReferenceEvaluation, held: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether what a node gives under ONNX Runtime differs from float64 by rounding alone."""
    given = {name: _array(value) for name, value in reference.run_node(node, held).items()}

    def movements() -> Iterator[Movement]:
        inputs = {name: one for name, one in reference.inputs_of(node, held).items() if isinstance(one, np.ndarray)}
        for seed in range(JITTERS):
            other = reference.run_node(node, {**held, **jittered_feeds(inputs, JITTER, seed)})
            moved = movement({name: _array(value) for name, value in other.items()}, given, discrete=True)
            yield {name: one for name, one in moved.items() if one.shape == given[name].shape}  # sizes are no numbers

    for name, single in found.items():
        right = given[name]
        rtol = FLOAT32
        if isinstance(single, np.ndarray) and single.dtype.kind == "f":
            rtol = max(rtol, HALF_ROUNDINGS * float(np.finfo(single.dtype).eps))
            if node.op_type in COORDINATES:
                rtol = max(rtol, OFF * max(single.shape, default=0))
        if isinstance(single, np.ndarray) and isinstance(right, np.ndarray):
            right = right.astype(single.dtype)  # so that what overflows in float32 is infinite
        allowed = Tolerance(kind="exact", rtol=rtol, atol=NEAR_ONE if node.op_type in ACTIVATIONS else 0.0)
        compared = Comparison("float32", allowed, None, scale=PerNeighborhood, vague=inf)
        compared.add({name: _wide(single)}, {name: _wide(right)}, rounding=Rounding(JITTERED, movements))
        if any(link.verdict == "failed" for link in compared.links("onnx", "float64")):
            return False
    return True

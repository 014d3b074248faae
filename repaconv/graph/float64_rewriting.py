"""Rewrite a float32 graph in float64, and round the result to float32 once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.discrete_outputs import has_constant_decision
from repaconv.graph.element_type_conversion import as_float32, element_types, retyped, unsupported
from repaconv.graph.graph_without_weights import EXTERNAL_LOCATION, MOST_KEPT_ENTRIES, mark_as_external
from repaconv.graph.models_in_onnx_ir import read, rewrite, write_like
from repaconv.graph.onnx_files import subgraphs_of
from repaconv.graph.operator_facts import HALVES
from repaconv.graph.weights_in_files import in_file
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from repaconv.graph.rewrite_contract import Rewrite

FLOAT, DOUBLE = 1, 11
"""ONNX data types float32 and float64."""
NARROW_FLOATS = (FLOAT, *HALVES)
"""ONNX data types of floats narrower than float64: float32, float16 and bfloat16."""
WIDER = dict.fromkeys(NARROW_FLOATS, DOUBLE)
"""Maps each of these data types to float64."""

Weights = Mapping[str, "ir.TensorProtocol"]
"""Large weights by name, which are converted or computed when they are read."""


class Float64Graph(NamedTuple):
    """A graph in float64 without its large weights.

    Attributes:
        model: The graph; its large weights are marked as external.
        weights: These weights.
        unchanged: Those of them that no rewrite changed, as the given graph holds them.
    """

    model: onnx.ModelProto
    weights: Weights
    unchanged: Mapping[str, onnx.TensorProto]


def rewritten_in_float64(
    model: onnx.ModelProto,
    rewrites: Iterable[Rewrite],
    observe: Callable[[ir.Model], Callable[[list[Change]], list[Change]]] | None = None,
) -> tuple[Float64Graph, list[Change]]:
    """Apply rewrites to a graph in float64; its large weights are converted when a rewrite reads them.

    Args:
        model: The graph with all weights embedded; it is not modified.
        rewrites: See `repaconv.graph.models_in_onnx_ir.rewritten`.
        observe: The same.
    """
    import onnx_ir as ir

    bare, large = mark_as_external(model)
    typed = retyped(bare, WIDER)
    graph = read(typed)
    initializers = graph.graph.initializers
    given: dict[ir.TensorProtocol, onnx.TensorProto] = {}
    for name, weight in large.items():
        marked = initializers[name].const_value
        assert marked is not None
        lazy = ir.LazyTensor(partial(_converted, weight, marked.dtype), marked.dtype, marked.shape, name=name)
        initializers[name].const_value = lazy
        given[lazy] = weight
    changes = rewrite(graph, rewrites, observe(graph) if observe else None)
    weights, unchanged = dict[str, "ir.TensorProtocol"](), {}
    for name, value in initializers.items():
        known = value.const_value
        if known is None or known.dtype != ir.DataType.DOUBLE or known.size <= MOST_KEPT_ENTRIES:
            continue
        weights[name] = known
        if known in given:
            unchanged[name] = given[known]
        value.const_value = ir.ExternalTensor(EXTERNAL_LOCATION, None, None, known.dtype, shape=known.shape, name=name)
    found = write_like(typed, graph)
    written = in_file(weight for name, weight in weights.items() if name not in unchanged)
    weights = {name: written.get(weight, weight) for name, weight in weights.items()}
    return Float64Graph(found, weights, unchanged), changes


def _converted(weight: onnx.TensorProto, kind: ir.DataType) -> ir.TensorProtocol:
    import onnx_ir as ir

    return ir.tensor(converted(weight, kind))


def converted(weight: onnx.TensorProto, kind: ir.DataType) -> NDArray[Any]:
    """The numbers of a weight in another type."""
    from onnx import numpy_helper

    return np.asarray(numpy_helper.to_array(weight), kind.numpy())


def rounded_to_float32(graph: Float64Graph) -> onnx.ModelProto:
    """Convert a graph from float64 to float32, with its weights."""
    found = retyped(graph.model, {DOUBLE: FLOAT})
    for weight in found.graph.initializer:
        if weight.name in graph.weights:
            weight.CopyFrom(_as_float32(graph, weight.name))
    return found


def _as_float32(graph: Float64Graph, name: str) -> onnx.TensorProto:
    from onnx import numpy_helper

    given = graph.unchanged.get(name)
    if given is None:
        return numpy_helper.from_array(as_float32(graph.weights[name].numpy()), name)
    if given.name == name:
        return given
    renamed = type(given)()
    renamed.CopyFrom(given)
    renamed.name = name
    return renamed


def is_only_rounded(written: onnx.ModelProto, graph: Float64Graph) -> bool:
    """Whether a graph is that graph in float64 with every constant rounded to the nearest float32, and nothing else.

    It is not if a constant overflows, or loses digits because it is subnormal in float32.
    """
    exact, found = _constants(graph.model), _constants(written)
    if _without_constants(retyped(graph.model, {DOUBLE: FLOAT})) != _without_constants(written):
        return False
    return exact.keys() == found.keys() and all(
        _is_nearest(found[place], constant, graph.weights.get(place[0])) for place, constant in exact.items()
    )


def _constants(model: onnx.ModelProto) -> dict[tuple[str, str], onnx.TensorProto]:
    """Weights by name, and tensors in attributes by the node's output and the attribute."""
    found = {(weight.name, ""): weight for weight in model.graph.initializer}
    for node in model.graph.node:
        found |= {(node.output[0], entry.name): entry.t for entry in node.attribute if entry.HasField("t")}
    return found


def _without_constants(model: onnx.ModelProto) -> list[bytes]:
    """Inputs, outputs, opsets and nodes, serialized, but for the constants."""
    parts: list[Any] = [*model.opset_import, *model.functions, *model.graph.input, *model.graph.output]
    for node in model.graph.node:
        bare = type(node)()
        bare.CopyFrom(node)
        for entry in bare.attribute:
            entry.ClearField("t")
        parts.append(bare)
    return [part.SerializeToString(deterministic=True) for part in parts]


def _is_nearest(rounded: onnx.TensorProto, given: onnx.TensorProto, weight: ir.TensorProtocol | None) -> bool:
    """Whether a constant is the given one; a given one in float64 is rounded to float32.

    ``weight`` has the numbers of the given one if they are held apart.
    """
    from onnx import numpy_helper

    if rounded.data_type != (FLOAT if given.data_type == DOUBLE else given.data_type):
        return False
    exact = numpy_helper.to_array(given) if weight is None else weight.numpy()
    numbers = numpy_helper.to_array(rounded)
    if given.data_type != DOUBLE:
        return np.array_equal(numbers, exact)
    with np.errstate(over="ignore"):
        if not np.array_equal(numbers, exact.astype(np.float32)):
            return False
    size = np.abs(numbers)
    special = np.isinf(size) | (size < np.finfo(np.float32).tiny)
    return np.array_equal(numbers[special], exact[special])


def is_float64_convertible(model: onnx.ModelProto) -> bool:
    """Whether a graph computes the same in float64 but for rounding, and is itself again when it is converted back.

    All its floating-point numbers must be float32, all its operators must compute in float64, and nothing that it
    computes of constants and sizes alone may depend on how float32 rounds.
    """
    others = {*NARROW_FLOATS, DOUBLE} - {FLOAT}
    if model.functions or not others.isdisjoint(element_types(model.graph)) or unsupported(model, WIDER):
        return False
    if any(map(subgraphs_of, model.graph.node)):
        return False
    bare, _ = mark_as_external(model)
    casts = len(retyped(bare, WIDER).graph.node) - len(model.graph.node)
    return casts == 0 and not has_constant_decision(model)

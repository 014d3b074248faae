"""A graph without its weights: ONNX's own tools copy a graph several times, and ask of weights their shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

LARGE = 1024
"""Numbers; what is smaller may be a shape, and stays."""


def shapes_inferred(model: onnx.ModelProto) -> None:
    """Write down every value's shape that ONNX's own rules tell, in place."""
    import onnx

    found = onnx.shape_inference.infer_shapes(bare(model)).graph
    for mine, theirs in zip(model.graph.output, found.output, strict=True):
        mine.CopyFrom(theirs)
    del model.graph.value_info[:], model.graph.node[:]  # nodes have graphs of their own, perhaps
    model.graph.value_info.extend(found.value_info)
    model.graph.node.extend(found.node)


def check(model: onnx.ModelProto, *, full: bool = False) -> None:
    """ONNX's own checker, all weights included; ``full`` infers all shapes strictly, too.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: If it is not valid.
    """
    import onnx

    for weight in model.graph.initializer:
        if _is_large(weight):
            onnx.checker.check_tensor(weight)
    onnx.checker.check_model(bare(model), full_check=full)


def parted(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """The graph, whose large weights of plain types are outside of it, and these by name."""
    from onnx import numpy_helper

    plain = {weight.name: weight for weight in model.graph.initializer if _is_large(weight) and _is_plain(weight)}
    weights = (_outside(weight) if weight.name in plain else weight for weight in model.graph.initializer)
    return outline(model, weights), {name: numpy_helper.to_array(weight) for name, weight in plain.items()}


def _is_plain(weight: onnx.TensorProto) -> bool:
    """Whether it lies in the graph, and NumPy has its type."""
    import onnx

    kinds = onnx.TensorProto
    return weight.data_location != kinds.EXTERNAL and weight.data_type in (kinds.FLOAT, kinds.DOUBLE, kinds.INT64)


def _outside(weight: onnx.TensorProto) -> onnx.TensorProto:
    """The same without its numbers, which are nowhere yet."""
    import onnx

    kinds = onnx.TensorProto
    found = kinds(name=weight.name, dims=weight.dims, data_type=weight.data_type, data_location=kinds.EXTERNAL)
    found.external_data.add(key="location", value="given apart")
    return found


def outline(model: onnx.ModelProto, weights: Iterable[onnx.TensorProto]) -> onnx.ModelProto:
    """All of a model but its weights, and these in their place."""
    import onnx

    found = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _set(found, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _set(found.graph, field.name, value)
    found.graph.initializer.extend(weights)
    return found


def _set(message: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    held = getattr(message, name)
    if hasattr(held, "MergeFrom"):
        held.MergeFrom(value)
    else:
        setattr(message, name, value)


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph, in which large weights are inputs: their shapes are there, their numbers are not."""
    import onnx

    found = outline(model, (weight for weight in model.graph.initializer if not _is_large(weight)))
    given = {value.name for value in model.graph.input}
    found.graph.input.extend(
        onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in model.graph.initializer
        if _is_large(weight) and weight.name not in given
    )
    return found


def _is_large(weight: onnx.TensorProto) -> bool:
    return bool(prod(weight.dims) > LARGE)

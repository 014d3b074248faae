"""A graph without its weights: ONNX's own tools copy a graph several times, and ask of weights their shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

LARGE = 1024
"""Numbers; what is smaller may be a shape, and stays."""


def shapes_inferred(model: onnx.ModelProto) -> None:
    """Write down every value's shape that ONNX's own rules tell, in place."""
    import onnx

    found = onnx.shape_inference.infer_shapes(_bare(model)).graph
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
    onnx.checker.check_model(_bare(model), full_check=full)


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


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Large weights are inputs."""
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

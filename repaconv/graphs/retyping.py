"""The same graph in another type of number throughout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx


def in_double(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with float64 for float32 throughout, to prove a rewrite by the reference implementation."""
    import onnx

    return retyped(proto, {onnx.TensorProto.FLOAT: onnx.TensorProto.DOUBLE})


def retyped(proto: onnx.ModelProto, kinds: Mapping[int, int]) -> onnx.ModelProto:
    """The same graph with other types of number throughout: constants, casts, values, in subgraphs and functions too.

    Args:
        proto: Left as it is. Its weights lie inside it.
        kinds: ONNX's numbers of floating types, and what stands for each.
    """
    from repaconv.graphs.bare import outline

    kept = kept_single(proto.graph.node)
    weights = proto.graph.initializer
    other = outline(proto, (weight if weight.name in kept else _retyped(weight, kinds) for weight in weights))
    _retype_values(other.graph, kinds, kept)
    for function in other.functions:
        _retype_nodes(function.node, kinds)
        for value in function.value_info:
            _retype_value(value.type, kinds)
    return other


TYPED = ("to", "dtype", "output_datatype")
"""Attributes that name a type of number."""


SINGLE = {"Resize": 2, "Upsample": 1}
"""The input that is float32 whatever the others are: scales, which Resize of opset 10 has as the last of two."""


def _retype_graph(graph: onnx.GraphProto, kinds: Mapping[int, int]) -> None:
    kept = kept_single(graph.node)
    for weight in graph.initializer:
        if weight.name not in kept and weight.data_type in kinds:
            weight.CopyFrom(_retyped(weight, kinds))
    _retype_values(graph, kinds, kept)


def _retype_values(graph: onnx.GraphProto, kinds: Mapping[int, int], kept: set[str]) -> None:
    """All but its weights."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name not in kept:
            _retype_value(value.type, kinds)
    _retype_nodes(graph.node, kinds)


def kept_single(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Names of constants that stay in float32."""
    places = ((node, SINGLE[node.op_type]) for node in nodes if node.op_type in SINGLE)
    return {node.input[min(place, len(node.input) - 1)] for node, place in places if len(node.input) > 1}


def _retype_nodes(nodes: Sequence[onnx.NodeProto], kinds: Mapping[int, int]) -> None:
    kept = kept_single(nodes)
    for node in nodes:
        for entry in node.attribute:
            if entry.HasField("t") and kept.isdisjoint(node.output):
                entry.t.CopyFrom(_retyped(entry.t, kinds))
            if entry.HasField("g"):
                _retype_graph(entry.g, kinds)
            if entry.name in TYPED and entry.i in kinds:
                entry.i = kinds[entry.i]


def _retyped(tensor: onnx.TensorProto, kinds: Mapping[int, int]) -> onnx.TensorProto:
    """It in its other type; itself where there is none."""
    from onnx import helper, numpy_helper

    if tensor.data_type not in kinds:
        return tensor
    dtype, array = helper.tensor_dtype_to_np_dtype(kinds[tensor.data_type]), numpy_helper.to_array(tensor)
    if array.dtype == np.float64 and dtype == np.float32:  # a mask's lowest number stays one, and finite
        largest = np.finfo(dtype).max
        array = np.where(np.isinf(array), array, array.clip(-largest, largest))
    return numpy_helper.from_array(array.astype(dtype), tensor.name)


def _retype_value(kind: onnx.TypeProto, kinds: Mapping[int, int]) -> None:
    held = kind.WhichOneof("value")
    if held == "tensor_type":
        kind.tensor_type.elem_type = kinds.get(kind.tensor_type.elem_type, kind.tensor_type.elem_type)
    elif held in ("sequence_type", "optional_type"):
        _retype_value(getattr(kind, held).elem_type, kinds)

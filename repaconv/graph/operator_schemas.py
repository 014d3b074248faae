"""Element types that ONNX's schemas allow for an operator's inputs, and set for its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from repaconv.graph.operator_facts import DEFAULT_DOMAIN

if TYPE_CHECKING:
    import onnx

FLOAT32_FUNCTIONS = ("AffineGrid", "MeanVarianceNormalization")
"""Operators that ONNX allows in half precision, but defines by others with a float32 constant."""


def allowed_types(node: onnx.NodeProto, place: int, opset: int) -> frozenset[str]:
    """Return the types of an input by ONNX's names, such as ``tensor(float16)``; empty if no schema is known."""
    schema = _schema(node, opset)
    return frozenset(schema.inputs[min(place, len(schema.inputs) - 1)].types) if schema is not None else frozenset()


def output_types(node: onnx.NodeProto, kinds: Mapping[str, int], opset: int) -> dict[str, int]:
    """Return the element types of a node's outputs, as far as its schema sets them, or those of its inputs do.

    The output of a ``Where`` has the type of its second input; that of a comparison is boolean. Those of a ``Loop``
    have types of their own, which no schema sets.

    Args:
        node: A node.
        kinds: Element types by value name.
        opset: The opset of the graph.
    """
    from onnx import TensorProto

    every = {f"tensor({name.lower()})": kind for name, kind in TensorProto.DataType.items()}
    schema = _schema(node, opset)
    if schema is None:
        return {}
    given, found = dict[str, int](), dict[str, int]()
    for place, name in enumerate(node.input):
        if kind := kinds.get(name):
            given[schema.inputs[min(place, len(schema.inputs) - 1)].type_str] = kind
    for place, name in enumerate(node.output):
        formal = schema.outputs[min(place, len(schema.outputs) - 1)]
        only = next(iter(formal.types)) if len(formal.types) == 1 else ""
        if formal.is_homogeneous and (kind := given.get(formal.type_str, every.get(only))):
            found[name] = kind
    return found


def _schema(node: onnx.NodeProto, opset: int) -> onnx.defs.OpSchema | None:
    from onnx import defs

    known = node.domain in DEFAULT_DOMAIN and defs.has(node.op_type, opset)
    return defs.get_schema(node.op_type, opset) if known else None

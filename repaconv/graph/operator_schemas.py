"""Element types that ONNX's schemas allow for an operator's inputs, and set for its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.operator_facts import DEFAULT_DOMAIN

if TYPE_CHECKING:
    import onnx

TYPED = ("to", "dtype", "output_datatype")
"""Attributes that name an element type."""
FLOAT32_FUNCTIONS = ("AffineGrid", "MeanVarianceNormalization")
"""Operators that ONNX allows in half precision, but defines by others with a float32 constant."""


class FormalTypes(NamedTuple):
    """The element types of an input or output in a schema.

    Attributes:
        types: The allowed types by ONNX's names, such as ``tensor(float16)``.
        variable: The type variable, such as T; inputs and outputs of the same variable have one type.
        is_homogeneous: Whether all values of a variadic input or output have one type.
    """

    types: frozenset[str]
    variable: str
    is_homogeneous: bool


class SchemaTypes(NamedTuple):
    """What the schema of an operator says of element types.

    Attributes:
        inputs: Those of each input; of a variadic one, the last entry is for all.
        outputs: Those of each output.
        defaults: The attributes that name an element type, with their default.
    """

    inputs: tuple[FormalTypes, ...] = ()
    outputs: tuple[FormalTypes, ...] = ()
    defaults: tuple[tuple[str, int], ...] = ()


@lru_cache(maxsize=1024)
def schema_types(operator: str, opset: int, domain: str) -> SchemaTypes:
    """Read what an operator's schema says of types; nothing if this version of onnx has none.

    onnx builds its lists and sets anew each time that they are read from a schema.
    """
    import onnx

    try:
        schema = onnx.defs.get_schema(operator, opset, domain)
    except Exception:  # the module of onnx's exception class differs between versions
        return SchemaTypes()
    known = schema.attributes
    defaults = ((name, known[name].default_value.i) for name in TYPED if name in known)
    inputs, outputs = (
        tuple(FormalTypes(frozenset(each.types), each.type_str, each.is_homogeneous) for each in formals)
        for formals in (schema.inputs, schema.outputs)
    )
    return SchemaTypes(inputs, outputs, tuple((name, kind) for name, kind in defaults if kind))


def formal_types(formals: Sequence[FormalTypes], place: int) -> FormalTypes | None:
    """Return the types of the input or output at a place; None if the schema has none."""
    return formals[min(place, len(formals) - 1)] if formals else None


def allowed_types(node: onnx.NodeProto, place: int, opset: int) -> frozenset[str]:
    """Return the types that an input of a node may have; empty if no schema is known."""
    formal = formal_types(_of_node(node, opset).inputs, place)
    return formal.types if formal is not None else frozenset()


def output_types(node: onnx.NodeProto, kinds: Mapping[str, int], opset: int) -> dict[str, int]:
    """Return the element types of a node's outputs, as far as its schema sets them, or those of its inputs do.

    The output of a ``Where`` has the type of its second input; that of a comparison is boolean. Those of a ``Loop``
    have types of their own, which no schema sets.

    Args:
        node: A node.
        kinds: Element types by value name.
        opset: The opset of the graph.
    """
    schema = _of_node(node, opset)
    given, found = dict[str, int](), dict[str, int]()
    for place, name in enumerate(node.input):
        formal = formal_types(schema.inputs, place)
        if formal is not None and (kind := kinds.get(name)):
            given[formal.variable] = kind
    for place, name in enumerate(node.output):
        formal = formal_types(schema.outputs, place)
        if formal is None or not formal.is_homogeneous:
            continue
        only = next(iter(formal.types)) if len(formal.types) == 1 else ""
        if kind := given.get(formal.variable, _kinds_by_name().get(only)):
            found[name] = kind
    return found


def _of_node(node: onnx.NodeProto, opset: int) -> SchemaTypes:
    """What ONNX's schema of a node says; nothing for an operator of another domain."""
    return schema_types(node.op_type, opset, "") if node.domain in DEFAULT_DOMAIN else SchemaTypes()


@cache
def _kinds_by_name() -> dict[str, int]:
    """Element types by their names in schemas."""
    from onnx import TensorProto

    return {f"tensor({name.lower()})": kind for name, kind in TensorProto.DataType.items()}

"""Convert a graph to another floating type throughout (float64 for verification), as operator schemas permit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graph.onnx_files import subgraphs_of
from repaconv.graph.operator_facts import DEFAULT_DOMAIN
from repaconv.graph.operator_schemas import TYPED, FormalTypes, SchemaTypes, formal_types, schema_types

if TYPE_CHECKING:
    import onnx

_WORDS = {1: "float", 10: "float16", 11: "double", 16: "bfloat16"}
"""Names of floating types in operator schemas, by ONNX type number."""
_FLOATS = frozenset(f"tensor({word})" for word in _WORDS.values())
_DEFAULTS = {"ConstantOfShape": "value", "SequenceEmpty": "dtype"}
"""Operators whose output is float32 without this attribute, a default that their schema does not state."""


def to_float64(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a float32 graph to float64, to verify a rewrite with the reference implementation."""
    import onnx

    return retyped(proto, {onnx.TensorProto.FLOAT: onnx.TensorProto.DOUBLE})


def retyped(proto: onnx.ModelProto, kinds: Mapping[int, int]) -> onnx.ModelProto:
    """Convert constants, casts and values of a graph to other element types, also in subgraphs and functions.

    An input that an operator accepts in the old types only (the scales of Resize, the boxes of NonMaxSuppression)
    keeps its type if it is a constant, and is cast otherwise. An operator that outputs the old types only (Celu) is
    not converted, and the result is then not valid ONNX: see `unsupported`.

    Args:
        proto: The graph with all weights embedded; it is not modified.
        kinds: New type number by old one; both are floating types.
    """
    from repaconv.graph.graph_without_weights import with_initializers

    how = _Retyping(kinds, _opsets(proto))
    kept = kept_constants(proto, kinds)
    weights = (weight if weight.name in kept else _retyped(weight, kinds) for weight in proto.graph.initializer)
    other = with_initializers(proto, weights)
    how.known.update({weight.name: weight.data_type for weight in proto.graph.initializer})
    how.values(other.graph, kept)
    for function in other.functions:
        own = _Retyping(kinds, {entry.domain: entry.version for entry in function.opset_import})
        own.nodes(function.node, set())
        for value in function.value_info:
            _retype_value(value.type, kinds)
    return other


def kept_constants(proto: onnx.ModelProto, kinds: Mapping[int, int]) -> set[str]:
    """Return the names of constants that keep their type, since all their readers accept only the old types."""
    return _Retyping(kinds, _opsets(proto)).kept(proto.graph)


def unsupported(proto: onnx.ModelProto, kinds: Mapping[int, int]) -> str:
    """Return an operator of the graph that cannot output the new types, or an empty string."""
    how = _Retyping(kinds, _opsets(proto))
    return next((node.op_type for node in _every(proto.graph.node) if how.narrow_outputs(node)), "")


def element_types(graph: onnx.GraphProto) -> Iterator[int]:
    """The element types that a graph names."""
    yield from (weight.data_type for weight in graph.initializer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.type.tensor_type.elem_type
    for node in graph.node:
        for entry in node.attribute:
            if entry.HasField("t"):
                yield entry.t.data_type
            elif entry.name in TYPED:
                yield entry.i


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    return {entry.domain: entry.version for entry in proto.opset_import}


def _every(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs_of(node):
            yield from _every(graph.node)


@dataclass
class _Retyping:
    """Converts the element types of graphs in place.

    Attributes:
        kinds: See `retyped`.
        opsets: Opset version by domain.
        known: Original type of each value by name, as far as known.
        numbers: Counter for unique names of new values.
    """

    kinds: Mapping[int, int]
    opsets: Mapping[str, int]
    known: dict[str, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def graph(self, graph: onnx.GraphProto, around: set[str]) -> None:
        """Convert a subgraph with its weights. ``around`` names outer constants that keep their type."""
        kept = self.kept(graph) | around
        for weight in graph.initializer:
            self.known[weight.name] = weight.data_type
            if weight.name not in kept and weight.data_type in self.kinds:
                weight.CopyFrom(_retyped(weight, self.kinds))
        self.values(graph, kept)

    def values(self, graph: onnx.GraphProto, kept: set[str]) -> None:
        """Convert everything in a graph except its weights."""
        for value in (*graph.input, *graph.output, *graph.value_info):
            self.known[value.name] = value.type.tensor_type.elem_type
            if value.name not in kept:
                _retype_value(value.type, self.kinds)
        self.nodes(graph.node, kept)

    def nodes(self, nodes: Any, kept: set[str]) -> None:
        """Convert nodes in order, and insert casts where an operator accepts only the old types."""
        found: list[onnx.NodeProto] = []
        for node in nodes:
            made = type(node)()
            made.CopyFrom(node)
            narrow = {} if self.narrow_outputs(node) else self.narrow_inputs(node)
            for place, kind in narrow.items():
                if node.input[place] not in kept:
                    found.append(self._cast(made, place, kind))
            if kept.isdisjoint(node.output):
                self._attributes(made, kept)
            found.append(made)
        del nodes[:]
        nodes.extend(found)

    def _cast(self, node: onnx.NodeProto, place: int, kind: int) -> onnx.NodeProto:
        import onnx

        before = node.input[place]
        node.input[place] = f"{before}/{_WORDS[kind]}:{next(self.numbers)}"
        return onnx.helper.make_node("Cast", [before], [node.input[place]], to=kind)

    def _attributes(self, node: onnx.NodeProto, kept: set[str]) -> None:
        import onnx

        for graph in subgraphs_of(node):
            self.graph(graph, kept)
        for entry in node.attribute:
            if entry.HasField("t"):
                entry.t.CopyFrom(_retyped(entry.t, self.kinds))
            if entry.name in TYPED and entry.i in self.kinds:
                entry.i = self.kinds[entry.i]
            if node.op_type == "Constant" and entry.name in ("value_float", "value_floats") and 1 in self.kinds:
                numbers = np.asarray(onnx.helper.get_attribute_value(entry), np.float32)
                tensor = _retyped(onnx.numpy_helper.from_array(numbers), self.kinds)
                entry.CopyFrom(onnx.helper.make_attribute("value", tensor))
        named = {entry.name for entry in node.attribute}
        for name, kind in self._defaults(node):
            if name not in named and kind in self.kinds:
                other = self.kinds[kind]
                zero = onnx.helper.make_tensor("", other, [1], [0])
                node.attribute.append(onnx.helper.make_attribute(name, zero if name == "value" else other))

    def _defaults(self, node: onnx.NodeProto) -> Iterator[tuple[str, int]]:
        """Yield the attributes that name an element type, with their default."""
        if node.domain in DEFAULT_DOMAIN and node.op_type in _DEFAULTS:
            yield _DEFAULTS[node.op_type], 1
        yield from self._types(node).defaults

    def kept(self, graph: onnx.GraphProto) -> set[str]:
        """Return the names of constants that all readers accept in the old types only."""
        constants = {weight.name for weight in graph.initializer}
        constants |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
        narrow, wide = set[str](), {value.name for value in graph.output}
        for name, is_narrow in self._reads(graph.node):
            (narrow if is_narrow else wide).add(name)
        return constants & narrow - wide

    def _reads(self, nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, bool]]:
        """Yield each name that nodes or their subgraphs read, and whether only the old types are accepted there."""
        for node in nodes:
            narrow = {} if self.narrow_outputs(node) else self.narrow_inputs(node)
            yield from ((name, place in narrow) for place, name in enumerate(node.input))
            for graph in subgraphs_of(node):
                own = {name for inner in graph.node for name in inner.output}
                own |= {each.name for each in (*graph.input, *graph.initializer)}
                yield from ((name, is_narrow) for name, is_narrow in self._reads(graph.node) if name not in own)
                yield from ((value.name, False) for value in graph.output if value.name not in own)

    def narrow_inputs(self, node: onnx.NodeProto) -> dict[int, int]:
        """Return the input indices where an operator accepts only the old types, with that type."""
        return dict(self._narrow(self._types(node).inputs, node.input))

    def narrow_outputs(self, node: onnx.NodeProto) -> dict[int, int]:
        """Return the output indices where an operator gives only the old types, with that type."""
        return dict(self._narrow(self._types(node).outputs, node.output))

    def _narrow(self, formals: Sequence[FormalTypes], names: Sequence[str]) -> Iterator[tuple[int, int]]:
        for place, name in enumerate(names):
            formal = formal_types(formals, place)
            if not name or formal is None:
                continue
            old = _old_type_only(formal.types, tuple(self.kinds.items()))
            if old and (formal.types <= _FLOATS or self.known.get(name) in self.kinds):
                yield place, old

    def _types(self, node: onnx.NodeProto) -> SchemaTypes:
        return schema_types(node.op_type, self._opset(node), _domain(node))

    def _opset(self, node: onnx.NodeProto) -> int:
        return self.opsets.get(_domain(node), self.opsets.get(node.domain, 0))


@cache
def _old_type_only(types: frozenset[str], kinds: tuple[tuple[int, int], ...]) -> int | None:
    """The first old type that is among the allowed types, if no new one is; else None. Few types recur in a graph."""
    old = [(kind, new) for kind, new in kinds if f"tensor({_WORDS[kind]})" in types]
    return None if not old or any(f"tensor({_WORDS[new]})" in types for _, new in old) else old[0][0]


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _retyped(tensor: onnx.TensorProto, kinds: Mapping[int, int]) -> onnx.TensorProto:
    """Convert a tensor to its new type, or return it unchanged if it has none; of an external one, the type alone."""
    from onnx import helper, numpy_helper

    if tensor.data_type not in kinds:
        return tensor
    if tensor.data_location == tensor.EXTERNAL:
        found = type(tensor)()
        found.CopyFrom(tensor)
        found.data_type = kinds[tensor.data_type]
        return found
    dtype, array = helper.tensor_dtype_to_np_dtype(kinds[tensor.data_type]), numpy_helper.to_array(tensor)
    narrow = array.dtype == np.float64 and dtype == np.float32
    return numpy_helper.from_array(as_float32(array) if narrow else array.astype(dtype), tensor.name)


def as_float32(array: np.ndarray) -> np.ndarray:
    """Round an array to float32; the lowest number of a mask stays finite."""
    with np.errstate(over="ignore"):
        found = np.asarray(array).astype(np.float32)
    beyond = np.isinf(found)
    if beyond.any():
        beyond &= np.isfinite(array)
        found[beyond] = np.copysign(np.finfo(np.float32).max, found[beyond])
    return found


def _retype_value(kind: onnx.TypeProto, kinds: Mapping[int, int]) -> None:
    held = kind.WhichOneof("value")
    if held == "tensor_type":
        kind.tensor_type.elem_type = kinds.get(kind.tensor_type.elem_type, kind.tensor_type.elem_type)
    elif held in ("sequence_type", "optional_type"):
        _retype_value(getattr(kind, held).elem_type, kinds)

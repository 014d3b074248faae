"""Look up nodes and constants of an onnx-ir graph, and write new nodes in place of others."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir


Array = NDArray[Any]
OPAQUE = "repaconv.opaque"
"""Metadata key of a constant that rewrites must treat as computed, so that it stays unchanged

(`repaconv.rewrites.fold.shared_weights`).
"""
_NUMBER = re.compile(r"_(\d{1,12})$")
_ENDING = re.compile(r"\.(out|\d+)$")
"""What the name of a node's output has more than the node's."""


MOST_CACHED_ENTRIES = 1024
"""Numbers of a constant that is decoded once."""


def constant(value: ir.Value | None) -> Array | None:
    """Return a constant's numbers, floats in float64; None if it is computed, a graph input, or opaque.

    They are read-only: large ones that are stored in float64 are not copied.
    """
    if value is None or not is_constant(value):
        return None
    found = stored(value)
    is_float = found.dtype.kind == "f" or (found.dtype.kind == "V" and found.dtype.name == "bfloat16")
    if not is_float:
        return found
    numbers: Array = found.astype(np.float64, copy=False).view()
    numbers.flags.writeable = False
    return numbers


def stored(value: ir.Value) -> Array:
    """Return the numbers of a constant in its own type. Small ones, which are read many times, are decoded once."""
    import onnx_ir as ir

    known = value.const_value
    assert known is not None
    found: Array = known.numpy()
    if isinstance(known, ir.serde.TensorProtoTensor) and found.size <= MOST_CACHED_ENTRIES:
        value.const_value = ir.Tensor(found, known.dtype, name=known.name)
    return found


def is_constant(value: ir.Value | None) -> bool:
    """Return whether a value is a constant that rewrites may read."""
    if value is None or value.const_value is None or value.is_graph_input():
        return False
    return OPAQUE not in value.meta


def shape_of_constant(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the shape of what `constant` returns, without reading or converting the numbers."""
    if value is None or value.const_value is None or not is_constant(value):
        return None
    shape: tuple[int, ...] = value.const_value.shape.numpy()
    return shape


def scalar(value: ir.Value | None) -> float | None:
    """Return a constant of one entry as a float, or None."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    found = constant(value)
    return float(found.reshape(())) if found is not None and found.size == 1 else None


def input_at(node: ir.Node, place: int) -> ir.Value | None:
    """Return the input at a position; None if it is left out."""
    return node.inputs[place] if len(node.inputs) > place else None


def is_read(value: ir.Value) -> bool:
    """Return whether a node reads a value, or the graph outputs it."""
    return bool(value.uses()) or value.is_graph_output()


def is_read_once(value: ir.Value) -> bool:
    """Return whether one node reads a value, and the graph does not output it."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def both_keep_names(output: ir.Value, x: ir.Value) -> bool:
    """Return whether both are inputs or outputs of the graph, so that neither can take the place of the other."""
    return output.is_graph_output() and (x.producer() is None or x.is_graph_output())


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the node that computes a value, if it is one of these operators of ONNX's default domain."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type in operators else None


def nodes_of(model: ir.Model, *operators: str) -> list[ir.Node]:
    """Return the nodes of these operators of ONNX's default domain, as a new list."""
    return [node for node in model.graph if node.domain == "" and node.op_type in operators]


def only_reader(value: ir.Value, *operators: str) -> ir.Node | None:
    """Return the only reader of a value that is not a graph output, if it is one of these operators.

    Without operators any reader counts, but none in a branch or loop body of the graph.
    """
    readers = value.consumers()
    if len(readers) != 1 or value.is_graph_output() or readers[0].graph is not value.graph:
        return None
    reader = readers[0]
    return reader if not operators or (reader.domain == "" and reader.op_type in operators) else None


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Return the value of an attribute, or the default."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def has_subgraphs(node: ir.Node) -> bool:
    """Return whether a node has branches or a loop body."""
    entries = node.attributes.data  # the views of the dictionary around it take three times as long
    return bool(entries) and any(entry.type in _graph_kinds() for entry in entries.values())


@cache
def _graph_kinds() -> tuple[ir.AttributeType, ...]:
    import onnx_ir as ir

    return ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS


def attributes_key(node: ir.Node) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for nodes with the same attributes."""
    return tuple(sorted((name, str(entry.value)) for name, entry in node.attributes.items()))


class Writer:
    """Writes new nodes before an existing node, with its name scope and its element type."""

    def __init__(self, model: ir.Model, before: ir.Node) -> None:
        self.graph, self.before = model.graph, before
        self.scope = (before.name or "").rpartition("/")[0]
        typed = (value.dtype for value in (before.outputs[0], *before.inputs) if value is not None)
        self.dtype = next((kind for kind in typed if kind is not None), None)

    def __call__(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Write a node and return its first output."""
        import onnx_ir as ir

        node = ir.node(operator, inputs, attributes)
        node.name = _fresh(self.graph, f"{self.scope}/{operator}".lstrip("/"))
        node.outputs[0].name = f"{node.name}.out"
        if self.dtype is not None:
            node.outputs[0].dtype = self.dtype
        self.graph.insert_before(self.before, node)
        return node.outputs[0]

    def copy(self, node: ir.Node, *inputs: ir.Value | None) -> ir.Value:
        """Write a node with the operator and attributes of another, and return its first output."""
        made = self(node.op_type, *inputs, **{name: entry.value for name, entry in node.attributes.items()})
        producer = made.producer()
        assert producer is not None
        producer.domain = node.domain
        return made

    def constant(self, numbers: Array | list[int] | float, like: ir.Value | None = None) -> ir.Value:
        """Write an initializer: floats in the type of ``like`` or of the existing node's output, integers as int64.

        An empty list counts as integers, such as the shape of one number. What is no float stays as it is if it is
        ``like`` a value, and so do truth values.
        """
        import onnx_ir as ir

        array = np.asarray(numbers, np.int64 if isinstance(numbers, list) and not numbers else None)
        if array.dtype.kind == "b" or (like is not None and array.dtype.kind != "f"):
            return self.exactly(array)
        kind = (like.dtype if like is not None else self.dtype) or ir.DataType.FLOAT
        return self.exactly(array.astype(kind.numpy() if array.dtype.kind == "f" else np.int64))

    def exactly(self, array: Array) -> ir.Value:
        """Write an initializer in the array's own type."""
        import onnx_ir as ir

        name = _fresh(self.graph, f"{self.scope}/constant".lstrip("/"))
        value = ir.Value(
            name=name,
            const_value=ir.Tensor(np.asarray(array), name=name),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
        )
        self.graph.register_initializer(value)
        return value

    def split(self, whole: ir.Value, sizes: list[int], axis: int = -1) -> list[ir.Value]:
        """Write a Split of a value along an axis, and return its parts."""
        import onnx_ir as ir

        node = ir.node("Split", [whole, self.constant(sizes)], {"axis": axis}, num_outputs=len(sizes))
        node.name = _fresh(self.graph, f"{self.scope}/Split".lstrip("/"))
        for number, output in enumerate(node.outputs):
            output.name, output.dtype = f"{node.name}.{number}", self.dtype
        self.graph.insert_before(self.before, node)
        return list(node.outputs)

    def name(self, name: str | None) -> str:
        """Return a name that nothing in the graph has, for a value or node that is moved into it."""
        return _fresh(self.graph, name or self.before.op_type)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace all uses of the old value by the new one; a graph output keeps its name."""
        import onnx_ir as ir

        if old.is_graph_output():
            if new.is_graph_input() or new.is_graph_output():  # which have names of their own
                new = self("Identity", new)
            name, old.name = old.name, f"{old.name}.old"
            new.name, new.shape, new.dtype = name, old.shape, old.dtype
        elif new.shape is None:
            new.shape = old.shape
        while old.is_graph_output():  # onnx-ir looks through all outputs in Python, for each that it replaces
            outputs = old.graph.outputs
            outputs[outputs.index(old)] = new
        ir.convenience.replace_all_uses_with(old, new)


def _fresh(graph: ir.Graph, stem: str) -> str:
    """Return a name that begins so, with a number that no node or weight ends with, also none of earlier runs."""
    if "repaconv.fresh" not in graph.meta:
        names = [node.name or "" for node in graph] + list(graph.initializers)
        graph.meta["repaconv.fresh"] = max(
            (int(found[1]) for name in names if (found := _NUMBER.search(name))), default=0
        )
        nodes = list(graph.all_nodes())
        values = [value for node in nodes for value in node.outputs]
        values += [value for part in {graph, *(node.graph for node in nodes)} if part for value in part.inputs]
        inner = {name for node in nodes if node.graph not in (None, graph) for name in node.graph.initializers}
        graph.meta["repaconv.values"] = inner | {_ENDING.sub("", value.name or "") for value in values}
    number = int(graph.meta["repaconv.fresh"]) + 1
    while f"{stem}_{number}" in graph.meta["repaconv.values"]:
        number += 1
    graph.meta["repaconv.fresh"] = number
    return f"{stem}_{number}"

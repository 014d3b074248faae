"""Convert a graph to an older opset, and expand operators that a parser does not support.

ONNX's version converter cannot lower LayerNormalization and rejects axes given as inputs. torch's exporter then returns
the unconverted graph without notice. Exported graphs need only a few operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import pi, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused
from repaconv.graph.onnx_files import split_evenly
from repaconv.graph.operator_facts import EPSILON, REDUCTIONS

if TYPE_CHECKING:
    import onnx

OLDEST = 13
"""The oldest supported opset. Before it, axes of Squeeze and ReduceSum are attributes, and Softmax differs."""

# Attributes added by a newer opset, with that opset and the value that means the former behavior.
_NEWER = {
    "BatchNormalization": ("training_mode", 14, 0),
    "Cast": ("saturate", 19, 1),
    **dict.fromkeys(REDUCTIONS, ("noop_with_empty_axes", 18, 0)),
}


def lower(model: onnx.ModelProto, opset: int, lacks: Collection[str] = ()) -> onnx.ModelProto:
    """Convert a graph to an opset and without some operators; its function stays the same.

    Args:
        model: A graph of opset 18 or newer, or of that opset; it is not modified.
        opset: Target opset, from 13 to the model's.
        lacks: Operators to expand: LayerNormalization, Gelu.

    Raises:
        Refused: If an operator cannot be lowered.
    """
    import onnx

    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    _Lowering(lowered, opset, frozenset(lacks)).run()
    for node in lowered.graph.node:
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, opset, ""):
            raise _no_older(node, opset)
    del lowered.graph.value_info[:]  # its values may have been removed
    del lowered.opset_import[:]
    lowered.opset_import.append(onnx.helper.make_opsetid("", opset))
    lowered.ir_version = onnx.helper.find_min_ir_version_for(lowered.opset_import)
    return lowered


class _Lowering:
    """Lowers the nodes in order; each is replaced or kept."""

    def __init__(self, model: onnx.ModelProto, opset: int, lacks: frozenset[str]) -> None:
        from onnx import numpy_helper

        if opset < OLDEST:
            raise Refused(
                f"opset {opset} is older than the oldest supported one.",
                hint=f"Give a target with opset {OLDEST} or newer.",
                code="export.opset",
            )
        self.graph, self.opset, self.lacks = model.graph, opset, lacks
        self.constants = {weight.name: weight for weight in model.graph.initializer}
        self.value_of: Callable[[str], Any] = lambda name: numpy_helper.to_array(self.constants[name])
        inferred = any(node.op_type in ("Split", "LayerNormalization", "Gelu") for node in model.graph.node)
        self.shapes, self.types = _shapes_and_types(model) if inferred else ({}, {})
        self.nodes: list[onnx.NodeProto] = []
        self.names = set(_names(model.graph))
        self.numbers: dict[tuple[int, float], str] = {}
        self.integers: dict[tuple[int, ...], str] = {}

    def run(self) -> None:
        old = list(self.graph.node)
        del self.graph.node[:]
        for node in old:
            if node.op_type == "LayerNormalization" and (self.opset < 17 or node.op_type in self.lacks):
                self._layer_norm(node)
            elif node.op_type == "Gelu" and (self.opset < 20 or node.op_type in self.lacks):
                self._gelu(node)
            elif node.op_type == "Shape" and self.opset < 15 and node.attribute:
                self._shape(node)
            elif node.op_type == "HardSwish" and self.opset < 14:
                self._hard_swish(node)
            else:
                self._in_place(node)
                self.nodes.append(node)
        self.graph.node.extend(self.nodes)

    def _in_place(self, node: onnx.NodeProto) -> None:
        """Change attributes and inputs of a node to those of the older opset."""
        from onnx import helper

        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type in REDUCTIONS and self.opset < 18 and len(node.input) > 1:
            self._axes(node)
        if node.op_type == "Split" and self.opset < 18 and "num_outputs" in attributes:
            self._split(node, attributes.get("axis", 0))
        name, since, plain = _NEWER.get(node.op_type, ("", 0, 0))
        if name in attributes and self.opset < since:
            if attributes[name] != plain:
                raise _no_older(node, self.opset)
            self._drop(node, name)
        if node.op_type == "Reshape" and self.opset < 14 and "allowzero" in attributes:
            zero = node.input[1] in self.constants and 0 in self.value_of(node.input[1])
            if attributes["allowzero"] and zero:
                raise _no_older(node, self.opset)
            self._drop(node, "allowzero")  # 0 is the former behavior, and 1 matters only for a zero in the target

    def _axes(self, node: onnx.NodeProto) -> None:
        """Move the axes of a reduction from an input to an attribute. Empty axes mean all axes."""
        from onnx import helper

        if node.input[1] and node.input[1] not in self.constants:
            raise _no_older(node, self.opset)
        axes = [int(axis) for axis in self.value_of(node.input[1])] if node.input[1] else []
        del node.input[1:]
        if axes:
            node.attribute.append(helper.make_attribute("axes", axes))

    def _split(self, node: onnx.NodeProto, axis: int) -> None:
        """Drop num_outputs. Equal parts are the default of the older opset; other sizes become an input."""
        shape = self.shapes.get(node.input[0], ())
        parts = split_evenly(shape[axis], len(node.output)) if shape and shape[axis] else None
        if parts is None:
            raise _no_older(node, self.opset)
        self._drop(node, "num_outputs")
        if parts[-1] != parts[0]:
            node.input.append(self.whole(*parts))

    @staticmethod
    def _drop(node: onnx.NodeProto, name: str) -> None:
        kept = [entry for entry in node.attribute if entry.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)

    def _shape(self, node: onnx.NodeProto) -> None:
        """Write a Shape of some dimensions as a Slice of the whole shape."""
        from onnx import helper

        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        step = _Steps(self, node)
        ends = (self.whole(attributes.get("start", 0)), self.whole(attributes.get("end", 2**31)))
        step.done(step("Slice", step("Shape", node.input[0]), *ends))

    def _hard_swish(self, node: onnx.NodeProto) -> None:
        """Write x HardSigmoid(x), with a slope of 1/6: the definition of the operator."""
        step, x = _Steps(self, node), node.input[0]
        step.done(step("Mul", x, step("HardSigmoid", x, alpha=1 / 6, beta=0.5)))

    def _layer_norm(self, node: onnx.NodeProto) -> None:
        """Write (x - mean) / sqrt(var + eps), then scale and shift unless they are trivial."""
        from onnx import helper

        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if attributes.get("axis", -1) != -1 or len(node.output) > 1:
            raise _no_older(node, self.opset)
        step = _Steps(self, node)
        x = node.input[0]
        centred = step("Sub", x, step.mean(x))
        variance = step.mean(step("Mul", centred, centred))
        deviation = step("Sqrt", step("Add", variance, step.number(attributes.get("epsilon", EPSILON), x)))
        y = step("Div", centred, deviation)
        scale, shift = node.input[1], (node.input[2] if len(node.input) > 2 else "")
        if not self._is_all(scale, 1.0):
            y = step("Mul", y, scale)
        if shift and not self._is_all(shift, 0.0):
            y = step("Add", y, shift)
        step.done(y)

    def _gelu(self, node: onnx.NodeProto) -> None:
        """Write 0.5 x (1 + erf(x / sqrt 2)), or the tanh approximation."""
        from onnx import helper

        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        step, x = _Steps(self, node), node.input[0]
        if attributes.get("approximate", b"none") == b"tanh":
            cube = step("Mul", step("Mul", x, x), x)
            inner = step("Add", x, step("Mul", cube, step.number(0.044715, x)))
            bent = step("Tanh", step("Mul", inner, step.number(sqrt(2 / pi), x)))
        else:
            bent = step("Erf", step("Div", x, step.number(sqrt(2), x)))
        half = step("Mul", x, step("Add", bent, step.number(1.0, x)))
        step.done(step("Mul", half, step.number(0.5, x)))

    def _is_all(self, name: str, value: float) -> bool:
        return name in self.constants and bool((self.value_of(name) == value).all())

    def number(self, value: float, like: str) -> str:
        """Return the name of a scalar constant of the element type of another value, shared by value and type."""
        from onnx import TensorProto, helper

        key = self.types.get(like) or TensorProto.FLOAT, value
        if key not in self.numbers:
            array = np.asarray(value, helper.tensor_dtype_to_np_dtype(key[0]))
            self.numbers[key] = self._constant(f"constant_{len(self.numbers)}", array)
        return self.numbers[key]

    def whole(self, *values: int) -> str:
        """Return the name of an int64 constant [n]."""
        if values not in self.integers:
            name = "_".join(map(str, ("whole", *values)))
            self.integers[values] = self._constant(name, np.asarray(values, dtype=np.int64))
        return self.integers[values]

    def _constant(self, name: str, array: NDArray[Any]) -> str:
        from onnx import numpy_helper

        name = self.fresh(name)
        self.constants[name] = numpy_helper.from_array(array, name)
        self.graph.initializer.append(self.constants[name])
        return name

    def fresh(self, name: str) -> str:
        """Return this name, or a longer one where the graph has it already."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


class _Steps:
    """Writes the nodes that replace one node, under its module's name."""

    def __init__(self, lowering: _Lowering, node: onnx.NodeProto) -> None:
        self.lowering, self.node, self.count = lowering, node, 0
        self.number = lowering.number

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        self.count += 1
        output = self.lowering.fresh(f"{self.node.output[0]}.{self.count}")
        name = f"{self.node.name}.{self.count}"
        self.lowering.nodes.append(helper.make_node(operator, inputs, [output], name, **attributes))
        return output

    def mean(self, x: str) -> str:
        """Write the mean over the last axis; the axis is an attribute before opset 18, an input from then on."""
        if self.lowering.opset < 18:
            return self("ReduceMean", x, keepdims=1, axes=[-1])
        return self("ReduceMean", x, self.lowering.whole(-1), keepdims=1)

    def done(self, last: str) -> None:
        """Give the last value the name of the replaced node's output."""
        assert self.lowering.nodes[-1].output[0] == last
        self.lowering.nodes[-1].output[0] = self.node.output[0]


def _shapes_and_types(model: onnx.ModelProto) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the inferred shapes of all values, with 0 for a dynamic dimension, and their element types."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    known = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output, *graph.value_info)}
    shapes = {name: tuple(dim.dim_value for dim in kind.shape.dim) for name, kind in known.items()}
    types = {weight.name: weight.data_type for weight in graph.initializer}
    return shapes, {**types, **{name: kind.elem_type for name, kind in known.items()}}


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of all values of a graph and its subgraphs."""
    yield from (value.name for value in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from node.output
        for entry in node.attribute:
            for inner in (entry.g, *entry.graphs):
                yield from _names(inner)


def _no_older(node: onnx.NodeProto, opset: int) -> Refused:
    return Refused(
        f"{node.name} ({node.op_type}) cannot be written in opset {opset}.",
        hint="Export for a target with a newer opset, or give a newer --opset.",
        code="export.opset",
    )

"""Convert a graph to an older opset, and expand operators that a parser does not support.

ONNX's version converter cannot lower LayerNormalization and rejects axes given as inputs. torch's exporter then returns
the unconverted graph without notice. Exported graphs need only a few operators.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from math import pi, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused
from repaconv.graph.onnx_files import NewNames, all_graphs, attributes_of, opset_of, split_evenly, subgraphs_of
from repaconv.graph.operator_facts import DEFAULT_DOMAIN, EPSILON, OLDEST_OPSET, REDUCTIONS_OF_OPSET_18

if TYPE_CHECKING:
    import onnx

_READ_SHAPES = ("Split", "LayerNormalization", "Gelu", "GroupNormalization", "GridSample")
"""Operators whose lowering depends on shapes or element types."""

_FORMER = {("RoiAlign", "coordinate_transformation_mode"): b"output_half_pixel"}
"""Values that mean the behavior before the attribute existed, where its default means another one."""
_NEWER_VALUES = {
    ("Pad", "mode", b"wrap"): 19,
    ("Resize", "coordinate_transformation_mode", b"half_pixel_symmetric"): 19,
    **{(name, "reduction", value): 18 for name in ("ScatterND", "ScatterElements") for value in (b"max", b"min")},
}
"""The opset in which an operator got a value of an attribute."""
_GRID_MODES = {b"linear": "bilinear", b"cubic": "bicubic"}
"""Modes of GridSample, and their names before opset 20."""


def lower(model: onnx.ModelProto, opset: int, unsupported_ops: Collection[str] = ()) -> onnx.ModelProto:
    """Convert a graph to an opset and without some operators; its function stays the same.

    Args:
        model: A graph of opset 18 or newer, or of that opset; it is not modified.
        opset: Target opset, from 13 to the model's.
        unsupported_ops: Operators to expand: LayerNormalization, Gelu.

    Raises:
        Refused: If an operator cannot be lowered.
    """
    import onnx

    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    _Lowering(lowered, opset, frozenset(unsupported_ops)).run()
    del lowered.graph.value_info[:]  # its values may have been removed
    others = [entry for entry in lowered.opset_import if entry.domain not in DEFAULT_DOMAIN]
    del lowered.opset_import[:]
    lowered.opset_import.extend([onnx.helper.make_opsetid("", opset), *others])
    lowered.ir_version = onnx.helper.find_min_ir_version_for(lowered.opset_import, ignore_unknown=True)
    return lowered


class _Lowering:
    """Lowers the nodes in order; each is replaced or kept."""

    def __init__(self, model: onnx.ModelProto, opset: int, unsupported_ops: frozenset[str]) -> None:
        from onnx import numpy_helper, shape_inference

        if opset < OLDEST_OPSET:
            raise Refused(
                f"opset {opset} is older than the oldest supported one.",
                hint=f"Give a target with opset {OLDEST_OPSET} or newer.",
                code="export.opset",
            )
        self.given = opset_of(model)
        self.graph, self.opset, self.unsupported_ops = model.graph, opset, unsupported_ops
        self.known = _Known(ChainMap(), ChainMap(), ChainMap())
        self.value_of: Callable[[str], Any] = lambda name: numpy_helper.to_array(self.known.constants[name])
        used = {node.op_type for graph in all_graphs(model.graph) for node in graph.node}
        self.inferred = model.graph if used.isdisjoint(_READ_SHAPES) else shape_inference.infer_shapes(model).graph
        self.nodes: list[onnx.NodeProto] = []
        self.names = NewNames(model.graph)
        self.numbers: dict[tuple[int, float], str] = {}
        self.integers: dict[tuple[int, ...], str] = {}

    def run(self) -> None:
        self._lower_graph(self.graph, self.inferred, self.known)

    def _lower_graph(self, graph: onnx.GraphProto, inferred: onnx.GraphProto, outer: _Known) -> None:
        """Lower a graph after its subgraphs; ``inferred`` is the same graph with the shapes of its values."""
        known = outer.within(inferred)
        for node, same in zip(graph.node, inferred.node, strict=True):
            for inner, described in zip(subgraphs_of(node), subgraphs_of(same), strict=True):
                self._lower_graph(inner, described, known)
        old, self.nodes, self.known = list(graph.node), [], known
        for node in old:
            self._lower(node)
        del graph.node[:]
        graph.node.extend(self.nodes)

    def _lower(self, node: onnx.NodeProto) -> None:
        if node.domain not in DEFAULT_DOMAIN:
            self.nodes.append(node)
        elif node.op_type == "LayerNormalization" and (self.opset < 17 or node.op_type in self.unsupported_ops):
            self._layer_norm(node)
        elif node.op_type == "GroupNormalization" and self.opset < 21:
            self._group_norm(node)
        elif node.op_type == "Gelu" and (self.opset < 20 or node.op_type in self.unsupported_ops):
            self._gelu(node)
        elif node.op_type == "Shape" and self.opset < 15 and node.attribute:
            self._shape(node)
        elif node.op_type == "HardSwish" and self.opset < 14:
            self._hard_swish(node)
        else:
            self._in_place(node)
            self._require_known(node)
            self.nodes.append(node)

    def _in_place(self, node: onnx.NodeProto) -> None:
        """Change attributes and inputs of a node to those of the older opset."""
        from onnx import helper

        attributes = attributes_of(node)
        if node.op_type in REDUCTIONS_OF_OPSET_18 and self.opset < 18 and len(node.input) > 1:
            self._axes(node)
        if node.op_type == "Split" and self.opset < 18 and "num_outputs" in attributes:
            self._split(node, attributes.get("axis", 0))
        if node.op_type == "GridSample" and self.opset < 20 and attributes.get("mode") in _GRID_MODES:
            self._drop(node, "mode")
            node.attribute.append(helper.make_attribute("mode", _GRID_MODES[attributes["mode"]]))
        if node.op_type == "Reshape" and self.opset < 14 and "allowzero" in attributes:
            zero = node.input[1] in self.known.constants and 0 in self.value_of(node.input[1])
            if attributes["allowzero"] and zero:
                raise _no_older(node, self.opset)
            self._drop(node, "allowzero")  # 0 is the former behavior, and 1 matters only for a zero in the target

    def _require_known(self, node: onnx.NodeProto) -> None:
        """Drop attributes that the older opset does not have, if they mean what it does; refuse what it does not have.

        Raises:
            Refused: If the older opset has no such operator, attribute, value or input.
        """
        from onnx import defs, helper

        if not defs.has(node.op_type, self.opset):
            raise _no_older(node, self.opset)
        while node.input and not node.input[-1]:  # left out
            node.input.pop()
        older, newer = (defs.get_schema(node.op_type, opset) for opset in (self.opset, max(self.given, self.opset)))
        values = attributes_of(node)
        for name in newer.attributes.keys() - older.attributes.keys():
            default = newer.attributes[name].default_value
            by_default = helper.get_attribute_value(default) if default.name else None
            former = _FORMER.get((node.op_type, name), by_default)
            if values.get(name, by_default) != former and not _is_ones(name, values):
                raise _no_older(node, self.opset)
            self._drop(node, name)
        texts = ((node.op_type, name, value) for name, value in values.items() if isinstance(value, bytes))
        volumes = node.op_type == "GridSample" and self.opset < 20 and len(self.known.shapes.get(node.input[0], ())) > 4
        if volumes or len(node.input) > older.max_input or any(self.opset < _NEWER_VALUES.get(k, 0) for k in texts):
            raise _no_older(node, self.opset)

    def _axes(self, node: onnx.NodeProto) -> None:
        """Move the axes of a reduction from an input to an attribute. Empty axes mean all axes."""
        from onnx import helper

        if node.input[1] and node.input[1] not in self.known.constants:
            raise _no_older(node, self.opset)
        axes = [int(axis) for axis in self.value_of(node.input[1])] if node.input[1] else []
        del node.input[1:]
        if axes:
            node.attribute.append(helper.make_attribute("axes", axes))

    def _split(self, node: onnx.NodeProto, axis: int) -> None:
        """Drop num_outputs. Equal parts are the default of the older opset; other sizes become an input."""
        shape = self.known.shapes.get(node.input[0], ())
        parts = split_evenly(shape[axis], len(node.output)) if shape and shape[axis] else None
        if parts is None:
            raise _no_older(node, self.opset)
        self._drop(node, "num_outputs")
        if parts[-1] != parts[0]:
            node.input.append(self.int64_constant(*parts))

    @staticmethod
    def _drop(node: onnx.NodeProto, name: str) -> None:
        kept = [entry for entry in node.attribute if entry.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)

    def _shape(self, node: onnx.NodeProto) -> None:
        """Write a Shape of some dimensions as a Slice of the whole shape."""

        attributes = attributes_of(node)
        step = _Steps(self, node)
        ends = (self.int64_constant(attributes.get("start", 0)), self.int64_constant(attributes.get("end", 2**31)))
        step.done(step("Slice", step("Shape", node.input[0]), *ends))

    def _hard_swish(self, node: onnx.NodeProto) -> None:
        """Write x HardSigmoid(x), with a slope of 1/6: the definition of the operator."""
        step, x = _Steps(self, node), node.input[0]
        step.done(step("Mul", x, step("HardSigmoid", x, alpha=1 / 6, beta=0.5)))

    def _layer_norm(self, node: onnx.NodeProto) -> None:
        """Write (x - mean) / sqrt(var + eps), then scale and shift unless they are trivial."""

        attributes = attributes_of(node)
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

    def _group_norm(self, node: onnx.NodeProto) -> None:
        """Write an InstanceNormalization of each group as one channel, then scale and shift by channel.

        Before opset 21, scale and shift were by group.
        """

        x, scale, shift = node.input
        rank = len(self.known.shapes.get(x, ()))
        if self.given < 21:  # an operator of the former meaning, as it is
            self._require_known(node)
            self.nodes.append(node)
            return
        if not rank:
            raise _no_older(node, self.opset)
        attributes = attributes_of(node)
        groups, step = attributes["num_groups"], _Steps(self, node)
        together = step("Reshape", x, self.int64_constant(0, groups, -1))
        one, none = (step("Expand", step.number(value, x), self.int64_constant(groups)) for value in (1.0, 0.0))
        epsilon = attributes.get("epsilon", EPSILON)
        normed = step("InstanceNormalization", together, one, none, epsilon=epsilon)
        y = step("Reshape", normed, step("Shape", x))
        by_channel = self.int64_constant(*range(1, rank - 1))
        scale, shift = (step("Unsqueeze", value, by_channel) if rank > 2 else value for value in (scale, shift))
        step.done(step("Add", step("Mul", y, scale), shift))

    def _gelu(self, node: onnx.NodeProto) -> None:
        """Write 0.5 x (1 + erf(x / sqrt 2)), or the tanh approximation, in the forms that ONNX Runtime fuses."""

        attributes = attributes_of(node)
        step, x = _Steps(self, node), node.input[0]
        if attributes.get("approximate", b"none") == b"tanh":
            cube = step("Pow", x, step.number(3.0, x))
            inner = step("Add", x, step("Mul", cube, step.number(0.044715, x)))
            bent = step("Tanh", step("Mul", inner, step.number(sqrt(2 / pi), x)))
            half = step("Mul", x, step.number(0.5, x))
            step.done(step("Mul", half, step("Add", bent, step.number(1.0, x))))
            return
        bent = step("Erf", step("Div", x, step.number(sqrt(2), x)))
        gated = step("Mul", x, step("Add", bent, step.number(1.0, x)))
        step.done(step("Mul", gated, step.number(0.5, x)))

    def _is_all(self, name: str, value: float) -> bool:
        return name in self.known.constants and bool((self.value_of(name) == value).all())

    def number(self, value: float, like: str) -> str:
        """Return the name of a scalar constant of the element type of another value, shared by value and type."""
        from onnx import TensorProto, helper

        key = self.known.types.get(like) or TensorProto.FLOAT, value
        if key not in self.numbers:
            array = np.asarray(value, helper.tensor_dtype_to_np_dtype(key[0]))
            self.numbers[key] = self._constant(f"constant_{len(self.numbers)}", array)
        return self.numbers[key]

    def int64_constant(self, *values: int) -> str:
        """Return the name of an int64 constant [n]."""
        if values not in self.integers:
            name = "_".join(map(str, ("whole", *values)))
            self.integers[values] = self._constant(name, np.asarray(values, dtype=np.int64))
        return self.integers[values]

    def _constant(self, name: str, array: NDArray[Any]) -> str:
        from onnx import numpy_helper

        name = self.names.value(name)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


class _Steps:
    """Writes the nodes that replace one node, under its module's name."""

    def __init__(self, lowering: _Lowering, node: onnx.NodeProto) -> None:
        self.lowering, self.node, self.count = lowering, node, 0
        self.number = lowering.number

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        self.count += 1
        output = self.lowering.names.value(f"{self.node.output[0]}.{self.count}")
        name = f"{self.node.name}.{self.count}"
        self.lowering.nodes.append(helper.make_node(operator, inputs, [output], name, **attributes))
        return output

    def mean(self, x: str) -> str:
        """Write the mean over the last axis; the axis is an attribute before opset 18, an input from then on."""
        if self.lowering.opset < 18:
            return self("ReduceMean", x, keepdims=1, axes=[-1])
        return self("ReduceMean", x, self.lowering.int64_constant(-1), keepdims=1)

    def done(self, last: str) -> None:
        """Give the last value the name of the replaced node's output."""
        assert self.lowering.nodes[-1].output[0] == last
        self.lowering.nodes[-1].output[0] = self.node.output[0]


class _Known(NamedTuple):
    """What is known of the values that a graph can read: its own and those around it, as branches may share names.

    Attributes:
        constants: The initializers.
        shapes: The shapes of the other values, with 0 for a dynamic dimension.
        types: The element types of all values.
    """

    constants: ChainMap[str, onnx.TensorProto]
    shapes: ChainMap[str, tuple[int, ...]]
    types: ChainMap[str, int]

    def within(self, graph: onnx.GraphProto) -> _Known:
        """What is known inside a graph."""
        constants = {weight.name: weight for weight in graph.initializer}
        values = {each.name: each.type.tensor_type for each in (*graph.input, *graph.output, *graph.value_info)}
        shapes = {name: tuple(dim.dim_value for dim in kind.shape.dim) for name, kind in values.items()}
        types = {name: weight.data_type for name, weight in constants.items()}
        types |= {name: kind.elem_type for name, kind in values.items()}
        return _Known(self.constants.new_child(constants), self.shapes.new_child(shapes), self.types.new_child(types))


def _is_ones(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether an attribute is dilations of 1, which pooling had before it had the attribute."""
    return name == "dilations" and set(values[name]) == {1}


def _no_older(node: onnx.NodeProto, opset: int) -> Refused:
    return Refused(
        f"{node.name} ({node.op_type}) cannot be written in opset {opset}.",
        hint="Export for a target with a newer opset, or give a newer --opset.",
        code="export.opset",
    )

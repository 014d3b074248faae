"""Convert a float32 graph to strongly typed bfloat16, and emulate it in float32 for runtimes without such kernels.

bfloat16 has the range of float32, so nothing overflows. Nodes stay in float32 if ONNX's schemas do not allow bfloat16
in the graph's opset (Conv below 22), or infer no type of an input, as after an operator of another domain. So do
subgraphs, those of If for example.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableSequence
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.graph_without_weights import inferred_element_types
from repaconv.graph.onnx_files import NewNames, opset_of, subgraphs_of
from repaconv.graph.operator_facts import RANDOM
from repaconv.graph.operator_schemas import FLOAT32_FUNCTIONS, allowed_types

if TYPE_CHECKING:
    import onnx

OWN_OUTPUT_TYPE = ("Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "Shape", *RANDOM)
"""Operators whose output type is set by an attribute, or is not a float."""


def to_bf16(model: onnx.ModelProto, keep: Collection[str] = ()) -> onnx.ModelProto:
    """Convert a graph to bfloat16 with float32 inputs and outputs.

    Args:
        model: The float32 graph; it is not modified.
        keep: Names of nodes that stay in float32.
    """
    import onnx

    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    _Typing(typed, frozenset(keep)).run()
    del typed.graph.value_info[:]
    return typed


class _Typing:
    """Converts the nodes in order; a node that computes in bfloat16 gets bfloat16 inputs."""

    def __init__(self, model: onnx.ModelProto, keep: frozenset[str]) -> None:
        import onnx

        self.keep = keep
        self.graph = model.graph
        self.opset = opset_of(model)
        self.names = NewNames(self.graph)
        self.inputs = {value.name for value in self.graph.input}
        floats = [w for w in self.graph.initializer if w.data_type == onnx.TensorProto.FLOAT]
        self.weights = {w.name: w for w in floats if w.name not in self.inputs}  # an input's is its default
        self.types = inferred_element_types(model)
        self.floats = {name for name, kind in self.types.items() if kind == onnx.TensorProto.FLOAT}
        self.low: set[str] = set()
        self.nodes: list[onnx.NodeProto] = []
        self.known: dict[str, str] = {}

    def run(self) -> None:
        outputs = [value.name for value in self.graph.output if value.name in self.floats]
        for node in list(self.graph.node):
            first = next((place for place, name in enumerate(node.input) if name in self.floats), None)
            known = all(name in self.types for name in node.input if name)
            computes = known and node.op_type not in OWN_OUTPUT_TYPE and first is not None and self._takes(node, first)
            for place, name in enumerate(node.input):
                if name in self.floats:
                    node.input[place] = self._in(name, f"{node.name}.{place}", computes and self._takes(node, place))
            for names, place in _inputs_of_subgraphs(node):
                if names[place] in self.floats:
                    names[place] = self._in(names[place], f"{node.name}.{names[place]}", low=False)
            self.nodes.append(node)
            self.low |= {name for name in node.output if name in self.floats and computes}
        for name in outputs:
            self._output(name)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in node.input} | {value.name for value in self.graph.output}
        used |= {names[place] for node in self.nodes for names, place in _inputs_of_subgraphs(node)} | self.inputs
        kept = [weight for weight in self.graph.initializer if weight.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)

    def _takes(self, node: onnx.NodeProto, place: int) -> bool:
        """Return whether an input of a node may be bfloat16."""
        if node.name in self.keep or node.op_type in FLOAT32_FUNCTIONS or subgraphs_of(node):
            return False
        return "tensor(bfloat16)" in allowed_types(node, place, self.opset)

    def _in(self, name: str, cast: str, low: bool) -> str:
        """Return a value in the wanted type, inserting one cast per value with this node name."""
        import onnx

        if (name in self.low) == low:
            return name
        if name in self.known:
            return self.known[name]
        other = self.names.value(f"{name}.bf16" if low else f"{name}.fp32")
        if name in self.weights:
            values = onnx.numpy_helper.to_array(self.weights[name])
            self.graph.initializer.append(_as_bf16(values, other))
        else:
            to = onnx.TensorProto.BFLOAT16 if low else onnx.TensorProto.FLOAT
            self.nodes.append(_cast(name, other, to, self.names.node(cast)))
        self.known[name] = other
        return other

    def _output(self, name: str) -> None:
        """Keep name and float32 type of a graph output."""
        import onnx

        if name not in self.low:
            return
        inner, last = self.names.value(f"{name}.bf16"), ""
        for node in self.nodes:
            for names in (node.input, node.output):
                for place, value in enumerate(names):
                    if value == name:
                        names[place], last = inner, last or node.name
        self.nodes.append(_cast(inner, name, onnx.TensorProto.FLOAT, self.names.node(f"{last}.out")))


def _inputs_of_subgraphs(node: onnx.NodeProto) -> Iterator[tuple[MutableSequence[str], int]]:
    """Yield each input of the nodes in a node's subgraphs: the list, and the place in it."""
    for graph in subgraphs_of(node):
        for inner in graph.node:
            yield from ((inner.input, place) for place in range(len(inner.input)))
            yield from _inputs_of_subgraphs(inner)


def rounded_in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a bfloat16 graph to float32 that rounds every value to bfloat16.

    This emulates hardware that accumulates in float32 and stores bfloat16.

    Args:
        model: A graph from `to_bf16`; it is not modified.
    """
    import onnx

    low = {name for name, kind in inferred_element_types(model).items() if kind == onnx.TensorProto.BFLOAT16}
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph = copied.graph
    names = NewNames(graph)
    for weight in graph.initializer:
        if weight.data_type == onnx.TensorProto.BFLOAT16:
            values = onnx.numpy_helper.to_array(weight).astype(np.float32)
            weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    to_low, to_float = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Cast" and node.input[0] in low:
            node.op_type = "Identity"
            del node.attribute[:]
        for place, name in enumerate(node.output):
            if name not in low or node.op_type == "Identity":
                continue
            rounded, step = names.value(f"{name}.low"), f"{node.name}.{place}"
            if node.op_type == "Cast":
                node.output[place] = rounded
            else:
                node.output[place] = names.value(f"{name}.exact")
                nodes.append(_cast(node.output[place], rounded, to_low, names.node(f"{step}.low")))
            nodes.append(_cast(rounded, name, to_float, names.node(f"{step}.rounded")))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return copied


def _cast(source: str, target: str, to: int, name: str) -> onnx.NodeProto:
    from onnx import helper

    return helper.make_node("Cast", [source], [target], name, to=to)


def _as_bf16(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], name: str) -> onnx.TensorProto:
    """Round a constant to bfloat16, to nearest with ties to even; what is finite and no NaN stays so.

    The lowest float32, of masks, would round to -inf, and a softmax of such numbers alone would be NaN.
    """
    from onnx import TensorProto, helper

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    sign = (bits >> 16).astype(np.uint16) & 0x8000
    upper[np.isfinite(values) & ((upper & 0x7FFF) == 0x7F80)] -= 1
    upper = np.where(np.isnan(values), sign | 0x7FC0, upper)
    return helper.make_tensor(name, TensorProto.BFLOAT16, values.shape, upper.tobytes(), raw=True)

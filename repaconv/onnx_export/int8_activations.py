"""Compute activations between int8 layers in 8 bits, which ONNX Runtime would compute in float32.

An activation between two quantized values maps 256 numbers to 256 numbers. ONNX Runtime has 8-bit kernels for a
sigmoid (a table), for a sum, which saturates, and for a product. Two of them give x g(x):

    x sigmoid(a x)              SiLU with a = 1, GELU with a = 1.702 (Hendrycks and Gimpel 2016)
    x clip(x / 6 + 1/2, 0, 1)   hard-swish (Howard et al. 2019)

The factor in g costs nothing: it is another scale of the same 8-bit numbers. Here a is fitted to each layer, by least
squares over the numbers that occur on calibration images. x sigmoid(a x) differs from GELU by up to 0.02, which is
about what 8 bits round. An activation is replaced if its error stays below `MOST_ERROR` times that of 8 bits alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.engines.contract import Feeds
from repaconv.graph.model_rewriting import as_stored, write
from repaconv.graph.nodes_and_constants import Array, Writer, constant, made_by, nodes_of, scalar, shape_of_constant
from repaconv.graph.operator_facts import ARITHMETIC, UNARY

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MOST_ERROR = 1.5
"""Limit of an activation's error, relative to the error that 8 bits have there anyway; both are root mean squares."""
SAME = 1e-5
"""Relative difference below which an activation is hard-swish; it is evaluated in float32."""
SLOPES = np.linspace(0.5, 2, 151)
"""Values of a that are tried."""
CODES = np.arange(256)
"""The values of uint8."""
ELEMENTWISE = {*UNARY, *ARITHMETIC, "Clip", "Max", "Min", "Pow"}
ALONE = ("Gelu", "HardSwish", "Mish", "Swish")
"""Operators that may be an activation of one node. Others have 8-bit kernels of their own, or none is faster."""
DEPTH = 12
"""Maximum number of nodes in one activation."""


class _Activation(NamedTuple):
    """An elementwise function between two quantized values.

    Attributes:
        nodes: Its nodes, in the graph's order.
        before: The DequantizeLinear whose output they read.
        after: The QuantizeLinear that alone reads what they compute.
    """

    nodes: list[ir.Node]
    before: ir.Node
    after: ir.Node


class _Gate(NamedTuple):
    """g(x): a sigmoid of slope x, or slope x + 1/2 between 0 and 1."""

    is_sigmoid: bool
    slope: float

    def __call__(self, x: Array) -> Array:
        if self.is_sigmoid:
            return 0.5 + 0.5 * np.tanh(0.5 * self.slope * x)
        return np.clip(self.slope * x + 0.5, 0, 1)


HARD_SIGMOID = _Gate(False, 1 / 6)


def with_8_bit_activations(proto: onnx.ModelProto, calls: Iterable[Feeds]) -> onnx.ModelProto:
    """Replace activations between uint8 values where that adds little to the error.

    Args:
        proto: The int8 graph, with QuantizeLinear and DequantizeLinear pairs; it is not modified.
        calls: Calibration inputs, by input name.

    Returns:
        The graph with activations as QuantizeLinear and DequantizeLinear around Sigmoid or Add, and Mul, which ONNX
        Runtime combines to QLinearSigmoid, QLinearAdd and QLinearMul; ``proto`` itself if nothing is replaced.
    """
    model = as_stored(proto)
    found = [each for after in nodes_of(model, "QuantizeLinear") if (each := _activation_before(after))]
    if not found:
        return proto
    gates = [_gate(each, counts) for each, counts in zip(found, _counts(proto, found, calls), strict=True)]
    for each, gate in zip(found, gates, strict=True):
        if gate:
            _replace(model, each, gate)
    return write(model) if any(gates) else proto


def _activation_before(after: ir.Node) -> _Activation | None:
    """The elementwise function of one quantized value that a QuantizeLinear reads."""
    inside, roots, todo = {after}, set(), [after.inputs[0]]
    while todo and len(inside) <= DEPTH:
        value = todo.pop()
        node = made_by(value, *ELEMENTWISE)
        if node is None:
            roots.add(value)
        elif node not in inside:
            inside.add(node)
            todo += [each for each in node.inputs if each is not None and not _is_number(each)]
    before = made_by(next(iter(roots)), "DequantizeLinear") if len(roots) == 1 and not todo else None
    if before is None or after.graph is None or made_by(before.inputs[0], "QuantizeLinear") is None:
        return None
    inner = [value for node in inside - {after} for value in node.outputs]
    if not inner or any(value.is_graph_output() or not inside.issuperset(value.consumers()) for value in inner):
        return None
    if not (_is_per_tensor_uint8(before) and _is_per_tensor_uint8(after)):
        return None
    nodes = [node for node in after.graph if node in inside - {after}]
    return _Activation(nodes, before, after) if len(nodes) > 1 or nodes[0].op_type in ALONE else None


def _is_number(value: ir.Value | None) -> bool:
    """Whether a value is a constant of one entry that adds no axis to what it is combined with."""
    return len(shape_of_constant(value) or ()) < 2 and scalar(value) is not None


def _is_per_tensor_uint8(node: ir.Node) -> bool:
    zero = constant(node.inputs[2]) if len(node.inputs) == 3 else None
    return scalar(node.inputs[1]) is not None and zero is not None and zero.dtype == np.uint8


def _counts(proto: onnx.ModelProto, found: Sequence[_Activation], calls: Iterable[Feeds]) -> list[Array]:
    """How often each of the 256 numbers occurs before each activation."""
    import onnx

    probe, names = onnx.ModelProto(), [str(each.before.inputs[0].name) for each in found]
    probe.CopyFrom(proto)
    kind = onnx.TensorProto.UINT8
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.helper.make_tensor_value_info(name, kind, None) for name in dict.fromkeys(names))
    session = _session(probe)
    counts = [np.zeros(CODES.size) for _ in found]
    for call in calls:
        for total, values in zip(counts, session.run(names, dict(call)), strict=True):
            total += np.bincount(values.ravel(), minlength=CODES.size)
    return counts


def _gate(each: _Activation, counts: Array) -> _Gate | None:
    """The gate with the smallest error on numbers that occur so often; None if that error is too large."""
    x = _dequantized(each.before, CODES)
    y, step, weights = _outputs(each, x), x[1] - x[0], counts / max(counts.sum(), 1)
    if not np.isfinite(y).all():
        return None
    by_input = np.square(np.gradient(y, step) * step) / 12

    def error(outputs: Array) -> float:
        scale, zero = _scale_and_zero_point(each.after)
        rounded = _dequantized(each.after, np.clip(np.round(outputs / scale) + zero, 0, CODES[-1]))
        return float(np.sqrt(weights @ (np.square(rounded - y) + by_input)))

    gate = HARD_SIGMOID
    if np.abs(x * gate(x) - y).max() > SAME * np.abs(y).max():
        gate = min((_Gate(True, a) for a in SLOPES), key=lambda gate: float(weights @ np.square(x * gate(x) - y)))
    return gate if error(x * _rounded(gate(x))) <= MOST_ERROR * error(y) else None


def _scale_and_zero_point(node: ir.Node) -> tuple[float, float]:
    scale, zero = (scalar(value) for value in node.inputs[1:])
    assert scale is not None
    assert zero is not None
    return scale, zero


def _dequantized(node: ir.Node, codes: Array) -> Array:
    scale, zero = _scale_and_zero_point(node)
    numbers: Array = scale * (codes - zero)
    return numbers


def _rounded(gate: Array) -> Array:
    """Array from 0 to 1 as 8 bits have them."""
    rounded: Array = np.round(gate * CODES[-1]) / CODES[-1]
    return rounded


def _outputs(each: _Activation, x: Array) -> Array:
    """What an activation makes of these numbers."""
    import onnx
    import onnx_ir as ir

    given, last = each.before.outputs[0].name, each.after.inputs[0].name
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (given, last)]
    scalars = {value.name: value.const_value for node in each.nodes for value in node.inputs if _is_number(value)}
    constants = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in scalars.items()]
    nodes = [ir.to_proto(node) for node in each.nodes]
    graph = onnx.helper.make_graph(nodes, "activation", ends[:1], ends[1:], constants)
    opset = each.after.graph.opset_imports[""]
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    (outputs,) = _session(model).run(None, {given: x.astype(np.float32)})
    made: Array = outputs.astype(np.float64).ravel()
    return made


def _session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # errors are also raised
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])


def _replace(model: ir.Model, each: _Activation, gate: _Gate) -> None:
    """Write x g(x) with each step in uint8."""
    write, x, last = Writer(model, each.nodes[-1]), each.before.outputs[0], each.after.inputs[0]
    codes, _, zero = each.before.inputs
    assert last is not None
    assert zero is not None
    scale, _ = _scale_and_zero_point(each.before)
    whole, least = write.constant(1 / CODES[-1]), write.exactly(np.uint8(0))
    sloped = write("DequantizeLinear", codes, write.constant(scale * gate.slope), zero)
    if gate.is_sigmoid:
        made = write("Sigmoid", sloped)
    else:
        half = write("DequantizeLinear", write.exactly(np.uint8(CODES[-1])), write.constant(0.5 / CODES[-1]), least)
        made = write("Add", sloped, half)
    rounded = write("QuantizeLinear", made, whole, least)
    rounded.dtype = zero.dtype
    product = write("Mul", x, write("DequantizeLinear", rounded, whole, least))
    name = last.name
    write.replace(last, product)
    model.graph.remove(each.nodes, safe=True)
    product.name = name

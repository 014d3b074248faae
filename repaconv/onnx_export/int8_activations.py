"""Compute activations between int8 layers in 8 bits, which ONNX Runtime would compute in float32.

An activation between two quantized values maps 256 numbers to 256 numbers. ONNX Runtime has 8-bit kernels for a
sigmoid (a table), for a sum, which saturates, and for a product. Two of them give c x g(x):

    c x sigmoid(a x)              SiLU with a = 1, GELU with a = 1.702 (Hendrycks and Gimpel 2016)
    c x clip(x / 6 + 1/2, 0, 1)   hard-swish (Howard et al. 2019)

The factors cost nothing: they are other scales of the same 8-bit numbers. c is 1 unless a fold moved a factor into the
next layer. For a sigmoid, a is fitted to each layer: over the values that occur on calibration inputs the mean stays
the same, so that nothing adds up in what sums over pixels. GELU then differs by up to 0.03, which is about what 8 bits
round. What differs more, as the limits below have it, stays in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.engines.contract import Feeds
from repaconv.graph.activation_patterns import MOST_NODES
from repaconv.graph.models_in_onnx_ir import as_stored, write
from repaconv.graph.nodes_and_constants import Array, Writer, constant, made_by, nodes_of, scalar, shape_of_constant
from repaconv.graph.operator_facts import ARITHMETIC, UNARY

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MOST_ERROR = 1.5
"""Limit of an activation's error, relative to the error that 8 bits have there anyway; both are root mean squares."""
MOST_BIAS = 0.1
"""Limit of the mean difference from c x g(x), relative to the same."""
MOST_DIFFERENCE = 0.03
"""Limit of the difference from c x g(x) at any value that occurs, relative to the activation's largest value."""
HARD_SWISH_RTOL = 1e-5
"""Relative difference up to which an activation is hard-swish; it is evaluated in float32."""
SLOPES = np.linspace(0.5, 2, 1501)
"""Values of a that are tried."""
SATURATED_INPUT = 1e4
"""Where g is 1, so that the activation is c x."""
LARGEST_INPUT = 1e6
"""Largest input of an activation: ONNX Runtime's 8-bit sum computes in 32 bits, where larger ones wrap to 0."""
UINT8_VALUES = np.arange(256)
"""The values of uint8."""
ELEMENTWISE = {*UNARY, *ARITHMETIC, "Clip", "Max", "Min", "Pow"}
SINGLE_NODES = ("Gelu", "HardSwish", "Swish")
"""Activations of one node that are replaced. Relu, LeakyRelu, Clip and Sigmoid are computed in 8 bits as they are."""


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
    """c g(x), with g a sigmoid of slope x, or slope x + 1/2 between 0 and 1.

    Attributes:
        is_sigmoid: Whether g is a sigmoid.
        slope: Its slope.
        factor: c.
    """

    is_sigmoid: bool
    slope: float
    factor: float = 1.0

    def __call__(self, x: Array, *, rounded: bool = False) -> Array:
        """c g(x), with g as it is or rounded to multiples of 1/255."""
        if self.is_sigmoid:
            gate: Array = 0.5 + 0.5 * np.tanh(0.5 * self.slope * x)
        else:
            gate = np.clip(self.slope * x + 0.5, 0, 1)
        return self.factor * (np.round(gate * UINT8_VALUES[-1]) / UINT8_VALUES[-1] if rounded else gate)


HARD_SIGMOID = _Gate(False, 1 / 6)


def with_8_bit_activations(
    proto: onnx.ModelProto, calls: Iterable[Feeds], keep: Collection[str] = ()
) -> onnx.ModelProto:
    """Replace activations between uint8 values where that adds little to the error.

    Args:
        proto: The int8 graph, with QuantizeLinear and DequantizeLinear pairs; it is not modified.
        calls: Calibration inputs, by input name.
        keep: Names of nodes that stay in float32.

    Returns:
        The graph with activations as QuantizeLinear and DequantizeLinear around Sigmoid or Add, and Mul, which ONNX
        Runtime combines to QLinearSigmoid, QLinearAdd and QLinearMul; ``proto`` itself if nothing is replaced.
    """
    model = as_stored(proto)
    order = {node: place for place, node in enumerate(model.graph)}
    found = [one for after in nodes_of(model, "QuantizeLinear") if (one := _activation_before(after, order))]
    found = [one for one in found if not any(node.name in keep for node in one.nodes)]
    if not found:
        return proto
    gates = [_fitted_gate(one, counts) for one, counts in zip(found, _counts(proto, found, calls), strict=True)]
    for one, gate in zip(found, gates, strict=True):
        if gate:
            _replace(model, one, gate)
    return write(model) if any(gates) else proto


# Which activations there are


def _activation_before(after: ir.Node, order: Mapping[ir.Node, int]) -> _Activation | None:
    """The elementwise function of one uint8 value that a QuantizeLinear reads."""
    inside, roots, todo = set[Any](), set(), [after.inputs[0]]
    while todo and len(inside) <= MOST_NODES:
        value = todo.pop()
        node = made_by(value, *ELEMENTWISE)
        if node is None:
            roots.add(value)
        elif node not in inside:
            inside.add(node)
            todo += [given for given in node.inputs if given is not None and not _is_number(given)]
    before = made_by(next(iter(roots)), "DequantizeLinear") if len(roots) == 1 and not todo else None
    if before is None or made_by(before.inputs[0], "QuantizeLinear") is None:
        return None
    found = _Activation(sorted(inside, key=order.__getitem__), before, after)
    return found if _may_be_replaced(found) else None


def _may_be_replaced(activation: _Activation) -> bool:
    nodes, before, after = activation
    if not nodes or (len(nodes) == 1 and nodes[0].op_type not in SINGLE_NODES):
        return False
    readers = {*nodes, after}
    alone = all(
        not value.is_graph_output() and readers.issuperset(value.consumers())
        for node in nodes
        for value in node.outputs
    )
    return alone and _is_per_tensor_uint8(before) and _is_per_tensor_uint8(after)


def _is_number(value: ir.Value | None) -> bool:
    """Whether a value is a constant of one entry and at most one axis, as what it is combined with has, too."""
    return len(shape_of_constant(value) or ()) < 2 and scalar(value) is not None


def _is_per_tensor_uint8(node: ir.Node) -> bool:
    zero = constant(node.inputs[2]) if len(node.inputs) == 3 else None
    return scalar(node.inputs[1]) is not None and zero is not None and zero.dtype == np.uint8


# Which gate computes one


def _counts(proto: onnx.ModelProto, found: Sequence[_Activation], calls: Iterable[Feeds]) -> list[Array]:
    """How often each of the 256 numbers occurs before each activation."""
    import onnx

    probe, names = onnx.ModelProto(), [str(one.before.inputs[0].name) for one in found]
    probe.CopyFrom(proto)
    kind = onnx.TensorProto.UINT8
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.helper.make_tensor_value_info(name, kind, None) for name in dict.fromkeys(names))
    session = _session(probe)
    counts = [np.zeros(UINT8_VALUES.size) for _ in found]
    for call in calls:
        for total, values in zip(counts, session.run(names, dict(call)), strict=True):
            total += np.bincount(values.ravel(), minlength=UINT8_VALUES.size)
    return counts


def _fitted_gate(activation: _Activation, counts: Array) -> _Gate | None:
    """The gate that is nearest to an activation, over values that occur so often; None if it exceeds a limit."""
    before, after = activation.before, activation.after
    if not np.isfinite([_scale_and_zero_point(node) for node in (before, after)]).all():
        return None
    x = _dequantized(before, UINT8_VALUES)
    if np.abs(x).max() > LARGEST_INPUT:
        return None
    outputs = _outputs(activation, np.append(x, SATURATED_INPUT))
    y, far = outputs[:-1], outputs[-1]
    step, weights = x[1] - x[0], counts / max(counts.sum(), 1)
    if not np.isfinite(outputs).all() or far <= 0:
        return None
    gate = _nearest(x, y, weights, factor=far / SATURATED_INPUT)
    difference = x * gate(x) - y
    by_input = np.square(np.gradient(y, step) * step) / 12

    def error(outputs: Array) -> float:
        scale, zero = _scale_and_zero_point(after)
        rounded = _dequantized(after, np.clip(np.round(outputs / scale) + zero, 0, UINT8_VALUES[-1]))
        return float(np.sqrt(weights @ (np.square(rounded - y) + by_input)))

    usual, occurs = error(y), counts > 0
    within = (
        error(x * gate(x, rounded=True)) <= MOST_ERROR * usual
        and abs(weights @ difference) <= MOST_BIAS * usual
        and np.abs(difference[occurs]).max(initial=0) <= MOST_DIFFERENCE * np.abs(y[occurs]).max(initial=0)
    )
    return gate if within else None


def _nearest(x: Array, y: Array, weights: Array, factor: float) -> _Gate:
    """Hard-swish if y is that, otherwise the sigmoid whose differences have a mean of 0."""
    hard = HARD_SIGMOID._replace(factor=factor)
    if np.abs(x * hard(x) - y).max() <= HARD_SWISH_RTOL * np.abs(y).max():
        return hard
    sigmoids = (_Gate(True, float(slope), factor) for slope in SLOPES)
    return min(sigmoids, key=lambda gate: abs(float(weights @ (x * gate(x) - y))))


def _scale_and_zero_point(node: ir.Node) -> tuple[float, float]:
    scale, zero = (scalar(value) for value in node.inputs[1:])
    assert scale is not None
    assert zero is not None
    return scale, zero


def _dequantized(node: ir.Node, codes: Array) -> Array:
    scale, zero = _scale_and_zero_point(node)
    numbers: Array = scale * (codes - zero)
    return numbers


def _outputs(activation: _Activation, x: Array) -> Array:
    """What an activation makes of these numbers, in float32."""
    import onnx
    import onnx_ir as ir

    given, last = activation.before.outputs[0].name, activation.after.inputs[0].name
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (given, last)]
    numbers = {value.name: value.const_value for node in activation.nodes for value in node.inputs if _is_number(value)}
    constants = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in numbers.items()]
    nodes = [ir.to_proto(node) for node in activation.nodes]
    graph = onnx.helper.make_graph(nodes, "activation", ends[:1], ends[1:], constants)
    imports = activation.after.graph.opset_imports.items()
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in imports]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    (outputs,) = _session(model).run(None, {given: x.astype(np.float32)})
    made: Array = outputs.astype(np.float64).ravel()
    return made


def _session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # errors are also raised
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])


# How it is written


def _replace(model: ir.Model, activation: _Activation, gate: _Gate) -> None:
    """Write c x g(x) with each step in uint8."""
    write, before = Writer(model, activation.nodes[-1]), activation.before
    x, last, (codes, _, zero) = before.outputs[0], activation.after.inputs[0], before.inputs
    assert last is not None
    assert zero is not None
    scale, _ = _scale_and_zero_point(before)
    least = write.exactly(np.uint8(0))
    sloped = write("DequantizeLinear", codes, write.constant(scale * gate.slope), zero)
    if gate.is_sigmoid:
        made = write("Sigmoid", sloped)
    else:
        half = write(
            "DequantizeLinear", write.exactly(np.uint8(UINT8_VALUES[-1])), write.constant(0.5 / UINT8_VALUES[-1]), least
        )
        made = write("Add", sloped, half)
    rounded = write("QuantizeLinear", made, write.constant(1 / UINT8_VALUES[-1]), least)
    rounded.dtype = zero.dtype
    product = write("Mul", x, write("DequantizeLinear", rounded, write.constant(gate.factor / UINT8_VALUES[-1]), least))
    name = last.name
    write.replace(last, product)
    model.graph.remove(activation.nodes, safe=True)
    product.name = name

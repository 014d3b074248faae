"""Convert a float32 graph to strongly typed float16 with FP32 nodes, or to int8 with QuantizeLinear pairs.

onnxruntime's converter and quantizer do the conversion; which nodes stay in float32 is decided from measured values.
bfloat16, which the converter does not support, is in `repaconv.onnx_export.bfloat16`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core.errors import Refused
from repaconv.core.progress import only_errors
from repaconv.core.temporary_folders import scratch_folder
from repaconv.engines.contract import Feeds
from repaconv.graph.onnx_files import NewNames, all_graphs, opset_of, subgraphs_of
from repaconv.graph.operator_schemas import FLOAT32_FUNCTIONS, allowed_types

if TYPE_CHECKING:
    import onnx

LARGEST_FP16 = 65504.0
# Headroom for images that were not measured.
FP16_HEADROOM = 8.0
# Their kernels square the input, and some accumulate the squares in float16.
SQUARING = ("LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization", "LpNormalization")
QUANTIZED = ("MatMul", "Gemm", "Conv")
# From opset 21 on ONNX Runtime (1.31) changes int8 zero points to uint8 without their output_dtype. NNCF graphs were
# not tried with newer opsets.
INT8_OPSET = 20
SYMMETRIC = {"ActivationSymmetric": True, "QuantizeBias": False}
LARGEST_7_BIT = 64
"""Largest magnitude of 7-bit weights: two products of them and uint8 fit into 16 bits."""
# Conv keeps its output quantization: ONNX Runtime's int8 Conv outputs int8, and without it computes in float32.
NO_OUTPUT_QUANTIZATION = {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}


def nodes_beyond_fp16(model: onnx.ModelProto, largest: Mapping[str, float]) -> list[str]:
    """Return the names of nodes whose values exceed the range of float16.

    Args:
        model: The float32 graph.
        largest: max|value| by value name, measured in float32.
    """
    import onnx

    found = []
    weights = {
        weight.name: float(np.abs(onnx.numpy_helper.to_array(weight)).max(initial=0.0))
        for weight in model.graph.initializer
        if weight.data_type == onnx.TensorProto.FLOAT
    }
    known = {**weights, **largest}
    for node in model.graph.node:
        reach = max((known.get(name, 0.0) for name in (*node.input, *node.output)), default=0.0)
        squared = max((known.get(name, 0.0) for name in node.input[:1]), default=0.0) ** 2
        limit = LARGEST_FP16 / FP16_HEADROOM
        if not reach <= limit or (node.op_type in SQUARING and not squared <= limit):
            found.append(node.name)
    return found


def nodes_without_fp16(model: onnx.ModelProto) -> list[str]:
    """Return the names of nodes that cannot compute in float16, but for those that the converter knows itself.

    ONNX's schema of Celu, for example, has float32 alone.
    """
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    opset, found = opset_of(model), []
    for node in model.graph.node:
        types = allowed_types(node, 0, opset) if node.input else ()
        is_wide = "tensor(float)" in types and "tensor(float16)" not in types
        if node.op_type not in DEFAULT_OP_BLOCK_LIST and (is_wide or node.op_type in FLOAT32_FUNCTIONS):
            found.append(node.name)
    return found


def to_fp16(model: onnx.ModelProto, keep: Sequence[str]) -> onnx.ModelProto:
    """Convert a graph to float16 with float32 inputs and outputs.

    Args:
        model: The float32 graph; it is left as it is.
        keep: Names of nodes that stay in float32.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    constants = _take_constant_outputs(copied.graph)
    _give_own_weights(copied.graph, lambda node, _: None if node.name in keep else "fp16")
    for node in copied.graph.node:
        node.doc_string = ORIGINAL_NODE
    with only_errors():
        typed = OnnxModel(convert_float_to_float16(copied, keep_io_types=True, node_block_list=list(keep)))
        _remove_inner_casts(typed.model.graph)
        typed.topological_sort(is_deterministic=True)  # the converter appends its casts at the end
    sorted_model: onnx.ModelProto = typed.model
    if any(map(subgraphs_of, sorted_model.graph.node)):  # whose inputs the converter's sort does not read
        sorted_model = _sorted(sorted_model)
    sorted_model.graph.initializer.extend(constants)
    if constants:
        del sorted_model.graph.output[:]
        sorted_model.graph.output.extend(model.graph.output)
    return sorted_model


def _take_constant_outputs(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Remove and return the constants that are outputs, which the converter would cast from a value that nothing makes.

    Nodes that read such a constant get a copy of it.
    """
    import onnx

    names = {value.name for value in graph.output}
    constants = [weight for weight in graph.initializer if weight.name in names]
    for weight in constants:
        copy = onnx.TensorProto()
        copy.CopyFrom(weight)
        copy.name = f"{weight.name}.read"
        graph.initializer.remove(weight)
        graph.output.remove(next(value for value in graph.output if value.name == weight.name))
        reads = [
            (node.input, place) for node in graph.node for place, name in enumerate(node.input) if name == weight.name
        ]
        for inputs, place in reads:
            inputs[place] = copy.name
        if reads:
            graph.initializer.append(copy)
    return constants


def _sorted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Sort the nodes of a graph by what they and their subgraphs read."""
    import onnx_ir as ir
    from onnx_ir.passes.common import TopologicalSortPass

    read = ir.from_proto(model)
    TopologicalSortPass()(read)
    return ir.to_proto(read)


def _give_own_weights(graph: onnx.GraphProto, group: Callable[[onnx.NodeProto, int], Hashable]) -> None:
    """Give each group of nodes that read a weight a copy of it, since converters change it for all readers, in place.

    Args:
        graph: The graph; its outputs and subgraphs read the weight itself.
        group: Returns a key of the nodes that a weight is changed for in the same way, by a node and an input's place;
            None for nodes that read the weight itself.
    """
    import onnx

    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    weights = {weight.name: weight for weight in graph.initializer if weight.data_type in floats}
    names = NewNames(graph)
    inner = (part for node in graph.node for part in subgraphs_of(node))
    itself = {name for part in inner for each in all_graphs(part) for node in each.node for name in node.input}
    itself |= {value.name for value in (*graph.input, *graph.output)}
    reads = [(node, place, name) for node in graph.node for place, name in enumerate(node.input) if name in weights]
    itself |= {name for node, place, name in reads if group(node, place) is None}
    copies: dict[tuple[str, Hashable], str] = {}
    for node, place, name in reads:
        key = name, group(node, place)
        if key[1] is None:
            continue
        if key not in copies and name not in itself:
            copies[key] = name
            itself.add(name)
        elif key not in copies:
            copies[key] = names.value(f"{name}.{len(copies)}")
            graph.initializer.add().CopyFrom(weights[name])
            graph.initializer[-1].name = copies[key]
        node.input[place] = copies[key]


def _remove_unread_weights(graph: onnx.GraphProto) -> None:
    read = {value.name for value in (*graph.input, *graph.output)}
    read |= {name for part in all_graphs(graph) for node in part.node for name in node.input}
    for weight in [weight for weight in graph.initializer if weight.name not in read]:
        graph.initializer.remove(weight)


ORIGINAL_NODE = "of the graph itself"
"""Marks nodes that are not the converter's; it gives some of them other names and outputs."""


def _remove_inner_casts(graph: onnx.GraphProto) -> None:
    """Remove casts to float16 and back between adjacent FP32 nodes, which the converter inserts at every value.

    The converter also inserts one cast per input under the same name, so that x * x makes two equal nodes; one is
    removed. Where a cast of the graph itself, from bool for example, is to float16 now and the converter added one to
    float32 after it, the latter takes the former's input.
    """
    from onnx import TensorProto

    nodes = {tuple(node.output): node for node in graph.node}.values()
    casts = {node.output[0]: node for node in nodes if node.op_type == "Cast"}
    kept_in_float = {}
    for name, node in casts.items():
        before = casts.get(node.input[0])
        if _casts_to(node, TensorProto.FLOAT) and before is not None and _casts_to(before, TensorProto.FLOAT16):
            if before.doc_string == ORIGINAL_NODE:
                node.input[0] = before.input[0]
            else:
                kept_in_float[name] = before.input[0]
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = kept_in_float.get(name, name)
    used = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    left = [node for node in nodes if node.op_type != "Cast" or node.output[0] in used]
    used = {name for node in left for name in node.input} | {value.name for value in graph.output}
    left = [node for node in left if node.op_type != "Cast" or node.output[0] in used]
    for node in left:
        node.doc_string = ""
    del graph.node[:]
    graph.node.extend(left)


QUANTIZERS = ("onnxruntime", "onnxruntime-symmetric", "nncf", "nncf-symmetric")
"""INT8 quantizers. -symmetric: int8 activations with zero point 0, which OpenVINO multiplies faster.

Values that are never or rarely negative, as after GELU, then have half the resolution.
"""
SYMMETRIC_SUFFIX = "-symmetric"


class Int8(NamedTuple):
    """INT8 settings of a device.

    Attributes:
        symmetric: Zero points of 0 and float32 biases, as TensorRT requires. If False, ``by`` decides; its default is
            uint8 activations, which ONNX Runtime multiplies faster.
        narrow: 7-bit weights (`reduce_range`): x86-64 without VNNI adds two products in 16 bits, which saturates.
        by: One of `QUANTIZERS`.
        activations: Whether activations between int8 layers are computed in 8 bits, too; for asymmetric uint8 by
            ONNX Runtime's quantizer only, since it is for that runtime's kernels.
    """

    symmetric: bool = False
    narrow: bool = False
    by: str = QUANTIZERS[0]
    activations: bool = False

    @property
    def about_zero(self) -> bool:
        """Whether activations are int8 with zero points of 0."""
        return self.symmetric or self.by.endswith(SYMMETRIC_SUFFIX)

    def opset(self, newest: int) -> int:
        """Return the newest opset in which the int8 graph is written, if the float32 graph may have ``newest``."""
        return min(newest, INT8_OPSET) if self.symmetric or self.by != QUANTIZERS[0] else newest


DEFAULT_INT8 = Int8()


def to_int8(
    model: onnx.ModelProto, calls: Iterable[Feeds], keep: Sequence[str] = (), how: Int8 = DEFAULT_INT8
) -> onnx.ModelProto:
    """Quantize linear layers and convolutions to int8 per output channel, calibrated on images; the rest stays float32.

    With ONNX Runtime's quantizer for CPUs, products of two activations (attention scores and values) and products
    by a stack of matrices also stay in float32, and outputs of linear layers are not quantized. ONNX Runtime then
    takes 0.8 of the time, with a smaller error (make bench-precision). For NNCF see
    `repaconv.onnx_export.nncf_quantization`.

    Args:
        model: The float32 graph.
        calls: Calibration inputs, by the graph's input names or in their order.
        keep: Names of nodes that stay in float32.
        how: INT8 settings of the device.

    Raises:
        Refused: If nothing is quantized, or if NNCF rejects the graph.
    """
    from repaconv.onnx_export.int8_activations import with_8_bit_activations
    from repaconv.onnx_export.nncf_quantization import quantize_with_nncf

    stored = {weight.name for weight in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in stored]
    named = [dict(zip(names, map(call.get, _order(names, call)), strict=True)) for call in calls]
    if how.by.startswith("nncf"):
        low = quantize_with_nncf(model, named, keep, narrow=how.narrow, symmetric=how.about_zero)
    else:
        low = _by_onnxruntime(model, iter(named), keep, how)
        low = with_8_bit_activations(low, named, keep) if how.activations and not how.about_zero else low
    if not any(node.op_type == "QuantizeLinear" for node in low.graph.node):
        raise Refused(
            "int8 quantizes nothing in this graph: it has no product by a matrix of weights and no convolution, or all "
            "stay in FP32.",
            hint="Export it with --precision fp32 or fp16.",
            code="export.int8-nothing",
        )
    return low


def _by_onnxruntime(
    model: onnx.ModelProto, calls: Iterator[dict[str, Any]], keep: Sequence[str], how: Int8
) -> onnx.ModelProto:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(calls, None)

    prepared = onnx.ModelProto()
    prepared.CopyFrom(model)
    left = [*keep, *([] if how.symmetric else _without_a_matrix(model))]
    left += _gemms_with_another_bias(prepared.graph)
    _give_own_weights(prepared.graph, lambda node, place: None if node.name in left else _scales_of(node, place))
    _remove_unread_weights(prepared.graph)
    with scratch_folder() as folder, only_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a value that is NaN everywhere
        single, path = folder / "fp32.onnx", folder / "int8.onnx"
        onnx.save(prepared, single)  # given a model in memory, the quantizer modifies it
        try:
            quantize_static(
                str(single),
                str(path),
                Reader(),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(QUANTIZED),
                per_channel=True,
                reduce_range=how.narrow,
                activation_type=QuantType.QInt8 if how.about_zero else QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=left,
                extra_options=SYMMETRIC
                if how.symmetric
                else {**NO_OUTPUT_QUANTIZATION, "ActivationSymmetric": how.about_zero},
            )
        except AssertionError as error:
            if "scale" not in str(error):  # "scale issue": NaN is not at least 0
                raise
            raise Refused(
                "a value of the graph is NaN on every calibration image, so that int8 has no range for it.",
                hint="Give images of the kind that the network is for, or export it with --precision fp32.",
                code="export.int8-ranges",
            ) from error
        return onnx.load(path)


def _gemms_with_another_bias(graph: onnx.GraphProto) -> list[str]:
    """Give every Gemm a bias of one number per column and beta = 1, which the quantizer takes for granted, in place.

    Returns:
        The names of nodes whose bias is computed and scaled, or differs between rows.
    """
    from onnx import numpy_helper

    weights, names, others = {weight.name: weight for weight in graph.initializer}, NewNames(graph), []
    for node in graph.node:
        if node.op_type != "Gemm" or len(node.input) < 3 or not node.input[2]:
            continue
        entries = {entry.name: entry for entry in node.attribute}
        beta = entries["beta"].f if "beta" in entries else 1.0
        stored, matrix = weights.get(node.input[2]), weights.get(node.input[1])
        if stored is None:
            others += [node.name] if beta != 1 else []
            continue
        bias = numpy_helper.to_array(stored)
        if bias.size == 1 and matrix is not None:
            rows = "transB" in entries and entries["transB"].i
            bias = np.broadcast_to(bias.reshape(1), matrix.dims[0 if rows else 1])
        if bias.shape[-1:] != (bias.size,):
            others.append(node.name)
        elif beta != 1 or bias.shape != tuple(stored.dims):
            node.input[2] = names.value(stored.name)
            graph.initializer.append(numpy_helper.from_array((beta * bias).astype(bias.dtype).ravel(), node.input[2]))
            if "beta" in entries:
                node.attribute.remove(entries["beta"])
    return others


def _scales_of(node: onnx.NodeProto, place: int) -> Hashable:
    """Return a key of the axis and the scales with which a layer's weight is quantized; None for other operators.

    A bias has those of the weight and the input.
    """
    if node.op_type not in QUANTIZED:
        return None
    if place == 2:
        return str(node.output[0])
    flipped = node.op_type == "Gemm" and any(
        entry.name == f"trans{'AB'[place]}" and entry.i for entry in node.attribute
    )
    return node.op_type, place, flipped


def has_8_bit_weights(model: onnx.ModelProto) -> bool:
    """Return whether int8 weights use more than 7 bits."""
    import onnx

    int8 = (w for w in model.graph.initializer if w.data_type == onnx.TensorProto.INT8 and len(w.dims) > 1)
    return any(np.abs(onnx.numpy_helper.to_array(w).astype(np.int16)).max(initial=0) > LARGEST_7_BIT for w in int8)


def _order(names: Sequence[str], call: Feeds) -> Sequence[str]:
    return names if set(names) == set(call) else list(call)


def _without_a_matrix(model: onnx.ModelProto) -> list[str]:
    """Return the products of two activations, and those by a stack of matrices.

    ONNX Runtime 1.31 cannot run the latter with a scale per column.
    """
    axes = {weight.name: len(weight.dims) for weight in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if (node.op_type in QUANTIZED and axes.keys().isdisjoint(node.input))
        or (node.op_type == "MatMul" and axes.get(node.input[1], 0) > 2)
    ]


def unquantized_layers(model: onnx.ModelProto, precision: str) -> tuple[str, ...]:
    """Return the names of products and convolutions that are not in the given precision."""
    import onnx

    types = {w.name: w.data_type for w in model.graph.initializer}
    made_by = {name: node for node in model.graph.node for name in node.output}
    kept = []
    for node in model.graph.node:
        if node.op_type not in QUANTIZED:
            continue
        sources = [made_by.get(name) for name in node.input[:2]]
        if precision == "int8":
            low = all(source is not None and source.op_type == "DequantizeLinear" for source in sources)
        else:
            low = not any(types.get(name) == onnx.TensorProto.FLOAT for name in node.input) and not any(
                source is not None and source.op_type == "Cast" and _casts_to(source, onnx.TensorProto.FLOAT)
                for source in sources
            )
        if not low:
            kept.append(node.name)
    return tuple(kept)


def _casts_to(node: onnx.NodeProto, kind: int) -> bool:
    return any(entry.name == "to" and entry.i == kind for entry in node.attribute)

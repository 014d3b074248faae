"""Profiles compared with the limits of a core: the kind of each layer, its least time, and the removable part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.benchmark.module_profile import events_of, profile_of
from repaconv.benchmark.roofline import (
    ACTIVATED,
    BETWEEN,
    PRODUCTS,
    Layer,
    Limits,
    group_of,
    measured_limits,
    roofline_of,
)
from repaconv.core import plugins
from repaconv.engines.contract import SessionSpec
from repaconv.graph.compute_costs import known_macs_of_file
from repaconv.graph.onnx_files import restore_names
from repaconv.results import Bandwidth, ProductPeak, Profile

RECORDED = Path(__file__).parent / "data/profiles"
PIXELS, CHANNELS = 8, 16


def limits_of(fp32: float = 100.0, int8: float = 400.0, gb_s: float = 10.0) -> Limits:
    """Limits in GFLOP/s and GB/s; caches are as slow as memory."""
    peaks = [ProductPeak(operator="MatMul", precision="fp32", gflops=fp32 / 2)]
    peaks += [ProductPeak(operator="Conv", precision="fp32", gflops=fp32)]
    peaks += [ProductPeak(operator="Conv", precision="int8", gflops=int8)]
    return Limits(tuple(peaks), tuple(Bandwidth(bytes=size, gb_s=gb_s) for size in (2**18, 2**26)))


@pytest.mark.parametrize(
    ("operators", "group"),
    [
        (("Conv", "QLinearConv", "FusedMatMul", "MatMulIntegerToFloat", "Convolution+Add", "FullyConnected"), PRODUCTS),
        (("QGemm", "DynamicQuantizeMatMul", "MultiHeadAttention", "MHA"), PRODUCTS),
        (("Conv+Relu", "FusedConv+Relu", "Convolution+Gelu", "MHA+Softmax"), ACTIVATED),
        (("LayerNormalization", "SkipLayerNormalization", "MVN", "MVN+Gelu", "InstanceNormalization"), "norms"),
        (("QuantizeLinear", "DequantizeLinear", "FakeQuantize", "DynamicQuantizeLinear"), "quantize"),
        (("ReorderInput", "Reorder", "Transpose", "Reshape", "Concat", "GatherND", "Convert", "Cast"), "layout"),
        (("Gelu", "Softmax", "Relu", "BiasGelu", "Subgraph+Gelu", "Subgraph+Gelu+Add"), "activations"),
        (("Add", "Mul", "Subgraph", "Subgraph+Add", "Eltwise"), "elementwise"),
        (("ReduceMean", "Reduce+ReduceMean", "GlobalAveragePool", "MaxPool"), "pooling"),
        (("TopK", "Resize"), "other"),
    ],
)
def test_a_layer_is_of_the_group_that_its_operators_say(operators, group):
    assert {operator: group_of(operator) for operator in operators} == dict.fromkeys(operators, group)


def test_a_layer_takes_the_larger_of_its_operations_and_its_bytes_and_never_more_than_it_took():
    limits = limits_of()
    million = 10**6
    assert Layer("Conv", 5.0, 200 * million, million, "fp32").limit(limits) == (2.0, "arithmetic")
    assert Layer("QLinearConv", 5.0, 200 * million, million, "int8").limit(limits) == (0.5, "arithmetic")
    assert Layer("MatMul", 5.0, million, 20 * million, "fp32").limit(limits) == (2.0, "memory")
    assert Layer("Add", 5.0, 0, 30 * million, "fp32").limit(limits) == (3.0, "memory")
    assert Layer("Conv", 1.5, 200 * million, million, "fp32").limit(limits) == (1.5, "arithmetic")
    assert Layer("Reshape", 0.1, 0, 0, "fp32").limit(limits) == (0.0, "")
    assert limits.product_gflops() == 50.0


def test_small_amounts_move_at_the_rate_of_caches_and_large_ones_at_that_of_memory():
    rates = tuple(Bandwidth(bytes=2**power, gb_s=rate) for power, rate in ((18, 60.0), (22, 40.0), (26, 10.0)))
    limits = Limits(limits_of().peaks, rates)
    took = {moved: moved / limits.memory_ms(moved) / 1e6 for moved in (2**10, 2**18, 2**20, 2**22, 2**26, 2**30)}
    assert list(took.values()) == pytest.approx([60.0, 60.0, 50.0, 40.0, 10.0, 10.0])


def test_the_largest_removable_part_is_what_no_limit_explains():
    million = 10**6
    layers = [
        Layer("Conv", 3.0, 200 * million, million, "fp32"),  # 2 ms at the peak
        Layer("Gelu", 2.5, 0, 10 * million, "fp32"),  # 1 ms of memory
        Layer("Add", 2.0, 0, 19 * million, "fp32"),  # 1.9 ms of memory: not removable, however long it takes
    ]
    found = roofline_of(layers, limits_of(), 8.0)
    assert (found.limit_ms, found.share_of_limit, found.at_limit) == (2.0, 0.25, False)
    assert found.largest_removable == "activations"
    groups = {group.group: group for group in found.groups}
    assert [group.group for group in found.groups] == [PRODUCTS, "activations", "elementwise", BETWEEN]
    assert (groups["elementwise"].memory_ms, groups["elementwise"].removable_ms) == (1.9, 0.1)
    assert groups[BETWEEN].removable_ms == 0.5
    assert sum(group.share for group in found.groups) == pytest.approx(1)
    assert "bound by memory: elementwise (1.900 ms)" in found.description
    assert "largest removable part: activations, 1.500 ms" in found.description
    near = roofline_of(layers[:1], limits_of(), 2.2)
    assert (near.at_limit, near.largest_removable) == (True, "")
    assert "at the limit" in near.description


def recorded(name: str) -> Profile:
    """A profile of a runtime, as it was recorded."""
    result = json.loads((RECORDED / f"{name}.json").read_text())
    weights = {node: tuple(map(tuple, shapes)) for node, shapes in result["weights"].items()}
    peaks, rates = (
        tuple(kind.model_validate(each) for each in result[field])
        for kind, field in ((ProductPeak, "peaks"), (Bandwidth, "bandwidth"))
    )
    order = {node: place for place, node in enumerate(weights)}
    events = events_of(result["kernels"], weights)
    return profile_of(events, 2, end_to_end_ms=result["end_to_end_ms"], limits=Limits(peaks, rates), order=order)


@pytest.mark.parametrize(("name", "precision"), [("onnxruntime", "fp32"), ("openvino", "int8")])
def test_recorded_profiles_of_one_network_have_the_same_products(name, precision):
    """Both runtimes compute the 16 convolutions and the head, whatever they fuse and however they order channels."""
    found = recorded(name)
    products = [node for node in found.nodes if node.group in (PRODUCTS, ACTIVATED)]
    known = recorded("onnxruntime" if name == "openvino" else "openvino")
    assert len(products) == 15
    assert {node.precision for node in products} == {precision}
    assert sum(node.flops for node in products) == pytest.approx(sum(node.flops for node in known.nodes), rel=0.01)
    assert all(0 < node.limit_ms <= node.mean_ms for node in products if node.mean_ms)
    assert found.roofline is not None
    assert not {group.group for group in found.roofline.groups} & {"other"}
    assert sum(group.mean_ms for group in found.roofline.groups) == pytest.approx(
        max(found.total_ms, found.end_to_end_ms), rel=1e-3
    )
    fused = {node.operator for node in products if node.group == ACTIVATED}
    assert fused == (set() if precision == "fp32" else {"Convolution+Gelu"})
    assert any(module.module == "network.4.1.mlp" and module.limit_ms > 0 for module in found.modules)


@pytest.fixture
def quantized(tmp_path) -> Path:
    """Conv, Gelu and a sum, quantized to INT8 with Q/DQ nodes: a network of one block with names of modules."""
    random = np.random.default_rng(0)
    weight = numpy_helper.from_array(random.integers(-64, 64, (CHANNELS, CHANNELS, 3, 3)).astype(np.int8), "w")
    scales = [numpy_helper.from_array(np.float32(1 / 32), "s"), numpy_helper.from_array(np.float32(1 / 512), "t")]
    zeros = [numpy_helper.from_array(np.uint8(128), "z"), numpy_helper.from_array(np.int8(0), "zero")]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], "x_QuantizeLinear"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "x_DequantizeLinear"),
        helper.make_node("DequantizeLinear", ["w", "t", "zero"], ["wd"], "w_DequantizeLinear"),
        helper.make_node("Conv", ["xd", "wd"], ["c"], "blocks.0.conv/Conv_1", pads=[1, 1, 1, 1]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"], "c_QuantizeLinear"),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["cd"], "c_DequantizeLinear"),
        helper.make_node("Add", ["cd", "x"], ["y"], "blocks.0/Add_2"),
    ]
    shape = (1, CHANNELS, PIXELS, PIXELS)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "block", ends[:1], ends[1:], [weight, *scales, *zeros])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "int8.onnx"
    )
    return tmp_path / "int8.onnx"


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_runtime_profiles_an_int8_graph_by_the_names_of_its_modules(name, quantized):
    engine = plugins.load(plugins.ENGINES, name)
    if name == "openvino":
        pytest.importorskip("openvino")
    session = engine.open(quantized, SessionSpec(precision="int8"))
    feeds = {"x": np.ones((1, CHANNELS, PIXELS, PIXELS), dtype=np.float32)}
    found = session.profile(feeds, runs=3, warmup_runs=2)
    events = events_of(found.kernels, found.weights)
    products = [event for event in events if event.operations]
    assert len(products) == 3  # one layer in each of three runs
    assert {(event.precision, event.operations) for event in products} == {
        ("int8", 2 * PIXELS**2 * CHANNELS * CHANNELS * 9)
    }
    assert {event.name.rpartition("/")[0] for event in products} == {"blocks.0.conv"}
    assert all(event.bytes >= CHANNELS**2 * 9 for event in products)
    limits = measured_limits(engine, {"int8"}, 1, lambda: None)
    assert {(each.operator, each.precision) for each in limits.peaks} == {
        (operator, precision) for operator in ("MatMul", "Conv") for precision in ("fp32", "int8")
    }
    assert limits.product_gflops() > 0


def test_a_node_that_a_runtime_made_of_a_quantized_layer_is_named_after_its_weight(quantized):
    exported, made = onnx.load(quantized), onnx.load(quantized)
    node = helper.make_node("QLinearConv", ["xq", "s", "z", "w", "t", "zero", "s", "z"], ["other"], "made")
    del made.graph.node[:]
    made.graph.node.append(node)
    restore_names(made, exported)
    assert made.graph.node[0].name == "blocks.0.conv/QLinearConv_0"


def test_bench_profiles_on_openvino_and_counts_every_operation(tiny, repaconv):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    rc.fold(tiny)
    rc.export(target="x86-64-openvino", batch=1)
    model = Path("repaconv-out/tiny/model.x86-64-openvino.b1.onnx")
    done = rc.bench(model, target="x86-64-openvino", rounds=5, profile=True)
    found = done.profile
    assert found is not None
    assert found.roofline is not None
    graph = onnx.load(model)
    for dim in graph.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_value = 32
    del graph.graph.value_info[:]
    macs = known_macs_of_file(onnx.shape_inference.infer_shapes(graph, data_prop=True))
    assert sum(node.flops for node in found.nodes) == 2 * macs > 0
    assert any(module.module.startswith("network.") and module.flops for module in found.modules)
    code, out, _ = repaconv("bench", model, "--target", "x86-64-openvino", "--rounds", "5", "--profile")
    assert code in (0, 5)
    assert "products alone take" in " ".join(out.split())

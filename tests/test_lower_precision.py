"""Lower precision: every method in float16, bfloat16 and int8, as verification links and as real engines."""

from __future__ import annotations

import platform
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import one_net_a_method, quick_where
from onnx import TensorProto, helper
from planted_faults import META, SETTINGS, far_off
from test_divergence_location import graph, net
from test_engine_build import RTX, order

import repaconv as rc
from repaconv import models
from repaconv.benchmark.cpu_isa_level import int8_saturates
from repaconv.core import plugins
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.progress import silent
from repaconv.engines.contract import SessionSpec
from repaconv.engines.onnxruntime_cpu import (
    DISABLED_OPTIMIZERS,
    ENGINE,
    NO_SKIP_LAYERNORM,
    NOT_IN_INT8,
    session_of,
    settings_for,
)
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.onnx_files import with_node_names
from repaconv.graph.operator_schemas import output_types
from repaconv.onnx_export import fp16_and_int8 as precision_module
from repaconv.onnx_export import nncf_quantization
from repaconv.onnx_export.bfloat16 import rounded_in_float32, to_bf16
from repaconv.onnx_export.fp16_and_int8 import (
    Int8,
    has_8_bit_weights,
    nodes_beyond_fp16,
    to_fp16,
    to_int8,
    unquantized_layers,
)
from repaconv.onnx_export.fp32_layer_selection import (
    MOST_GROUPS,
    groups_of,
    growing_sets,
    module_of,
    nodes_of,
    with_int8_rounding,
)
from repaconv.onnx_export.target_operator_rules import violations
from repaconv.onnx_export.torch_exporter import check, to_onnx
from repaconv.rewrites.speed.silu_as_quotient import SILU_AS_QUOTIENT
from repaconv.sources.verified_onnx_export import runnable
from repaconv.stages.shared.lower_precision import int8_for, largest_values, loader_for, to_precision
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.tune.candidate_graphs import sensitivities
from repaconv.stages.verify.verification_chain import CLIPPED_NOTE
from repaconv.verification.comparison import link_between
from repaconv.verification.input_batches import npz_inputs, random_inputs
from repaconv.verification.model_runners import ImageSession, decides, load_onnx
from repaconv.verification.tolerances import tolerance

RUN = Path("repaconv-out/tiny")
NETS = (
    "repavit-tiny",
    "repavit-tiny-swin",
    "nondeep-tiny",
    "riformer",
    "dwconv-tiny",
    "pyra-tiny",
    "repconv-tiny-repvgg",
)


def typed(model, precision, pieces):
    pieces = [{"input": piece} for piece in pieces]
    if precision == "fp16":
        return to_fp16(model, nodes_beyond_fp16(model, largest_values(model, load_onnx, pieces)))
    if precision == "bf16":
        return to_bf16(model)
    return to_int8(model, pieces, how=int8_for(load_target(DEVICES[precision])))


DEVICES = {"int8": "x86-64", "int8, symmetric": "orin-nano"}
PRECISIONS = ("fp16", "bf16", *DEVICES)
PAIRS = {(name, PRECISIONS[number % len(PRECISIONS)]) for number, name in enumerate(NETS)}


@pytest.mark.parametrize(("name", "precision"), quick_where(PAIRS.__contains__, [*product(NETS, PRECISIONS)]))
def test_every_method_in_every_precision(name, precision, record_property):
    model, runner = graph(name)
    _, _, images = net(name)
    pieces = [piece.images for piece in random_inputs(images.shape[1:], count=32, seed=1).batches(len(images))]
    low = typed(model, precision, pieces)
    check(low)
    kind = precision.partition(",")[0]
    sound = {"zero-points"} if "symmetric" in precision else set()
    assert violations(low, 22, (), sound) == []
    runs_here = rounded_in_float32(low) if kind == "bf16" else low
    load = loader_for(load_target(DEVICES.get(precision, "x86-64")).architecture, kind)
    sessions = load_onnx(model.SerializeToString()), load(runs_here.SerializeToString())
    outputs = [np.concatenate([ImageSession(each).run(piece) for piece in pieces]) for each in sessions]
    allowed = tolerance(kind, decides=decides(runner.module))
    link = link_between(kind, ("float32", outputs[0]), (kind, outputs[1]), logits=True, tolerance=allowed)
    agreement = f"{link.metrics.top1_agreement:.1%} agree, cosine {link.metrics.cosine:.6f}"
    record_property("lower precision", f"{name} {precision}: {agreement}")
    assert link.verdict == "passed", agreement
    assert 0 < link.metrics.max_abs_error < 0.2 * np.abs(outputs[0]).max()


@RTX
@pytest.mark.parametrize("name", one_net_a_method(NETS, later=("pyra", "nondeep", "repconv")))
def test_engines_of_every_method_are_what_was_asked_for(name):
    from repaconv.engines.tensorrt_rtx import ENGINE

    build, weights, images = net(name)
    runner = graph(name)[1]
    assert build
    assert weights
    model = to_onnx(runner.module, images.shape[1:], output="logits", opset=22, batch=len(images), dynamic_size=False)
    for low, asked in (
        (to_bf16(model), "BF16"),
        (to_int8(graph(name)[0], [{"input": images}], how=Int8(symmetric=True)), "INT8"),
    ):
        built = ENGINE.build(order(low))
        assert len(built.engine) > 10_000
        assert all(kind.endswith(f".{asked}") for kind in built.types), built.types


@RTX
def test_what_tensorrt_rtx_refuses_in_bfloat16_stays_in_float32():
    from repaconv.engines.tensorrt_rtx import ENGINE

    nodes = [
        helper.make_node("Reshape", ["x", "image"], ["i"], "image"),
        helper.make_node("Conv", ["i", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("HardSwish", ["c"], ["h"], "hard"),
        helper.make_node("Mish", ["h"], ["m"], "mish"),
        helper.make_node("ConvTranspose", ["m", "v"], ["t"], "transposed"),
        helper.make_node("Reshape", ["t", "flat"], ["y"], "flat"),
    ]
    random = np.random.default_rng(0)
    weights = {"image": np.array([1, 2, 4, 4]), "flat": np.array([1, -1])}
    weights |= {name: random.standard_normal((2, 2, 3, 3), dtype=np.float32) for name in "wv"}
    model = small(nodes, weights)
    low, kept = to_precision(model, "bf16", [], load_target("rtx-40"))
    assert set(kept) == {"hard", "mish", "transposed"}
    assert ENGINE.build(order(low)).types == {"CONVOLUTION.BF16": 1}
    for name in kept:
        with pytest.raises(Refused):
            ENGINE.build(order(to_bf16(model, set(kept) - {name})))


def small(nodes, weights, opset=22):
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (None, None))],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def test_bfloat16_rounds_as_torch_does():
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape, dtype=np.float32) for shape in ((4, 8), (8, 3)))
    model = small([helper.make_node("MatMul", ["x", "w"], ["y"], "m")], {"w": w})
    low = to_bf16(model)
    check(low)
    assert [value.type.tensor_type.elem_type for value in (*low.graph.input, *low.graph.output)] == [1, 1]
    got = ImageSession(load_onnx(rounded_in_float32(low).SerializeToString())).run(x)
    a, b = (torch.from_numpy(each).bfloat16() for each in (x, w))
    expected = (a.float() @ b.float()).bfloat16().float().numpy()
    assert np.array_equal(got, expected)
    assert not np.array_equal(got, x @ w)


def test_what_takes_no_bfloat16_stays_in_float32():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "m/MatMul"),
        helper.make_node("Shape", ["h"], ["s"], "m/Shape"),
        helper.make_node("TopK", ["h", "k"], ["t", "i"], "m/TopK"),
        helper.make_node("Add", ["t", "t"], ["y"], "m/Add"),
    ]
    low = to_bf16(small(nodes, {"w": np.eye(8, dtype=np.float32), "k": np.array([2])}))
    check(low)
    inferred = onnx.shape_inference.infer_shapes(low).graph.value_info
    kinds = {value.name: value.type.tensor_type.elem_type for value in inferred}
    assert (kinds["h"], kinds["t"]) == (TensorProto.BFLOAT16, TensorProto.FLOAT)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    assert np.array_equal(ImageSession(load_onnx(rounded_in_float32(low).SerializeToString())).run(x), 2 * x[:, :-3:-1])
    old = small([helper.make_node("MatMul", ["x", "w"], ["y"], "m")], {"w": np.eye(8, dtype=np.float32)}, opset=12)
    assert unquantized_layers(to_bf16(old), "bf16") == ("m",)


def test_what_the_runtime_has_no_bfloat16_kernel_for_stays_in_float32():
    """ONNX Runtime's CUDA provider does not load such a graph: RIFormer's norms failed on an H200."""
    device, model = load_target("cuda-ort"), graph("riformer")[0]
    norms = {node.name for node in model.graph.node if node.op_type == "BatchNormalization"}
    low, kept = to_precision(model, "bf16", [], device)
    check(low)
    inferred = onnx.shape_inference.infer_shapes(low).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}
    kinds |= {weight.name: weight.data_type for weight in low.graph.initializer}
    in_low = [node for node in low.graph.node if TensorProto.BFLOAT16 in map(kinds.get, (*node.input, *node.output))]
    assert norms
    assert {node.op_type for node in in_low}.isdisjoint(device.fp32_operators["bf16"])
    assert norms.isdisjoint(node.name for node in in_low)
    assert norms <= set(kept)
    everywhere, _ = to_precision(model, "bf16", [], load_target("h100"))
    assert len(everywhere.graph.node) < len(low.graph.node)


def test_what_the_runtime_has_no_lower_kernel_for_stays_in_float32():
    nodes = [
        helper.make_node("Reshape", ["x", "as"], ["h"], "m/Reshape"),
        helper.make_node("GridSample", ["h", "grid"], ["z"], "m/GridSample"),
        helper.make_node("Relu", ["z"], ["r"], "m/Relu"),
        helper.make_node("Reshape", ["r", "flat"], ["y"], "m/Flat"),
    ]
    grid = np.zeros((1, 4, 8, 2), dtype=np.float32)
    weights = {"as": np.array([1, 1, 4, 8]), "grid": grid, "flat": np.array([4, 8])}
    for precision in ("fp16", "bf16"):
        low, kept = to_precision(small(nodes, weights, 20), precision, [], load_target("cuda-ort"))
        assert kept == ("m/GridSample",)
        kinds = {value.name: value.type.tensor_type.elem_type for value in low.graph.value_info}
        kinds |= {
            each.name: each.type.tensor_type.elem_type
            for each in onnx.shape_inference.infer_shapes(low).graph.value_info
        }
        sample = next(node for node in low.graph.node if node.op_type == "GridSample")
        assert [kinds.get(name, TensorProto.FLOAT) for name in (*sample.input, *sample.output)] == [1, 1, 1]


def test_what_reads_a_value_of_unknown_type_stays_in_float32():
    """A model that ONNX Runtime does not load: of a quantized value, MatMul read float32 with weights in bfloat16."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], "d", domain="com.microsoft"),
        helper.make_node("MatMul", ["d", "w"], ["y"], "m"),
    ]
    model = small(nodes, {"scale": np.float32(0.1), "zero": np.int8(0), "w": np.eye(8, dtype=np.float32)}, 20)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    x = {"x": np.linspace(-2, 2, 32, dtype=np.float32).reshape(4, 8)}
    found, right = (load_onnx(each.SerializeToString()).run(x)["y"] for each in (to_bf16(model, {"q"}), model))
    assert np.allclose(found, right, atol=0.01)


def test_an_operator_of_the_runtime_itself_stays_in_float32_and_so_does_what_it_outputs():
    nodes = [
        helper.make_node("Relu", ["x"], ["h"], "relu"),
        helper.make_node("QuickGelu", ["h"], ["g"], "gelu", domain="com.microsoft", alpha=1.0),
        helper.make_node("Add", ["g", "h"], ["y"], "add"),
    ]
    model = small(nodes, {}, 20)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    x = np.linspace(-2, 2, 32, dtype=np.float32).reshape(4, 8)
    expected = ImageSession(load_onnx(model.SerializeToString())).run(x)
    found = ImageSession(load_onnx(rounded_in_float32(to_bf16(model)).SerializeToString())).run(x)
    assert 0 < np.abs(found - expected).max() < 0.02


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_constant_that_is_an_output_stays_as_it_is(precision):
    """SAM2's position embeddings: the export ended in a traceback."""
    nodes = [
        helper.make_node("Add", ["x", "k"], ["y"], "add"),
        helper.make_node("Relu", ["y"], ["z"], "relu"),
    ]
    k = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32)
    model = small(nodes, {"k": k, "alone": k[:2]}, 20)
    shapes = {"k": (4, 8), "alone": (2, 8), "z": (4, 8)}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    model.graph.output.extend(outputs)
    low, _ = to_precision(model, precision, [], load_target("rtx-40"))
    check(low)
    assert [value.name for value in low.graph.output] == ["y", *shapes]
    x = {"x": np.ones((4, 8), dtype=np.float32)}
    found = load_onnx(runnable(low, precision).SerializeToString()).run(x)
    assert np.array_equal(found["k"], k)
    assert np.array_equal(found["alone"], k[:2])
    assert 0 < np.abs(found["y"] - (k + 1)).max() < 0.02


@pytest.mark.parametrize("is_output", [False, True])
def test_a_cast_from_bool_before_an_operator_that_stays_in_float32_stays_in_float16(is_output):
    """DETR: of the cast nothing was left, and ONNX Runtime does not load a CumSum of bool."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["b"], "greater"),
        helper.make_node("Cast", ["b"], ["f"], "cast", to=TensorProto.FLOAT),
        helper.make_node("CumSum", ["f", "axis"], ["c"], "cumsum"),
        helper.make_node("Mul", ["c", "f"], ["y"], "mul"),
    ]
    model = small(nodes, {"zero": np.float32(0), "axis": np.int64(1)}, 20)
    if is_output:
        model.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, (4, 8)))
    x = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32)
    found, expected = (load_onnx(each.SerializeToString()).run({"x": x}) for each in (to_fp16(model, ()), model))
    for name, right in expected.items():
        assert np.array_equal(found[name], right)


def test_a_subgraph_stays_in_float32_and_reads_what_is_bfloat16_outside():
    def branch(op, *inputs):
        node = helper.make_node(op, inputs, [f"{op}.o"], op)
        return helper.make_graph([node], op, [], [helper.make_tensor_value_info(f"{op}.o", TensorProto.FLOAT, None)])

    nodes = [
        helper.make_node("Relu", ["x"], ["h"], "relu"),
        helper.make_node("ReduceSum", ["h"], ["s"], "sum", keepdims=0),
        helper.make_node("Greater", ["s", "least"], ["is"], "greater"),
        helper.make_node(
            "If", ["is"], ["o"], "if", then_branch=branch("MatMul", "h", "w"), else_branch=branch("Neg", "h")
        ),
        helper.make_node("Add", ["o", "o"], ["y"], "add"),
    ]
    x = np.arange(-16, 16, dtype=np.float32).reshape(4, 8)
    for least in (0, 1000):
        weights = {"w": np.eye(8, dtype=np.float32) * 3, "least": np.float32(least)}
        low = to_bf16(small(nodes, weights, 20))
        check(low)
        expected = 2 * np.maximum(x, 0) * (3 if least == 0 else -1)
        assert np.array_equal(ImageSession(load_onnx(rounded_in_float32(low).SerializeToString())).run(x), expected)


def test_a_loop_stays_in_float32():
    given = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", TensorProto.FLOAT, (4, 8)),
    ]
    made = [helper.make_tensor_value_info("on", TensorProto.BOOL, []), helper.make_tensor_value_info("w", 1, None)]
    inner = [helper.make_node("Identity", ["go"], ["on"], "on"), helper.make_node("Add", ["v", "h"], ["w"], "w")]
    nodes = [
        helper.make_node("Relu", ["x"], ["h"], "relu"),
        helper.make_node("Loop", ["times", "yes", "h"], ["o"], "loop", body=helper.make_graph(inner, "b", given, made)),
        helper.make_node("Relu", ["o"], ["y"], "end"),
    ]
    x = np.arange(-16, 16, dtype=np.float32).reshape(4, 8)
    low = to_bf16(small(nodes, {"times": np.int64(3), "yes": np.bool_(True)}, 20))
    check(low)
    expected = 4 * np.maximum(x, 0)
    assert np.array_equal(ImageSession(load_onnx(rounded_in_float32(low).SerializeToString())).run(x), expected)


def test_a_float16_overflow_in_a_norm_is_found_and_cured_by_fp32_nodes(tmp_path, monkeypatch):
    """On a board whose parser has no LayerNormalization the squares are values of the graph, and too large."""
    method = plugins.load(plugins.METHODS, "dwconv")
    torch.save({"state_dict": far_off(method.example("tiny", seed=1)), "meta": META.get("dwconv", {})}, "c.pth")
    rc.fold("c.pth", settings=SETTINGS["dwconv"])
    cured = rc.export(target="jetson-nano", precision="fp16")
    assert cured.verdict == "passed"
    assert any(node.startswith("blocks.0.norm1/") for node in cured.fp32_nodes)
    assert not any("attn" in node for node in cured.fp32_nodes)
    with monkeypatch.context() as planted:
        planted.setattr(precision_module, "nodes_beyond_fp16", lambda model, largest: [])
        broken = rc.export(target="jetson-nano", precision="fp16")
    assert broken.verdict == "failed"
    assert broken.links[-1].location.module == "blocks.0.norm1"


def test_int8_for_cpus_multiplies_by_weights_alone_and_rounds_once():
    model = graph("repavit-tiny")[0]
    pieces = [{"input": net("repavit-tiny")[2]}]
    weights = {weight.name for weight in model.graph.initializer}
    products = [n.name for n in model.graph.node if n.op_type in ("MatMul", "Gemm") and weights.isdisjoint(n.input)]
    assert len(products) == 2 * 3  # scores and mixed values of every block
    plain, symmetric = to_int8(model, pieces), to_int8(model, pieces, how=Int8(symmetric=True))
    assert set(unquantized_layers(plain, "int8")) == set(products)
    assert unquantized_layers(symmetric, "int8") == ()
    linear = {name for node in plain.graph.node if node.op_type in ("MatMul", "Gemm") for name in node.output}
    again = [node.name for node in plain.graph.node if node.op_type == "QuantizeLinear" and node.input[0] in linear]
    assert again == []


def test_int8_leaves_products_by_several_matrices_alone_which_the_runtime_does_not_run():
    """As a class token's attention beside a convolution has them, a matrix a head."""
    random = np.random.default_rng(0)
    heads, matrix = random.random((3, 8, 5), np.float32), random.random((5, 4), np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "heads"], ["each"], name="several"),
        helper.make_node("ReduceMean", ["each", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "matrix"], ["y"], name="one"),
    ]
    model = small(nodes, {"heads": heads, "matrix": matrix, "axes": np.array([0])})
    given = random.random((4, 8), np.float32)
    low = to_int8(model, [{"x": given}], how=int8_for(load_target("x86-64")))
    assert unquantized_layers(low, "int8") == ("several",)
    (found,) = load_onnx(low.SerializeToString()).run({"x": given}).values()
    assert np.allclose(found, (given @ heads).mean(0) @ matrix, rtol=0.05)


def test_weights_have_7_bits_where_int8_products_of_a_cpu_saturate(tiny, tmp_path, monkeypatch):
    for flags, clips in (("avx2", True), ("avx2 avx512f", True), ("avx2 avx_vnni", False), ("avx512_vnni", False)):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"flags : {flags}\n")
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        assert int8_saturates("x86_64", cpuinfo) == clips, flags
    assert int8_saturates("x86_64", tmp_path / "nothing tells")
    assert not int8_saturates("aarch64")
    monkeypatch.undo()
    rc.fold(tiny)
    for clips in (True, False):
        monkeypatch.setattr(
            "repaconv.stages.shared.lower_precision.int8_saturates", lambda _architecture, clips=clips: clips
        )
        rc.export(target="x86-64", precision="int8")
        assert has_8_bit_weights(onnx.load(RUN / "model.int8.onnx")) != clips
    monkeypatch.setattr("repaconv.stages.verify.verification_chain.int8_saturates", lambda _architecture: True)
    found = rc.verify(RUN)
    (low,) = (link for link in found.links if link.name == "int8")
    assert (CLIPPED_NOTE in low.note) == (platform.machine() == "x86_64")


def test_int8_for_another_device_is_evaluated_as_it_is_written():
    model, images = graph("repavit-tiny")[0], net("repavit-tiny")[2]
    low = to_int8(model, [{"input": images}], how=Int8(symmetric=True)).SerializeToString()
    found, right = (
        ImageSession(load(low)).run(images) for load in (loader_for("", "int8"), partial(load_onnx, as_written=True))
    )
    assert np.array_equal(found, right)
    assert loader_for(platform.machine(), "int8") is loader_for("", "fp16") is load_onnx


def test_int8_for_a_board_has_zero_points_of_0(tiny):
    rc.fold(tiny)
    done = rc.export(target="orin-nano", precision="int8")
    assert (done.verdict, done.violations, done.opset) == ("passed", (), 20)
    plain = rc.export(target="x86-64", precision="int8")
    model = onnx.load("repaconv-out/tiny/model.int8.onnx")
    assert plain.verdict == "passed"
    assert violations(model, 20, (), ("zero-points",))


def test_some_images_calibrate_an_export_and_the_others_evaluate_it(tiny):
    """Images that calibrate are dim, the others bright: a range of the dim ones alone does not hold."""
    rc.fold(tiny)
    images = np.random.default_rng(0).standard_normal((15, 3, 32, 32)).astype(np.float32)
    np.savez("x.npz", input=images)
    for batch in (None, 8, 64):
        done = rc.export(precision="int8", batch=batch, image_size=32, inputs="x.npz")
        assert done.calibration == "x.npz (15 images): 7 for calibration, the other 8 for evaluation"
        assert (done.verdict, done.links[-1].metrics.images) == ("passed", 8)
    calibrating = [place * 15 // 7 for place in range(7)]
    images[calibrating] *= 0.05
    np.savez("dim.npz", input=images)
    assert rc.export(precision="int8", inputs="dim.npz").verdict == "failed"
    large = np.zeros((4, 3, 48, 48), dtype=np.float32)
    for few, message in ((images[:1], "both calibrate"), (large, "the graph takes 32 x 32")):
        np.savez("wrong.npz", input=few)
        with pytest.raises(UsageProblem, match=message):
            rc.export(precision="int8", inputs="wrong.npz", image_size=32)


def test_bfloat16_is_a_link_of_the_chain_and_says_how_it_was_run(tiny):
    rc.fold(tiny)
    rc.export(target="rtx-40")
    done = rc.export(target="rtx-40", precision="bf16", with_preprocessing=True)
    assert (done.verdict, done.opset, done.unquantized_layers) == ("passed", 22, ())
    links = {link.name: link for link in rc.verify().links}
    for name in ("bf16", "preprocessing"):  # behind the preprocessing, and the whole that is shipped
        assert (links[name].verdict, links[name].tolerance.kind) == ("not verified", "lossy")  # on random images
        assert "rounded to bfloat16" in links[name].note


def test_an_export_that_fails_on_random_inputs_asks_for_images(tiny):
    rc.fold(tiny)
    done = rc.export(precision="int8")
    assert "give images" not in str(done)  # the note of the link says it
    words = "give images of the kind that the network is for"
    assert words in " ".join(str(done.model_copy(update={"verdict": "failed"})).split())


def test_the_last_line_of_an_export_names_the_link_that_is_not_verified(tiny, repaconv):
    """On random images a lossy link that passes shows nothing; the line said "passed: opset ..." alone."""
    rc.fold(tiny)
    last = [line for line in repaconv("export", "--precision", "int8")[1].splitlines() if "nodes," in line][-1]
    assert last.startswith("passed: exported")
    assert "; not verified: int8; opset " in last
    plain = [line for line in repaconv("export")[1].splitlines() if "nodes," in line][-1]
    assert plain.startswith("passed: opset ")


def test_bench_of_a_lower_precision_is_of_that_graph_and_evaluated_by_its_rule(tiny):
    rc.fold(tiny)
    rc.export()
    rc.export(precision="int8")
    plain, low = (RUN / name for name in ("model.onnx", "model.int8.onnx"))
    done = rc.bench(precision="int8", rounds=2)
    assert (done.latencies[0].model, done.precision, done.latencies[1].precision) == (low.name, "int8", "fp32")
    assert (done.agreement.reason, done.agreement.tolerance.kind) == ("unsuitable_inputs", "lossy")  # random images
    for model, against in ((low, plain), (plain, low)):
        link = rc.bench(model, against=against, image_size=32, rounds=2).agreement
        assert (link.verdict, link.tolerance, link.reference) == ("not verified", tolerance("int8"), plain.name)
        assert link.metrics.images == 8
        assert "top-1 predictions agree" in link.note
    with pytest.raises(UsageProblem, match="is a file"):
        rc.bench(low, precision="int8", rounds=2)
    with pytest.raises(UsageProblem, match="no fp16 ONNX model"):
        rc.bench(precision="fp16", rounds=2)


def test_layers_are_known_by_their_modules_and_neighbours_go_together():
    names = ("blocks.0.attn.qkv/MatMul_7", "/layer1/layer1.0/conv1/Conv", "features.0/Conv", "head/Gemm_5", "Conv_12")
    assert [module_of(name) for name in names] == [
        "blocks.0.attn",
        "/layer1/layer1.0/conv1",
        "features.0",
        "head",
        "Conv_12",
    ]
    deep = [helper.make_node("MatMul", ["x", "w"], [f"y{i}"], f"blocks.{i}.fc/MatMul") for i in range(MOST_GROUPS + 1)]
    pairs = groups_of(small(deep, {"w": np.eye(8, dtype=np.float32)}))
    assert [len(pair) for pair in pairs] == [2] * (MOST_GROUPS // 2) + [1]
    assert growing_sets(pairs) == [sum(pairs[:count], ()) for count in (1, 2, 4, 7)]
    assert growing_sets(pairs[:1]) == []


@pytest.mark.slow
def test_a_group_alone_in_int8_is_the_float32_graph_but_for_it_and_each_has_its_own_loss():
    model = graph("repavit-tiny")[0]
    images = net("repavit-tiny")[2]
    stem, *groups = groups_of(model)
    low = to_int8(model, [{"input": images}], nodes_of(model, stem))
    every = nodes_of(model, {name for group in groups for name in group})
    right, whole = (ImageSession(load_onnx(each.SerializeToString())).run(images) for each in (model, low))
    rounded = {}
    for names in ((), tuple(nodes_of(model, groups[0])), tuple(every)):
        some = with_int8_rounding(model, low, names)
        check(some)
        assert set(unquantized_layers(some, "int8")) == set(unquantized_layers(model, "int8")) - (
            set(names) - set(unquantized_layers(low, "int8"))
        )
        rounded[names] = ImageSession(load_onnx(some.SerializeToString())).run(images)
    assert np.array_equal(rounded[()], right)
    assert not np.allclose(rounded[tuple(nodes_of(model, groups[0]))], right, rtol=1e-4)
    assert np.allclose(rounded[tuple(every)], whole, rtol=1e-3, atol=1e-3 * np.abs(whole).max())
    found = sensitivities(model, [{"input": images}], load_target("x86-64"), progress=silent)
    assert sorted(each.layers for each in found) == sorted([stem, *groups])
    losses = [each.kl_divergence for each in found]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0


def test_nncf_writes_int8_that_passes_as_ours_does_and_sends_no_telemetry(tiny, capsys, monkeypatch):
    pytest.importorskip("nncf")
    home = Path("home").absolute()
    monkeypatch.setenv("HOME", str(home))
    home.mkdir()
    model, images = graph("repavit-tiny")[0], net("repavit-tiny")[2]
    kept = nodes_of(model, groups_of(model)[0])
    for narrow in (False, True):
        low = to_int8(model, [{"input": images}] * 4, kept, Int8(narrow=narrow, by="nncf"))
        check(low)
        assert has_8_bit_weights(low) != narrow
        assert set(kept) <= set(unquantized_layers(low, "int8"))
    plain = to_int8(model, [{"input": images}], kept)
    rounded = [sum(node.op_type == "QuantizeLinear" for node in each.graph.node) for each in (low, plain)]
    assert rounded[0] > rounded[1]  # what layers give, too
    assert capsys.readouterr().out == ""
    rc.fold(tiny)
    done = rc.export(target="x86-64-openvino", precision="int8", quantizer="nncf")
    assert (done.quantizer, done.verdict) == ("nncf", "passed")
    assert rc.export(precision="int8").quantizer == "onnxruntime"
    assert list(home.rglob("*telemetry*")) == list(home.rglob("*cid*")) == []


@pytest.mark.parametrize("by", ["onnxruntime-symmetric", "nncf-symmetric"])
def test_int8_about_zero_has_no_zero_points_and_passes(tiny, by):
    if by.startswith("nncf"):
        pytest.importorskip("nncf")
    model, images = graph("repavit-tiny")[0], net("repavit-tiny")[2]
    zeros = {}
    for each in (by, by.removesuffix("-symmetric")):
        low = to_int8(model, [{"input": images}], (), Int8(by=each))
        check(low)
        held = {weight.name: onnx.numpy_helper.to_array(weight) for weight in low.graph.initializer}
        rounding = [node for node in low.graph.node if node.op_type == "QuantizeLinear"]
        zeros[each] = [np.any(held[node.input[2]]) for node in rounding if len(node.input) > 2 and node.input[2]]
    assert not any(zeros[by])
    assert any(zeros[by.removesuffix("-symmetric")])
    rc.fold(tiny)
    done = rc.export(target="x86-64-openvino", precision="int8", quantizer=by)
    assert (done.quantizer, done.verdict) == (by, "passed")


def convolutional() -> tuple[onnx.ModelProto, np.ndarray]:
    """Two convolutions with a GELU between them and a sum around them: values with a range that is not symmetric."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12 for name in ("v", "w")}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], "conv1/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Gelu", ["a"], ["b"], "act/Gelu"),
        helper.make_node("Conv", ["b", "w"], ["c"], "conv2/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "x"], ["y"], "Add"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 16, 8, 8)) for name in ("x", "y")]
    held = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    made = helper.make_graph(nodes, "convolutional", ends[:1], ends[1:], held)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), (
        random.standard_normal((4, 1, 16, 8, 8)).astype(np.float32) + 0.5
    )


def test_nncf_zero_points_are_unsigned_so_that_openvino_computes_each_convolution_in_int8(tmp_path, monkeypatch):
    """OpenVINO adds only an unsigned zero point to a convolution; with AMX it computes others in float32."""
    pytest.importorskip("nncf")
    openvino = pytest.importorskip("openvino")
    model, calls = convolutional()
    kept = []
    rewrite = nncf_quantization.make_zero_points_unsigned
    monkeypatch.setattr(
        nncf_quantization,
        "make_zero_points_unsigned",
        lambda low: (kept.append(onnx.ModelProto.FromString(low.SerializeToString())), rewrite(low))[1],
    )
    low = to_int8(model, [{"x": each} for each in calls], (), Int8(by="nncf"))
    check(low)
    signed, unsigned = (points(each) for each in (*kept, low))
    assert any(point.dtype == np.int8 and point.any() for point in signed)  # as NNCF writes them
    assert any(point.dtype == np.uint8 for point in unsigned)
    assert not any(point.dtype == np.int8 and point.any() for point in unsigned)
    before, after = (ENGINE.open(each.SerializeToString(), SessionSpec(as_written=True)) for each in (*kept, low))
    for each in calls:
        assert np.array_equal(before.run({"x": each})["y"], after.run({"x": each})["y"])
    path = tmp_path / "low.onnx"
    onnx.save(low, path)
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    layers = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ordered_ops()]
    executed = [str(i["runtimePrecision"].value) for i in layers if str(i["layerType"].value) == "Convolution"]
    assert len(executed) == 2
    assert set(executed) <= {"u8", "i8"}


@pytest.mark.parametrize("by", ["nncf", "nncf-symmetric", "onnxruntime-symmetric"])
def test_a_quantizer_leaves_the_exponential_of_silu_in_float(by):
    """The sum 1 + exp(-x) has no range that int8 could cover; both convolutions are int8 all the same."""
    pytest.importorskip("nncf")
    model, calls = convolutional()
    gelu = next(node for node in model.graph.node if node.op_type == "Gelu")
    sigmoid = helper.make_node("Sigmoid", ["a"], ["s"], "act/Sigmoid")
    model.graph.node.insert(1, sigmoid)
    gelu.CopyFrom(helper.make_node("Mul", ["a", "s"], ["b"], "act/Mul"))
    other, changes = rewritten(model, [SILU_AS_QUOTIENT])
    assert len(changes) == 1
    low = [to_int8(each, [{"x": call} for call in calls], (), Int8(by=by)) for each in (model, other)]
    dequantized = {name for node in low[1].graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    (power,) = (node for node in low[1].graph.node if node.op_type == "Exp")
    (one_more,) = (node for node in low[1].graph.node if power.output[0] in node.input)
    (quotient,) = (node for node in low[1].graph.node if node.op_type == "Div")
    assert (one_more.op_type, quotient.input[1]) == ("Add", one_more.output[0])
    assert not dequantized.intersection((*power.input, *one_more.input, *quotient.input[1:]))
    assert [unquantized_layers(each, "int8") for each in low] == [(), ()]
    outputs = [[ENGINE.open(each.SerializeToString(), SessionSpec()).run({"x": call})["y"] for call in calls]
               for each in (model, *low)]  # fmt: skip
    before, after = (np.linalg.norm(np.subtract(each, outputs[0])) for each in outputs[1:])
    assert after < 1.2 * before


def points(model: onnx.ModelProto) -> list[np.ndarray]:
    """The zero points of all activations."""
    held = {weight.name: onnx.numpy_helper.to_array(weight) for weight in model.graph.initializer}
    return [held[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"]


def test_a_quantizer_that_there_is_not_or_that_is_for_others_is_refused_before_anything(tiny, repaconv, monkeypatch):
    rc.fold(tiny)
    for words, code, message in (
        (("--precision", "int8", "--quantizer", "ncf"), 2, "Did you mean nncf?"),
        (("--precision", "int8", "--quantizer", "nncf", "--target", "orin-nano"), 2, "takes INT8 without zero points"),
        (
            ("--precision", "int8", "--quantizer", "onnxruntime-symmetric", "--target", "orin-nano"),
            2,
            "takes INT8 without zero points, for which onnxruntime is the only quantizer",
        ),
        (("--quantizer", "nncf"), 2, "nothing is quantized"),
    ):
        found, _, err = repaconv("export", "--onnx", *words)
        assert (found, message in err) == (code, True), err
    monkeypatch.setattr("repaconv.onnx_export.nncf_quantization.find_spec", lambda _name: None)
    found, _, err = repaconv("export", "--onnx", "--precision", "int8", "--quantizer", "nncf")
    assert (found, "pip install 'repaconv[quantize]'" in err) == (3, True), err
    assert not (RUN / "model.int8.onnx").exists()


def test_a_known_batch_leaves_linear_layers_in_int8_on_onnxruntime():
    """Its fusion of product and sum would compute them in float32."""
    both = settings_for(SessionSpec(threads=1, precision="int8", settings=(NO_SKIP_LAYERNORM,)))
    assert both.get_session_config_entry(DISABLED_OPTIMIZERS) == f"{NOT_IN_INT8};SkipLayerNormFusion"
    low = to_int8(graph("repavit-tiny")[0], [{"input": net("repavit-tiny")[2]}], how=Int8(narrow=True))
    kernels = {}
    for precision in ("int8", "fp32"):
        settings = settings_for(SessionSpec(threads=1, precision=precision, sizes={"batch": 1}))
        settings.optimized_model_filepath = f"{precision}.onnx"
        session_of(low.SerializeToString(), settings, ["CPUExecutionProvider"])
        kernels[precision] = [node.op_type for node in onnx.load(f"{precision}.onnx").graph.node]
    assert kernels["int8"].count("MatMulIntegerToFloat") > kernels["fp32"].count("MatMulIntegerToFloat")
    assert "Gemm" not in kernels["int8"]


# --- graphs that torch does not write


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(w), name) for name, w in weights.items())
    return onnx.shape_inference.infer_shapes(with_node_names(model))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def relative_error(low: onnx.ModelProto, model: onnx.ModelProto, **feeds: np.ndarray) -> float:
    found, right = (load_onnx(each.SerializeToString()).run(feeds) for each in (low, model))
    return max(float(np.abs(found[name] - right[name]).max() / np.abs(right[name]).max()) for name in right)


UNEVEN = random(4, 4) * np.logspace(-1, 1, 4, dtype=np.float32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("a = MatMul(x, v) k = Relu(a) y = Gemm <transB = 1> (k, v, b)", {"v": UNEVEN, "b": random(4)}),
        ("y = Gemm <beta = 10.0> (x, v, b)", {"v": random(4, 4), "b": random(4)}),
        ("y = Gemm <beta = 0.5> (x, v, b)", {"v": random(4, 4), "b": np.float32(2)}),
        ("y = Gemm(x, v, b)", {"v": random(4, 4), "b": np.float32([2])}),
        ("a = Gemm(x, v, b) y = MatMul(a, v)", {"v": random(4, 4), "b": random(4, 4)}),
        ("a = Neg(x) c = Gemm <beta = 3.0> (x, v, a) y = MatMul(c, v)", {"v": random(4, 4)}),
    ],
    ids=["tied weights", "beta", "scalar bias", "bias of one", "bias of rows", "computed bias"],
)
def test_int8_of_layers_that_the_quantizer_takes_for_others(symmetric, body, weights):
    model, x = parsed(f"(float[4, 4] x) => (float[4, 4] y) {{ {body} }}", **weights), random(4, 4, seed=1)
    low = to_int8(model, [{"x": x}], how=Int8(symmetric=symmetric, narrow=True))
    check(low)
    assert len(unquantized_layers(low, "int8")) < sum(node.op_type in ("Gemm", "MatMul") for node in low.graph.node)
    assert relative_error(low, model, x=x) < 0.04


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_layer_that_stays_in_float32_has_its_own_weights(precision):
    weights = {"v": random(4, 4) * np.float32(1.0001), "w": random(4, 4)}
    body = "a = MatMul(x, v) b = MatMul(a, v) c = Relu(b) d = MatMul(x, v)"
    model = parsed(f"(float[4, 4] x) => (float[4, 4] c, float[4, 4] d) {{ {body} }}", **weights)
    x = random(4, 4, seed=1)
    kept, how = ["MatMul_3"], Int8(narrow=True)
    low = to_fp16(model, kept) if precision == "fp16" else to_int8(model, [{"x": x}], kept, how)
    check(low)
    read = next(node.input[1] for node in low.graph.node if node.name == "MatMul_3")
    stored = {weight.name: onnx.numpy_helper.to_array(weight) for weight in low.graph.initializer}
    assert np.array_equal(stored[read], weights["v"])
    assert relative_error(low, model, x=x) < 0.03


def test_nodes_without_names_are_quantized(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = """a = Conv(x, w, b) r = Relu(a) f = Flatten(r) g = MatMul(f, v) t = Transpose(g) s = MatMul(g, t)
        k = MatMul(s, g) y = Softmax(k)"""
    weights = {"w": random(4, 3, 3, 3), "b": random(4), "v": random(144, 5) / 8}
    model = parsed(f"(float[4, 3, 8, 8] x) => (float[4, 5] y) {{ {body} }}", **weights)
    for node in model.graph.node:
        node.ClearField("name")
    with pytest.raises(Refused, match="int8 quantizes nothing"):  # the products that stay in FP32 have no name either
        to_int8(model, [{"x": random(4, 3, 8, 8)}])
    onnx.save(model, "net.onnx")
    rc.fold("net.onnx")
    done = rc.export(precision="int8", simplify=False, allow_unverified=True)
    assert len(done.unquantized_layers) == 2


def test_int8_of_a_graph_without_layers_is_refused():
    model = parsed("(float[4, 4] x) => (float[4, 4] y) { y = Relu(x) }")
    with pytest.raises(Refused, match="int8 quantizes nothing"):
        to_int8(model, [{"x": random(4, 4)}])


def test_the_lowest_number_of_a_mask_stays_finite_in_bfloat16():
    body = "i = Sub(one, keep) m = Mul(i, lowest) s = Add(x, m) y = Softmax(s)"
    lowest = np.finfo(np.float32).min
    text = f"(float[2, 4] x, float[2, 4] keep) => (float[2, 4] y) {{ {body} }}"
    low = to_bf16(parsed(text, one=np.float32(1), lowest=lowest))
    x, keep = random(2, 4), np.float32([[1, 1, 0, 0], [0, 0, 0, 0]])
    found = load_onnx(rounded_in_float32(low).SerializeToString()).run({"x": x, "keep": keep})["y"]
    assert np.allclose(found[0, :2], np.exp(x[0, :2]) / np.exp(x[0, :2]).sum(), atol=0.01)
    assert np.array_equal(found[1], [0.25] * 4)


def test_infinite_numbers_and_nan_stay_so_in_bfloat16():
    numbers = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32).view(np.float32)
    low = to_bf16(parsed("(float[5] x) => (float[5] y) { y = Add(x, k) }", k=numbers))
    stored = onnx.numpy_helper.to_array(low.graph.initializer[0]).astype(np.float32)
    largest = np.float32(np.uint32(0x7F7F0000).view(np.float32))
    np.testing.assert_array_equal(stored, [np.nan, np.nan, np.inf, -np.inf, largest])


BRANCHES = """y = If (c) <
    then_branch = a () => (float[4, 4] t) { t = Neg(z) }, else_branch = b () => (float[4, 4] e) { e = Identity(z) }
>"""
UNUSUAL = {
    "two outputs": "(float[4, 4] x) => (float[4, 2] y, float[4, 2] z) { r = Relu(x) y, z = Split <axis = 1> (r) }",
    "a default": "(float[4, 4] x, float[1] s) => (float[4, 4] y) { y = Mul(x, s) }",
    "a name": "(float[4, 4] x) => (float[4, 4] y) { taken = Relu(x) z = Exp(x) y = Add(z, taken) }",
    "random": "(float[4, 4] x) => (float[4, 4] y) { r = RandomUniformLike <low = 0.0, high = 0.0> (x) y = Add(x, r) }",
    "branches": f"(float[4, 4] x, bool c) => (float[4, 4] y) {{ z = Relu(x) {BRANCHES} }}",
}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_graphs_are_valid_in_lower_precision(name, precision):
    text = UNUSUAL[name].replace("Split <axis = 1>", "Split <axis = 1, num_outputs = 2>")
    model = parsed(text, **({"s": np.float32([3])} if name == "a default" else {}))
    for node in model.graph.node if name == "a name" else ():
        for names in (node.input, node.output):
            names[:] = ["x.bf16" if each == "taken" else each for each in names]
    model = onnx.shape_inference.infer_shapes(model)
    low, _ = to_precision(model, precision, [], load_target("rtx-40"))
    onnx.checker.check_model(low, full_check=True)
    feeds = {"x": random(4, 4)} | ({"c": np.array(True)} if name == "branches" else {})
    assert relative_error(runnable(low, precision), model, **feeds) < 0.02


def test_the_experiment_on_which_the_limits_rest_runs():
    """`make bench-precision-tolerances` on one of its networks: sound graphs of each precision, and broken INT8."""
    import lower_precision_tolerances

    np.savez("few.npz", input=np.load(models.HELD_OUT)["input"][:16])
    images = npz_inputs(Path("few.npz"))
    net = lower_precision_tolerances._net("repavit, trained", models.checkpoint("repavit"), {}, images, images)
    rows = {(row["precision"], row["way"]): row for row in lower_precision_tolerances.rows_of(net)}
    assert len(rows) == 8
    assert all(row["images"] == 16 for row in rows.values())
    assert rows["fp16", "sound"]["norm_error"] < rows["int8", "sound"]["norm_error"]
    assert rows["int8", "sound"]["norm_error"] < rows["int8", "half the bits"]["norm_error"]


@pytest.mark.slow
def test_the_figures_of_a_trained_network_are_measured_on_every_cpu():
    """`make bench-precision`: a CPU without BF16 has a row without it."""
    import lower_precision

    row = lower_precision.agreement("repavit")
    assert row["verdict"] == "passed"
    assert ("bf16" in row) == lower_precision.HAS_BF16
    assert row["int8"]["accuracy"] > 0.97


def test_largest_values_of_a_graph_are_those_of_all_its_float_values():
    model = onnx.parser.parse_model(
        """
        <ir_version: 9, opset_import: ["": 18]>
        g (float[n, 4] x) => (float[n] y) <float[2] scale = {3.0, -70000.0}, int64[1] axis = {1}> {
            first, second = Split<axis = 1, num_outputs = 2>(x)
            scaled = Mul(first, scale)
            y = ReduceSum<keepdims = 0>(scaled, axis)
            root = Sqrt(second)
            wide = Cast<to = 11>(scaled)
            squares = Mul(wide, wide)
            kinds = Cast<to = 7>(scaled)
            start, end = Split<axis = 1, num_outputs = 2>(scaled)
            two = Constant<value_ints = [2]>()
            three = Constant<value_ints = [3]>()
            none = Slice(scaled, two, three, axis)
        }
        """
    )
    calls = [{"x": np.float32([[1, -2, 4, 9]])}, {"x": np.float32([[-5, 1, 0, 1], [0, 0, 16, -1]])}]
    found = largest_values(model, load_onnx, calls)
    expected = {"x": 16, "first": 5, "second": 16, "scaled": 140000, "y": 140003, "start": 15, "end": 140000}
    expected |= {"wide": 140000, "squares": 140000.0**2, "none": 0, "root": np.nan}
    assert found == pytest.approx(expected, nan_ok=True)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.fixture
def exported_graph(tmp_path, monkeypatch):
    """A function that folds a graph of images [1, 3, 16, 16] by its text and exports it in a precision."""
    monkeypatch.chdir(tmp_path)

    def export(nodes, precision, opset=20, **constants):
        weights = {"w": normal(8, 3, 3, 3), "v": normal(4, 8, 3, 3), **constants}
        text = (
            f'<ir_version: 9, opset_import: ["": {opset}]> g (float[1, 3, 16, 16] x) => (float[1, 4, 16, 16] y) {{ a = '
        )
        model = onnx.parser.parse_model(
            f"{text} Conv<pads = [1, 1, 1, 1]>(x, w) {nodes} y = Conv<pads = [1, 1, 1, 1]>(b, v) }}"
        )
        model.graph.initializer.extend(onnx.numpy_helper.from_array(each, name) for name, each in weights.items())
        onnx.save(model, "net.onnx")
        rc.fold("net.onnx", measure=False)
        return rc.export(precision=precision, target="rtx-30" if precision == "bf16" else "x86-64", onnx="low.onnx")

    return export


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ("b = Celu(a)", {}),
        ("b = MeanVarianceNormalization(a)", {}),
        (
            "grid = AffineGrid(theta, size) b = GridSample(a, grid)",
            {"theta": np.eye(2, 3, dtype=np.float32)[None], "size": np.array([1, 8, 16, 16])},
        ),
    ],
)
def test_operators_without_float16_stay_in_float32(exported_graph, nodes, constants):
    done = exported_graph(nodes, "fp16", **constants)
    assert not [link for link in done.links if link.verdict == "failed"]
    assert len(done.fp32_nodes) == 1
    load_onnx(Path("low.onnx")).run({"x": normal(1, 3, 16, 16)})


@pytest.mark.parametrize("precision", ["fp16", "int8", "bf16"])
def test_a_graph_with_a_sequence_of_unequal_parts_is_exported(exported_graph, precision):
    parts = "q = SplitToSequence<axis = 1>(a, parts) first = SequenceAt(q, zero) b = Concat<axis = 1>(first, first)"
    constants = {"parts": np.array([4, 1, 3]), "zero": np.array(0)}
    done = exported_graph(parts, precision, 22 if precision == "bf16" else 20, **constants)
    assert not [link for link in done.links if link.verdict == "failed"]


def test_values_that_a_loop_carries_have_types_of_their_own():
    kinds = {"count": onnx.TensorProto.INT64, "go": onnx.TensorProto.BOOL, "x": onnx.TensorProto.FLOAT}
    loop = onnx.helper.make_node("Loop", ["count", "go", "x", "count"], ["y", "steps"])
    assert output_types(loop, kinds, 18) == {}
    quantized = onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])
    assert output_types(quantized, kinds, 18) == {
        "q": onnx.TensorProto.UINT8,
        "scale": onnx.TensorProto.FLOAT,
        "zero": onnx.TensorProto.UINT8,
    }


def test_an_operator_with_a_float32_constant_stays_in_float32_next_to_bfloat16(exported_graph):
    assert exported_graph("b = MeanVarianceNormalization(a)", "bf16", 22).links[-1].verdict != "failed"


def test_a_layer_after_a_group_norm_computes_in_bfloat16(exported_graph):
    """ONNX infers no type of its output."""
    scales = {"s": np.ones(8, np.float32), "t": np.zeros(8, np.float32)}
    done = exported_graph("b = GroupNormalization<num_groups = 4>(a, s, t)", "bf16", 21, **scales)
    assert done.links[-1].verdict != "failed"
    weights = {each.name: each.data_type for each in onnx.load("low.onnx").graph.initializer}
    assert weights["v.bf16"] == onnx.TensorProto.BFLOAT16


def test_int8_of_a_value_that_is_nan_is_refused(exported_graph):
    with pytest.raises(Refused, match="NaN on every calibration image"):
        exported_graph("b = Sqrt(a)", "int8")
    assert not Path("low.onnx").exists()


def test_a_graph_that_fails_in_lower_precision_is_refused(exported_graph, monkeypatch):
    monkeypatch.setattr(precision_module, "FLOAT32_FUNCTIONS", ())
    constants = {"theta": np.eye(2, 3, dtype=np.float32)[None], "size": np.array([1, 8, 16, 16])}
    with pytest.raises(Refused, match="does not run under ONNX Runtime") as caught:
        exported_graph("grid = AffineGrid(theta, size) b = GridSample(a, grid)", "fp16", **constants)
    assert "--keep-fp32" in caught.value.hint
    assert not Path("low.onnx").exists()

"""Real engines of TensorRT-RTX (all methods, no GPU), ONNX Runtime and OpenVINO, and their verification."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
import small_graphs
from conftest import one_net_a_method
from onnx import TensorProto, helper, numpy_helper
from test_divergence_location import graph, net

import repaconv as rc
from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.engines import onnxruntime_cpu
from repaconv.engines.contract import BuildSpec
from repaconv.engines.tensorrt_builder import EngineBuild
from repaconv.engines.tensorrt_rtx import ENGINE
from repaconv.onnx_export.fp16_and_int8 import to_fp16
from repaconv.onnx_export.torch_exporter import to_onnx
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.build.stage import TimingCache, profile_shapes
from repaconv.stages.shared.engine_files import build_of
from repaconv.stages.shared.model_opening import open_model
from repaconv.stages.shared.target_lookup import load_target

NETS = (
    "repavit-tiny",
    "repavit-tiny-swin",
    "nondeep-tiny",
    "riformer",
    "dwconv-tiny",
    "pyra-tiny",
    "repconv-tiny-mobileone",
)
CARDS = ("8.6", "8.9")
RTX = pytest.mark.skipif(not find_spec("tensorrt_rtx"), reason="TensorRT-RTX is absent")
BUILD = Path("repaconv-out/tiny/build")
FAULTY = "network.2.0.mlp.fc2"


def order(model, **settings):
    """For what lies in the test's own folder."""
    onnx.save(model, "ordered.onnx")
    return BuildSpec(Path("ordered.onnx"), **{"capabilities": CARDS, **settings})


# --- TensorRT-RTX, and the API that it shares with TensorRT ---------------------------------------------


@RTX
@pytest.mark.parametrize("name", one_net_a_method(NETS, later=("pyra", "nondeep", "repconv")))
def test_every_method_builds_in_both_precisions(name):
    model, _ = graph(name)
    assert net(name)
    for typed, asked in ((model, "FLOAT"), (to_fp16(model, []), "HALF")):
        built = ENGINE.build(order(typed))
        assert len(built.engine) > 10_000
        assert built.types
        assert all(kind.endswith(f".{asked}") for kind in built.types), built.types


@RTX
def test_the_build_tells_how_far_it_is_and_takes_what_is_set():
    ticks = []
    shapes = {"input": ((1, 3, 32, 32), (2, 3, 32, 32), (8, 3, 32, 32))}
    model = to_onnx(
        graph("repavit-tiny")[1].module, (3, 32, 32), output="logits", opset=20, batch=None, dynamic_size=False
    )
    wanted = order(model, shapes=shapes, workspace=2**28, tick=lambda *step: ticks.append(step))
    import tensorrt_rtx as trt

    building = EngineBuild(trt, wanted, "")
    building.config.num_compute_capabilities = 1
    building.config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorRT-RTX takes a timing cache and says that it has no use for it
        building.exchange_timings()
        assert building.timings
    assert building.config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 2**28
    assert building.config.num_optimization_profiles == 1
    assert not building.tf32  # float32 is float32, as run.py asks trtexec on a board
    assert EngineBuild(trt, replace(wanted, precision="tf32"), "").tf32
    assert len(building.plan()) > 10_000
    assert len(ticks) > 10
    assert all(total > step >= 0 for _, step, total in ticks)
    assert any("INFO" in line for line in building.log.lines)


def small(tiny):
    rc.fold(tiny)
    rc.export(target="rtx-40", image_size=32)


@RTX
def test_build_of_a_run(tiny, repaconv):
    small(tiny)
    done = rc.build(target="rtx-40")
    assert (done.verdict, done.precision, done.compute_capability) == ("passed", "fp32", "8.9")
    assert "untested here" in done.note
    name = "rtx-40.32x32"
    assert {path.name for path in BUILD.iterdir()} == {f"{name}.engine", f"{name}.json", f"{name}.log"}
    assert json.loads((BUILD / f"{name}.json").read_text())["layer_types"] == dict(done.layer_types)
    code, out, _ = repaconv("build", "--target", "rtx-40")
    assert code == 0
    assert "untested here" in out
    assert rc.verify(engine=BUILD / f"{name}.engine").links[-1].verdict == "not verified"
    rc.fold(tiny)  # the same network: nothing is removed
    assert BUILD.exists()


@RTX
def test_a_graph_for_any_size_becomes_an_engine_for_the_usual_one(tiny, repaconv):
    rc.fold(tiny)
    assert rc.export(target="rtx-40").image_size == "dynamic"
    code, out, _ = repaconv("build", "--target", "rtx-40")
    assert code == 0
    assert "for images of 32 x 32, the usual: for others, export with --image-size" in " ".join(out.split())


@RTX
def test_an_engine_that_is_not_what_was_asked_for_is_a_failed_build(tiny, repaconv, monkeypatch):
    from repaconv.onnx_export import fp16_and_int8

    rc.fold(tiny)
    monkeypatch.setattr(fp16_and_int8, "to_fp16", lambda model, keep: model)  # a converter that did nothing
    monkeypatch.setattr(fp16_and_int8, "unquantized_layers", lambda model, kind: ())
    rc.export(target="rtx-40", precision="fp16", image_size=32)
    code, out, _ = repaconv("build", "--target", "rtx-40", "--precision", "fp16")
    assert code == 1
    assert "FLOAT" in out


@RTX
def test_a_graph_for_a_runtime_that_opens_engines_is_built_first(tiny, monkeypatch):
    """For the sizes that are measured; no card is here to open what comes of it."""
    small(tiny)
    opened_with = []
    monkeypatch.setattr(type(ENGINE), "open", lambda _engine, content, _spec: opened_with.append(content))
    found = open_model(
        Path("repaconv-out/tiny/model.rtx-40.32x32.onnx"), load_target("rtx-40"), threads=1, dims={"batch": 4}
    )
    (content,) = opened_with
    assert isinstance(content, bytes)
    assert len(content) > 10_000
    assert found.precision == "fp32"


@RTX
def test_what_cannot_be_built_is_reported(tiny, repaconv):
    rc.fold(tiny)
    with pytest.raises(UsageProblem, match="no fp32 ONNX model for rtx-40 yet"):
        rc.build(target="rtx-40")
    rc.export(target="rtx-40")
    with pytest.raises(EnvironmentProblem, match=r"built on the device, by its tensorrt 8\.2\.1"):
        rc.build(target="jetson-nano")
    assert repaconv("build", "--target", "orin-nano")[0] == 3
    with pytest.raises(EnvironmentProblem, match="needs an NVIDIA GPU"):
        rc.bench(target="rtx-40")
    with pytest.raises(EnvironmentProblem, match=r"compute capability 8\.7"):
        ENGINE.build(order(graph("repavit-tiny")[0], capabilities=("8.7",)))
    assert load_target("rtx-50").compute_capability == "12.0"


@RTX
def test_an_operator_that_the_parser_lacks_is_named():
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Det", ["x"], ["y"], "m/Det")]
    made = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, (2, 3, 3))], [value("y", TensorProto.FLOAT, (2,))]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(Refused, match=r"m/Det \(Det\)"):
        ENGINE.build(order(model))


@RTX
def test_an_engine_of_another_version_than_the_targets_is_not_built(tiny, monkeypatch):
    small(tiny)
    monkeypatch.setattr(type(ENGINE), "version", lambda self: "2.0.1")
    with pytest.raises(EnvironmentProblem, match=r"rtx-40 has tensorrt-rtx 1\.7, but 2\.0\.1 is installed here"):
        rc.build(target="rtx-40")


def test_a_timing_cache_is_kept_by_target_and_version_and_pinned_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    device = load_target("orin-nano")
    timings = TimingCache.of(None, device, "10.3.0")
    assert timings.content is None
    digest = timings.keep(b"measured")
    assert digest == hashlib.sha256(b"measured").hexdigest()
    again = TimingCache.of(None, device, "10.3.0")
    assert again.content == b"measured"
    assert TimingCache.of(None, device, "10.3.1").content is None
    again.path.write_bytes(b"tampered")
    with pytest.raises(Refused, match="its hash differs"):
        TimingCache.of(None, device, "10.3.0")


# --- what runs here ---------------------------------------------------------------------------------------


def test_onnxruntimes_optimised_graph_is_an_engine(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    rc.export(precision="int8")
    rc.export(precision="fp16")
    done = rc.build(target="x86-64")
    assert (done.verdict, done.links[0].verdict) == ("passed", "passed")
    assert all(kind.endswith(".FLOAT") for kind in done.layer_types)
    assert done.builder_options["intra_op_num_threads"] == "1"
    low = rc.build(target="x86-64", precision="int8")
    assert low.verdict == "passed"
    assert any(kind.endswith(".INT8") for kind in low.layer_types)
    code, out, _ = repaconv("build", "--target", "x86-64", "--precision", "fp16")
    assert code == 1
    assert "Conv.FLOAT" in out
    assert next(link for link in rc.verify(engine=BUILD / "x86-64.onnx").links if link.name == "engine").verdict == (
        "passed"
    )
    lossy = next(link for link in rc.verify(engine=BUILD / "x86-64.int8.onnx").links if link.name == "engine")
    assert (lossy.verdict, lossy.tolerance.kind) == ("not verified", "lossy")  # as its export had random images
    with pytest.raises(UsageProblem, match="the link engine is lossy"):
        rc.verify(engine=BUILD / "x86-64.int8.onnx", rtol={"engine": 1e-9})
    failed = next(link for link in rc.verify(engine=BUILD / "x86-64.fp16.onnx").links if link.name == "engine")
    assert (failed.verdict, failed.reason) == ("failed", "build_failed")
    shutil.copy(BUILD / "x86-64.onnx", BUILD / "x86-64.ort")
    assert build_of(BUILD / "x86-64.onnx").verdict == "passed"
    assert build_of(BUILD / "x86-64.ort") is None  # nothing vouches for another file of that stem
    (BUILD / "x86-64.onnx").write_bytes(b"another")
    with pytest.raises(Refused, match="its hash differs"):
        rc.verify(engine=BUILD / "x86-64.onnx")


def test_a_layer_has_the_type_of_what_a_mask_selects(tmp_path):
    """As where a mask selects the windows of an adaptive pooling: the first input of Where is boolean.

    A constant of a dynamic shape has another type than that shape, as in MobileViT V2.
    """
    nodes = [
        ("Where", "mask x limit", "kept", {}),
        ("Shape", "x", "shape", {}),
        ("ConstantOfShape", "shape", "zeros", {}),
        ("Max", "zeros kept", "r", {}),
        ("MatMul", "r w", "y", {}),
        ("ReduceMax", "y", "most", {"keepdims": 1}),
        ("Greater", "most limit", "high", {}),
        ("Where", "high y limit", "z", {}),
        ("MatMul", "z v", "out", {}),
    ]
    weights = {"mask": np.arange(4) % 2 == 0, "limit": np.zeros(1, np.float32), "w": (4, 6), "v": (6, 6)}
    shapes = ({name: (TensorProto.FLOAT, ["batch", size])} for name, size in (("x", 4), ("out", 6)))
    model = small_graphs.saved(tmp_path / "net.onnx", nodes, weights, *shapes)
    assert onnxruntime_cpu.ENGINE.build(BuildSpec(model)).types == {"MatMul.FLOAT": 2}


def test_an_engine_is_verified_on_the_batch_and_from_the_pixels_that_it_takes(tiny):
    rc.fold(tiny)
    rc.export(batch=2, image_size=32, with_preprocessing=True)
    engine = Path(rc.build(target="x86-64").output_files[0])
    found = next(link for link in rc.verify(engine=engine, count=3).links if link.name == "engine")
    assert (found.verdict, found.metrics.images) == ("passed", 3)
    for size, message in ((32, "takes pixels"), (40, "takes images of")):
        np.savez("x.npz", input=np.zeros((2, 3, size, size), dtype=np.float32))
        with pytest.raises(UsageProblem, match=message):
            rc.verify(engine=engine, inputs="x.npz")


def test_an_engine_for_another_cpu_has_nothing_of_this_one_in_it(tiny):
    rc.fold(tiny)
    rc.export(target="arm64")
    done = rc.build(target="arm64")
    assert done.verdict == "passed"
    assert done.builder_options["graph_optimization_level"] == "ORT_ENABLE_EXTENDED"
    model = onnx.load(BUILD / "arm64.onnx")
    assert not [node.op_type for node in model.graph.node if "nchwc" in node.domain]


def test_openvino_compiles_in_the_precision_that_is_asked_for(tiny):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    rc.fold(tiny)
    with pytest.raises(UsageProblem, match="converts a float32 model to bf16 itself"):
        rc.export(target="x86-64-openvino", precision="bf16")
    rc.export(target="x86-64-openvino", image_size=32)
    rc.export(target="x86-64-openvino", image_size=32, precision="int8")
    plain = rc.build(target="x86-64-openvino")
    assert (plain.verdict, plain.links[0].tolerance.kind) == ("passed", "exact")
    assert all(kind.endswith(".FLOAT") for kind in plain.layer_types)
    int8 = rc.build(target="x86-64-openvino", precision="int8")
    assert (int8.verdict, int8.links[0].tolerance.kind) == ("passed", "lossy")
    engine = BUILD / "x86-64-openvino.32x32.blob"
    assert next(link for link in rc.verify(engine=engine).links if link.name == "engine").verdict == "passed"
    plain = "repaconv-out/tiny/model.x86-64-openvino.32x32.onnx"
    found = rc.bench(engine, against=plain, image_size=32, rounds=2)
    assert found.agreement.verdict == "passed"
    assert [row.engine.split(" ")[0] for row in found.latencies] == ["openvino", "onnxruntime"]
    assert found.runtime == found.latencies[0].engine
    engine.write_bytes(engine.read_bytes()[: 2**10])
    with pytest.raises(Refused, match="its hash differs"):
        rc.bench(engine, target="x86-64-openvino", image_size=32, rounds=2)


@pytest.mark.slow
def test_an_engine_that_computes_something_else_is_followed_to_the_module(tiny, monkeypatch):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    from repaconv.engines.openvino import OpenVino

    rc.fold(tiny)
    rc.export(target="x86-64-openvino", image_size=32)
    right = OpenVino._compiled

    def wrong(engine, deployable, spec):
        """As if a kernel were off by half, wherever a graph is compiled."""
        if isinstance(deployable, Path) and deployable.suffix == ".onnx":
            model = onnx.load(deployable)
            weight = next(each for each in model.graph.initializer if each.name == f"{FAULTY}.weight")
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), weight.name))
            deployable = model.SerializeToString()
        return right(engine, deployable, spec)

    monkeypatch.setattr(OpenVino, "_compiled", wrong)
    assert rc.build(target="x86-64-openvino").verdict == "failed"
    link = rc.verify(engine=BUILD / "x86-64-openvino.32x32.blob").links[-1]
    assert (link.name, link.verdict) == ("engine", "failed")
    assert link.location.module == f"backbone.{FAULTY}"  # as the checkpoint calls it


def test_openvino_in_bfloat16_where_the_cpu_multiplies_it(tiny):
    openvino = pytest.importorskip("openvino", reason="OpenVINO is absent")
    rc.fold(tiny)
    rc.export(target="x86-64-openvino", image_size=32)
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(EnvironmentProblem, match="does not compute in bf16"):
            rc.build(target="x86-64-openvino", precision="bf16")
        return
    low = rc.build(target="x86-64-openvino", precision="bf16")
    assert low.verdict == "passed"  # of the types
    assert (low.links[0].reason, low.links[0].inputs) == ("unsuitable_inputs", "4 images of random pixels, seed 0")
    assert "give yours to verify, with --engine" in low.links[0].note  # the export of an FP32 graph takes none
    assert all(kind.endswith(".BF16") for kind in low.layer_types)
    engine = BUILD / "x86-64-openvino.bf16.32x32.blob"
    assert rc.verify(engine=engine).links[-1].reason == "unsuitable_inputs"  # random images show little
    np.savez("images.npz", input=np.random.default_rng(0).standard_normal((32, 3, 32, 32)).astype(np.float32))
    link = rc.verify(engine=engine, inputs="images.npz").links[-1]
    assert (link.verdict, link.tolerance.kind) == ("passed", "lossy"), link.note


def test_a_profile_has_the_usual_size_of_every_dynamic_dimension_and_a_range_of_batches():
    """Under any name, or none: what was not named height or width had the batch size, and what has no name 0."""

    def profile(path):
        rc.fold(path)
        made = rc.export(f"repaconv-out/{path.stem}", target="orin-nano")
        source_model = source_model_of(run_folder.find_run(Path(f"repaconv-out/{path.stem}")))
        model = onnx.load(source_model.run.folder / made.payload.path)
        return profile_shapes(model, source_model, made.batch, 2), source_model.folded.sizes.usual

    found, usual = profile(small_graphs.tokens())
    assert found == {name: tuple((count, usual["L"]) for count in (1, 2, 64)) for name in ("ids", "mask")}
    nodes = [
        ("Conv", "x w", "1", {"pads": [1] * 4}),
        ("BatchNormalization", "1 s s b s", "2", {}),
        ("Relu", "2", "y", {}),
    ]
    weights = {"w": (4, 3, 3, 3), "s": np.ones(4, np.float32), "b": (4,)}
    for name, dims in (("named", ["N", 3, "rows", "cols"]), ("unnamed", [None, 3, None, None])):
        images = {"x": (small_graphs.F, dims)}, {"y": (small_graphs.F, [dims[0], 4, *dims[2:]])}
        found, usual = profile(small_graphs.saved(f"{name}.onnx", nodes, weights, *images))
        sides = list(usual.values())[1:]
        assert found == {"x": tuple((count, 3, *sides) for count in (1, 2, 64))}
    nodes = [("MatMul", "x w", "1", {}), ("Mul", "1 s", "2", {}), ("Relu", "2", "y", {})]
    rows = {"x": (small_graphs.F, ["N", None, 8])}, {"y": (small_graphs.F, ["N", None, 4])}
    found, usual = profile(small_graphs.saved("rows.onnx", nodes, {"w": (8, 4), "s": (4,)}, *rows))
    assert found == {"x": tuple((count, usual["x[1]"], 8) for count in (1, 2, 64))}
    fixed = {"x": (small_graphs.F, [3, None, 8])}, {"y": (small_graphs.F, [3, None, 4])}
    found, usual = profile(small_graphs.saved("fixed.onnx", nodes, {"w": (8, 4), "s": (4,)}, *fixed))
    assert found == {"x": ((3, usual["x[1]"], 8),) * 3}

"""Sessions of every engine that runs here: inputs and outputs by name, and what each engine reports about itself."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.benchmark.interleaved_protocol import Burst
from repaconv.benchmark.paper_protocols import PaperProtocol
from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.core.run_folder import find_run
from repaconv.engines import onnxruntime_cpu, tensorrt_session
from repaconv.engines.contract import Port, SessionSpec
from repaconv.engines.nvidia_gpu import batch_of, within_memory
from repaconv.engines.onnxruntime_cpu import denormal_mode_restored, flushes_denormals
from repaconv.engines.onnxruntime_cuda import lowered, nodes_on_cpu, provider_by_node, require_float32
from repaconv.engines.tensorrt_session import DTYPES
from repaconv.engines.torch_cpu import TorchSession
from repaconv.models import METHODS, checkpoint
from repaconv.sources.source_model import DEPLOY
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.engine_files import engine_of
from repaconv.verification.model_runners import ImageSession, TorchRunner

ENGINES = ("onnxruntime", "openvino")


@pytest.fixture(scope="module")
def graph() -> bytes:
    """y = a @ b, z = b > 0: two inputs and two outputs, of several types, with a free size."""
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["y"], "product"),
        helper.make_node("Cast", ["b"], ["z"], "sign", to=TensorProto.BOOL),
    ]
    given = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT, ("n", 3)),
        helper.make_tensor_value_info("b", TensorProto.FLOAT, (3, 2)),
    ]
    wanted = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 2)),
        helper.make_tensor_value_info("z", TensorProto.BOOL, (3, 2)),
    ]
    made = helper.make_graph(nodes, "two", given, wanted)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


@pytest.mark.parametrize("name", ENGINES)
def test_every_input_and_output_has_its_name(name, graph):
    engine = plugins.load(plugins.ENGINES, name)
    session = engine.open(graph, SessionSpec())
    assert [port._replace(shape=port.shape[1:]) for port in session.inputs] == [
        Port("a", (3,), "float32"),
        Port("b", (2,), "float32"),
    ]
    assert not isinstance(session.inputs[0].shape[0], int)
    assert [(port.name, port.dtype) for port in session.outputs] == [("y", "float32"), ("z", "bool")]
    a, b = np.eye(4, 3, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    found = session.run({"b": b, "a": a})
    session.run({"a": a + 1, "b": b - 1})  # what was given is the caller's, whatever runs after
    assert np.array_equal(found["y"], a @ b)
    assert np.array_equal(found["z"], b.astype(bool))
    with pytest.raises(Refused, match="takes 2 inputs: a, b"):
        ImageSession(session)


@pytest.mark.parametrize("name", ENGINES)
def test_a_session_does_what_its_engine_says(name, graph):
    engine = plugins.load(plugins.ENGINES, name)
    session = engine.open(graph, SessionSpec())
    feeds = {"a": np.ones((4, 3), dtype=np.float32), "b": np.ones((3, 2), dtype=np.float32)}
    assert any("CPU" in device for device in session.placement(feeds).values())
    if "profile" in engine.can:
        assert len(session.profile(feeds, runs=2, warmup_runs=1).kernels) % 2 == 0
    else:
        with pytest.raises(EnvironmentProblem, match="does not report a profile"):
            session.profile(feeds, runs=2, warmup_runs=1)
    with pytest.raises(EnvironmentProblem, match="does not run on cuda:0 on this machine"):
        engine.open(graph, SessionSpec(device="cuda:0"))


CARDS = ("torch-cuda", "torch-cuda-compiled", "torch-cuda-graphs", "onnxruntime-cuda", "onnxruntime-tensorrt")


@pytest.mark.parametrize("name", [*CARDS, "tensorrt-rtx"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_an_engine_without_its_gpu_reports_it_in_one_sentence(name, graph, folded):
    engine = plugins.load(plugins.ENGINES, name)
    network = source_model_of(find_run(folded)).network(DEPLOY)
    with pytest.raises(EnvironmentProblem, match=r"none was found|has no \w+Provider|cannot be imported") as raised:
        engine.open(network if "networks" in engine.can else graph, SessionSpec())
    assert raised.value.exit_code == 3
    assert raised.value.hint
    with pytest.raises(EnvironmentProblem, match="does not run on cpu on this machine"):
        engine.open(network if "networks" in engine.can else graph, SessionSpec(device="cpu"))


@pytest.mark.parametrize("target", ["cuda@compiled", "cuda-ort", "cuda-ort@tensorrt"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_bench_on_a_gpu_that_is_not_here_is_refused(target, folded, repaconv):
    if target.startswith("cuda-ort"):
        rc.export(folded, target=target)
    code, out, err = repaconv("bench", folded, "--target", target)
    assert (code, out) == (3, "")
    assert "none was found" in err or "Provider" in err
    assert repaconv("doctor", "--target", target)[0] == 3
    assert not (folded / "bench" / f"{target}.json").exists()


@pytest.mark.parametrize(
    "message",
    ["CUDA out of memory. Tried to allocate 20 GiB", "BFCArena::AllocateRawInternal Failed to allocate memory"],
)
def test_a_gpu_with_too_little_memory_reports_the_batch_size(message):
    with pytest.raises(EnvironmentProblem, match="too small for a batch of 2048 images") as raised, within_memory(2048):
        raise RuntimeError(message)
    assert raised.value.code == "gpu.memory"
    with pytest.raises(RuntimeError, match="misaligned"), within_memory(2048):
        raise RuntimeError("CUDA error: misaligned address")


@pytest.mark.parametrize(
    ("shapes", "batch"), [([(), (4, 3)], 4), ([(2, 3), (5,)], 2), ([()], 1), ([], 1), ([(0, 3)], 0)]
)
def test_the_batch_size_is_that_of_the_first_input_with_rows(shapes, batch):
    assert batch_of({str(place): np.zeros(shape) for place, shape in enumerate(shapes)}) == batch


def test_a_number_without_rows_stays_one_for_a_module():
    class Shapes(torch.nn.Module):
        def forward(self, number, rows):
            return rows[number]

    run = TorchRunner(Shapes(), {}, double=None, inputs=("number", "rows"))
    found = run.run({"number": np.array(1), "rows": np.arange(6.0, dtype=np.float32).reshape(3, 2)})
    assert [value.tolist() for value in found.values()] == [[2, 3]]


@pytest.mark.parametrize(("protocol", "largest"), [("riformer", 2048), ("repavit", 128)])
def test_bench_takes_the_next_smaller_batch_where_the_gpu_holds_no_more(protocol, largest, folded, monkeypatch):
    right, tried = TorchSession.run, []

    def small(session, feeds):
        """A card that holds 4 images."""
        tried.append(len(feeds["input"]))
        with within_memory(tried[-1]):
            if tried[-1] > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return right(session, feeds)

    monkeypatch.setattr(PaperProtocol, "images", lambda *_: 16)  # whatever this machine's memory holds
    monkeypatch.setattr(TorchSession, "run", small)
    done = rc.bench(folded, target="cpu-torch", protocol=protocol, rounds=2)
    assert list(dict.fromkeys(tried)) == [16, 8, 4]
    assert done.batch == 4
    assert f"batch 4 of {largest}: what memory holds" in done.protocol
    with pytest.raises(EnvironmentProblem, match="too small for a batch of 16 images"):
        rc.bench(folded, target="cpu-torch", batch=16, rounds=2)


def test_the_tensorrt_provider_gets_the_precision_and_float32_is_float32(monkeypatch):
    assert [lowered(each) for each in ("fp32", "tf32", "fp16", "bf16")] == [
        {},
        {},
        {"trt_fp16_enable": "1"},
        {"trt_bf16_enable": "1"},
    ]
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    for each in ("tf32", "fp16", "bf16"):
        require_float32(each)
    with pytest.raises(EnvironmentProblem, match="computes float32 products in TF32 here") as raised:
        require_float32("fp32")
    assert raised.value.exit_code == 3
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    require_float32("fp32")


def test_what_an_opened_engine_is_asked_is_there():
    """Of the two packages with one interface the one that comes without a card; a card alone opens an engine."""
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is absent")
    asked = {
        trt.Runtime: ("deserialize_cuda_engine",),
        trt.ICudaEngine: (
            "create_execution_context", "create_engine_inspector", "num_io_tensors",
            "get_tensor_name", "get_tensor_mode", "get_tensor_dtype", "get_tensor_shape",
        ),
        trt.IExecutionContext: ("set_input_shape", "get_tensor_shape", "set_tensor_address", "execute_async_v3"),
        trt.EngineInspector: ("get_engine_information",),
        trt.TensorIOMode: ("INPUT",),
        trt.LayerInformationFormat: ("JSON",),
    }  # fmt: skip
    for kind, names in asked.items():
        assert [name for name in names if not hasattr(kind, name)] == []
    assert set(DTYPES) <= set(trt.DataType.__members__)
    session = Path(tensorrt_session.__file__).read_text()
    calls = set(re.findall(r"self\._(?:engine|context)\.(\w+)", session))
    assert calls <= {name for names in asked.values() for name in names}


def test_nodes_that_ran_on_the_cpu_are_read_from_the_profile():
    on_card, on_processor = {"provider": "CUDAExecutionProvider"}, {"provider": "CPUExecutionProvider"}
    ranks = {**on_processor, "output_type_shape": [{"float": [8, 16]}, {"int64": [8, 16]}]}
    events = [
        {"cat": "Node", "name": "fc/MatMul_kernel_time", "args": on_card},
        {"cat": "Node", "name": "merge/TopK_kernel_time", "args": ranks},
        {"cat": "Node", "name": "Shape_1_kernel_time", "args": {**on_processor, "output_type_shape": [{"int64": [4]}]}},
        {"cat": "Session", "name": "model_run", "args": {}},
    ]
    assert provider_by_node(events)["fc/MatMul"] == "CUDAExecutionProvider"
    assert nodes_on_cpu(events) == ("merge/TopK",)


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folded")
    torch.save(plugins.load(plugins.METHODS, "repavit").example("tiny", 3), folder / "tiny.pth")
    rc.fold(folder / "tiny.pth", settings={"num_heads": "3"}, out=folder / "run")
    return folder / "run"


def test_torch_runs_a_runs_networks_and_no_file(folded):
    engine = plugins.load(plugins.ENGINES, "torch")
    network = source_model_of(find_run(folded)).network(DEPLOY)
    session = engine.open(network, SessionSpec())
    assert [(port.name, port.shape) for port in session.inputs] == [("input", ("batch", 3, "height", "width"))]
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    found = session.run({"input": images})["logits"]
    rc.export(folded)
    graph = plugins.load(plugins.ENGINES, "onnxruntime").open(folded / "model.onnx", SessionSpec())
    assert np.abs(found - graph.run({"input": images})["logits"]).max() < 1e-5 * np.abs(found).max()
    low = engine.open(network, SessionSpec(precision="bf16")).run({"input": images})["logits"]
    assert low.dtype == np.float32
    assert 1e-4 < np.abs(low - found).max() / np.abs(found).max() < 0.1
    with pytest.raises(EnvironmentProblem, match="does not compute in int8"):
        engine.open(network, SessionSpec(precision="int8"))
    with pytest.raises(Refused, match=r"torch runs the module of a run folder"):
        engine.open(folded / "model.safetensors", SessionSpec())


def test_bench_measures_torch_against_the_training_form_and_against_a_graph(folded):
    done = rc.bench(folded, target="cpu-torch", rounds=2)
    assert [(each.name, each.model) for each in done.latencies] == [
        ("deploy form", "model.safetensors"),
        ("training form", "tiny.pth"),
    ]
    assert all(each.engine.startswith("torch ") for each in done.latencies)
    assert done.agreement is not None
    assert done.agreement.verdict == "passed"
    assert (folded / "bench" / "cpu-torch.json").is_file()
    rc.export(folded)
    beside = rc.bench(folded, target="cpu-torch", precision="bf16", against=folded / "model.onnx", rounds=2)
    assert [(each.engine.partition(" ")[0], each.precision) for each in beside.latencies] == [
        ("torch", "bf16"),
        ("onnxruntime", "fp32"),
    ]
    assert beside.agreement is not None
    assert beside.agreement.name == "agreement"
    with pytest.raises(EnvironmentProblem, match="nothing to build"):
        rc.build(folded, target="cpu-torch")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_bench_measures_torch_against_the_graph_of_every_trained_network(method, tmp_path):
    run = tmp_path / "run"
    rc.fold(checkpoint(method), out=run)
    rc.export(run)
    done = rc.bench(run, target="cpu-torch", against=run / "model.onnx", rounds=3)
    assert [each.engine.partition(" ")[0] for each in done.latencies] == ["torch", "onnxruntime"]
    assert done.ratio is not None
    assert done.agreement is not None
    assert done.agreement.verdict == "passed"


def test_torch_compiled_says_what_it_lacks(folded, monkeypatch):
    network = source_model_of(find_run(folded)).network(DEPLOY)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentProblem, match=r"needs a C\+\+ compiler"):
        plugins.load(plugins.ENGINES, "torch-compiled").open(network, SessionSpec())


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")
def test_torch_compiled_computes_what_torch_does(folded):
    images = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    engines = (plugins.load(plugins.ENGINES, name) for name in ("torch", "torch-compiled"))
    network = source_model_of(find_run(folded)).network(DEPLOY)
    wanted, found = (each.open(network, SessionSpec()).run({"input": images}) for each in engines)
    assert np.abs(found["logits"] - wanted["logits"]).max() < 1e-5 * np.abs(wanted["logits"]).max()


A_BUILD_FOR_CUDA = """
import torch
torch.cuda._is_compiled, torch.cuda.is_available, torch.version.cuda = lambda: True, lambda: False, "12.8"

def compiled(module, **_):
    import torch.utils.cpp_extension  # as torch.compile does, which itself wants a real build for CUDA
    return module

torch.compile = compiled
from repaconv.engines.contract import Network, Port, SessionSpec
from repaconv.engines.torch_cpu import COMPILED
COMPILED.open(Network(torch.nn.Identity(), (), ()), SessionSpec())
print("CUDA_HOME =", torch.utils.cpp_extension.CUDA_HOME)
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")
def test_torch_compiled_does_not_warn_that_there_is_no_gpu():
    """Which torch's log did where a build for CUDA finds a CUDA_HOME and no GPU, in the middle of `tune`."""
    command = [sys.executable, "-c", A_BUILD_FOR_CUDA]
    done = subprocess.run(command, env={**os.environ, "CUDA_HOME": "/cuda"}, capture_output=True, text=True, check=True)
    assert done.stdout == "CUDA_HOME = /cuda\n"
    assert done.stderr == ""


def test_one_fused_gpu_kernel_computes_the_same(monkeypatch):
    from repaconv.backbones import shared_layers
    from repaconv.backbones.convolution_mixers import DepthwiseSpec
    from repaconv.backbones.token_merging_block import KeyedAttention
    from repaconv.backbones.vit_inference_block import ReadOutAttention
    from repaconv.backbones.vit_layers import AttentionSpec

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 1, 7, 4), torch.randn(2, 3, 7, 6)
    size = torch.randint(1, 5, (2, 7, 1)).float()
    torch.testing.assert_close(shared_layers.fused_attention(q, k, v), shared_layers.attention(q, k, v))
    torch.testing.assert_close(shared_layers.fused_attention(q, k, v, size), shared_layers.attention(q, k, v, size))
    x, tokens, sizes = torch.randn(2, 4, 3, 5), torch.randn(2, 6, 12), torch.randint(1, 5, (2, 6, 1)).float()
    equal, unequal = AttentionSpec(3, 4, 4), AttentionSpec(3, 5, 2)
    keys, values = AttentionSpec(3, 12, 4, key="input"), AttentionSpec(3, 4, 12, value="input")
    nets = [(shared_layers.Norm("GN", 4, 1e-5, affine=False), x), (shared_layers.NormThenScale("GN", 4, 1e-5), x)]
    nets += [(spec.build(12, (2, 3)), tokens) for spec in (equal, unequal, keys, values)]
    nets += [(DepthwiseSpec(3, mean).build(12, (2, 3)), tokens) for mean in (False, True)]
    nets += [(kind, tokens, given) for kind in (KeyedAttention(12, equal), ReadOutAttention(12, equal, 1))
             for given in (None, sizes)]  # fmt: skip
    for net, *inputs in nets:
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
        with torch.no_grad():
            apart = net(*inputs)
            with monkeypatch.context() as patched:
                patched.setattr(shared_layers, "runs_on_gpu", lambda _: True)
                torch.testing.assert_close(net(*inputs), apart)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_tokens_are_merged_alike_by_fewer_kernels_on_a_gpu(prefix, modulated, sized, monkeypatch):
    from repaconv.backbones import shared_layers
    from repaconv.backbones.token_merging_block import Merge, MergeSpec

    torch.manual_seed(0)
    merge = Merge(MergeSpec(3, sized, prefix, modulated), 12).double()
    for parameter in merge.parameters():
        torch.nn.init.normal_(parameter)
    x, metric = torch.randn(2, 11, 12).double(), torch.randn(2, 11, 4).double()
    size = torch.randint(1, 5, (2, 11, 1)).double() if sized else None
    with torch.no_grad():
        expected = merge(x, size, metric)
        monkeypatch.setattr(shared_layers, "runs_on_gpu", lambda _: True)
        for found, right in zip(merge(x, size, metric), expected, strict=True):
            assert found.shape[1] == 8
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "threads"), [("onnxruntime", 1), ("onnxruntime", 2), ("openvino", 1)])
def test_several_calls_at_once_each_get_their_own_answer(name, threads, graph):
    engine = plugins.load(plugins.ENGINES, name)
    session = engine.open(graph, SessionSpec(threads=threads, streams=3))
    b, seen = np.arange(6, dtype=np.float32).reshape(3, 2), []

    def call() -> None:
        a = np.random.default_rng().standard_normal((5, 3)).astype(np.float32)
        seen.append(np.abs(session.run({"a": a, "b": b})["y"] - a @ b).max())

    burst = Burst(call, streams=3, calls=20)
    burst()
    burst.close()
    assert (len(seen), len(burst.calls_ms), burst.calls) == (60, 60, 60)
    assert max(seen) < 1e-4


def test_torch_runs_one_call_at_a_time(folded):
    network = source_model_of(find_run(folded)).network(DEPLOY)
    with pytest.raises(EnvironmentProblem, match="one inference at a time"):
        plugins.load(plugins.ENGINES, "torch").open(network, SessionSpec(streams=2))


def test_a_sum_and_its_norm_stay_apart_where_that_is_set():
    """The setting is the runtime's own name of a transformer: another version may call it otherwise."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8]) for name in ("x", "z", "y")]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [8], [1.0] * 8)
    shift = helper.make_tensor("shift", TensorProto.FLOAT, [8], [0.0] * 8)
    nodes = [helper.make_node("Add", ["x", "z"], ["sum"])]
    nodes += [helper.make_node("LayerNormalization", ["sum", "scale", "shift"], ["y"])]
    graph = helper.make_graph(nodes, "g", ports[:2], ports[2:], [scale, shift])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    feeds = {name: np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32) for name in "xz"}
    usual, apart = (
        onnxruntime_cpu.ENGINE.open(model, SessionSpec(settings=each))
        for each in ((), (onnxruntime_cpu.NO_SKIP_LAYERNORM,))
    )
    assert [len(session.placement(feeds)) for session in (usual, apart)] == [1, 2]
    assert np.allclose(usual.run(feeds)["y"], apart.run(feeds)["y"], atol=1e-6)


def test_all_input_channels_of_a_pointwise_convolution_are_summed_at_once():
    """One of the settings that `tune` tries: sums are rounded in another order."""
    assert (onnxruntime_cpu.AT_ONCE,) in onnxruntime_cpu.ENGINE.tries("fp32")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 320, 7, 7]) for name in "xy"]
    random = np.random.default_rng(0)
    weight = numpy_helper.from_array(random.standard_normal((320, 320, 1, 1)).astype(np.float32), "w")
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    feeds = {"x": random.standard_normal((1, 320, 7, 7)).astype(np.float32)}
    usual, at_once = (
        onnxruntime_cpu.ENGINE.open(model, SessionSpec(settings=each)).run(feeds)["y"]
        for each in ((), (onnxruntime_cpu.AT_ONCE,))
    )
    assert np.allclose(usual, at_once, atol=1e-4)
    assert platform.machine() != "x86_64" or not np.array_equal(usual, at_once)  # it is in effect


@pytest.mark.parametrize("before", [False, True])
def test_what_one_session_flushes_no_other_does_nor_its_thread(before):
    """The runtime turns the mode on in the thread that opens such a session, and never off."""
    port = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    half = helper.make_tensor("half", TensorProto.FLOAT, [1], [0.5])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "half"], ["y"])], "g", port[:1], port[1:], [half])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    feeds = {"x": np.full(2, 1e-38, np.float32)}
    with denormal_mode_restored():
        torch.set_flush_denormal(before)
        flushing, usual = (
            onnxruntime_cpu.ENGINE.open(model, SessionSpec(settings=each))
            for each in ((onnxruntime_cpu.DENORMALS,), ())
        )
        found = [bool(session.run(feeds)["y"].any()) for session in (flushing, usual, flushing, usual)]
        assert found == [False, not before, False, not before]
        assert flushes_denormals() == before


@pytest.mark.parametrize("module", ["openvino", "nncf"])
def test_what_is_imported_reports_nothing_and_leaves_nothing_in_the_home_folder(tmp_path, module):
    """OpenVINO and NNCF leave an identifier there, and send it, where their telemetry is installed."""
    pytest.importorskip(module, reason=f"{module} is absent")
    message = f"from repaconv.core.errors import require_module; require_module({module!r}, '', '')"
    home = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "home").mkdir()
    subprocess.run([sys.executable, "-c", message], env=home, check=True, capture_output=True, timeout=120)
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("content", [b"not an engine\n", b"", b"PK\x03\x04\0\0", b"\x80\x02}q\0"])
def test_what_is_no_engine_by_its_first_bytes_is_not_taken_for_one_of_tensorrt(tiny, repaconv, content):
    """Without TensorRT it was said to be missing, and `verify` ended with 0."""
    rc.fold(tiny)
    rc.export()
    Path("other.dat").write_bytes(content)
    for words in ("verify --engine other.dat", "bench --rounds 2 --against other.dat"):
        code, _, message = repaconv(*words.split())
        why = "it begins with" if content else "it is empty"
        assert (code, f"other.dat is no engine: {why}" in message) == (4, True), message
    for name, engine in (
        ("engine.dat", b"ptrt\0\0\xff\xfe"),
        ("engine.bin", b"ftrt" + bytes(8)),
        ("engine.pt", b"vtrt"),
    ):
        Path(name).write_bytes(engine)
        assert engine_of(Path(name), None).name == "tensorrt"

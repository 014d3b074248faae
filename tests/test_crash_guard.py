"""A runtime or an exporter that crashes: one sentence, the right exit code, and this process continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem
from repaconv.engines import crash_guard
from repaconv.engines.contract import SessionSpec
from repaconv.engines.session_loading import load_session

ENGINE = """
import os, signal
from repaconv.engines.onnxruntime_cpu import OnnxRuntime

class Crashing(OnnxRuntime):
    name = "crashing"

    def open(self, deployable, spec):
        with open(os.environ["OPENED"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        if signal_of := os.environ.get("CRASH"):
            os.kill(os.getpid(), getattr(signal, signal_of))
        return super().open(deployable, spec)

ENGINE = Crashing()
"""
TARGET = 'extends = "x86-64"\nname = "crashing"\nruntime = "crashing"\n'


def tiny_graph(folder: Path) -> Path:
    node = helper.make_node("Relu", ["x"], ["y"])
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8]) for name in "xy"]
    graph = helper.make_graph([node], "tiny", ports[:1], ports[1:])
    path = folder / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture
def crashing(tmp_path, monkeypatch):
    """An engine of somebody else's that ends whatever process opens a model with it: a real signal."""
    site = tmp_path / "site"
    info = site / "crashing_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "crashing_engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[repaconv.engines]\ncrashing = crashing_engine:ENGINE\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("OPENED", str(tmp_path / "opened"))
    crash_guard._GUARD._stop()  # its environment is that of its start
    yield tmp_path / "opened"
    crash_guard._GUARD._stop()
    sys.modules.pop("crashing_engine", None)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("SIGSEGV", "runtime.crash", "crashes when it loads"),
        ("SIGILL", "runtime.crash", "SIGILL"),
        ("SIGKILL", "environment.memory", "not enough memory"),
    ],
)
def test_a_runtime_that_crashes_is_a_sentence(crashing, tmp_path, monkeypatch, name, code, message):
    monkeypatch.setenv("CRASH", name)
    engine = plugins.load(plugins.ENGINES, "crashing")
    with pytest.raises(EnvironmentProblem, match=message) as found:
        load_session(engine, tiny_graph(tmp_path), SessionSpec())
    assert found.value.code == code
    assert "crashing" in found.value.message
    assert name in found.value.message
    assert str(os.getpid()) not in crashing.read_text().split()


def test_bench_says_which_runtime_crashes_and_exits_with_3(crashing, tmp_path, monkeypatch, repaconv):
    monkeypatch.setenv("CRASH", "SIGSEGV")
    target = tmp_path / "crashing.toml"
    target.write_text(TARGET)
    code, _, err = repaconv("bench", tiny_graph(tmp_path), "--target", target, "--rounds", "20")
    assert code == 3, err
    assert all(word in err for word in ("crashing", "SIGSEGV", "tiny.onnx", "--target"))
    assert not list(tmp_path.rglob("core*"))


def test_what_loaded_once_is_not_tried_again_even_by_another_command(crashing, tmp_path):
    path, engine = tiny_graph(tmp_path), plugins.load(plugins.ENGINES, "crashing")
    load_session(engine, path, SessionSpec())
    tried = [pid for pid in crashing.read_text().split() if pid != str(os.getpid())]
    assert len(tried) == 1
    load_session(engine, path, SessionSpec())
    from repaconv.engines import session_loading

    session_loading._loaded.cache_clear()
    load_session(engine, path, SessionSpec())
    assert [pid for pid in crashing.read_text().split() if pid != str(os.getpid())] == tried
    load_session(engine, path, SessionSpec(threads=2))  # another question
    assert [pid for pid in crashing.read_text().split() if pid != str(os.getpid())] == tried * 2


def test_a_cache_that_cannot_be_written_is_none(crashing, tmp_path, monkeypatch):
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    session = load_session(plugins.load(plugins.ENGINES, "crashing"), tiny_graph(tmp_path), SessionSpec())
    assert session.run({"x": np.ones((1, 3, 8, 8), np.float32)})["y"].shape == (1, 3, 8, 8)


INTERRUPTED = """
import os, signal, threading, time
from repaconv.engines import crash_guard

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    crash_guard.attempt(time.sleep, 60)
except KeyboardInterrupt:
    crash_guard.attempt(time.sleep, 0)  # another one is started
    print("interrupted")
"""


def test_ctrl_c_ends_a_trial(tmp_path):
    """In a process of its own: Ctrl-C may end the tests."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=50)
    assert run.stdout == "interrupted\n", run.stderr


def test_what_is_raised_there_is_no_crash(tmp_path):
    crash_guard.attempt(json.loads, "no JSON")
    with pytest.raises(crash_guard.NativeCrash, match="exit code 7"):
        crash_guard.attempt(os._exit, 7)


def mlp_of_one_token(rows: int = 1, wide: int = 16) -> onnx.ModelProto:
    """x + b, and around its MLP a residual, as the last block of a transformer has it that reads its class token."""
    random = np.random.default_rng(0)
    shapes = {"w1": (wide, 2 * wide), "b1": (2 * wide,), "w2": (2 * wide, wide), "b2": (wide,), "b": (wide,)}
    weights = [numpy_helper.from_array(random.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Add", ["a", "b"], ["x"]),
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["out"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, wide]) for name in ("a", "out")]
    graph = helper.make_graph(nodes, "token", ports[:1], ports[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("rows", [1, 8])
def test_openvino_compiles_an_mlp_of_one_token(tmp_path, rows):
    """Which ended the process: two small products in a row, with a residual around them."""
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    path = tmp_path / "token.onnx"
    onnx.save(mlp_of_one_token(rows), path)
    loaded = load_session(plugins.load(plugins.ENGINES, "openvino"), path, SessionSpec())
    assert loaded.options["SNIPPETS_MODE"] == "DISABLE"
    feeds = {"a": np.random.default_rng(1).normal(size=(rows, 16)).astype(np.float32)}
    right = load_session(plugins.load(plugins.ENGINES, "onnxruntime"), path, SessionSpec()).run(feeds)["out"]
    np.testing.assert_allclose(loaded.run(feeds)["out"], right, rtol=1e-4, atol=1e-4)


def test_openvino_keeps_its_kernels_where_nothing_is_wrong_with_them(tmp_path):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    for change in ("more rows", "no residual"):
        model = mlp_of_one_token(64 if change == "more rows" else 1)
        if change == "no residual":
            model.graph.node[-1].CopyFrom(helper.make_node("Relu", ["m"], ["out"]))
        path = tmp_path / "token.onnx"
        onnx.save(model, path)
        loaded = load_session(plugins.load(plugins.ENGINES, "openvino"), path, SessionSpec())
        assert "SNIPPETS_MODE" not in loaded.options

"""Sessions of every engine that runs here: by name in, by name out, and what each says of itself."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from repaconv import registry
from repaconv.engines.contract import Port, SessionSpec
from repaconv.errors import EnvironmentProblem, Refused
from repaconv.proof.runners import Images

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
    engine = registry.load(registry.ENGINES, name)
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
    session.synchronise()
    assert np.array_equal(found["y"], a @ b)
    assert np.array_equal(found["z"], b.astype(bool))
    with pytest.raises(Refused, match="takes 2 inputs: a, b"):
        Images(session)


@pytest.mark.parametrize("name", ENGINES)
def test_a_session_does_what_its_engine_says(name, graph):
    engine = registry.load(registry.ENGINES, name)
    session = engine.open(graph, SessionSpec())
    feeds = {"a": np.ones((4, 3), dtype=np.float32), "b": np.ones((3, 2), dtype=np.float32)}
    assert any("CPU" in device for device in session.placement(feeds).values())
    if "profile" in engine.can:
        assert len(session.profile(feeds, runs=2, warmup_runs=1).kernels) % 2 == 0
    else:
        with pytest.raises(EnvironmentProblem, match="tells no profile"):
            session.profile(feeds, runs=2, warmup_runs=1)
    with pytest.raises(EnvironmentProblem, match="does not run on cuda:0 here"):
        engine.open(graph, SessionSpec(device="cuda:0"))


def test_what_only_builds_opens_nothing(graph):
    engine = registry.load(registry.ENGINES, "tensorrt-rtx")
    assert "run" not in engine.can
    with pytest.raises(EnvironmentProblem, match="RTX cards alone"):
        engine.open(graph, SessionSpec())

"""Real TensorRT-RTX engines of all methods, built with no GPU, and what they are proved to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from test_locate import graph, net

import repaconv as rc
from repaconv.engines.trt_rtx import ENGINE
from repaconv.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.exporters.precision import to_fp16
from repaconv.pipeline.common import load_target

NETS = ("repavit-tiny", "repavit-tiny-swin", "nondeep-tiny", "riformer", "dwconv-tiny", "pyra-tiny")
CARDS = ("8.6", "8.9")


@pytest.fixture(scope="module", autouse=True)
def runtime():
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is absent")


@pytest.mark.parametrize("name", NETS)
def test_every_method_builds_in_both_precisions(name):
    model, _ = graph(name)
    assert net(name)
    for typed, asked in ((model, "FLOAT"), (to_fp16(model, []), "HALF")):
        built = ENGINE.build(typed.SerializeToString(), CARDS, {})
        assert len(built.engine) > 10_000
        assert built.types
        assert all(kind.endswith(f".{asked}") for kind in built.types), built.types


def small(tiny):
    rc.fold(tiny)
    rc.export(target="rtx-40", image_size=32)


def test_build_of_a_run(tiny, repaconv):
    small(tiny)
    done = rc.build(target="rtx-40")
    assert (done.verdict, done.precision, done.compute_capability) == ("passed", "fp32", "8.9")
    assert "not verified here" in done.note
    folder = Path("repaconv-out/tiny/build")
    assert {path.name for path in folder.iterdir()} == {"rtx-40.engine", "rtx-40.json", "rtx-40.log"}
    assert json.loads((folder / "rtx-40.json").read_text())["layer_types"] == dict(done.layer_types)
    code, out, _ = repaconv("build", "--target", "rtx-30")
    assert code == 0
    assert "not verified here" in out
    assert rc.verify(engine=folder / "rtx-40.engine").links[-1].verdict == "not verified"
    rc.fold(tiny)
    assert not folder.exists()


def test_an_engine_that_is_not_what_was_asked_for_is_a_failed_build(tiny, repaconv, monkeypatch):
    from repaconv.exporters import precision

    rc.fold(tiny)
    monkeypatch.setattr(precision, "to_fp16", lambda model, keep: model)  # a converter that did nothing
    monkeypatch.setattr(precision, "in_float", lambda model, kind: ())
    rc.export(target="rtx-40", precision="fp16", image_size=32)
    code, out, _ = repaconv("build", "--target", "rtx-40", "--precision", "fp16")
    assert code == 1
    assert "FLOAT" in out


def test_what_cannot_be_built_is_told(tiny, repaconv):
    rc.fold(tiny)
    with pytest.raises(UsageProblem, match="no fp32 ONNX model yet"):
        rc.build(target="rtx-40")
    rc.export(target="rtx-40")
    with pytest.raises(UsageProblem, match="images of any size"):
        rc.build(target="rtx-40")
    with pytest.raises(EnvironmentProblem, match=r"built there, by its tensorrt 8\.2\.1"):
        rc.build(target="jetson-nano")
    assert repaconv("build", "--target", "orin-nano")[0] == 3
    with pytest.raises(EnvironmentProblem, match="RTX cards alone"):
        rc.bench(target="rtx-40")
    with pytest.raises(EnvironmentProblem, match=r"compute capability 8\.7"):
        ENGINE.build(graph("repavit-tiny")[0].SerializeToString(), ("8.7",), {})
    assert load_target("rtx-50").compute_capability == "12.0"


def test_an_operator_that_the_parser_lacks_is_named():
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Det", ["x"], ["y"], "m/Det")]
    made = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, (2, 3, 3))], [value("y", TensorProto.FLOAT, (2,))]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(Refused, match=r"m/Det \(Det\)"):
        ENGINE.build(model.SerializeToString(), CARDS, {})

"""Untrusted graphs and engines are inspected without running them, and nothing is read from outside their folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import small_graphs
import torch
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from test_engine_build import RTX

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem, first_line
from repaconv.verification.model_runners import load_onnx


def graph_with_weights_in(place: str) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((3, 2), dtype=np.float32), "w")
    external_data_helper.set_external_data(weight, place)
    weight.ClearField("raw_data")
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "m")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 3))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 2))],
        [weight],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10, producer_name="somebody")


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "link.bin"])
def test_weights_from_outside_the_folder_are_refused(place, tmp_path, repaconv):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(np.ones((3, 2), dtype=np.float32).tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    path = folder / "model.onnx"
    path.write_bytes(graph_with_weights_in(place).SerializeToString())
    with pytest.raises(Refused, match="outside its folder") as raised:
        load_onnx(path)
    assert raised.value.code == "onnx.external"
    assert repaconv("bench", path)[0] == 4
    seen = rc.inspect_file(path)
    assert "outside its folder" in seen.problems[0]
    code, out, _ = repaconv("inspect", path)
    assert code == 0
    assert "caution" in out


def test_weights_next_to_the_graph_are_used(tmp_path):
    (tmp_path / "w.bin").write_bytes(2 * np.ones((3, 2), dtype=np.float32).tobytes() * 2)
    path = tmp_path / "model.onnx"
    path.write_bytes(graph_with_weights_in("w.bin").SerializeToString())
    assert load_onnx(path).run({"x": np.ones((1, 3), dtype=np.float32)})["y"].shape == (1, 2)
    assert rc.inspect_file(path).problems == ()
    (tmp_path / "w.bin").unlink()
    assert rc.inspect_file(path).problems == ("its weights 'w.bin' are not there",)
    for stage in (load_onnx, rc.fold, lambda path: rc.compare(path, path)):
        with pytest.raises(Refused, match=r"refers to weights in w\.bin, which is not there"):
            stage(path)


def test_weights_next_to_the_graph_that_are_cut_off_are_to_be_copied_again(tmp_path):
    model, path = graph_with_weights_in("m.data"), tmp_path / "net.onnx"
    model.graph.initializer[0].external_data.add(key="length", value="24")
    path.write_bytes(model.SerializeToString())
    (tmp_path / "m.data").write_bytes(b"1")
    with pytest.raises(Refused, match=r"weights in m\.data, which has 1 bytes of the 24") as refused:
        rc.fold(path)
    assert (refused.value.code, "copy m.data again" in refused.value.hint) == ("onnx.invalid", True)


def test_a_weight_is_as_long_as_its_shape(tmp_path):
    (tmp_path / "w.bin").write_bytes(np.ones(24, dtype=np.float32).tobytes())
    path = tmp_path / "net.onnx"
    path.write_bytes(graph_with_weights_in("w.bin").SerializeToString())  # which says no length
    assert rc.fold(path).verdict == "passed"
    model = onnx.load(path)
    model.graph.initializer[0].raw_data = np.ones(7, dtype=np.float32).tobytes()
    onnx.save(model, path)
    with pytest.raises(Refused, match="w has 28 bytes, but its shape and type take 24") as refused:
        rc.fold(path)
    assert refused.value.code == "onnx.invalid"


def test_a_recipe_is_made_of_what_can_be_read(tmp_path, repaconv):
    (tmp_path / "net.onnx").write_bytes(graph_with_weights_in("w.bin").SerializeToString()[:50])
    assert repaconv("new-recipe", "net.onnx")[0] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_the_first_fault_of_a_damaged_result_is_reported(tmp_path, repaconv):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fold.json").write_text("{}")
    code, _, said = repaconv("report", "run")
    assert (code, "run/fold.json is not a readable result of fold: made_by: field required." in said) == (4, True), said


def test_what_no_machine_can_measure_is_refused_at_once(tmp_path, repaconv):
    nodes, weights = [("Conv", "x w", "y", {})], {"w": (4, 3, 3, 3)}
    ends = {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}, {"y": (TensorProto.FLOAT, ["n", 4, 6, 6])}
    path = small_graphs.saved("net.onnx", nodes, weights, *ends)
    for name in ("net.pth", "net.ckpt"):
        torch.save({}, name)
    for words, ends_with, message in (
        (("--batch", "99999999999"), 3, "not enough memory"),
        (("--threads", "100000"), 2, "100000 threads per inference are far more than the"),
        (("--against", "net.pth"), 4, "net.pth is a checkpoint, and bench measures ONNX models"),
        (("--against", "net.ckpt"), 4, "net.ckpt is a checkpoint, and bench measures ONNX models"),
    ):
        code, _, said = repaconv("bench", path, "--rounds", "2", *words)
        assert (code, message in said) == (ends_with, True), said


@pytest.mark.parametrize(
    "stage",
    [
        rc.fold,
        rc.tune,
        rc.estimate,
        lambda path: rc.bench(path, rounds=2),
        lambda path: rc.compare("whole.onnx", path, speed=True),
    ],
    ids=["fold", "tune", "estimate", "bench", "compare"],
)
def test_an_input_without_a_shape_is_named(stage):
    nodes, weights = [("Conv", "x w", "y", {})], {"w": (4, 3, 3, 3)}
    named = {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}, {"y": (TensorProto.FLOAT, ["n", 4, 6, 6])}
    path = small_graphs.saved("whole.onnx", nodes, weights, *named)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, "net.onnx")
    with pytest.raises(Refused, match=r"net\.onnx .* its input x has no shape") as refused:
        stage("net.onnx")
    assert refused.value.code == "onnx.no-shape"


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"", "it is empty", "damaged"),
        (b"hello", "not an ONNX file", "damaged"),
        (b"PK\3\4", "zip archive", "rename it to .pt"),
        (b"\x80\2", "pickle", "rename it to .pt"),
        (None, "is a folder", "path of the .onnx file"),
    ],
)
def test_what_is_no_graph_is_refused_with_what_to_do(content, message, hint, tmp_path):
    path = tmp_path / "net.onnx"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(Refused) as refused:
        rc.fold(path)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_a_node_that_reads_what_is_not_computed_is_named_by_its_output(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Add", ["a", "w"], ["y"])]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4])] for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", *ends), opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(Refused, match="Add, which computes y, reads w, which is no input"):
        rc.fold(tmp_path / "net.onnx")


def test_a_clip_without_the_bound_that_pytorchs_exporter_lost_is_exported_without_its_optimizer(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Clip", ["a", "bound"], ["y"])]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *ends)
    for producer, hint in (("pytorch", "torch.onnx.export(..., optimize=False)"), ("other", "Export it again; ")):
        opsets = [helper.make_opsetid("", 20)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, producer_name=producer), tmp_path / "net.onnx")
        with pytest.raises(Refused, match="Clip, which computes y, reads bound, which is no input") as refused:
            rc.fold(tmp_path / "net.onnx")
        assert hint in refused.value.hint


def test_nodes_in_any_order_are_sorted(tmp_path):
    """ONNX Runtime loads them in any order, too; a branch reads a value of the graph around it."""
    weights = {"w": (4, 3, 1, 1), "v": (4, 4, 1, 1), "yes": np.array(True)}
    rows = [("Conv", "x w", "a", {}), ("Conv", "a v", "b", {}), ("Neg", "b", "c", {}), ("Add", "c b", "d", {})]
    named = {"x": (TensorProto.FLOAT, [1, 3, 8, 8])}, {"d": (TensorProto.FLOAT, [1, 4, 8, 8])}
    path = small_graphs.saved(tmp_path / "net.onnx", rows, weights, *named)
    model = onnx.load(path)
    nodes = [helper.make_node("Abs", ["n"], ["t"]), helper.make_node("Neg", ["a"], ["n"])]
    branch = helper.make_graph(nodes, "branch", [], [helper.make_value_info("t", onnx.TypeProto())])
    nodes = [
        helper.make_node("If", ["yes"], ["e"], then_branch=branch, else_branch=branch),
        *reversed(model.graph.node),
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.output.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, [1, 4, 8, 8]))
    onnx.save(model, path)
    assert rc.fold(path).verdict == "passed"
    assert rc.estimate(path, target="x86-64").high_ms > 0


def test_nodes_in_a_circle_are_no_graph(tmp_path):
    nodes = [("Add", "x b", "a", {}), ("Neg", "a", "b", {}), ("Relu", "a", "y", {})]
    made = [helper.make_node(kind, read.split(), [write]) for kind, read, write, _ in nodes]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8])] for name in "xy"]
    model = helper.make_model(helper.make_graph(made, "g", *ends), opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "net.onnx")
    for stage in rc.fold, rc.estimate:
        with pytest.raises(Refused, match="Add, which computes a, reads b, which is no input"):
            stage(tmp_path / "net.onnx")


def test_the_reason_of_an_error_of_onnx_runtime_is_reported_without_the_place_in_its_source():
    said = (
        "[ONNXRuntimeError] : 1 : FAIL : Status Message: /onnxruntime_src/onnxruntime/core/providers/cpu/helper.h:47 "
        "void onnxruntime::Helper::Helper(const std::map<std::string<char>, int>&, bool) const the sizes (3, 4) differ."
    )
    assert first_line(ValueError(said)) == ("[ONNXRuntimeError] : 1 : FAIL : Status Message: the sizes (3, 4) differ")
    assert first_line(ValueError("/home/onnxruntime/net.onnx: no (such) file")).endswith("no (such) file")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"arch": "timm:resnet18"}, "usage.onnx", "--arch is for checkpoints"),
        ({"preset": "turbo"}, "form.unknown", "neither a rewrite preset nor a file"),
        ({"preset": "rms-norm"}, "form.unknown", "--rewrites rms-norm"),
        ({"preset": "fastest-known"}, "usage.onnx", "not folded yet"),
    ],
)
def test_options_that_a_graph_does_not_take_are_refused(options, code, words, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(graph_with_weights_in("w.bin").SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(24))
    with pytest.raises(UsageProblem) as refused:
        rc.fold(path, **options)
    assert refused.value.code == code
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_what_a_graph_says_of_itself(tiny, repaconv):
    rc.fold(tiny)
    rc.export(with_preprocessing=True)
    seen = {fact.name: fact.value for fact in rc.inspect_file("repaconv-out/tiny/model.pixels.onnx").facts}
    assert seen["inputs"] == "image [batch, height, width, 3]"
    assert seen["repaconv.method"] == "riformer"
    assert "Conv" in seen["operators"]
    code, out, _ = repaconv("inspect", "repaconv-out/tiny/model.pixels.onnx", "--format", "json")
    assert code == 0
    assert json.loads(out)["data"]["kind"] == "ONNX graph"


@RTX
def test_an_engine_is_recognized_by_its_bytes_and_not_loaded(tiny):
    rc.fold(tiny)
    rc.export(target="rtx-40", image_size=32)
    rc.build(target="rtx-40")
    seen = rc.inspect_file("repaconv-out/tiny/build/rtx-40.32x32.engine")
    result = {fact.name: fact.value for fact in seen.facts}
    assert (seen.kind, result["built by"], result["target"]) == ("TensorRT-RTX engine", "1.7.1.116", "rtx-40")
    assert "runs code" in result["caution"]


def test_what_is_no_engine_and_no_graph(tmp_path, repaconv):
    (tmp_path / "a.engine").write_bytes(b"something else")
    seen = rc.inspect_file(tmp_path / "a.engine")
    assert seen.kind == "unknown"
    assert seen.problems
    (tmp_path / "b.onnx").write_bytes(b"\xff" * 40)
    with pytest.raises(Refused, match="not an ONNX file"):
        rc.inspect_file(tmp_path / "b.onnx")
    (tmp_path / "c.onnx").write_bytes(b"")
    with pytest.raises(Refused, match="not an ONNX file"):
        load_onnx(tmp_path / "c.onnx")
    with pytest.raises(Refused, match="there is no file"):
        rc.inspect_file(Path("nothing.plan"))
    assert repaconv("inspect", tmp_path / "b.onnx")[0] == 4

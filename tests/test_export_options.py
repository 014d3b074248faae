"""export --opset and --keep-fp32: what a user asks of an export by number and by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import helper
from small_graphs import F, saved

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.export_variants import Variant
from repaconv.core.files import read_artefact
from repaconv.engines.targets.schema import from_file
from repaconv.graph import onnx_files
from repaconv.graph.onnx_files import opset_of
from repaconv.onnx_export.fp32_layer_selection import nodes_kept_in_fp32
from repaconv.onnx_export.opset_lowering import lower
from repaconv.results import ExportArtefact
from repaconv.stages.export.text import show_export
from repaconv.stages.shared.target_lookup import load_target

RUN = Path("repaconv-out/net")


@pytest.fixture
def net(tmp_path, monkeypatch):
    """Two convolutions, an activation that opset 20 brought, a classifier; folded, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    nodes = [
        ("Conv", "image v", "1", {"pads": [1] * 4}),
        ("Gelu", "1", "2", {}),
        ("Conv", "2 w", "3", {"pads": [1] * 4}),
        ("Relu", "3", "4", {}),
        ("GlobalAveragePool", "4", "5", {}),
        ("Flatten", "5", "6", {}),
        ("Gemm", "6 h b", "logits", {}),
    ]
    weights = {"v": (8, 3, 3, 3), "w": (8, 8, 3, 3), "h": (8, 4), "b": (4,)}
    path = saved("net.onnx", nodes, weights, {"image": (F, ["n", 3, 8, 8])}, {"logits": (F, ["n", 4])}, opset=20)
    model = onnx.load(path)
    for node, name in zip(model.graph.node, ("stem/Conv", "", "body.0/Conv", "", "", "", "head/Gemm"), strict=True):
        node.name = name
    onnx.save(model, path)
    np.savez("images.npz", input=np.random.default_rng(0).standard_normal((32, 3, 8, 8), dtype=np.float32))
    rc.fold("net.onnx", measure=False)
    return path


def test_the_file_of_an_export_is_called_onnx_and_is_no_folder(net, repaconv):
    Path("folder").mkdir()
    for out, said in (
        ("net.pth", "not of the form NAME.onnx"),
        (".onnx", ".onnx.onnx"),
        ("net", "net.onnx"),
        ("folder", "is a folder, and a file"),
    ):
        code, _, err = repaconv("export", "-o", out)
        assert (code, said in " ".join(err.split())) == (2, True), err
    code, _, err = repaconv("verify", "-o", "folder")
    assert (code, "is a folder, and a file is written here" in " ".join(err.split())) == (2, True), err
    assert not [*Path("folder").iterdir()]


def own_target(text: str) -> str:
    Path("own.toml").write_text(f'name = "own"\nextends = "x86-64"\n{text}\n')
    return "own.toml"


def test_the_opset_of_a_target_that_extends_another_is_its_newest(net):
    device = load_target(own_target("opset = 17"))
    assert (device.opset, device.newest) == (17, 17)
    done = rc.export(target="own.toml")
    assert (done.verdict, opset_of(onnx.load(RUN / "model.own.onnx"))) == ("passed", 17)
    assert load_target(own_target("opset = 17\nnewest_opset = 20")).newest == 20
    assert load_target(own_target("about = 'ours'")).newest == load_target("x86-64").newest
    with pytest.raises(UsageProblem, match="is 17, older than opset = 18"):
        load_target(own_target("opset = 18\nnewest_opset = 17"))


def test_a_variant_with_an_opset_reads_no_newer_one():
    text = '[variants.old]\nopset = 17\n[variants.other]\nruntime_version = "1"'
    Path("own.toml").write_text(f'name = "own"\nextends = "x86-64"\n{text}\n')
    assert load_target("own.toml@old").newest == 17
    assert load_target("own.toml@other").newest == load_target("x86-64").newest


def test_an_export_has_the_opset_that_is_asked_for_and_lies_next_to_the_usual_one(net):
    rc.export()
    done = rc.export(opset=17)
    assert (done.opset, done.chosen_opset, done.verdict) == (17, 17, "passed")
    assert opset_of(onnx.load(RUN / "model.opset17.onnx")) == 17
    assert "Gelu" not in done.operators
    assert (RUN / "model.onnx").is_file()
    assert rc.bench(rounds=2).latencies, "of several the usual one"
    assert Variant(opset=17).options == "--target x86-64 --opset 17"


def test_an_opset_that_cannot_be_written_is_refused(net):
    for opset, why in (
        (12, "opset=12: must be at least 13"),
        (99, "no model of opset 99 is written for the target x86-64"),
    ):
        with pytest.raises(UsageProblem, match=why):
            rc.export(opset=opset)
    assert not list(RUN.glob("model*"))
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], name="norm", num_groups=2)
    values = [helper.make_tensor_value_info(name, F, [2] if name in "sb" else [1, 2, 4, 4]) for name in "xsby"]
    graph = helper.make_graph([node], "g", values[:3], values[3:])
    with pytest.raises(Refused, match=r"norm \(GroupNormalization\) cannot be written in opset 17"):
        lower(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), 17)


QUANTIZERS = ["onnxruntime", pytest.param("nncf", marks=pytest.mark.skipif(not find_spec("nncf"), reason="no NNCF"))]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_int8_keeps_the_layers_that_are_named(net, quantizer):
    given = {"precision": "int8", "inputs": "images.npz", "quantizer": quantizer}
    plain = rc.export(**given)
    assert "body.0/Conv_2" not in plain.unquantized_layers
    done = rc.export(**given, keep_fp32=("head", "body.*"))
    assert set(done.unquantized_layers) == {"body.0/Conv_2", "head/Gemm_6"} == set(done.fp32_nodes), (
        "not the first Conv"
    )
    assert done.fp32_modules == ("head", "body.*")
    assert done.payload.path != plain.payload.path
    assert (RUN / plain.payload.path).is_file()
    slot = next(path for path in RUN.glob("export.int8.keep-*.json"))
    assert read_artefact(slot, ExportArtefact).fp32_modules == ("head", "body.*")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_other_precisions_keep_them_too(net, precision):
    given = {"precision": precision, "inputs": "images.npz", "target": "rtx-40"}
    assert "stem/Conv_0" not in rc.export(**given).unquantized_layers
    done = rc.export(**given, keep_fp32=("stem/*",))
    assert "stem/Conv_0" in done.unquantized_layers
    assert "head/Gemm_6" not in done.unquantized_layers
    assert done.verdict != "failed"


def test_a_name_that_keeps_nothing_is_refused_with_what_is_near(net):
    given = {"precision": "int8", "inputs": "images.npz"}
    with pytest.raises(UsageProblem, match="--keep-fp32 haed matches no layer that int8 changes") as refused:
        rc.export(**given, keep_fp32=("stem", "haed"))
    assert "near: head" in refused.value.hint
    with pytest.raises(UsageProblem, match="keeps every layer"):
        rc.export(**given, keep_fp32=("*",))
    with pytest.raises(UsageProblem, match="float32 keeps every layer"):
        rc.export(keep_fp32=("head",))
    assert not list(RUN.glob("model*"))


def test_a_name_of_the_fp32_export_is_answered_with_the_names_in_this_graph():
    """Where an int8 graph has other rewrites, node names differ; what was said to be near was of other layers."""

    def graph_of(*names):
        nodes = [helper.make_node("MatMul", ["x", "w"], [f"y{i}"], name=name) for i, name in enumerate(names)]
        return helper.make_model(helper.make_graph(nodes, "g", [], []))

    low = graph_of("body.0.fc/MatMul_1", "MatMul_2", "head/MatMul_3")
    plain = graph_of("body.0.fc/Gemm_7", "Gemm_8", "head/Gemm_9")
    plain.graph.node.append(helper.make_node("Gemm", ["x", "w"], ["joined"], name="body.0/Gemm_10"))
    plain.graph.node.append(helper.make_node("Gemm", ["x", "w"], ["lost"], name="Gemm_11"))
    for pattern, hint in {
        "body.0.fc/Gemm_7": "Give body.0.fc/MatMul_1 or the module body.0.fc.",
        "Gemm_8": "Give MatMul_2.",
        "body.0/Gemm_10": "Give the module body.0.",
        "Gemm_11": "Give the module that it is in.",
    }.items():
        with pytest.raises(UsageProblem, match="is a node of the FP32 export") as refused:
            nodes_kept_in_fp32(low, [pattern], "int8", lambda: plain)
        assert refused.value.hint == hint
    for pattern in ("Gemm_12", "head.act"):
        with pytest.raises(UsageProblem, match="matches no layer"):
            nodes_kept_in_fp32(low, [pattern], "int8", lambda: plain)


def test_the_names_of_model_onnx_are_known_to_export(net, monkeypatch):
    given = {"precision": "int8", "inputs": "images.npz", "keep_fp32": ("head/Gemm_77",)}
    rc.export()
    path = RUN / "model.onnx"
    plain = onnx.load(path)
    plain.graph.node[-1].name = "head/Gemm_77"
    read = onnx_files.read_graph
    monkeypatch.setattr(onnx_files, "read_graph", lambda found: plain if found.name == path.name else read(found))
    with pytest.raises(UsageProblem, match="is a node of the FP32 export") as refused:
        rc.export(**given)
    assert "head/Gemm_6" in refused.value.hint
    path.write_bytes(b"changed")
    with pytest.raises(UsageProblem, match="matches no layer"):
        rc.export(**given)


def test_names_are_those_of_nodes_and_of_all_modules_around_them():
    names = ["/body/body.0/conv/Conv", "body.1.fc/MatMul_3", "head/MatMul_4"]
    nodes = [helper.make_node("MatMul", ["x", "w"], [f"y{i}"], name=name) for i, name in enumerate(names)]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    for pattern, places in {
        "body.1": [1],
        "body/body.0": [0],
        "/body": [0],
        "*.fc": [1],
        "*MatMul_?": [1, 2],
        "head/MatMul_4": [2],
    }.items():
        assert nodes_kept_in_fp32(model, [pattern], "int8") == [names[place] for place in places], pattern


def test_files_of_different_names_have_different_names():
    several = [("blocks.0.*",), ("blocks.0.?",), ("blocks_0__",), ("a" * 50,), ("a" * 51,)]
    assert len({Variant(precision="int8", fp32_modules=each).name for each in several}) == len(several)
    assert Variant(precision="int8", fp32_modules=("head",)).name == "int8.keep-head"


def test_a_target_named_like_an_opset_is_refused(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('name = "opset17"\nextends = "x86-64"\nopset = 17\n')
    with pytest.raises(UsageProblem, match=r"own\.toml:1:1: name: .*--opset 17"):
        from_file(own)
    own.write_text('name = "own"\nextends = "x86-64"\nopset = 9\n')
    with pytest.raises(UsageProblem, match="opset: must be at least 13"):
        from_file(own)


def test_what_keep_fp32_kept_is_listed_as_that_and_once(capsys):
    done = SimpleNamespace(
        links=(), precision="int8", quantizer="onnxruntime", calibration="images", image_preprocessing="", scores="",
        fp32_nodes=("head/MatMul_1", "gate/Mul_2"), fp32_modules=("head",), unquantized_layers=("head/MatMul_1",),
        violations=(), rewrites=("a",), preset="default", changes=(1,), unmeasured="", simplified=False, batch=1,
        image_size=None, preprocessing=None, verdict="passed", opset=17, nodes=3, external_data=None, target="x86-64",
        images=None,
    )  # fmt: skip
    show_export(done)
    out = capsys.readouterr().out
    assert "1 node kept in FP32 by --keep-fp32: head/MatMul_1" in out
    assert "1 node kept in FP32 for the range of their values: gate/Mul_2" in out
    assert "not in int8" not in out
    assert "1 change\n" in out


def test_a_layer_that_fp16_keeps_for_its_range_is_listed_once(repaconv):
    rng = np.random.default_rng(0)
    large, small = (rng.standard_normal((4, width, 3, 3)).astype(np.float32) for width in (3, 4))
    saved(
        "net.onnx",
        [("Conv", "x w", "a", {}), ("Relu", "a", "b", {}), ("Conv", "b v", "y", {})],
        {"w": np.float32(1e5) * large, "v": np.float32(1e-5) * small},
        {"x": (F, ["n", 3, 8, 8])},
        {"y": (F, ["n", 4, 4, 4])},
    )
    np.savez("own.npz", x=rng.standard_normal((16, 3, 8, 8)).astype(np.float32))
    rc.fold("net.onnx", measure=False)
    code, out, err = repaconv("export", "--precision", "fp16", "--inputs", "own.npz")
    assert code == 0, err
    assert "kept in FP32 for the range of their values: Conv_0" in out
    assert "not in fp16" not in out

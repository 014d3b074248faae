"""Targets: their data, older opsets, what their parsers lack; every method for each of them."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxsim
import pytest
from conftest import one_net_a_method
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_divergence_location import net

import repaconv as rc
from repaconv.benchmark import cpu_isa_level
from repaconv.core import plugins
from repaconv.core.errors import Refused, UsageProblem
from repaconv.engines.targets import from_file
from repaconv.graph.element_type_conversion import to_float64
from repaconv.onnx_export.onnx_simplifiers import not_run_link, simplify, without_onnxsim_warnings
from repaconv.onnx_export.opset_lowering import lower
from repaconv.onnx_export.target_operator_rules import violations
from repaconv.onnx_export.torch_exporter import OLDEST_EXPORTED, check, to_onnx
from repaconv.stages.export import stage
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.model_runners import ImageSession, TorchRunner, load_onnx

NETS = (
    "repavit-tiny",
    "repavit-tiny-swin",
    "nondeep-tiny",
    "riformer",
    "dwconv-tiny",
    "pyra-tiny",
    "repconv-tiny-mobileone",
)
NAMES = list(plugins.registered(plugins.TARGETS))
EVERY = sorted({f"{n}@{v}" for n in NAMES for v in load_target(n).variants} | set(NAMES))
# what differs between them, as far as a graph is concerned
KINDS = {(t.opset, t.unsupported_ops, t.forbids): t.name for t in map(load_target, EVERY)}


def test_every_target_says_what_it_is_and_where_that_is_from():
    assert set(EVERY) >= {"x86-64", "arm64", "jetson-nano", "xavier", "orin-nano@jp5.1", "orin-agx@jp7.2", "h100", "t4"}
    for name in EVERY:
        target = load_target(name)
        assert target.name == name
        assert target.about
        assert target.source
        assert target.runtime in plugins.registered(plugins.ENGINES)
        engine = plugins.load(plugins.ENGINES, target.runtime)
        here = "networks" in engine.can or target.runtime.startswith("onnxruntime-")  # of any card's
        assert bool(target.architecture) or here == (not target.runtime_version) == (not target.compute_capability)
    assert load_target("orin-nano@jp5.1").runtime_version == "8.5.2"
    assert load_target("orin-nano").compute_capability == load_target("orin-nano@jp7.2").compute_capability == "8.7"


def test_the_default_preset_is_that_of_the_cpu_level(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_isa_level.platform, "machine", lambda: "x86_64")
    for flags, named in (
        ("avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
        ("avx2 avx512f avx512_vnni avx512_bf16", "avx512-bf16"),
        ("avx2 avx512f", "avx512"),
        ("avx2 avx_vnni", "avx-vnni"),
        ("sse2", cpu_isa_level.OTHER),
    ):
        cpuinfo.write_text(f"model name\t: one\nflags\t\t: fpu {flags}\n")
        assert cpu_isa_level.isa_level("x86_64", cpuinfo) == named
    assert cpu_isa_level.isa_level("aarch64", cpuinfo) == cpu_isa_level.isa_level("x86_64", tmp_path / "none") == ""
    monkeypatch.setattr(cpu_isa_level.platform, "machine", lambda: "aarch64")
    cpuinfo.write_text("Features\t: fp asimd asimddp\n")
    assert cpu_isa_level.isa_level("aarch64", cpuinfo) == "dot-product"
    target = load_target("x86-64")
    forms = {"default": target.forms["default"], "safest": target.forms["safest"], "default@amx": ("rms-norm",)}
    own = target.model_copy(update={"forms": forms})
    assert own.form("riformer", "amx") == ("rms-norm",)
    assert own.form("riformer", "avx512-bf16") == own.form("riformer") == target.forms["default"]
    assert own.form("pyra", "avx-vnni") == ("read-tokens",)


@pytest.mark.slow
def test_an_export_on_an_unmeasured_cpu_level_reports_it(monkeypatch, tiny):
    rc.fold(tiny)
    for module in (stage, cpu_isa_level):
        monkeypatch.setattr(module, "isa_level", lambda _architecture: "avx-vnni")
    done = rc.export()
    assert (done.unmeasured, done.rewrites) == ("avx-vnni", ())


def test_a_target_file_may_use_the_former_name_of_the_other_runtimes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "x86-64"\nbeside = ["cpu-torch"]\n')
    assert load_target(str(path)).other_runtimes == ("cpu-torch",)
    path.write_text('name = "mine"\nextends = "x86-64"\n')
    assert load_target(str(path)).other_runtimes == load_target("x86-64").other_runtimes


def test_a_target_of_the_users_own(tmp_path, tiny, repaconv):
    text = (
        'name = "mine"\nabout = "a board"\nruntime = "onnxruntime"\nopset = 17\nprecisions = ["fp32"]\n'
        'lacks = ["LayerNormalization"]\n[bench]\nthreads = 1\nbatch = 1\nrounds = 5\nwarmup_rounds = 1\n'
        "[variants.old]\nopset = 13\n"
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert load_target(f"{path}@old").opset == 13
    rc.fold(tiny)
    assert rc.export(target=str(path)).opset == 17
    assert rc.bench(target=str(path), rounds=2).agreement.verdict == "passed"
    assert repaconv("export", "--onnx", "--target", path, "--precision", "int8")[0] == 2
    for wrong, message in (
        (text.replace("opset = 17", "opset = 9"), r"mine\.toml:4:1: opset"),
        (text.replace('["fp32"]', '["fp64"]'), r"mine\.toml:5:1: precisions"),
        (text.replace("rounds = 5\n", ""), r"mine\.toml:7:2: bench\.rounds"),
        (text.replace("opset = 13", "opsets = 13"), r"mine\.toml:13:1: variants\.old\.opsets"),
    ):
        path.write_text(wrong)
        with pytest.raises(UsageProblem, match=message):
            from_file(path)
    with pytest.raises(UsageProblem, match="no variant"):
        load_target("orin-nano@jp99")


@pytest.mark.parametrize("name", one_net_a_method(NETS, later=("pyra", "repconv", "dwconv")))
def test_every_method_exports_for_every_target(name):
    build, weights, images = net(name)
    runner = TorchRunner(build(), weights, double=False)
    expected = runner.run({"input": images})["output"]
    written = {}
    for opset, lacks, forbids in KINDS:
        base = max(opset, OLDEST_EXPORTED)
        if base not in written:  # test_divergence_location and test_lower_precision need them with a fixed batch, too
            batch = None if name == "repavit-tiny" and base <= 20 else len(images)
            written[base] = to_onnx(
                runner.module, images.shape[1:], output="logits", opset=base, batch=batch, dynamic_size=False
            )
        model = lower(written[base], opset, lacks)
        check(model)
        assert model.opset_import[0].version == opset
        assert violations(model, opset, lacks, forbids) == []
        got = ImageSession(load_onnx(model.SerializeToString())).run(images)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_doctor_says_what_of_a_target_works_here(repaconv):
    code, out, _ = repaconv("doctor", "--target", "x86-64")
    assert code == 0
    assert "works: onnxruntime" in out
    code, out, _ = repaconv("doctor", "--target", "orin-nano@jp5.1", "--format", "json")
    assert code == 3
    rows = {row["name"]: row for row in json.loads(out)["data"]}
    assert "opset 17" in rows["export"]["note"]
    assert "built on the device, by its tensorrt 8.5.2" in rows["build"]["problem"]
    assert "repaconv bundle" in rows["verify"]["problem"]
    assert repaconv("doctor", "--target", "toaster")[0] == 2


def test_export_for_a_board_is_proved_and_recorded(tiny):
    rc.fold(tiny)
    done = rc.export(target="jetson-nano", batch=1)
    assert (done.verdict, done.opset, done.unsupported_ops) == ("passed", 13, ("LayerNormalization",))
    model = onnx.load("repaconv-out/tiny/model.jetson-nano.b1.onnx")
    assert [entry.version for entry in model.opset_import] == [13]
    assert model.ir_version <= 8
    assert rc.verify().verdict == "passed"


def test_what_a_target_does_not_take_fails_the_export(tiny, monkeypatch):
    from repaconv.onnx_export import target_operator_rules

    rc.fold(tiny)
    monkeypatch.setattr(target_operator_rules, "violations", lambda *_: ["operator Conv"])
    done = rc.export()
    assert done.verdict == "failed"
    assert done.violations == ("operator Conv",)
    assert json.loads(Path("repaconv-out/tiny/export.json").read_text())["verdict"] == "failed"


# --- lowering -----------------------------------------------------------------------------------------


def graph(nodes, constants, opset=20, shape=(2, 3, 8), rank=3):
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        weights,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


RANDOM = np.random.default_rng(0)
CASES = {
    "LayerNormalization": (
        [helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], "m/LN", epsilon=1e-3)],
        {"s": RANDOM.standard_normal(8).astype(np.float32), "b": RANDOM.standard_normal(8).astype(np.float32)},
    ),
    "LayerNormalization without an affine": (
        [helper.make_node("LayerNormalization", ["x", "s"], ["y"], "m/LN")], {"s": np.ones(8, dtype=np.float32)}
    ),
    "Gelu": ([helper.make_node("Gelu", ["x"], ["y"], "m/Gelu")], {}),
    "HardSwish": ([helper.make_node("HardSwish", ["x"], ["y"], "m/HardSwish")], {}),
    "Gelu by tanh": ([helper.make_node("Gelu", ["x"], ["y"], "m/Gelu", approximate="tanh")], {}),
    "ReduceMean": ([helper.make_node("ReduceMean", ["x", "a"], ["y"], "m/R", keepdims=0)], {"a": np.array([1, 2])}),
    "ReduceMax": ([helper.make_node("ReduceMax", ["x", "a"], ["y"], "m/R")], {"a": np.array([-1])}),
    "Split": (
        [
            helper.make_node("Split", ["x"], ["p", "q"], "m/S", axis=2, num_outputs=2),
            helper.make_node("Sub", ["p", "q"], ["y"], "m/Sub"),
        ],
        {},
    ),
    "Split, unevenly": (
        [
            helper.make_node("Split", ["x"], ["p", "q", "r"], "m/S", axis=-1, num_outputs=3),
            helper.make_node("Concat", ["r", "q", "p"], ["y"], "m/C", axis=-1),
        ],
        {},
    ),
    "Shape": (
        [
            helper.make_node("Shape", ["x"], ["d"], "m/Shape", start=-1),
            helper.make_node("Concat", ["a", "d"], ["n"], "m/Concat", axis=0),
            helper.make_node("Reshape", ["x", "n"], ["y"], "m/R", allowzero=1),
        ],
        {"a": np.array([6])},
    ),
    "Reshape": ([helper.make_node("Reshape", ["x", "a"], ["y"], "m/R", allowzero=0)], {"a": np.array([0, 24])}),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 17, 18, 20])
@pytest.mark.parametrize("case", CASES)
def test_lowering_is_the_same_function(case, opset):
    nodes, constants = CASES[case]
    model = graph(nodes, constants, rank={"ReduceMean": 1, "Reshape": 2, "Shape": 2}.get(case, 3))
    lacks = ("LayerNormalization", "Gelu")
    lowered = lower(model, opset, lacks)
    check(lowered)
    assert violations(lowered, opset, lacks, ()) == []
    assert all(node.name.startswith("m/") for node in lowered.graph.node)
    x = RANDOM.standard_normal((2, 3, 8)).astype(np.float32)
    before, after = (ImageSession(load_onnx(each.SerializeToString())).run(x) for each in (model, lowered))
    assert np.allclose(after, before, rtol=1e-5, atol=1e-6)
    assert model.opset_import[0].version == 20


def parsed(text: str, opset: int, **constants: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), n) for n, value in constants.items())
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{number}"
    return model


IMAGE = RANDOM.standard_normal((1, 4, 6, 6)).astype(np.float32)
BRANCHES = """s = ReduceMax <keepdims = 0> (x) c = Greater(s, one) y = If (c) <
    then_branch = a () => (float[1, 4, 6, 6] t) { t = Relu(x) },
    else_branch = b () => (float[1, 1, 6, 6] e) { g = Gelu(x) e = ReduceMin(g, n) }
>"""
SCALES = {name: RANDOM.standard_normal(4).astype(np.float32) for name in "sb"}
NAMED_ANEW = {
    "GroupNormalization": (18, 21, "y = GroupNormalization <num_groups = 2> (x, s, b)", SCALES),
    "GridSample": (16, 20, 'y = GridSample <mode = "linear"> (x, g)', {"g": np.zeros((1, 3, 3, 2), np.float32)}),
    "AveragePool": (17, 20, "y = AveragePool <kernel_shape = [2, 2], dilations = [1, 1]> (x)", {}),
    "ReduceL2": (13, 20, "y = ReduceL2(x, n)", {"n": np.array([3])}),
    "ReduceSum": (13, 20, "y = ReduceSum(x, n)", {"n": np.array([3])}),
    "a subgraph": (17, 20, BRANCHES, {"n": np.array([1]), "one": np.float32(100)}),
    "another domain": (17, 20, "g = Gelu(x) y = com.microsoft.Gelu(g)", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED_ANEW)
def test_what_has_another_form_in_an_older_opset_is_written_in_it(case):
    opset, newest, nodes, constants = NAMED_ANEW[case]
    model = parsed(f"(float[1, 4, 6, 6] x) => (float[a, b, c, d] y) {{ {nodes} }}", newest, **constants)
    lowered = lower(model, opset)
    if case != "another domain":
        onnx.checker.check_model(lowered, full_check=True)
    assert {entry.domain: entry.version for entry in lowered.opset_import} == {"": opset, "com.microsoft": 1}
    before, after = (ImageSession(load_onnx(each.SerializeToString())).run(IMAGE) for each in (model, lowered))
    assert np.allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "node",
    [
        "AveragePool <kernel_shape = [2, 2], dilations = [2, 2]> (x)",
        'Pad <mode = "wrap"> (x, n)',
        'Resize <antialias = 1, mode = "linear"> (x, , f)',
        "RoiAlign(x, r, i)",
        "Pad(x, p, , i)",
        'ScatterND <reduction = "max"> (x, j, u)',
    ],
)
def test_what_an_older_opset_does_not_have_is_refused(node):
    with pytest.raises(Refused, match="_0"):
        lower(parsed(f"(float[1, 4, 6, 6] x) => (float[a, b, c, d] y) {{ y = {node} }}", 20), 15)


def test_an_operator_of_another_domain_is_none_that_a_target_lacks():
    model = parsed("(float[4] x) => (float[4] y) { y = com.microsoft.Gelu(x) }", 20)
    assert violations(model, 20, ("Gelu",), (), ("com.microsoft",)) == []


def test_branches_may_have_constants_of_the_same_name():
    def branch(name, axis):
        mean = helper.make_node("ReduceMean", ["x", "axes"], [name], keepdims=0)
        axes = numpy_helper.from_array(np.array([axis]), "axes")
        return helper.make_graph([mean], name, [], [helper.make_tensor_value_info(name, 1, [3])], [axes])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 0))],
        "net",
        [helper.make_tensor_value_info("c", 9, []), helper.make_tensor_value_info("x", 1, [3, 3])],
        [helper.make_tensor_value_info("y", 1, [3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    for choice, axis in ((True, 1), (False, 0)):
        (y,) = ReferenceEvaluator(lower(model, 13)).run(None, {"c": np.array(choice), "x": x})
        np.testing.assert_array_equal(y, x.mean(axis))


@pytest.mark.parametrize("dtypes", [(1, 1), (1, 11)])
def test_branches_may_have_values_of_the_same_name(dtypes):
    def branch(name, dtype, rows):
        """The second half of some rows of x, through an activation of the branch's element type."""
        nodes = [
            helper.make_node("Slice", ["x", "zero", "rows", "zero"], ["part"]),
            helper.make_node("Split", ["part"], ["unused", "half"], num_outputs=2),
            helper.make_node("Cast", ["half"], ["typed"], to=dtype),
            helper.make_node("Gelu", ["typed"], ["bent"]),
            helper.make_node("Cast", ["bent"], [name], to=1),
        ]
        constants = [numpy_helper.from_array(np.array([n]), value) for value, n in (("zero", 0), ("rows", rows))]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, 1, None)], constants)

    branches = {
        f"{kind}_branch": branch(kind, dtype, rows)
        for kind, dtype, rows in zip(("then", "else"), dtypes, (3, 6), strict=True)
    }
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], **branches)],
        "net",
        [helper.make_tensor_value_info("c", 9, []), helper.make_tensor_value_info("x", 1, [6, 2])],
        [helper.make_tensor_value_info("y", 1, ["n", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    lowered, x = lower(model, 15), RANDOM.standard_normal((6, 2)).astype(np.float32)
    onnx.checker.check_model(lowered, full_check=True)
    for choice in (True, False):
        feeds = {"c": np.array(choice), "x": x}
        (right,), (found,) = (ReferenceEvaluator(each).run(None, feeds) for each in (model, lowered))
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_an_input_that_is_left_out_is_no_input_of_the_older_opset():
    pad = helper.make_node("Pad", ["x", "pads", "value", ""], ["y"])
    graph = helper.make_graph(
        [pad],
        "net",
        [helper.make_tensor_value_info("x", 1, [3, 3])],
        [helper.make_tensor_value_info("y", 1, [5, 3])],
        [numpy_helper.from_array(np.array([1, 0, 1, 0]), "pads"), numpy_helper.from_array(np.float32(0), "value")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    lowered = lower(model, 13)
    onnx.checker.check_model(lowered, full_check=True)
    assert [*lowered.graph.node[0].input] == ["x", "pads", "value"]


def test_a_graph_that_was_lowered_before_is_lowered_again():
    """Its constants and values have the names that lowering gives, and other numbers."""
    nodes = [
        helper.make_node("Add", ["x", "constant_0"], ["y.1"], "m/Add"),
        helper.make_node("Add", ["y.1", "constant_1"], ["y.2"], "m/Add_1"),
        helper.make_node("LayerNormalization", ["y.2", "s"], ["z"], "m/LN"),
        helper.make_node("Gelu", ["z"], ["g"], "m/Gelu"),
        helper.make_node("ReduceMax", ["g", "whole_-1"], ["r"], "m/R"),
        helper.make_node("Sub", ["g", "r"], ["y"], "m/Sub"),
    ]
    constants = {"constant_0": np.float32(3), "constant_1": RANDOM.standard_normal(8).astype(np.float32)}
    constants |= {"whole_-1": np.array([1]), "s": RANDOM.standard_normal(8).astype(np.float32)}
    model, x = graph(nodes, constants), RANDOM.standard_normal((2, 3, 8)).astype(np.float32)
    for opset in (13, 18, 20):
        lowered = lower(model, opset, ("LayerNormalization", "Gelu"))
        check(lowered)
        before, after = (ImageSession(load_onnx(each.SerializeToString())).run(x) for each in (model, lowered))
        assert np.allclose(after, before, rtol=1e-5, atol=1e-6)


def normalized(x, scale, shift, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + shift


IN_FLOAT64 = {
    "LayerNormalization": lambda x, s, b: normalized(x, s, b, np.float64(np.float32(1e-3))),
    "LayerNormalization without an affine": lambda x, s: normalized(x, s, 0, np.float64(np.float32(1e-5))),
    "Gelu by tanh": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("case", IN_FLOAT64)
def test_a_graph_in_float64_is_lowered_in_float64(case):
    nodes, constants = CASES[case]
    model = to_float64(graph(nodes, constants))
    lowered = lower(model, 13)
    check(lowered)
    x = RANDOM.standard_normal((2, 3, 8))
    found = load_onnx(lowered).run({"x": x})["y"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, IN_FLOAT64[case](x, **constants), rtol=1e-12, atol=1e-14)


def test_what_has_no_older_form_is_refused():
    wide = helper.make_node("LayerNormalization", ["x", "s"], ["y"], "m/LN", axis=1)
    with pytest.raises(Refused, match="m/LN"):
        lower(graph([wide], {"s": np.ones((3, 8), dtype=np.float32)}), 13)
    empty = helper.make_node("Reshape", ["x", "n"], ["y"], "m/R", allowzero=1)
    with pytest.raises(Refused, match="m/R"):
        lower(graph([empty], {"n": np.array([0, 8])}), 13)
    reduced = helper.make_node("ReduceSum", ["x"], ["s"], "m/Sum", keepdims=0)
    given = [reduced, helper.make_node("Cast", ["s"], ["a"], "m/Cast", to=7)]
    with pytest.raises(Refused, match="m/Max"):  # axes that are computed
        lower(graph([*given, helper.make_node("ReduceMax", ["x", "a"], ["y"], "m/Max")], {}), 13)
    free = helper.make_node("Split", ["x"], ["p", "y"], "m/Split", axis=0, num_outputs=2)
    with pytest.raises(Refused, match="m/Split"):
        lower(graph([free], {}, shape=("n", 3, 8)), 13)
    with pytest.raises(Refused, match="opset 12"):
        lower(graph(*CASES["Gelu"]), 12)


def test_rules_name_what_they_find():
    nodes = [
        helper.make_node("ScatterElements", ["x", "i", "x"], ["s"], "m/Scatter", reduction="add"),
        helper.make_node("ReduceMax", ["s"], ["k"], "m/Max", keepdims=0),
        helper.make_node("Cast", ["k"], ["c"], "m/Cast", to=TensorProto.INT64),
        helper.make_node("Reshape", ["c", "one"], ["d"], "m/R"),
        helper.make_node("TopK", ["s", "d"], ["y", "j"], "m/TopK"),
    ]
    model = graph(nodes, {"i": np.zeros((2, 3, 8), dtype=np.int64), "one": np.array([1]), "z": np.zeros(1)}, opset=18)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    found = violations(model, 13, ("Cast",), ("scatter-add", "topk-from-a-value", "float64", "dynamic-batch"))
    assert [each.split(" ")[0] for each in found] == ["opset", "operator", "m/Scatter:", "m/TopK:", "float64", "a"]
    assert violations(model, 18, (), ()) == []


def test_rules_go_by_operators_not_by_what_a_file_declares():
    model = graph([helper.make_node("Relu", ["x"], ["y"])], {}, opset=18)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    assert violations(model, 18, (), ()) == []
    branch = helper.make_graph([helper.make_node("Gelu", ["x"], ["z"], domain="com.microsoft")], "b", [], [])
    model.graph.node.append(helper.make_node("If", ["c"], ["w"], then_branch=branch, else_branch=branch))
    assert violations(model, 18, (), ()) == ["operators of com.microsoft"]
    assert violations(model, 18, (), (), load_target("x86-64").domains) == []


def test_what_a_simplifier_leaves_empty_at_the_end_is_left_out():
    """onnxsim drops a recurrent layer's zeros and leaves their place."""
    hold = {"w": np.ones((1, 9, 4)), "r": np.ones((1, 9, 3)), "b": np.ones((1, 18)), "h": np.zeros((1, 2, 3))}
    nodes = [helper.make_node("GRU", ["x", "w", "r", "b", "", "h"], ["y"], hidden_size=3)]
    values = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", [5, 2, 4]), ("y", [5, 1, 2, 3]))
    ]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in hold.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "gru", *values, weights), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    found = simplify(model, lambda _: not_run_link("").model_copy(update={"verdict": "passed"}), ("onnxsim",))
    assert found.accepted
    assert found.model.graph.node[0].input[-1]


def test_a_simplifier_writes_no_operator_that_only_onnx_runtime_has():
    """onnxsim made com.microsoft.Attention of VitPose's, so that no export for TensorRT passed."""
    random, nodes = np.random.default_rng(0), []
    weights = {"apart": np.array([1, -1, 2, 3]), "flat": np.array([1, 4, 6]), "scale": np.float32(0.5)}
    for name in "qkv":
        weights |= {f"{name}w": random.normal(size=(6, 6)), f"{name}b": random.normal(size=6)}
        nodes += [
            helper.make_node("MatMul", ["x", f"{name}w"], [f"{name}1"]),
            helper.make_node("Add", [f"{name}1", f"{name}b"], [f"{name}2"]),
            helper.make_node("Reshape", [f"{name}2", "apart"], [f"{name}3"]),
            helper.make_node("Transpose", [f"{name}3"], [name], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["shares"], axis=-1),
        helper.make_node("MatMul", ["shares", "v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["heads"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["heads", "flat"], ["y"]),
    ]
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 6])] for name in "xy"]
    stored = [
        numpy_helper.from_array(np.asarray(a, np.float32 if np.asarray(a).dtype.kind == "f" else np.int64), name)
        for name, a in weights.items()
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "attention", *ports, stored), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    fused, _ = onnxsim.simplify(model, skipped_optimizers=["fuse_qkv"])
    assert "com.microsoft" in {node.domain for node in fused.graph.node}  # or this test shows nothing
    found = simplify(model, lambda _: not_run_link("").model_copy(update={"verdict": "passed"}), ("onnxsim",))
    assert found.accepted
    assert {node.domain for node in found.model.graph.node} == {""}


def test_the_simplifier_leaves_a_transpose_in_the_steps_of_its_rewrite():
    ports = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", [1, 5, 3, 4]), ("y", [1, 3, 4, 5]))
    ]
    nodes = [
        helper.make_node("Transpose", ["x"], ["heads"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["heads"], ["y"], perm=[0, 1, 3, 2]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "keys", *ports), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    assert len(onnxsim.simplify(model)[0].graph.node) == 1  # or this test shows nothing
    found = simplify(model, lambda _: not_run_link("").model_copy(update={"verdict": "passed"}), ("onnxsim",))
    assert found.accepted
    assert len(found.model.graph.node) == 2


def test_a_simplified_graph_has_the_metadata_of_the_original_alone():
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])] for name in "xy"]
    nodes = [helper.make_node("Identity", ["x"], ["same"]), helper.make_node("Relu", ["same"], ["y"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ports), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    helper.set_model_props(model, {"author": "somebody"})
    assert len(onnxsim.simplify(model)[0].metadata_props) > 1  # or this test shows nothing
    found = simplify(model, lambda _: not_run_link("").model_copy(update={"verdict": "passed"}), ("onnxsim",))
    assert found.accepted
    assert [(each.key, each.value) for each in found.model.metadata_props] == [("author", "somebody")]


def test_an_operator_of_another_domain_discards_a_simplified_graph(monkeypatch):
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])] for name in "xy"]
    model = helper.make_model(
        helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", *ports),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    other = copy.deepcopy(model)
    other.graph.node[0].domain = "com.microsoft"
    monkeypatch.setattr(onnxsim, "simplify", lambda _model, **_asked: (other, True))
    found = simplify(model, lambda _: not_run_link(""), ("onnxsim",))
    assert (found.accepted, found.model) == (False, model)
    assert found.link.note == "onnxsim failed: it wrote operators of com.microsoft"


def test_what_a_simplifier_fuses_is_no_operator_that_the_target_lacks():
    """onnxsim made one LayerNormalization of those that were written out for a target without it."""
    random, lacks = np.random.default_rng(0), ("LayerNormalization",)
    weights = [numpy_helper.from_array(random.normal(size=6).astype(np.float32), name) for name in ("scale", "shift")]
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 5, 6])] for name in "xy"]
    node = helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["y"], axis=-1)
    given = helper.make_model(
        helper.make_graph([node], "norm", *ports, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    written_out = lower(given, 17, lacks)
    assert violations(written_out, 17, lacks, ()) == []
    found = simplify(
        written_out, lambda _: not_run_link("").model_copy(update={"verdict": "passed"}), ("onnxsim",), lacks
    )
    assert found.accepted
    assert violations(found.model, 17, lacks, ()) == []
    feeds = {"x": random.normal(size=(2, 5, 6)).astype(np.float32)}
    right, gives = (load_onnx(model).run(feeds)["y"] for model in (given, found.model))
    np.testing.assert_allclose(gives, right, rtol=1e-5, atol=1e-6)


def test_onnxsims_lines_about_constants_are_kept_back_and_all_others_are_not(capfd):
    with without_onnxsim_warnings():
        os.write(2, b'WARNING: failed to run "Unsqueeze" op (name is "a"), skip... no initializer b\nother\n')
    assert capfd.readouterr().err == "other\n"

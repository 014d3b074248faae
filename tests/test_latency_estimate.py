"""Latency estimates for boards that are not connected: what they contain, and where an estimate is not accepted."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import onnx
import pytest
from estimate_error import page
from onnx import TensorProto, helper, numpy_helper
from pytorch_vs_onnxruntime import table as torch_table

import repaconv as rc
from repaconv.benchmark.latency_estimate import estimated, measured_limits, unknown
from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, Refused, RepaconvError, UsageProblem
from repaconv.core.files import read_artefact
from repaconv.graph.compute_costs import fix_shape, node_works
from repaconv.graph.models_in_onnx_ir import read
from repaconv.results import BenchArtefact, EstimateArtefact, Limits
from repaconv.stages.bench.latency_baselines import history_of
from repaconv.stages.shared.target_lookup import load_target

RUN = Path("repaconv-out/tiny")
ELSEWHERE = "arm64" if platform.machine() != "aarch64" else "x86-64"
AWAY = [
    name
    for name in plugins.registered(plugins.TARGETS)
    if load_target(name).compute_capability or load_target(name).architecture not in ("", platform.machine())
]
LIMITS = Limits(
    device="a card",
    peak_tflops={"fp32": 1, "fp16": 2, "int8": 4},
    bandwidth_gb_s=100,
    launch_us=5,
    source=("this test",),
)


def network(depth=3, width=64, kind=TensorProto.FLOAT, opset=20):
    """Linear layers [B, width] with a GELU behind each, batch and their widths in the file, nothing else."""
    weight = np.zeros((width, width), dtype=helper.tensor_dtype_to_np_dtype(kind))
    nodes = []
    for layer in range(depth):
        nodes += [
            helper.make_node("MatMul", [f"x{layer}", "w"], [f"h{layer}"], f"blocks.{layer}/MatMul"),
            helper.make_node("Gelu", [f"h{layer}"], [f"x{layer + 1}"], f"blocks.{layer}/Gelu"),
        ]
    ends = [helper.make_tensor_value_info(name, kind, ("batch", width)) for name in ("x0", f"x{depth}")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def total(proto, limits=LIMITS, batch=4, lowered=None):
    """Low, high and the nodes."""
    fix_shape(proto, (batch, proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value))
    nodes = estimated(node_works(read(proto), lowered), limits)
    return sum(node.low_ms for node in nodes), sum(node.high_ms for node in nodes), nodes


# --- the model: its laws ------------------------------------------------------------------------------


def test_the_cost_of_a_node_equals_the_manual_count():
    _, _, (product, gelu) = total(network(depth=1))
    assert (product.flops, product.bytes) == (2 * 4 * 64 * 64, 4 * (64 * 64 + 2 * 4 * 64))
    assert (gelu.flops, gelu.bytes, gelu.low_ms) == (0, 4 * 2 * 4 * 64, 0)
    assert product.low_ms == pytest.approx(max(product.flops / 1e12, product.bytes / 100e9) * 1e3)
    assert product.high_ms == pytest.approx(2 * product.low_ms + 5e-3)
    assert (product.limit, gelu.limit) == ("launch", "launch")


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_twice_as_deep_takes_twice_as_long(kind):
    once, twice = total(network(3, kind=kind)), total(network(6, kind=kind))
    assert twice[:2] == pytest.approx([2 * part for part in once[:2]])


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_low_is_no_more_than_high_and_more_of_anything_is_no_slower(batch):
    low, high, nodes = total(network(), batch=batch)
    assert low < high
    assert all(node.low_ms <= node.high_ms for node in nodes)
    better = (
        {"bandwidth_gb_s": 200},
        {"peak_tflops": {"fp32": 2}},
        {"launch_us": 1},
        {"peak_tflops": {"fp32": 1, "tf32": 8}},
    )
    for change in better:
        found = total(network(), LIMITS.model_copy(update=change), batch=batch)
        assert found[0] <= low
        assert found[1] <= high
    fewer = total(network(), batch=max(1, batch // 2))
    assert fewer[0] <= low
    assert fewer[1] <= high


def test_a_graphs_own_types_decide_and_a_runtime_that_lowers():
    plain, half = total(network())[2], total(network(kind=TensorProto.FLOAT16))[2]
    assert {node.precision for node in half} == {"fp16"}
    assert [2 * node.bytes for node in half] == [node.bytes for node in plain]
    lowered = total(network(), lowered="fp16")[2]
    assert [(node.precision, node.bytes, node.low_ms) for node in lowered] == [
        (node.precision, node.bytes, node.low_ms) for node in half
    ]
    with pytest.raises(UsageProblem, match="the peak throughput of a card in bf16 is unknown"):
        total(network(), lowered="bf16")


def test_what_is_not_known_is_left_out_and_said():
    proto = network(depth=1)
    proto.graph.node[1].CopyFrom(helper.make_node("FancyGelu", ["h0"], ["x1"], "g", domain="com.vendor"))
    proto.opset_import.append(helper.make_opsetid("com.vendor", 1))
    fix_shape(proto, (4, 64))
    found = list(node_works(read(proto)))
    assert "com.vendor.FancyGelu" in unknown(found)
    assert [node.flops > 0 for node in estimated(found, LIMITS)] == [True, False]


def test_this_machines_limits_are_measured_by_its_runtime():
    found = measured_limits(plugins.load(plugins.ENGINES, "onnxruntime"), "int8", 1)
    assert set(found.peak_tflops) == {"fp32", "int8"}
    assert "measured here by onnxruntime" in found.source[0]


def test_the_page_of_the_docs_is_that_of_the_result():
    root = Path(__file__).parents[1]
    result = json.loads((root / "benchmarks/results/estimate_error.json").read_text())
    assert {row["method"] for row in result["rows"]} == {"repavit", "nondeep", "riformer", "pyra", "dwconv"}
    assert (root / "docs/estimate-accuracy.md").read_text() == page(result)


def test_the_page_compares_torch_with_onnx_runtime_for_every_method():
    root = Path(__file__).parents[1]
    result = json.loads((root / "benchmarks/results/pytorch_vs_onnxruntime.json").read_text())
    assert {row["method"] for row in result["rows"]} == {"repavit", "nondeep", "riformer", "pyra", "dwconv"}
    assert {row["agreement"] for row in result["rows"]} == {"passed"}
    assert torch_table(result) in (root / "docs/benchmarks.md").read_text()


# --- targets ------------------------------------------------------------------------------------------


def test_every_limit_of_a_shipped_target_has_its_source():
    stated = {}
    for name in plugins.registered(plugins.TARGETS):
        if (limits := load_target(name).limits) is not None:
            stated[name] = limits
            assert set(limits.peak_tflops) - {"tf32"} == set(load_target(name).precisions)
            assert "clock" in limits.device
            assert any("data sheet" in each or "brief" in each or "white paper" in each for each in limits.source)
            assert any(each.startswith("launch: ") for each in limits.source)
    assert set(stated) >= {"orin-nano", "orin-agx", "xavier", "jetson-nano", "t4", "a100", "h100"}


def test_a_target_of_the_users_own_extends_a_family(tiny):
    rc.fold(tiny)
    rc.export(target="rtx-40")
    with pytest.raises(UsageProblem, match="covers many devices") as raised:
        rc.estimate(target="rtx-40")
    lines = raised.value.hint.splitlines()[1:]
    figures = {"which one, at which clock": "mine", "...": "20"}
    text = "\n".join(lines)
    for blank, figure in figures.items():
        text = text.replace(blank, figure)
    Path("mine.toml").write_text(text)
    done = rc.estimate(target="./mine.toml")
    assert (done.limits.device, done.limits.bandwidth_gb_s) == ("mine", 20)
    assert done.options == ("--estimate", "--target", "./mine.toml")
    Path("mine.toml").write_text(text.replace("launch_us", "lunch_us"))
    with pytest.raises(UsageProblem, match=r"mine\.toml:2:\d+: limits\.l"):
        load_target("./mine.toml")


# --- a board that is not here -------------------------------------------------------------------------


def test_a_board_that_is_not_here_is_answered_with_the_ways_that_there_are(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    before = sorted(Path().rglob("*"))
    code, out, err = repaconv("bench", "--target", "orin-nano", "--precision", "fp16")
    assert (code, out) == (3, "")
    lines = [line for line in err.splitlines() if "newest run" not in line and "open the model" not in line]
    rows = [line.partition("#")[0].strip() for line in lines]
    assert "orin-nano is not this machine" in rows[0]
    words = "--target orin-nano --precision fp16"
    assert rows[2:] == [
        f"repaconv export {words}",
        f"repaconv bundle {words}",
        "repaconv collect result.tar.gz",
        f"repaconv bench {words} --host user@board",
        f"repaconv bench {words} --scheduler tcp://HOST:8786",
        f"repaconv bench {words} --estimate",
    ]
    assert sorted(Path().rglob("*")) == before
    code, out, _ = repaconv("bench", RUN, "--target", "orin-nano", "--format", "json")
    (error,) = json.loads(out)["errors"]
    assert (code, error["code"]) == (3, "bench.elsewhere")
    assert f"repaconv bundle {RUN} --target orin-nano" in error["hint"]


@pytest.mark.parametrize("target", AWAY)
def test_no_target_that_is_elsewhere_is_measured_here(target, tiny):
    rc.fold(tiny)
    with pytest.raises(EnvironmentProblem, match=f"{target} is not this machine") as raised:
        rc.bench(target=target)
    assert f"repaconv bench --target {target} --estimate" in raised.value.hint
    assert ("repaconv bundle" in raised.value.hint) == (load_target(target).runtime == "tensorrt")


def test_a_bare_graph_belongs_to_no_run(tiny):
    rc.fold(tiny)
    rc.export(onnx="m.onnx")
    with pytest.raises(EnvironmentProblem) as raised:
        rc.bench("m.onnx", target="orin-nano")
    lines = [line.partition("#")[0].strip() for line in raised.value.hint.splitlines()[1:]]
    assert lines == [
        "repaconv bench m.onnx --target orin-nano",
        "repaconv bench m.onnx --target orin-nano --estimate",
    ]
    done = rc.estimate("m.onnx", target="orin-nano", image_size=64)
    assert (done.image_size, done.variant, done.output_files) == ((64, 64), "", ())
    assert done.low_ms > rc.estimate("m.onnx", target="orin-nano").low_ms
    with pytest.raises(Refused, match="is not an ONNX model"):
        rc.estimate("tiny.pth", target="orin-nano")


def test_doctor_says_the_same_ways(repaconv):
    code, out, _ = repaconv("doctor", "--target", "orin-nano", "--format", "json")
    rows = {row["name"]: row for row in json.loads(out)["data"]}
    assert code == 3
    for way in ("bundle --target orin-nano", "--host user@board", "--scheduler", "--estimate"):
        assert way in rows["bench"]["problem"]
    code, out, _ = repaconv("doctor", "--target", ELSEWHERE, "--format", "json")
    rows = {row["name"]: row for row in json.loads(out)["data"]}
    assert code == 0
    assert rows["verify"]["note"].startswith("works")
    assert f"repaconv bench --target {ELSEWHERE} --estimate" in rows["bench"]["note"]


# --- an estimate is no measurement --------------------------------------------------------------------


def test_an_estimate_is_labelled_in_every_output_and_kept_apart(tiny, repaconv):
    rc.fold(tiny)
    rc.export(target="orin-nano")
    code, out, err = repaconv("bench", "--target", "orin-nano", "--estimate")
    assert code == 0
    assert "estimated, not measured" in out
    place = RUN / "bench/orin-nano.estimate.json"
    assert str(place) in err
    code, out, _ = repaconv("bench", "--target", "orin-nano", "--estimate", "--format", "json")
    data = json.loads(out)["data"]
    assert (code, data["label"], data["verdict"]) == (0, "estimated, not measured", "not verified")
    done = read_artefact(place, EstimateArtefact)
    assert 0 < done.low_ms < done.high_ms
    assert done.note == ""  # every node's shape is known, of a network for any size
    assert sum(node.flops for node in done.nodes) == 2 * rc.inspect(tiny).deploy.macs
    assert history_of(rc_run().history("orin-nano")) == []
    report = rc.report(format="markdown", paper=False)
    text = Path(report.output_files[0]).read_text()
    assert "orin-nano, estimated, not measured" in text
    assert "repaconv bench --estimate --target orin-nano" in text
    assert "no latency" in text
    page = Path(rc.report(paper=False).output_files[0]).read_text()
    assert "estimated, not measured" in page
    rc.fold(tiny)  # the same network: nothing is removed
    assert place.exists()


def rc_run():
    from repaconv.core.run_folder import Run

    return Run(RUN)


def test_no_gate_no_baseline_and_no_history_takes_an_estimate(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    rc.estimate()
    with pytest.raises(RepaconvError):
        read_artefact(RUN / "bench/x86-64.estimate.json", BenchArtefact)
    for option in (("--baseline", "b.json"), ("--rounds", "5"), ("--profile",), ("--host", "user@board")):
        code, _, err = repaconv("bench", "--estimate", *option)
        assert code == 2
        assert "--estimate measures nothing" in err
    Path("r.toml").write_text(f'checkpoint = "{tiny.name}"\n[bench]\nestimate = true\n')
    code, out, err = repaconv("gate", "r.toml")
    assert code == 2
    assert "estimate" in out + err
    assert not Path("b.json").exists()
    assert not rc_run().history("x86-64").exists()


def test_a_measurement_is_shown_next_to_the_estimate(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    assert rc.estimate().measured_ms is None
    measured = rc.bench(rounds=5)
    beside = rc.estimate()
    assert beside.measured_ms == measured.latencies[0].p50_ms
    assert "by bench on" in beside.measurement
    assert rc.estimate(batch=2).measured_ms is None
    assert "measured" in repaconv("bench", "--estimate")[1]


def test_int8_is_estimated_as_int8(tiny):
    rc.fold(tiny)
    rc.export(target="orin-nano", precision="int8")
    done = rc.estimate(target="orin-nano", precision="int8")
    assert done.precision == "int8"
    products = [node.precision for node in done.nodes if node.flops]
    assert products.count("int8") > len(products) / 2


def test_a_graph_that_computes_an_output_twice_is_refused_with_the_output():
    twice = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17]> g (float[1, 3, 8, 8] x) => (float[1, 3, 8, 8] y) {
            y = Relu(x) y = Neg(x) }"""
    )
    onnx.save(twice, "twice.onnx")
    with pytest.raises(Refused, match="Output 'y' is redeclared"):
        rc.estimate("twice.onnx", target="orin-nano")

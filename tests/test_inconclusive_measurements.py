"""No text claims a speedup that an inconclusive measurement does not show, in every place that reports speed."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_previous_schema_version import STORED

import repaconv as rc
from repaconv.benchmark import interleaved_protocol
from repaconv.benchmark.system_monitor import MachineChanges
from repaconv.cli.text_and_json_output import print_result
from repaconv.core.errors import GateFailed, Inconclusive
from repaconv.core.files import canonical_json
from repaconv.results import (
    PREVIOUS,
    SCHEMA_VERSION,
    Accuracy,
    BenchArtefact,
    Candidate,
    CompareArtefact,
    ComparedEnd,
    ConvertArtefact,
    Deployment,
    Ratio,
    Regression,
    ReportRow,
    SpeedTarget,
    SpeedTrial,
    ThroughputArtefact,
    Trade,
    Tried,
    TuneArtefact,
)
from repaconv.sources.fold_size_reverts import Kept
from repaconv.sources.graph_fold import folded
from repaconv.stages.bench.latency_baselines import check_baseline
from repaconv.stages.convert.speed_target import SpeedSearch
from repaconv.stages.fold import speed_reverts
from repaconv.stages.fold.speed_reverts import revert_slower
from repaconv.stages.recipe.gate_checks import measurement_sentence
from repaconv.stages.report.tradeoff_plots import PALE, pareto_svg, trade_svg
from repaconv.verification.graph_with_cached_outputs import Evaluated

CLAIM = re.compile(
    r"\b(faster|slower|fastest|differ(?:ent)?|times as (?:fast|long|many)|speedup \d\S*|(?<!load )1\.4[0-9]+)\b"
)
"""Words, and figures to more than a digit, that only a measurement may use that shows something."""
NOT = "not conclusive (about 1.4x)"


def ratio(verdict: str = "not conclusive") -> Ratio:
    figures = {"median": 1.4123, "low": 1.4012, "high": 1.4321, "confidence": 0.95, "p10": 1.4111, "p90": 1.4222}
    return Ratio(subject="deploy form", other="training form", verdict=verdict, **figures)


def as_recorded(quality: str) -> dict:
    """A stored measurement as versions before wrote it: its ratio claims something whatever its quality."""
    plain = json.loads((STORED / "method" / "bench" / "x86-64.json").read_text())
    plain["ratio"] = ratio("faster").model_dump(mode="json")
    plain["quality"] |= {"verdict": quality, "reasons": ["other load"] if quality != "trusted" else []}
    return plain


def read(kind, plain: dict):
    """A record of the previous schema version."""
    return kind.model_validate({**plain, "schema_version": SCHEMA_VERSION}, context=PREVIOUS)


def bench(quality: str = "inconclusive") -> BenchArtefact:
    return read(BenchArtefact, as_recorded(quality))


def says(text: str) -> None:
    """It names the ratio as not conclusive, and claims nothing."""
    text = re.sub("<style>.*?</style>", "", text, flags=re.S)
    assert NOT in " ".join(text.split())
    assert not CLAIM.search(text), CLAIM.search(text)


def shown(record, capfd) -> str:
    capfd.readouterr()
    print_result(record)
    return capfd.readouterr().out


@pytest.fixture
def run(tmp_path):
    """The stored run of a method, with an inconclusive measurement."""
    shutil.copytree(STORED / "method", "method")
    shutil.copy(STORED / "method.pth", "method.pth")
    for path in Path("method").rglob("*.json"):
        path.write_text(path.read_text().replace("@HERE@", str(tmp_path)))
    Path("method/bench/x86-64.json").write_text(canonical_json(as_recorded("inconclusive")))
    return Path("method")


def test_a_record_claims_nothing_that_its_quality_does_not_carry():
    """Also one that an earlier version wrote, in Python and as JSON."""
    assert bench("trusted").ratio.verdict == "faster"
    assert bench().ratio.verdict == "not conclusive"
    assert json.loads(bench().model_dump_json())["ratio"]["verdict"] == "not conclusive"
    assert bench().compared == f"deploy form (fp32) against training form (fp32): {NOT}"
    message = "deploy form (fp32): speedup 1.412 over training form (fp32) (95% interval 1.401 to 1.432): faster"
    assert bench("trusted").compared == message


def test_bench_and_the_gate(capfd):
    says(shown(bench(), capfd))
    says(measurement_sentence(bench()))
    assert CLAIM.search(shown(bench("trusted"), capfd))  # the words are those that are looked for
    assert CLAIM.search(measurement_sentence(bench("trusted")))


def test_compare(capfd):
    end = ComparedEnd(name="a.onnx", engine="e", precision="fp32", sha256="0")
    done = CompareArtefact(
        made_by={}, verdict="passed", reference=end, candidate=end, inputs="x", links=(), measured=bench()
    )
    says(shown(done, capfd))


def test_throughput(capfd):
    plain = as_recorded("inconclusive")
    row = {"engine": "e", "precision": "int8", "streams": 2, "threads": 1, "images_per_second": 9.0, "sha256": "0"}
    row |= {"p50_ms": 2.0, "p95_ms": 3.0, "model": "m.onnx"}
    names = ("deploy form", "training form")
    kept = ("verdict", "made_by", "quality", "machine", "target", "batch", "image_size", "rounds", "seed", "session")
    rows = [{**row, "name": name} for name in names]
    plain = {key: plain[key] for key in kept} | {"rows": rows, "scaling": plain["ratio"], "ratio": plain["ratio"]}
    done = read(ThroughputArtefact, plain)
    says(shown(done, capfd))
    assert done.compared == (f"deploy form (int8) against training form (int8): {NOT}",) * 2


def test_a_baseline():
    past = Regression(ratio=1.4, low=1.3, high=1.5, confidence=0.95, allowed=0.05, verdict="inconclusive")
    assert "not conclusive (about 1.4x the time" in past.description
    assert not CLAIM.search(past.description)
    trusted, doubted = bench("trusted"), bench()
    check_baseline(Path("b.json"), "m", trusted, 0.5, update=True)
    judged = check_baseline(Path("b.json"), "m", doubted, 0.5)
    assert (judged.verdict, judged.regression.verdict) == ("inconclusive", "inconclusive")
    assert not CLAIM.search(judged.description)
    changed = trusted.model_copy(update=check_baseline(Path("b.json"), "m", doubted, 0.5).changes(trusted))
    assert (changed.quality.verdict, changed.ratio.verdict) == ("inconclusive", "not conclusive")


@pytest.mark.parametrize("format", ["html", "markdown", "card"])
def test_the_report_of_a_run(run, format):
    page = Path(rc.report(run, format=format).output_files[0]).read_text()
    says(page)
    assert f"deploy form (fp32) against training form (fp32): {NOT}" in page
    if format == "html":  # a tile names what is measured, in which precision, beside what
        (tile,) = re.findall(r'<div class="card">x86-64, fp32, batch 1 .*?</div>', page)
        says(tile)
        assert "inconclusive" in tile


def test_the_report_of_a_run_as_json(run):
    found = json.loads(Path(rc.report(run, format="json").output_files[0]).read_text())
    assert found["benches"][0]["ratio"]["verdict"] == "not conclusive"


def test_the_report_of_several_runs(run, capfd):
    shutil.copytree(run, "other")
    for format in ("html", "markdown"):
        done = rc.compare_runs([run, "other"], format=format)
        says(Path(done.output_files[0]).read_text())
    says(shown(done, capfd))
    assert done.rows[0].target == "x86-64, fp32, 1 thread, batch 1"


def test_the_picture_of_several_runs():
    """What is inconclusive beats nothing, and is not called the best."""
    right = Accuracy(
        images=9, reference=0.9, candidate=0.9, only_reference=0, only_candidate=0, difference=0, low=0, high=0,
        p_value=1,
    )  # fmt: skip
    row = ReportRow(
        title="good", called="", page="", verdict="passed", open=0, worst_fold=0.0, worst_single=None, saved=(),
        accuracy=right, lower=(), target="x", after_ms=3.0, quality="trusted",
    )  # fmt: skip
    doubted = row.model_copy(update={"title": "doubted", "after_ms": 1.0, "quality": "inconclusive"})
    bold, plain = (re.search(rf'font-weight="(\w+)"[^>]*>{name}<', pareto_svg((row, doubted)))[1]
                   for name in ("good", "doubted"))  # fmt: skip
    assert (bold, plain) == ("bold", "normal")
    assert pareto_svg((row, doubted)).count(PALE) == 1


def test_tune(capfd):
    way = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    best = Candidate(deployment=way, rounds=9, ratio=ratio(), description="taken; its measurement is not conclusive")
    done = TuneArtefact(
        made_by={}, verdict="passed", target="x86-64", runtimes={}, method="riformer", shapes_sha256="",
        image_size=None, seed=0, baseline=way, deployment=way, ratio=ratio(), candidates=(best,), seconds=1.0,
        machine={},
    )  # fmt: skip
    says(shown(done, capfd))


def test_convert(capfd):
    taken = SpeedTrial(kind="depthwise", blocks=(1,), tried=Tried(blocks=(1,), error=0.2, agreement=0.8), speed=ratio())
    plain = json.loads((STORED / "converted" / "convert.json").read_text())
    done = read(ConvertArtefact, plain)
    for more in (
        {
            "speed_target": SpeedTarget(
                target="x86-64", wanted=1.2, reached=ratio(), speed_trials=(taken,), machine="a CPU"
            )
        },
        {"trade": Trade(target="x86-64", taken=taken, others=(), machine="a CPU")},
    ):
        text = shown(done.model_copy(update=more), capfd)
        says(text.replace("a speedup of 1.2 was asked for", ""))
    assert NOT in trade_svg(Trade(target="x86-64", taken=taken, others=(taken,), machine="a CPU"))


def test_a_sweep_whose_measurements_say_nothing_does_not_say_passed(capsys):
    from repaconv.results import SweepArtefact, SweepRow

    row = {"model": "a", "target": "x86-64", "precision": "fp32", "batch": 1, "p50_ms": 1.0, "p95_ms": 2.0}
    row |= {"worker": "this machine", "attempts": 1, "problem": ""}
    rows = tuple(SweepRow(**row, quality=quality) for quality in ("inconclusive", "trusted"))
    done = SweepArtefact(made_by={}, verdict="passed", matrix="m.yaml", resumed=0, rows=rows)
    print_result(done)
    print_result(done.model_copy(update={"rows": rows[1:]}))
    last = [line for line in capsys.readouterr().out.splitlines() if "measured" in line]
    assert last[-2] == "inconclusive: 2 of 2 measured, 1 of them inconclusive, 0 from before"
    assert last[-1] == "passed: 1 of 1 measured, 0 of them inconclusive, 0 from before"


# --- Each command itself, next to a disturbed measurement that is forged in the one function that measures.


@pytest.fixture
def disturbed(monkeypatch):
    """Every measurement is next to other load; the entrants at the places that ``disturbed`` is told take 1.4 times
    as long as the others."""
    load = MachineChanges(
        seconds=1.0, others=0.9, others_here=0.9, steal_time=0.0, speed=1.0, throttled=0, before={}, after={}
    )
    monkeypatch.setattr(interleaved_protocol, "changes_between", lambda *_: load)
    monkeypatch.setattr(interleaved_protocol, "SESSION_LOAD_BUDGET_S", 0.01)
    real = interleaved_protocol._round

    def slow(*places: int) -> None:
        def one_round(names, opened, random):
            real(names, opened, random)
            return [14.123 if place in places else 10.0 for place in range(len(names))]

        monkeypatch.setattr(interleaved_protocol, "_round", one_round)

    slow(*range(1, 99))
    return slow


CLAIMED = re.compile(r'"(?:faster|slower)"')


def test_all_outputs_of_measurements_of_a_model(disturbed, tiny, repaconv, tmp_path):
    """bench, throughput, compare, report and gate, what they print and write; each exits with 5, inconclusive."""
    rc.fold(tiny, measure=False)
    rc.export()
    graph = next(Path("repaconv-out/tiny").glob("*.onnx"))
    shutil.copy(graph, "copy.onnx")
    for command in (
        ("bench",),
        ("bench", "--objective", "throughput", "--streams", 1, "--threads", 1, "-o", "throughput.json"),
        ("compare", graph, "copy.onnx", "--speed", "-o", "compare.json"),
    ):
        code, out, _ = repaconv(*command)
        says(out)
        assert code == 5, command
        assert re.search(r"measurement inconclusive:\s+\S", out), out
    for path in ("repaconv-out/tiny/bench/x86-64.json", "throughput.json", "compare.json"):
        kept = Path(path).read_text()
        assert "not conclusive" in kept
        assert not CLAIMED.search(kept), path
    for format in ("html", "markdown"):
        says(Path(rc.report(format=format).output_files[0]).read_text())
    Path("r.toml").write_text('checkpoint = "tiny.pth"\nout = "repaconv-out/tiny"\n[export]\n[bench]\n')
    code, out, _ = repaconv("gate", "r.toml")
    says(out)
    assert code == 5


def test_all_outputs_of_a_sweep(disturbed, tiny, repaconv):
    Path("m.toml").write_text('[[models]]\ncheckpoint = "tiny.pth"\n')
    code, out, _ = repaconv("sweep", "m.toml")
    assert code == 5
    assert not CLAIM.search(out)


def test_all_outputs_of_tune(disturbed, tiny, repaconv):
    """tune, whose baseline is the first that is measured."""
    disturbed(0)
    code, out, _ = repaconv("tune", tiny, "--rounds", 20, "--runtimes", "onnxruntime", "--rewrites", "rms-norm")
    assert code == 0, out
    assert not CLAIM.search(out.replace("fastest", "")), out
    kept = next(Path().rglob("tuned/*.json")).read_text()
    assert not CLAIMED.search(kept)


def test_all_outputs_of_a_conversion(disturbed, tmp_path):
    """convert --speedup: whether it is reached is not known, so it is neither claimed nor a failed gate."""

    def search(ratios):
        measured = SimpleNamespace(device=SimpleNamespace(name="x86-64"), speeds=lambda _: ratios)
        found = SpeedSearch(measured, 20.0)
        found.speeds({(1,): None})
        return found.unreachable("no merging schedule reaches")

    known = search({"1": ratio("faster")})
    assert isinstance(known, GateFailed)
    doubted = search({"1": ratio()})
    assert isinstance(doubted, Inconclusive)
    assert doubted.exit_code == 5
    says(doubted.message)


def test_all_outputs_of_a_fold(disturbed, monkeypatch):
    """The speed check reverts nothing on an inconclusive measurement, though the fold seems to take longer."""
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["1"]), helper.make_node("MatMul", ["1", "w"], ["y"])]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    given = Evaluated(model)
    smaller, changes, _ = folded(Path("net.onnx"), model)
    assert changes
    monkeypatch.setattr(speed_reverts, "LEAST_MS", 0.0)
    whole = Kept(Evaluated(smaller), changes)
    assert revert_slower(whole, given, partial(folded, Path("net.onnx"), model)) is whole
    quiet = MachineChanges(
        seconds=1.0, others=0.0, others_here=0.0, steal_time=0.0, speed=1.0, throttled=0, before={}, after={}
    )
    monkeypatch.setattr(interleaved_protocol, "changes_between", lambda *_: quiet)
    assert revert_slower(whole, given, partial(folded, Path("net.onnx"), model)).reverts.names

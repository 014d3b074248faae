"""What the GPU kit chooses to measure: expected gain for expected seconds, in simulated sessions of recorded outcomes.

No GPU is used. Outcomes and seconds are those of `data/gpu/rehearsal.json`, which small networks gave on a CPU.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest
from gpu import kit, session, target_presets
from gpu.plan import ANY, CASES, MADE, OFFICIAL, VANILLA, needs, steps
from gpu.result_evaluation import evaluated, joined
from gpu.step_selection import (
    PRESET,
    Cell,
    Durations,
    Known,
    Machine,
    Prediction,
    Selection,
    cells_of,
    known_of,
    listed,
    memory_gib,
    unable,
    usual_s,
)
from gpu.tables import END, START, put
from gpu.target_presets import put_presets

from repaconv.engines.targets.schema import packaged, parse

RECORDED = json.loads((Path(__file__).parent / "data/gpu/rehearsal.json").read_text())
PLAN = steps()
METHODS = {ANY, *(case.method for case in CASES)}
TARGETS = {step.given["target"] for step in PLAN if step.kind not in MADE}
CAPABILITIES = {target: packaged(target.partition("@")[0]).compute_capability for target in TARGETS}
TENSORRT = dict.fromkeys(("a100", "h100", "t4", "cuda-ort@tensorrt"), "TensorRT is not in the kit.")


def gpu(name="NVIDIA H100", capability="9.0", memory_gib=80.0, absent=TENSORRT):
    return Machine(name, capability, memory_gib, CAPABILITIES, absent, ("rtx-30", "rtx-40", "rtx-50"))


def selected(seconds=1800.0, machine=None, done=None, known=(), plan=PLAN):
    machine = machine or gpu()
    left_out = {step.name: why for step in plan if (why := unable(step, machine))}
    return Selection(plan, machine, done or {}, left_out, known).chosen(seconds)


def step_of(**wanted):
    """The first step of the plan with these fields."""
    return next(
        step
        for step in PLAN
        if step.kind not in MADE
        and all(value in (step.given.get(key), getattr(step, key, None)) for key, value in wanted.items())
    )


# --- the order ----------------------------------------------------------------------------------------


def test_half_an_hour_has_rows_of_every_method_and_presets_and_fits():
    chosen = selected(1800)
    assert sum(each.seconds for each in chosen) <= 1800
    assert {each.step.given["method"] for each in chosen if each.step.kind == "row"} == METHODS
    assert sum(each.step.kind == "tune" for each in chosen) >= 3
    assert all(each.step.given["target"].startswith("cuda") for each in chosen)  # nothing of other GPUs
    names = [each.step.name for each in chosen]
    assert len(set(names)) == len(names)
    needed = [step.name for each in chosen for step in each.needed]
    assert len(set(needed)) == len(needed)  # paid once
    assert {step.name for each in chosen for step in needs(each.step)} == set(needed)


def test_time_decides_how_many_and_none_is_too_little():
    assert selected(5) == []
    few, all_of_them = selected(300), selected(1e6)
    assert 0 < len(few) < len(all_of_them)
    able = [step for step in PLAN if step.kind not in MADE and not unable(step, gpu())]
    assert {each.step.name for each in all_of_them} == {step.name for step in able}


def test_what_is_known_or_predicted_by_others_gains_less():
    cell = Cell(OFFICIAL, "repavit", "repavit-deit-tiny-0.75", 128, "cuda", "fp32", "NVIDIA H100")
    alike = cell._replace(target="cuda-ort")
    other = cell._replace(method="riformer", model="riformer-s12")
    before = Prediction([cell, alike, other], [])
    after = Prediction([cell, alike, other], [Known(cell, math.log(1.3))])
    gains = {each: (before.gain([each], False), after.gain([each], False)) for each in (cell, alike, other)}
    assert gains[cell][1] < 0.01 < gains[alike][1] < gains[alike][0]
    assert gains[other][1] == pytest.approx(gains[other][0])
    assert math.exp(after.mean[after.place[alike]]) == pytest.approx(1.28, abs=0.03)
    assert math.exp(after.mean[after.place[other]]) == 1.0


def test_a_paper_s_own_number_doubles_the_cell_next_to_it():
    step = step_of(kind="row", method="repavit")
    cells = cells_of(step, "NVIDIA H100")
    predicted = Prediction(cells, [])
    official, vanilla = (predicted.gain([cell], False) for cell in cells)
    assert predicted.gain(cells[1:], True) == pytest.approx(2 * vanilla)
    assert predicted.gain(cells[:1], True) == pytest.approx(official)


def test_records_of_cpus_predict_a_preset_and_one_that_is_known_is_not_searched_again():
    tune = step_of(kind="tune", method="repavit", target="cuda-ort")
    (cell,) = cells_of(tune, "NVIDIA H100")
    cpu = cell._replace(target="x86-64", device="avx2", batch=1)
    nothing, helped = (Prediction([cell], [Known(cpu, math.log(times))]) for times in (1.0, 1.15))
    assert helped.gain([cell], False) > 1.5 * nothing.gain([cell], False)
    known = Prediction([cell], [Known(cell, math.log(1.15))])
    assert known.gain([cell], False) < 0.01
    elsewhere = Prediction([cell], [Known(cell._replace(device="NVIDIA L4"), math.log(1.15))])
    assert known.gain([cell], False) < elsewhere.gain([cell], False) < helped.gain([cell], False)


def test_the_kit_carries_what_earlier_results_tell(tmp_path):
    shutil.copy(kit.ROOT / "benchmarks/results/preset_speed.json", tmp_path)
    earlier = kit.earlier(tmp_path)
    known = [Known(Cell(*cell), gain) for cell, gain in json.loads(json.dumps(earlier["known"]))]
    assert {each.cell.over for each in known} == {OFFICIAL, PRESET}
    nondeep = [each.gain for each in known if (each.cell.method, each.cell.over) == ("nondeep", OFFICIAL)]
    assert all(1.9 < math.exp(gain) < 2.3 for gain in nondeep)
    with_records = {each.step.name: each for each in selected(1e6, known=known)}
    first = with_records["nondeep-6x2-value-sum.b32.cuda.fp32"]
    assert "official 1.7" in first.why
    assert "the paper has 1.65x" in first.why


def test_the_kit_contains_earlier_results_of_a_gpu():
    earlier = kit.earlier()
    known = [Known(Cell(*cell), gain) for cell, gain in json.loads(json.dumps(earlier["known"]))]
    there = {(each.cell.model, each.cell.batch, each.cell.target, each.cell.precision, each.cell.over): each.gain
             for each in known if each.cell.device == "NVIDIA H200"}  # fmt: skip
    claimed = "nondeep-6x2-value-sum", 32, "cuda", "fp32"
    assert math.exp(there[(*claimed, OFFICIAL)]) == pytest.approx(1.81, abs=0.01)
    assert math.exp(there[(*claimed, VANILLA)]) == pytest.approx(1.28, abs=0.01)
    assert earlier["seconds"]["nondeep-6x2-value-sum.b32.cuda.fp32"] == pytest.approx(7.5)


# --- what cannot be run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "machine", "why"),
    [
        ({"target": "rtx-40"}, gpu(), "rtx-40 is for compute capability 8.9; the NVIDIA H100 has 9.0."),
        ({"target": "h100"}, gpu(), "TensorRT is not in the kit."),
        ({"target": "cuda", "precision": "bf16"}, gpu("Tesla T4", "7.5", 15.0), "bf16 needs compute capability 8.0"),
        ({"target": "cuda", "precision": "tf32"}, gpu("Tesla T4", "7.5", 15.0), "tf32 needs compute capability 8.0"),
        ({"model": "dwconv-vit-large-12", "precision": "fp32"}, gpu("small", "8.6", 4.0), "take 4.7 GiB; the small"),
        ({"target": "cuda-ort"}, gpu(absent={"cuda-ort": "onnxruntime is missing."}), "onnxruntime is missing"),
        ({"target": "cuda"}, gpu("", "", 0.0, {}), "there is no NVIDIA GPU."),
        ({"kind": "tune", "target": "rtx-40"}, gpu("", "", 0.0, {}), "there is no NVIDIA GPU."),
        ({"kind": "engine", "target": "rtx-40", "precision": "fp16"}, gpu("", "", 0.0, {}), "there is no NVIDIA GPU."),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_run_says_why_and_is_not_chosen(wanted, machine, why):
    step = step_of(**wanted)
    assert why in unable(step, machine)
    chosen = selected(1e6, machine)
    assert step.name not in {each.step.name for each in chosen}
    left_out = {each.name: message for each in PLAN if (message := unable(each, machine))}
    assert any(why in line for line in listed(chosen, left_out))


def test_what_can_be_run_is_not_left_out():
    assert not unable(step_of(target="cuda", precision="bf16"), gpu())
    assert not unable(step_of(target="rtx-40", kind="tune"), gpu("GeForce RTX 4090", "8.9", 24.0))
    assert not unable(step_of(model="dwconv-vit-large-12", precision="fp16"), gpu("small", "8.6", 4.0))
    assert memory_gib(step_of(model="dwconv-vit-large-12", precision="fp16")) < 4
    ahead = step_of(kind="engine", target="rtx-40", precision="fp32")
    assert not unable(ahead, gpu("", "", 0.0, {}))  # built where there is no GPU
    assert {each.step.kind for each in selected(1e6, gpu("", "", 0.0, {}))} == {"engine"}


def test_the_time_of_what_is_left_out_goes_to_others():
    without = gpu(absent={**TENSORRT, "cuda-ort": "the bundle onnxruntime is missing."})
    usual, others = selected(900), selected(900, without)
    assert {each.step.given["target"] for each in others}.isdisjoint({"cuda-ort"})
    own = {each.step.name for each in usual if each.step.given["target"] != "cuda-ort"}
    assert len({each.step.name for each in others} - own) > 0
    assert sum(each.seconds for each in others) > 800


# --- seconds ------------------------------------------------------------------------------------------


def test_expected_seconds_correct_themselves_from_steps_that_were_run():
    compiled = [step for step in PLAN if step.given.get("target") == "cuda@compiled"]
    eager = step_of(kind="row", target="cuda")
    now = [(compiled[0], 1.5 * usual_s(compiled[0])), (eager, 0.5 * usual_s(eager))]
    seconds = Durations(now=now).all_seconds(PLAN)
    other_eager = next(step for step in PLAN if step.given.get("target") == "cuda" and step.name != eager.name)
    assert seconds[compiled[1].name] == pytest.approx(1.5 * usual_s(compiled[1]))
    assert seconds[other_eager.name] == pytest.approx(0.5 * usual_s(other_eager))
    graphs = step_of(kind="row", target="cuda@graphs")  # no row by it was run: as other rows
    assert seconds[graphs.name] == pytest.approx(math.sqrt(1.5 * 0.5) * usual_s(graphs))
    tune = step_of(kind="tune", target="cuda-ort")
    assert seconds[tune.name] == usual_s(tune)
    assert Durations({tune.name: 44.0}).all_seconds([tune]) == {tune.name: 44.0}
    prepared = next(step for step in PLAN if step.kind == "prepare")
    graphs = next(step for step in PLAN if step.kind == "graphs" and step.model != prepared.model)
    for took in (
        Durations({prepared.name: 0.5 * usual_s(prepared)}),  # in an earlier session
        Durations(now=[(prepared, 0.5 * usual_s(prepared))]),
        Durations({prepared.name: usual_s(prepared)}, [(prepared, 0.5 * usual_s(prepared))]),
    ):
        assert took.all_seconds(PLAN)[graphs.name] == pytest.approx(0.5 * usual_s(graphs))
    slow = Durations(now=[(eager, 100 * usual_s(eager))]).all_seconds(PLAN)
    assert slow[other_eager.name] == other_eager.limit_s  # after which it is ended


# --- sessions -----------------------------------------------------------------------------------------

FACTS = {"machine": {"card": {"name": "NVIDIA H100", "memory_gib": 80.0}, "packages": {}, "system": "Linux"}}
PRESET_FOUND = {
    "ratio": {"median": 1.08, "low": 1.06, "high": 1.10, "verdict": "faster"},
    "complete": True,
    "candidates": [],
}
DONE = {step["kind"]: step for step in RECORDED["steps"] if step["status"] == "done"}
TOOK = {kind: step["seconds"] for kind, step in DONE.items()}
"""Recorded seconds of a step by its kind."""


def shortened(row):
    """A row of few samples: what a session chooses depends on their median alone."""
    samples = {name: values[:5] for name, values in row.get("samples_ms", {}).items()}
    return {**row, "samples_ms": samples, "rounds": 5} if samples else row


OUTCOMES = {
    kind: {
        key: [shortened(row) for row in value] if key == "batches" else value
        for key, value in shortened(step).items()
        if key not in ("name", "kind", "model", "given", "limit_s", "machine")
    }
    for kind, step in DONE.items()
}


class Simulated(session.Session):
    """A session whose steps give what was recorded, in the seconds that it took, on a clock of its own."""

    now = 0.0
    fails = ()
    lock = threading.Lock()

    def __init__(self, folder, seconds, machine=None, resume=None, fails=(), only=".fp32"):
        self.clock, self.ran, self.fails = (lambda: self.now), [], fails
        given = Namespace(
            work=folder,
            out=folder / "result.json",
            seconds=seconds,
            only=only,
            rehearsal=False,
            kit=KIT,
            missing="{}",
            resume=resume,
        )
        folder.mkdir(exist_ok=True)
        super().__init__(given, {**FACTS, "for_selection": (machine or gpu())._asdict()})

    def do(self, step):
        failed = step.given.get("target") in self.fails
        found = {"status": "failed", "why": "libcudnn.so.9 is missing"} if failed else OUTCOMES.get(step.kind)
        seconds = 6.0 if failed else TOOK.get(step.kind, 90.0)
        if step.kind == "tune" and not failed:
            deployment = {"rewrites": ["no-key-bias", "attention-op"], "target": step.given["target"]}
            found = {"status": "done", "why": "", "tuned": {**PRESET_FOUND, "budget_s": 60.0, "deployment": deployment}}
        with self.lock:
            self.ran.append(step)
            self.now += seconds / (session.TOGETHER if step.kind in MADE else 1)
        (self.rows / f"{step.name}.json").write_text(json.dumps({**found, "seconds": seconds}))


@pytest.fixture(scope="module")
def half_an_hour(tmp_path_factory):
    """A simulated session of 900 s with ONNX Runtime, evaluated."""
    result = session.run(Simulated(tmp_path_factory.mktemp("session") / "work", 900, only="cuda-ort"))
    return evaluated(result, KIT)


KIT = {"id": "simulated", "plan": [step.name for step in PLAN]}


def measured(ran):
    return [step for step in ran if step.kind not in MADE]


def test_a_session_keeps_to_its_time_and_measures_one_at_a_time_after_what_it_needs(tmp_path):
    one = Simulated(tmp_path, 300)
    result = session.run(one)
    assert one.now <= 300
    assert one.left() < 100  # and uses it
    for place, step in enumerate(one.ran):
        assert {each.name for each in needs(step)} - {step.name} <= {each.name for each in one.ran[:place]}
    assert len({step.name for step in one.ran}) == len(one.ran)
    done = {step["name"] for step in result["steps"] if step["status"] == "done"}
    assert done == {step.name for step in one.ran}
    left = [step for step in result["steps"] if step["status"] == "not verified"]
    assert {step["why"] for step in left} >= {"TensorRT is not in the kit."}


def test_what_is_made_at_once_is_of_different_networks_and_the_first_row_does_not_wait_for_all(tmp_path):
    class Watched(Simulated):
        together = ()

        def made_together(self, chosen):
            found = super().made_together(chosen)
            self.together = (*self.together, found)
            return found

    one = Watched(tmp_path, 3600, only="cuda-ort.")
    session.run(one)
    made = [step for found in one.together for step in found]
    assert {step.kind for step in made} == set(MADE)
    for found in one.together:
        assert len({step.model for step in found}) == len(found) <= session.TOGETHER
    first = next(place for place, step in enumerate(one.ran) if step.kind not in MADE)
    assert first <= 2 * session.TOGETHER < len(made)


def test_a_runtime_that_fails_gets_less_time_and_its_failures_are_reported(tmp_path):
    fine, failing = Simulated(tmp_path / "a", 300), Simulated(tmp_path / "b", 300, fails=("cuda-ort",))
    session.run(fine)
    result = session.run(failing)
    tried = [step for step in measured(failing.ran) if step.given["target"] == "cuda-ort"]
    assert 0 <= len(tried) < sum(step.given["target"] == "cuda-ort" for step in measured(fine.ran))
    assert len(measured(failing.ran)) - len(tried) > 0
    graphs = [step for step in result["steps"] if step["kind"] == "graphs" and step["status"] == "failed"]
    assert graphs  # of which the rows say the reason
    assert f"{graphs[0]['name']} did not come out; see that step." in {step.get("why") for step in result["steps"]}


def test_slow_steps_make_the_session_expect_less(tmp_path, monkeypatch):
    quick = Simulated(tmp_path / "a", 300)
    session.run(quick)
    monkeypatch.setitem(TOOK, "row", 3 * TOOK["row"])
    slow = Simulated(tmp_path / "b", 300)
    session.run(slow)
    assert slow.now <= 300 + 3 * TOOK["row"]
    assert 0 < len(measured(slow.ran)) < len(measured(quick.ran))


def test_an_interrupted_session_resumes_from_its_folder_and_from_its_result_elsewhere(tmp_path):
    first = Simulated(tmp_path / "a", 120)
    session.run(first)
    again = Simulated(tmp_path / "a", 60)
    session.run(again)
    elsewhere = Simulated(tmp_path / "b", 120, resume=tmp_path / "a/result.json")
    result = session.run(elsewhere)
    names = [step.name for one in (first, again, elsewhere) for step in measured(one.ran)]
    assert len(set(names)) == len(names)
    assert {step.kind for step in elsewhere.ran} >= {"prepare"}  # networks are made again on another machine
    done = {step["name"] for step in result["steps"] if step["status"] == "done"}
    assert set(names) <= done


def test_a_result_of_another_gpu_predicts_and_is_not_taken_over(tmp_path):
    first = Simulated(tmp_path / "a", 200)
    session.run(first)
    other = gpu("NVIDIA L4", "8.9", 22.0)
    alone = Simulated(tmp_path / "b", 600, other)
    informed = Simulated(tmp_path / "c", 600, other, resume=tmp_path / "a/result.json")
    step = measured(first.ran)[0]
    assert informed.outcome(step) is None
    gains = [{each.step.name: each.gain for each in one.chosen()} for one in (alone, informed)]
    assert gains[1].get(step.name, 0.0) < gains[0][step.name]
    assert informed.earlier_s[step.name] == TOOK["row"]


@pytest.mark.parametrize("text", ["", "[]", '{"machine": {}}', '{"machine": {"card": {}}, "steps": [{"name": "x"}]}'])
def test_what_is_no_result_is_refused_in_a_sentence(tmp_path, capsys, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        Simulated(tmp_path / "a", 300, resume=tmp_path / "r.json")
    assert stopped.value.code == 2
    assert "is not a result of the kit" in capsys.readouterr().err


def test_a_plan_is_printed_without_a_gpu(tmp_path):
    (tmp_path / "kit.json").write_text(json.dumps(kit.script({}, "3.11")[1]))
    command = [sys.executable, "-m", "gpu.session", "--plan", "--gpu", "rtx-40", "--work", str(tmp_path)]
    where = {**os.environ, "PYTHONPATH": str(Path(session.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=where)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["gain", "seconds", "total", "step"]
    totals = [float(line.split()[2]) for line in lines[1:] if not line.startswith("left out")]
    assert totals == sorted(totals)
    assert 1500 < totals[-1] <= 1800
    assert "rtx-50 is for compute capability 12.0; the rtx-40 has 8.9." in done.stdout
    assert not (tmp_path / "result.json").exists()


def test_a_gpu_that_is_assumed_has_what_the_kit_brings(capsys):
    here = {**FACTS, "for_selection": {**gpu()._asdict(), "ahead": ["rtx-30", "rtx-40", "rtx-50"]}}
    found = session.assumed(here, "rtx-40", 24.0, {"onnxruntime": "onnxruntime.03 did not arrive"})["for_selection"]
    assert (found["device"], found["capability"], found["memory_gib"]) == ("rtx-40", "8.9", 24.0)
    assert found["absent"]["cuda-ort"] == "the bundle onnxruntime is missing."
    assert set(found["absent"]) == {*TENSORRT, "cuda-ort"}
    with pytest.raises(SystemExit) as stopped:
        session.assumed(here, "cuda", 0.0, {})
    assert stopped.value.code == 2
    assert "cuda is not a target with a compute capability" in capsys.readouterr().err


# --- results ------------------------------------------------------------------------------------------


def test_one_session_fills_tables_and_presets_in_one_go(half_an_hour, tmp_path):
    found = half_an_hour
    page, target = tmp_path / "gpu.md", tmp_path / "cuda-ort.toml"
    page.write_text(f"# GPU\n\n{START}\n\nUntested.\n\n{END}\n")
    shipped = Path(session.__file__).parents[2].joinpath("repaconv/engines/targets/cuda-ort.toml").read_text()
    target.write_text(shipped.partition(target_presets.START)[0])  # without what earlier sessions measured
    before = parse(target.read_text(), "cuda-ort.toml")
    put(found, page)
    assert put_presets(found, "benchmarks/results/gpu_nvidia_h100.json", tmp_path) == [target]
    tuned = {
        step["given"]["method"] for step in found["steps"] if step["kind"] == "tune" and step["verdict"] == "passed"
    }
    after = parse(target.read_text(), "cuda-ort.toml")
    assert after.forms == dict.fromkeys(tuned, ("no-key-bias", "attention-op"))
    assert after.measured == {"NVIDIA H100": "benchmarks/results/gpu_nvidia_h100.json"}
    assert after.model_copy(update={"forms": {}, "measured": {}}) == before
    text = page.read_text()
    assert "Untested" not in text
    assert text.count("| cuda-ort | no-key-bias, attention-op |") == len(tuned)
    rows = [step for step in found["steps"] if step["kind"] == "row" and step["status"] == "done"]
    assert sum(text.count(f"| cuda-ort | {precision} |") for precision in ("fp32", "fp16", "bf16")) == len(rows) > 10


def of_tune(result, **changes):
    """A judged result with another outcome of its first search."""
    (name, tuned), *_ = ((each["name"], each["tuned"]) for each in result["steps"] if "tuned" in each)
    steps_ = [{**each, "tuned": {**tuned, **changes}} if each["name"] == name else each for each in result["steps"]]
    return {**result, "steps": [each for each in steps_ if each["kind"] != "tune" or each["name"] == name]}


def test_presets_of_a_second_gpu_join_those_of_the_first(half_an_hour, tmp_path):
    found = half_an_hour
    target = tmp_path / "cuda-ort.toml"
    target.write_text(Path(session.__file__).parents[2].joinpath("repaconv/engines/targets/cuda-ort.toml").read_text())
    put_presets(found, "one.json", tmp_path)
    first = parse(target.read_text(), "cuda-ort.toml")
    once = target.read_text()
    put_presets(found, "one.json", tmp_path)
    assert target.read_text() == once
    other = of_tune(found, deployment={"rewrites": ["linear-each"]})
    other = {**other, "machine": {"card": {"name": 'an "L4"'}}}
    put_presets(other, "two.json", tmp_path)
    second = parse(target.read_text(), "cuda-ort.toml")
    assert second.measured == {**first.measured, 'an "L4"': "two.json"}
    assert set(second.forms) == set(first.forms)
    assert list(second.forms.values()).count(("linear-each",)) == 1
    for ratio in (None, {**PRESET_FOUND["ratio"], "verdict": "not conclusive"}):
        put_presets(of_tune(other, ratio=ratio, deployment={"rewrites": []}), "two.json", tmp_path)
        assert parse(target.read_text(), "cuda-ort.toml").forms == second.forms


def test_a_preset_of_several_networks_has_what_their_fastest_ones_agree_about(half_an_hour, tmp_path):
    tuned = [
        (["attention-op", "read-tokens"], [["attention-op"], ["read-tokens"]]),
        (["attention-op"], [["attention-op"], ["read-tokens", "attention-op"]]),  # slower with read-tokens
        (["linear-each"], [["linear-each"]]),  # has no attention
    ]
    step = next(each for each in half_an_hour["steps"] if each["kind"] == "tune" and each["verdict"] == "passed")
    steps_ = [
        {
            **step,
            "given": {**step["given"], "method": ANY},
            "tuned": {
                **PRESET_FOUND,
                "deployment": {"rewrites": fastest},
                "candidates": [{"deployment": {"rewrites": names}} for names in tried],
            },
        }
        for fastest, tried in tuned
    ]
    target = tmp_path / "cuda-ort.toml"
    target.write_text(Path(session.__file__).parents[2].joinpath("repaconv/engines/targets/cuda-ort.toml").read_text())
    put_presets({**half_an_hour, "steps": steps_}, "one.json", tmp_path)
    assert parse(target.read_text(), "cuda-ort.toml").forms[ANY] == ("attention-op", "linear-each")


def test_networks_and_graphs_are_made_before_the_runtime_arrives(tmp_path):
    absent = gpu()._replace(absent={"cuda-ort": "the bundle onnxruntime is missing."})
    session.make(making := Simulated(tmp_path / "a", 900, only="cuda-ort.fp16", machine=absent))
    assert {step.kind for step in making.ran} == set(MADE)
    assert {step.given.get("precision", "fp16") for step in making.ran} == {"fp16"}
    wanted = [step for step in PLAN if "cuda-ort.fp16" in step.name]
    assert {step.name for step in making.ran} == {each.name for step in wanted for each in needs(step)}
    for place, step in enumerate(making.ran):
        assert {each.name for each in needs(step)} - {step.name} <= {each.name for each in making.ran[:place]}
    session.run(measuring := Simulated(tmp_path / "a", 900, only="cuda-ort.fp16"))
    assert measuring.ran
    assert measured(measuring.ran) == measuring.ran


def test_two_calls_with_different_steps_give_one_result(tmp_path):
    session.run(first := Simulated(tmp_path / "a", 100, only="cuda.fp32"))
    result = session.run(second := Simulated(tmp_path / "a", 100, only="cuda.fp16"))
    ran = {step.name for step in (*first.ran, *second.ran)}
    assert {step["name"] for step in result["steps"] if step["status"] == "done"} == ran
    for each, precision in ((first, "fp32"), (second, "fp16")):
        assert {step.given["precision"] for step in measured(each.ran)} == {precision}


def test_what_a_result_does_not_even_list_stays_from_an_earlier_one(tmp_path):
    whole = evaluated(session.run(Simulated(tmp_path / "a", 200)), KIT)
    row = next(step for step in whole["steps"] if step["kind"] == "row" and step["verdict"] == "passed")
    alone = {**whole, "steps": [row]}
    both = joined({**alone, "kit": "new"}, {**whole, "kit": "old"}, KIT)
    kept = {step["name"] for step in whole["steps"] if step["verdict"] == "passed"}
    assert {step["name"] for step in both["steps"]} == kept
    assert {step["name"] for step in both["steps"] if "kit" not in step} == {row["name"]}


def test_what_a_second_session_did_not_run_stays_from_the_first(tmp_path):
    first = evaluated(session.run(Simulated(tmp_path / "a", 200)), KIT)
    second = evaluated(session.run(Simulated(tmp_path / "b", 200, fails=("cuda",))), KIT)
    both = joined({**second, "kit": "new"}, {**first, "kit": "old"}, KIT)
    passed = [{step["name"] for step in each["steps"] if step["verdict"] == "passed"} for each in (first, second, both)]
    failed = {step["name"] for step in second["steps"] if step["verdict"] == "failed"}
    assert passed[0] & failed  # what fails now is not replaced by what passed before
    assert passed[2] == (passed[0] - failed) | passed[1]
    assert {step.get("kit") for step in both["steps"] if step["name"] in passed[2] - passed[1]} == {"old"}
    assert all("kit" not in step for step in both["steps"] if step["name"] in passed[1])
    assert both["partial"] != []
    row = next(step for step in PLAN if step.name in passed[0] and step.kind == "row")
    kept = next(step for step in first["steps"] if step["name"] == row.name)
    assert "samples_ms" not in kept
    assert OFFICIAL in {each.cell.over for each in known_of(row, kept, "NVIDIA H100")}  # of its ratios

"""Rewrite presets and `repaconv tune`: what it searches, keeps, writes and refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
import types
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import TINY
from onnx import numpy_helper
from planted_graph_faults import F, Net, norm, normal
from rewrites_page import PAGE, page

import repaconv as package
from repaconv import models
from repaconv.backbones.metaformer import MetaFormer
from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.files import cache_folder, read_artefact, write_artefact
from repaconv.engines.openvino import OpenVino
from repaconv.graph.nodes_and_constants import Writer
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.methods.repavit.published_models import Example
from repaconv.methods.riformer import METHOD
from repaconv.results import Candidate, Change, Deployment, ExportArtefact, Ratio, TuneArtefact
from repaconv.sources.source_model import GraphSpec
from repaconv.sources.source_of_run import source_model_of
from repaconv.sources.verified_onnx_export import Proving, exported_graph
from repaconv.stages.shared.input_selection import Split
from repaconv.stages.shared.preset_choice import open_deployment
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.tune import accuracy_loss, candidate_graphs, stage
from repaconv.stages.tune.accuracy_loss import task_of_losses
from repaconv.stages.tune.options import TuneOptions
from repaconv.stages.tune.output_check import OutputCheck
from repaconv.stages.tune.runtimes_and_initial_trials import MachineRuntimes as Runtimes
from repaconv.stages.tune.runtimes_and_initial_trials import Workload, initial_trials
from repaconv.stages.tune.search import FIRST, MIDDLE, Measured, Trial, search, search_exhaustively
from repaconv.stages.tune.speed_measurements import LocalMeasurement, MeasurementCosts
from repaconv.stages.tune.text import show_tune
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.input_batches import Batch, random_inputs

NAMES = tuple("abcdef")
SET = {"num_heads": "3"}
HEADS = ("--set", "num_heads=3")
THREE = ("read-tokens", "attention-op", "linear-each")


def ratio_of(value: float, spread: float = 0.005) -> Ratio:
    low, high = value * (1 - spread), value * (1 + spread)
    return Ratio(
        subject="form",
        other="default preset",
        median=value,
        low=low,
        high=high,
        confidence=0.95,
        p10=low,
        p90=high,
        verdict="no difference shown",
    )


class Machine:
    """Where every rewrite has an effect of its own, pairs a little more, and every measurement some noise."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.effects = dict(zip(NAMES, self.random.normal(0, 0.05, len(NAMES)), strict=True))
        self.pairs = {a + b: self.random.normal(0, 0.005) for a in NAMES for b in NAMES if a < b}
        self.rounds = 0

    def gain(self, form: tuple[str, ...]) -> float:
        together = [value for pair, value in self.pairs.items() if set(pair) <= set(form)]
        return math.exp(sum(self.effects[name] for name in form) + sum(together))

    def measure(self, configurations, rounds):
        self.rounds += rounds * len(configurations)
        base = self.gain(("a", "b"))
        return {
            configuration: ratio_of(
                self.gain(configuration.rewrites) / base * math.exp(self.random.normal(0, 0.02 / math.sqrt(rounds)))
            )
            for configuration in configurations
        }


class Source:
    """Where speedups come from, on a clock of its own that moves by rounds and evaluations."""

    def __init__(self, measure, budget_s=math.inf, run_s=0.0, load_s=0.0, evaluation_s=0.0):
        self.by, self.budget_s, self.run_s, self.load_s, self.each_s = measure, budget_s, run_s, load_s, evaluation_s
        self.now, self.cut, self.found = 0.0, False, {}

    def measure(self, configurations, rounds):
        new = [
            configuration for configuration in configurations if self.found.get(configuration, (None, 0))[1] < rounds
        ]
        if self.left_s() > 0 and new:
            self.now += self.predicted_s(new, rounds)
            self.found |= {
                configuration: Measured(ratio, rounds) for configuration, ratio in self.by(new, rounds).items()
            }
        return {
            configuration: self.found[configuration] for configuration in configurations if configuration in self.found
        }

    def known(self):
        return list(self.found)

    def predicted_s(self, configurations, rounds, *, written=False):
        new = [
            configuration for configuration in configurations if self.found.get(configuration, (None, 0))[1] < rounds
        ]
        return len(new) * (rounds * self.run_s + self.load_s)

    def evaluation_s(self, _configuration):
        return self.each_s

    def variants_s(self, _configuration):
        return 0.0

    def left_s(self):
        return self.budget_s - self.now

    def timed(self, allowed):
        """The same question, which takes its time."""

        def asked(configuration):
            self.now += self.each_s
            return allowed(configuration)

        return asked


def trial_of(*rewrites, names=NAMES, tries=(), **other) -> Trial:
    start = {"target": "here", "runtime": "one", "rewrites": rewrites, **other}
    return Trial(Deployment(**start), names, tries)


def anything(_configuration) -> bool:
    return True


@pytest.mark.parametrize("seed", range(30))
def test_the_winner_is_within_three_percent_of_the_best_of_all_in_a_third_of_the_rounds(seed):
    tuner, patient = Machine(seed), Machine(seed)
    trials = [trial_of("a", "b")]
    won = search(trials, lambda _configuration: 100, Source(tuner.measure), anything, 40)[0]
    best = max(
        (row.deployment.rewrites for row in search_exhaustively(trials, Source(patient.measure), anything, 40)),
        key=patient.gain,
    )
    assert tuner.gain(won.deployment.rewrites) >= 0.97 * patient.gain(best)
    assert tuner.rounds <= patient.rounds / 3


def test_where_nothing_is_faster_the_default_form_wins_and_the_hopeless_is_not_measured():
    seen = []

    def measure(configurations, rounds):
        seen.extend(configuration.rewrites for configuration in configurations)
        return {configuration: ratio_of(0.999) for configuration in configurations}

    trials = [trial_of("a", names=("a", "b", "c"))]
    rows = search(
        trials, lambda configuration: 200 if "b" in configuration.rewrites else 100, Source(measure), anything, 40
    )
    assert rows[0].deployment.rewrites == ("a",)
    assert rows[0].ratio is None
    assert ("a", "b") not in seen
    assert any(row.description.startswith("hopeless: 2.00") for row in rows)


@pytest.mark.parametrize("allowed", [True, False])
def test_runtime_form_precision_and_settings_are_searched_together(allowed):
    """Where each alone is slower than something else: only all of them together are the fastest that there is."""
    seen = []

    def gain(configuration):
        alone = {"one": 1.0, "two": 0.95, "slow": 0.3}[configuration.runtime] * (
            3 if configuration.precision == "int8" else 1
        )
        fits = configuration.runtime == "two" and configuration.precision == "int8"
        b = (1.08 if "b" in configuration.rewrites else 1) if fits else (1 if "b" in configuration.rewrites else 1.02)
        return alone * b * (1.1 if fits and configuration.settings else 1)

    def measure(configurations, rounds):
        seen.extend(configurations)
        return {
            configuration: ratio_of(gain(configuration) / gain(trials[0].start)) for configuration in configurations
        }

    trials = [trial_of("a"), trial_of("a", precision="int8")]
    trials += [trial_of("a", runtime=name, precision=kind) for name in ("two", "slow") for kind in ("fp32", "int8")]
    trials = [each._replace(tries=({"settings": ("x=1",)},)) for each in trials]
    rows = search(
        trials,
        lambda _configuration: 1,
        Source(measure),
        lambda configuration: allowed or configuration.precision == "fp32",
        40,
    )
    best = rows[0].deployment
    assert gain(best) == max(gain(row.deployment) for row in rows if allowed or row.deployment.precision == "fp32")
    assert (best.runtime, best.precision) == (("two", "int8") if allowed else ("one", "fp32"))
    assert ("b" in best.rewrites, best.settings) == ((True, ("x=1",)) if allowed else (False, ()))
    assert sum(configuration.runtime == "slow" for configuration in seen) <= 3  # far behind: not searched
    assert not allowed or any(row.deployment.precision == "fp32" and row.description == "finalist" for row in rows)


@pytest.mark.parametrize("enough", [1, 2, None])
def test_in_place_of_what_loses_too_much_comes_what_leaves_layers_in_float32(enough):
    """The fastest allowed share of them is searched on, the others are not; where none is allowed float32 stays."""
    seen = []

    def gain(configuration):
        return (3 - 0.2 * len(configuration.fp32_modules) if configuration.precision == "int8" else 1) * (
            1.1 if "b" in configuration.rewrites else 1
        )

    def measure(configurations, rounds):
        seen.extend(configurations)
        return {configuration: ratio_of(gain(configuration)) for configuration in configurations}

    def milder(one):
        done = one.start.fp32_modules or one.start.precision == "fp32"
        steps = [] if done else [("head",), ("head", "stem"), tuple("xyz")]
        return [one._replace(start=one.start.model_copy(update={"fp32_modules": keep})) for keep in steps]

    def allowed(configuration):
        return configuration.precision == "fp32" or (enough is not None and len(configuration.fp32_modules) >= enough)

    trials = [trial_of(names=("b",)), trial_of(names=("b",), precision="int8")]
    rows = search(trials, lambda _configuration: 1, Source(measure), allowed, 40, milder)
    best = rows[0].deployment
    assert (best.precision, len(best.fp32_modules), best.rewrites) == (
        "int8" if enough else "fp32",
        enough or 0,
        ("b",),
    )
    searched = {
        len(configuration.fp32_modules)
        for configuration in seen
        if configuration.rewrites and configuration.precision == "int8"
    }
    assert searched == ({enough} if enough else set())
    measured = {len(row.deployment.fp32_modules) for row in rows if row.ratio}
    assert measured == {0, 1, 2, 3} if enough is None else measured >= set(range(enough + 1))
    shares = {
        len(row.deployment.fp32_modules) for row in search_exhaustively(trials, Source(measure), allowed, 40, milder)
    }
    assert shares == {0, 1, 2, 3}


def test_a_search_keeps_within_its_time_and_takes_what_was_evaluated_if_there_is_none_for_more():
    """int8 is twice as fast and allowed. Whatever the time, it wins if it was evaluated; nothing takes longer."""
    trials = [trial_of("a"), trial_of("a", precision="int8")]

    def measure(configurations, _rounds):
        faster = {
            configuration: 0.01 * len(set("bcd") & set(configuration.rewrites)) for configuration in configurations
        }
        return {
            configuration: ratio_of((2.0 if configuration.precision == "int8" else 1.0) + faster[configuration])
            for configuration in configurations
        }

    chosen = []
    for budget_s in range(10, 400, 10):
        source = Source(measure, budget_s, run_s=0.2, load_s=5.0, evaluation_s=6.0)
        asked = []
        allowed = source.timed(lambda configuration, asked=asked: not asked.append(configuration))
        best = search(trials, lambda _configuration: 1, source, allowed, 40)[0].deployment
        left_s = source.left_s() - (
            2 * source.each_s if best.precision == "int8" else 0
        )  # the test split, and FP32 on it
        assert left_s >= 0, budget_s
        assert best.precision == ("int8" if asked else "fp32"), budget_s
        chosen.append(best.precision)
    first = chosen.index("int8")
    assert 10 * (first + 1) <= 50
    assert set(chosen[first:]) == {"int8"}


@pytest.mark.parametrize(("budget_s", "rounds"), [(50, [3, 3]), (30, [3]), (15, [])])
def test_without_time_for_a_search_the_most_promising_is_compared_with_the_baseline(budget_s, rounds):
    """An inference takes five seconds: there is time for two measurements of three rounds, for one, or for none."""
    trials = [trial_of("a"), trial_of("a", runtime="two"), trial_of("a", precision="int8")]
    done = []

    def measure(configurations, count):
        done.extend(count for _ in configurations)
        return {
            configuration: ratio_of(1.3 if configuration.runtime == "two" else 1.0) for configuration in configurations
        }

    source = Source(measure, budget_s, run_s=5.0, load_s=5.0)
    best = search(trials, lambda _configuration: 1, source, anything, 40)[0]
    assert done == rounds
    assert source.left_s() >= 0
    assert source.cut
    assert best.deployment.runtime == ("two" if rounds else "one")


def saved(name: str, seed: int) -> Path:
    method = plugins.load(plugins.METHODS, "repavit")
    sizes = Example("plain", (1,), (24,), (3,), image_size=32, patch=8, classes=5)
    message = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=32)
    torch.save({"model": method.example(sizes, seed=seed), "args": message}, path := Path(name))
    return path


def all_equal(_reference, others, _rounds, **_):
    return {name: ratio_of(1.0) for name in others}


def equal_here(_self, configurations, _rounds):
    return {configuration: ratio_of(1.0) for configuration in configurations}


def test_tune_folds_searches_writes_and_is_taken_by_export(repaconv, monkeypatch):
    monkeypatch.setattr("repaconv.benchmark.cpu_isa_level.isa_level", lambda _: "")  # its default form on any processor
    ckpt = saved("first.pth", 1)
    code, out, _ = repaconv("tune", ckpt, *HEADS, "--rounds", "4", "--runtimes", "onnxruntime", "--format", "json")
    assert code == 0
    data = json.loads(out)["data"]
    tuned = Path("repaconv-out/first/tuned/x86-64.json")
    found = read_artefact(tuned, TuneArtefact)
    assert found.model_dump(mode="json")["deployment"] == data["deployment"]
    assert list(found.options) == data["options"] == ["--runtimes", "onnxruntime", *HEADS, "--rounds", "4"]
    assert {"read-tokens", "attention-op", "linear-each"} <= {
        name for row in data["candidates"] for name in row["deployment"]["rewrites"]
    }
    assert any(row["ratio"] for row in data["candidates"])
    if sys.platform == "linux":
        assert all(row["memory_bytes"] >= 0 for row in data["candidates"] if row["description"] == "finalist")
        assert any(row["memory_bytes"] > 0 for row in data["candidates"] if row["ratio"])
    code, out, _ = repaconv("export", "--onnx", "--preset", tuned)
    assert code == 0
    exported = read_artefact(Path("repaconv-out/first/export.form-x86-64.json"), ExportArtefact)
    assert exported.preset == "x86-64.json"
    assert set(exported.rewrites) <= set(data["deployment"]["rewrites"])
    form = next(link for link in exported.links if link.name == "form")
    assert form.verdict == "passed"
    assert repaconv("verify")[0] == 0
    recipe = f'checkpoint = "first.pth"\nout = "gated"\npreset = "{tuned}"\n[set]\nnum_heads = 3\n'
    Path("recipe.toml").write_text(recipe)
    assert package.gate(["recipe.toml"]).exit_code == 0
    assert read_artefact(Path("gated/export.form-x86-64.json"), ExportArtefact).preset == "x86-64.json"


def test_an_assumed_speed_does_not_keep_tune_from_measuring(monkeypatch):
    """A GPU was assumed to be as slow as a CPU: one inference of a large batch would have taken the whole time."""
    monkeypatch.setattr("repaconv.stages.tune.speed_measurements.RUN_S", (1e4, 0.0))
    done = package.tune(saved("first.pth", 1), settings=SET, rewrites=THREE, runtimes=("onnxruntime",), rounds=4)
    assert done.complete
    assert any(row.ratio for row in done.candidates)


class OnGpu:
    """A session as one on a GPU, which is timed by a clock of its own."""

    def __init__(self, session):
        self.session = session

    def __getattr__(self, name):
        return getattr(self.session, name)

    def gpu_timed_call(self, feeds):
        def run():
            begin = time.perf_counter_ns()
            self.session.run(feeds)
            return (time.perf_counter_ns() - begin) / 1e6

        return run

    def nodes_on_cpu(self, feeds):
        return ()


def test_starting_a_gpu_runtime_does_not_keep_tune_from_measuring(monkeypatch):
    """Seconds of the first load counted for every configuration: on an H200 none fitted into the time."""
    started = 0.0

    def opened(*given):
        nonlocal started
        session = OnGpu(open_deployment(*given))
        started = 1e4  # seconds, as if the first load had taken them
        return session

    def clock():
        return time.monotonic() + started

    monkeypatch.setattr("repaconv.stages.tune.speed_measurements.open_deployment", opened)
    monkeypatch.setattr("repaconv.stages.tune.speed_measurements.time", types.SimpleNamespace(monotonic=clock))
    done = package.tune(saved("first.pth", 1), settings=SET, rewrites=THREE, runtimes=("onnxruntime",), rounds=4)
    assert done.complete
    assert any(row.ratio for row in done.candidates)


def test_a_second_checkpoint_of_the_same_shapes_costs_nothing(monkeypatch):
    def never(*_, **__):
        raise AssertionError("measured again")

    asked = {"settings": SET, "rewrites": THREE, "runtimes": ("onnxruntime",)}
    monkeypatch.setattr(stage.LocalMeasurement, "__call__", equal_here)
    package.tune(saved("first.pth", 1), **asked)
    monkeypatch.setattr(stage.LocalMeasurement, "__call__", never)
    again = package.tune(saved("second.pth", 2), **asked)
    assert again.note
    assert again.options == ("--runtimes", "onnxruntime", *HEADS, "--rewrites", ",".join(THREE))
    folded = package.fold("second.pth", num_heads=3, preset="fastest-known", force=True)
    assert folded.rewrites == again.deployment.rewrites
    with pytest.raises(AssertionError, match="measured again"):
        package.tune("first.pth", rerun=True, **asked)


def test_of_equal_searches_the_fastest_is_known_and_a_finished_one_before(tiny, monkeypatch):
    from repaconv.stages.shared.preset_choice import _cached_for_shapes

    package.fold(tiny)
    monkeypatch.setattr(stage.LocalMeasurement, "__call__", equal_here)
    done = package.tune(rewrites=["bias-forward"], runtimes=["onnxruntime"])
    of = {"0000": (1.01, True), "8888": (9.0, False), "ffff": (3.0, True)}
    for name, (value, complete) in of.items():
        found = done.model_copy(update={"ratio": ratio_of(value), "complete": complete})
        write_artefact(cache_folder("tuned") / f"{done.shapes_sha256[:16]}-{name}.json", found)
    assert _cached_for_shapes(done.shapes_sha256).ratio.median == 3.0


def test_tune_takes_no_other_fold_for_the_checkpoints_and_removes_none(tiny):
    package.fold(tiny, image_size=64)
    package.verify()
    before = sorted(Path("repaconv-out/tiny").iterdir())
    for settings in (None, {"image_size": "96"}):
        with pytest.raises(Refused, match="another fold than requested: it differs in image_size"):
            package.tune(tiny, settings=settings, measurer=all_equal)
    assert sorted(Path("repaconv-out/tiny").iterdir()) == before


def test_what_another_machine_measured_is_not_known_of_this_one():
    done = package.tune(saved("first.pth", 1), settings=SET, measurer=all_equal, rewrites=THREE)
    assert done.machine == {"cpu": "a worker of x86-64"}
    with pytest.raises(UsageProblem, match="no result of `tune`"):
        package.fold("first.pth", num_heads=3, preset="fastest-known")


def test_a_target_of_a_file_is_tuned_and_exported_by_its_path(repaconv, monkeypatch):
    monkeypatch.setattr(stage.LocalMeasurement, "__call__", equal_here)
    Path("pi.toml").write_text('name = "pi-01"\nextends = "x86-64"\n')
    checkpoint = saved("first.pth", 1)
    code, out, err = repaconv("tune", checkpoint, *HEADS, "--target", "pi.toml", "--rewrites", "bias-forward")
    assert (code, "repaconv export --target pi.toml --preset" in out) == (0, True), err
    preset = "repaconv-out/first/tuned/pi-01.json"
    assert {row.deployment.target for row in read_artefact(Path(preset), TuneArtefact).candidates} >= {"pi-01"}
    assert package.export(target="pi.toml", preset=preset).target == "pi-01"


def test_what_workers_do_not_measure_is_refused_or_skipped():
    checkpoint, sent = saved("first.pth", 1), []
    for target, objective, code in (
        ("x86-64", "throughput", "tune.objective"),
        ("cpu-torch", "latency", "remote.no-graph"),
    ):
        with pytest.raises(UsageProblem) as refused:
            package.tune(checkpoint, settings=SET, measurer=all_equal, target=target, objective=objective)
        assert refused.value.code == code

    def records(reference, others, rounds, **_):
        sent.extend(others)
        return all_equal(reference, others, rounds)

    np.savez("x.npz", input=np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32))
    lossy = {"max_disagreement": 1.0, "inputs": "x.npz", "measurer": records, "rewrites": ["bias-forward"]}
    done = package.tune(checkpoint, settings=SET, target="x86-64-openvino", **lossy)
    assert [why.partition(":")[0] for why in done.skipped if "as sent" in why] == ["bf16"]
    assert {name.partition("-")[0] for name in sent} == {"fp32", "int8"}


def test_what_does_not_run_on_a_worker_is_left_with_the_reason():
    sent: list[str] = []

    def first_fails(_reference, others, _rounds, **_):
        sent.extend(name for name in others if name not in sent)
        return {name: "it does not run on a: why" if name == sent[0] else ratio_of(1.0) for name in others}

    done = package.tune(saved("first.pth", 1), settings=SET, measurer=first_fails)
    (row,) = (row for row in done.candidates if row.description == "skipped: it does not run on a: why")
    assert row.ratio is None
    assert len(sent) > 1
    assert any(row.ratio for row in done.candidates)


def test_an_interrupted_search_resumes():
    ckpt, seen = saved("first.pth", 1), []

    def breaks(reference, others, rounds, **_):
        if seen:
            raise KeyboardInterrupt
        return counts(reference, others, rounds)

    def counts(reference, others, rounds, **_):
        seen.append((rounds, sorted(others)))
        return all_equal(reference, others, rounds)

    with pytest.raises(KeyboardInterrupt):
        package.tune(ckpt, settings=SET, measurer=breaks, where="there", rewrites=THREE)
    package.tune(ckpt, settings=SET, measurer=counts, where="there", rewrites=THREE)
    assert [rounds for rounds, _ in seen] == [FIRST, MIDDLE, 50]


def test_an_exhaustive_search_continues_for_its_time_at_each_call():
    seen: list[str] = []

    def counts(_reference, others, rounds, **_):
        seen.extend(f"{rounds} {name}" for name in others)
        return all_equal(_reference, others, rounds)

    asked = {"settings": SET, "measurer": counts, "where": "there", "rewrites": THREE, "exhaustive": True}
    ckpt = saved("first.pth", 1)
    assert not package.tune(ckpt, **asked, budget_s=0).complete
    assert seen == []
    done = package.tune(ckpt, **asked, budget_s=60)
    assert done.complete
    assert len(seen) == len(set(seen)) > 0  # nothing twice
    assert {each.split()[0] for each in seen} == {str(MIDDLE), "50"}
    assert package.tune(ckpt, **asked, budget_s=60).note


def test_graphs_make_way_for_others_and_are_written_again(tmp_path, monkeypatch):
    graphs = candidate_graphs.Candidates(None, (), None, tmp_path, lambda *_: None)
    monkeypatch.setattr(candidate_graphs, "GRAPH_BYTES", 0)
    paths = [graphs._file((name,), lambda name=name: onnx.ModelProto(doc_string=name)) for name in "aba"]
    assert [path.is_file() for path in paths] == [True, False, True]
    assert paths[0] == paths[2]


def test_an_interrupted_search_is_no_preset():
    def breaks(*_, **__):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return all_equal(*_)

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        package.tune(saved("first.pth", 1), settings=SET, measurer=breaks, rewrites=THREE)
    with pytest.raises(UsageProblem, match="no result of `tune`"):
        package.fold("first.pth", num_heads=3, preset="fastest-known")


def test_masks_of_the_same_name_in_two_folders_are_all_part_of_the_question(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.png").write_bytes(b"mask")
    before = stage._labels_sha256(tmp_path)
    (tmp_path / "a/1.png").write_bytes(b"another")
    assert stage._labels_sha256(tmp_path) != before


def test_an_answer_is_of_its_question(monkeypatch):
    """Of the time that it had, of this repaconv; with lower precision of the weights, the images and the budget."""
    from repaconv.stages.shared import result_provenance

    calls: list[set[str]] = []

    def measurer(_reference, others, _rounds, **_):
        calls.append({name.partition("-")[0] for name in others})
        return {name: ratio_of(1.0 if name.startswith("fp32") else 1.5) for name in others}

    def asked(name="first.pth", where="there", **more):
        calls.clear()
        result = {"settings": SET, "measurer": measurer, "where": where, "rewrites": THREE}
        return package.tune(Path(name), **result, **more), list(calls)

    saved("first.pth", 1)
    saved("second.pth", 2)
    short, measured = asked(budget_s=0)
    assert (short.complete, measured) == (False, [])
    assert asked(budget_s=0)[0].note  # no more time than it had
    long, measured = asked()
    assert (long.complete, long.note) == (True, "")
    assert measured
    assert asked(budget_s=5)[0].note
    assert asked(where="another cluster")[1]
    assert asked(where="")[1]  # who does not say where has not been there before
    assert asked(where="")[1]
    size = long.image_size
    for name in ("a", "b"):
        images = np.random.default_rng(ord(name)).standard_normal((16, 3, *size)).astype(np.float32)
        np.savez(f"{name}.npz", input=images)
    low = {"max_disagreement": 1.0, "inputs": "a.npz"}
    first, measured = asked(**low)
    assert (first.note, set.union(*measured)) == ("", {"fp32", "fp16", "int8"})  # outputs are compared on the images
    evaluated = [row for row in first.candidates if row.link]
    assert {row.link.tolerance.kind for row in evaluated} == {"lossy"}
    assert asked(**low)[0].candidates == first.candidates
    assert asked(**low)[1] == []
    found, measured = asked(**{**low, "max_disagreement": 0.5})
    # judged anew; times are of the shapes: at most what wins now is measured in more rounds, and what is exact where
    # four images cannot tell what lower precision loses
    assert (found.note, len(measured) <= 1 + bool(found.skipped)) == ("", True)
    for other in ({**low, "inputs": "b.npz"}, {**low, "name": "second.pth"}):
        found, measured = asked(**other)
        assert (found.note, bool(measured)) == ("", True), other
        assert [row.link for row in found.candidates if row.link] != [row.link for row in evaluated], other
    assert asked(name="second.pth")[0].note
    with pytest.raises(Refused, match=r"gone\.npz"):
        asked(**{**low, "inputs": "gone.npz"})
    monkeypatch.setattr(result_provenance, "version", lambda _package: "9")
    assert asked()[1]


@pytest.mark.parametrize("require", [accuracy_loss._require_enough, accuracy_loss._require_enough_of_task])
def test_two_images_are_too_few_and_not_without_labels(require):
    two, three = (Split.of(random_inputs((3, 8, 8), count=count, seed=0)).halved() for count in (2, 3))
    with pytest.raises(UsageProblem) as refused:
        require(two, "max_disagreement", 1.0)
    assert refused.value.code == "tune.too-few"
    require(three, "max_disagreement", 1.0)
    with pytest.raises(UsageProblem, match="have no labels") as refused:
        require(three, "max_accuracy_drop", 1.0)
    assert refused.value.code == "tune.no-labels"


def test_what_the_budget_does_not_allow_is_left(monkeypatch):
    monkeypatch.setattr(candidate_graphs.Candidates, "macs", None)  # no graph is made to be counted
    done = package.tune(saved("first.pth", 1), settings=SET, measurer=all_equal, rewrites=THREE, budget_s=0)
    assert done.deployment == done.baseline
    assert not any(row.ratio for row in done.candidates)


def test_lower_precision_is_lossy_evaluated_on_images_and_kept_within_what_is_allowed(repaconv):
    ckpt = saved("first.pth", 1)
    code, _, err = repaconv("tune", ckpt, *HEADS, "--max-disagreement", "0.5%")
    assert code == 2
    assert "--inputs" in err
    weights = torch.load(ckpt, weights_only=False)
    headless = {name: value for name, value in weights["model"].items() if not name.startswith("head.")}
    torch.save({**weights, "model": headless}, "headless.pth")
    with pytest.raises(UsageProblem, match="features"):
        package.tune("headless.pth", settings=SET, max_disagreement=0.1, inputs="images.npz", rewrites=THREE)
    folded = package.fold(ckpt, num_heads=3)
    images = np.random.default_rng(0).standard_normal((64, 3, *folded.image_size)).astype(np.float32)
    np.savez("images.npz", input=images)

    def doubled(_reference, others, _rounds, **_):
        return {name: ratio_of(1.0 if name.startswith("fp32") else 2.0) for name in others}

    loose = package.tune(
        ckpt, settings=SET, max_disagreement=1.0, inputs="images.npz", measurer=doubled, rewrites=THREE
    )
    assert loose.deployment.precision in ("fp16", "int8")
    assert loose.model_sha256
    evaluated = [row for row in loose.candidates if row.link]
    assert {row.deployment.precision for row in evaluated} == {"fp16", "int8"}
    assert all(row.disagreement is not None and row.link.metrics.images == 16 for row in evaluated)
    assert loose.images.endswith("32 for calibration, 16 for validation, the other 16 for evaluation")
    assert (loose.link.metrics.images, loose.link.verdict) == (16, "passed")
    other = package.fold(saved("second.pth", 2), num_heads=3)
    with pytest.raises(Refused, match="evaluated with other weights"):
        package.export("repaconv-out/second", preset=loose.output_files[0])
    assert other.shapes == folded.shapes
    for least, message in ((0.02, "cannot tell"), (-1.0, "is -1"), (math.inf, "is inf")):
        with pytest.raises(UsageProblem, match=message):
            package.tune(ckpt, settings=SET, max_disagreement=least, inputs="images.npz", rewrites=THREE)
    with pytest.raises(UsageProblem, match="--max-disagreement is 2"):  # before it asks for images
        package.tune("repaconv-out/second", max_disagreement=2.0)


def test_lower_precision_may_be_held_to_accuracy_where_images_have_labels(repaconv, capfd):
    """A trained network; one bright pixel takes the range of its first layer, and int8 is right less often."""
    package.fold(models.checkpoint("repavit"), out="run")
    with np.load(models.HELD_OUT) as held:
        images, labels = held["input"][:96].copy(), held["labels"][:96]
    images[:, :, 0, 0] = 300
    np.savez("right.npz", input=images, labels=labels)
    np.savez("wrong.npz", input=images, labels=(labels + 1) % 10)
    np.savez("some.npz", input=images, labels=np.where(np.arange(96) < 80, -1, labels))
    np.savez("bare.npz", input=images)

    def tuned(inputs):
        asked = {"rewrites": ["bias-forward"], "measurer": all_equal, "max_accuracy_drop": 0.04}
        return package.tune("run", inputs=inputs, **asked)

    def int8_of(done):
        rows = ((row, row.deployment) for row in done.candidates)
        return next(row for row, of in rows if of.precision == "int8" and not of.fp32_modules)

    kept = tuned("right.npz")
    lost = int8_of(kept)
    assert lost.description == f"loses {-lost.link.accuracy.difference:.2%} of accuracy, more than allowed"
    assert lost.link.accuracy.reference > 0.9
    assert (kept.allowed_accuracy_drop, kept.allowed_disagreement) == (0.04, None)
    assert "accuracy" not in int8_of(tuned("wrong.npz")).description
    for inputs, message in (
        ("bare.npz", "have no labels"),
        ("some.npz", "cannot tell whether no more than 4.00% fewer"),
    ):
        with pytest.raises(UsageProblem, match=message):
            tuned(inputs)
    link = package.export("run", precision="int8", inputs="right.npz", allow_unverified=True).links[-1]
    assert (link.verdict, link.accuracy.reference > 0.9) == ("failed", True)
    assert "accuracy was not measured" not in link.note
    code, _, err = repaconv("tune", "run", "--max-accuracy-drop", "1%")
    assert (code, "--inputs" in err) == (2, True)
    show_tune(kept)
    assert f"{lost.link.accuracy.difference:+.2%}" in capfd.readouterr().out


def lossy_is_faster(_reference, others, _rounds, **_):
    return {name: ratio_of(1.0 if name.startswith("fp32") else 2.0) for name in others}


def test_where_fp32_always_predicts_the_same_agreement_lets_no_lower_precision_in(repaconv, capfd):
    """A bias that decides alone: whatever int8 computes agrees. Speed alone may choose, if that is asked for."""
    ckpt = saved("first.pth", 1)
    given = torch.load(ckpt, weights_only=False)
    given["model"]["head.bias"][2] += 1000
    torch.save(given, ckpt)
    folded = package.fold(ckpt, num_heads=3)
    images = np.random.default_rng(0).standard_normal((64, 3, *folded.image_size)).astype(np.float32)
    np.savez("x.npz", input=images)
    np.savez("labeled.npz", input=images, labels=np.full(64, 2))
    asked = {"settings": SET, "inputs": "x.npz", "measurer": lossy_is_faster, "rewrites": THREE}
    done = package.tune(ckpt, max_disagreement=0.1, **asked)
    (why,) = done.skipped
    assert why.startswith("lower precision: FP32 gives all 16 validation images the same top-1 prediction.")
    assert "--max-disagreement 100%" in why
    assert {row.deployment.precision for row in done.candidates} == {"fp32"}
    show_tune(done)
    assert why.partition(".")[0] in " ".join(capfd.readouterr().out.split())
    winner, skipped = done.candidates[0], done.candidates[-1].model_copy(update={"description": "skipped: a reason."})
    show_tune(done.model_copy(update={"candidates": (winner, skipped, skipped, skipped)}))
    words = " ".join(capfd.readouterr().out.split())
    assert (words.count("skipped: a reason."), words.count("skipped: as above")) == (1, 2)
    labeled = package.tune(ckpt, max_accuracy_drop=0.1, **{**asked, "inputs": "labeled.npz"})
    assert labeled.skipped == done.skipped
    late = package.tune(ckpt, max_disagreement=0.1, budget_s=0, **{**asked, "inputs": "labeled.npz"})
    assert late.skipped[0].startswith("lower precision: FP32 alone takes about 0 s on the 32 images that evaluate it")
    assert not late.complete
    exhaustive = package.tune(ckpt, max_disagreement=0.1, exhaustive=True, **asked)
    assert {row.deployment.precision for row in exhaustive.candidates} == {"fp32"}
    by_speed = package.tune(ckpt, max_disagreement=1.0, **asked)
    assert (by_speed.skipped, by_speed.deployment.precision != "fp32") == ((), True)


@pytest.mark.parametrize(
    ("predicted", "labels", "budget", "known"),
    [
        (20 * [3], None, Budget(0.005), False),
        (19 * [3] + [1], None, Budget(0.005), False),  # nearly all
        (18 * [3] + 2 * [1], None, Budget(0.005), True),
        (18 * [3] + 2 * [1], None, Budget(0.1), False),  # always answering 3 is within 10%
        (20 * [3], None, Budget(1.0), True),  # by speed alone
        (list(range(10)) * 2, list(range(10)) * 2, Budget(None, 0.01), True),
        (20 * [3], 20 * [3], Budget(None, 0.01), False),  # right on all, and so is always answering 3
        (10 * [3] + 10 * [1], 10 * [3] + 10 * [2], Budget(None, 0.01), True),
        (20 * [3], 10 * [3] + 10 * [1], Budget(0.01, 0.01), False),
        (19 * [3] + [1], 19 * [3] + [1], Budget(None, 0.01), True),  # always answering 3 is right less often
        (20 * [3], 20 * [3], Budget(1.0, 0.01), False),
    ],
)
def test_predictions_are_the_same_if_ignoring_the_input_is_within_the_budget(predicted, labels, budget, known):
    batches = [Batch({"input": np.zeros((20, 1))}, labels=None if labels is None else np.array(labels))]
    graphs = Namespace(place_of_scores=0, choice=None, given=Namespace(validation_batches=lambda: batches))
    evaluation = accuracy_loss.LossEvaluation(graphs, None, budget, True, lambda *_: None)
    evaluation._expected = [{"logits": np.eye(10)[predicted]}]
    assert (evaluation.same_predictions() == "") == known


@pytest.mark.slow
def test_int8_with_sensitive_layers_in_float32_is_found_and_exported_as_it_was(repaconv):
    """One bright pixel takes all of the range of the first layer's input: that one has to stay in float32."""
    folded = package.fold(saved("first.pth", 1), num_heads=3)
    images = np.random.default_rng(0).standard_normal((400, 3, *folded.image_size)).astype(np.float32)
    images[:, :, 0, 0] = 2000
    np.savez("images.npz", input=images)

    def by_int8(_reference, others, _rounds, **_):
        return {name: ratio_of(2.0 if name.startswith("int8") else 1.0) for name in others}

    done = package.tune(max_disagreement=1.0, inputs="images.npz", measurer=by_int8, rewrites=["bias-forward"])
    whole = next(
        row for row in done.candidates if row.deployment.precision == "int8" and not row.deployment.fp32_modules
    )
    assert whole.description == "failed as a link"
    ranked = done.sensitivities["x86-64"]
    assert [each.kl_divergence for each in ranked] == sorted((each.kl_divergence for each in ranked), reverse=True)
    assert ranked[0].layers == ("patch_embed.proj",) == done.deployment.fp32_modules[:1]
    assert (done.deployment.precision, done.link.verdict) == ("int8", "passed")
    code, out, err = repaconv("export", "--preset", done.output_files[0], "--inputs", "images.npz", "--format", "json")
    assert code == 0, err
    data = json.loads(out)["data"]
    assert data["fp32_nodes"]
    assert set(data["fp32_nodes"]) <= set(data["unquantized_layers"])
    assert all(any(node.startswith(name) for name in done.deployment.fp32_modules) for node in data["fp32_nodes"])
    assert repaconv("bench", "--preset", done.output_files[0], "--rounds", "2")[0] in (0, 5)


@pytest.mark.parametrize("classes", [1, 5])
def test_a_lower_precision_is_evaluated_as_a_link_on_images_that_did_not_calibrate_it(classes, monkeypatch):
    """With one class the first one agrees whatever comes out, NaN too."""
    tiny = METHOD.example(dataclasses.replace(TINY, classes=classes), seed=3)
    torch.save({"state_dict": tiny, "args": {"img_size": 32}}, "tiny.pth")
    package.fold("tiny.pth")
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)
    np.savez("x.npz", input=images)
    calibrated, evaluated = [], []
    sound, run = candidate_graphs.to_precision, accuracy_loss.FixedBatch.run

    def nothing(graph, precision, pieces, device, **more):
        calibrated.extend(np.concatenate([piece["input"] for piece in pieces]))
        typed, kept = sound(graph, precision, pieces, device, **more)
        for weight in typed.graph.initializer:
            if classes == 1 and weight.data_type == onnx.TensorProto.FLOAT:
                weight.CopyFrom(numpy_helper.from_array(np.nan * numpy_helper.to_array(weight), weight.name))
        return typed, kept

    def seen(session, feeds):
        evaluated.extend(feeds["input"])
        return run(session, feeds)

    class Seen(accuracy_loss.FixedBatch):
        run = seen

    monkeypatch.setattr(candidate_graphs, "to_precision", nothing)
    monkeypatch.setattr(accuracy_loss, "FixedBatch", Seen)
    device = load_target("x86-64").model_copy(update={"precisions": ("fp32", "int8")})
    monkeypatch.setattr(stage, "load_target", lambda _name: device)
    done = package.tune(
        "repaconv-out/tiny", max_disagreement=1.0, inputs="x.npz", rewrites=["bias-forward"], measurer=all_equal
    )
    row = next(row for row in done.candidates if row.deployment.precision == "int8")
    assert (row.description == "failed as a link") == (classes == 1)
    assert (row.disagreement, row.link.verdict) == (0, "failed" if classes == 1 else "passed")
    of = {image.tobytes() for image in calibrated}, {image.tobytes() for image in evaluated}
    assert (len(of[0]), len(of[1]), of[0] & of[1]) == (4, 2, set())


def test_what_is_reported_has_chosen_nothing_and_what_loses_more_there_makes_way():
    places = Split.of(random_inputs((1, 2, 2), count=100, seed=0)).halved()
    parts = [set(places.calibration), set(places.validation), set(places.test)]
    assert [len(part) for part in parts] == [32, 34, 34]
    assert set.union(*parts) == set(range(100))
    exact, other, low = (Deployment(target="here", runtime=name, rewrites=()) for name in ("one", "two", "two"))
    low = low.model_copy(update={"precision": "int8"})
    rows = [Candidate(deployment=low, ratio=ratio_of(3.0), description="the fastest")]
    rows += [
        Candidate(deployment=other, ratio=ratio_of(1.2), description="finalist"),
        Candidate(deployment=exact, description=""),
    ]

    class Judged:
        def __init__(self, description):
            self.description = description

        def final_loss(self, _configuration):
            return accuracy_loss.Loss(0.01, None, self.description)

    assert accuracy_loss.final_rows(rows, Judged(""), exact) == (rows, accuracy_loss.Loss(0.01, None, ""))
    held, loss = accuracy_loss.final_rows(rows, Judged("too much"), exact)
    assert [row.deployment for row in held] == [other, low, exact]
    assert (held[1].description, loss.disagreement) == ("too much, on images that chose nothing", 0.01)
    slow = [rows[0], rows[1].model_copy(update={"ratio": ratio_of(1.0)}), rows[2]]
    assert accuracy_loss.final_rows(slow, Judged("too much"), exact)[0][0].deployment == exact
    assert accuracy_loss.final_rows(held, Judged("not asked"), exact) == (held, None)
    faster = Candidate(deployment=other.model_copy(update={"threads": 2}), ratio=ratio_of(1.3), description="measured")
    wrong = Candidate(
        deployment=other.model_copy(update={"threads": 3}), ratio=ratio_of(1.4), description="skipped: wrong"
    )
    in_time = accuracy_loss.final_rows([*rows, wrong, faster], Judged("too much"), exact)[0]
    assert (in_time[0].deployment, in_time[0].description) == (faster.deployment, "the best exact one")


def test_an_exhaustive_search_keeps_time_for_its_last_measurement_and_for_evaluating_the_winner():
    """63 configurations take 630 s. Whatever the time, what is chosen is evaluated in it, on both splits."""
    trials = [trial_of("a", names=NAMES[:5]), trial_of("a", names=NAMES[:5], precision="int8")]

    def measure(configurations, _rounds):
        return {
            configuration: ratio_of(2.0 if configuration.precision == "int8" else 1.1)
            for configuration in configurations
        }

    found = {}
    for budget_s in (0, 10, 30, 60, 300, 450, 600, 2000):
        source = Source(measure, budget_s, run_s=0.25, load_s=7.0, evaluation_s=4.0)
        asked = []
        allowed = source.timed(lambda configuration, asked=asked: not asked.append(configuration))
        rows = search_exhaustively(trials, source, allowed, 40)
        best = rows[0].deployment
        late = 2 * source.each_s if best.precision == "int8" else 0.0  # the test split, and FP32 on it
        assert source.left_s() - late >= 0 or budget_s == 10, budget_s  # 10 s: one configuration at least
        assert source.cut == (budget_s < 2000)
        assert best.precision == ("int8" if asked else "fp32")
        assert bool(asked) or budget_s < 600  # FP32 is measured first
        found[budget_s] = sum(row.ratio is not None for row in rows)
    assert (found[0], found[10], found[2000]) == (0, 1, 63)
    assert sorted(found.values()) == list(found.values())


def test_rounds_are_those_of_the_measurement_that_is_shown():
    """50 are known of an earlier search; this one asked for 6."""
    known = trial_of("b").start
    source = Source(lambda configurations, _rounds: {configuration: ratio_of(1.0) for configuration in configurations})
    source.found = {known: Measured(ratio_of(0.9), 50)}
    for rows in (
        search([trial_of("a")], lambda _: 1, source, anything, 50),
        search_exhaustively([trial_of("a")], source, anything, 50),
    ):
        assert next(row.rounds for row in rows if row.deployment == known) == 50


def test_the_time_to_write_a_graph_is_known_though_counting_its_macs_has_written_it(tiny, tmp_path):
    """Loading then finds it on disk, and other rewritten graphs were expected to take no time."""
    package.fold(tiny)
    seconds = iter(range(10**6))
    source_model = source_model_of(run_folder.Run(Path("repaconv-out/tiny")))
    names = sorted(plugins.registered(plugins.REWRITES))
    graphs = candidate_graphs.Candidates(
        source_model, names, None, tmp_path, lambda *_: None, clock=lambda: next(seconds)
    )
    baseline = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    one, another = (
        baseline.model_copy(update={"rewrites": (name,)}) for name in graphs.trial(baseline, ()).rewrites[:2]
    )
    assert graphs.macs(one) > 0
    measuring = LocalMeasurement(graphs, OutputCheck(graphs, baseline), baseline, 1, 0, False)
    measuring._load(one, set())
    assert measuring.timings[one].prepare_s == 1
    costs = MeasurementCosts(baseline, measuring.timings, 1e9)
    assert costs.seconds([another], 6) - costs.seconds([another], 6, written=True) >= 1


def test_the_search_starts_from_the_whole_default_preset(tmp_path):
    """`rows-throughout` finds nothing in the graph as exported, only the Gemms of `linear-as-gemm`."""
    package.fold(models.checkpoint("repavit"), out="run")
    source_model = source_model_of(run_folder.Run(Path("run")))
    names = sorted(plugins.registered(plugins.REWRITES))
    graphs = candidate_graphs.Candidates(source_model, names, None, tmp_path, lambda *_: None)
    start = graphs.trial(Deployment(target="x86-64", runtime="onnxruntime", rewrites=()), ()).start
    assert start.rewrites == package.export("run").rewrites
    assert "rows-throughout" in start.rewrites


def test_macs_are_those_of_the_images_that_are_measured(tmp_path):
    """A graph for images of any size had those of a single pixel, and costs were expected from them."""
    package.fold(models.checkpoint("riformer"), out="run")
    source_model = source_model_of(run_folder.Run(Path("run")))
    baseline = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    size = source_model.folded.image_size
    assert source_model.folded.any_image_size
    dynamic, fixed = (
        candidate_graphs.Candidates(source_model, (), None, tmp_path, lambda *_: None, fixed_size=each)
        for each in (None, size)
    )
    assert dynamic.macs(baseline) == fixed.macs(baseline) > 1e6


def test_forms_by_name_and_what_is_no_form(repaconv, tiny):
    ckpt = saved("first.pth", 1)
    assert package.fold(ckpt, num_heads=3, preset="official").rewrites == ()
    assert package.fold(ckpt, num_heads=3).rewrites is None
    branches = plugins.load(plugins.METHODS, "nondeep").example("tiny", seed=1)
    torch.save({"state_dict": branches, "meta": example_meta()}, "branches.pth")
    assert package.fold("branches.pth", preset="official").rewrites == ("scores-as-matrix",)
    for form, message in (
        ("quickest", "neither a rewrite preset nor a file"),
        ("fastest-known", "no result of `tune`"),
    ):
        code, _, err = repaconv("fold", ckpt, *HEADS, "--preset", form)
        assert code == 2
        assert message in err
        assert f"repaconv export --preset {form}" in err  # where it moves
        with pytest.raises(UsageProblem, match=message):
            package.export("repaconv-out/branches", preset=form)
    usual, official = package.export("repaconv-out/branches"), package.export("repaconv-out/branches", preset="default")
    assert (usual.preset, usual.variant, official.preset) == ("official", "form-official", "default")
    with pytest.raises(Refused, match="there is no file or folder"):
        package.tune("gone.pth")
    done = package.tune(ckpt, settings=SET, measurer=all_equal, rewrites=THREE)
    with pytest.raises(Refused, match="other shapes"):
        package.fold(tiny, preset=done.output_files[0])
    with pytest.raises(UsageProblem, match="unknown rewrite"):
        package.tune(ckpt, settings=SET, measurer=all_equal, rewrites=["faster"])


def test_a_removed_rewrite_is_refused_with_what_to_use(repaconv, monkeypatch):
    """By its name and in the file of an earlier `tune`; a result in the cache that names one is not used."""
    ckpt = saved("first.pth", 1)
    code, _, err = repaconv("tune", ckpt, *HEADS, "--rewrites", "rms-norm,gather-as-matmul")
    assert code == 2
    assert "the rewrite 'gather-as-matmul' was removed: it was faster in no benchmark" in err
    assert "Use 'rows-by-gathernd' in its place." in err
    assert not Path("repaconv-out").exists()  # before anything is folded
    monkeypatch.setattr(stage.LocalMeasurement, "__call__", equal_here)
    done = package.tune(ckpt, settings=SET, rewrites=THREE, runtimes=["onnxruntime"])
    package.fold(ckpt, num_heads=3, preset="fastest-known", force=True)
    for path in (Path(done.output_files[0]), *cache_folder("tuned").glob("*.json")):
        found = read_artefact(path, TuneArtefact)
        deployment = found.deployment.model_copy(update={"rewrites": ("no-moves",)})
        write_artefact(path, found.model_copy(update={"deployment": deployment}))
    code, _, err = repaconv("export", "--preset", done.output_files[0])
    assert code == 2
    assert "the rewrite 'no-moves' was removed" in err
    with pytest.raises(UsageProblem, match="no result of `tune`"):
        package.fold(ckpt, num_heads=3, preset="fastest-known", force=True)


def test_a_rewrite_that_breaks_is_left_out(monkeypatch):
    from repaconv.rewrites.speed import attention_operator

    def broken(_model):
        raise ValueError("not this graph")
        yield

    monkeypatch.setattr("repaconv.benchmark.cpu_isa_level.isa_level", lambda _: "")
    rewrite = attention_operator.ATTENTION_OP
    monkeypatch.setattr(
        attention_operator, "ATTENTION_OP", type(rewrite)(rewrite.name, rewrite.valid, broken, rewrite.opset)
    )
    package.fold(saved("first.pth", 1), num_heads=3)
    done = package.export()
    assert done.verdict == "passed"
    assert "read-tokens" in done.rewrites
    assert rewrite.name not in done.rewrites
    notes = [link.note for link in done.links if link.name == "form"]
    assert "not this graph" in notes[0]
    assert notes[0].endswith(f"{rewrite.name} was left out")


def test_a_rewrite_that_is_right_at_the_exporters_batch_alone_is_thrown_away(tmp_path):
    def shifted(model):
        node = model.graph.outputs[0].producer()
        write = Writer(model, node)
        count = write("Shape", model.graph.inputs[0], start=0, end=1)
        count.dtype = ir.DataType.INT64
        off = write("Sub", write("Cast", count, to=1), write.exactly(np.array([2.0], np.float32)))
        node.replace_input_with(0, write("Add", node.inputs[0], off))
        yield Change(rewrite="shifted", place="head", description="adds the batch minus 2")

    torch.manual_seed(0)
    net = MetaFormer(TINY, final_affine=False).eval()
    spec = GraphSpec((32, 32), opset=18, rewrites=(Rewrite("shifted", "never", shifted),), simplifiers=())
    configurations = Proving("net", spec, {}, tmp_path, lambda *_: None)
    made = exported_graph(configurations, net, net.state_dict(), (3, 32, 32), output="logits")
    assert {link.name: link.verdict for link in made.links[:2]} == {"exported": "passed", "form": "failed"}
    assert made.changes == ()


def test_of_a_preset_the_rewrites_are_left_out_that_are_wrong_on_this_graph(tmp_path):
    def scaled(by, name):
        def apply(model):
            node = model.graph.outputs[0].producer()
            write = Writer(model, node)
            node.replace_input_with(0, write("Mul", node.inputs[0], write.exactly(np.array([by], np.float32))))
            yield Change(rewrite=name, place="head", description=f"multiplies by {by}")

        return Rewrite(name, "never", apply)

    def broken(model):
        raise ValueError("not this graph")

    def exported(*rewrites):
        spec = GraphSpec((32, 32), opset=18, rewrites=rewrites, simplifiers=())
        configurations = Proving("net", spec, {}, tmp_path, lambda *_: None)
        made = exported_graph(configurations, net, net.state_dict(), (3, 32, 32), output="logits")
        lines = [(link.verdict, link.note) for link in made.links if link.name == "form"]
        return [change.rewrite for change in made.changes], lines

    torch.manual_seed(0)
    net = MetaFormer(TINY, final_affine=False).eval()
    one, two, three = (scaled(by, name) for by, name in ((1.0, "one"), (2.0, "two"), (3.0, "three")))
    fails = Rewrite("broken", "never", broken)
    changes, lines = exported(one, two, scaled(1.0, "also"))
    assert changes == ["one", "also"]
    assert [verdict for verdict, _ in lines] == ["failed", "passed"]
    assert lines[0][1].endswith("two was left out")
    for order in ((fails, two, one, three), (three, two, one, fails)):
        changes, lines = exported(*order)
        assert changes == ["one"]
        assert dict(lines[:3]).keys() == {"failed", "not verified"}
        assert lines[3][0] == "passed"
        why = {note.rpartition("; ")[2]: note for _, note in lines[:3]}
        assert list(why) == [f"{rewrite.name} was left out" for rewrite in order if rewrite is not one]
        assert ["not this graph" in why[f"{name} was left out"] for name in ("broken", "two", "three")] == [1, 0, 0]
    changes, lines = exported(*(scaled(2.0 + n, f"by-{n}") for n in range(5)))
    assert changes == []
    assert [verdict for verdict, _ in lines] == ["failed"] * 4
    assert lines[2][1].endswith("by-2 was left out")
    assert lines[3][1].endswith("the rewritten graph was discarded; the exported one was written")
    changes, lines = exported(two)
    assert changes == []
    assert [verdict for verdict, _ in lines] == ["failed"]


def test_the_page_of_forms_is_of_the_rewrites_that_there_are():
    assert PAGE.read_text() == page(), "run python tests/rewrites_page.py"


def test_what_is_tuned_for_another_runtime_is_exported_and_measured_as_it_was(repaconv, tiny):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    package.fold(tiny)
    done = package.tune(runtimes=["openvino"], rewrites=["bias-forward"], rounds=2)
    assert {row.deployment.runtime for row in done.candidates} == {"onnxruntime", "openvino"}
    assert all(row.ratio or row.description.startswith(("skipped", "the baseline")) for row in done.candidates)
    other = {"target": "x86-64-openvino", "runtime": "openvino"}
    configuration = done.baseline.model_copy(update=other)
    write_artefact(Path("tuned.json"), done.model_copy(update={"deployment": configuration}))
    assert repaconv("export", "--preset", "tuned.json")[0] == 0
    assert Path("repaconv-out/tiny/model.x86-64-openvino.form-tuned.onnx").is_file()
    code, out, _ = repaconv("bench", "--preset", "tuned.json", "--rounds", "2", "--format", "json")
    measured = json.loads(out)["data"]
    assert (code in (0, 5), measured["target"]) == (True, "x86-64-openvino")
    far = done.model_copy(update={"deployment": configuration.model_copy(update={"settings": ("CACHE_DIR=/tmp",)})})
    write_artefact(Path("tuned.json"), far)
    code, _, err = repaconv("bench", "--preset", "tuned.json", "--rounds", "2")
    assert (code, "has no setting CACHE_DIR" in err) == (2, True)


def test_a_fold_in_a_tuned_form_keeps_what_its_int8_leaves(repaconv, tiny):
    package.fold(tiny)
    np.savez("x.npz", input=np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32))
    done = package.tune(rewrites=["bias-forward"], rounds=2)
    configuration = done.baseline.model_copy(update={"precision": "int8", "fp32_modules": ("patch_embed.proj",)})
    write_artefact(Path("tuned.json"), done.model_copy(update={"deployment": configuration}))
    package.fold(tiny, preset="tuned.json", out="tuned")
    whole, kept = (
        package.export(run, precision="int8", inputs="x.npz").fp32_nodes for run in ("repaconv-out/tiny", "tuned")
    )
    assert not any(node.startswith("patch_embed.proj") for node in whole)
    assert any(node.startswith("patch_embed.proj") for node in kept)


@pytest.mark.slow
def test_what_is_lossy_on_another_runtime_is_exported_built_measured_and_gated(repaconv):
    """OpenVINO on our int8 graph, in bfloat16 besides where the processor multiplies it: found, then taken as it is."""
    openvino = pytest.importorskip("openvino", reason="OpenVINO is absent")
    package.fold(saved("tiny.pth", 1), num_heads=3)  # of one image size: see docs/limitations.md
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)
    np.savez("x.npz", input=images)
    asked = {"rewrites": ["bias-forward"], "rounds": 2, "max_disagreement": 1.0, "inputs": "x.npz"}
    done = package.tune(runtimes=["openvino"], **asked)
    assert {row.deployment.runtime for row in done.candidates} == {"onnxruntime", "openvino"}
    assert all(row.ratio or row.description.startswith(("skipped", "the baseline")) for row in done.candidates)
    multiplies = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    configuration = done.baseline.model_copy(
        update={
            "target": "x86-64-openvino",
            "runtime": "openvino",
            "precision": "int8",
            "settings": ("INFERENCE_PRECISION_HINT=bf16",) if multiplies else (),
        }
    )
    write_artefact(Path("tuned.json"), done.model_copy(update={"deployment": configuration}))
    code, _, err = repaconv("export", "--preset", "tuned.json")
    assert (code, "--images" in err) == (2, True)
    assert repaconv("export", "--preset", "tuned.json", "--inputs", "x.npz")[0] == 0
    name = "x86-64-openvino.form-tuned.int8"
    assert Path(f"repaconv-out/tiny/model.{name}.onnx").is_file()
    assert repaconv("build", "--preset", "tuned.json")[0] == 0
    built = json.loads(Path(f"repaconv-out/tiny/build/{name}.json").read_text())
    assert built["builder_options"]["INFERENCE_PRECISION_HINT"] == ("bf16" if multiplies else "f32")
    code, out, _ = repaconv("bench", "--preset", "tuned.json", "--rounds", "2", "--format", "json")
    assert code in (0, 5)
    measured = json.loads(out)["data"]
    assert (measured["target"], measured["precision"]) == ("x86-64-openvino", "int8")
    assert measured["session"]["INFERENCE_PRECISION_HINT"] == built["builder_options"]["INFERENCE_PRECISION_HINT"]
    blob = f"repaconv-out/tiny/build/{name}.blob"  # loads as it was built
    assert package.verify(engine=blob).links[-1].verdict == "passed"
    Path("recipe.toml").write_text(
        'checkpoint = "tiny.pth"\nform = "tuned.json"\n[verify]\ninputs = "x.npz"\n[bench]\nrounds = 10\n'
        "[set]\nnum_heads = 3\n"
    )
    checks = package.gate(["recipe.toml"]).recipes[0].checks
    assert not [check for check in checks if check.verdict in ("failed", "error")]
    assert any(check.stage == "bench" for check in checks)


def test_a_runtime_that_is_not_here_is_left_out_and_an_unknown_one_refused(repaconv, tiny, monkeypatch):
    monkeypatch.setattr(stage.LocalMeasurement, "__call__", equal_here)
    package.fold(tiny)

    def gone(_self):
        raise EnvironmentProblem("OpenVINO is not installed.", hint="pip install it.", code="runtime.missing")

    monkeypatch.setattr(OpenVino, "version", gone)
    code, out, _ = repaconv("tune", "--rewrites", "bias-forward")
    assert (code, "skipped: openvino: OpenVINO is not installed." in out) == (0, True)
    assert "the default preset, limited by --rewrites" in " ".join(out.split())  # its other rewrites were not measured
    code, _, err = repaconv("tune", "--runtimes", "onnxruntime,fastest")
    assert (code, "cannot use the runtime fastest" in err, "openvino" in err) == (2, True, True)
    assert repaconv("tune", "--objective", "speed")[0] == 2


def test_int8_of_another_quantizer_is_tried_where_it_is_worth_it_and_exported_as_it_was(tiny, monkeypatch):
    pytest.importorskip("nncf")

    def by_nncf(_self, configurations, _rounds):
        return {
            configuration: ratio_of(2.0 if configuration.quantizer == "nncf" else 1.0)
            for configuration in configurations
        }

    monkeypatch.setattr(stage.LocalMeasurement, "__call__", by_nncf)
    folded = package.fold(tiny)
    images = np.random.default_rng(0).standard_normal((64, 3, *folded.image_size)).astype(np.float32)
    np.savez("images.npz", input=images)
    asked = {"max_disagreement": 1.0, "inputs": "images.npz", "rewrites": ["bias-forward"]}
    done = package.tune(**asked)
    best = done.deployment
    assert (best.target, best.precision, best.quantizer) == ("x86-64-openvino", "int8", "nncf")
    assert {row.deployment.runtime for row in done.candidates if row.deployment.quantizer} == {"openvino"}
    took = package.export(target=best.target, preset=done.output_files[0], inputs="images.npz")
    assert (took.quantizer, took.verdict) == ("nncf", "passed")
    low = package.export(target="orin-nano", precision="int8", preset=done.output_files[0], inputs="images.npz")
    assert low.quantizer == "onnxruntime"  # the form alone is taken
    monkeypatch.setattr("repaconv.onnx_export.nncf_quantization.find_spec", lambda _name: None)
    without = package.tune(**asked, rerun=True)
    assert {row.deployment.quantizer for row in without.candidates} == {"", "onnxruntime-symmetric"}
    message = "NNCF is not installed. pip install 'repaconv[quantize]'"
    assert without.skipped == (f"nncf: {message}", f"nncf-symmetric: {message}")


def test_throughput_tries_a_stream_for_every_core_and_larger_batches_against_one_call_on_all_of_them():
    device = load_target("x86-64")
    machine = Runtimes((device, load_target("cpu-torch")), {}, ())
    found = dict(initial_trials(machine, Workload("throughput", 4, 1, True), lossy=False, here=False))
    assert [(configuration.streams, configuration.threads, configuration.batch) for configuration in found] == 2 * [
        (1, 4, 1)
    ]
    ours, torchs = found.values()
    assert ours == [{"streams": 4, "threads": 1}, {"batch": 4}, {"batch": 16}]
    assert torchs == [{"batch": 4}, {"batch": 16}]
    assert (
        dict(initial_trials(machine, Workload("latency", 4, 1, True), lossy=True, here=False))[next(iter(found))] == []
    )


def test_a_network_of_a_fixed_batch_size_is_evaluated_in_lower_precision(tmp_path, monkeypatch):
    """Four images at a time, and 11 to choose by: the last call is filled up."""
    monkeypatch.chdir(tmp_path)
    rows = [
        ("Conv", "x w", "a", {}), ("BatchNormalization", "a nw nb nm nv", "b"), ("Relu", "b", "c"),
        ("GlobalAveragePool", "c", "d"), ("Flatten", "d", "e"), ("Gemm", "e h hb", "logits"),
    ]  # fmt: skip
    weights = {"w": normal(4, 3, 3, 3), **norm(4), "h": normal(4, 10), "hb": normal(10)}
    onnx.save(Net(rows, weights, {"x": (F, (4, 3, 8, 8))}, {"logits": F}).model(), "net.onnx")
    np.savez("x.npz", x=np.random.default_rng(0).standard_normal((44, 3, 8, 8)).astype(np.float32))
    assert package.fold("net.onnx", measure=False).batch == 4
    done = package.tune(
        max_disagreement=1.0, inputs="x.npz", runtimes=["onnxruntime"], rewrites=["bias-forward"], rounds=2
    )
    low = [row for row in done.candidates if row.deployment.precision == "int8"]
    assert any(row.ratio for row in low)


def three_by_three(path, size):
    """A network of two 3x3 convolutions of 64 channels, for images of any size or of one."""
    random = np.random.default_rng(0)
    sides = ["height", "width"] if size is None else [size, size]
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Conv", ["x", "a"], ["y"], name="first", pads=[1] * 4),
            onnx.helper.make_node("Relu", ["y"], ["z"], name="relu"),
            onnx.helper.make_node("Conv", ["z", "b"], ["out"], name="second", pads=[1] * 4),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["batch", 64, *sides])],
        [onnx.helper.make_tensor_value_info("out", 1, ["batch", 64, *sides])],
        [
            onnx.numpy_helper.from_array(random.standard_normal((64, 64, 3, 3)).astype(np.float32) / 24, name)
            for name in "ab"
        ],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return Path(path)


def test_graphs_of_one_image_size_are_tuned_and_exported_if_asked_for(repaconv, monkeypatch):
    """A dynamic size hides it from `winograd`, which applies to images of known size only."""
    tried = []

    def faster_by_winograd(self, configurations, _rounds):
        tried.append({name for configuration in configurations for name in configuration.rewrites})
        shapes = [
            onnx.load(self.graphs.path(configuration)).graph.input[0].type.tensor_type.shape.dim
            for configuration in configurations
        ]
        assert all(bool(dim[2].dim_value) == bool(self.graphs.fixed_size) for dim in shapes)
        return {
            configuration: ratio_of(2.0 if "winograd" in configuration.rewrites else 1.0)
            for configuration in configurations
        }

    monkeypatch.setattr("repaconv.stages.tune.speed_measurements.LocalMeasurement.__call__", faster_by_winograd)
    run = package.fold(three_by_three("any.onnx", None)).output_files[0]
    folder = Path(run).parent
    code, out, _ = repaconv("tune", folder, "--rounds", "4")
    assert code == 0
    assert "--image-size" in out
    assert "winograd" not in set().union(*tried)
    tried.clear()
    code, out, _ = repaconv("tune", folder, "--rounds", "4", "--image-size", "48x64", "-o", "sized.json")
    assert code == 0
    assert "--image-size" not in out
    tuned = read_artefact(Path("sized.json"), TuneArtefact)
    assert tuned.image_size == (48, 64)
    assert tuned.graph_size == "fixed"
    assert "winograd" in tuned.deployment.rewrites
    assert repaconv("export", folder, "--preset", "sized.json")[0] == 0
    exported = next(found for file in folder.glob("export*.json") if (found := read_artefact(file, ExportArtefact)))
    assert exported.image_size == (48, 64)
    assert "winograd" in exported.rewrites
    links = {link.name: link.verdict for link in package.verify(folder).links}
    assert links["onnx"] == "passed"  # on images of that size
    code, _, err = repaconv("export", folder, "--preset", "fastest-known")
    assert (code, "--image-size" in err) == (0, False)  # the result for any size


def test_a_preset_for_one_image_size_selects_the_export_of_that_size(repaconv, monkeypatch):
    """All results of `tune` have the same file's name, which names the preset of an export."""
    monkeypatch.setattr("repaconv.stages.tune.speed_measurements.LocalMeasurement.__call__", equal_here)
    folder = Path(package.fold(three_by_three("any.onnx", None)).output_files[0]).parent
    tuned = folder / "tuned" / "x86-64.json"
    for size in (None, 64, 32):
        package.tune(folder, image_size=size, rewrites=("winograd",), rounds=4)
        with contextlib.suppress(UsageProblem):
            package.build(folder, target="x86-64", preset=tuned)
            assert size is None, "there is no export of that size yet"
        exported = package.export(folder, preset=tuned)
        built = package.build(folder, target="x86-64", preset=tuned)
        assert built.onnx_sha256 == exported.payload.sha256
        done = package.bench(folder, preset=tuned, rounds=2)
        assert done.image_size == (read_artefact(tuned, TuneArtefact).image_size if size is None else (size, size))


def test_an_image_size_that_the_network_does_not_take_is_refused(repaconv):
    run = package.fold(three_by_three("one.onnx", 48)).output_files[0]
    code, _, err = repaconv("tune", Path(run).parent, "--image-size", "64")
    assert (code, "takes images of 48x48 pixels only" in err) == (2, True)
    random = np.random.default_rng(0).standard_normal((8, 64, 32, 32)).astype(np.float32)
    np.savez("given.npz", input=random)
    run = package.fold(three_by_three("any.onnx", None)).output_files[0]
    for size in (0, -1, (0, 5), (48, 64, 3), 48.0, True, "x"):
        with pytest.raises(UsageProblem, match="neither a number of pixels nor HEIGHTxWIDTH"):
            package.tune(Path(run).parent, image_size=size)
    model = onnx.load("any.onnx")
    pool = onnx.helper.make_node("MaxPool", ["out"], ["pooled"], name="pool", kernel_shape=[9, 9])
    model.graph.node.append(pool)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("pooled", 1, ["batch", 64, "h", "w"]))
    onnx.save(model, "pool.onnx")
    pooled = package.fold("pool.onnx").output_files[0]
    with pytest.raises(UsageProblem, match="does not run on images of 5x5 pixels"):
        package.tune(Path(pooled).parent, image_size=5)
    code, _, err = repaconv("tune", Path(run).parent, "--image-size", "64", "--inputs", "given.npz")
    assert (code, "are of 32 x 32 pixels" in err) == (2, True)


def test_losses_in_a_task_are_of_images_of_the_size_that_was_asked_for():
    run = run_folder.find_run(Path(package.fold(three_by_three("any.onnx", None)).output_files[0]).parent)
    asked = {"task": "segment", "max_disagreement": 0.5}
    for size, found in ((None, source_model_of(run).folded.image_size), (64, (64, 64))):
        choice = task_of_losses(TuneOptions(image_size=size, **asked), source_model_of(run))
        assert (choice.task, choice.about.size) == ("segment", found)

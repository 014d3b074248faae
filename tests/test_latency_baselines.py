"""`repaconv bench` against a baseline of this machine, and the history of the measurements of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

import repaconv as rc
from repaconv.core.files import read_artefact, write_artefact
from repaconv.methods.riformer import METHOD
from repaconv.results import Baselines, MeasuredModel
from repaconv.stages.bench.latency_baselines import check_baseline, history_of, key_of, name_in

RUN = Path("repaconv-out/tiny")


HERE, THERE = {"cpu": "this", "cores": 2, "system": "Linux x"}, {"cpu": "that", "cores": 8, "system": "Linux x"}


@pytest.fixture
def measured(tiny):
    """A measurement of any figures: that of a real run, with others in their place."""
    rc.fold(tiny)
    rc.export(batch=1)
    real = rc.bench(rounds=2, batch=1)

    def of(slower=1.0, *, machine=HERE, quality="trusted", beside="training form", sha256="a", seed=0):
        random = np.random.default_rng(seed)
        own = [tuple(time * (1 + 0.002 * np.abs(random.standard_normal(60)))) for time in (2.0 * slower, 3.0)]
        names = [("deploy form", "b"), *([(beside, sha256)] if beside else [])]
        latencies = [
            real.latencies[0].model_copy(update={"name": name, "sha256": digest, "samples_ms": samples})
            for (name, digest), samples in zip(names, own, strict=False)
        ]
        doubt = real.quality.model_copy(update={"verdict": quality})
        return real.model_copy(update={"latencies": tuple(latencies), "machine": machine, "quality": doubt})

    return of


def test_a_baseline_is_evaluated_by_where_it_compares(measured):
    path = Path("b.json")

    def verdict_of(done, name="m", **settings):
        found = check_baseline(path, name, done, 0.05, **settings)
        return found.verdict, f"{found.description}; {found.hint}"

    verdict, message = verdict_of(measured())
    assert verdict == "not verified"
    assert "no file b.json of baselines yet" in message
    assert verdict_of(measured(), require=True)[0] == "failed"
    assert verdict_of(measured(quality="inconclusive"))[0] == "inconclusive"
    noisy = measured(quality="inconclusive")
    verdict, message = verdict_of(noisy, update=True)
    assert (verdict, path.exists()) == ("inconclusive", False)
    assert "--accept-inconclusive" in message
    assert verdict_of(noisy, update=True, accept_inconclusive=True)[0] == "passed"
    path.unlink()
    assert verdict_of(measured(), update=True)[0] == "passed"
    verdict, message = verdict_of(measured(seed=1, sha256="exported anew"), require=True)
    assert verdict == "passed"
    assert "the baseline, each relative to the training form measured with it" in message
    assert verdict_of(measured(1.2))[0] == "failed"
    assert verdict_of(measured(quality="inconclusive", seed=1))[0] == "inconclusive"  # no pass on noise
    assert verdict_of(measured(1.2, quality="inconclusive"))[0] == "failed"

    verdict, message = verdict_of(measured(machine=THERE, seed=1), require=True)
    assert verdict == "passed"
    assert "another machine (this, 2 cores" in message
    assert "compares only roughly" in message
    verdict, message = verdict_of(measured(1.2, machine=THERE), require=True)
    assert verdict == "inconclusive"
    assert "--update-baseline" in message
    verdict, message = verdict_of(measured(), name="other")
    assert verdict == "not verified"
    assert "none for this model on any machine" in message


def test_without_a_reference_model_milliseconds_are_compared_on_the_same_machine(measured):
    path = Path("b.json")
    check_baseline(path, "m", measured(beside=""), 0.05, update=True)
    slower = check_baseline(path, "m", measured(1.2, beside=""), 0.05)
    assert slower.verdict == "failed"
    assert "in milliseconds" in slower.description
    elsewhere = check_baseline(path, "m", measured(machine=THERE, beside=""), 0.05)
    assert elsewhere.verdict == "not verified"
    assert "no baseline for this machine (that, 8 cores" in elsewhere.description
    assert "b.json has some of this, 2 cores" in elsewhere.description


def test_a_model_that_was_named_must_be_the_same_file(measured):
    path = Path("b.json")
    check_baseline(path, "m", measured(beside="other.onnx"), 0.05, update=True)
    assert check_baseline(path, "m", measured(beside="other.onnx"), 0.05).verdict == "passed"
    changed = check_baseline(path, "m", measured(beside="other.onnx", sha256="c"), 0.05)
    assert changed.verdict == "not verified"
    assert "another other.onnx" in changed.description
    assert check_baseline(path, "m", measured(), 0.05).verdict == "not verified"


def test_a_baseline_of_another_network_is_not_compared_with(measured):
    path = Path("b.json")

    def of(done, sha256="first", **counts):
        return done.model_copy(update={"network": MeasuredModel(sha256=sha256, kind="graph", counts=counts)})

    def verdict_of(done, **settings):
        return check_baseline(path, "m", done, 0.05, **settings)

    assert verdict_of(of(measured(), parameters=10, MACs=100), update=True).verdict == "passed"
    again = verdict_of(of(measured(seed=1), parameters=10, MACs=100))
    assert (again.verdict, again.of) == ("passed", "")
    trained_on = verdict_of(of(measured(seed=1), "second", parameters=10, MACs=100))  # other weights take as long
    assert trained_on.verdict == "passed"
    assert "the baseline is of another file (sha256 first, now second)" in trained_on.description
    assert "another file" in trained_on.changes(measured())["note"]

    other = of(measured(0.5, seed=1), "third", parameters=4, MACs=50)  # that it is faster says nothing
    for machine in (HERE, THERE):
        found = verdict_of(other.model_copy(update={"machine": machine}))
        assert (found.verdict, found.regression) == ("inconclusive", None)
        assert found.description == (
            "the baseline is of another network: graph, 100 MACs, 10 parameters; what was measured is graph, "
            "50 MACs, 4 parameters"
        )
        assert "--update-baseline" in found.hint
    assert verdict_of(other, require=True).verdict == "failed"
    assert verdict_of(other).changes(other)["quality"].verdict == "inconclusive"  # bench leaves with 5
    written = verdict_of(other, update=True)
    assert written.description.startswith("written as the baseline; the one before was of another network: graph, 100")
    assert verdict_of(of(measured(0.5, seed=2), "third", parameters=4, MACs=50)).verdict == "passed"
    assert verdict_of(of(measured(), parameters=10, MACs=100)).verdict == "inconclusive"

    known = read_artefact(path, Baselines).model_dump(mode="json")
    for entries in known["machines"].values():
        for entry in entries.values():
            del entry["network"]
    write_artefact(path, Baselines.model_validate(known))
    assert "a model that it does not name" in verdict_of(of(measured(0.5), "third", parameters=4, MACs=50)).description


def test_bench_says_of_which_network_its_baseline_is(tiny):
    rc.fold(tiny)
    rc.export(batch=1)
    rc.bench(rounds=2, batch=1, baseline="b.json", update_baseline=True, accept_inconclusive=True)
    given = METHOD.example(TINY, seed=7)
    torch.save({"state_dict": given, "args": {"img_size": 32}}, tiny)
    rc.fold(tiny, force=True)
    rc.export(batch=1)
    assert "the baseline is of another file" in rc.bench(rounds=2, batch=1, baseline="b.json").note
    fewer = {name: tensor[:4] if name.startswith("head.") else tensor for name, tensor in given.items()}  # classes
    torch.save({"state_dict": fewer, "args": {"img_size": 32}}, tiny)
    rc.fold(tiny, force=True)
    rc.export(batch=1)
    found = rc.bench(rounds=2, batch=1, baseline="b.json")
    assert (found.regression, found.inconclusive) == (None, True)
    assert "the baseline is of another network: riformer on metaformer, " in found.note


def test_a_baseline_is_of_one_question(measured):
    """Not of all of a stem, nor of all exports of a run; and a model is no yardstick of itself."""
    path = Path("ci/b.json")
    assert [name_in(path, Path(given)) for given in ("ci/net.toml", "ci/x/net.toml", "out/net", "out/net.onnx")] == [
        "net.toml", "x/net.toml", "../out/net", "../out/net.onnx"
    ]  # fmt: skip
    done = measured()
    pixels = done.model_copy(update={"variant": "x86-64.pixels"})
    assert key_of("m", done) != key_of("m", pixels)
    check_baseline(path, "m", measured(beside="m.onnx", sha256="b"), 0.05, update=True)
    slower = measured(1.2, beside="m.onnx", sha256="b")
    both = [row.model_copy(update={"samples_ms": slower.latencies[0].samples_ms}) for row in slower.latencies]
    found = check_baseline(path, "m", slower.model_copy(update={"latencies": tuple(both)}), 0.05)
    assert (found.verdict, found.regression.reference) == ("failed", "")


def test_bench_writes_and_judges(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    first = rc.bench(rounds=3, baseline="b.json")
    assert first.regression is None
    assert "no file b.json of baselines" in first.note
    result = rc.bench(rounds=3, baseline="b.json", update_baseline=True)
    assert "not written as a baseline. Measure again, with" in result.note  # three rounds are too few
    assert not Path("b.json").exists()
    rc.bench(rounds=30, baseline="b.json", update_baseline=True, accept_inconclusive=True)
    known = read_artefact(Path("b.json"), Baselines)
    (machine,) = known.machines
    (key,) = known.machines[machine]
    assert key == "repaconv-out/tiny, x86-64 (onnxruntime), fp32, 1 threads, batch 1, 32x32 px, beside training form"
    # as if it had been that fast: no noise explains it
    kept = known.machines[machine][key]
    faster = kept.model_copy(update={"subject_ms": tuple(value / 1000 for value in kept.subject_ms)})
    write_artefact(Path("b.json"), known.model_copy(update={"machines": {machine: {key: faster}}}))
    worse = rc.bench(rounds=30, baseline="b.json")
    assert (worse.verdict, worse.regression.verdict) == ("failed", "failed")
    code, out, _ = repaconv("bench", "--rounds", 30, "--baseline", "b.json", "--max-regression", "5%")
    assert code == 1
    assert "times as long as the baseline" in out
    assert repaconv("bench", "--baseline", "b.json", "--max-regression", "much")[0] == 2


def test_the_history_outlives_a_second_fold(tiny):
    rc.fold(tiny)
    rc.export()
    rc.bench(rounds=3)
    rc.bench(rounds=3)
    rc.fold(tiny)
    rc.export()
    rc.bench(rounds=3)
    path = RUN / "history-x86-64.jsonl"
    found = history_of(path)
    assert len(found) == 3
    assert found[0].when <= found[-1].when
    assert found[0].ratio.subject == "deploy form"
    path.write_bytes(path.read_bytes() + b'\xff not UTF-8\n{"when": "cut off')
    assert len(history_of(path)) == 3

"""bench against a baseline of this machine, and the history of a run's measurements."""

from __future__ import annotations

from pathlib import Path

import repaconv as rc
from repaconv.artefact import Baselines
from repaconv.files import read_artefact, write_artefact
from repaconv.pipeline.baselines import history_of

RUN = Path("repaconv-out/tiny")


def test_a_baseline_is_written_and_judged_by(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    first = rc.bench(rounds=30, baseline="b.json")
    assert first.regression is None
    assert "write one with --update-baseline" in first.note
    rc.bench(rounds=30, baseline="b.json", update_baseline=True)
    known = read_artefact(Path("b.json"), Baselines)
    (machine,) = known.machines
    (key,) = known.machines[machine]
    assert key == "tiny, x86-64, 1 threads, batch 1"
    again = rc.bench(rounds=30, baseline="b.json", max_regression=10)
    assert again.regression.verdict == "passed"
    # as if it had taken a third of the time: now it takes three times as long
    kept = known.machines[machine][key]
    faster = kept.model_copy(update={"subject_ms": tuple(value / 3 for value in kept.subject_ms)})
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
    path.write_text(path.read_text() + '{"when": "cut off')
    assert len(history_of(path)) == 3

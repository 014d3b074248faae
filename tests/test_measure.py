"""The measurement: what it calls different, when it says that it cannot be believed, and where the time goes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import repaconv as rc
from repaconv.errors import EnvironmentProblem, UsageProblem
from repaconv.measure.profile import Event, bars_svg, flops_of, parent_of, profile_of
from repaconv.measure.protocol import LONGEST_WARMUP, first_in_line, measure
from repaconv.measure.protocols import paper
from repaconv.measure.quality import quality
from repaconv.measure.statistics import ratio
from repaconv.measure.watch import Watched, between, state

RUN = Path("repaconv-out/tiny")
QUIET = Watched(seconds=10.0, others=0.01, others_here=0.0, stolen=0.0, speed=1.0, throttled=0, before={}, after={})


def weather(rounds: int, seed: int) -> tuple[np.ndarray, np.random.Generator]:
    """What a shared machine does to both models alike: slow swings, bursts."""
    random = np.random.default_rng(seed)
    swing = np.cumsum(random.normal(0, 0.004, rounds))
    bursts = (random.random(rounds) < 0.03) * random.uniform(0.2, 2.0, rounds)
    return np.exp(swing) * (1 + bursts), random


def runs_called(slower: float, rounds: int = 150) -> list[str]:
    found = []
    for seed in range(20):
        both, random = weather(rounds, seed)
        own = [1 + np.abs(random.normal(0, 0.02, rounds)) for _ in range(2)]
        found.append(ratio("a", 10 * both * own[0], "b", 10 * slower * both * own[1], seed=seed).verdict)
    return found


def test_5_percent_is_seen_and_nothing_is_not_called_something():
    assert runs_called(1.05).count("faster") >= 19
    assert runs_called(1.0).count("no difference shown") >= 19


def test_a_quiet_measurement_is_trusted_and_each_disturbance_named():
    _, random = weather(100, 0)
    own = [10 * (1 + np.abs(random.normal(0, 0.01, 100))) for _ in range(2)]
    samples = {"a": own[0], "b": 1.1 * own[1]}
    compared = ratio("a", samples["a"], "b", samples["b"], seed=0)
    assert quality(samples, QUIET, compared=compared, stable=True).verdict == "trusted"

    def told(watched=QUIET, *, given=samples, of=compared, stable=True):
        found = quality(given, watched, compared=of, stable=stable)
        return found.verdict, " ".join(found.reasons)

    cases = {
        "took 5%": (replace(QUIET, stolen=0.05), "noisy"),
        "12% of the machine's": (replace(QUIET, others=0.12), "noisy"),
        "5% of these cores'": (replace(QUIET, others_here=0.05), "noisy"),
        "40% of these cores'": (replace(QUIET, others_here=0.4), "inconclusive"),
        "for heat 3 times": (replace(QUIET, throttled=3), "inconclusive"),
        "1.20 times as long": (replace(QUIET, speed=1.2), "noisy"),
    }
    for words, (watched, verdict) in cases.items():
        assert told(watched) == (verdict, told(watched)[1])
        assert words in told(watched)[1]
    assert told(stable=False) == ("noisy", "the warm-up did not come to rest")
    few = {name: values[:10] for name, values in samples.items()}
    assert told(given=few, of=None)[0] == "inconclusive"
    drifting = {**samples, "a": samples["a"] * np.linspace(1, 1.4, 100)}
    assert "a drifted" in told(given=drifting)[1]
    wild = {**samples, "b": samples["b"] * np.where(np.arange(100) % 10 == 0, 3, 1)}
    assert "b has outliers: 10%" in told(given=wild)[1]
    rough = {**samples, "b": samples["b"] * np.exp(random.normal(0, 0.6, 100))}
    unknown = told(given=rough, of=ratio("a", samples["a"], "b", rough["b"], seed=0))
    assert unknown[0] == "inconclusive"
    assert "the ratio is known to" in unknown[1]


def test_others_work_on_the_machine_is_seen():
    """A real load, on every core that there is."""
    import os

    hog = [sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(hog) for _ in range(os.cpu_count() or 1)]
    try:
        before = state()
        deadline = before.clock_s + 1.5
        total = 0
        while state().clock_s < deadline:
            total += 1
        found = between(before, state(), ())
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert found.others is not None
    assert found.others > 0.25
    assert quality({"a": np.ones(50)}, found, compared=None, stable=True).verdict == "inconclusive"


def test_warm_up_goes_on_until_it_rests():
    calls = {"a": 0}

    def tiring() -> None:
        calls["a"] += 1
        sum(range(max(1000, 200_000 - 8000 * calls["a"])))

    found = measure({"a": tiring}, rounds=3, warmup_rounds=5, seed=0)
    assert 5 <= found.warmup_rounds <= LONGEST_WARMUP * 5
    assert len(found.samples_ms["a"]) == 3
    assert calls["a"] == found.warmup_rounds + 3
    assert found.watched.seconds > 0


def test_scheduling_is_put_back_and_a_refusal_is_told(monkeypatch):
    import os

    before = os.sched_getscheduler(0)
    with first_in_line(wanted=True) as why_not:
        assert why_not == "" or "not permitted" in why_not
    assert os.sched_getscheduler(0) == before

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with first_in_line(wanted=True) as why_not:
        assert "not permitted here (Operation not permitted)" in why_not


def test_the_papers_protocols(tiny):
    assert paper(None).images(4, lambda: 1.0) == 4
    assert paper("repavit").images(4, lambda: 1.0) == 128
    assert paper("riformer").images(1, lambda: 1.0) == 2048
    assert paper("riformer").images(1, lambda: 1e18) == 1
    with pytest.raises(UsageProblem, match="no protocol"):
        paper("imagenet")
    rc.fold(tiny)
    rc.export()
    done = rc.bench(protocol="dwconv", rounds=3)
    assert (done.batch, done.threads, done.rounds) == (1, 1, 3)
    assert "taskset and chrt" in done.protocol
    large = rc.bench(protocol="riformer", rounds=2, batch=4)
    assert large.batch == 4


def test_an_inconclusive_measurement_has_an_exit_code_of_its_own(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    code, out, _ = repaconv("bench", "--rounds", "3")
    assert code == 5
    assert "too few samples: 3 rounds" in out
    code, out, _ = repaconv("bench", "--rounds", "3", "--format", "json")
    assert (code, json.loads(out)["exit_code"]) == (5, 5)


# --- where the time goes ----------------------------------------------------------------------------------


def test_flops_and_modules():
    assert flops_of("MatMul", [(1, 197, 768), (768, 3072)], [(1, 197, 3072)]) == 2 * 197 * 768 * 3072
    assert flops_of("FusedMatMul", [(12, 197, 64), (12, 64, 197)], [(12, 197, 197)]) == 2 * 12 * 197 * 64 * 197
    quantised = [(1, 197, 768), (), (), (768, 3072), (3072,), (3072,)]
    assert flops_of("QLinearMatMul", quantised, [(1, 197, 3072)]) == 2 * 197 * 768 * 3072
    assert flops_of("Conv", [(2, 3, 224, 224), (768, 3, 16, 16), (768,)], [(2, 768, 14, 14)]) == (
        2 * 2 * 14 * 14 * 768 * 3 * 16 * 16
    )
    assert flops_of("Conv", [(1, 64, 8, 8), (64, 1, 3, 3)], [(1, 64, 8, 8)]) == 2 * 64 * 64 * 9  # depthwise
    assert flops_of("Softmax", [(1, 12, 197, 197)], [(1, 12, 197, 197)]) == 0
    assert parent_of("blocks.0.attn.qkv") == "blocks.0.attn"
    assert parent_of("network.2.1.mlp.fc1") == "network.2.1.mlp"
    assert parent_of("blocks.0.norm1") == "blocks.0.norm1"
    assert parent_of("head") == "head"


def test_events_are_summed_by_node_and_by_module():
    events = [
        Event("blocks.0.attn.qkv/Gemm_1", "Gemm", 1000.0, ((10, 20), (20, 30)), ((10, 30),)),
        Event("blocks.0.attn.proj/Gemm_2", "Gemm", 3000.0, ((10, 30), (30, 20)), ((10, 20),)),
        Event("head/Add_3", "Add", 1000.0, ((10, 20), (20,)), ((10, 20),)),
    ] * 2
    found = profile_of(
        events, 2, end_to_end_ms=6.0, peak_gflops=1.0, order={"head/Add_3": 1, "blocks.0.attn.qkv/Gemm_1": 0}
    )
    assert (found.total_ms, [node.name.split("/")[1] for node in found.nodes]) == (5.0, ["Gemm_1", "Add_3", "Gemm_2"])
    attention = found.modules[0]
    assert (attention.module, attention.mean_ms, attention.flops) == ("blocks.0.attn", 4.0, 24000)
    assert found.share_of_peak == 0.004
    ElementTree.fromstring(bars_svg(found))


def test_a_profile_of_a_run(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    done = rc.bench(rounds=5, profile=True)
    found = done.profile
    assert found.peak_gflops > 0
    assert found.share_of_peak > 0
    modules = {row.module for row in found.modules}
    assert "network.0.0.mlp" in modules
    assert sum(node.share for node in found.nodes) == pytest.approx(1, abs=1e-3)
    assert sum(node.flops for node in found.nodes) > 0
    ElementTree.parse(RUN / "bench/x86-64.profile.svg")
    code, out, _ = repaconv("bench", "--rounds", "25", "--profile")
    assert code in (0, 5)
    assert "what one large matrix product reaches" in out
    assert repaconv("bench", "--target", "arm64", "--rounds", "2", "--profile")[0] == 5


def test_what_has_no_profile_is_told(tiny):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    rc.fold(tiny)
    rc.export(image_size=32)
    with pytest.raises(EnvironmentProblem, match="no profile"):
        rc.bench(target="x86-64-openvino", rounds=2, profile=True)

"""Latency measurement: which differences it reports, when it is inconclusive, and the time of each module."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from math import factorial
from pathlib import Path
from typing import Any
from weakref import WeakSet
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_graphs import F, saved

import repaconv as rc
from repaconv.benchmark import interleaved_protocol
from repaconv.benchmark.gpu_monitor import GpuState
from repaconv.benchmark.interleaved_protocol import (
    LONGEST_WARMUP,
    Entrant,
    Protocol,
    measure,
    more_rounds,
    real_time_priority,
    session_load_count,
)
from repaconv.benchmark.latency_statistics import Timed, ratio, regression
from repaconv.benchmark.machine_fingerprint import (
    caches,
    cpu_number,
    jetson,
    limits,
    machine_key,
    power_mode,
    tegrastats,
)
from repaconv.benchmark.measurement_quality import critical_correlation, quality
from repaconv.benchmark.module_profile import Event, bars_svg, events_of, parent_of, profile_of
from repaconv.benchmark.paper_protocols import free_bytes, protocol_named
from repaconv.benchmark.roofline import Limits
from repaconv.benchmark.system_monitor import MachineChanges, PeakMemory, changes_between, cores_by_preference, state
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.thread_pool import cpu_quota, usable_cpus
from repaconv.engines import onnxruntime_cpu
from repaconv.engines.contract import GpuTimed, SessionSpec
from repaconv.graph.onnx_files import flops_of
from repaconv.results import Bandwidth, ProductPeak

RUN = Path("repaconv-out/tiny")
QUIET = MachineChanges(
    seconds=10.0, others=0.01, others_here=0.0, steal_time=0.0, speed=1.0, throttled=0, before={}, after={}
)


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

    def verdict_of(watched=QUIET, *, given=samples, of=compared, stable=True):
        found = quality(given, watched, compared=of, stable=stable)
        return found.verdict, " ".join(found.reasons)

    cases = {
        "took 5%": (replace(QUIET, steal_time=0.05), "noisy"),
        "12% of the machine's": (replace(QUIET, others=0.12), "noisy"),
        "5% of these cores'": (replace(QUIET, others_here=0.05), "noisy"),
        "40% of these cores'": (replace(QUIET, others_here=0.4), "inconclusive"),
        "for heat 3 times": (replace(QUIET, throttled=3), "inconclusive"),
        "1.20 times as long": (replace(QUIET, speed=1.2), "noisy"),
        "cpu1 from 2000 to 1500 MHz": (replace(QUIET, before={"cpu1 kHz": 2e6}, after={"cpu1 kHz": 1.5e6}), "noisy"),
    }
    for words, (watched, verdict) in cases.items():
        assert verdict_of(watched) == (verdict, verdict_of(watched)[1])
        assert words in verdict_of(watched)[1]
    assert verdict_of(stable=False) == ("noisy", "latency did not stabilize during warm-up")
    few = {name: values[:10] for name, values in samples.items()}
    assert verdict_of(given=few, of=None)[0] == "inconclusive"
    drifting = {**samples, "a": samples["a"] * np.linspace(1, 1.4, 100)}
    assert "a drifted" in verdict_of(given=drifting)[1]
    wild = {**samples, "b": samples["b"] * np.where(np.arange(100) % 10 == 0, 3, 1)}
    assert "b has outliers: 10%" in verdict_of(given=wild)[1]
    rough = {**samples, "b": samples["b"] * np.exp(random.normal(0, 0.6, 100))}
    unknown = verdict_of(given=rough, of=ratio("a", samples["a"], "b", rough["b"], seed=0))
    assert unknown[0] == "inconclusive"
    assert "the ratio is known to" in unknown[1]
    assert "more rounds cannot help" in unknown[1]
    less = {**samples, "b": samples["b"] * np.exp(random.normal(0, 0.2, 100))}
    assert "(--rounds)" in verdict_of(given=less, of=ratio("a", samples["a"], "b", less["b"], seed=0))[1]


def test_the_rounds_that_a_measurement_asks_for_are_enough():
    """Loads differ by 6%, each has two rounds: what 50 rounds tell asks for as many as make the interval narrow."""

    def measured(rounds, random):
        loads = np.repeat(np.exp(random.normal(0, 0.06, rounds // 2)), 2)
        samples = {"a": np.full(len(loads), 3.0), "b": 6.0 * loads}
        compared = ratio("a", samples["a"], "b", samples["b"], seed=0, session_loads=rounds // 2)
        return quality(samples, QUIET, compared=compared, stable=True, session_loads=rounds // 2)

    enough, asked = [], []
    for seed in range(40):
        random = np.random.default_rng(seed)
        first = measured(50, random)
        if first.verdict == "inconclusive":
            asked.append(int(first.reasons[0].partition("about ")[2].split()[0]))
            enough.append(measured(asked[-1], random).verdict == "trusted")
    assert len(asked) > 10
    assert min(asked) > 50
    assert np.mean(enough) > 0.75


def test_a_bench_of_more_rounds_opens_its_models_more_often(tiny, monkeypatch):
    """Also where loading is slow: else more rounds would not narrow the interval."""
    counted = interleaved_protocol.session_load_count
    monkeypatch.setattr(
        interleaved_protocol,
        "session_load_count",
        lambda rounds, round_s, _, spend_s: counted(rounds, round_s, 0.5, spend_s),
    )
    rc.fold(tiny)
    rc.export(batch=1)
    assert [rc.bench(rounds=rounds).session_loads for rounds in (50, 100)] == [10, 20]


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
        found = changes_between(before, state(), ())
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert found.others is not None
    assert found.others > 0.25
    assert quality({"a": np.ones(50)}, found, compared=None, stable=True).verdict == "inconclusive"


def test_fast_cores_come_before_slow_ones_and_every_core_before_its_second_thread(tmp_path):
    """A hybrid processor: two fast cores of two threads each, then two slow cores of one."""
    for core, siblings, khz in ((0, "0-1", 52), (1, "0-1", 52), (2, "2-3", 52), (3, "2-3", 52), (4, 4, 39), (5, 5, 39)):
        for name, text in (("topology/thread_siblings_list", siblings), ("cpufreq/cpuinfo_max_freq", 100_000 * khz)):
            (path := tmp_path / f"cpu{core}" / name).parent.mkdir(parents=True)
            path.write_text(f"{text}\n")
    assert cores_by_preference(range(6), tmp_path) == [3, 1, 5, 4, 2, 0]
    assert cores_by_preference({0, 1, 4}, tmp_path) == [1, 4, 0]
    assert cores_by_preference({0, 2, 3}, tmp_path / "unknown") == [3, 2, 0]


def test_an_idle_core_that_slows_down_is_no_disturbance():
    before = replace(state(), khz={0: 3_600_000, 1: 3_600_000})
    after = replace(before, clock_s=before.clock_s + 10, khz={0: 800_000, 1: 3_600_000})

    def verdict(*cores: int) -> str:
        return quality({"a": np.ones(50)}, changes_between(before, after, cores), compared=None, stable=True).verdict

    assert (verdict(1), verdict(0), verdict()) == ("trusted", "noisy", "noisy")


def test_warm_up_continues_until_latency_is_stable():
    calls = {"a": 0}

    def tiring() -> None:
        calls["a"] += 1
        sum(range(max(1000, 200_000 - 8000 * calls["a"])))

    found = measure({"a": Entrant(lambda: tiring)}, Protocol(3, warmup_rounds=5, session_loads=1))
    assert 5 <= found.warmup_rounds <= LONGEST_WARMUP * 5
    assert len(found.samples_ms["a"]) == 3
    assert calls["a"] == found.warmup_rounds + 3
    assert found.watched.seconds > 0


# --- openings ---------------------------------------------------------------------------------------------


def opened_differently(
    session_loads: int, rounds: int, seed: int, *, slower: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Two models of which each opening is faster or slower by 3%, measured in rounds of a steady machine."""
    random = np.random.default_rng(seed)

    def samples(ms: float) -> np.ndarray:
        which = np.repeat(np.exp(random.normal(0, 0.03, session_loads)), rounds // session_loads)
        return ms * which * (1 + np.abs(random.normal(0, 0.01, rounds)))

    return samples(10.0), samples(10.0 * slower)


def test_an_interval_is_of_session_loads_not_of_rounds():
    alike = [ratio("a", *_named(opened_differently(10, 50, seed)), seed, session_loads=10) for seed in range(200)]
    assert 180 <= sum(found.low <= 1 <= found.high for found in alike) <= 198
    assert sum(found.verdict == "no difference shown" for found in alike) >= 180
    slower = [ratio("a", *_named(opened_differently(10, 50, s, slower=1.1)), s, session_loads=10) for s in range(50)]
    assert sum(found.verdict == "faster" for found in slower) == 50
    # the rounds of one opening know nothing of another
    once = [ratio("a", *_named(opened_differently(1, 50, seed)), seed) for seed in range(50)]
    assert sum(found.low <= 1 <= found.high for found in once) < 25


def _named(both: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, str, np.ndarray]:
    return both[0], "b", both[1]


@pytest.mark.parametrize("session_loads", [1, 25])
def test_a_ratio_is_the_reciprocal_of_the_ratio_with_the_models_swapped(session_loads):
    a, b = np.random.default_rng(3).lognormal(0.0, 1.0, (2, 50))
    there, back = (ratio("a", *_named(pair), 0, session_loads) for pair in ((a, b), (b, a)))
    assert there.median * back.median == pytest.approx(1, abs=2e-6)
    assert there.low * back.high == pytest.approx(1, abs=2e-6)


def interrupted(rounds, random):
    """Each call takes one or several slices of time, as beside other processes."""
    return random.normal(1, 0.02, (2, rounds)) + random.geometric(0.4, (2, rounds)) - 1


def quiet(rounds, random):
    return random.normal(1, 0.02, (2, rounds))


@pytest.mark.parametrize("samples", [quiet, interrupted])
@pytest.mark.parametrize(("session_loads", "rounds"), [(1, 50), (5, 20), (8, 16), (10, 20), (25, 50)])
def test_a_model_is_no_faster_than_its_copy(samples, session_loads, rounds):
    """Whether there is one session load, a few or many, and whether both are interrupted: a promise of 95% is kept."""
    pairs = (samples(rounds, np.random.default_rng(seed)) for seed in range(400))
    found = [ratio("a", *_named(pair), seed, session_loads) for seed, pair in enumerate(pairs)]
    logs = np.log([each.median for each in found])
    assert abs(logs.mean()) < 3 * logs.std() / 20
    assert sum(each.low > 1 or each.high < 1 for each in found) <= 0.05 * len(found)


def test_a_difference_is_found_as_soon_as_before():
    """5% in 25 session loads that differ by 3%; and the interval is at most a seventh wider than Student's for 95%."""
    pairs = [opened_differently(25, 50, seed, slower=1.05) for seed in range(100)]
    found = [ratio("a", *_named(pair), 0, 25) for pair in pairs]
    assert sum(each.verdict == "faster" for each in found) >= 95
    logs = [np.median(np.log(b / a).reshape(25, 2), axis=1) for a, b in pairs]
    student = np.mean([2.064 * each.std(ddof=1) / 5 for each in logs])
    assert np.mean([np.log(each.high / each.low) / 2 for each in found]) < student * 8 / 7


def test_a_regression_is_of_the_session_loads_of_both():
    def timed(seed: int, slower: float = 1.0, session_loads: int = 10) -> Timed:
        return Timed(*opened_differently(session_loads, 50, seed, slower=1 / slower), session_loads)

    same = [regression(timed(seed), timed(seed + 1000), 0.05) for seed in range(100)]
    assert [found.verdict for found in same].count("failed") == 0
    assert sum(found.low <= 1 <= found.high for found in same) >= 88
    worse = [regression(timed(seed, 1.2), timed(seed + 1000), 0.05).verdict for seed in range(50)]
    assert worse.count("failed") >= 48
    # a baseline from before, of one opening, is judged by
    assert regression(timed(0), timed(1, session_loads=1), 0.5).verdict == "passed"
    assert regression(timed(0, 1.5), timed(1, session_loads=1), 0.05).verdict == "failed"


def test_session_loads_that_differ_are_no_drift_and_no_outliers():
    samples = dict(zip("ab", opened_differently(10, 50, 3), strict=True))
    samples["a"][:5] *= 2  # an opening whose memory lies badly
    assert quality(samples, QUIET, compared=None, stable=True, session_loads=10).verdict == "trusted"
    message = quality(samples, QUIET, compared=None, stable=True).reasons
    assert "a has outliers: 10% of its samples" in message
    drifting = {**samples, "b": np.linspace(10, 14, 50)}
    assert "b drifted" in " ".join(quality(drifting, QUIET, compared=None, stable=True, session_loads=10).reasons)


@pytest.mark.parametrize("loads", range(6, 11))
def test_session_loads_that_drift_are_in_an_order_that_chance_gives_in_1_of_100_measurements(loads):
    """Against all orders: how many have which sum of squared differences of rank, place by place."""
    ways = {0: Counter({0: 1})}
    for place in range(loads):
        longer: dict[int, Counter[int]] = {}
        for taken, sums in ways.items():
            for rank in (rank for rank in range(loads) if not taken >> rank & 1):
                longer.setdefault(taken | 1 << rank, Counter()).update(
                    {found + (place - rank) ** 2: orders for found, orders in sums.items()}
                )
        ways = longer
    orders: Counter[float] = Counter()
    for found, many in ways[2**loads - 1].items():
        orders[round(abs(1 - 6 * found / (loads**3 - loads)), 9)] += many
    rare = [
        one for one in orders if sum(many for each, many in orders.items() if each >= one) <= 0.01 * factorial(loads)
    ]
    assert sorted(rare) == sorted(one for one in orders if one >= critical_correlation(loads))


def test_a_drift_is_detected_from_as_many_session_loads_as_there_are():
    """A rank correlation of 0.8 occurs by chance in 1 of 3 orders of 4 loads, one of 0.62 in 1 of 300 of 20."""

    def drifts(order: Sequence[int]) -> bool:
        values = np.repeat(1 + 0.4 * np.asarray(order) / len(order), 100 // len(order))
        message = quality({"a": values}, QUIET, compared=None, stable=True, session_loads=len(order)).reasons
        return "a drifted" in " ".join(message)

    assert not any(map(drifts, ([0, 1], [1, 0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 0, 2, 3, 4, 5])))
    assert drifts([0, 1, 2, 3, 4, 5])
    assert drifts([*range(5, 10), *range(5), *range(15, 20), *range(10, 15)])


@pytest.mark.parametrize("loads", range(2, 6))
def test_few_session_loads_drift_if_their_rounds_do(loads):
    def drifts(values: np.ndarray) -> bool:
        message = quality({"a": values}, QUIET, compared=None, stable=True, session_loads=loads).reasons
        return "a drifted" in " ".join(message)

    random = np.random.default_rng(0)
    for drift in (np.linspace(1, 2, 50), np.linspace(2, 1, 50), np.linspace(1, 1.2, 50) + random.normal(0, 0.02, 50)):
        assert drifts(drift)
        assert not drifts(np.concatenate(np.array_split(drift, loads)[::-1]))  # each load starts anew
    assert sum(drifts(values) for values in random.uniform(1, 3, (1000, 20))) <= 10


def test_session_loads_are_as_many_as_the_rounds_allow():
    assert session_load_count(50, round_s=0.002, opening_s=0.1) == 25
    assert session_load_count(50, round_s=0.002, opening_s=0.5) == 10
    assert session_load_count(50, round_s=1.0, opening_s=10.0) == 5
    assert session_load_count(50, round_s=0.1, opening_s=60.0) == 4, "a result needs some, whatever they take"
    assert session_load_count(6, round_s=0.1, opening_s=60.0) == 1, "a first look does not"
    assert session_load_count(12, round_s=0.4, opening_s=2.4) == 3, "two loads have a wide interval"
    assert session_load_count(3, round_s=0.0, opening_s=0.0) == 1
    assert session_load_count(5000, round_s=0.0, opening_s=0.0) == 2500
    assert more_rounds(round_s=0.002, opening_s=0.09) == 2 * 50
    assert more_rounds(round_s=1.0, opening_s=0.1) == 0


def test_each_session_is_released_before_the_next_is_loaded():
    class Model:
        pass

    alive, opened = WeakSet(), []

    numbers = count()

    def load() -> Model:
        assert not alive
        alive.add(model := Model())
        return model

    def call(model: Model, _inputs: object) -> Callable[[], None]:
        return partial(lambda _model, n: opened.append(n), model, next(numbers))

    found = measure({"a": Entrant(load, call)}, Protocol(10, warmup_rounds=2))
    assert found.session_loads == 5
    assert opened == [0] * 4 + [n for n in range(1, 5) for _ in range(3 + 2)]
    assert len(found.samples_ms["a"]) == 10


def test_latencies_of_streams_are_those_of_measured_rounds():
    """Not of the warm-up, and not of the rounds after a session load, in which memory is allocated.

    Those have 5 slow inferences each; a busy machine makes fewer than that slow.
    """

    def load() -> Callable[[], None]:
        inference = count()
        return lambda: time.sleep(0.05 if next(inference) < 5 else 0)

    found = measure({"a": Entrant(load, streams=2)}, Protocol(10, warmup_rounds=2, seconds=1e6))
    assert found.session_loads == 5
    assert len(found.inference_ms["a"]) == 10 * 2 * interleaved_protocol.INFERENCES_PER_STREAM
    assert sum(taken >= 50 for taken in found.inference_ms["a"]) < 5


def test_bench_opens_a_model_anew_in_one_measurement(tiny, repaconv, monkeypatch):
    monkeypatch.setattr(interleaved_protocol, "SESSION_LOAD_BUDGET_S", 1e6)  # however loaded the machine is
    rc.fold(tiny)
    rc.export()
    code, out, _ = repaconv("bench", "--rounds", "8", "-v")
    assert code in {0, 5}
    assert "8 interleaved rounds in 4 session loads after " in " ".join(out.split())
    kept = json.loads((RUN / "bench" / "x86-64.json").read_text())
    assert (kept["rounds"], kept["session_loads"], len(kept["latencies"][0]["samples_ms"])) == (8, 4, 8)


def test_the_time_that_a_gpu_itself_measures_counts():
    entrants = {"card": Entrant(lambda: GpuTimed(lambda: 7.5)), "wall": Entrant(lambda: lambda: 7.5)}
    found = measure(entrants, Protocol(3, warmup_rounds=0))
    assert found.on_gpu
    assert found.session_loads == 1
    assert found.samples_ms["card"].tolist() == [7.5] * 3
    assert max(found.samples_ms["wall"]) < 7.5


RESTING = GpuState(sm_mhz=1980, memory_mhz=2619, celsius=41, watts=310.0, reasons=0, others=0)


@pytest.mark.parametrize(
    ("moment", "verdict", "message"),
    [
        (RESTING, "trusted", ""),
        (RESTING._replace(reasons=0x20), "inconclusive", "throttled: the GPU slowed down for heat, at 1 of 2 moments"),
        (RESTING._replace(reasons=0x80), "inconclusive", "for the power supply"),
        (RESTING._replace(others=2), "noisy", "2 other processes on the GPU"),
        (RESTING._replace(sm_mhz=1410, reasons=0x4), "noisy", "clock moved from 1410 to 1980 MHz, at its power limit"),
        (RESTING._replace(sm_mhz=None, reasons=0x4), "trusted", ""),
    ],
)
def test_disturbances_of_a_gpu_are_named(moment, verdict, message):
    watched = replace(QUIET, gpu=(RESTING, moment))
    found = quality({"a": np.full(50, 3.0)}, watched, compared=None, stable=True)
    assert found.verdict == verdict
    assert message in "; ".join(found.reasons)
    assert RESTING.values()["GPU W"] == 310.0


def test_scheduling_is_restored_and_a_refusal_is_reported(monkeypatch):
    import os

    before = os.sched_getscheduler(0)
    with real_time_priority(wanted=True) as why_not:
        assert why_not == "" or "not permitted" in why_not
    assert os.sched_getscheduler(0) == before

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with real_time_priority(wanted=True) as why_not:
        assert "not permitted here (Operation not permitted)" in why_not


def test_a_container_s_memory_is_what_is_free_in_it(tmp_path):
    (meminfo := tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (group := tmp_path / "cgroup").mkdir()

    def free(limit: str, used: int = 3 * 2**30) -> float:
        for name, text in (("max", limit), ("current", used), ("stat", f"anon 7\ninactive_file {2**30}\n")):
            (group / f"memory.{name}").write_text(f"{text}\n")
        return free_bytes(meminfo, group) / 2**30

    assert (free(str(4 * 2**30)), free("max"), free(str(2**40))) == (2, 32, 32)
    assert free(str(2**30)) == 0
    assert free_bytes(meminfo, tmp_path / "none") == 2**35
    assert free_bytes(tmp_path / "none", tmp_path / "none") == 2**30


def test_the_papers_protocols(tiny):
    assert protocol_named(None).images(4, lambda: 1.0) == 4
    assert protocol_named("repavit").images(4, lambda: 1.0) == 128
    assert protocol_named("riformer").images(1, lambda: 1.0) == 2048
    assert protocol_named("riformer").images(1, lambda: 1e18) == 1
    with pytest.raises(UsageProblem, match="unknown protocol"):
        protocol_named("imagenet")
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
    channels_last = [(1, 56, 56, 64), (), (), (256, 64, 1, 1), (256,), (256,)]
    assert flops_of("QLinearConv", channels_last, [(1, 56, 56, 256)]) == 2 * 56 * 56 * 64 * 256
    assert flops_of("ConvTranspose", [(1, 16, 8, 8), (16, 4, 2, 2)], [(1, 4, 16, 16)]) == 2 * 8 * 8 * 16 * 4 * 2 * 2
    tokens, keys, values = (1, 5, 12 * 64), (1, 197, 12 * 64), (1, 197, 12 * 32)
    assert flops_of("Attention", [tokens, keys, values], [(1, 5, 12 * 32)]) == 2 * 12 * 5 * 197 * (64 + 32)
    assert flops_of("Softmax", [(1, 12, 197, 197)], [(1, 12, 197, 197)]) == 0
    assert parent_of("blocks.0.attn.qkv") == "blocks.0.attn"
    assert parent_of("network.2.1.mlp.fc1") == "network.2.1.mlp"
    assert parent_of("blocks.0.norm1") == "blocks.0.norm1"
    assert parent_of("head") == "head"


SLOW = Limits((ProductPeak(operator="MatMul", precision="fp32", gflops=1.0),), (Bandwidth(bytes=2**20, gb_s=1.0),))


def test_events_are_summed_by_node_and_by_module():
    events = [
        Event("blocks.0.attn.qkv/Gemm_1", "Gemm", 1000.0, ((10, 20), (20, 30)), ((10, 30),)),
        Event("blocks.0.attn.proj/Gemm_2", "Gemm", 3000.0, ((10, 30), (30, 20)), ((10, 20),)),
        Event("head/Add_3", "Add", 1000.0, ((10, 20), (20,)), ((10, 20),)),
    ] * 2
    found = profile_of(
        events, 2, end_to_end_ms=6.0, limits=SLOW, order={"head/Add_3": 1, "blocks.0.attn.qkv/Gemm_1": 0}
    )
    assert (found.total_ms, [node.name.split("/")[1] for node in found.nodes]) == (5.0, ["Gemm_1", "Add_3", "Gemm_2"])
    attention = found.modules[0]
    assert (attention.module, attention.mean_ms, attention.flops) == ("blocks.0.attn", 4.0, 24000)
    assert found.share_of_peak == 0.004
    ElementTree.fromstring(bars_svg(found))


def test_the_time_of_an_event_is_without_those_inside_it():
    def event(name: str, start: int, length: int) -> dict[str, Any]:
        return {"name": name, "ts": start, "dur": length}

    events = [event("in it", 10, 20), event("loop", 5, 90), event("inmost", 15, 5), event("again", 30, 0)]
    found = onnxruntime_cpu._without_inner_time([*events, event("after it", 95, 7), event("before it", 0, 5)])
    assert [(each["name"], each["dur"]) for each in found] == [
        ("before it", 5), ("loop", 70), ("in it", 15), ("inmost", 5), ("again", 0), ("after it", 7),
    ]  # fmt: skip
    assert [each["dur"] for each in events] == [20, 90, 5, 0]


def test_a_loop_s_time_is_not_counted_twice_and_its_nodes_compute_each_time(monkeypatch):
    def port(name: str, kind: int, *shape: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
        return numpy_helper.from_array(array, name)

    rows, side, times = 48, 96, 10
    again, image, number = (TensorProto.BOOL,), (TensorProto.FLOAT, rows, side), (TensorProto.INT64,)
    body = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "inner/MatMul_0"),
        helper.make_node("Tanh", ["product"], ["y"], "inner/Tanh_1"),
        helper.make_node("Identity", ["again"], ["go on"], "inner/Identity_2"),
    ]
    weight = constant("w", np.eye(side, dtype=np.float32))
    inner = helper.make_graph(
        body, "body", [port("i", *number), port("again", *again), port("x", *image)],
        [port("go on", *again), port("y", *image)], [weight],
    )  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Loop", ["times", "true", "in"], ["out"], "outer/Loop_0", body=inner)],
        "g", [port("in", *image)], [port("out", *image)],
        [constant("times", np.asarray(times)), constant("true", np.asarray(True))],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    recorded: list[Any] = []

    def record(kernels: Any) -> Any:
        recorded.extend(kernels)
        return inner_time_excluded(kernels)

    inner_time_excluded = onnxruntime_cpu._without_inner_time
    monkeypatch.setattr(onnxruntime_cpu, "_without_inner_time", record)
    session = onnxruntime_cpu.ENGINE.open(model.SerializeToString(), SessionSpec(threads=1))
    found = session.profile({"in": np.ones((rows, side), np.float32)}, runs=5, warmup_runs=1)
    events = events_of(found.kernels, found.weights)
    nodes = {node.name: node for node in profile_of(events, 5, end_to_end_ms=1, limits=SLOW, order={}).nodes}
    assert len(events) == 5 * (1 + 3 * times)
    assert nodes["inner/MatMul_0"].flops == times * 2 * rows * side**2
    assert nodes["inner/MatMul_0"].bytes == times * 4 * (2 * rows * side + side**2)
    loop_ms = sum(each["dur"] for each in recorded if each["name"].startswith("outer/Loop_0")) / 1000
    assert 5 * sum(node.mean_ms for node in nodes.values()) == pytest.approx(loop_ms, rel=0.01)


@pytest.mark.parametrize("events", [[], [Event("Identity_0", "Identity", 0.0, ((1, 64),), ((1, 64),))]])
def test_a_runtime_may_have_removed_every_node_or_count_no_microsecond_for_them(events):
    found = profile_of(events, 20, end_to_end_ms=0.01, limits=SLOW, order={})
    assert (found.total_ms, found.gflops, [node.share for node in found.nodes]) == (0.0, 0.0, [0.0] * len(events))
    assert found.roofline.groups[0].group == "between layers"
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
    assert "products alone take" in " ".join(out.split())
    assert re.search(r"module +ms +share", out)
    assert repaconv("bench", "--rounds", "2", "--profile")[0] == 5


def test_a_profile_of_a_graph_without_names_of_modules_is_by_node(repaconv):
    nodes = [("Conv", "x w", "a", {}), ("Relu", "a", "b", {}), ("Conv", "b v", "y", {})]
    weights = {"w": (8, 3, 3, 3), "v": (8, 8, 3, 3)}
    saved("bare.onnx", nodes, weights, {"x": (F, [1, 3, 32, 32])}, {"y": (F, [1, 8, 28, 28])})
    _, out, _ = repaconv("bench", "bare.onnx", "--rounds", "2", "--profile")
    assert re.search(r"node +operator +ms +share", out)
    assert not re.search(r"module +ms", out)
    assert len(re.findall(r"^ \S+ +Conv\S* +\d", out, flags=re.M)) == 2


def test_a_missing_profile_is_reported(tiny):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    rc.fold(tiny)
    rc.export(target="x86-64-openvino", batch=1)
    rc.build(target="x86-64-openvino")
    with pytest.raises(EnvironmentProblem, match="no profile"):
        rc.bench(RUN / "build/x86-64-openvino.b1.blob", rounds=2, image_size=32, profile=True)


# --- the machine ------------------------------------------------------------------------------------------


def test_a_jetson_tells_of_itself():
    """Lines as boards printed them; no board of ours has been on the desk."""
    orin = (
        "RAM 4096/30536MB (lfb 200x4MB) SWAP 0/15268MB (cached 0MB) CPU [10%@2201,5%@2201,off,off] GR3D_FREQ 0% "
        "cpu@50C soc0@49C VDD_GPU_SOC 3200mW/3210mW VDD_CPU_CV 1600mW/1610mW VIN_SYS_5V0 5000mW/5010mW"
    )
    found = tegrastats(orin)
    assert found["ram_mb"] == [4096, 30536]
    assert found["cores"] == ["10%@2201", "5%@2201", "off", "off"]
    assert found["celsius"] == {"cpu": 50.0, "soc0": 49.0}
    assert found["milliwatts"] == {"VDD_GPU_SOC": 3200, "VDD_CPU_CV": 1600, "VIN_SYS_5V0": 5000}
    assert found["gpu_percent"] == 0
    nano = "RAM 2016/7782MB (lfb 148x4MB) CPU [3%@1400,off] EMC_FREQ 0%@1600 GR3D_FREQ 12%@1100 GPU@38C thermal@37.72C"
    assert tegrastats(nano)["gpu_percent"] == 12
    assert tegrastats(nano)["celsius"]["thermal"] == 37.72
    assert tegrastats("")["cores"] == []
    assert power_mode("NV Power Mode: MAXN_SUPER\n2") == "MAXN_SUPER"
    assert power_mode("NVPMWARN: nothing") == ""
    result = {"nvpmodel": "NV Power Mode: 15W\n1", "timeout": orin, "jetson_clocks": "SOC family:tegra234"}
    board = jetson(lambda command: result[command[0]])
    assert (board["power_mode"], board["tegrastats"]["gpu_percent"]) == ("15W", 0)


@pytest.mark.parametrize(
    ("message", "number"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n", "26.2"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n", "0x41.0xd0c"),
        ("processor\t: 0\nmodel name\t: something else\n", None),
    ],
)
def test_a_cpu_is_known_by_its_family_and_model_numbers(tmp_path, message, number):
    (tmp_path / "cpuinfo").write_text(message)
    assert cpu_number(tmp_path / "cpuinfo") == number
    assert cpu_number(tmp_path / "gone") is None
    machine = {"cpu": "AMD EPYC", "family": "avx512-bf16", "cores": 2, "system": "Linux 6 x86_64"}
    old, new = machine_key(machine), machine_key({**machine, "cpu_number": number})
    assert (old == new) == (number is None)


def test_a_machine_is_compared_by_its_gpu_also_if_release_0_1_described_it():
    machine, gpu = {"cpu": "AMD EPYC", "cores": 2, "system": "Linux 6 x86_64"}, {"name": "NVIDIA L4"}
    keys = {machine_key(machine), machine_key({**machine, "gpu": gpu}), machine_key({**machine, "card": gpu})}
    assert keys == {"AMD EPYC, 2 cores, Linux x86_64", "NVIDIA L4, AMD EPYC, 2 cores, Linux x86_64"}


def test_caches_and_what_a_container_may_take(tmp_path):
    for number, (level, kind, size) in enumerate((("1", "Data", "32K"), ("2", "Unified", "1024K"))):
        index = tmp_path / f"index{number}"
        index.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (index / name).write_text(value + "\n")
    assert caches(tmp_path) == {"L1 Data": "32K", "L2 Unified": "1024K"}
    assert limits(tmp_path) == {}
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2 * 1024**3}\n")
    assert limits(tmp_path) == {"cpus": "1.5", "memory_gib": "2.0"}
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert "cpus" not in limits(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "cpus"), [(100, 1), (50, 1), (-1, None), (9_999_999, None)])
def test_no_more_cpus_are_used_than_a_container_may_use(tmp_path, version, quota, cpus):
    if version == 2:
        (tmp_path / "cpu.max").write_text(f"{'max' if quota < 0 else 1000 * quota} 100000\n")
    else:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota if quota < 0 else 1000 * quota}\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == (cpus or len(os.sched_getaffinity(0)))
    assert cpu_quota(tmp_path / "none") is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process's peak")
def test_memory_is_the_peak_beyond_what_was_there_before(tmp_path):
    held, mib = np.ones(64 << 17), 1 << 20  # 64 MiB that are there before
    taken = PeakMemory()
    np.ones(48 << 17)  # 48 MiB that go again
    assert 47 * mib <= taken.peak() < 56 * mib
    assert PeakMemory().peak() < 8 * mib
    assert PeakMemory(tmp_path / "none").peak() is None
    assert held.nbytes == 64 * mib


def test_throughput_of_streams_is_compared_with_one_stream_and_the_training_form(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    many = ("bench", "--objective", "throughput", "--rounds", "2", "--threads", "1")
    cores = usable_cpus()
    code, out, _ = repaconv(*many, "--batch", "2", "--format", "json")
    assert code == 5  # two rounds say nothing
    done = json.loads(out)["data"]
    assert [row["streams"] for row in done["rows"]] == [cores, 1, cores]
    assert done["scaling"]["other"] == "deploy form, one stream"
    assert done["ratio"]["other"] == "training form"
    first = done["rows"][0]
    assert 0 < first["p50_ms"] <= first["p95_ms"]
    assert Path("repaconv-out/tiny/bench/x86-64.throughput.json").is_file()
    assert (done["scaling"]["verdict"], done["ratio"]["verdict"]) == ("not conclusive", "not conclusive")
    assert "deploy form, one stream (fp32): not conclusive (about" in " ".join(repaconv(*many)[1].split())
    message = rc.report(paper=False)
    rate = f"{message.throughputs[0].rows[0].images_per_second:,.1f}"
    assert f">{rate}</td>" in Path("repaconv-out/tiny/report.html").read_text()
    rc.report(format="markdown", paper=False)
    assert "## Throughput on x86-64" in Path("repaconv-out/tiny/report.md").read_text()
    for words, message in ((("--streams", str(cores + 1)), "more than the"), (("--profile",), "has no effect")):
        code, _, err = repaconv(*many, *words)
        assert (code, message in err) == (2, True)
    assert repaconv("bench", "--streams", "2")[0] == 2
    rc.fold(tiny, force=True)  # the same network: nothing is removed
    assert Path("repaconv-out/tiny/bench/x86-64.throughput.json").exists()


def test_a_model_alone_has_no_speedup_and_the_result_says_how_to_get_one():
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), "net.onnx")
    alone, compared = (
        rc.bench("net.onnx", rounds=2),
        rc.bench("net.onnx", against=shutil.copy("net.onnx", "b.onnx"), rounds=2),
    )
    assert (alone.ratio, "--against FILE" in alone.note) == (None, True)
    assert "--against" not in compared.note


def test_a_graph_whose_name_is_not_utf_8_is_to_be_renamed(tmp_path):
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), "net.onnx")
    with pytest.raises(Refused, match="no file whose name is not UTF-8") as refused:
        rc.bench(Path("net.onnx").rename(os.fsdecode(b"a\xff.onnx")))
    assert (refused.value.code, refused.value.hint) == ("file.name", "Rename the file.")


@pytest.mark.slow
def test_a_model_and_its_copy_next_to_three_busy_processes(tmp_path):
    """Twelve whole runs of `bench`: none claims a difference, and few intervals exclude 1."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 64, 64]) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    names = ["x", *"123456789", "y"]
    nodes = [helper.make_node("MatMul", [of, "w"], [to]) for of, to in pairwise(names)]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], [weights])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), "model.onnx")
    shutil.copy("model.onnx", "copy.onnx")
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        found = [rc.bench("model.onnx", against="copy.onnx", seed=seed) for seed in range(12)]
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert {each.ratio.verdict for each in found} <= {"not conclusive", "no difference shown"}
    assert not any(word in each.compared for each in found for word in ("faster", "slower"))
    assert sum(each.ratio.low > 1 or each.ratio.high < 1 for each in found) <= 3  # of 12 with 5% each: 1 in 450 have 4

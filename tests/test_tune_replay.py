"""The search of `tune` on recorded measurements: how near it comes to the best of a grid, and within its time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tune_replay import Net, Setting, Simulation, recorded, replayed

from repaconv.results import Deployment
from repaconv.stages.tune.speed_measurements import MeasurementCosts, MeasurementLog, Timing

LARGEST_LOSS = 0.02
LONGER = 1.05
"""Costs have a noise of 30% there, and what was begun is finished."""


def _of(net: Net) -> str:
    return f"{net.isa}-{net.name.partition(' on ')[0]}-{1e3 * net.latency_s:.3g}ms"


@pytest.mark.parametrize("net", recorded(), ids=_of)
def test_the_best_of_the_recorded_grid_is_found_in_its_time(net):
    """A minute up to 20 ms per inference, three above that; with nothing known of the network itself."""
    found = replayed(net, seed=0)
    assert math.exp(net.gain(found.winner) - net.recorded_best()) >= 1 - LARGEST_LOSS
    assert found.seconds <= LONGER * net.budget_s
    own = net.name.partition(" on ")[0]
    assert not any(own in each.network for each in net.records())


@pytest.mark.parametrize("own", ["repavit-deit-base", "pyra-vit-base"])
def test_in_a_minute_a_large_network_is_quantized(own):
    """10 billion MACs on a Zen 5. BF16 was measured first, and the time that was left did not suffice for INT8."""
    net = next(net for net in recorded() if " 26.2 " in net.name and own in net.name)
    for seed in range(3):
        found = replayed(net, seed, 60.0)
        assert found.winner.precision == "int8"
        assert math.exp(net.gain(found.winner) - net.recorded_best()) >= 0.95
        assert found.seconds <= LONGER * 60


def test_in_a_minute_each_runtime_is_measured_in_fp32_too():
    """The fastest in FP32 is the result if the lossy winner is rejected on the test split; INT8 took all the time."""
    net = next(net for net in recorded() if " 26.2 " in net.name and "riformer-s12" in net.name)
    for seed in range(3):
        measured = replayed(net, seed, 60.0).simulation.measured
        assert {each.runtime for each in measured if each.precision == "fp32"} >= {"openvino"}


def test_a_graph_is_expected_to_be_written_faster_on_a_faster_cpu():
    """By the baseline's inferences: a Zen 5 takes 0.09 s for 10 billion MACs; one with AVX2 takes 0.23 s."""
    base = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    lowered = base.model_copy(update={"precision": "int8"})

    def writing_s(run_s: float, threads: int = 1) -> float:
        own = base.model_copy(update={"threads": threads})
        costs = MeasurementCosts(own, {own: Timing(0.0, 0.1, run_s)}, 10e9)
        return costs.seconds([lowered], 6) - costs.seconds([lowered], 6, written=True)

    assert writing_s(0.09) < 10 < 15 < writing_s(0.23) < writing_s(0.27)
    assert writing_s(4.0) == pytest.approx(writing_s(0.27))
    assert writing_s(0.045, threads=2) == pytest.approx(writing_s(0.09)) == pytest.approx(writing_s(0.001))


@pytest.mark.parametrize("budget_s", [60.0, 180.0, 300.0])
def test_with_many_images_the_time_of_their_evaluation_is_kept_free(budget_s):
    """200 validation and 200 test images, of which FP32 alone takes 49 s."""
    net = next(net for net in recorded() if net.isa == "amx" and "repavit-deit-base" in net.name)
    found = replayed(net, 0, budget_s, images=200)
    assert found.seconds <= LONGER * budget_s
    assert (found.winner.precision == "int8") == (budget_s > 60)


@pytest.mark.parametrize("latency_s", [0.3, 0.6, 1.0, 1.6, 2.4])
def test_where_an_inference_takes_long_a_faster_runtime_is_measured_before_a_setting(latency_s):
    """CoaT-Mini with batch 8: a setting without effect took the time in which OpenVINO would have been measured."""
    net = next(net for net in recorded() if net.isa == "avx512-bf16" and "riformer-s12" in net.name)
    gains = {Setting("onnxruntime", "fp32", "", ()): 0.0, Setting("onnxruntime", "fp32", "", ("denormals",)): 0.0}
    gains[Setting("openvino", "fp32", "", ())] = math.log(1.4)
    starts = {("onnxruntime", "fp32", ""): ("mean-as-pool",), ("openvino", "fp32", ""): ("mean-as-pool",)}
    slow = replace(net, macs=17e9, latency_s=latency_s, gains=gains, starts=starts)
    for seed in range(3):
        found = replayed(slow, seed, 60.0)
        assert found.winner.runtime == "openvino"
        assert found.seconds <= 60 + 4 * latency_s


def test_where_the_first_quantization_was_lucky_the_others_do_not_exceed_the_time():
    """It takes 14 s and each of the others 23 to 37 s: they are not begun six at a time."""
    net = next(net for net in recorded() if net.isa == "avx2" and "pyra-vit-base" in net.name)
    found = replayed(net, seed=2)
    assert found.seconds <= LONGER * net.budget_s
    assert found.winner.precision == "int8"


def test_quantized_graphs_are_written_once():
    net = next(net for net in recorded() if net.isa == "amx" and "repavit-deit-tiny" in net.name)
    made = replayed(net, 0).simulation.quantized
    assert len(made) == len(set(made)) > 1


def test_the_time_to_quantize_is_not_that_of_a_graph_which_is_on_disk():
    """After one of the baseline, quantizing was expected to take no time, and six were begun at once."""
    plain = Deployment(target="x86-64", runtime="onnxruntime", rewrites=(), precision="fp32", threads=1, batch=1)
    lowered = plain.model_copy(update={"precision": "int8", "quantizer": "nncf"})
    timed = MeasurementCosts(plain, {plain: Timing(0.002, 0.5, 0.34)}, 17e9)
    assert timed.seconds([lowered], 6) - timed.seconds([lowered], 6, written=True) > 10


def test_a_graph_that_is_measured_again_with_other_settings_does_not_make_the_next_one_cheaper():
    """Its second configuration finds it written; the next graph has to be quantized."""
    base = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    first, second = (base.model_copy(update={"precision": "int8", "rewrites": each}) for each in ((), ("a",)))
    again = first.model_copy(update={"settings": ("other",)})
    timings = {base: Timing(0.0, 0.1, 0.01), first: Timing(50.0, 0.1, 0.01), again: Timing(0.0, 0.1, 0.01)}
    costs = MeasurementCosts(base, timings, 17e9)
    assert costs.seconds([second], 6) - costs.seconds([second], 6, written=True) == pytest.approx(50)


def test_the_time_to_quantize_for_one_runtime_is_not_that_for_another():
    base = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    lowered = base.model_copy(update={"precision": "int8"})
    other = lowered.model_copy(update={"target": "x86-64-openvino", "runtime": "openvino"})
    costs = MeasurementCosts(base, {base: Timing(0.0, 0.1, 0.01), other: Timing(500.0, 0.1, 0.01)}, 17e9)
    assert costs.seconds([lowered], 6) - costs.seconds([lowered], 6, written=True) < 100


def test_a_measurement_of_more_rounds_than_asked_for_is_reported(tmp_path):
    net = recorded()[0]
    simulation, base = Simulation(net, 0), net.trials()[0].start
    other = base.model_copy(update={"rewrites": ("other-0",)})
    journal = MeasurementLog(
        tmp_path / "log.json", 0.0, 1e6, base, 50, simulation, simulation, lambda *_: None, clock=lambda: simulation.now
    )
    assert journal.measure([other], 6)[other].rounds == 6
    assert journal.measure([other], 50)[other].rounds == 50
    assert journal.measure([other], 6)[other].rounds == 50


def test_an_inference_of_a_batch_takes_as_long_as_its_images():
    base = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
    larger = base.model_copy(update={"batch": 16})
    costs = MeasurementCosts(base, {base: Timing(0.0, 0.0, 0.5)}, 17e9)
    assert costs.evaluation_s(larger, 160) == pytest.approx(costs.evaluation_s(base, 160))
    assert costs.seconds([larger], 6) > 16 * costs.seconds([], 6) / 2

"""The manual baselines of the benchmarks compute the same as the trained networks."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import competing_toolchains.__main__ as competing_toolchains
import numpy as np
import pytest
import torch
from competing_toolchains import docs_page, method_row
from competing_toolchains.competitors import BenchmarkSubject
from competing_toolchains.method_networks import METHOD_NETWORKS
from conftest import TINY
from manual_baseline_tables import markdown
from manual_baselines import dwconv, nondeep, pyra, repavit, riformer

from repaconv import models
from repaconv.checkpoints import read_checkpoint
from repaconv.core import plugins
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.methods.repavit.published_models import ARCHS
from repaconv.sources.method_detection import choose_method
from repaconv.verification.input_batches import random_inputs


def in_double(weights):
    return {name: w.double() if w.is_floating_point() else w for name, w in weights.items()}


def error_of(method, checkpoint, handmade, settings, folder):
    """max|a - b| / max|b| of the hand-made net and the training form, in float64."""
    torch.save(checkpoint, folder / "c.pth")
    found = read_checkpoint(folder / "c.pth")
    chosen, _ = choose_method(found, method)
    form = chosen.read(found, settings)
    training = form.module().double()
    training.load_state_dict(in_double(form.tensors))
    size = getattr(form.config, "image_size", (32, 32))
    images = torch.from_numpy(random_inputs((3, *size), count=3, seed=0).images).double()
    with torch.no_grad():
        wanted, found = training(images), handmade({**checkpoint, "model": in_double(checkpoint["model"])})(images)
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("idle_ratio", [0.75, 0.5])
def test_repavit(tmp_path, idle_ratio):
    weights = plugins.load(plugins.METHODS, "repavit").example(replace(ARCHS["tiny"], idle_ratio=idle_ratio), seed=1)
    args = Namespace(idle_ratio=idle_ratio, heuristic="static", feature_norm="BatchNorm", channel_idle=True)
    checkpoint = {"model": weights, "args": args}
    assert error_of("repavit", checkpoint, lambda c: repavit.deployed(c, 3), {"num_heads": "3"}, tmp_path) < 1e-12


@pytest.mark.parametrize("value", ["value-sum", "output-sum"])
@pytest.mark.parametrize("scale", ["sqrt", "sum"])
def test_nondeep(tmp_path, value, scale):
    weights = plugins.load(plugins.METHODS, "nondeep").example("tiny", seed=2)
    checkpoint = {"model": weights, "meta": example_meta(attn_value=value, score_scale=scale)}
    assert error_of("nondeep", checkpoint, nondeep.deployed, {}, tmp_path) < 1e-12


def test_riformer(tmp_path):
    weights = plugins.load(plugins.METHODS, "riformer").example(TINY, seed=3)
    assert error_of("riformer", {"model": weights}, riformer.deployed, {}, tmp_path) < 1e-12


def test_pyra(tmp_path):
    weights = plugins.load(plugins.METHODS, "pyra").example("tiny", seed=4)
    checkpoint = {"model": weights | pyra.example_lora(weights, rank=2, seed=5)}
    assert error_of("pyra", checkpoint, lambda c: pyra.deployed(c, 3), {"num_heads": "3"}, tmp_path) < 1e-12


def test_dwconv(tmp_path):
    checkpoint = {"model": plugins.load(plugins.METHODS, "dwconv").example("tiny", seed=6)}
    assert error_of("dwconv", checkpoint, lambda c: dwconv.deployed(c, 3), {"num_heads": "3"}, tmp_path) < 1e-12


@pytest.mark.parametrize("method", models.METHODS)
def test_manual_baselines_of_the_trained_networks(method):
    """What nothing but the trainer's own code tells, as a stem's stride and gates, is in the hand-made one, too."""
    net = next(net for net in METHOD_NETWORKS if net.name == f"{method}-digits")
    double = {**net.checkpoint(), "model": in_double(net.checkpoint()["model"])}
    held = torch.from_numpy(np.load(models.HELD_OUT)["input"][:3]).double()
    found = read_checkpoint(models.checkpoint(method))
    form = choose_method(found, method)[0].read(found, {})
    training = form.module().double()
    training.load_state_dict(in_double(form.tensors))
    with torch.no_grad():
        assert (net.manual_baseline(double)(held) - training(held)).abs().max() < 1e-10


ROOT = Path(__file__).resolve().parents[1]


def test_a_slower_row_says_what_its_search_found_of_the_fastest_competitors_runtime_and_nothing_else():
    row = json.loads(
        json.dumps(
            next(
                each
                for each in competing_toolchains.read_rows(competing_toolchains.ORIGINALS)
                if each["kind"] == "fp32"
            )
        )
    )
    ours = row["exact"]["ours"]
    row["ways"][ours]["runtime"] = "onnxruntime"
    row["exact"] |= {"peer": "original, OpenVINO", "ratio": [0.9, 0.89, 0.91]}
    row["times_hand"]["original, OpenVINO"] = [1.1, 1.0, 1.2]
    found = {"onnxruntime": {"ratio": [1.03, 1.01, 1.05], "rounds": 50}}
    reasons = {
        "in the search, the speedup of openvino over the baseline was 1.050 (1.000 to 1.100), and that of onnxruntime, "
        "which was chosen, 1.030 (1.010 to 1.050)": {"ratio": [1.05, 1.0, 1.1], "rounds": 50},
        "`tune` did not take openvino: its outputs differ.": {"left": "left: its outputs differ."},
    }
    row["tune"].pop("runtimes", None)
    assert f"- {row['net']}: " not in docs_page.written([], [row])
    for label, of_openvino in reasons.items():
        row["tune"]["runtimes"] = {**found, "openvino": of_openvino}
        assert f"- {row['net']}: {label}" in docs_page.written([], [row])


def test_the_page_of_competing_toolchains_shows_the_result():
    written = docs_page.written(
        competing_toolchains.read_rows(competing_toolchains.RESULT),
        competing_toolchains.read_rows(competing_toolchains.ORIGINALS),
    )
    assert written == (ROOT / "docs" / "competing-toolchains.md").read_text()


def original_row(net, ratio, kind="fp32"):
    part = {
        "ours": "ours, tuned",
        "peer": "original, OpenVINO",
        "ratio": [ratio, ratio, ratio],
        "measurement": "trusted",
    }
    return {
        "net": net, "kind": kind, "size": [64, 32], "batch": 1, "threads": 1, "date": "2026-11-25",
        "machine": {"cpu": "X", "onnxruntime": "1", "openvino": "1", "torch": "1"},
        "ways": {"ours, tuned": {"runtime": "onnxruntime", "precision": "fp32", "settings": []}},
        "times_hand": {name: [1.0, 1.0, 1.0] for name in ("original, OpenVINO", "ours, tuned")},
        "exact": part, "lower": part if kind == "int8" else None, "tune": {"seconds": 12.3, "budget_s": 60.0},
    }  # fmt: skip


def test_original_networks_have_a_mean_of_all_and_the_slower_ones_by_name():
    rows = [original_row("quick", 1.21), original_row("slow", 0.9), original_row("quick", 2.0, "int8")]
    rows.append({name: value for name, value in original_row("slow", 0.9, "int8").items() if name != "tune"})
    rows[1]["tune"]["budget_s"] = 300.0
    text = docs_page.written([], rows)
    assert "| 12 s of 300 s |" in text
    assert "| quick | 64x32 | 1.00 OpenVINO | 1.00 onnxruntime | 1.210 (1.210 to 1.210) | 12 s |" in text
    assert "FP32: geometric mean over 2 networks **1.044x** of the fastest competitor; 1 below 0.98: slow." in text
    assert (
        "speed only: geometric mean over 2 networks **1.342x** of the fastest competitor; 1 below 0.98: slow." in text
    )
    assert [line.count("|") for line in text.splitlines() if line.startswith(("| quick", "| slow"))] == [10, 10]


def test_a_toolchain_that_is_much_slower_at_first_is_not_loaded_again(tmp_path):
    loads = []

    def benchmark_subject(name, seconds):
        def run(images):
            time.sleep(seconds)
            return images.reshape(len(images), -1)

        return BenchmarkSubject(name, lambda: loads.append(name) or run)

    subjects = [benchmark_subject("original, ONNX Runtime", 0.002), benchmark_subject("original, OpenVINO", 0.02)]
    subjects.append(benchmark_subject("ours, tuned", 0.002))
    images = np.ones((4, 3, 2, 2), np.float32)
    ready = method_row.Prepared(None, None, images, None, [2, 3])
    found = method_row.interleaved(ready, method_row.MeasurementOptions(1, 1, 20, 0.0, 0.01), subjects, within=1.5)
    assert loads.count("original, OpenVINO") == 1 < loads.count("original, ONNX Runtime")
    assert found["exact"]["peer"] == "original, ONNX Runtime"
    assert found["times_hand"]["original, OpenVINO"][0] < 0.3
    assert found["p50_ms"]["original, OpenVINO"] > 15


def test_the_page_shows_the_result():
    result = json.loads((ROOT / "benchmarks/results/manual_baseline_speed.json").read_text())
    assert markdown(result) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_page_shows_what_tune_chose_next_to_the_best_of_ours():
    """On the Xeon with AMX, `tune` left RePaViT-Base at 4.68 where a configuration of ours reached 5.91."""
    rows = [
        each
        for each in competing_toolchains.read_rows(competing_toolchains.RESULT)
        if each["machine"].get("family") == "amx"
    ]
    base = next(each for each in rows if each["net"] == "repavit-deit-base-0.75")

    def line(found):
        return next(text for text in docs_page.written([found]).splitlines() if text.startswith(f"| {found['net']}"))

    assert "| 5.91 openvino int8 by onnxruntime-symmetric with bf16 |" in line(base)
    assert line(base).endswith("| 4.68 openvino int8 by onnxruntime-symmetric in 172 s |")
    name = "ours, chosen by tune"  # recorded from now on: whatever it is, also what does not count in the row
    ways, times = {**base["ways"], name: base["ways"]["ours, tuned"]}, {**base["times_hand"], name: [1.5, 1.4, 1.6]}
    assert line({**base, "ways": ways, "times_hand": times}).endswith("| 1.50 onnxruntime in 172 s |")
    assert line({**base, "tune": {}}).endswith("| not recorded |")

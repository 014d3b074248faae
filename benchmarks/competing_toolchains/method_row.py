"""One row: all configurations loaded, compared on the same images, and measured in one interleaved run.

That run decides which configuration of repaconv and which competitor is the fastest. A second run of these two alone
gives the ratio.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from manual_baselines import export_and_session

import repaconv
from competing_toolchains import competitors, repaconv_configurations
from competing_toolchains.competitors import BenchmarkSubject, CompetitorModel, Images, Run
from competing_toolchains.method_networks import MethodNetwork
from competing_toolchains.repaconv_configurations import ALLOWED, RepaconvModel
from repaconv import models
from repaconv.benchmark.interleaved_protocol import Entrant, Measurement, Protocol, measure, pinned_to_cores
from repaconv.benchmark.machine_fingerprint import fingerprint, version_of
from repaconv.core import run_folder
from repaconv.core.errors import first_line
from repaconv.results import Deployment, Ratio
from repaconv.verification.input_batches import random_inputs

MANUAL_BASELINE, DEFAULT, EXACT, LOWER = (
    "hand-made, ONNX Runtime",
    "ours, default form",
    "ours, tuned",
    "ours, within 0.5%",
)
CHOSEN = "ours, chosen by tune"
"""The deployment that `tune` chose, whether it counts in the row or not."""
IMAGES, LARGE = 48, 8
"""Number of random images for published sizes. A third is the test split, which only shows equal outputs."""
SAME = 1e-4
"""Maximum difference between subjects in FP32, relative to the largest output."""
FEWEST = 8
"""Rounds of the first look."""
SESSION_LOADS = 400
"""Maximum session loads of a pair: latencies of half a millisecond differ by 10% from one load to another."""
PACKAGES = ("onnxruntime", "openvino", "torch")


OutputCheck = Callable[[Run], str]
"""Returns the verdict on the outputs of a subject in FP32."""


class MeasurementOptions(NamedTuple):
    """Batch size, threads and rounds of a row, and the seconds for the search and for the session loads of a run."""

    batch: int
    threads: int
    rounds: int
    budget_s: float
    session_loads_s: float


class Prepared(NamedTuple):
    """A network as the competing tools and repaconv get it, with the labels of its images if it is trained."""

    for_competitors: CompetitorModel
    for_repaconv: RepaconvModel
    images: Images
    labels: Images | None
    test_indices: list[int]


def prepare(network: MethodNetwork, options: MeasurementOptions, work: Path) -> Prepared:
    """Write the fold and the manual baseline's graph into the folder; files that exist already are reused."""
    checkpoint = network.checkpoint()
    module = network.manual_baseline(checkpoint)
    run, images_file, graph = work / "run", work / "images.npz", work / "hand.onnx"
    if not (run / "fold.json").is_file():
        torch.save(checkpoint, work / "c.pth")
        repaconv.fold(work / "c.pth", out=run, force=True)
        (work / "c.pth").unlink()
    images, labels = _images(network, run_folder.fold_of(run_folder.Run(run)).image_size or (0, 0))
    if not images_file.is_file():
        np.savez(images_file, input=images)
    if not graph.is_file():
        export_and_session.export(module, (options.batch, *images.shape[1:]), graph)
    for_repaconv = RepaconvModel(run, images_file, options.batch, options.threads)
    calibration_indices, test_indices = repaconv_configurations.calibration_and_test_indices(for_repaconv)
    calls = np.resize(
        images[calibration_indices], (-(-len(calibration_indices) // options.batch), options.batch, *images.shape[1:])
    )
    return Prepared(
        CompetitorModel(module, graph, calls, options.threads, set()), for_repaconv, images, labels, test_indices
    )


def _images(network: MethodNetwork, size: tuple[int, int]) -> tuple[Images, Images | None]:
    """Images that a trained network has not seen, with their labels; random images for other networks."""
    if not network.trained:
        return random_inputs((3, *size), count=LARGE if network.large else IMAGES, seed=0).images, None
    held = np.load(models.HELD_OUT)
    return held["input"], held["labels"]


def measure_row(
    network: MethodNetwork, options: MeasurementOptions, work: Path, allowed: Mapping[str, float]
) -> dict[str, Any]:
    """The row of a network.

    Args:
        network: The network.
        options: Batch size, threads and limits.
        work: A folder for this row only. Files of an interrupted run are reused.
        allowed: Loss of each configuration of repaconv on the trained network of the method; empty to measure only
            FP32.
    """
    work.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    ready = prepare(network, options, work)
    loss = None if not allowed else ALLOWED if network.trained else 1.0
    found = repaconv_configurations.tuned(ready.for_repaconv, loss, options.budget_s)
    chosen = {DEFAULT: found.baseline, EXACT: repaconv_configurations.fastest(found, _is_exact) or found.baseline}
    if _gain_of(chosen[EXACT], found) <= 1:
        chosen[EXACT] = found.baseline
    fits = {configuration for configuration, lost in allowed.items() if lost <= ALLOWED}
    lower = repaconv_configurations.fastest(
        found,
        lambda deployment: (
            not _is_exact(deployment) and repaconv_configurations.rounding_configuration(deployment) in fits
        ),
    )
    if lower is not None:
        chosen[LOWER] = lower
    chosen[CHOSEN] = found.deployment
    scratch = work / "graphs"
    scratch.mkdir(exist_ok=True)
    if left := fits - repaconv_configurations.searched(found):
        default_presets = repaconv_configurations.default_presets(ready.for_repaconv, scratch)
        chosen |= {
            f"{LOWER}, {configuration}": each
            for configuration, each in default_presets.items()
            if configuration in left
        }
    subjects = [
        *competitors.exact(ready.for_competitors),
        *repaconv_configurations.subjects(ready.for_repaconv, scratch, chosen),
    ]
    subjects += competitors.lower(ready.for_competitors) if allowed else []
    row = {"net": network.name, "method": network.method, "trained": network.trained, "batch": options.batch}
    row |= {"threads": options.threads, "rounds": options.rounds, "date": datetime.date.today().isoformat()}
    row |= {
        "ways": {name: deployment.model_dump(mode="json") for name, deployment in chosen.items()},
        "allowed": dict(allowed),
    }
    row |= {"tune": {"seconds": found.seconds, "budget_s": options.budget_s, "complete": found.complete}}
    return row | interleaved(ready, options, subjects)


def _is_exact(deployment: Deployment) -> bool:
    return deployment.precision == "fp32"


def _gain_of(deployment: Deployment, found: Any) -> float:
    return next((row.ratio.low for row in found.candidates if row.deployment == deployment and row.ratio), 1.0)


def interleaved(
    ready: Prepared,
    options: MeasurementOptions,
    subjects: list[BenchmarkSubject],
    *,
    within: float | None = None,
    check: OutputCheck | None = None,
) -> dict[str, Any]:
    """Times, ratios and losses of all subjects that run, and why the others do not.

    The first subject is the reference of all ratios. With ``within``, a subject that took more than that many times as
    long as the fastest in a first session load is not measured further. ``check`` evaluates the outputs of every
    subject in FP32; subjects that fail it are not measured.
    """
    base = subjects[0].name
    with pinned_to_cores(options.threads) as cores:
        machine = {**fingerprint(tuple(cores)), **{name: version_of(name) for name in PACKAGES}}
        opened, missing = _opened(subjects)
        lossy = {each.name for each in subjects if each.lossy}
        checked = {name: check(run) for name, run in opened.items() if check and name not in lossy}
        for name in [name for name, verdict in checked.items() if verdict == "failed"]:
            missing[name] = "its outputs differ"
            del opened[name]
        if base not in opened:
            raise SystemExit(f"No row was measured: {base} is the reference, and it failed: {missing[base]}.")
        losses = {name: _loss(run, opened[base], ready, options.batch) for name, run in opened.items()}
        if check is None:
            _require_same(losses, lossy)
        images = np.resize(ready.images, (options.batch, *ready.images.shape[1:]))
        running = [each for each in subjects if each.name in opened]
        clock = _Clock(running, images, options)
        first = clock.first_look(opened) if within else None
        opened.clear()
        near = _near(first, within, base) if first and within else list(losses)
        timed = clock.measure(near, more=False)
        exact = _fastest(timed, [name for name in near if name not in lossy])
        lower = _fastest(timed, near) if lossy & set(losses) else None
        against = {pair: _against(clock, *pair) for pair in {exact, lower} if pair}
    by = {name: timed if name in near else first or timed for name in losses}
    return {
        "machine": machine,
        "p50_ms": {name: round(_median(by[name], name), 4) for name in losses},
        "openings": timed.session_loads,
        "times_hand": {name: _rounded(by[name].ratio(name, base)) for name in losses},
        "exact": against.get(exact),
        "lower": against.get(lower),
        "losses": losses,
        "missing": missing,
        **({"checked": checked} if check else {}),
    }


@dataclass(frozen=True)
class _Clock:
    """Measures some of the subjects that run."""

    running: list[BenchmarkSubject]
    images: Images
    options: MeasurementOptions

    def first_look(self, opened: Mapping[str, Run]) -> Measurement:
        """Measure all subjects in the sessions that are already loaded."""
        calls = {name: partial(run, self.images) for name, run in opened.items()}
        return measure(
            {name: Entrant(partial(_given, call)) for name, call in calls.items()},
            Protocol(FEWEST, warmup_rounds=2, cores=self.options.threads, session_loads=1),
        )

    def measure(self, names: list[str], *, more: bool) -> Measurement:
        """Measure these subjects in new sessions, which are loaded in turn."""
        return measure(
            {each.name: Entrant(partial(self._call, each)) for each in self.running if each.name in names},
            Protocol(
                self.options.rounds,
                cores=self.options.threads,
                session_loads=SESSION_LOADS,
                more=more,
                seconds=self.options.session_loads_s,
            ),
        )

    def _call(self, each: BenchmarkSubject) -> Callable[[], Any]:
        gc.collect()
        return partial(_quietly(each), self.images)


def _given(call: Callable[[], Any]) -> Callable[[], Any]:
    return call


def _median(timed: Measurement, name: str) -> float:
    return float(np.median(timed.samples_ms[name]))


def _near(first: Measurement, within: float, base: str) -> list[str]:
    """Subjects that may be the fastest, the fastest competitor, repaconv in FP32, and the reference of the ratios."""
    medians = {name: _median(first, name) for name in first.samples_ms}
    most = within * min(medians.values())
    competing = min(_competitors(medians), key=medians.__getitem__)
    return [name for name, median in medians.items() if median <= most or name in (base, EXACT, competing)]


def _quietly(each: BenchmarkSubject) -> Run:
    with contextlib.redirect_stdout(io.StringIO()):
        return each.open()


def _opened(subjects: list[BenchmarkSubject]) -> tuple[dict[str, Run], dict[str, str]]:
    """The subjects that run, and why the others do not."""
    opened: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for each in subjects:
        try:
            opened[each.name] = _quietly(each)
        except Exception as error:  # a competing tool may not support the graph, and raises errors of any type
            missing[each.name] = first_line(error)
        gc.collect()
    return opened, missing


def _loss(run: Run, right: Run, ready: Prepared, batch: int) -> dict[str, float]:
    """Loss on the test split: changed top-1 predictions, accuracy if there are labels, and the maximum error."""
    images = ready.images[ready.test_indices]
    every = (np.concatenate(list(_batched(each, images, batch)))[: len(images)] for each in (run, right))
    own, competing = (found.reshape(len(images), -1) for found in every)
    first = own.argmax(1)
    found = {"images": len(images), "disagreement": round(float((first != competing.argmax(1)).mean()), 5)}
    found["max_rel_error"] = float((abs(own - competing).max(1) / abs(competing).max(1)).max())
    if ready.labels is not None:
        found["accuracy"] = round(float((first == ready.labels[ready.test_indices]).mean()), 5)
    return found


def _batched(run: Run, images: Images, batch: int) -> Iterator[Images]:
    for start in range(0, len(images), batch):
        yield run(np.resize(images[start : start + batch], (batch, *images.shape[1:]))).copy()


def _require_same(losses: Mapping[str, Mapping[str, float]], lossy: set[str]) -> None:
    """Require equal outputs of FP32 subjects on most images: FP32 rounding error may decide which tokens merge."""
    for name, found in losses.items():
        assert name in lossy or found["max_rel_error"] <= SAME or found["disagreement"] <= 0.5, (name, found)


def _fastest(timed: Measurement, names: list[str]) -> tuple[str, str] | None:
    """The fastest configuration of repaconv that counts, and the fastest competitor; None if either is missing."""
    medians = {name: _median(timed, name) for name in names}
    own = [name for name in names if name == EXACT or name.startswith(LOWER)]
    competing = _competitors(names)
    if not own or not competing:
        return None
    return min(own, key=medians.__getitem__), min(competing, key=medians.__getitem__)


def _competitors(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("ours")]


def _against(clock: _Clock, own: str, competitor: str) -> dict[str, Any]:
    """Measure these two again, without the others."""
    pair = clock.measure([own, competitor], more=True)
    faster = pair.ratio(own, competitor)
    believed = pair.quality(faster)
    return {"ours": own, "peer": competitor, "ratio": _rounded(faster), "openings": pair.session_loads} | {
        "measurement": believed.verdict,
        "reasons": list(believed.reasons),
    }


def _rounded(found: Ratio) -> list[float]:
    """Median, low, high."""
    return [round(value, 4) for value in (found.median, found.low, found.high)]

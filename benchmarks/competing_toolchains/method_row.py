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
from competing_toolchains.competitors import Contender, Hand, Images, Run
from competing_toolchains.method_networks import Net
from competing_toolchains.repaconv_configurations import ALLOWED, Ours
from repaconv import models
from repaconv.benchmark.interleaved_protocol import Entrant, Measurement, Protocol, measure, pinned_to_cores
from repaconv.benchmark.machine_fingerprint import fingerprint, version_of
from repaconv.core import run_folder
from repaconv.core.errors import first_line
from repaconv.results import Deployment, Ratio
from repaconv.verification.input_batches import random_inputs

HAND, DEFAULT, EXACT, LOWER = "hand-made, ONNX Runtime", "ours, default form", "ours, tuned", "ours, within 0.5%"
CHOSEN = "ours, chosen by tune"
"""What a user of `tune` gets, whether it counts in the row or not."""
IMAGES, LARGE = 48, 8
"""Random images of published sizes, of which a third judges: they say whether all compute the same, no more."""
SAME = 1e-4
"""Of the largest output, by which float32 contenders may differ."""
FEWEST = 8
"""Rounds of a first look."""
OPENINGS = 400
"""Most of a pair: what takes half a millisecond differs by a tenth from one to another."""
PACKAGES = ("onnxruntime", "openvino", "torch")


Check = Callable[[Run], str]
"""The verdict on the outputs of one who takes part, in float32."""


class Place(NamedTuple):
    """How a row is called, and how long what may take: the search, and all openings of everybody."""

    batch: int
    threads: int
    rounds: int
    budget_s: float
    opening_s: float


class Prepared(NamedTuple):
    """A network by hand and by us, with the labels of its images where it is trained."""

    hand: Hand
    ours: Ours
    images: Images
    labels: Images | None
    judging: list[int]


def prepared(net: Net, place: Place, work: Path) -> Prepared:
    """Both graphs, in a folder where what is there already is taken."""
    checkpoint = net.checkpoint()
    module = net.manual_baseline(checkpoint)
    run, given, graph = work / "run", work / "images.npz", work / "hand.onnx"
    if not (run / "fold.json").is_file():
        torch.save(checkpoint, work / "c.pth")
        repaconv.fold(work / "c.pth", out=run, force=True)
        (work / "c.pth").unlink()
    images, labels = _images(net, run_folder.fold_of(run_folder.Run(run)).image_size or (0, 0))
    if not given.is_file():
        np.savez(given, input=images)
    if not graph.is_file():
        export_and_session.export(module, (place.batch, *images.shape[1:]), graph)
    taken = Ours(run, given, place.batch, place.threads)
    fitting, judging = repaconv_configurations.fitting(taken)
    calls = np.resize(images[fitting], (-(-len(fitting) // place.batch), place.batch, *images.shape[1:]))
    return Prepared(Hand(module, graph, calls, place.threads, set()), taken, images, labels, judging)


def _images(net: Net, size: tuple[int, int]) -> tuple[Images, Images | None]:
    """Those that a trained net never saw, with their labels; else random ones."""
    if not net.trained:
        return random_inputs((3, *size), count=LARGE if net.large else IMAGES, seed=0).images, None
    held = np.load(models.HELD_OUT)
    return held["input"], held["labels"]


def measured(net: Net, place: Place, work: Path, allowed: Mapping[str, float]) -> dict[str, Any]:
    """The row of a network.

    Args:
        net: Which.
        place: How it is called.
        work: A folder of the row's own: what a run that was broken off left there is used.
        allowed: What each of our ways loses on the trained net of the method; empty where only float32 is measured.
    """
    work.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    ready = prepared(net, place, work)
    loss = None if not allowed else ALLOWED if net.trained else 1.0
    found = repaconv_configurations.tuned(ready.ours, loss, place.budget_s)
    chosen = {DEFAULT: found.baseline, EXACT: repaconv_configurations.fastest(found, _is_exact) or found.baseline}
    if _gain_of(chosen[EXACT], found) <= 1:
        chosen[EXACT] = found.baseline
    fits = {way for way, lost in allowed.items() if lost <= ALLOWED}
    lower = repaconv_configurations.fastest(
        found, lambda way: not _is_exact(way) and repaconv_configurations.way_of(way) in fits
    )
    if lower is not None:
        chosen[LOWER] = lower
    chosen[CHOSEN] = found.deployment
    scratch = work / "graphs"
    scratch.mkdir(exist_ok=True)
    if left := fits - repaconv_configurations.searched(found):
        plain = repaconv_configurations.plain(ready.ours, scratch)
        chosen |= {f"{LOWER}, {way}": each for way, each in plain.items() if way in left}
    everybody = [*competitors.exact(ready.hand), *repaconv_configurations.contenders(ready.ours, scratch, chosen)]
    everybody += competitors.lower(ready.hand) if allowed else []
    row = {"net": net.name, "method": net.method, "trained": net.trained, "batch": place.batch}
    row |= {"threads": place.threads, "rounds": place.rounds, "date": datetime.date.today().isoformat()}
    row |= {"ways": {name: way.model_dump(mode="json") for name, way in chosen.items()}, "allowed": dict(allowed)}
    row |= {"tune": {"seconds": found.seconds, "budget_s": place.budget_s, "complete": found.complete}}
    return row | interleaved(ready, place, everybody)


def _is_exact(way: Deployment) -> bool:
    return way.precision == "fp32"


def _gain_of(way: Deployment, found: Any) -> float:
    return next((row.ratio.low for row in found.candidates if row.deployment == way and row.ratio), 1.0)


def interleaved(
    ready: Prepared,
    place: Place,
    everybody: list[Contender],
    *,
    within: float | None = None,
    check: Check | None = None,
) -> dict[str, Any]:
    """Times, ratios and losses of all that run, and why others do not.

    The first of everybody is what all are compared with. With ``within``, who took more than that many times as long as
    the fastest in a first session load takes no part in the others. With ``check``, it says of everybody in float32
    whether the outputs are right; who computes something else takes no part.
    """
    base = everybody[0].name
    with pinned_to_cores(place.threads) as cores:
        machine = {**fingerprint(tuple(cores)), **{name: version_of(name) for name in PACKAGES}}
        opened, missing = _opened(everybody)
        lossy = {each.name for each in everybody if each.lossy}
        checked = {name: check(run) for name, run in opened.items() if check and name not in lossy}
        for name in [name for name, verdict in checked.items() if verdict == "failed"]:
            missing[name] = "its outputs differ"
            del opened[name]
        if base not in opened:
            raise SystemExit(f"No row: all are compared with {base}, and {missing[base]}.")
        losses = {name: _loss(run, opened[base], ready, place.batch) for name, run in opened.items()}
        if check is None:
            _require_same(losses, lossy)
        images = np.resize(ready.images, (place.batch, *ready.images.shape[1:]))
        running = [each for each in everybody if each.name in opened]
        clock = _Clock(running, images, place)
        first = clock.first_look(opened) if within else None
        opened.clear()
        near = _near(first, within, base) if first and within else list(losses)
        timed = clock.measured(near, more=False)
        exact = _fastest(timed, [name for name in near if name not in lossy])
        lower = _fastest(timed, near) if lossy & set(losses) else None
        against = {pair: _against(clock, *pair) for pair in {exact, lower} if pair}
    by = {name: timed if name in near else first or timed for name in losses}
    return {
        "machine": machine,
        "p50_ms": {name: round(_median(by[name], name), 4) for name in losses},
        "openings": timed.session_loads,
        "times_hand": {name: _kept(by[name].ratio(name, base)) for name in losses},
        "exact": against.get(exact),
        "lower": against.get(lower),
        "losses": losses,
        "missing": missing,
        **({"checked": checked} if check else {}),
    }


@dataclass(frozen=True)
class _Clock:
    """Measures some of those that run."""

    running: list[Contender]
    images: Images
    place: Place

    def first_look(self, opened: Mapping[str, Run]) -> Measurement:
        """All, as they are opened already."""
        calls = {name: partial(run, self.images) for name, run in opened.items()}
        return measure(
            {name: Entrant(partial(_given, call)) for name, call in calls.items()},
            Protocol(FEWEST, warmup_rounds=2, cores=self.place.threads, session_loads=1),
        )

    def measured(self, names: list[str], *, more: bool) -> Measurement:
        """These, opened anew by turns."""
        return measure(
            {each.name: Entrant(partial(self._call, each)) for each in self.running if each.name in names},
            Protocol(
                self.place.rounds,
                cores=self.place.threads,
                session_loads=OPENINGS,
                more=more,
                seconds=self.place.opening_s,
            ),
        )

    def _call(self, each: Contender) -> Callable[[], Any]:
        gc.collect()
        return partial(_quietly(each), self.images)


def _given(call: Callable[[], Any]) -> Callable[[], Any]:
    return call


def _median(timed: Measurement, name: str) -> float:
    return float(np.median(timed.samples_ms[name]))


def _near(first: Measurement, within: float, base: str) -> list[str]:
    """Those that may be the fastest, the fastest of the others', ours in FP32, and what all are compared with."""
    medians = {name: _median(first, name) for name in first.samples_ms}
    most = within * min(medians.values())
    theirs = min(_theirs(medians), key=medians.__getitem__)
    return [name for name, median in medians.items() if median <= most or name in (base, EXACT, theirs)]


def _quietly(each: Contender) -> Run:
    with contextlib.redirect_stdout(io.StringIO()):
        return each.open()


def _opened(everybody: list[Contender]) -> tuple[dict[str, Run], dict[str, str]]:
    """Those that run, and why the others do not."""
    opened: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for each in everybody:
        try:
            opened[each.name] = _quietly(each)
        except Exception as error:  # somebody else's tool, on a graph that it may not take
            missing[each.name] = first_line(error)
        gc.collect()
    return opened, missing


def _loss(run: Run, right: Run, ready: Prepared, batch: int) -> dict[str, float]:
    """What one loses on the images that judge: first classes, right ones where labels tell, and how near it comes."""
    images = ready.images[ready.judging]
    every = (np.concatenate(list(_batched(each, images, batch)))[: len(images)] for each in (run, right))
    mine, theirs = (found.reshape(len(images), -1) for found in every)
    first = mine.argmax(1)
    found = {"images": len(images), "disagreement": round(float((first != theirs.argmax(1)).mean()), 5)}
    found["max_rel_error"] = float((abs(mine - theirs).max(1) / abs(theirs).max(1)).max())
    if ready.labels is not None:
        found["accuracy"] = round(float((first == ready.labels[ready.judging]).mean()), 5)
    return found


def _batched(run: Run, images: Images, batch: int) -> Iterator[Images]:
    for start in range(0, len(images), batch):
        yield run(np.resize(images[start : start + batch], (batch, *images.shape[1:]))).copy()


def _require_same(losses: Mapping[str, Mapping[str, float]], lossy: set[str]) -> None:
    """Whoever is in float32 computes the same on most images: rounding may decide which tokens merge."""
    for name, found in losses.items():
        assert name in lossy or found["max_rel_error"] <= SAME or found["disagreement"] <= 0.5, (name, found)


def _fastest(timed: Measurement, names: list[str]) -> tuple[str, str] | None:
    """The best of ours that counts and their fastest; None where one of us is not there."""
    medians = {name: _median(timed, name) for name in names}
    mine = [name for name in names if name == EXACT or name.startswith(LOWER)]
    theirs = _theirs(names)
    if not mine or not theirs:
        return None
    return min(mine, key=medians.__getitem__), min(theirs, key=medians.__getitem__)


def _theirs(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("ours")]


def _against(clock: _Clock, ours: str, peer: str) -> dict[str, Any]:
    """These two once more, alone."""
    pair = clock.measured([ours, peer], more=True)
    faster = pair.ratio(ours, peer)
    believed = pair.quality(faster)
    return {"ours": ours, "peer": peer, "ratio": _kept(faster), "openings": pair.session_loads} | {
        "measurement": believed.verdict,
        "reasons": list(believed.reasons),
    }


def _kept(found: Ratio) -> list[float]:
    """Median, low, high."""
    return [round(value, 4) for value in (found.median, found.low, found.high)]

"""What repaconv makes of a network: its default form, and what `tune` finds, exact and within what may be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import repaconv
from peers.by_hand import Contender, Run
from repaconv import registry, runs
from repaconv.artefacts import Candidate, Deployment, TuneArtefact
from repaconv.forms.search import MIDDLE
from repaconv.orders.stages import TuneOrder
from repaconv.progress import silent
from repaconv.proof.runners import Images
from repaconv.steps.arms import Called, machine_of, starts
from repaconv.steps.candidates import Candidates
from repaconv.steps.common import load_target
from repaconv.steps.deploying import session_of
from repaconv.steps.judging import Judge, require_judges
from repaconv.subjects.subject import subject_of

TARGET = "x86-64"
ALLOWED = 0.005
"""The share of images that may get another first class."""
REST = "INFERENCE_PRECISION_HINT=bf16"


class Ours(NamedTuple):
    """A folded network: its run, its images (.npz), and how it is called."""

    run: Path
    images: Path
    batch: int
    threads: int


def way_of(deployment: Deployment) -> str:
    """What its rounding depends on: runtime, precision, and what computes what an int8 graph leaves in float."""
    rest = " with bf16" if REST in deployment.settings else ""
    return f"{deployment.runtime} {deployment.precision}{rest}"


def tuned(ours: Ours, loss: float | None, budget_s: float) -> TuneArtefact:
    """What `tune` finds in so many seconds."""
    given: dict[str, Any] = {"inputs": ours.images, "max_disagreement": loss} if loss is not None else {}
    return repaconv.tune(ours.run, batch=ours.batch, threads=ours.threads, budget_s=budget_s, **given)


def fastest(found: TuneArtefact, taken: Callable[[Deployment], bool]) -> Deployment | None:
    """What was found if it is of those; else the fastest, by the longest measurements; None if none was measured."""
    if found.ratio is not None and taken(found.deployment):
        return found.deployment
    rows = [row for row in found.candidates if row.ratio is not None and taken(row.deployment)]
    rows = [row for row in rows if not row.told.startswith("left")]
    for least in (_most(rows), MIDDLE, 0):
        if several := [row for row in rows if row.rounds >= least]:
            return max(several, key=_gain).deployment
    return None


def _most(rows: list[Candidate]) -> int:
    return max((row.rounds for row in rows), default=0)


def _gain(row: Candidate) -> float:
    return row.ratio.median if row.ratio else 0.0


def losses(ours: Ours, scratch: Path) -> dict[str, float]:
    """The share of a trained net's images that get another first class, by way; those that do not pass are not there.

    They are the images that `tune` judges by in the end, and each way is in the default form of its runtime.
    """
    order = TuneOrder(inputs=ours.images, max_disagreement=ALLOWED)
    subject, device = subject_of(runs.Run(ours.run)), load_target(TARGET)
    given = require_judges(order, subject)
    graphs = Candidates(subject, sorted(registry.registered(registry.REWRITES)), given, scratch, silent)
    called = Called("latency", ours.threads, ours.batch, False)
    found: dict[str, float] = {}
    judge: Judge | None = None
    for start, tries in starts(machine_of(order, device, here=True), called, lossy=True, here=True):
        arm = graphs.arm(start, tries)
        judge = judge or Judge(graphs, arm.start, ALLOWED, True, silent)
        rest = [arm.start.model_copy(update=dict(each)) for each in arm.tries if REST in each.get("settings", ())]
        for each in (arm.start, *rest) if start.precision != "fp32" else ():
            loss = judge.held_out(each)
            if loss.link is not None and loss.link.verdict == "passed" and loss.disagreement is not None:
                found[way_of(each)] = loss.disagreement
    return found


def contenders(ours: Ours, scratch: Path, chosen: dict[str, Deployment]) -> Iterator[Contender]:
    """Those deployments, each opened as its runtime takes it; the images calibrate what is in int8."""
    subject = subject_of(runs.Run(ours.run))
    given = require_judges(TuneOrder(inputs=ours.images, max_disagreement=1.0), subject)
    graphs = Candidates(subject, sorted(registry.registered(registry.REWRITES)), given, scratch, silent)

    def opened(way: Deployment) -> Run:
        run: Run = Images(session_of(way, graphs.deployable(way), graphs.sizes(way.batch))).run
        return run

    for name, way in chosen.items():
        yield Contender(name, partial(opened, way), way.precision != "fp32")


def fitting(ours: Ours) -> tuple[list[int], list[int]]:
    """Places of the images that calibrate, ours and everybody's, and of those that judge everybody."""
    given = require_judges(TuneOrder(inputs=ours.images, max_disagreement=1.0), subject_of(runs.Run(ours.run)))
    assert given is not None
    return given.fitting, given.judging

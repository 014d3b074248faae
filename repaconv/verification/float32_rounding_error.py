"""By how much rounding alone moves what a network computes: the network as given in float32, against itself in float64;
in float64, itself on inputs moved by one unit in the last place.

Where an output is near zero, or behind a difference of large numbers, no two graphs agree that round differently. What
is compared may then be no further off than the network as given is, times a stated factor
(`repaconv.verification.images_moved_by_rounding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.images_moved_by_rounding import TIMES
from repaconv.verification.onnx_model_loading import loaded
from repaconv.verification.tolerances import EXPORTED_RTOL
from repaconv.verification.weight_jitter import jittered_feeds

if TYPE_CHECKING:
    from repaconv.engines.contract import Array, Feeds
    from repaconv.sources.source_model import Form, Subject
    from repaconv.verification.images_moved_by_rounding import Sway
    from repaconv.verification.model_runners import Runner

LAST_PLACE, ROUNDINGS = 2.0**-52, 3
"""Of a float64 number; and how often inputs are moved by it."""


def sway_of(subject: Subject, feeds: Feeds, right: Mapping[str, Any] | None = None) -> Sway:
    """By how much each output of a call is moved; run where a tolerance does not suffice, and once.

    Args:
        subject: The network.
        feeds: The call.
        right: What it computes of that in float64, where that is known.
    """

    @cache
    def found() -> dict[str, Array]:
        return _apart(subject.single(), feeds, subject.reference.run(feeds) if right is None else right)

    return found


def double_sway_of(subject: Subject, feeds: Feeds, right: Mapping[str, Any]) -> Sway:
    """By how much float64 alone moves each output of a call; run where a tolerance does not suffice, and once.

    Inputs are moved by one unit in the last place, several times. Where torch's exporter wrote numbers in float32, its
    graph may be off, and the fold of it by twice as much as that is on this very call. What moves a row by more than
    `EXPORTED_RTOL` is another decision, or a fault, and explains nothing.

    Args:
        subject: The network.
        feeds: The call.
        right: What it computes of that in float64.
    """

    @cache
    def found() -> dict[str, Array]:
        double = {name: one.astype(np.float64) if one.dtype.kind == "f" else one for name, one in feeds.items()}
        moved = (jittered_feeds(double, LAST_PLACE, seed) for seed in range(ROUNDINGS))
        each = [_apart(subject.reference, one, right) for one in moved]
        if subject.as_exported is not None:
            off = _apart(subject.as_exported, feeds, right)
            each.append({name: 2 / TIMES * one for name, one in off.items()})
        reals = {name: out for name, out in right.items() if isinstance(out, np.ndarray) and out.dtype.kind == "f"}
        return {name: reduce(np.maximum, (_little(one[name], out) for one in each)) for name, out in reals.items()}

    return found


def _little(moved: Array, right: Array) -> Array:
    """The same, but for rows that are moved by more than rounding does, or have other shapes: none."""
    if moved.shape != right.shape or not right.size:
        return np.zeros(right.shape)
    rows = (len(right), -1) if right.ndim > 1 else (1, -1)
    rounds = moved.reshape(rows).max(1, initial=0.0) <= EXPORTED_RTOL * np.abs(right).reshape(rows).max(1, initial=0.0)
    return np.where(np.repeat(rounds, right.size // len(rounds)).reshape(right.shape), moved, 0.0)


def sway_between(form: Form, other: Form, feeds: Feeds) -> Sway:
    """The same of two forms of one graph, one of them in float64."""
    return cache(lambda: _apart(form, feeds, other.run(feeds)))


def swayer_of(graph: Path) -> Callable[[Feeds], Sway]:
    """The same of a graph of which there is no run, call by call; nothing where it is not evaluated in float64."""
    given = cache(lambda: Evaluated(loaded(graph)))

    def sway(feeds: Feeds) -> Sway:
        @cache
        def found() -> dict[str, Array]:
            try:
                return _apart(given(), feeds, given().truth(feeds))
            except Exception:  # whatever cannot be evaluated in float64, of many classes
                return {}

        return found

    return sway


def _apart(form: Runner, feeds: Feeds, right: Mapping[str, Any]) -> dict[str, Array]:
    """How far each output is off; infinitely, and in its own shape, where that is another one."""
    found, apart = form.run(feeds), dict[str, Any]()
    for name, out in right.items():
        if isinstance(out, np.ndarray) and out.dtype.kind in "fiub":
            if np.shape(found[name]) != out.shape:
                apart[name] = np.full(np.shape(found[name]), np.inf)
            elif out.dtype.kind == "f":
                with np.errstate(invalid="ignore"):
                    apart[name] = np.abs(found[name] - out)
    return apart

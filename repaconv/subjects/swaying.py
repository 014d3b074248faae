"""By how much float32 alone moves what a network computes: the network as given in it, against itself in float64.

Where an output is near zero, or behind a difference of large numbers, no two graphs agree that round differently. What
is compared may then be no further off than the network as given is, times a stated factor (`repaconv.proof.swayed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.subjects.evaluated import Evaluated
from repaconv.subjects.given import loaded

if TYPE_CHECKING:
    from repaconv.engines.contract import Array, Feeds
    from repaconv.proof.runners import Runner
    from repaconv.proof.swayed import Sway
    from repaconv.subjects.subject import Form, Subject


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

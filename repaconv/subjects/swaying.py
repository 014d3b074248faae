"""By how much float32 alone moves what a network computes: the network as given in it, against itself in float64.

Where an output is near zero, or behind a difference of large numbers, no two graphs agree that round differently. What
is compared may then be no further off than the network as given is, times a stated factor (`repaconv.proof.swayed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from repaconv.engines.contract import Array, Feeds
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


def _apart(form: Form, feeds: Feeds, right: Mapping[str, Any]) -> dict[str, Array]:
    found = form.run(feeds)
    reals = {name: out for name, out in right.items() if isinstance(out, np.ndarray) and out.dtype.kind == "f"}
    with np.errstate(invalid="ignore"):
        return {name: np.abs(found[name] - out) for name, out in reals.items() if found[name].shape == out.shape}

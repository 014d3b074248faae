"""Images whose output rounding moves further than a tolerance allows: what is compared may do as the network itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.results import Tolerance
from repaconv.verification.tolerances import EXPLAINED, LARGEST_RTOL, UNDECIDED_SHARE

Array = NDArray[Any]
Sway = Callable[[], Mapping[str, Array]]
"""By how much rounding alone moves every number of the reference's outputs, by name; run when it is asked for."""

TIMES = 8
"""How much further off than the network as given one may be that rounds differently."""
SWAYED = "rounding alone moves it so far that a comparison shows nothing"


class Swayed(NamedTuple):
    """What rounding explains of one output.

    Attributes:
        told: In how many images, and by how much; empty where there are none.
        nothing: Whether it moves too many so far that nothing is proved.
        allowed: The tolerance that holds for all images, if it explains all that are off; else the link's own.
    """

    told: str
    nothing: bool
    allowed: Tolerance


def swayed(errors: Array, absolute: Array, sways: Array, allowed: Tolerance, rounding: str = "FP32") -> Swayed:
    """Judge images [n] by their own rounding where the tolerance does not suffice.

    Args:
        errors: Of each, relative to its scale.
        absolute: The same as they are.
        sways: By how much rounding alone moves each, relative to its scale.
        allowed: Of the link.
        rounding: In which numbers both ends are computed.
    """
    with np.errstate(invalid="ignore"):
        beyond = ~(errors <= (allowed.rtol or 0.0)) & ~(absolute <= (allowed.atol or 0.0))
        explained = beyond & (errors <= TIMES * sways)
    if not explained.any():
        return Swayed("", False, allowed)
    count, own = int(explained.sum()), float(sways[explained].max())
    told = f"{count} of {len(errors)} explained by {rounding} rounding, which moves the original network by {own:.0e}"
    if (explained == beyond).all():
        most = max(allowed.rtol or 0.0, float(errors.max()))
        allowed = allowed.model_copy(update={"rtol": most, "rtol_reason": EXPLAINED})
    vague = (explained & (TIMES * sways > LARGEST_RTOL)).mean()
    return Swayed(f"{told} (allowed: {TIMES} times)", bool(vague > UNDECIDED_SHARE), allowed)

"""Images whose output rounding moves further than a tolerance allows: what is compared may do as the network itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.results import Figures, Tolerance
from repaconv.verification.tolerances import EXPLAINED, LARGEST_RTOL, UNDECIDED_SHARE

Array = NDArray[Any]
Sway = Callable[[], Mapping[str, Array]]
"""By how much rounding alone moves every number of the reference's outputs, by name; run when it is asked for."""

TIMES = 8
"""How much further off than the network as given one may be that rounds differently."""


class Swayed(NamedTuple):
    """What rounding explains of one output.

    Attributes:
        figures: In how many images, and by how much; empty where there are none.
        nothing: Whether it moves too many so far that nothing is proved.
        allowed: The tolerance that holds for all images, if it explains all that are off; else the link's own.
    """

    figures: Figures
    nothing: bool
    allowed: Tolerance


def swayed(errors: Array, absolute: Array, sways: Array, allowed: Tolerance, link: str) -> Swayed:
    """Judge images [n] by their own rounding where the tolerance does not suffice.

    Args:
        errors: Of each, relative to its scale.
        absolute: The same as they are.
        sways: By how much rounding alone moves each, relative to its scale.
        allowed: Of the link.
        link: Its name: that of the fold is computed in float64, others in float32.
    """
    with np.errstate(invalid="ignore"):
        beyond = ~(errors <= (allowed.rtol or 0.0)) & ~(absolute <= (allowed.atol or 0.0))
        explained = beyond & (errors <= TIMES * sways)
    if not explained.any():
        return Swayed(Figures(), False, allowed)
    of_float64 = link == "fold"
    figures = Figures(
        unit="images",
        compared=len(errors),
        explained=int(explained.sum()),
        arithmetic="float64" if of_float64 else "FP32",
        rounding=float(sways[explained].max()),
        source="moved inputs" if of_float64 else "float32 against float64",
        factor=TIMES,
    )
    if (explained == beyond).all():
        most = max(allowed.rtol or 0.0, float(errors.max()))
        allowed = allowed.model_copy(update={"rtol": most, "rtol_reason": EXPLAINED})
    vague = (explained & (TIMES * sways > LARGEST_RTOL)).mean()
    return Swayed(figures, bool(vague > UNDECIDED_SHARE), allowed)

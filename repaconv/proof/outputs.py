"""All outputs of two ends side by side, batch by batch: every one by its name, in number and shape, by its own meter.

For links over many images. Where every number of a few probes is held to those beside it, as in a graph of any origin,
that is `repaconv.proof.compare`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.artefacts import Link, Tolerance
from repaconv.engines.contract import Feeds
from repaconv.errors import Refused
from repaconv.proof.parity import Meter
from repaconv.proof.runners import Runner, named


class Comparison:
    """A candidate's outputs against the reference's.

    Attributes:
        allowed: Of the link.
        meters: What was measured so far, by output; one that is called ``logits`` has classes.
    """

    def __init__(self, candidate: str, allowed: Tolerance) -> None:
        """``candidate`` is what the candidate is called."""
        self.candidate, self.allowed = candidate, allowed
        self.meters: dict[str, Meter] = {}

    def add(
        self,
        found: Mapping[str, Any],
        right: Mapping[str, Any],
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
    ) -> None:
        """One batch; see `repaconv.proof.parity.Meter.add`.

        Raises:
            Refused: If the outputs are others, in number or in shape.
        """
        if len(found) != len(right):
            raise self._others(f"{len(found)} outputs", str(len(right)))
        for name, value in named(list(right), found).items():
            if value.shape != right[name].shape:
                raise self._others(f"shape {list(value.shape)}", str(list(right[name].shape)))
            meter = self.meters.setdefault(name, Meter(self.allowed, logits=name == "logits"))
            meter.add(value, right[name], labels=labels, undecided=undecided)

    def links(self, name: str, reference: str, note: str = "") -> tuple[Link, ...]:
        """A link for every output, in the order of `meters`."""
        several = len(self.meters) > 1
        return tuple(
            meter.link(name, reference, f"{self.candidate}, output {output}" if several else self.candidate, note)
            for output, meter in self.meters.items()
        )

    def _others(self, has: str, wanted: str) -> Refused:
        return Refused(
            f"the {self.candidate} has {has}, the network gives {wanted}.",
            hint="Take the input, the output and the engine of this very checkpoint.",
            code="inputs.shape",
        )


def compared(
    reference: Runner, candidate: Runner, batches: Iterable[Feeds], called: str, allowed: Tolerance
) -> Comparison:
    """Both run on all batches, whose names are those of their inputs."""
    found = Comparison(called, allowed)
    for feeds in batches:
        found.add(candidate.run(feeds), reference.run(feeds))
    return found

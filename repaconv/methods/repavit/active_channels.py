"""Determine A, the number of activated channels of each FFN (the official act_channels). No tensor shows it.

A follows from ``args`` by the official rounding, or from the statistics of norm2 by the residual test
(see `repaconv.methods.repavit.paper_equations`). The test also checks an A that args or the user give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repaconv.backbones.ffn_replacement_interface import Ffn
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused
from repaconv.method_api.settings import SettingsReader, one_of
from repaconv.methods.repavit.paper_equations import linear_layer
from repaconv.results import Fact

ACTIVE_RESIDUAL = 0.02
"""Threshold of |r| above which a channel counts as activated. |r| of idle channels is below 7e-3, moving averages
included; any threshold from 0.005 to 0.05 gave the same results on 66 blocks of 10 trained networks."""
MOST_MISFITS = 0.05
"""Maximum share of misclassified channels. Above it, the statistics are not those of a converged training."""
MINIMA = {"GELU": -0.17, "GELU-tanh": -0.1701, "QuickGELU": -0.1637, "ReLU": 0.0, "SiLU": -0.2785}
"""The minimum of each activation, rounded down. The mean of an activated channel cannot be lower."""


@dataclass(frozen=True)
class ResidualTest:
    """The residual test of one FFN: what the statistics of norm2 show about A.

    Attributes:
        active: The A with the fewest misfits.
        misfits: Number of channels whose r contradicts ``active``.
        deviating: For each channel, whether |r| is above the threshold.
        proof: The last channel whose mean is below the activation's minimum, so that it is idle; None without one.
        usable: Whether ``active`` is reliable.
    """

    active: int
    misfits: int
    deviating: Tensor
    proof: int | None
    usable: bool

    @classmethod
    def of(cls, block: Mapping[str, Tensor], eps: float, *, trained: bool, act: str = "GELU") -> ResidualTest:
        """Compare norm2.running_mean with fc1 applied to norm1.bias.

        Args:
            block: The FFN's tensors.
            eps: eps of norm2.
            trained: Whether the statistics were ever updated.
            act: The activation, one of `MINIMA`.
        """
        idle_mean = linear_layer(block, "fc1")(block["norm1.bias"])
        mean = block["norm2.running_mean"].double()
        r = (mean - idle_mean) / (block["norm2.running_var"].double() + eps).sqrt()
        deviating = r.abs() > ACTIVE_RESIDUAL
        below = torch.cat([torch.zeros(1, dtype=torch.int64), (~deviating).cumsum(0)])  # |r| small among j < k
        above = int(deviating.sum()) - torch.cat([torch.zeros(1, dtype=torch.int64), deviating.cumsum(0)])
        misfits, active = (below + above).min(0)
        # E[gelu(-h)] is positive in nine of ten channels, noise in half of them
        positive = float((r[deviating] > 0).double().mean()) if bool(deviating.any()) else 1.0
        low = (mean < MINIMA[act]).nonzero()
        return cls(
            active=int(active),
            misfits=int(misfits),
            deviating=deviating,
            proof=int(low.max()) if trained and len(low) else None,
            usable=trained and int(misfits) <= MOST_MISFITS * len(r) and positive >= 0.75,
        )

    def misfits_of(self, active: int) -> int:
        """The number of channels whose r contradicts this A."""
        return int((~self.deviating[:active]).sum() + self.deviating[active:].sum())

    def contradicts(self, active: int) -> str:
        """Why this A contradicts the statistics, or an empty string; a few channels near the threshold are allowed."""
        slack = max(4, len(self.deviating) // 100)
        if self.usable and self.misfits_of(active) > self.misfits + slack:
            return f"the statistics of norm2 say {self.active} ({self.misfits_of(active)} channels contradict {active})"
        return ""


@dataclass(frozen=True)
class ClaimedIdleRatio:
    """The idle ratio that args or the user give, from which A of every block follows.

    Attributes:
        idle_ratio: The share of idle channels; None if A is the width, as in the official MLP-Mixer.
        heuristic: ``static``, or ``linear`` if the ratio grows from block to block (plain ViTs only).
    """

    idle_ratio: float | None
    heuristic: str = "static"

    def active(self, ffn: Ffn, index: int, depth: int, *, truncated: bool) -> int:
        """A of one FFN by the official float64 expression: rounded up, or ``truncated`` as in PoolFormer."""
        if (ratio := self.idle_ratio) is None:
            return min(ffn.width, ffn.hidden)
        if self.heuristic == "linear":
            r = ratio
            ratio = (2 * r - 1) + (2 - 2 * r) / (depth - 1) * (index + 1) if index < depth - 1 else 0.0
        exact = ffn.hidden * (1 - ratio)
        return min(ffn.hidden, max(0, int(exact) if truncated else math.ceil(exact)))


@dataclass(frozen=True)
class Rule:
    """How the official code computes A in one network family.

    Attributes:
        truncated: A is truncated instead of rounded up (PoolFormer).
        linear: The heuristic ``linear`` exists (plain ViTs).
        always_width: A is the width C (MLP-Mixer).
    """

    truncated: bool = False
    linear: bool = False
    always_width: bool = False


def read_claim(args: Mapping[str, Any], reader: SettingsReader, *, rule: Rule) -> ClaimedIdleRatio | None:
    """Read the settings ``idle_ratio`` and ``heuristic``, and args.channel_idle; None if no idle ratio is given.

    Args:
        args: The args of the official main.py.
        reader: The user's settings.
        rule: The family's rule.
    """
    stored_ratio = args.get("idle_ratio") if not rule.always_width else None
    found = (
        float(stored_ratio) if isinstance(stored_ratio, (int, float)) and not isinstance(stored_ratio, bool) else None
    )
    stored_heuristic, source = args.get("heuristic"), "args"
    if args.get("channel_idle") is False:
        found, stored_heuristic, source = 0.0, "static", "args.channel_idle (all channels are activated)"
    ratio = reader.maybe("idle_ratio", parse_idle_ratio, found, source)
    heuristic = None
    if rule.linear:
        stored_heuristic = None if stored_heuristic is None else "linear" if stored_heuristic == "linear" else "static"
        heuristic = reader.maybe("heuristic", one_of("static", "linear"), stored_heuristic, source)
    return None if ratio is None and not rule.always_width else ClaimedIdleRatio(ratio, heuristic or "static")


def active_channels(
    ffns: Sequence[Ffn],
    claim: ClaimedIdleRatio | None,
    rule: Rule,
    eps: float,
    act: str,
    checkpoint: Checkpoint,
    reader: SettingsReader,
) -> tuple[int, ...]:
    """Determine A of every FFN: by the claimed idle ratio, or by the residual test if there is none.

    Raises:
        Refused: ``repavit.idle-ratio`` if the statistics contradict the claim, ``setting.needed`` if there is no claim
            and the statistics are not conclusive.
    """
    tests = [ResidualTest.of(ffn.block, eps, trained=_trained(checkpoint, ffn), act=act) for ffn in ffns]
    usable = sum(test.usable for test in tests)
    misfits = [test.misfits for test in tests]
    if claim is None:
        unclear = [ffn.prefix for ffn, test in zip(ffns, tests, strict=True) if not test.usable]
        if unclear:
            raise Refused(
                f"the activated channels of {unclear[0].rstrip('.')} are unknown: the file does not contain the "
                "idle ratio, and the statistics of norm2 do not look like those of a finished training.",
                hint="Give the ratio that it was trained with: --set idle_ratio=0.75.",
                code="setting.needed",
            )
        active = tuple(test.active for test in tests)
        source = f"residual test of norm2's statistics, at most {max(misfits)} channels misfit in a block"
        reader.facts.append(Fact(name="act_channels", value=list(active), source=source))
        return active
    active = tuple(claim.active(ffn, index, len(ffns), truncated=rule.truncated) for index, ffn in enumerate(ffns))
    for ffn, test, a in zip(ffns, tests, active, strict=True):
        against = test.contradicts(a)
        if not against and test.proof is not None and test.proof < a:
            against = f"channel {test.proof} has a mean below {act}'s minimum, so it is idle"
        if against:
            raise Refused(
                f"{ffn.prefix.rstrip('.')} cannot have {a} activated channels of {ffn.hidden}: {against}.",
                hint=(
                    "Leave --set idle_ratio out to derive it from the statistics, or give the ratio that it was "
                    "trained with."
                ),
                code="repavit.idle-ratio",
            )
    rule_name = "the width" if claim.idle_ratio is None else "idle ratio"
    source = f"{rule_name}, by the official code; the residual test agrees in {usable} of {len(tests)} blocks"
    against = "" if usable == len(tests) else f"in {len(tests) - usable} blocks the statistics do not decide"
    reader.facts.append(Fact(name="act_channels", value=list(active), source=source, against=against))
    return active


def _trained(checkpoint: Checkpoint, ffn: Ffn) -> bool:
    counter = checkpoint.tensors.get(f"{ffn.prefix}norm2.num_batches_tracked")
    return counter is None or int(counter) > 0


def parse_idle_ratio(text: str) -> float:
    """Parse a share of idle channels; a ValueError says what is wrong with it."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("not between 0 and 1")
    return value

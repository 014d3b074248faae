"""RePaViT's act_channels: which part of an FFN is activated stands in no tensor.

It follows from ``args`` by the official rounding, or from the statistics of norm2 by the residual test, which also
holds a claim against them (see `repaconv.methods.repavit.paper`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repaconv.backbones.ffn_skeleton import Ffn
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused
from repaconv.method_api.settings import Knobs, one_of
from repaconv.methods.repavit.paper import linear_layer
from repaconv.results import Fact

RESIDUAL = 0.02
"""From this |r| on a channel counts as activated: idle ones stay below 7e-3, also in moving averages; any value from
0.005 to 0.05 gave the same answers on 66 blocks of 10 trained nets."""
MISFITS = 0.05
"""Above this share of channels on the wrong side, the statistics are not those of a converged training."""
MINIMA = {"GELU": -0.17, "GELU-tanh": -0.1701, "QuickGELU": -0.1637, "ReLU": 0.0, "SiLU": -0.2785}
"""Rounded down. No mean of an activation lies below its minimum: an activated channel cannot have a lower one."""


@dataclass(frozen=True)
class ResidualTest:
    """What the statistics of one FFN say about A.

    Attributes:
        active: The A with the fewest misfits.
        misfits: Channels on the wrong side of ``active``.
        deviating: Channel by channel, whether |r| is above the threshold.
        proof: One channel that cannot be activated, by the activation's minimum; the last such, or None.
        usable: Whether the answer can be trusted.
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
            block: One FFN.
            eps: Of norm2.
            trained: Whether the statistics were ever updated.
            act: The activation, whose minimum proves channels idle; the test holds for any of `MINIMA`.
        """
        idle_mean = linear_layer(block, "fc1")(block["norm1.bias"])
        mean = block["norm2.running_mean"].double()
        r = (mean - idle_mean) / (block["norm2.running_var"].double() + eps).sqrt()
        deviating = r.abs() > RESIDUAL
        below = torch.cat([torch.zeros(1, dtype=torch.int64), (~deviating).cumsum(0)])  # |r| small among j < k
        above = int(deviating.sum()) - torch.cat([torch.zeros(1, dtype=torch.int64), deviating.cumsum(0)])
        misfits, active = (below + above).min(0)
        # E[gelu(-h)] is positive in nine channels of ten; noise is not
        positive = float((r[deviating] > 0).double().mean()) if bool(deviating.any()) else 1.0
        low = (mean < MINIMA[act]).nonzero()
        return cls(
            active=int(active),
            misfits=int(misfits),
            deviating=deviating,
            proof=int(low.max()) if trained and len(low) else None,
            usable=trained and int(misfits) <= MISFITS * len(r) and positive >= 0.75,
        )

    def misfits_of(self, active: int) -> int:
        """Channels on the wrong side of a claimed A."""
        return int((~self.deviating[:active]).sum() + self.deviating[active:].sum())

    def contradicts(self, active: int) -> str:
        """Why a claimed A cannot be, or an empty string; a handful of channels may lie close to the threshold."""
        slack = max(4, len(self.deviating) // 100)
        if self.usable and self.misfits_of(active) > self.misfits + slack:
            return f"the statistics of norm2 say {self.active} ({self.misfits_of(active)} channels contradict {active})"
        return ""


@dataclass(frozen=True)
class Claim:
    """What args or the user say: from it follows A of every block.

    Attributes:
        idle_ratio: The share of idle channels; None where A is the width, as in the official MLP-Mixer.
        heuristic: ``linear`` lets the ratio grow with the depth (plain only).
    """

    idle_ratio: float | None
    heuristic: str = "static"

    def active(self, ffn: Ffn, index: int, depth: int, *, truncated: bool) -> int:
        """A by the official float64 expression; ``truncated`` as PoolFormer has it, rounded up elsewhere."""
        if (ratio := self.idle_ratio) is None:
            return min(ffn.width, ffn.hidden)
        if self.heuristic == "linear":
            r = ratio
            ratio = (2 * r - 1) + (2 - 2 * r) / (depth - 1) * (index + 1) if index < depth - 1 else 0.0
        exact = ffn.hidden * (1 - ratio)
        return min(ffn.hidden, max(0, int(exact) if truncated else math.ceil(exact)))


@dataclass(frozen=True)
class Rule:
    """How a family of the official code gets A: PoolFormer truncates, plain alone knows ``linear``, Mixer takes C."""

    truncated: bool = False
    linear: bool = False
    always_width: bool = False


def read_claim(args: Mapping[str, Any], knobs: Knobs, *, rule: Rule) -> Claim | None:
    """The knobs ``idle_ratio`` and ``heuristic``, and args.channel_idle; None if nobody says anything.

    Args:
        args: Of the official main.py.
        knobs: The user's.
        rule: Of the family.
    """
    said = args.get("idle_ratio") if not rule.always_width else None
    found = float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
    told, source = args.get("heuristic"), "args"
    if args.get("channel_idle") is False:
        found, told, source = 0.0, "static", "args.channel_idle (all channels are activated)"
    ratio = knobs.maybe("idle_ratio", _ratio, found, source)
    heuristic = None
    if rule.linear:
        told = None if told is None else "linear" if told == "linear" else "static"
        heuristic = knobs.maybe("heuristic", one_of("static", "linear"), told, source)
    return None if ratio is None and not rule.always_width else Claim(ratio, heuristic or "static")


def active_channels(
    ffns: Sequence[Ffn], claim: Claim | None, rule: Rule, eps: float, act: str, checkpoint: Checkpoint, knobs: Knobs
) -> tuple[int, ...]:
    """A of every FFN: by the claim where there is one, else by the residual test.

    Raises:
        Refused: ``repavit.idle-ratio`` if the statistics contradict the claim, ``setting.needed`` if there is
            none and they do not tell.
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
        knobs.facts.append(Fact(name="act_channels", value=list(active), source=source))
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
    knobs.facts.append(Fact(name="act_channels", value=list(active), source=source, against=against))
    return active


def _trained(checkpoint: Checkpoint, ffn: Ffn) -> bool:
    counter = checkpoint.tensors.get(f"{ffn.prefix}norm2.num_batches_tracked")
    return counter is None or int(counter) > 0


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("not between 0 and 1")
    return value

"""The four network families of RePaViT's official code, and how it gets the number of activated channels in each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from repaconv.backbones.ffn_skeleton import Ffn, Skeleton
from repaconv.backbones.metaformer import read_poolformer
from repaconv.backbones.mlp_mixer import read_mixer
from repaconv.backbones.swin import read_swin
from repaconv.backbones.vit_ffn_skeleton import read_vit
from repaconv.method_api.settings import Knobs
from repaconv.methods.repavit.active_channels import Rule


@dataclass(frozen=True)
class Family:
    """One of the four.

    Attributes:
        backbone: As registered.
        ffn: Matches an FFN's prefix; its group ``block`` names the block.
        read: Understands the skeleton, by the user's settings and the trainer's args.
        rule: How A follows from the idle ratio.
        conv: Whether FFNs are 1x1 convolutions.
    """

    backbone: str
    ffn: re.Pattern[str]
    read: Callable[[dict[str, Tensor], Sequence[Ffn], Knobs, Mapping[str, Any]], Skeleton]
    rule: Rule
    conv: bool = False

    def block_of(self, ffn: Ffn) -> str:
        """The prefix of the FFN's block."""
        return self.ffn.sub(r"\g<block>", ffn.prefix)


FAMILIES = (
    Family("vit", re.compile(r"^(?P<block>blocks\.\d+\.)mlp\."), read_vit, Rule(linear=True)),
    Family("swin", re.compile(r"^(?P<block>layers\.\d+\.blocks\.\d+\.)mlp\."), read_swin, Rule()),
    Family(
        "metaformer",
        re.compile(r"^(?P<block>network\.\d+\.\d+\.)mlp\."),
        read_poolformer,
        Rule(truncated=True),
        conv=True,
    ),
    Family("mixer", re.compile(r"^(?P<block>blocks\.\d+\.)mlp_channels\."), read_mixer, Rule(always_width=True)),
)


def ffn_of(key: str) -> re.Match[str] | None:
    """The place of an FFN in a key of any family."""
    return next((match for family in FAMILIES if (match := family.ffn.match(key))), None)

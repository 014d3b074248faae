"""The four network families of RePaViT's official code, with their rules for the number of activated channels."""

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
    """One network family.

    Attributes:
        backbone: Registered name of the backbone.
        ffn: Matches an FFN's prefix; its group ``block`` is the prefix of the block.
        read: Reads the network around the FFNs, with the user's settings and the trainer's args.
        rule: How A follows from the idle ratio.
        conv: Whether the FFNs are 1x1 convolutions.
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
    """Match the prefix of an FFN in a key of any family; None if the key is not an FFN's."""
    return next((match for family in FAMILIES if (match := family.ffn.match(key))), None)

"""Recognize the key names of RepVGG's and MobileOne's official code and of timm's ByobNet, and convert them."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor

from repaconv.backbones.repvgg_mobileone import NAMES, Layout
from repaconv.backbones.tensor_names import renamed_tensors
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused

_BLOCK_KEY = re.compile(
    r"^(?P<prefix>(?:.+?\.)??)(?P<block>stage\d+(?:\.\d+)?|stem|stages\.\d+\.\d+)\."
    r"(?P<part>rbr_dense|rbr_conv|rbr_reparam|conv_kxk|reparam_conv)\.(?P<index>\d+\.)?(?:conv\.)?weight$"
)
_PLUS = re.compile(r"(?:^|\.)stage\d+(?:_first|_second)?(?:\.blocks\.|_aux\.)|\.post_se\.")


class BlockKey(NamedTuple):
    """What the key of a block's largest convolution shows about the network.

    Attributes:
        prefix: What comes before the network's own names.
        layout: The official code whose names are used.
        timm: Whether the names are timm's.
        deployed: Whether the block is in deploy form.
        block: Name of the block.
        part: Name of the convolution within the block.
    """

    prefix: str
    layout: Layout
    timm: bool
    deployed: bool
    block: str = ""
    part: str = ""


def block_keys(checkpoint: Checkpoint) -> list[BlockKey]:
    """Parse the keys of all blocks' largest convolutions, in the order of the file."""
    keys = []
    for name in checkpoint.tensors:
        if not (match := _BLOCK_KEY.match(name)):
            continue
        part, timm = match["part"], match["block"].startswith(("stem", "stages"))
        repvgg = part in ("rbr_dense", "rbr_reparam") or (part == "conv_kxk" and not match["index"])
        deployed = part in ("rbr_reparam", "reparam_conv")
        if timm == (part == "conv_kxk") or part == "reparam_conv":
            layout: Layout = "repvgg" if repvgg else "mobileone"
            keys.append(BlockKey(match["prefix"], layout, timm, deployed, match["block"], part))
    return keys


def common_key(checkpoint: Checkpoint) -> BlockKey:
    """The prefix, layout and form that all block keys have in common.

    Raises:
        Refused: If they differ, if there are none, or if the network is a RepVGGplus.
    """
    found = {key._replace(block="", part="") for key in block_keys(checkpoint)}
    if found and (plus := next((name for name in checkpoint.tensors if _PLUS.search(name)), None)):
        raise Refused(
            f"{plus} belongs to RepVGGplus, which has auxiliary heads during training and squeeze-and-excitation "
            "after the ReLU.",
            hint="RepVGGplus is not supported; RepVGG is, including D2se.",
            code="repconv.plus",
        )
    if len(found) == 1:
        return found.pop()
    if not found:
        raise Refused(
            f"{checkpoint.path} has no block of RepVGG or MobileOne (rbr_dense, rbr_conv, conv_kxk).",
            hint="Without --method the method is recognized automatically.",
            code="method.mismatch",
        )
    mixed = len({key.deployed for key in found}) == 2
    raise Refused(
        "some blocks are in training form and others in deploy form."
        if mixed
        else "there are blocks of several nets: "
        + ", ".join(sorted({f"{key.prefix}({'timm, ' if key.timm else ''}{key.layout})" for key in found})),
        hint="Take the checkpoint as trained." if mixed else "Save one of them.",
        code="repconv.mixed-forms" if mixed else "checkpoint.ambiguous",
    )


def official_names(checkpoint: Checkpoint, key: BlockKey) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by the names of the layout's official code, and a map from those names to the names in the file."""
    theirs = NAMES[key.layout]
    spellings = (
        (r"^stem\.", "stage0."),
        (r"^stages\.(\d+)\.", lambda match: f"stage{int(match[1]) + 1}."),
        (r"^head\.fc\.", "linear."),
        (r"\.conv_kxk\.", f".{theirs.conv}."),
        (r"\.conv_(?:1x1|scale)\.", f".{theirs.scale}."),
        (r"\.identity\.", f".{theirs.identity}."),
        (r"\.attn\.fc1\.", f".se.{theirs.squeeze}."),
        (r"\.attn\.fc2\.", f".se.{theirs.expand}."),
    )

    def name_of(full: str) -> str | None:
        name = full.removeprefix(key.prefix)
        for pattern, replacement in spellings if key.timm else ():
            name = re.sub(pattern, replacement, name)
        return None if name.endswith("num_batches_tracked") else name  # not used in eval mode

    return renamed_tensors(checkpoint, name_of)

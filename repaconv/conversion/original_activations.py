"""The original's activations on images, which every fit is held to: computed once, as far as they can be held."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from repaconv.conversion.plain_vit import Plain, attended, behind_attention, behind_mlp, mapped

HELD = 4 * 2**30
"""Bytes, and a block's beyond: those of later blocks are computed each time anew."""


class Flow(NamedTuple):
    """What flows into a block, and out of its heads before W^O, each [N, T, d]."""

    into: Tensor
    mixed: Tensor

    @property
    def bytes(self) -> int:
        """Of both."""
        return self.into.nbytes + self.mixed.nbytes


class Streams:
    """Of a network as it is, on images [N, C, H, W]; to be asked for block by block."""

    def __init__(self, plain: Plain, images: Tensor) -> None:
        self.plain, self._images, self._count = plain, images, len(images)
        self._known: dict[int, Flow] = {}

    def first(self, count: int) -> Streams:
        """Those of the first images, out of the same memory."""
        part = Streams(self.plain, self._images)
        part._count, part._known = count, self._known
        return part

    def __len__(self) -> int:
        """Images."""
        return self._count

    def outputs(self) -> Tensor:
        """What the network gives, [N, K]."""
        with torch.inference_mode():
            last = self._behind(len(self.plain.blocks) - 1)[: self._count]
            return mapped(self.plain.net.read_out, last)

    def at(self, index: int) -> Flow:
        """At a block."""
        with torch.inference_mode():
            return Flow(*(each[: self._count] for each in self._all(index)))

    def _all(self, index: int) -> Flow:
        known, block = self._known, self.plain.blocks[index]
        if index not in known:
            into = self._behind(index - 1) if index else mapped(self.plain.net.embed, self._images)
            flow = Flow(into, mapped(lambda x: attended(block, x, self.plain.heads), into))
            if sum(each.bytes for each in known.values()) > HELD:
                known.popitem()
            known[index] = flow
        return known[index]

    def _behind(self, index: int) -> Tensor:
        block = self.plain.blocks[index]
        return mapped(lambda x, mixed: behind_mlp(block, behind_attention(block, x, mixed)), *self._all(index))

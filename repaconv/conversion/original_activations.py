"""The activations of the original network on the images, to which the conversion is fitted. They are cached up to a
limit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from repaconv.conversion.plain_vit import PlainViT, after_attention, after_ffn, attention_output, map_batches

CACHE_BYTES = 4 * 2**30
"""Limit of the cache in bytes (plus those of one block). Activations of later blocks are recomputed at each use."""


class BlockActivations(NamedTuple):
    """The input of a block, and the output of its heads before W^O, each [N, T, d]."""

    into: Tensor
    mixed: Tensor

    @property
    def bytes(self) -> int:
        """Size of both tensors."""
        return self.into.nbytes + self.mixed.nbytes


class OriginalActivations:
    """The activations of a network on images [N, C, H, W], block by block."""

    def __init__(self, plain: PlainViT, images: Tensor) -> None:
        self.plain, self._images, self._count = plain, images, len(images)
        self._known: dict[int, BlockActivations] = {}

    def first(self, count: int) -> OriginalActivations:
        """Return the activations of the first images; the cache is shared."""
        part = OriginalActivations(self.plain, self._images)
        part._count, part._known = count, self._known
        return part

    def __len__(self) -> int:
        """Return the number of images."""
        return self._count

    def outputs(self) -> Tensor:
        """Return the outputs of the network, [N, K]."""
        with torch.inference_mode():
            last = self._block_output(len(self.plain.blocks) - 1)[: self._count]
            return map_batches(self.plain.net.read_out, last)

    def at(self, index: int) -> BlockActivations:
        """Return the activations at a block."""
        with torch.inference_mode():
            return BlockActivations(*(each[: self._count] for each in self._all(index)))

    def _all(self, index: int) -> BlockActivations:
        known, block = self._known, self.plain.blocks[index]
        if index not in known:
            into = self._block_output(index - 1) if index else map_batches(self.plain.net.embed, self._images)
            flow = BlockActivations(into, map_batches(lambda x: attention_output(block, x, self.plain.heads), into))
            if sum(each.bytes for each in known.values()) > CACHE_BYTES:
                known.popitem()
            known[index] = flow
        return known[index]

    def _block_output(self, index: int) -> Tensor:
        block = self.plain.blocks[index]
        return map_batches(lambda x, mixed: after_ffn(block, after_attention(block, x, mixed)), *self._all(index))

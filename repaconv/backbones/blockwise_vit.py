"""A vision transformer whose blocks a method trains in a form of their own: read, built and folded but for these.

A method brings its `TrainedBlock`, and reads what only its blocks have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from repaconv.backbones.inference_block import BlockSpec
from repaconv.backbones.tensor_names import block_tensors, in_float64, official_names
from repaconv.backbones.training_blocks import BlockTraits
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_stem_and_head_folding import fold_stem, fold_tail
from repaconv.checkpoints import Checkpoint, require_sound
from repaconv.method_api.contract import FoldedPart, Published, Reading
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import Knobs
from repaconv.results import Fact


class TrainedBlock(Protocol):
    """One block as trained, without its weights."""

    @property
    def traits(self) -> BlockTraits:
        """What stands around its attention and its MLP."""

    def build(self, config: ViTConfig) -> nn.Module:
        """The module."""

    def fold(self, config: ViTConfig, index: int, weights: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """Block ``index`` of the deploy form from its float64 weights, by the names within it."""


class DeployedBlock(Protocol):
    """One that knows its deploy block."""

    def spec(self, bare: ViTConfig, *, last: bool) -> BlockSpec:
        """In a net without blocks yet; behind the ``last`` one nothing reads more than class and distillation token."""


def deploy_config(sizes: Mapping[str, Any], blocks: Sequence[DeployedBlock]) -> ViTConfig:
    """Of the deploy form; the last block only reads, where class and distillation token are all that is read.

    Args:
        sizes: Of the net, as `ViTConfig` has them.
        blocks: All of them in order.
    """
    bare = ViTConfig(**sizes, blocks=())
    last = blocks[-1] if bare.pool in ("token", "distilled") else None
    return replace(bare, blocks=tuple(block.spec(bare, last=block is last) for block in blocks))


Block = TypeVar("Block", bound=TrainedBlock)


@dataclass(frozen=True, kw_only=True)
class BlockwiseReading(Reading, Generic[Block]):
    """Such a net as trained."""

    backbone: str = "vit"
    config: ViTConfig
    blocks: tuple[Block, ...]

    def module(self) -> nn.Module:
        """See `Reading`."""
        return ViT(self.config, lambda config, index: self.blocks[index].build(config)).eval()

    def weights(self, index: int) -> dict[str, Tensor]:
        """Of one block, in float64 by the names within it."""
        return in_float64(block_tensors(self.tensors, f"blocks.{index}."))

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        yield fold_stem(self.tensors)
        for index, block in enumerate(self.blocks):
            yield from block.fold(self.config, index, self.weights(index))
        yield fold_tail(self.config, self.tensors)


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are sound, by the skeleton's names, and what else there is to know it by."""

    tensors: dict[str, Tensor]
    names: Mapping[str, str]
    unused: tuple[Fact, ...]
    record: Mapping[str, Any]
    knobs: Knobs

    @classmethod
    def of(cls, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Opened:
        """Begin to read.

        Raises:
            Refused: If two keys are one name, or a number is none.
        """
        tensors, names, unused = official_names(checkpoint)
        require_sound(tensors, names)
        return cls(tensors, names, unused, checkpoint.record, Knobs(settings))

    def reading(
        self,
        config: ViTConfig,
        blocks: tuple[Block, ...],
        *,
        facts: Sequence[Fact] = (),
        tolerances: Mapping[str, float] | None = None,
        tolerance_reasons: Mapping[str, str] | None = None,
        apart: str = "",
    ) -> BlockwiseReading[Block]:
        """End it: what was understood, whole.

        Args:
            config: Of the deploy form.
            blocks: As trained.
            facts: Of the blocks.
            tolerances: See `Reading`.
            tolerance_reasons: See `Reading`.
            apart: A tensor that was read and is of no module.

        Raises:
            Refused: If tensors are missing, too many or misshaped.
            UsageProblem: If a setting is unknown or malformed.
        """
        preprocessing = preprocessing_of(self.record, {}, self.knobs, config.image_size)
        self.knobs.done()
        scaled = any(block.traits.scale1 or block.traits.scale2 for block in blocks)
        reading = BlockwiseReading(
            config=config,
            tensors={name: tensor for name, tensor in self.tensors.items() if name != apart},
            names=self.names,
            facts=(*self.knobs.facts, *facts, *self.unused),
            preprocessing=preprocessing,
            applied=("layer scale",) if scaled else (),
            tolerances=tolerances or {},
            tolerance_reasons=tolerance_reasons or {},
            blocks=blocks,
        )
        reading.require_whole()
        return reading


def published_net(config: ViTConfig, blocks: tuple[Block, ...]) -> Published:
    """A model of the paper for images of its size."""
    training = BlockwiseReading(config=config, blocks=blocks).module
    return Published(training, lambda: ViT(config), (config.in_channels, *config.image_size))


def example_weights(published: Published, seed: int, spread: Mapping[str, float]) -> dict[str, Tensor]:
    """Seeded weights far from the identity; matrices keep the size of what they act on, scales are around 1.

    ``spread`` is the standard deviation around zero of what is neither, by how its name ends.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = published.training().state_dict()
    return {name: _drawn(name, meta.shape, random, spread) for name, meta in shapes.items()}


def _drawn(name: str, shape: torch.Size, random: torch.Generator, spread: Mapping[str, float]) -> Tensor:
    noise = torch.randn(shape, generator=random)
    deviation = next((value for end, value in spread.items() if name.endswith(end)), None)
    if deviation is not None:
        return deviation * noise
    return noise / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1 + 0.3 * noise

"""Read, build and fold a vision transformer whose blocks are defined by a method.

The method provides a `TrainedBlock` class and reads the blocks' own settings. Everything else is shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from repaconv.backbones.tensor_names import in_float64, official_names
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_block_folding import fold_stem, fold_tail
from repaconv.backbones.vit_inference_block import BlockSpec
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.checkpoints import Checkpoint, require_sound
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.method_api.contract import FoldedPart, Published, Reading
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import SettingsReader
from repaconv.results import Fact


class TrainedBlock(Protocol):
    """The description of one block as trained, without its weights."""

    @property
    def traits(self) -> BlockTraits:
        """The norms and LayerScales around the block's attention and MLP."""

    def build(self, config: ViTConfig) -> nn.Module:
        """Build the block as trained."""

    def fold(self, config: ViTConfig, index: int, weights: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """Fold block ``index``, from its float64 weights by their names within the block."""


class DeployedBlock(Protocol):
    """A block that can describe its deploy block."""

    def spec(self, bare: ViTConfig, *, last: bool) -> BlockSpec:
        """The deploy block, in a network whose config ``bare`` has no blocks yet.

        After the ``last`` block only the class and the distillation token are read.
        """


def deploy_config(sizes: Mapping[str, Any], blocks: Sequence[DeployedBlock]) -> ViTConfig:
    """Make the config of the deploy form.

    If only class and distillation token are read, the last block computes only these.

    Args:
        sizes: The network's sizes, fields of `ViTConfig`.
        blocks: All blocks in order.
    """
    bare = ViTConfig(**sizes, blocks=())
    last = blocks[-1] if bare.pool in ("token", "distilled") else None
    return replace(bare, blocks=tuple(block.spec(bare, last=block is last) for block in blocks))


Block = TypeVar("Block", bound=TrainedBlock)


@dataclass(frozen=True, kw_only=True)
class BlockwiseReading(Reading, Generic[Block]):
    """A vision transformer with a method's blocks that was read from a checkpoint.

    Attributes:
        blocks: The blocks as trained.
        sized_by_values: Whether sizes in ``config`` follow from the weights' values, e.g. from the rank of a matrix.
    """

    reads_tensors_alone = True

    backbone: str = "vit"
    config: ViTConfig
    blocks: tuple[Block, ...]
    sized_by_values: bool = False

    def module(self) -> nn.Module:
        """The network as trained; see `Reading`."""
        return ViT(self.config, lambda config, index: self.blocks[index].build(config)).eval()

    def weights(self, index: int) -> dict[str, Tensor]:
        """The weights of one block in float64, by their names within the block."""
        return in_float64(under_prefix(self.tensors, f"blocks.{index}."))

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Reading | None:
        """The same network with other weights; see `Reading`."""
        return None if self.sized_by_values else super().with_tensors(tensors)

    def parts(self) -> Iterator[FoldedPart]:
        """Yield the stem, the folded blocks and the folded head; see `Reading`."""
        yield fold_stem(self.tensors)
        for index, block in enumerate(self.blocks):
            yield from block.fold(self.config, index, self.weights(index))
        yield fold_tail(self.config, self.tensors)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is being read: its valid weights by official names, its other contents and the settings.

    Attributes:
        tensors: The weights by official names.
        names: Those names to the names in the file.
        unused: Facts about tensors that are not used.
        record: Everything in the checkpoint except its tensors.
        reader: The user's settings.
    """

    tensors: dict[str, Tensor]
    names: Mapping[str, str]
    unused: tuple[Fact, ...]
    record: Mapping[str, Any]
    reader: SettingsReader

    @classmethod
    def open(cls, checkpoint: Checkpoint, settings: Mapping[str, str]) -> OpenCheckpoint:
        """Start to read a checkpoint: convert its names and check its weights.

        Raises:
            Refused: If two keys have the same official name, or weights are invalid (`require_sound`).
        """
        tensors, names, unused = official_names(checkpoint)
        require_sound(tensors, names)
        return cls(tensors, names, unused, checkpoint.record, SettingsReader(settings))

    def reading(
        self,
        config: ViTConfig,
        blocks: tuple[Block, ...],
        *,
        facts: Sequence[Fact] = (),
        tolerances: Mapping[str, float] | None = None,
        tolerance_reasons: Mapping[str, str] | None = None,
        excluded: str = "",
    ) -> BlockwiseReading[Block]:
        """Finish: make the reading, after all settings were read.

        Args:
            config: The config of the deploy form.
            blocks: The blocks as trained.
            facts: Facts about the blocks.
            tolerances: See `Reading`.
            tolerance_reasons: See `Reading`.
            excluded: Name of a tensor that was read but belongs to no module.

        Raises:
            Refused: If tensors are missing, unexpected or of a wrong shape.
            UsageProblem: If a setting is unknown or malformed.
        """
        preprocessing = preprocessing_of(self.record, {}, self.reader, config.image_size)
        self.reader.done()
        scaled = any(block.traits.scale1 or block.traits.scale2 for block in blocks)
        reading = BlockwiseReading(
            config=config,
            tensors={name: tensor for name, tensor in self.tensors.items() if name != excluded},
            names=self.names,
            facts=(*self.reader.facts, *facts, *self.unused),
            preprocessing=preprocessing,
            applied=("layer scale",) if scaled else (),
            tolerances=tolerances or {},
            tolerance_reasons=tolerance_reasons or {},
            blocks=blocks,
        )
        reading.require_whole()
        return reading


def published_net(config: ViTConfig, blocks: tuple[Block, ...]) -> Published:
    """A model of the paper, made of a deploy config and blocks as trained."""
    training = BlockwiseReading(config=config, blocks=blocks).module
    return Published(training, lambda: ViT(config), (config.in_channels, *config.image_size))


def example_weights(published: Published, seed: int, spread: Mapping[str, float]) -> dict[str, Tensor]:
    """Make seeded, non-trivial weights for a model: matrices preserve the scale of their input, scales are around 1.

    ``spread`` has the standard deviation (mean 0) of all other tensors, by the end of their names.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = published.training().state_dict()
    return {name: _random_tensor(name, meta.shape, random, spread) for name, meta in shapes.items()}


def _random_tensor(name: str, shape: torch.Size, random: torch.Generator, spread: Mapping[str, float]) -> Tensor:
    noise = torch.randn(shape, generator=random)
    deviation = next((value for end, value in spread.items() if name.endswith(end)), None)
    if deviation is not None:
        return deviation * noise
    return noise / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1 + 0.3 * noise

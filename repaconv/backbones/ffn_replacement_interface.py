"""The interface for methods that replace only the FFNs of a network (RePaViT).

Such an FFN includes its own norms. Each network family implements `FfnReplacement` in a file of this package, with a
function that reads it from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.tensor_names import blocks_by_stage
from repaconv.backbones.vit_layers import IdleMlpSpec, MlpSpec
from repaconv.core.errors import Refused
from repaconv.method_api.contract import FoldedPart
from repaconv.results import ImageSize


@dataclass(frozen=True)
class Ffn:
    """One FFN of a checkpoint.

    Attributes:
        prefix: Its place in the checkpoint, e.g. ``blocks.0.mlp.``.
        block: Its tensors, by their names within the FFN.
        hidden: Channels inside.
        width: Channels of input and output.
    """

    prefix: str
    block: Mapping[str, Tensor]
    hidden: int
    width: int


MlpFactory = Callable[[int], nn.Module]
"""Builds the training FFN of block i, without its shortcut."""


class FfnReplacement(Protocol):
    """Builds and folds a checkpoint's network with other FFNs in it. Block indices count through all stages."""

    @property
    def image_size(self) -> ImageSize | None:
        """The (height, width) that the network was built for; None if it accepts any size."""

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> Any:
        """Make the config of the deploy form, from A of every FFN and their activation."""

    def build_training(self, config: Any, mlp: MlpFactory) -> nn.Module:
        """Build the network as trained, with the FFNs that ``mlp`` builds."""

    def block_pair(self, config: Any, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        """Build one block as trained and as folded, and give the shape of an input to compare them on."""

    def fold_other_parts(
        self, block: Mapping[str, Tensor], index: int
    ) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        """Fold a block's other parts: their tensors, descriptions of the fold, and the LayerScale around the FFN."""

    def fold_outside_blocks(self, config: Any, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """Yield the folded parts outside the blocks."""


def deploy_ffn(hidden: int, active: int, act: ActivationKind) -> MlpSpec | IdleMlpSpec:
    """The deploy form's FFN on tokens: an MLP if all channels are activated."""
    return MlpSpec(hidden, act) if active == hidden else IdleMlpSpec(active, act)


def stage_depths(ffns: Sequence[Ffn], pattern: str, step: int = 1) -> list[int]:
    """The number of blocks in every stage, counted by their FFNs.

    Args:
        ffns: All FFNs.
        pattern: Matches an FFN's prefix; its groups are the numbers of stage and block.
        step: Difference between the numbers of consecutive stages.

    Raises:
        Refused: If the numbers of stages or blocks have gaps.
    """
    found = blocks_by_stage([ffn.prefix for ffn in ffns], pattern)
    if sorted(found) != list(range(0, step * len(found), step)) or any(v != set(range(len(v))) for v in found.values()):
        raise Refused(
            f"the stages are numbered {', '.join(map(str, sorted(found)))}, or blocks in them are missing.",
            hint="The file contains only a part of the network.",
            code="checkpoint.missing-keys",
        )
    return [len(found[stage]) for stage in sorted(found)]


def stage_and_index(index: int, depths: Sequence[int]) -> tuple[int, int]:
    """Convert the index of a block to (stage, index within the stage); ``depths`` are the blocks per stage."""
    for stage, depth in enumerate(depths):
        if index < depth:
            return stage, index
        index -= depth
    raise IndexError(index)

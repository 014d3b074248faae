"""A network around its FFNs: what every family of networks answers to a method that changes the FFNs alone.

Such an FFN brings its own norms. The families stand in the files beside this one, each with a function that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.norms_and_ffns import ActivationKind
from repaconv.backbones.token_layers import IdleMlpSpec, MlpSpec
from repaconv.core.errors import Refused
from repaconv.method_api.contract import FoldedPart
from repaconv.results import ImageSize


@dataclass(frozen=True)
class Ffn:
    """One FFN of a checkpoint: its tensors by the names within it, and where it stands."""

    prefix: str
    block: Mapping[str, Tensor]
    hidden: int
    width: int


MlpFactory = Callable[[int], nn.Module]
"""Builds the training FFN of block i, without its shortcut."""


class Skeleton(Protocol):
    """A checkpoint's network around its FFNs; blocks are counted through all stages."""

    @property
    def image_size(self) -> ImageSize | None:
        """What it was built for; None where any size will do."""

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> Any:
        """Of the deploy form, with A of every FFN and their activation."""

    def training(self, config: Any, mlp: MlpFactory) -> nn.Module:
        """The network as trained."""

    def pair(self, config: Any, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        """Block i as trained and folded, and the shape of an input to prove it on."""

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        """What a block folds besides its FFN, in words too, and the LayerScale around the FFN."""

    def rest(self, config: Any, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """All but the blocks."""


def deploy_ffn(hidden: int, active: int, act: ActivationKind) -> MlpSpec | IdleMlpSpec:
    """The deploy form's FFN on tokens."""
    return MlpSpec(hidden, act) if active == hidden else IdleMlpSpec(active, act)


def depths_of(ffns: Sequence[Ffn], pattern: str, step: int = 1) -> list[int]:
    """Blocks of every stage, by the FFNs; stages and blocks are numbered without gaps.

    Raises:
        Refused: If they are not.
    """
    found: dict[int, set[int]] = {}
    for ffn in ffns:
        match = re.match(pattern, ffn.prefix)
        assert match is not None
        found.setdefault(int(match[1]), set()).add(int(match[2]))
    if sorted(found) != list(range(0, step * len(found), step)) or any(v != set(range(len(v))) for v in found.values()):
        raise Refused(
            f"the stages are numbered {', '.join(map(str, sorted(found)))}, or blocks in them are missing.",
            hint="The file contains only a part of the network.",
            code="checkpoint.missing-keys",
        )
    return [len(found[stage]) for stage in sorted(found)]


def place_of(index: int, depths: Sequence[int]) -> tuple[int, int]:
    """(stage, index within it) of block i, for so many blocks a stage."""
    for stage, depth in enumerate(depths):
        if index < depth:
            return stage, index
        index -= depth
    raise IndexError(index)

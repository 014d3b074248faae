"""MLP-Mixer around its channel FFNs; the token MLPs tell the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import ImageSize, parse_image_size
from repaconv.backbones.mixer import Mixer, MixerBlock, MixerConfig
from repaconv.backbones.mixer import deploy_block as mixer_deploy_block
from repaconv.backbones.parts import ActivationKind
from repaconv.backbones.tokens import IdleMlpSpec
from repaconv.errors import Refused
from repaconv.skeletons.around import Ffn, MlpFactory, deploy_ffn
from repaconv.skeletons.folding import linear_of, named, norm_and_head
from repaconv.skeletons.names import classes_of, weight_of
from repaconv.trained.contract import FoldedPart
from repaconv.trained.knobs import Knobs, small


@dataclass(frozen=True)
class MixerSkeleton:
    """An MLP-Mixer."""

    frame: MixerConfig
    hidden: tuple[int, ...]

    @property
    def image_size(self) -> ImageSize:
        return self.frame.image_size

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> MixerConfig:
        return replace(
            self.frame, ffn=tuple(deploy_ffn(h, a, act) for h, a in zip(self.hidden, active, strict=True)), act=act
        )

    def training(self, config: MixerConfig, mlp: MlpFactory) -> nn.Module:
        return Mixer(config, lambda config, index: MixerBlock(config, mlp(index), shortcut=True, deployed=False))

    def pair(self, config: MixerConfig, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        trained = MixerBlock(config, mlp(index), shortcut=True, deployed=False)
        return trained, mixer_deploy_block(config, index), (2, config.sequence, config.width)

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        norm = Affine.diagonal(block["mlp_tokens.norm.weight"], block["mlp_tokens.norm.bias"])
        fc1, fc2 = linear_of(block, "mlp_tokens.fc1") @ norm, linear_of(block, "mlp_tokens.fc2")
        folded = named({"mlp_tokens.fc1": fc1, "mlp_tokens.fc2": fc2})
        return folded, ("mlp_tokens.norm's affine -> mlp_tokens.fc1",), Affine.eye(self.frame.width)

    def rest(self, config: MixerConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({n: w.double() for n, w in tensors.items() if n.startswith("stem.")})
        yield from norm_and_head(tensors, config.classes)


def read_mixer(tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]) -> MixerSkeleton:
    """The token MLPs tell the number of tokens."""
    kernel = weight_of(tensors, "stem.proj.weight", 4)
    fc1 = weight_of(tensors, "blocks.0.mlp_tokens.fc1.weight", 2)
    side, patch = math.isqrt(fc1.shape[1]), kernel.shape[2]
    square = (side * patch, side * patch) if side * side == fc1.shape[1] else None
    if square:
        size = knobs.take("image_size", parse_image_size, square, square, "tokens x patch", free=True)
    else:
        size = knobs.need("image_size", parse_image_size, "224x160", f"{fc1.shape[1]} tokens are no square")
    if (size[0] // patch) * (size[1] // patch) != fc1.shape[1]:
        raise Refused(
            f"images of {size[0]} x {size[1]} pixels do not have the {fc1.shape[1]} patches that the token-mixing "
            "MLPs expect.",
            hint="Leave --set image_size out.",
            code="mixer.image-size",
        )
    frame = MixerConfig(
        image_size=size,
        patch=patch,
        width=kernel.shape[0],
        token_hidden=fc1.shape[0],
        ffn=tuple(IdleMlpSpec(0) for _ in ffns),
        classes=classes_of(tensors),
        in_channels=kernel.shape[1],
        token_eps=knobs.take("token_eps", small, 1e-5),
        norm_eps=knobs.take("norm_eps", small, 1e-6),
    )
    return MixerSkeleton(frame, tuple(ffn.hidden for ffn in ffns))

"""MLP-Mixer (arXiv 2105.01601) as in RePaViT's official code: blocks of a token MLP and a channel MLP.

Unlike in timm, the token MLP's LayerNorm normalizes over the tokens. Tensor names: ``stem.proj``,
``blocks.<i>.mlp_tokens``, ``blocks.<i>.mlp_channels``, ``norm``, ``head``. A method provides the training blocks;
without one the deploy form is built, in which norms have no affine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.ffn_replacement_interface import Ffn, MlpFactory, deploy_ffn
from repaconv.backbones.registered_backbone import Backbone
from repaconv.backbones.shared_layers import ActivationKind, PatchEmbed, activation
from repaconv.backbones.tensor_names import classes_of, weight_of
from repaconv.backbones.vit_block_folding import linear_of, named_tensors, norm_and_head
from repaconv.backbones.vit_layers import IdleMlpSpec, MlpSpec
from repaconv.core.errors import Refused
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.settings import SettingsReader, small
from repaconv.results import ImageSize, parse_image_size


@dataclass(frozen=True)
class MixerConfig:
    """The configuration of an MLP-Mixer.

    Attributes:
        image_size: (height, width) in pixels.
        patch: Side of a patch in pixels.
        width: Channels.
        token_hidden: Width inside the token MLPs.
        ffn: The channel MLPs of the deploy blocks.
        classes: Width of the head, 0 for pooled features.
        in_channels: Channels of an image.
        token_eps, norm_eps: eps of the token MLPs' norms and of the final norm.
        act: Activation of all MLPs.
    """

    image_size: tuple[int, int]
    patch: int
    width: int
    token_hidden: int
    ffn: tuple[MlpSpec | IdleMlpSpec, ...]
    classes: int
    in_channels: int = 3
    token_eps: float = 1e-5
    norm_eps: float = 1e-6
    act: ActivationKind = "GELU"

    @property
    def sequence(self) -> int:
        """Number of tokens."""
        return (self.image_size[0] // self.patch) * (self.image_size[1] // self.patch)


BlockFactory = Callable[[MixerConfig, int], nn.Module]
"""Builds one block: (config, index) -> [B, T, C] -> [B, T, C]."""


class TokenMlp(nn.Module):
    """The token MLP, fc2(act(fc1(norm(x^T))))^T, with the same weights for every channel."""

    def __init__(self, config: MixerConfig, *, deployed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.sequence, config.token_eps, elementwise_affine=not deployed)
        self.fc1 = nn.Linear(config.sequence, config.token_hidden)
        self.act = activation(config.act)
        self.fc2 = nn.Linear(config.token_hidden, config.sequence)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        out: Tensor = self.fc2(self.act(self.fc1(self.norm(x.transpose(1, 2))))).transpose(1, 2)
        return out


class MixerBlock(nn.Module):
    """x += mlp_tokens(x), then the channel MLP, which may include its shortcut."""

    def __init__(self, config: MixerConfig, mlp: nn.Module, *, shortcut: bool, deployed: bool) -> None:
        super().__init__()
        self.mlp_tokens = TokenMlp(config, deployed=deployed)
        self.mlp_channels, self.shortcut = mlp, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.mlp_tokens(x)
        y: Tensor = self.mlp_channels(x)
        return x + y if self.shortcut else y


def deploy_block(config: MixerConfig, index: int) -> nn.Module:
    """Build a block of the deploy form."""
    spec = config.ffn[index]
    return MixerBlock(config, spec.build(config.width), shortcut=not isinstance(spec, IdleMlpSpec), deployed=True)


class Mixer(nn.Module):
    """An MLP-Mixer: images [B, C, H, W] of one size to logits [B, classes], or to features.

    Args:
        config: The configuration.
        block: Builds training blocks; if None, the deploy form is built.
    """

    def __init__(self, config: MixerConfig, block: BlockFactory | None = None) -> None:
        super().__init__()
        self.stem = PatchEmbed(config.in_channels, config.width, config.patch)
        self.blocks = nn.Sequential(*((block or deploy_block)(config, index) for index in range(len(config.ffn))))
        affine = block is not None or not config.classes
        self.norm = nn.LayerNorm(config.width, config.norm_eps, elementwise_affine=affine)
        self.head = nn.Linear(config.width, config.classes) if config.classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        out: Tensor = self.head(self.norm(self.blocks(self.stem(x))).mean(1))
        return out


BACKBONE = Backbone("mixer", MixerConfig, Mixer)


# MLP-Mixer around its channel FFNs.


@dataclass(frozen=True)
class MixerFfnReplacement:
    """An MLP-Mixer whose channel FFNs are replaced; see `FfnReplacement`.

    Attributes:
        frame: The configuration, without channel MLPs.
        hidden: Channels inside each channel MLP as trained.
    """

    frame: MixerConfig
    hidden: tuple[int, ...]

    @property
    def image_size(self) -> ImageSize:
        return self.frame.image_size

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> MixerConfig:
        return replace(
            self.frame, ffn=tuple(deploy_ffn(h, a, act) for h, a in zip(self.hidden, active, strict=True)), act=act
        )

    def build_training(self, config: MixerConfig, mlp: MlpFactory) -> nn.Module:
        return Mixer(config, lambda config, index: MixerBlock(config, mlp(index), shortcut=True, deployed=False))

    def block_pair(
        self, config: MixerConfig, index: int, mlp: MlpFactory
    ) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        trained = MixerBlock(config, mlp(index), shortcut=True, deployed=False)
        return trained, deploy_block(config, index), (2, config.sequence, config.width)

    def fold_other_parts(
        self, block: Mapping[str, Tensor], index: int
    ) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        norm = Affine.diagonal(block["mlp_tokens.norm.weight"], block["mlp_tokens.norm.bias"])
        fc1, fc2 = linear_of(block, "mlp_tokens.fc1") @ norm, linear_of(block, "mlp_tokens.fc2")
        folded = named_tensors({"mlp_tokens.fc1": fc1, "mlp_tokens.fc2": fc2})
        return folded, ("mlp_tokens.norm's affine -> mlp_tokens.fc1",), Affine.eye(self.frame.width)

    def fold_outside_blocks(self, config: MixerConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({n: w.double() for n, w in tensors.items() if n.startswith("stem.")})
        yield from norm_and_head(tensors, config.classes)


def read_mixer(
    tensors: dict[str, Tensor], ffns: Sequence[Ffn], reader: SettingsReader, args: Mapping[str, Any]
) -> MixerFfnReplacement:
    """Read an MLP-Mixer around its channel FFNs; the number of tokens follows from the token MLPs.

    Raises:
        Refused: If a tensor is missing or has a wrong shape, or the image size does not have as many patches.
        SettingNeeded: If the patches are not a square grid and ``image_size`` is not set.
    """
    kernel = weight_of(tensors, "stem.proj.weight", 4)
    fc1 = weight_of(tensors, "blocks.0.mlp_tokens.fc1.weight", 2)
    side, patch = math.isqrt(fc1.shape[1]), kernel.shape[2]
    square = (side * patch, side * patch) if side * side == fc1.shape[1] else None
    if square:
        size = reader.take("image_size", parse_image_size, square, square, "tokens x patch", free=True)
    else:
        size = reader.need("image_size", parse_image_size, "224x160", f"{fc1.shape[1]} tokens are no square")
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
        token_eps=reader.take("token_eps", small, 1e-5),
        norm_eps=reader.take("norm_eps", small, 1e-6),
    )
    return MixerFfnReplacement(frame, tuple(ffn.hidden for ffn in ffns))

"""MLP-Mixer (arXiv 2105.01601) as RePaViT's official code has it: a token MLP, then a channel MLP.

Unlike timm's, the token MLP's LayerNorm is over the tokens. Names: ``stem.proj``, ``blocks.<i>.mlp_tokens``,
``blocks.<i>.mlp_channels``, ``norm``, ``head``. A method gives the training blocks; without one the skeleton builds
the deploy form, in which norms have no affine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor, nn

from repaconv.backbones.parts import ActivationKind, activation
from repaconv.backbones.tokens import IdleMlpSpec, MlpSpec


@dataclass(frozen=True)
class MixerConfig:
    """Sizes; ``ffn`` are the deploy blocks' channel MLPs, ``token_hidden`` the width inside the token MLPs."""

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
    """fc2(act(fc1(norm(x^T))))^T: over tokens, the same for every channel."""

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
    """x += mlp_tokens(x), then the channel MLP, whose shortcut may be inside it."""

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
    """The block of the deploy form."""
    spec = config.ffn[index]
    return MixerBlock(config, spec.build(config.width), shortcut=not isinstance(spec, IdleMlpSpec), deployed=True)


class PatchEmbed(nn.Module):
    """Patches as tokens."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.width, config.patch, stride=config.patch)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, T, C']."""
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


class Mixer(nn.Module):
    """Images [B, C, H, W] of one size to logits [B, classes], or to features.

    Args:
        config: Sizes.
        block: Builds training blocks; the deploy form when None.
    """

    def __init__(self, config: MixerConfig, block: BlockFactory | None = None) -> None:
        super().__init__()
        self.stem = PatchEmbed(config)
        self.blocks = nn.Sequential(*((block or deploy_block)(config, index) for index in range(len(config.ffn))))
        affine = block is not None or not config.classes
        self.norm = nn.LayerNorm(config.width, config.norm_eps, elementwise_affine=affine)
        self.head = nn.Linear(config.width, config.classes) if config.classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        out: Tensor = self.head(self.norm(self.blocks(self.stem(x))).mean(1))
        return out


_CONFIG = TypeAdapter(MixerConfig)


class MixerBackbone:
    """How later stages rebuild the deploy form from ``fold.json``, with no method at hand."""

    name = "mixer"
    any_image_size = False

    def to_json(self, config: MixerConfig) -> dict[str, Any]:
        """The config as plain values."""
        return asdict(config)

    def from_json(self, plain: dict[str, Any]) -> MixerConfig:
        """The inverse of `to_json`."""
        return _CONFIG.validate_python(plain)

    def image_size(self, config: MixerConfig, preferred: tuple[int, int]) -> tuple[int, int]:
        """(height, width) that the network takes."""
        return config.image_size

    def takes(self, config: MixerConfig, height: int, width: int) -> bool:
        """Whether images of this size give as many tokens as the token MLPs mix."""
        return (height, width) == config.image_size

    def deploy(self, config: MixerConfig) -> nn.Module:
        """The deploy form, weights not yet set."""
        return Mixer(config).eval()


BACKBONE = MixerBackbone()

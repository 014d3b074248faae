"""The plain vision transformer: patch embedding, learned tokens, position embeddings, blocks, norm and head.

It is used by every method, as trained and in deploy form, with the key names of timm, DeiT and DINOv2:
``patch_embed.proj``, ``cls_token``, ``dist_token``, ``register_tokens``, ``pos_embed``, ``norm_pre``,
``blocks.<i>``, ``norm`` or ``fc_norm``, ``pre_logits.fc``, ``head``, ``head_dist``. A method provides the training
blocks; without one the deploy blocks that the config describes are built.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repaconv.backbones.registered_backbone import Backbone
from repaconv.backbones.shared_layers import PatchEmbed
from repaconv.backbones.vit_inference_block import BlockSpec, deploy_block
from repaconv.backbones.vit_layers import TokenBatchNorm

Tokens = Any
"""Input and output of a block: tokens [B, N, d], or (tokens, sizes [B, N, 1]) if tokens are merged."""


@dataclass(frozen=True)
class ViTConfig:
    """The configuration of a vision transformer and its deploy blocks.

    Attributes:
        image_size: (height, width) in pixels; the position embeddings are for this size only.
        patch: Side of a patch in pixels.
        width: Channels d.
        classes: Width of the head, 0 for features.
        blocks: The blocks of the deploy form.
        in_channels: Channels of an image.
        tokens: Key names of the learned tokens before the patches that may have position embeddings.
        registers: Number of learned tokens after those, without position embeddings (DINOv2).
        prefix_positions: Whether ``pos_embed`` has rows for ``tokens``.
        pool: ``token``: the first token; ``distilled``: the mean of two heads on the first two tokens;
            ``avg``: the mean over patches; ``none``: all patch tokens, [B, n, d].
        pool_first: Whether the norm (``fc_norm``) comes after the pooling.
        norm, norm_eps, batch_eps: Kind of the final norm as trained, and the eps of a LayerNorm and of a BatchNorm.
        pre_norm: Whether there is a norm ``norm_pre`` before the blocks, with ``norm_eps``.
        patch_bias: Whether the patch embedding has a bias.
        representation: Width of the layer ``pre_logits`` (linear, tanh) between norm and head, 0 without it.
    """

    image_size: tuple[int, int]
    patch: int
    width: int
    classes: int
    blocks: tuple[BlockSpec, ...]
    in_channels: int = 3
    tokens: tuple[Literal["cls_token", "dist_token"], ...] = ("cls_token",)
    registers: int = 0
    prefix_positions: bool = True
    pool: Literal["token", "distilled", "avg", "none"] = "token"
    pool_first: bool = False
    norm: Literal["layer", "batch"] = "layer"
    norm_eps: float = 1e-6
    batch_eps: float = 1e-5
    pre_norm: bool = False
    patch_bias: bool = True
    representation: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches in (height, width)."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches."""
        return len(self.tokens) + self.registers

    @property
    def sequence(self) -> int:
        """The number of tokens that enter the first block."""
        return self.prefix + self.grid[0] * self.grid[1]


BlockFactory = Callable[[ViTConfig, int], nn.Module]
"""Builds one block: (config, index) -> tokens -> tokens."""


class ViT(nn.Module):
    """A vision transformer: images [B, C, H, W] to logits [B, classes], or to features [B, d] or [B, n, d].

    Args:
        config: The configuration.
        block: Builds training blocks; if None, the deploy form is built. Its head includes the final norm's affine, and
            instead of two averaged heads there is one over both tokens.
    """

    def __init__(self, config: ViTConfig, block: BlockFactory | None = None) -> None:
        super().__init__()
        self.config, self.deployed = config, block is None
        width, count = config.width, config.grid[0] * config.grid[1]
        self.patch_embed = PatchEmbed(config.in_channels, config.width, config.patch, bias=config.patch_bias)
        for name in config.tokens:
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, width)))
        if config.registers:
            self.register_tokens = nn.Parameter(torch.zeros(1, config.registers, width))
        positions = count + (len(config.tokens) if config.prefix_positions else 0)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, width))
        if config.pre_norm:
            self.norm_pre = nn.LayerNorm(width, config.norm_eps)
        build = block or (lambda config, index: deploy_block(config.blocks[index], config.width, config.grid))
        self.blocks = nn.ModuleList(build(config, index) for index in range(len(config.blocks)))
        self._build_tail(config)

    def _build_tail(self, config: ViTConfig) -> None:
        folded = self.deployed and (config.classes > 0 or config.representation > 0)
        if folded and config.norm == "batch":
            norm: nn.Module = nn.Identity()
        elif config.norm == "batch":
            norm = TokenBatchNorm(config.width, config.batch_eps)
        else:
            norm = nn.LayerNorm(config.width, config.norm_eps, elementwise_affine=not folded)
        self.add_module("fc_norm" if config.pool_first else "norm", norm)
        if config.representation:
            layer = nn.Linear(config.width, config.representation)
            self.pre_logits = nn.Sequential(OrderedDict(fc=layer, act=nn.Tanh()))
        if config.classes:
            both = self.deployed and config.pool == "distilled"
            width = config.representation or (2 if both else 1) * config.width
            self.head = nn.Linear(width, config.classes)
            if config.pool == "distilled" and not self.deployed:
                self.head_dist = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes] (or features)."""
        return self.rest(self.embed(x), 0)

    def rest(self, tokens: Tokens, start: int) -> Tensor:
        """Run the network from block ``start`` on: the tokens [B, N, d] that enter it to the output."""
        for block in list(self.blocks)[start:]:  # a slice of the ModuleList itself builds a module
            tokens = block(tokens)
        return self.read_out(*tokens) if isinstance(tokens, tuple) else self.read_out(tokens)

    def embed(self, x: Tensor) -> Tensor:
        """Embed images [B, C, H, W] as the tokens [B, N, d] that enter the first block."""
        patches = self.patch_embed(x)
        batch = x.shape[0]
        prefix = [getattr(self, name).expand(batch, -1, -1) for name in self.config.tokens]
        if self.config.prefix_positions:
            tokens = torch.cat([*prefix, patches], 1) + self.pos_embed if prefix else patches + self.pos_embed
        else:
            tokens = torch.cat([*prefix, patches + self.pos_embed], 1)
        if self.config.registers:
            named = len(self.config.tokens)
            registers = self.get_parameter("register_tokens").expand(batch, -1, -1)
            tokens = torch.cat([tokens[:, :named], registers, tokens[:, named:]], 1)
        out: Tensor = self.norm_pre(tokens) if self.config.pre_norm else tokens
        return out

    def read_out(self, tokens: Tensor, size: Tensor | None = None) -> Tensor:
        """Compute the output from the last block's tokens [B, N, d]; only the tokens that are read are normalized.

        A mean over merged tokens is weighted by their sizes [B, N, 1].
        """
        config = self.config
        sizes = None if size is None else size[:, config.prefix :]
        if config.pool == "token":
            pooled = self._normed(tokens[:, :1])[:, 0]
        elif config.pool == "distilled":
            pooled = self._normed(tokens[:, :2])
        elif config.pool == "none":
            return self._normed(tokens[:, config.prefix :])
        elif config.pool_first:
            pooled = self._normed(_mean(tokens[:, config.prefix :], sizes))[:, 0]
        else:
            pooled = _mean(self._normed(tokens[:, config.prefix :]), sizes)[:, 0]
        if config.representation:
            pooled = self.pre_logits(pooled)
        if not config.classes:
            return pooled
        if config.pool == "distilled":
            if not self.deployed:
                both: Tensor = (self.head(pooled[:, 0]) + self.head_dist(pooled[:, 1])) / 2
                return both
            pooled = pooled.flatten(1)
        logits: Tensor = self.head(pooled)
        return logits

    def _normed(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.get_submodule("fc_norm" if self.config.pool_first else "norm")(tokens)
        return out


def _mean(x: Tensor, size: Tensor | None) -> Tensor:
    """The mean [B, 1, d] over tokens [B, N, d], weighted by their sizes [B, N, 1] if given."""
    return x.mean(1, keepdim=True) if size is None else (x * size).sum(1, keepdim=True) / size.sum(1, keepdim=True)


def _upgraded_merge(plain: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Convert the token merging of an older ``fold.json``, with ``distilled`` in place of ``prefix``."""
    if plain is None or "distilled" not in plain:
        return plain
    rest = {name: value for name, value in plain.items() if name != "distilled"}
    return {**rest, "prefix": 1 + plain["distilled"]}


class ViTBackbone(Backbone):
    """The registered backbone, which also reads the configurations of older runs."""

    def from_json(self, plain: dict[str, Any]) -> ViTConfig:
        """Convert the values of `to_json` back to a config; those of older runs have ``distilled`` for ``prefix``."""
        blocks = [{**block, "merge": _upgraded_merge(block.get("merge"))} for block in plain["blocks"]]
        found: ViTConfig = super().from_json({**plain, "blocks": blocks})
        return found


BACKBONE = ViTBackbone("vit", ViTConfig, ViT)

__all__ = ["BACKBONE", "ViT", "ViTConfig"]

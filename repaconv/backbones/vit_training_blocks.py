"""Blocks of a vision transformer as trained, with an attention and an MLP that a method provides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_layers import LayerScale
from repaconv.backbones.vit_training_norms import NormSettings, NormTraits


@dataclass(frozen=True)
class BlockTraits:
    """The norms and LayerScales around one block's attention and MLP.

    Attributes:
        norm1, norm2: The norms before attention and MLP.
        scale1, scale2: Whether there is a LayerScale after attention and MLP.
    """

    norm1: NormTraits
    norm2: NormTraits
    scale1: bool
    scale2: bool

    @classmethod
    def read(cls, block: Mapping[str, Tensor], norms: NormSettings) -> BlockTraits:
        """Read them from a block's tensors, by their names within the block."""
        return cls(
            NormTraits.read(block, "norm1", norms),
            NormTraits.read(block, "norm2", norms),
            "ls1.gamma" in block,
            "ls2.gamma" in block,
        )

    def fold_descriptions(self) -> tuple[str, ...]:
        """Descriptions of what is folded, for the certificate."""
        rows = []
        for name, norm, into in (("norm1", self.norm1, "attn"), ("norm2", self.norm2, "mlp")):
            if norm.kind in ("layer", "batch"):
                what = "affine" if norm.kind == "layer" else "BatchNorm, whole,"
                rows.append(f"{name}'s {what} -> {into}'s first linear layer")
        rows += ["ls1 -> attn.proj"] * self.scale1 + ["ls2 -> mlp's last linear layer"] * self.scale2
        return tuple(rows)

    def not_folded(self) -> tuple[str, ...]:
        """Descriptions of what is not folded, with the reason, for the certificate."""
        both = (("norm1", self.norm1), ("norm2", self.norm2))
        layers = [name for name, norm in both if norm.kind in ("layer", "plain")]
        return (f"the statistics of {' and '.join(layers)}: they depend on the input",) if layers else ()


class PlainAttention(nn.Module):
    """Plain attention, proj(softmax(q k^T / sqrt(dh)) v), with ``qkv``, ``proj`` and, in some codes, its norm."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = True, norm: NormTraits | None = None) -> None:
        super().__init__()
        self.heads = heads
        if norm is not None:
            self.norm = norm.build(width)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        x = self.norm(x) if hasattr(self, "norm") else x
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class PlainBlock(nn.Module):
    """x += ls1(attn(norm1(x))), x += ls2(mlp(norm2(x))), with the attn and mlp that a method provides."""

    def __init__(self, config: ViTConfig, attn: nn.Module, mlp: nn.Module, traits: BlockTraits) -> None:
        super().__init__()
        self.norm1 = traits.norm1.build(config.width)
        self.attn = attn
        self.ls1 = LayerScale(config.width) if traits.scale1 else nn.Identity()
        self.norm2 = traits.norm2.build(config.width)
        self.mlp = mlp
        self.ls2 = LayerScale(config.width) if traits.scale2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


def scale_affine(block: Mapping[str, Tensor], name: str, width: int) -> Affine:
    """The LayerScale ``ls1`` or ``ls2`` as an affine map; the identity if the block has none."""
    gamma = block.get(f"{name}.gamma")
    return Affine.eye(width) if gamma is None else Affine.diagonal(gamma)

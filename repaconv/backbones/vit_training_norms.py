"""The norms of a vision transformer as trained, LayerNorm or BatchNorm, and which part of them is folded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.tensor_names import depth_of
from repaconv.backbones.vit_layers import LayerNormSpec, NoNorm, NormSpec, TokenBatchNorm
from repaconv.method_api.settings import SettingsReader, one_of, small

NormKind = Literal["layer", "plain", "batch"]
"""``layer``: LayerNorm with affine. ``plain``: LayerNorm without affine, which has no keys. ``batch``: BatchNorm."""

LAYER_EPS = 1e-6
BATCH_EPS = 1e-5
"""torch's default, and that of every published network with BatchNorm on tokens."""


@dataclass(frozen=True)
class NormTraits:
    """One norm as trained: its kind, None if there is no norm, and its eps."""

    kind: NormKind | None
    eps: float

    @classmethod
    def read(cls, block: Mapping[str, Tensor], name: str, norms: NormSettings) -> NormTraits:
        """Read the norm from the keys of a block; if it has no keys, it is the one of `NormSettings.bare`."""
        if not any(key.startswith(f"{name}.") for key in block):
            return cls(norms.bare.get(name), norms.eps)
        kind = norm_kind(block, f"{name}.")
        return cls(kind, norms.batch_eps if kind == "batch" else norms.eps)

    def build(self, width: int) -> nn.Module:
        """Build the norm as trained; the identity if there is none."""
        if self.kind is None:
            return nn.Identity()
        if self.kind == "batch":
            return TokenBatchNorm(width, self.eps)
        return nn.LayerNorm(width, self.eps, elementwise_affine=self.kind == "layer")

    @property
    def spec(self) -> NormSpec:
        """The part of the norm that remains in the deploy form."""
        return NoNorm() if self.kind in (None, "batch") else LayerNormSpec(self.eps)

    def affine(self, block: Mapping[str, Tensor], name: str, width: int) -> Affine:
        """The part that is folded into the next linear layer: LayerNorm's affine, or a whole BatchNorm."""
        if self.kind in (None, "plain"):
            return Affine.eye(width)
        weight, bias = block[f"{name}.weight"], block[f"{name}.bias"]
        if self.kind == "layer":
            return Affine.diagonal(weight, bias)
        mean, variance = block[f"{name}.running_mean"], block[f"{name}.running_var"]
        return Affine.batchnorm(weight, bias, mean, variance, self.eps)


def norm_kind(tensors: Mapping[str, Tensor], prefix: str) -> Literal["layer", "batch"]:
    """The kind of the norm with this prefix: a BatchNorm if it has running statistics."""
    return "batch" if f"{prefix}running_mean" in tensors else "layer"


@dataclass(frozen=True)
class NormSettings:
    """The settings of a network's norms that no tensor shows.

    Attributes:
        eps: eps of the LayerNorms.
        batch_eps: eps of the BatchNorms.
        bare: The kind of a norm without keys, by its name; None if there is no norm.
    """

    eps: float
    batch_eps: float = BATCH_EPS
    bare: Mapping[str, NormKind | None] = field(default_factory=dict)


def read_norms(tensors: Mapping[str, Tensor], reader: SettingsReader, *, without: tuple[str, ...] = ()) -> NormSettings:
    """Read the norm settings of all blocks: ``norm_eps``, ``bn_eps``, and ``norm1`` and ``norm2`` if they have no keys.

    Args:
        tensors: The tensors by official names.
        reader: The user's settings; `read_vit_sizes` has already read ``norm_eps`` from the file.
        without: Norms that the method's blocks do not have.

    Raises:
        SettingNeeded: If a norm has no keys and the user does not give its kind.
    """
    bare: dict[str, NormKind | None] = dict.fromkeys(without)
    for name in ("norm1", "norm2"):
        lacking = [
            index
            for index in range(depth_of(tensors))
            if not any(key.startswith(f"blocks.{index}.{name}.") for key in tensors)
            and not (name == "norm1" and f"blocks.{index}.attn.norm.weight" in tensors)
        ]
        if lacking and name not in without:
            why = f"blocks.{lacking[0]} has no key of {name}: it has no norm, or a LayerNorm without weight and bias"
            bare[name] = "plain" if reader.need(name, one_of("plain", "none"), "plain", why) == "plain" else None
    return NormSettings(reader.take("norm_eps", small, LAYER_EPS), read_batch_eps(tensors, reader), bare)


_BATCHNORM = re.compile(r"^(?:fc_norm|norm|blocks\.\d+\.(?:attn\.norm|norm1|norm2))\.running_mean$")


def read_batch_eps(tensors: Mapping[str, Tensor], reader: SettingsReader) -> float:
    """Read the setting ``bn_eps`` if the final norm or a norm of a block's attention or MLP is a BatchNorm."""
    return reader.take("bn_eps", small, BATCH_EPS) if any(map(_BATCHNORM.match, tensors)) else BATCH_EPS

"""Norms as trained: LayerNorm with its affine or without, or BatchNorm before a linear layer; what of them folds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.tensor_names import depth_of
from repaconv.backbones.token_layers import LayerNormSpec, NoNorm, NormSpec, TokenBatchNorm
from repaconv.method_api.settings import Knobs, one_of, small

NormKind = Literal["layer", "plain", "batch"]
"""LayerNorm with its affine or without, which has no keys; BatchNorm."""

LAYER_EPS = 1e-6
BATCH_EPS = 1e-5
"""torch's own, and that of every published net with BatchNorm on tokens."""


@dataclass(frozen=True)
class NormTraits:
    """One norm as trained; ``kind`` None where there is none."""

    kind: NormKind | None
    eps: float

    @classmethod
    def read(cls, block: Mapping[str, Tensor], name: str, norms: Norms) -> NormTraits:
        """From the keys of a block; where it has none of that norm, as was told."""
        if not any(key.startswith(f"{name}.") for key in block):
            return cls(norms.bare.get(name), norms.eps)
        kind = norm_kind(block, f"{name}.")
        return cls(kind, norms.batch_eps if kind == "batch" else norms.eps)

    def build(self, width: int) -> nn.Module:
        """LayerNorm, BatchNorm over tokens, or nothing."""
        if self.kind is None:
            return nn.Identity()
        if self.kind == "batch":
            return TokenBatchNorm(width, self.eps)
        return nn.LayerNorm(width, self.eps, elementwise_affine=self.kind == "layer")

    @property
    def spec(self) -> NormSpec:
        """What of it stays in the deploy form."""
        return NoNorm() if self.kind in (None, "batch") else LayerNormSpec(self.eps)

    def affine(self, block: Mapping[str, Tensor], name: str, width: int) -> Affine:
        """What goes into the linear layer behind it: LayerNorm's affine, or all of a BatchNorm."""
        if self.kind in (None, "plain"):
            return Affine.eye(width)
        weight, bias = block[f"{name}.weight"], block[f"{name}.bias"]
        if self.kind == "layer":
            return Affine.diagonal(weight, bias)
        mean, variance = block[f"{name}.running_mean"], block[f"{name}.running_var"]
        return Affine.batchnorm(weight, bias, mean, variance, self.eps)


def norm_kind(tensors: Mapping[str, Tensor], prefix: str) -> Literal["layer", "batch"]:
    """A norm with running statistics is a BatchNorm."""
    return "batch" if f"{prefix}running_mean" in tensors else "layer"


@dataclass(frozen=True)
class Norms:
    """What no key tells of the norms of blocks.

    Attributes:
        eps: Of LayerNorms.
        batch_eps: Of BatchNorms.
        bare: What stands where a block has no key of the norm of that name, by name; None for nothing.
    """

    eps: float
    batch_eps: float = BATCH_EPS
    bare: Mapping[str, NormKind | None] = field(default_factory=dict)


def read_norms(tensors: Mapping[str, Tensor], knobs: Knobs, *, without: tuple[str, ...] = ()) -> Norms:
    """Of all blocks; takes ``norm1`` and ``norm2`` where one has no such key, and the eps that there are.

    Args:
        tensors: By official names.
        knobs: The user's, from which `read_frame` took what the file says.
        without: Norms that the method itself leaves out.

    Raises:
        Refused: If a norm has no keys and nobody says what it is.
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
            bare[name] = "plain" if knobs.need(name, one_of("plain", "none"), "plain", why) == "plain" else None
    return Norms(knobs.take("norm_eps", small, LAYER_EPS), read_batch_eps(tensors, knobs), bare)


_BATCHNORM = re.compile(r"^(?:fc_norm|norm|blocks\.\d+\.(?:attn\.norm|norm1|norm2))\.running_mean$")


def read_batch_eps(tensors: Mapping[str, Tensor], knobs: Knobs) -> float:
    """The knob ``bn_eps``, where a norm of the skeleton or around its parts is a BatchNorm."""
    return knobs.take("bn_eps", small, BATCH_EPS) if any(map(_BATCHNORM.match, tensors)) else BATCH_EPS

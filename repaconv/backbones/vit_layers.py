"""Layers of deploy blocks on tokens [B, N, d]: attention, feed-forward networks and norms, each with a spec.

Norms have no affine and scores no divisor, because folding puts both into the adjacent linear layer. A spec contains
everything that the layer's shape depends on, and builds the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from repaconv.backbones import shared_layers
from repaconv.backbones.shared_layers import ActivationKind, activation, attention, heads_of


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention.

    Attributes:
        heads: Number of heads H.
        qk: Width of a head's queries and keys.
        v: Width of a head's values.
        key: ``linear``: keys are projected; ``input``: the tokens themselves are the keys of every head (qk = d).
        value: The same for the values (v = d).
    """

    heads: int
    qk: int
    v: int
    key: Literal["linear", "input"] = "linear"
    value: Literal["linear", "input"] = "linear"
    kind: Literal["attention"] = "attention"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width."""
        return Attention(width, self)


class Attention(nn.Module):
    """proj(softmax(q k^T) v); the scores' divisor is in q. ``qkv`` has rows [q | k | v], head-major."""

    def __init__(self, width: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        keys = spec.qk if spec.key == "linear" else 0
        values = spec.v if spec.value == "linear" else 0
        self.sizes = [spec.heads * spec.qk, spec.heads * keys, spec.heads * values]
        self.qkv = nn.Linear(width, sum(self.sizes))
        self.proj = nn.Linear(spec.heads * spec.v, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        qkv = self.qkv(x)
        if len({*self.sizes}) == 1 and shared_layers.runs_on_gpu(x):
            mixed = attention(*heads_of(qkv, self.spec.heads))
        else:  # in this order, in which exported graphs have their nodes
            q, k, v = qkv.split(self.sizes, -1)
            key = self._heads(k) if self.spec.key == "linear" else x.unsqueeze(1)  # [B, H or 1, N, qk]
            value = self._heads(v) if self.spec.value == "linear" else x.unsqueeze(1)
            mixed = attention(self._heads(q), key, value)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.spec.heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward network: fc2(act(fc1(x)))."""

    hidden: int
    act: ActivationKind = "GELU"
    kind: Literal["mlp"] = "mlp"

    def build(self, width: int) -> nn.Module:
        """Build the module, for tokens of this width."""
        return Mlp(width, self)


class Mlp(nn.Module):
    """fc2(act(fc1(x))) on the last axis."""

    def __init__(self, width: int, spec: MlpSpec) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, spec.hidden)
        self.act = activation(spec.act)
        self.fc2 = nn.Linear(spec.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


@dataclass(frozen=True)
class SwiGluSpec:
    """A gated feed-forward network: w3(silu(a) * b) with a, b the halves of w12(x), as in DINOv2 giant."""

    hidden: int
    kind: Literal["swiglu"] = "swiglu"

    def build(self, width: int) -> nn.Module:
        """Build the module, for tokens of this width."""
        return SwiGlu(width, self)


class SwiGlu(nn.Module):
    """w3(silu(a) * b) with a, b the halves of w12(x), on the last axis."""

    def __init__(self, width: int, spec: SwiGluSpec) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(width, 2 * spec.hidden), nn.Linear(spec.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        a, b = self.w12(x).chunk(2, -1)
        out: Tensor = self.w3(nn.functional.silu(a) * b)
        return out


@dataclass(frozen=True)
class IdleMlpSpec:
    """RePaViT's folded FFN: ``active`` activated channels; the idle channels and the shortcut are one matrix."""

    active: int
    act: ActivationKind = "GELU"
    kind: Literal["idle-mlp"] = "idle-mlp"

    def build(self, width: int) -> nn.Module:
        """Build the module, for tokens of this width."""
        return IdleMlp(width, self)


class IdleMlp(nn.Module):
    """idle(x) + fc2(act(fc1(x))), or idle(x) without activated channels; ``idle`` includes the shortcut."""

    def __init__(self, width: int, spec: IdleMlpSpec) -> None:
        super().__init__()
        self.idle = nn.Linear(width, width)
        self.active = spec.active
        if spec.active:
            self.fc1 = nn.Linear(width, spec.active)
            self.act = activation(spec.act)
            self.fc2 = nn.Linear(spec.active, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d], shortcut included."""
        out: Tensor = self.idle(x) + self.fc2(self.act(self.fc1(x))) if self.active else self.idle(x)
        return out


@dataclass(frozen=True)
class NoNorm:
    """No norm: there was none, or a BatchNorm was folded into the next linear layer."""

    kind: Literal["none"] = "none"

    def build(self, width: int) -> nn.Module:
        """Build the identity."""
        return nn.Identity()


@dataclass(frozen=True)
class LayerNormSpec:
    """LayerNorm over channels; it has no affine if that is folded into the next linear layer."""

    eps: float
    affine: bool = False
    kind: Literal["layer"] = "layer"

    def build(self, width: int) -> nn.Module:
        """Build the module, for tokens of this width."""
        return nn.LayerNorm(width, self.eps, elementwise_affine=self.affine)


class TokenBatchNorm(nn.Module):
    """BatchNorm in eval mode over the channels of tokens [B, N, d]; only in training forms.

    It has the keys of nn.BatchNorm1d except ``num_batches_tracked``, which eval mode does not use.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        return self.normalise(x.transpose(1, 2)).transpose(1, 2)

    def normalise(self, x: Tensor) -> Tensor:
        """Normalize [B, d, ...] over its channels d."""
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


class ImageBatchNorm(TokenBatchNorm):
    """BatchNorm in eval mode over the channels of images [B, C, H, W]; only in training forms."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return self.normalise(x)


class LayerScale(nn.Module):
    """LayerScale, x * gamma, with the key of timm and DINOv2; only in training forms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        return x * self.gamma


NormSpec = LayerNormSpec | NoNorm

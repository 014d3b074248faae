"""Modules that backbones share: attention, activations, norms and feed-forward networks of convolutional families."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["GN", "LN2d"]
ActivationKind = Literal["GELU", "GELU-tanh", "QuickGELU", "ReLU", "SiLU"]

# A power of two: variance 1 - 2^-17 and eps 2^-17 add up to exactly 1 in FP32 and FP64.
_BATCHNORM_EPS = 2.0**-17


def runs_on_gpu(x: Tensor) -> bool:
    """Whether to compute what is fastest in torch on a GPU: fused kernels, few calls. Not for an export to a graph."""
    return x.is_cuda and not torch.compiler.is_exporting()


def attention(q: Tensor, k: Tensor, v: Tensor, size: Tensor | None = None) -> Tensor:
    """softmax(q k^T + log size) v of [B, H, N, dh]; the divisor is in q.

    Keys and values may be [B, 1, N, dh], for all heads. ``size`` [B, N, 1] is how many tokens each key stands for.
    """
    if runs_on_gpu(q):
        return fused_attention(q, k, v, size)
    scores = q @ k.transpose(-2, -1)
    if size is not None:
        scores = scores + _of_scores(size)
    return scores.softmax(-1) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor, size: Tensor | None = None) -> Tensor:
    """The same as `attention`, by torch's fused attention."""
    heads = q.shape[1]
    k = k if k.shape[1] == heads else k.expand(-1, heads, -1, -1)
    v = v if v.shape[1] == heads else v.expand(-1, heads, -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if size is None else _of_scores(size), scale=1.0)


def _of_scores(size: Tensor) -> Tensor:
    """What sizes [B, N, 1] of keys add to the scores, [B, 1, 1, N]."""
    return size.log().transpose(1, 2).unsqueeze(1)


def heads_of(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split [B, N, q | k | v], equally wide, into q, k and v of all heads, [B, H, N, dh] each.

    On a GPU with as few calls as possible, since a small network takes as long there as the launches of its kernels.
    """
    if runs_on_gpu(qkv):
        return torch.unbind(qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4))
    return tuple(part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1))


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the activation of OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        return x * torch.sigmoid(1.702 * x)


def activation(kind: ActivationKind) -> nn.Module:
    """Build the activation of that name; GELU is the exact one, by erf."""
    modules: dict[str, nn.Module] = {
        "GELU": nn.GELU(),
        "GELU-tanh": nn.GELU(approximate="tanh"),
        "QuickGELU": QuickGELU(),
        "ReLU": nn.ReLU(),
        "SiLU": nn.SiLU(),
    }
    return modules[kind]


class Norm(nn.Module):
    """A norm of [B, C, H, W], with or without an affine over channels.

    ``GN`` has one mean and variance per sample, over C, H and W (GroupNorm with one group). ``LN2d`` has one per pixel,
    over C. Both use the biased variance.
    """

    def __init__(self, kind: NormKind, channels: int, eps: float, *, affine: bool) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        if self.kind == "GN" and self.weight is None and not runs_on_gpu(x):
            # equal to group_norm, which the exporter would translate with an additional product with ones
            return F.instance_norm(x.reshape(x.shape[0], 1, -1), eps=self.eps).view_as(x)
        if self.kind == "GN":
            return F.group_norm(x, 1, self.weight, self.bias, self.eps)
        tokens = F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), self.weight, self.bias, self.eps)
        return tokens.permute(0, 3, 1, 2)


class NormThenScale(nn.Module):
    """A norm followed by its affine, which is a BatchNorm of mean 0 and variance 1.

    Its output equals that of ``Norm(affine=True)``, but ONNX Runtime runs one node instead of Mul and Add
    (``benchmarks/riformer_equivalent_graphs.py``).
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, kind: NormKind, channels: int, eps: float) -> None:
        super().__init__()
        self.norm = Norm(kind, channels, eps, affine=False)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels), persistent=False)
        self.register_buffer("variance", torch.full((channels,), 1 - _BATCHNORM_EPS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        if self.norm.kind == "GN" and runs_on_gpu(x):
            return F.group_norm(x, 1, self.weight, self.bias, self.norm.eps)
        return F.batch_norm(
            self.norm(x), self.mean, self.variance, self.weight, self.bias, training=False, eps=_BATCHNORM_EPS
        )


class ConvMlp(nn.Module):
    """A feed-forward network of 1x1 convolutions: fc2(act(fc1(x))) on [B, C, H, W]."""

    def __init__(self, channels: int, hidden: int, act: ActivationKind) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.act = activation(act)
        self.fc2 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class IdleConvMlp(nn.Module):
    """RePaViT's folded FFN in 1x1 convolutions: idle(x) + fc2(act(fc1(x))), or idle(x) without activated channels.

    ``idle`` includes the shortcut.
    """

    def __init__(self, channels: int, active: int, act: ActivationKind) -> None:
        super().__init__()
        self.idle = nn.Conv2d(channels, channels, 1)
        self.active = active
        if active:
            self.fc1 = nn.Conv2d(channels, active, 1)
            self.act = activation(act)
            self.fc2 = nn.Conv2d(active, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], shortcut included."""
        out: Tensor = self.idle(x) + self.fc2(self.act(self.fc1(x))) if self.active else self.idle(x)
        return out


class PatchEmbed(nn.Module):
    """Embed the patches of images as tokens, by a strided convolution named ``proj``."""

    def __init__(self, channels: int, width: int, patch: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, n, d]."""
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out

"""RePaViT (arXiv 2505.21847): a vision transformer whose FFNs leave some channels idle, i.e. without activation.

The training-time FFN, with h = fc1(norm1(x)) and the first A of H channels activated (eq. 2, both norms BatchNorm):

    y = x + scale fc2(norm2(concat[gelu(h[:A]), h[A:]]))

The idle channels pass through linear layers only, so that these and the shortcut fold into one matrix (eqs. 3-6):

    up = fc1 norm1,   down = scale fc2 norm2,
    y = down_act gelu(up_act x) + (I + down_idle up_idle) x + down's bias.

The inference-time FFN is `IdleMlp` of `repaconv.backbones.vit_layers` on tokens, and `IdleConvMlp` of
`repaconv.backbones.shared_layers` on images. If A = H, no channel is idle and it is an ordinary MLP. If A = 0, it is
one matrix. The following is folded in addition to the paper, exactly: the affines of the attention's and of the final
norm, and the divisor of the scores, into the adjacent linear layers.

No tensor shows A. It follows from ``args`` by the official rounding, or from the *residual test*. In training, norm1's
output has the batch mean norm1.bias. An idle channel j therefore has exactly
running_mean2[j] = fc1.W[j] norm1.bias + fc1.b[j], and the running mean of an activated one is higher by E[gelu(-h)].
An A that the statistics contradict is refused: comparing the training-time with the folded network would not detect it,
since both would use the same wrong A.

Where paper, code and mathematics disagree: PoolFormer's LayerScale also scales fc2's bias, which the official
reparameterization ignores (its error exceeds the range of the logits). With channel_idle=False all channels are
activated, which the official reparameterization ignores as well. Eqs. 3-6 omit biases and BatchNorm's shifts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.shared_layers import ActivationKind, activation
from repaconv.backbones.vit_block_folding import named_tensors
from repaconv.backbones.vit_layers import ImageBatchNorm, TokenBatchNorm


class ChannelIdleMlp(nn.Module):
    """The FFN as trained, without its shortcut: linear on tokens [B, N, C], or 1x1 convolutions on [B, C, H, W]."""

    def __init__(
        self,
        width: int,
        hidden: int,
        active: int,
        eps: float,
        *,
        conv: bool = False,
        layer_scale: bool = False,
        act: ActivationKind = "GELU",
    ) -> None:
        super().__init__()
        self.act = activation(act)
        norm = ImageBatchNorm if conv else TokenBatchNorm
        self.active, self.axis = active, 1 if conv else -1
        self.norm1, self.norm2 = norm(width, eps), norm(hidden, eps)
        self.fc1: nn.Module = nn.Conv2d(width, hidden, 1) if conv else nn.Linear(width, hidden)
        self.fc2: nn.Module = nn.Conv2d(hidden, width, 1) if conv else nn.Linear(hidden, width)
        self.ls = nn.Parameter(torch.ones(width)) if layer_scale else None

    def forward(self, x: Tensor) -> Tensor:
        """fc2(norm2(concat[act(h[:A]), h[A:]])), in the shape of x."""
        h = self.fc1(self.norm1(x))
        active, idle = h.split([self.active, h.shape[self.axis] - self.active], self.axis)
        y: Tensor = self.fc2(self.norm2(torch.cat([self.act(active), idle], self.axis)))
        return y if self.ls is None else self.ls.view(-1, *[1] * (x.ndim - 2 if self.axis == 1 else 0)) * y


def fold_ffn(block: Mapping[str, Tensor], active: int, eps: float, scale: Affine) -> dict[str, Affine]:
    """Fold one FFN into ``idle`` (which includes the shortcut), ``fc1`` and ``fc2``; only the last two if A = H.

    ``idle`` includes fc2's bias. The bias of the returned ``fc2`` must then not be used.

    Args:
        block: The weights of norm1, fc1, norm2, fc2 and, if there is one, ls, by their names within the FFN.
        active: A, the number of activated channels.
        eps: eps of both BatchNorms.
        scale: The LayerScale around the FFN.
    """
    norm1, norm2 = _batchnorm(block, "norm1", eps), _batchnorm(block, "norm2", eps)
    if "ls" in block:
        scale = scale @ Affine.diagonal(block["ls"])
    up = linear_layer(block, "fc1") @ norm1  # eq. 3
    down = scale @ linear_layer(block, "fc2") @ norm2  # eq. 3
    if active == up.out_width:
        return {"fc1": up, "fc2": down}
    (up_act, up_idle), (down_act, down_idle) = up.split_out(active), down.split_in(active)
    idle = Affine.eye(up.in_width) + down_idle @ up_idle  # eq. 5
    return {"idle": Affine(idle.weight, idle.bias + down.bias), "fc1": up_act, "fc2": down_act}


def ffn_weights(parts: Mapping[str, Affine], *, conv: bool) -> dict[str, Tensor]:
    """The deploy FFN's tensors by name. With ``idle``, fc2 has no bias and empty tensors are left out."""
    idle = "idle" in parts
    tensors = named_tensors(parts, without_bias=("fc2",) if idle else ())
    shaped = {name: w[:, :, None, None] if conv and w.ndim == 2 else w for name, w in tensors.items()}
    return {name: w for name, w in shaped.items() if w.numel() or not idle}


def linear_layer(block: Mapping[str, Tensor], name: str) -> Affine:
    """Read fc1 or fc2, which are linear layers or 1x1 convolutions, as an affine map."""
    weight, bias = block[f"{name}.weight"], block.get(f"{name}.bias")
    return Affine.conv1x1(weight, bias) if weight.ndim == 4 else Affine.linear(weight, bias)


def _batchnorm(block: Mapping[str, Tensor], name: str, eps: float) -> Affine:
    weight, bias, mean, variance = (
        block[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
    )
    return Affine.batchnorm(weight, bias, mean, variance, eps)

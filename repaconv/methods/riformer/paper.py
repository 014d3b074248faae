"""RIFormer (CVPR 2023, arXiv 2304.05659): a MetaFormer trained with an affine in place of the token mixer.

The training block, with n1 = LN(x), an affine A(z) = s z + t per channel, and LayerScale l1, l2:

    x += l1 (A(n1) - n1)                  eq. 1: s M + t - M
    x += l2 fc2(act(fc1(LN(x))))

The deploy block has no mixer: the paper's eq. 4 puts the affine into the norm before it,

    gamma' = gamma (s - 1),   beta' = beta (s - 1) + t;

it is `IdentityMixerBlock` of `repaconv.backbones.metaformer`.

Beyond the paper, all exact: l1 goes into the same norm, l2 into fc2, the second norm's affine into fc1,
and the final norm's affine through the pooling, which is linear, into the head. The norms' statistics
stay: they depend on the input.

Where paper and code disagree: eq. 2 subtracts the block's input, code and eqs. 1 and 4 the normalised
input. Only the latter folds, and it is what was trained. LN is GroupNorm with one group unless the run's
configuration says LN2d (per pixel); the two have the same keys and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.metaformer import MetaFormerConfig
from repaconv.backbones.norms_and_ffns import ConvMlp, Norm


class AffineMixer(nn.Module):
    """eq. 1: A(z) - z, with the affine as a depthwise 1x1 convolution, as the official code has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine = nn.Conv2d(channels, channels, 1, groups=channels)

    def forward(self, z: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        out: Tensor = self.affine(z) - z
        return out


class RIFormerBlock(nn.Module):
    """The block as trained, or (``deployed``) as the official switch_to_deploy leaves it."""

    def __init__(self, config: MetaFormerConfig, stage: int, index: int, *, layer_scale: bool, deployed: bool) -> None:
        super().__init__()
        width = config.widths[stage]
        norm = partial(Norm, config.norm, width, config.eps, affine=True)
        self.layer_scale_1 = nn.Parameter(torch.ones(width)) if layer_scale else None
        self.layer_scale_2 = nn.Parameter(torch.ones(width)) if layer_scale else None
        if deployed:
            self.norm_reparam = norm()
        else:
            self.norm1 = norm()
            self.token_mixer = AffineMixer(width)
        self.deployed = deployed
        self.norm2 = norm()
        self.mlp = ConvMlp(width, config.hidden[stage], config.act)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        mixed = self.norm_reparam(x) if self.deployed else self.token_mixer(self.norm1(x))
        x = x + self._scaled(self.layer_scale_1, mixed)
        return x + self._scaled(self.layer_scale_2, self.mlp(self.norm2(x)))

    @staticmethod
    def _scaled(layer_scale: Tensor | None, branch: Tensor) -> Tensor:
        return branch if layer_scale is None else layer_scale[:, None, None] * branch


def fold_block(block: Mapping[str, Tensor]) -> dict[str, Affine]:
    """One block's weights by the names within it -> norm1, fc1, fc2 of the deploy block."""
    norm2 = Affine.diagonal(block["norm2.weight"], block["norm2.bias"])
    fc1 = Affine.conv1x1(block["mlp.fc1.weight"], block["mlp.fc1.bias"])
    fc2 = Affine.conv1x1(block["mlp.fc2.weight"], block["mlp.fc2.bias"])
    identity = Affine.eye(norm2.out_width)
    scale1 = Affine.diagonal(block["layer_scale_1"]) if "layer_scale_1" in block else identity
    scale2 = Affine.diagonal(block["layer_scale_2"]) if "layer_scale_2" in block else identity
    if "norm_reparam.weight" in block:
        mixed = Affine.diagonal(block["norm_reparam.weight"], block["norm_reparam.bias"])
    else:
        norm1 = Affine.diagonal(block["norm1.weight"], block["norm1.bias"])
        affine = Affine.depthwise1x1(block["token_mixer.affine.weight"], block["token_mixer.affine.bias"])
        mixed = (affine - identity) @ norm1  # eq. 4
    return {"norm1": scale1 @ mixed, "mlp.fc1": fc1 @ norm2, "mlp.fc2": scale2 @ fc2}


def fold_head(norm: Affine, head: Affine) -> Affine:
    """head(mean(norm(n))) = (head @ norm)(mean(n)): pooling is linear and acts on no channel."""
    return head @ norm

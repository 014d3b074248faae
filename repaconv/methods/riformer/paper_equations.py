"""RIFormer (CVPR 2023, arXiv 2304.05659): a MetaFormer trained with an affine transformation as its token mixer.

The training-time block, with n1 = LN(x), an affine A(z) = s z + t per channel, and LayerScales l1, l2:

    x += l1 (A(n1) - n1)                  eq. 1: s M + t - M
    x += l2 fc2(act(fc1(LN(x))))

The inference-time block has no token mixer. The paper's eq. 4 folds the affine into the norm before it:

    gamma' = gamma (s - 1),   beta' = beta (s - 1) + t

The block is `IdentityMixerBlock` of `repaconv.backbones.metaformer`.

The following is folded in addition to the paper, exactly: l1 into the same norm, l2 into fc2, the second norm's affine
into fc1, and the final norm's affine into the head, through the pooling, which is linear. The norms' statistics are not
folded, because they depend on the input.

Paper and official code disagree in one point. Eq. 2 subtracts the block's input; the code and eqs. 1 and 4 subtract the
normalized input. The networks were trained as in the code, and only that form can be folded. LN is GroupNorm with one
group, or LN2d (per pixel) if the run's configuration says so; both have the same keys and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.metaformer import MetaFormerConfig
from repaconv.backbones.shared_layers import ConvMlp, Norm


class AffineMixer(nn.Module):
    """eq. 1: A(z) - z. The affine is a depthwise 1x1 convolution, as in the official code."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine = nn.Conv2d(channels, channels, 1, groups=channels)

    def forward(self, z: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        out: Tensor = self.affine(z) - z
        return out


class RIFormerBlock(nn.Module):
    """The block as trained; if ``deployed``, as the official switch_to_deploy makes it."""

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
    """Fold one block's weights, by their names within the block, into norm1, fc1 and fc2 of the deploy block."""
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
    """Fold the final norm's affine into the head: head(mean(norm(n))) = (head @ norm)(mean(n)).

    This is exact because pooling is linear and does not mix channels.
    """
    return head @ norm

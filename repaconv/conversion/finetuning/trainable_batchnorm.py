"""BatchNorm over tokens that can be trained. The layers of a loaded training-time network only evaluate it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from repaconv.backbones.vit_layers import TokenBatchNorm

MOMENTUM = 0.1


class LearningBatchNorm(TokenBatchNorm):
    """BatchNorm over the channels of tokens [B, N, d]. In train mode it uses the batch statistics and updates the
    running ones."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.momentum = MOMENTUM

    def normalise(self, x: Tensor) -> Tensor:
        """[B, d, ...] -> [B, d, ...]."""
        if not self.training:
            return super().normalise(x)
        return nn.functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=True,
            momentum=self.momentum,
            eps=self.eps,
        )


def with_trainable_batchnorm(net: nn.Module) -> nn.Module:
    """Replace the network's BatchNorms over tokens by trainable ones."""
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if type(child) is TokenBatchNorm:
                learns = LearningBatchNorm(len(child.weight), child.eps)
                learns.load_state_dict(child.state_dict())
                setattr(parent, name, learns)
    return net


@torch.no_grad()
def recompute_statistics(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Recompute the statistics of every BatchNorm with the current weights, over all of these images.

    Running statistics lag behind the weights during training. For averaged weights there are none at all.
    """
    norms = [module for module in net.modules() if isinstance(module, LearningBatchNorm)]
    if not norms:
        return
    net.train()
    for count, images in enumerate(batches, 1):
        for norm in norms:
            norm.momentum = 1 / count
        net(images)
    for norm in norms:
        norm.momentum = MOMENTUM
    net.eval()

"""RepVGG (CVPR 2021, arXiv 2101.03697) and MobileOne (CVPR 2023, arXiv 2206.04040): branches that are one convolution.

A training block sums branches over one input M, each with a BatchNorm of its own:

    RepVGG       bn(M * W3) + bn(M * W1) + bn(M)                 eq. 1; the last where width and size stay
    MobileOne    sum_k bn(M * W_k) + bn(M * W1) + bn(M)          k by k or pointwise; W1 beside k > 1 alone

and puts squeeze-and-excitation, where it has that, and ReLU behind the sum. The deploy block (`DeployBlock` of
`repaconv.backbones.repvgg_mobileone`) has one convolution: each BatchNorm goes into the convolution before it,

    W' = gamma / sigma W,   b' = beta - mu gamma / sigma         eqs. 3-4

bn(M) being that of an identity, a 1x1 convolution with as many groups as channels; then all are brought to one kernel,
the smaller in the centre of the larger, and added. A 1x1 convolution has no padding and a k x k one k // 2, so both
reach the same border.

What no tensor tells: strides (the official code halves the size where a stage begins; a block of one width without an
identity branch proves it, one with it the opposite), eps, ReLU. Groups are the input's width over the weight's.
RepVGGplus is another net: auxiliary heads, and squeeze-and-excitation behind the ReLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.algebra.convolution_kernels import Kernel, eye
from repaconv.backbones.repvgg_mobileone import NAMES, Activated, Layout, RepBlock


class ConvNorm(nn.Module):
    """A convolution without bias and its BatchNorm."""

    def __init__(self, block: RepBlock, kernel: int, eps: float) -> None:
        super().__init__()
        self.conv = block.conv(kernel, bias=False)
        self.bn = nn.BatchNorm2d(block.width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = self.bn(self.conv(x))
        return out


class TrainingBlock(Activated):
    """The block as trained: its branches, summed."""

    def __init__(self, layout: Layout, block: RepBlock, convs: int, eps: float) -> None:
        super().__init__(layout, block)
        names, parts = NAMES[layout], [ConvNorm(block, block.kernel, eps) for _ in range(convs)]
        self.add_module(names.conv, parts[0] if layout == "repvgg" else nn.ModuleList(parts))
        self.branches = [names.conv] if layout == "repvgg" else [f"{names.conv}.{k}" for k in range(convs)]
        if block.kernel > 1:
            self.add_module(names.scale, ConvNorm(block, 1, eps))
            self.branches.append(names.scale)
        if has_identity(block):
            self.add_module(names.identity, nn.BatchNorm2d(block.width, eps))
            self.branches.append(names.identity)

    def convolved(self, x: Tensor) -> Tensor:
        """eq. 1: [B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = reduce(add, (self.get_submodule(name)(x) for name in self.branches))
        return out


def has_identity(block: RepBlock) -> bool:
    """Whether a training block has the branch bn(M): where it keeps width and size."""
    return block.in_width == block.width and block.stride == 1


def fold_branch(tensors: Mapping[str, Tensor], norm: str, block: RepBlock, eps: float) -> Kernel:
    """eqs. 3-4 for the branch of that BatchNorm, by the names within the block."""
    gamma, beta, mu, variance = (tensors[f"{norm}.{of}"] for of in ("weight", "bias", "running_mean", "running_var"))
    bn = Affine.batchnorm(gamma, beta, mu, variance, eps)
    weight, branch = tensors.get(f"{norm.removesuffix('.bn')}.conv.weight"), eye(block.width, rank=4)
    if weight is not None:
        pads, strides = (weight.shape[-1] // 2,) * 4, (block.stride,) * 2
        branch = Kernel.convolution(weight.double().numpy(), groups=block.groups, strides=strides, pads=pads)
    return branch.then(bn.weight.numpy(), bn.bias.numpy())


def fold_block(tensors: Mapping[str, Tensor], block: RepBlock, eps: float) -> Kernel:
    """All branches of a block, by the names within it, as one convolution."""
    norms = [name.removesuffix(".running_var") for name in tensors if name.endswith(".running_var")]
    return reduce(add, (fold_branch(tensors, norm, block, eps) for norm in sorted(norms)))

"""RepVGG (CVPR 2021, arXiv 2101.03697) and MobileOne (CVPR 2023, arXiv 2206.04040): branches become one convolution.

The training-time block sums branches over one input M. Each branch has its own BatchNorm:

    RepVGG       bn(M * W3) + bn(M * W1) + bn(M)                 eq. 1; bn(M) only if width and stride are unchanged
    MobileOne    sum_k bn(M * W_k) + bn(M * W1) + bn(M)          W_k: k x k or pointwise; W1 only next to k > 1

The sum is followed by squeeze-and-excitation, if the block has it, and ReLU. The inference-time block (`DeployBlock` of
`repaconv.backbones.repvgg_mobileone`) has one convolution. Each BatchNorm is folded into the convolution before it:

    W' = gamma / sigma W,   b' = beta - mu gamma / sigma         eqs. 3-4

For bn(M) that convolution is the identity, a 1x1 convolution with one group per channel. The kernels are then
zero-padded to the size of the largest, with the smaller one in the center, and added. A 1x1 convolution has padding 0
and a k x k one k // 2, so that all have the same output positions.

No tensor shows strides, eps and ReLU. In the official code the first block of a stage has stride 2. In a block whose
input and output width are equal, an identity branch shows stride 1, and its absence stride 2. The number of groups is
the input width divided by the weight's input width.

Two networks differ from RepVGG in their blocks. In RepVGGplus the squeeze-and-excitation follows the ReLU, and its
auxiliary heads are for training. In QARepVGG (arXiv 2212.01593) only the branch of W3 has a BatchNorm of its own, and
another one follows the sum: bn(bn(M * W3) + M * W1 + M).
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
    """One branch: a convolution without bias, and its BatchNorm."""

    def __init__(self, block: RepBlock, kernel: int, eps: float) -> None:
        super().__init__()
        self.conv = block.conv(kernel, bias=False)
        self.bn = nn.BatchNorm2d(block.width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = self.bn(self.conv(x))
        return out


class TrainingBlock(Activated):
    """The block as trained: the sum of its branches."""

    def __init__(self, layout: Layout, block: RepBlock, convs: int, eps: float, *, joint_norm: bool = False) -> None:
        super().__init__(layout, block)
        self.bn = nn.BatchNorm2d(block.width, eps) if joint_norm else None
        names, parts = NAMES[layout], [ConvNorm(block, block.kernel, eps) for _ in range(convs)]
        self.add_module(names.conv, parts[0] if layout == "repvgg" else nn.ModuleList(parts))
        self.branches = [names.conv] if layout == "repvgg" else [f"{names.conv}.{k}" for k in range(convs)]
        if block.kernel > 1:
            self.add_module(names.scale, block.conv(1, bias=False) if joint_norm else ConvNorm(block, 1, eps))
            self.branches.append(names.scale)
        if has_identity(block):
            self.add_module(names.identity, nn.Identity() if joint_norm else nn.BatchNorm2d(block.width, eps))
            self.branches.append(names.identity)

    def convolved(self, x: Tensor) -> Tensor:
        """eq. 1: [B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = reduce(add, (self.get_submodule(name)(x) for name in self.branches))
        return out if self.bn is None else self.bn(out)


def has_identity(block: RepBlock) -> bool:
    """Whether a training block has the branch bn(M): if it changes neither width nor size."""
    return block.in_width == block.width and block.stride == 1


def fold_branch(tensors: Mapping[str, Tensor], norm: str, block: RepBlock, eps: float) -> Kernel:
    """eqs. 3-4: fold the BatchNorm named ``norm`` into the convolution of its branch, by names within the block."""
    branch, weight = eye(block.width, rank=4), tensors.get(f"{norm.removesuffix('.bn')}.conv.weight")
    return _normalized(branch if weight is None else _convolution(weight, block), tensors, norm, eps)


def _convolution(weight: Tensor, block: RepBlock) -> Kernel:
    pads, strides = (weight.shape[-1] // 2,) * 4, (block.stride,) * 2
    return Kernel.convolution(weight.double().numpy(), groups=block.groups, strides=strides, pads=pads)


def _normalized(kernel: Kernel, tensors: Mapping[str, Tensor], norm: str, eps: float) -> Kernel:
    gamma, beta, mu, variance = (tensors[f"{norm}.{of}"] for of in ("weight", "bias", "running_mean", "running_var"))
    bn = Affine.batchnorm(gamma, beta, mu, variance, eps)
    return kernel.then(bn.weight.numpy(), bn.bias.numpy())


def fold_block(tensors: Mapping[str, Tensor], block: RepBlock, eps: float) -> Kernel:
    """Fold all branches of a block into one convolution; ``tensors`` are by their names within the block."""
    norms = [name.removesuffix(".running_var") for name in tensors if name.endswith(".running_var")]
    if "bn" in norms:  # QARepVGG
        dense = fold_branch(tensors, "rbr_dense.bn", block, eps)
        shortcut = [eye(block.width, rank=4)] if has_identity(block) else []
        branches = [dense, _convolution(tensors["rbr_1x1.weight"], block), *shortcut]
        return _normalized(reduce(add, branches), tensors, "bn", eps)
    return reduce(add, (fold_branch(tensors, norm, block, eps) for norm in sorted(norms)))

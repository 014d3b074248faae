"""Training-time blocks of re-parameterized families, and the layer that each becomes, by the equations of the papers.

Every block is a `Block`: `forward` is the training-time structure, `deployed` the inference-time layer. It does not use
repaconv's algebra, so that it can check it. Families that an installed package provides are not here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A training-time block that has an inference-time form."""

    def deployed(self) -> nn.Module:
        """What the family's own conversion leaves of it."""
        raise NotImplementedError


@torch.no_grad()
def deployed(net: nn.Module) -> nn.Module:
    """A copy of the network in which every block has its inference-time form."""
    if isinstance(net, Block):
        return net.deployed().eval()
    own = copy.copy(net)
    own._modules = {name: part and deployed(part) for name, part in net._modules.items()}
    return own


def layer(weight: Tensor, bias: Tensor | None, like: nn.Conv2d, padding: Sequence[int] | int) -> nn.Conv2d:
    """A convolution of this weight, with stride and groups of another one."""
    width = weight.shape[1] * like.groups
    made = nn.Conv2d(
        width, len(weight), tuple(weight.shape[2:]), like.stride, padding, 1, like.groups, bias is not None
    )
    made.weight.data = weight.contiguous()
    if bias is not None and made.bias is not None:
        made.bias.data = bias
    return made


def normed(*args: int, **more: object) -> nn.Sequential:
    """A convolution without a bias, and BatchNorm."""
    conv = nn.Conv2d(*args, bias=False, **more)  # type: ignore[arg-type]
    return nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels))


def affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


def merged(pair: nn.Sequential) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with the BatchNorm behind it."""
    conv, norm = pair
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    scale, shift = affine(norm)
    return conv.weight * scale.view(-1, 1, 1, 1), shift if conv.bias is None else shift + conv.bias * scale


def centered(weight: Tensor, size: tuple[int, int], dilation: int = 1) -> Tensor:
    """A kernel in the middle of a larger one of zeros, its taps `dilation` apart."""
    tall, wide = (dilation * (length - 1) + 1 for length in weight.shape[2:])
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    grown = weight.new_zeros(*weight.shape[:2], *size)
    grown[:, :, top : top + tall : dilation, left : left + wide : dilation] = weight
    return grown


def identity(width: int, groups: int, like: Tensor) -> Tensor:
    """The 1x1 kernel that gives its input."""
    return torch.eye(width // groups).to(like).repeat(groups, 1)[:, :, None, None]


def bordered(x: Tensor, value: Tensor, pad: int) -> Tensor:
    """An image in a border of one number per channel."""
    out, value = F.pad(x, [pad] * 4), value.view(1, -1, 1, 1)
    out[:, :, :pad, :] = value
    out[:, :, -pad:, :] = value
    out[:, :, :, :pad] = value
    out[:, :, :, -pad:] = value
    return out


# --- ACNet (Ding et al. 2019): a square kernel, a row and a column.


class Asymmetric(Block):
    """y = BN(K3 x) + BN(K1x3 x) + BN(K3x1 x)."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.square = normed(width, out, 3, stride, 1)
        self.row = normed(width, out, (1, 3), stride, (0, 1))  # type: ignore[arg-type]
        self.column = normed(width, out, (3, 1), stride, (1, 0))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x) + self.row(x) + self.column(x)

    def deployed(self) -> nn.Module:
        parts = [merged(pair) for pair in (self.square, self.row, self.column)]
        weight = sum(centered(weight, (3, 3)) for weight, _ in parts)
        return layer(weight, sum(bias for _, bias in parts), self.square[0], 1)  # type: ignore[arg-type]


# --- QARepVGG (Chu et al. 2022, eq. 9): the norm of the 1x1 branch is gone, one follows the sum.


class QuantizationAware(Block):
    """y = BN(BN(K3 x) + K1 x + x)."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.square, self.point = normed(width, out, 3, stride, 1), nn.Conv2d(width, out, 1, stride, bias=False)
        self.alike, self.norm = width == out and stride == 1, nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        total = self.square(x) + self.point(x)
        return self.norm(total + x if self.alike else total)

    def deployed(self) -> nn.Module:
        weight, bias = merged(self.square)
        weight = weight + centered(self.point.weight, (3, 3))
        if self.alike:
            weight = weight + centered(identity(len(weight), 1, weight), (3, 3))
        scale, shift = affine(self.norm)
        return layer(weight * scale.view(-1, 1, 1, 1), bias * scale + shift, self.point, 1)


# --- RepLKNet (Ding et al. 2022) and UniRepLKNet (Ding et al. 2024): depthwise kernels next to a large one.


class LargeKernel(Block):
    """y = BN(K x) + BN(k x), depthwise."""

    def __init__(self, width: int, size: int, small: int) -> None:
        super().__init__()
        self.large = normed(width, width, size, 1, size // 2, groups=width)
        self.small = normed(width, width, small, 1, small // 2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) + self.small(x)

    def deployed(self) -> nn.Module:
        (weight, bias), (small, more), size = merged(self.large), merged(self.small), self.large[0].kernel_size
        return layer(weight + centered(small, size), bias + more, self.large[0], self.large[0].padding)


class Dilated(Block):
    """y = BN(K x) + sum_r BN(k_r x), depthwise, the taps of k_r being r pixels apart (eq. 1)."""

    def __init__(self, width: int, size: int, small: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.large = normed(width, width, size, 1, size // 2, groups=width)
        self.small = nn.ModuleList(
            normed(width, width, k, 1, r * (k - 1) // 2, groups=width, dilation=r) for k, r in small
        )

    def forward(self, x: Tensor) -> Tensor:
        total = self.large(x)
        for branch in self.small:
            total = total + branch(x)
        return total

    def deployed(self) -> nn.Module:
        weight, bias = merged(self.large)
        for branch in self.small:
            small, more = merged(branch)
            weight, bias = weight + centered(small, self.large[0].kernel_size, branch[0].dilation[0]), bias + more
        return layer(weight, bias, self.large[0], self.large[0].padding)


# --- RepNeXt (Zhao et al. 2024): kernels of all shapes, depthwise, some as a row behind a column.


class Small(Block):
    """3x3, 1x3, 3x1 and a dilated 2x2; with a stride the row stands behind the column."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        more = {"groups": width, "bias": stride == 1}
        self.square = nn.Conv2d(width, width, 3, stride, 1, groups=width)
        self.row = nn.Conv2d(width, width, (1, 3), (1, stride), (0, 1), **more)
        self.column = nn.Conv2d(width, width, (3, 1), (stride, 1), (1, 0), **more)
        self.corners = nn.Conv2d(width, width, 2, stride, 1, 2, groups=width)
        self.in_row = stride > 1

    def forward(self, x: Tensor) -> Tensor:
        lines = self.column(self.row(x)) if self.in_row else self.column(x) + self.row(x)
        return self.square(x) + lines + self.corners(x)

    def deployed(self) -> nn.Module:
        row, column = self.row.weight, self.column.weight
        lines = column * row if self.in_row else centered(row, (3, 3)) + centered(column, (3, 3))
        weight = self.square.weight + lines + centered(self.corners.weight, (3, 3), 2)
        parts = (self.square, self.corners, self.row, self.column)
        return layer(weight, sum(one.bias for one in parts if one.bias is not None), self.square, 1)


class Medium(Block):
    """7x7, 5x3, 3x5, a column of 7 behind a row of 7, and one of 5 behind one of 5."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()

        def one(size: tuple[int, int], *, bias: bool = True, each: Sequence[int] = (stride, stride)) -> nn.Conv2d:
            return nn.Conv2d(width, width, size, tuple(each), (size[0] // 2, size[1] // 2), groups=width, bias=bias)

        self.square, self.tall, self.wide = one((7, 7)), one((5, 3)), one((3, 5))
        self.rows = nn.ModuleList(one((1, size), bias=False, each=(1, stride)) for size in (7, 5))
        self.columns = nn.ModuleList(one((size, 1), bias=False, each=(stride, 1)) for size in (7, 5))

    def forward(self, x: Tensor) -> Tensor:
        total = self.square(x) + self.tall(x) + self.wide(x)
        for row, column in zip(self.rows, self.columns, strict=True):
            total = total + column(row(x))
        return total

    def deployed(self) -> nn.Module:
        kernels = [self.square.weight, self.tall.weight, self.wide.weight]
        kernels += [column.weight * row.weight for row, column in zip(self.rows, self.columns, strict=True)]
        weight = sum(centered(each, (7, 7)) for each in kernels)
        return layer(weight, self.square.bias + self.tall.bias + self.wide.bias, self.square, 3)  # type: ignore[arg-type]


class Chunks(nn.Module):
    """A quarter of the channels each through nothing, small, medium and long kernels."""

    def __init__(self, width: int, long: int = 11) -> None:
        super().__init__()
        each = width // 4
        self.small, self.medium = Small(each), Medium(each)
        row = nn.Conv2d(each, each, (1, long), padding=(0, long // 2), groups=each)
        self.long = nn.Sequential(row, nn.Conv2d(each, each, (long, 1), padding=(long // 2, 0), groups=each))

    def forward(self, x: Tensor) -> Tensor:
        same, small, medium, long = torch.chunk(x, 4, 1)
        return torch.cat((same, self.small(small), self.medium(medium), self.long(long)), 1)


class Copies(nn.Module):
    """The downsampling of RepNeXt: small and medium kernels of all channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.small, self.medium = Small(width, 2), Medium(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.small(x), self.medium(x)), 1)


# --- SPAN (Wan et al. 2023): 1x1, 3x3, 1x1, with biases, the image padded before the first.


class Padded(Block):
    """Conv3XC: y = W3 (W2 * (W1 pad(x) + b1) + b2) + b3 + S x + s."""

    def __init__(self, width: int, out: int, gain: int = 2) -> None:
        super().__init__()
        self.short = nn.Conv2d(width, out, 1)
        self.first, self.middle = nn.Conv2d(width, width * gain, 1), nn.Conv2d(width * gain, out * gain, 3)
        self.last = nn.Conv2d(out * gain, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(F.pad(x, (1, 1, 1, 1), "constant", 0)))) + self.short(x)

    def deployed(self) -> nn.Module:
        first, middle, last = self.first, self.middle, self.last
        weight = torch.einsum("om,mnhw,ni->oihw", last.weight[:, :, 0, 0], middle.weight, first.weight[:, :, 0, 0])
        inner = torch.einsum("mnhw,n->m", middle.weight, first.bias) + middle.bias
        bias = last.weight[:, :, 0, 0] @ inner + last.bias
        return layer(weight + centered(self.short.weight, (3, 3)), bias + self.short.bias, self.short, 1)


# --- ECB (Zhang et al. 2021): 3x3, 1x1 and 3x3, and the edges of a 1x1, each in a border of the 1x1's bias.

SOBEL = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
LAPLACE = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])


class Edges(nn.Module):
    """A 1x1 convolution, then a fixed filter with a learned factor and bias per channel (eqs. 3 to 6)."""

    def __init__(self, width: int, out: int, mask: Tensor) -> None:
        super().__init__()
        self.first, self.scale, self.bias = nn.Conv2d(width, out, 1), nn.Parameter(torch.randn(out, 1, 1, 1)), None
        self.bias = nn.Parameter(torch.randn(out))
        self.register_buffer("mask", mask.expand(out, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        around = bordered(self.first(x), self.first.bias, 1)
        return F.conv2d(around, self.scale * self.mask, self.bias, groups=len(self.bias))

    def kernel(self) -> tuple[Tensor, Tensor]:
        own = self.scale * self.mask
        return own * self.first.weight, own.sum((1, 2, 3)) * self.first.bias + self.bias


class EdgeOriented(Block):
    """ECB; `online`: as the authors' code evaluates it, with the one kernel computed in every forward."""

    def __init__(self, width: int, out: int, depth: int = 2, *, online: bool = False) -> None:
        super().__init__()
        self.square, self.online, self.alike = nn.Conv2d(width, out, 3, padding=1), online, width == out
        self.first, self.second = nn.Conv2d(width, depth * out, 1), nn.Conv2d(depth * out, out, 3)
        self.edges = nn.ModuleList(Edges(width, out, mask) for mask in (SOBEL, SOBEL.T, LAPLACE))

    def forward(self, x: Tensor) -> Tensor:
        if self.online:
            return F.conv2d(x, *self.kernel(), padding=1)
        total = self.square(x) + self.second(bordered(self.first(x), self.first.bias, 1))
        for edge in self.edges:
            total = total + edge(x)
        return total + x if self.alike else total

    def kernel(self) -> tuple[Tensor, Tensor]:
        first, second = self.first, self.second
        weight = self.square.weight + F.conv2d(second.weight, first.weight.permute(1, 0, 2, 3))
        bias = self.square.bias + torch.einsum("omhw,m->o", second.weight, first.bias) + second.bias
        for edge in self.edges:
            own, more = edge.kernel()
            weight, bias = weight + own, bias + more
        if self.alike:
            weight = weight + F.pad(identity(len(weight), 1, weight), [1] * 4)
        return weight, bias

    def deployed(self) -> nn.Module:
        weight, bias = self.kernel()
        return layer(weight, bias, self.square, 1)


# --- Diverse Branch Block (Ding et al. 2021).


class BorderedNorm(nn.BatchNorm2d):
    """BatchNorm in a border of what it gives for zeros."""

    def __init__(self, width: int, pad: int) -> None:
        super().__init__(width)
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        return bordered(super().forward(x), affine(self)[1], self.pad)


class NearIdentity(nn.Conv2d):
    """A 1x1 convolution whose weight is learned as the difference from the identity."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.whole(), None, groups=self.groups)

    def whole(self) -> Tensor:
        return self.weight + identity(len(self.weight), self.groups, self.weight)


class Diverse(Block):
    """3x3, 1x1, 1x1 and a mean, 1x1 and 3x3 (fig. 2); depthwise, the mean is alone and there is no 1x1 (sec. 3.4)."""

    def __init__(self, width: int, out: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.square = normed(width, out, 3, stride, 1, groups=groups)
        self.depthwise = groups == out
        inner = 2 * width if self.depthwise else width
        kind = nn.Conv2d if self.depthwise else NearIdentity
        self.first, self.border = kind(width, inner, 1, groups=groups, bias=False), BorderedNorm(inner, 1)
        self.second = normed(inner, out, 3, stride, groups=groups)
        self.mean, self.mean_norm = nn.AvgPool2d(3, stride, int(self.depthwise)), nn.BatchNorm2d(out)
        if not self.depthwise:
            self.point = normed(width, out, 1, stride, groups=groups)
            self.before = nn.Conv2d(width, out, 1, groups=groups, bias=False)
            self.before_norm = BorderedNorm(out, 1)

    def forward(self, x: Tensor) -> Tensor:
        total = self.square(x) + self.second(self.border(self.first(x)))
        if self.depthwise:
            return total + self.mean_norm(self.mean(x))
        return total + self.point(x) + self.mean_norm(self.mean(self.before_norm(self.before(x))))

    def deployed(self) -> nn.Module:
        groups = self.square[0].groups
        weight, bias = merged(self.square)
        first = self.first.whole() if isinstance(self.first, NearIdentity) else self.first.weight
        row = _in_row((first, *affine(self.border)), merged(self.second), groups)
        scale, shift = affine(self.mean_norm)
        mean = identity(len(weight), groups, weight).expand(-1, -1, 3, 3) / 9 * scale.view(-1, 1, 1, 1)
        parts = [row]
        if self.depthwise:
            parts.append((mean, shift))
        else:
            parts.append(_in_row((self.before.weight, *affine(self.before_norm)), (mean, shift), groups))
            point, more = merged(self.point)
            parts.append((centered(point, (3, 3)), more))
        total = weight + sum(part for part, _ in parts)
        return layer(total, bias + sum(part for _, part in parts), self.square[0], 1)


def _in_row(first: tuple[Tensor, Tensor, Tensor], second: tuple[Tensor, Tensor], groups: int) -> tuple[Tensor, Tensor]:
    """A 1x1 kernel with scale and shift, and a kernel behind it (transform III)."""
    inner, scale, shift = first
    outer, bias = second
    scaled = (inner * scale.view(-1, 1, 1, 1))[:, :, 0, 0]
    apart = zip(outer.chunk(groups), scaled.chunk(groups), shift.chunk(groups), strict=True)
    pairs = [(torch.einsum("omhw,mi->oihw", w, v), torch.einsum("omhw,m->o", w, t)) for w, v, t in apart]
    return torch.cat([weight for weight, _ in pairs]), torch.cat([more for _, more in pairs]) + bias


# --- OREPA (Hu et al. 2022): the branches are added as kernels, which every forward computes anew.


class Online(Block):
    """Six branches with a factor per channel each (eq. 6, fig. 4), one convolution, BatchNorm."""

    def __init__(self, width: int, out: int, stride: int = 1, expand: int = 8) -> None:
        super().__init__()
        self.square, self.stride = nn.Parameter(torch.randn(out, width, 3, 3)), stride
        self.mean, self.prior, self.point = (nn.Parameter(torch.randn(out, width, 1, 1)) for _ in range(3))
        self.first = nn.Parameter(torch.randn(width, width, 1, 1))
        self.second = nn.Parameter(torch.randn(out, width, 3, 3))
        self.deep = nn.Parameter(torch.randn(width * expand, 1, 3, 3))
        self.wide = nn.Parameter(torch.randn(out, width * expand, 1, 1))
        self.factors, self.norm = nn.Parameter(torch.randn(6, out)), nn.BatchNorm2d(out)
        place = torch.arange(3) + 0.5
        waves = [torch.cos(torch.pi * place * (channel % 3 + 1) / 3) for channel in range(out)]
        self.register_buffer("waves", torch.stack([wave[:, None] * wave[None, :] for wave in waves]))
        self.register_buffer("ninth", torch.full((3, 3), 1 / 9))

    def kernel(self) -> Tensor:
        near = self.first[:, :, 0, 0] + torch.eye(len(self.first)).to(self.first)
        expand = len(self.deep) // len(self.first)
        deep = self.deep.view(len(self.first), expand, 3, 3)
        wide = self.wide.view(len(self.wide), len(self.first), expand)
        parts = (
            self.square,
            torch.einsum("oi,hw->oihw", self.mean[:, :, 0, 0], self.ninth),
            torch.einsum("oi,ohw->oihw", self.prior[:, :, 0, 0], self.waves),
            F.pad(self.point, [1] * 4),
            torch.einsum("mi,omhw->oihw", near, self.second),
            torch.einsum("iehw,oie->oihw", deep, wide),
        )
        return sum(torch.einsum("oihw,o->oihw", part, self.factors[place]) for place, part in enumerate(parts))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.conv2d(x, self.kernel(), None, self.stride, 1))

    def deployed(self) -> nn.Module:
        scale, shift = affine(self.norm)
        weight = self.kernel() * scale.view(-1, 1, 1, 1)
        return layer(weight, shift, nn.Conv2d(1, 1, 1, self.stride), 1)


# --- YOLOv7 (Wang et al. 2022): a learned vector is added before the last 1x1 convolution, another multiplied behind.


class Implicit(Block):
    """y = m (W (x + a) + b) (appendix)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 1)
        self.added, self.times = Vector(width, torch.add), Vector(out, torch.mul)

    def forward(self, x: Tensor) -> Tensor:
        return self.times(self.conv(self.added(x)))

    def deployed(self) -> nn.Module:
        times, weight = self.times.vector.view(-1), self.conv.weight
        bias = self.conv.bias + weight[:, :, 0, 0] @ self.added.vector.view(-1)
        return layer(weight * times.view(-1, 1, 1, 1), bias * times, self.conv, 0)


class Vector(nn.Module):
    """A learned vector that is added to all pixels, or multiplied with them."""

    def __init__(self, width: int, how: object) -> None:
        super().__init__()
        self.vector, self.multiplies = nn.Parameter(torch.randn(1, width, 1, 1)), how is torch.mul

    def forward(self, x: Tensor) -> Tensor:
        return self.vector * x if self.multiplies else self.vector + x

"""Replace the attention of one block by a convolution or a constant matrix: kernels, mean and W^O in closed form.

There are two least-squares fits. The first finds, for each channel c, a kernel K_c and a coefficient a_c, so that

    K_c * V_c + a_c mean(V_c) + b_c   approximates the output H_c of the original attention,

where V are the values in the network converted so far. The second finds W^O and its bias, so that the residual stream
of that network after the block approximates the original's; this corrects errors of earlier blocks. b is added to
W^O's bias. LayerScale is multiplied into W^O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from repaconv.backbones.convolution_mixers import to_grid, to_tokens
from repaconv.conversion.block_conversion import BlockContext, ConvertedBlock, ValueProjection
from repaconv.conversion.least_squares import RIDGE, NormalEquations, Solution
from repaconv.conversion.plain_vit import batches
from repaconv.methods.dwconv.token_mixer_reading import Mixer

# How close an attention matrix over a grid of patches is to a convolution: statistics by the offset of key and query


def by_offset(matrix: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Sum the entries [..., n, n] over queries at each offset of key from query. Returns the sums [..., 2h - 1, 2w - 1]
    and
    the number of entries of each.

    Offset (0, 0) is in the center.
    """
    height, width = grid
    row, column = torch.arange(height * width) // width, torch.arange(height * width) % width
    down, right = row[None] - row[:, None] + height - 1, column[None] - column[:, None] + width - 1
    position, shape = (down * (2 * width - 1) + right).flatten(), (2 * height - 1, 2 * width - 1)
    sums = matrix.new_zeros(*matrix.shape[:-2], shape[0] * shape[1])
    counts = torch.bincount(position, minlength=shape[0] * shape[1]).to(matrix)
    return sums.index_add(-1, position, matrix.flatten(-2)).view(*sums.shape[:-1], *shape), counts.view(shape)


def window(pattern: Tensor, side: int) -> Tensor:
    """Return the center [..., side, side] of a pattern [..., 2h - 1, 2w - 1], zero-padded if it is smaller."""
    needed = [side - size for size in pattern.shape[-2:]]
    down, right = (max(0, -(-missing // 2)) for missing in needed)
    pattern = torch.nn.functional.pad(pattern, (right, right, down, down))
    top, left = ((size - side) // 2 for size in pattern.shape[-2:])
    return pattern[..., top : top + side, left : left + side]


def locality(matrix: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Return the fraction [...] of the attention within ``side`` x ``side`` around its query (eq. 14a)."""
    sums, _ = by_offset(matrix, grid)
    return window(sums, side).sum((-2, -1)) / sums.sum((-2, -1))


def invariance(matrix: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the fraction [...] of the squared norm that depends only on the offset; 1 for a convolution (eq. 14b)."""
    sums, counts = by_offset(matrix, grid)
    return (sums**2 / counts).sum((-2, -1)) / (matrix**2).sum((-2, -1))


def mean_kernel(matrix: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Return the mean entry [..., side, side] at each offset: the papers' kernel of a mean attention matrix."""
    sums, counts = by_offset(matrix, grid)
    return window(sums / counts, side)


# Replacing the attention of one block

Kind = Literal["depthwise", "ensembled", "static"]
FitBy = Literal["squares", "gaussian", "mean"]
Head = tuple[int, int]
"""(block, head)."""


@dataclass(frozen=True)
class ConversionSettings:
    """How a block is converted. The fits ``gaussian`` and ``mean`` use the papers' kernels and keep W^O.

    ``ridge`` is relative to the mean square of the features. With ``ffn``, the last layer of the following FFN is also
    refitted. ``schedule`` is the number of merged tokens of each block, after the replaced blocks. If ``heads`` are
    given, only these heads of their blocks are replaced.
    """

    kind: Kind = "depthwise"
    kernel: int = 3
    fit: FitBy = "squares"
    ridge: float = RIDGE
    ffn: bool = False
    schedule: tuple[int, ...] = ()
    heads: tuple[Head, ...] = ()

    def takes(self, block: int) -> bool:
        """Return whether a block may be replaced: no block up to it merges tokens."""
        return not any(self.schedule[: block + 1])


def convert_block(context: BlockContext, how: ConversionSettings) -> ConvertedBlock:
    """Convert a block as requested, fitted to all images of ``context``."""
    own = [head for block, head in how.heads if block == context.index]
    if own and len(own) < context.plain.heads:
        return _some_heads(context, how, own)
    if how.fit != "squares":
        return _paper_kernels(context, how)
    if how.kind == "static":
        return _static(context, how)
    return (_ensembled if how.kind == "ensembled" else _depthwise)(context, how)


def refit_output_projection(context: BlockContext, how: ConversionSettings) -> ConvertedBlock:
    """Return the block with its attention kept and W^O refitted to the original's residual stream."""
    normal = NormalEquations()
    for student, wanted in batches(context.student, context.wanted):
        normal.add(context.heads(student).flatten(0, 1), wanted.flatten(0, 1))
    solved = normal.solve(context.proj, how.ridge)
    qkv = {f"attn.qkv.{name}": value for name, value in context.qkv.items()}
    return context.converted_block(context.mixer, qkv, solved.weights, solved.condition)


def _depthwise(context: BlockContext, how: ConversionSettings) -> ConvertedBlock:
    """eq. 11: one kernel per channel, fitted to the output of the attention."""
    values, width = context.values, context.plain.config.width
    targets = (mixed[:, context.prefix :] for (mixed,) in batches(context.mixed))
    kernels, mean, _, condition = fit_kernels(context, values, how, targets)
    output = _fit_output_projection(context, convolution(context, values, kernels, mean), how, context.proj)
    mixer = Mixer("depthwise", (True,) * context.plain.heads, 0, True, how.kernel, width, mean=True)
    tensors = {**values.tensors, "attn.dw.weight": kernels, "attn.mean": mean}
    return context.converted_block(mixer, tensors, output.weights, condition, output.condition)


def _some_heads(context: BlockContext, how: ConversionSettings, heads: Collection[int]) -> ConvertedBlock:
    """Replace some heads as in eq. 11 and keep the others. W^O of all heads is fitted to the residual stream."""
    values, width = context.values, context.plain.config.width
    kernels, mean, _, condition = fit_kernels(context, values, how, (mixed for (mixed,) in batches(context.mixed)))
    conv = tuple(head in heads for head in range(context.plain.heads))
    mixer = Mixer("depthwise", conv, 3 * width, True, how.kernel, width, flagged=True, mean=True)
    replaced = torch.zeros(width, dtype=torch.bool)
    replaced[mixer.channels(width, conv=True)] = True
    convolved = convolution(context, values, kernels, mean)
    output = _fit_output_projection(
        context, lambda x: torch.where(replaced, convolved(x), context.heads(x)), how, context.proj
    )
    tensors = {
        **{f"attn.qkv.{name}": value for name, value in context.qkv.items()},
        "attn.dw.weight": kernels * replaced[:, None, None, None],
        "attn.mean": mean * replaced,
        "attn.conv_heads": torch.tensor(conv),
    }
    return context.converted_block(mixer, tensors, output.weights, condition, output.condition)


def _ensembled(context: BlockContext, how: ConversionSettings) -> ConvertedBlock:
    """eq. 13: the columns of W^O are the directions in which a linear map of the tokens best predicts the wanted
    output."""
    heads, head = context.plain.heads, context.plain.config.width // context.plain.heads
    linear = NormalEquations()
    for student, wanted in batches(context.student[:, context.prefix :], context.wanted[:, context.prefix :]):
        linear.add(context.block.norm1(student).flatten(0, 1), wanted.flatten(0, 1))
    nearest = linear.solve(ridge=how.ridge)
    map_ = nearest.weights[:-1]
    directions = torch.linalg.eigh(map_.T @ linear.centred() @ map_).eigenvectors[:, -head:]  # [d, dh], orthonormal
    values = ValueProjection((map_ @ directions).T.float(), torch.zeros(head) if context.mixer.qkv_bias else None)
    targets = (wanted[:, context.prefix :] @ directions.float() for (wanted,) in batches(context.wanted))
    kernels, mean, _, condition = fit_kernels(context, values, how, targets)
    output = _fit_output_projection(context, convolution(context, values, kernels, mean), how)
    mixer = Mixer("ensembled", (True,) * heads, 0, True, how.kernel, head, mean=True)
    # all heads are equal with equal weights, so that the ensemble equals the fitted head
    alike = {name: tensor.repeat(heads, *[1] * (tensor.ndim - 1)) for name, tensor in values.tensors.items()}
    tensors = {**alike, "attn.dw.weight": kernels, "attn.mean": mean, "attn.gamma": torch.zeros(heads)}
    tiled = torch.cat([output.weights[:-1].repeat(heads, 1), output.weights[-1:]])
    return context.converted_block(mixer, tensors, tiled, nearest.condition, condition, output.condition)


def _static(context: BlockContext, how: ConversionSettings) -> ConvertedBlock:
    """Replace each head's attention by its mean attention matrix."""
    values, matrix, heads = context.values, context.mean_attention(), context.plain.heads

    def mixed(x: Tensor) -> Tensor:
        v = context.patches(x, values)
        by_head = v.view(*v.shape[:2], heads, -1).transpose(1, 2)
        return (matrix @ by_head).transpose(1, 2).flatten(2)

    output = _fit_output_projection(context, mixed, how, context.proj)
    tensors = {**values.tensors, "attn.static": matrix}
    return context.converted_block(Mixer("static", (True,) * heads, 0, True), tensors, output.weights, output.condition)


def _paper_kernels(context: BlockContext, how: ConversionSettings) -> ConvertedBlock:
    """The papers' kernels: a Gaussian with sum 1, or the mean attention around the query."""
    heads, width, side = context.plain.heads, context.plain.config.width, how.kernel
    if how.fit == "gaussian":
        axis = torch.exp(-((torch.arange(side) - side // 2) ** 2) / 2.0)
        kernel = (axis[:, None] * axis / axis.sum() ** 2).expand(heads, side, side)
    else:
        kernel = mean_kernel(context.mean_attention(), context.plain.config.grid, side)
    kernels = kernel.repeat_interleave(width // heads, 0).unsqueeze(1).contiguous()
    mixer = Mixer("depthwise", (True,) * heads, 0, True, side, width)
    return context.converted_block(mixer, {**context.values.tensors, "attn.dw.weight": kernels}, context.proj)


class Kernels(NamedTuple):
    """Kernels [c, 1, k, k], coefficients of the mean [c], biases [c], and the condition number of their fit."""

    kernels: Tensor
    mean: Tensor
    bias: Tensor
    condition: float


def fit_kernels(
    context: BlockContext,
    values: ValueProjection,
    how: ConversionSettings,
    targets: Iterator[Tensor],
    *,
    mean: bool = True,
) -> Kernels:
    """Fit kernels that map the values to ``targets`` [B, n, c]. Without ``mean``, the coefficient of the mean is 0."""
    normal, side = NormalEquations(), how.kernel
    for (student,), target in zip(batches(context.student), targets, strict=True):
        v = to_grid(context.patches(student, values), context.plain.config.grid)
        around = nn.functional.unfold(v, side, padding=side // 2)
        around = around.view(*v.shape[:2], side * side, -1)  # [B, c, k k, n]
        means = v.mean((2, 3))[:, :, None, None].expand(-1, -1, 1, around.shape[-1])
        several = [around, means if mean else 0 * means, torch.ones_like(means), target.mT[:, :, None]]
        for rows in torch.cat(several, 2):  # one image at a time, [c, k k + 3, n], which fits in the CPU cache
            rows = rows.double()
            sums = rows @ rows.mT
            normal.include(sums[:, :-1, :-1], sums[:, :-1, -1:])
    solved = normal.solve(ridge=how.ridge)
    found = solved.weights[:, :, 0].float()
    kernels = found[:, :-2].reshape(-1, 1, side, side).contiguous()
    return Kernels(kernels, found[:, -2].contiguous(), found[:, -1].contiguous(), solved.condition)


def convolution(
    context: BlockContext, values: ValueProjection, kernels: Tensor, mean: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return a function from tokens [B, T, d] to the input of W^O, [B, n, c]."""

    def mixed(x: Tensor) -> Tensor:
        v = to_grid(context.patches(x, values), context.plain.config.grid)
        convolved = nn.functional.conv2d(v, kernels, padding=kernels.shape[-1] // 2, groups=len(kernels))
        return to_tokens(convolved + mean[:, None, None] * v.mean((2, 3), keepdim=True))

    return mixed


def _fit_output_projection(
    context: BlockContext, mixed: Callable[[Tensor], Tensor], how: ConversionSettings, prior: Tensor | None = None
) -> Solution:
    """Fit W^O [c + 1, d] for the patches to the original's residual stream."""
    normal = NormalEquations()
    for student, wanted in batches(context.student, context.wanted):
        normal.add(mixed(student).flatten(0, 1), wanted[:, context.prefix :].flatten(0, 1))
    return normal.solve(prior, how.ridge)

"""Score how close each attention head is to a convolution, in one pass over the images with constant memory."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from repaconv.conversion.kernel_fitting import invariance, locality, mean_kernel
from repaconv.conversion.original_activations import OriginalActivations
from repaconv.conversion.plain_vit import PlainViT, after_attention, after_ffn, batches, queries_keys_values
from repaconv.results import BlockScore, HeadScore

PATTERN_SIDE = 11
"""Side length of the drawn attention patterns."""
QUERIES_PER_MATRIX = 64
"""Number of queries per matrix, evenly spaced, whose entropy is computed (at least; a few more are possible)."""


class AttentionMoments:
    """Running mean and sum of squared deviations of attention matrices (Welford's algorithm): in float32 within a batch
    of
    images, in float64 over all of them; and the entropy of the attention of some queries."""

    def __init__(self) -> None:
        self.count, self.entropy = 0, torch.zeros(())
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, attention: Tensor, prefix: int) -> None:
        """Add matrices [B, h, N, N] of all tokens; the first ``prefix`` tokens come before the patches."""
        first, *others = attention[:, :, prefix:, prefix:]
        mean, squares = first.clone(), torch.zeros_like(first)
        for seen, matrix in enumerate(
            others, 2
        ):  # in place: allocating a batch's worth of memory takes longer than the sums
            difference = matrix - mean
            mean.add_(difference, alpha=1 / seen)
            squares.addcmul_(difference, matrix - mean)
        self._join(mean, squares, len(attention))
        rows = attention[:, :, prefix :: max(1, first.shape[-1] // QUERIES_PER_MATRIX)]
        entropy = torch.special.entr(rows).sum(-1).mean(-1).sum(0)
        self.entropy = self.entropy + entropy / math.log(attention.shape[-1])

    def _join(self, mean: Tensor, squares: Tensor, count: int) -> None:
        """Combine the sums of two sets of images (Chan, Golub and LeVeque, 1983)."""
        difference, total = mean.double() - self.mean, self.count + count
        self.squares = (difference**2).mul_(self.count * count / total).add_(squares).add_(self.squares)
        self.mean, self.count = difference.mul_(count / total).add_(self.mean), total

    def heads(self, grid: tuple[int, int], side: int) -> tuple[HeadScore, ...]:
        """Return the scores of each head."""
        columns = (
            (self.squares / max(self.count - 1, 1)).sqrt().sum((-2, -1)),
            locality(self.mean, grid, side),
            invariance(self.mean, grid),
            self.entropy / self.count,
        )
        rows = torch.stack([column.double() for column in columns], 1).tolist()
        return tuple(HeadScore(sigma=s, locality=l_, invariance=i, entropy=e) for s, l_, i, e in rows)


class Scores(NamedTuple):
    """The scores of all blocks, and the mean attention of each head around its query, [h, 11, 11] per block."""

    blocks: tuple[BlockScore, ...]
    patterns: tuple[Tensor, ...]

    @property
    def by_sigma(self) -> tuple[int, ...]:
        """Block indices by Sigma_b, the smallest first: the paper's criterion."""
        return tuple(score.block for score in sorted(self.blocks, key=lambda score: score.sigma))

    @property
    def by_error(self) -> tuple[int, ...]:
        """Block indices by the error of replacing each alone, the smallest first; empty if that was not measured."""
        known = [(score.error, score.block) for score in self.blocks if score.error is not None]
        return tuple(block for _, block in sorted(known))

    def with_errors(self, errors: Sequence[float]) -> Scores:
        """Return the scores with the blocks' errors added."""
        pairs = zip(self.blocks, errors, strict=True)
        return self._replace(blocks=tuple(block.model_copy(update={"error": error}) for block, error in pairs))


def score(plain: PlainViT, images: Iterable[Tensor], side: int) -> Scores:
    """Score all heads of a network.

    Args:
        plain: The network.
        images: Batches [B, C, H, W].
        side: Side length of the kernel for which locality is computed.
    """
    moments = [AttentionMoments() for _ in plain.blocks]
    with torch.inference_mode():
        for batch in images:
            x = plain.net.embed(batch)
            for block, seen in zip(plain.blocks, moments, strict=True):
                attention, v = _attention(plain, block, x)
                seen.add(attention, plain.config.prefix)
                x = after_ffn(block, after_attention(block, x, (attention @ v).transpose(1, 2).flatten(2)))
    return _scores(plain, moments, side)


def score_activations(activations: OriginalActivations, side: int) -> Scores:
    """Score all heads, from activations that are already computed."""
    plain, moments = activations.plain, [AttentionMoments() for _ in activations.plain.blocks]
    with torch.inference_mode():
        for index, seen in enumerate(moments):
            for (x,) in batches(activations.at(index).into):
                attention, _ = _attention(plain, plain.blocks[index], x)
                seen.add(attention, plain.config.prefix)
    return _scores(plain, moments, side)


def _attention(plain: PlainViT, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention matrices [B, h, N, N] and values [B, h, N, dh]."""
    q, k, v = queries_keys_values(block, x, plain.heads)
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1), v


def _scores(plain: PlainViT, moments: Sequence[AttentionMoments], side: int) -> Scores:
    grid = plain.config.grid
    blocks = tuple(_block(index, seen.heads(grid, side)) for index, seen in enumerate(moments))
    return Scores(blocks, tuple(mean_kernel(seen.mean, grid, PATTERN_SIDE) for seen in moments))


def _block(index: int, heads: tuple[HeadScore, ...]) -> BlockScore:
    means = {name: sum(getattr(head, name) for head in heads) / len(heads) for name in HeadScore.model_fields}
    return BlockScore(block=index, heads=heads, **means)


def uniform_locality(grid: tuple[int, int], side: int) -> float:
    """Return the locality of uniform attention, for comparison."""
    count = grid[0] * grid[1]
    return float(locality(torch.ones(count, count), grid, side))


# Drawing the scores

CELL, GAP, LEFT, TOP = 44, 6, 190, 46


def scores_svg(scores: Scores, title: str) -> str:
    """Draw the scores as an SVG: one row per block, one column per head, each with its mean attention around the query.

    Dark is strong attention, scaled to each head's maximum. The caption is Sigma_b; the tooltip has all scores.
    """
    heads = max(len(block.heads) for block in scores.blocks)
    wide, high = LEFT + heads * (CELL + GAP), TOP + len(scores.blocks) * (CELL + GAP)
    cells = []
    for row, (block, patterns) in enumerate(zip(scores.blocks, scores.patterns, strict=True)):
        y = TOP + row * (CELL + GAP)
        error = "" if block.error is None else f", error {block.error:.3f}"
        cells.append(f'<text x="8" y="{y + 18}">block {block.block}: \u03a3 {block.sigma:.1f}</text>')
        cells.append(f'<text x="8" y="{y + 34}" opacity="0.7">local {block.locality:.2f}{error}</text>')
        for column, (head, pattern) in enumerate(zip(block.heads, patterns.numpy(), strict=True)):
            tooltip = f"head {column}: \u03a3 {head.sigma:.1f}, locality {head.locality:.3f}, "
            tooltip += f"invariance {head.invariance:.3f}, entropy {head.entropy:.3f}"
            x = LEFT + column * (CELL + GAP)
            cells.append(
                f'<image x="{x}" y="{y}" width="{CELL}" height="{CELL}" style="image-rendering:pixelated" '
                f'href="data:image/png;base64,{_png(pattern)}"><title>{escape(tooltip)}</title></image>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12" '
        f'fill="currentColor"><title>{escape(title)}</title><text x="8" y="20">{escape(title)}</text>{"".join(cells)}'
        "</svg>\n"
    )


def _png(pattern: NDArray[np.floating]) -> str:
    from PIL import Image

    shades = np.rint(255 * (1 - pattern / max(float(pattern.max()), 1e-30))).astype(np.uint8)
    with BytesIO() as file:
        Image.fromarray(shades).save(file, "PNG")
        return b64encode(file.getvalue()).decode()

"""Scores as a picture: a row a block, a column a head, each with its mean attention around the query."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from repaconv.conversion.head_scores import Scores

CELL, GAP, LEFT, TOP = 44, 6, 190, 46


def scores_svg(scores: Scores, title: str) -> str:
    """Dark is much attention; of every head its own largest is black. The caption has Sigma_b, the tooltip all."""
    heads = max(len(block.heads) for block in scores.blocks)
    wide, high = LEFT + heads * (CELL + GAP), TOP + len(scores.blocks) * (CELL + GAP)
    cells = []
    for row, (block, patterns) in enumerate(zip(scores.blocks, scores.patterns, strict=True)):
        y = TOP + row * (CELL + GAP)
        error = "" if block.error is None else f", error {block.error:.3f}"
        cells.append(f'<text x="8" y="{y + 18}">block {block.block}: \u03a3 {block.sigma:.1f}</text>')
        cells.append(f'<text x="8" y="{y + 34}" opacity="0.7">local {block.locality:.2f}{error}</text>')
        for column, (head, pattern) in enumerate(zip(block.heads, patterns.numpy(), strict=True)):
            told = f"head {column}: \u03a3 {head.sigma:.1f}, locality {head.locality:.3f}, "
            told += f"invariance {head.invariance:.3f}, entropy {head.entropy:.3f}"
            x = LEFT + column * (CELL + GAP)
            cells.append(
                f'<image x="{x}" y="{y}" width="{CELL}" height="{CELL}" style="image-rendering:pixelated" '
                f'href="data:image/png;base64,{_png(pattern)}"><title>{escape(told)}</title></image>'
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

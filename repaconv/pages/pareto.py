"""Accuracy against time of several runs, as trained and folded, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from repaconv.artefacts import ReportRow
from repaconv.pages.curve import CEILING, COLOURS, FLOOR, HEIGHT, LEFT, RIGHT, WIDTH, axes

PALE = ' opacity=".35"'


class _Point(NamedTuple):
    """A run as folded, and its time as trained."""

    title: str
    ms: float
    accuracy: float
    before_ms: float | None
    sure: bool

    def beaten(self, others: Sequence[_Point]) -> bool:
        """Whether another is at least as good in both, and better in one; what is not known well beats nothing."""
        return not self.sure or any(
            each.sure
            and each.ms <= self.ms
            and each.accuracy >= self.accuracy
            and (each.ms, each.accuracy) != (self.ms, self.accuracy)
            for each in others
        )


def pareto_svg(rows: Sequence[ReportRow]) -> str:
    """The picture; empty where fewer than two runs were measured alike and know their accuracy."""
    where = next((row.target for row in rows if row.accuracy and row.after_ms), "")
    points = [
        _Point(row.title, row.after_ms, row.accuracy.candidate, row.before_ms, row.quality != "inconclusive")
        for row in rows
        if row.accuracy and row.after_ms and row.target == where
    ]
    if len(points) < 2:
        return ""
    last = 1.1 * max(value for each in points for value in (each.ms, each.before_ms or 0.0))
    low = min(each.accuracy for each in points)
    low -= 0.25 * (1 - low) or 0.01

    def x(ms: float) -> float:
        return LEFT + (RIGHT - LEFT) * ms / last

    def y(accuracy: float) -> float:
        return FLOOR - (FLOOR - CEILING) * (accuracy - low) / (1 - low)

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11" role="img"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>accuracy against latency</title>']
    ticks = (0.0, 0.5, 1.0)
    lines += axes([f"{last * part:.2f} ms" for part in ticks], [f"{low + (1 - low) * part:.1%}" for part in ticks])
    for n, each in enumerate(points):
        colour, at = COLOURS[n % len(COLOURS)], y(each.accuracy)
        if each.before_ms is not None:
            ends = f'x1="{x(each.before_ms):.1f}" x2="{x(each.ms):.1f}" y1="{at:.1f}" y2="{at:.1f}"'
            lines.append(f'<line {ends} stroke="{colour}" stroke-dasharray="3 3"/>')
            lines.append(f'<circle cx="{x(each.before_ms):.1f}" cy="{at:.1f}" r="5" fill="none" stroke="{colour}"/>')
        told = f"{each.title}: {each.accuracy:.1%}, {each.ms:.3f} ms{'' if each.sure else ', inconclusive'}"
        dot = f'cx="{x(each.ms):.1f}" cy="{at:.1f}" r="5" fill="{colour}"{"" if each.sure else PALE}'
        lines.append(f"<circle {dot}><title>{escape(told)}</title></circle>")
        weight = "normal" if each.beaten(points) else "bold"
        place = f'x="{x(each.ms) + 8:.1f}" y="{at - 7:.1f}" font-weight="{weight}"'
        lines.append(f'<text {place} fill="{colour}">{escape(each.title)}</text>')
    return "\n".join([*lines, "</svg>", ""])

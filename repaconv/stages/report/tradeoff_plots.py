"""Draw the trade-off between accuracy and speed as SVG: of several networks, of runs, of conversion trials."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from repaconv.results import ReportRow, SpeedTrial, Trade

WIDTH, HEIGHT, LEFT, RIGHT, FLOOR, CEILING, LINE = 760, 320, 70, 640, 270, 20, 14
COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b")


class Point(NamedTuple):
    """A network in the plot.

    Attributes:
        title: Its name.
        series: Its series, which determines its color.
        speed: Speedup over the original.
        share: Share of the quality that it keeps, 0..1.
        solid: Whether it is filled.
        taken: Whether it is the chosen one, which has a ring.
        sure: Whether its speed is conclusive; otherwise it is hollow and dominates no other.
    """

    title: str
    series: str
    speed: float
    share: float
    solid: bool = True
    taken: bool = False
    sure: bool = True

    def beaten(self, others: Sequence[Point]) -> bool:
        """Whether another point is at least as good in both, and better in one."""
        own = (self.speed, self.share)
        better = (each for each in others if each.sure and each.speed >= self.speed and each.share >= self.share)
        return not self.sure or any((each.speed, each.share) != own for each in better)


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """The Pareto front, the slowest point first."""
    return tuple(sorted((each for each in points if not each.beaten(points)), key=lambda each: each.speed))


def curve_svg(points: Sequence[Point], what: str) -> str:
    """Draw the points; those of the Pareto front are named and joined. Empty if there are fewer than two.

    Args:
        points: The networks.
        what: Name of the quality on the vertical axis.
    """
    if len(points) < 2:
        return ""
    slow, fast = min(1.0, *(each.speed for each in points)), 1.05 * max(each.speed for each in points)
    low, high = min(each.share for each in points), max(each.share for each in points)
    low, high = low - 0.1 * (high - low) - 0.005, min(1.0, high + 0.1 * (high - low) + 0.005)

    def at(each: Point) -> tuple[float, float]:
        across, up = (each.speed - slow) / (fast - slow), (each.share - low) / (high - low)
        return LEFT + (RIGHT - LEFT) * across, FLOOR - (FLOOR - CEILING) * up

    series = list(dict.fromkeys(each.series for each in points))
    colors = {name: COLORS[n % len(COLORS)] for n, name in enumerate(series)}
    best, ticks = pareto(points), (0.0, 0.5, 1.0)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT + LINE * len(series)}" font-family="sans-serif" font-size="11" role="img"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>{escape(what)} against speed</title>']
    lines += axes(
        [f"speedup {slow + (fast - slow) * part:.2f}" for part in ticks],
        [f"{low + (high - low) * part:.1%}" for part in ticks],
    )
    joined = " ".join("{:.1f},{:.1f}".format(*at(each)) for each in best)
    lines.append(f'<polyline points="{joined}" fill="none" stroke="currentColor" opacity=".4"/>')
    for each in points:
        lines += _drawn(each, *at(each), colors[each.series], named=each in best)
    for n, name in enumerate(series):
        y = FLOOR + 40 + LINE * n
        lines.append(f'<circle cx="{LEFT + 4}" cy="{y - 4}" r="4" fill="{colors[name]}"/>')
        lines.append(f'<text x="{LEFT + 14}" y="{y}" fill="{colors[name]}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _drawn(each: Point, x: float, y: float, color: str, *, named: bool) -> list[str]:
    speed = f"speedup {each.speed:.2f}" if each.sure else f"not conclusive (about {each.speed:.1f}x)"
    text = escape(f"{each.title}: {each.share:.1%}, {speed}")
    fill = color if each.solid and each.sure else "none"
    lines = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}"><title>{text}</title></circle>']
    if each.taken:
        lines.append(f'<circle class="taken" cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="{color}"/>')
    if named:
        lines.append(f'<text x="{x + 8:.1f}" y="{y - 7:.1f}" fill="{color}">{escape(each.title)}</text>')
    return lines


def axes(across: Sequence[str], up: Sequence[str]) -> list[str]:
    """Draw both axes, each with labels at its start, middle and end."""
    lines = [f'<path d="M{LEFT} {CEILING} V{FLOOR} H{RIGHT}" fill="none" stroke="currentColor" opacity=".4"/>']
    for part, below, left in zip((0.0, 0.5, 1.0), across, up, strict=True):
        x, y = LEFT + (RIGHT - LEFT) * part, FLOOR - (FLOOR - CEILING) * part
        lines.append(f'<text x="{x:.1f}" y="{FLOOR + 18}" text-anchor="middle" fill="currentColor">{below}</text>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{left}</text>')
    return lines


# Accuracy against latency of several runs, as trained and as folded

PALE = ' opacity=".35"'


class _RunPoint(NamedTuple):
    """A folded run, and its latency as trained."""

    title: str
    ms: float
    accuracy: float
    before_ms: float | None
    sure: bool

    def beaten(self, others: Sequence[_RunPoint]) -> bool:
        """Whether another run is at least as good in both, and better in one; inconclusive ones dominate no other."""
        return not self.sure or any(
            each.sure
            and each.ms <= self.ms
            and each.accuracy >= self.accuracy
            and (each.ms, each.accuracy) != (self.ms, self.accuracy)
            for each in others
        )


def pareto_svg(rows: Sequence[ReportRow]) -> str:
    """Draw accuracy against latency; empty if fewer than two runs have an accuracy and a latency on the same target."""
    where = next((row.target for row in rows if row.accuracy and row.after_ms), "")
    points = [
        _RunPoint(row.title, row.after_ms, row.accuracy.candidate, row.before_ms, row.quality != "inconclusive")
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
        color, at = COLORS[n % len(COLORS)], y(each.accuracy)
        if each.before_ms is not None:
            ends = f'x1="{x(each.before_ms):.1f}" x2="{x(each.ms):.1f}" y1="{at:.1f}" y2="{at:.1f}"'
            lines.append(f'<line {ends} stroke="{color}" stroke-dasharray="3 3"/>')
            lines.append(f'<circle cx="{x(each.before_ms):.1f}" cy="{at:.1f}" r="5" fill="none" stroke="{color}"/>')
        text = f"{each.title}: {each.accuracy:.1%}, {each.ms:.3f} ms{'' if each.sure else ', inconclusive'}"
        dot = f'cx="{x(each.ms):.1f}" cy="{at:.1f}" r="5" fill="{color}"{"" if each.sure else PALE}'
        lines.append(f"<circle {dot}><title>{escape(text)}</title></circle>")
        weight = "normal" if each.beaten(points) else "bold"
        place = f'x="{x(each.ms) + 8:.1f}" y="{at - 7:.1f}" font-weight="{weight}"'
        lines.append(f'<text {place} fill="{color}">{escape(each.title)}</text>')
    return "\n".join([*lines, "</svg>", ""])


# Quality against speedup of the trials of a conversion


def trade_svg(trade: Trade) -> str:
    """Quality on the validation split against the speedup on the target; the chosen conversion has a ring."""
    rows = (trade.taken, *trade.others)
    unchanged = Point("unconverted", "unconverted", 1.0, 1.0)
    points = [
        Point(
            trial_label(row),
            row.kind,
            row.speed.median,
            quality_kept(row),
            taken=row is trade.taken,
            sure=row.speed.conclusive,
        )
        for row in rows
    ]
    return curve_svg([unchanged, *points], "quality")


def trial_label(row: SpeedTrial) -> str:
    """A short label of a trial."""
    replaced = [str(len(row.blocks))] if row.blocks else []
    return f"{row.kind} {', '.join([*replaced, *map(str, row.schedule)])}"


def quality_kept(row: SpeedTrial) -> float:
    """Share of unchanged top-1 predictions; without classes, 1 minus the relative error of the outputs."""
    assert row.tried is not None
    return max(0.0, 1 - row.tried.error) if row.tried.agreement is None else row.tried.agreement

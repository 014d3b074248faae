"""Plot the difference between reference and candidate at each module, as SVG."""

from __future__ import annotations

from html import escape
from math import floor, isfinite, log10

from repaconv.results import Link

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 360, 70, 40, 40
LOWEST_DECADE = -17
"""log10 of the smallest difference that is drawn; smaller ones count as 0."""


def drift_svg(link: Link) -> str:
    """Plot the relative difference at each module on a logarithmic axis; an exact 0 is drawn at its lower end.

    Raises:
        ValueError: The link has no comparison of intermediate values.
    """
    if not link.location or not link.location.drift:
        raise ValueError(f"no module of the link {link.name} was compared")
    rows = link.location.drift
    shown = [1.0 if not isfinite(row.max_rel_error) else log10(row.max_rel_error or 1e-300) for row in rows]
    low = floor(min((value for value in shown if value > LOWEST_DECADE), default=LOWEST_DECADE)) - 1
    high = max(0, int(max(shown)) + 1)
    logs = [max(value, low) for value in shown]
    across, up = (WIDTH - LEFT - 20) / max(1, len(rows) - 1), (HEIGHT - TOP - BOTTOM) / (high - low)

    def point(number: int, value: float) -> tuple[float, float]:
        return LEFT + number * across, HEIGHT - BOTTOM - (value - low) * up

    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
        for power in range(low, high + 1, max(1, (high - low) // 8))
        for y in [point(0, power)[1]]
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(point, range(len(logs)), logs))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(row.place)}: {row.max_rel_error:.2e}</title></circle>'
        for row, (x, y) in zip(rows, map(point, range(len(logs)), logs), strict=True)
    )
    limit = ""
    if link.tolerance and link.tolerance.rtol:
        y = point(0, max(low, min(high, log10(link.tolerance.rtol))))[1]
        limit = f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c33" stroke-dasharray="6 4"/>'
    where = f"; first different at {link.location.module}" if link.location.module else ""
    title = escape(f"{link.name}: {link.candidate}, compared with {link.reference}{where}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="currentColor"><title>{title}</title><text x="{LEFT}" y="20">{title}</text>{grid}{limit}'
        f'<polyline points="{line}" fill="none" stroke="#36c" stroke-width="1.5"/><g fill="#36c">{dots}</g></svg>\n'
    )

"""Render the report as HTML, markdown or a model card, with the filters that format its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from repaconv.results import Artefact, HistoryEntry, Link, Report, RunsReport
from repaconv.stages.report.tradeoff_plots import COLORS, pareto_svg


def html(report: Report, pictures: Mapping[str, str]) -> str:
    """One self-contained HTML page: no scripts, no downloads.

    Args:
        report: The report.
        pictures: SVG pictures made by repaconv, by name: ``profile``, ``history-<target>``, ``drift-<link>``.
    """
    return _render("report.html.j2", report, pictures)


def markdown(report: Report, _pictures: Mapping[str, str]) -> str:
    """The same report as markdown, without pictures."""
    return _render("report.md.j2", report, {})


def card(report: Report, _pictures: Mapping[str, str]) -> str:
    """A model card with verification, figures and provenance; the publisher adds the license."""
    return _render("card.md.j2", report, {})


RENDERERS = {"html": html, "markdown": markdown, "card": card}
"""The function that renders each format."""


def runs_html(report: RunsReport) -> str:
    """A page that compares several runs, with a plot of accuracy against latency."""
    return _render("runs.html.j2", report, {"pareto": pareto_svg(report.rows)})


def runs_markdown(report: RunsReport) -> str:
    """The same comparison as markdown, without the plot."""
    return _render("runs.md.j2", report, {})


def _render(name: str, report: Artefact, pictures: Mapping[str, str]) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("repaconv.stages.report"),
        autoescape=jinja2.select_autoescape(["html.j2", "html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    svgs = {key: Markup(svg) for key, svg in pictures.items()}  # made by repaconv and escaped where they are made
    text = environment.get_template(name).render(r=report, pictures=svgs)
    return text.rstrip("\n") + "\n"


def saved(before: float, after: float, digits: int = 1) -> str:
    """Format how much smaller ``after`` is than ``before``: 12.3%, or 12.3% more."""
    if not before:
        return ""
    share = f"{abs(1 - after / before):.{digits}%}"
    return f"{share} more" if after > before else share


def less(before: float, after: float) -> str:
    """The same in front of the object of comparison: 12.3% less than."""
    return f"{saved(before, after)} than" if after > before else f"{saved(before, after)} less than"


def size(value: Any) -> str:
    """Format an image size: 224 x 224, or dynamic."""
    return value if isinstance(value, str) else " x ".join(map(str, value))


def allowed(link: Link) -> str:
    """The tolerance of a link in words; for a lossy link, with what was measured."""
    return link.lossy_text or ("" if link.tolerance is None else link.tolerance.description)


def plain(value: Any) -> str:
    """Format a fact's value as text."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


FORMATS = {
    "count": "{:,.0f}",
    "ms": "{:.3f}",
    "rate": "{:,.1f}",
    "ratio": "{:.3f}",
    "share": "{:.1%}",
    "error": "{:.1e}",
}
"""Formats of numbers, by the name of their filter."""
FILTERS: dict[str, Callable[..., str]] = {each.__name__: each for each in (saved, less, size, allowed, plain)}
FILTERS |= {name: form.format for name, form in FORMATS.items()}


def history_svg(entries: Sequence[HistoryEntry]) -> str:
    """Plot the median milliseconds of every measurement in order; untrusted ones are hollow.

    A line joins only comparable measurements: the same machine, threads, batch size and image size.
    """
    width, left, line_height = 760, 60, 14
    ways = list(dict.fromkeys(map(_configuration, entries)))
    height, floor, ceiling = 200 + (line_height * len(ways) if len(ways) > 1 else 0), 172, 14
    top = 1.1 * max(entry.p50_ms for entry in entries)
    across = (width - left - 20) / max(1, len(entries) - 1)
    points = [(left + n * across, floor - (floor - ceiling) * each.p50_ms / top) for n, each in enumerate(entries)]
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" role="img"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>median milliseconds over the measurements</title>']
    for part in (0.0, 0.5, 1.0):
        y = floor - (floor - ceiling) * part
        lines.append(
            f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".2"/>'
        )
        lines.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{top * part:.2f}</text>'
        )
    for n, way in enumerate(ways):
        alike = [(x, y, entry) for (x, y), entry in zip(points, entries, strict=True) if _configuration(entry) == way]
        lines += _line(alike, COLORS[n % len(COLORS)])
        if len(ways) > 1:
            y, color = 200 + line_height * n, COLORS[n % len(COLORS)]
            lines.append(f'<text x="{left}" y="{y + 8}" fill="{color}">{escape(way)}</text>')
    ends = ((left, "start", entries[0].when), (width - 20, "end", entries[-1].when))
    for x, anchor, when in ends if len(entries) > 1 else ends[:1]:
        lines.append(
            f'<text x="{x}" y="{floor + 20}" text-anchor="{anchor}" fill="currentColor">{escape(when[:10])}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _configuration(entry: HistoryEntry) -> str:
    """The configuration of a measurement; only measurements with equal configurations are joined."""
    pixels = "" if entry.image_size is None else f", {size(entry.image_size)} pixels"
    return f"{entry.threads} threads, batch {entry.batch}{pixels}, {entry.machine}"


def _line(alike: Sequence[tuple[float, float, HistoryEntry]], color: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in alike)
    lines = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>']
    for x, y, entry in alike:
        fill = color if entry.quality == "trusted" else "none"
        text = escape(f"{entry.when}: {entry.p50_ms:.3f} ms, {entry.quality}; {_configuration(entry)}")
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}"><title>{text}</title></circle>'
        )
    return lines

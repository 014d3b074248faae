"""Draw a fold as SVG: the layers of a block before and after, with lines to the layer that they became."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from repaconv.results import Change, FoldedLayer, FoldStep

MOST_DRAWN = 12
"""Number of places that are drawn; the others are counted."""
WIDTH, BOX, HEIGHT, GAP, EDGE, LINE = 360, 156, 46, 8, 12, 13
LETTERS, WORDS = 24, 54
"""Most characters in a box, and in a line of text."""
STYLE = """
.fold-picture { color-scheme: light dark; font-family: system-ui, sans-serif; font-size: 11px; max-width: 36rem;
  min-width: 0; --paper: #fff; --ink: #1b1f24; --faint: #57606a; --line: #8c959f; --soft: #f6f8fa; --one: #0550ae;
  --one-soft: #ddf4ff; }
@media (prefers-color-scheme: dark) { .fold-picture { --paper: #0d1117; --ink: #e6edf3; --faint: #9da7b1;
  --line: #6e7681; --soft: #161b22; --one: #79c0ff; --one-soft: #0c2d6b; } }
.fold-picture text { fill: var(--ink); }
.fold-picture .note { fill: var(--faint); }
.fold-picture .name { font-weight: 600; }
.fold-picture .small { font-size: 10px; }
.fold-picture .title { font-size: 13px; font-weight: 600; }
.fold-picture .paper { fill: var(--paper); }
.fold-picture .layer { fill: var(--soft); stroke: var(--line); }
.fold-picture .one { fill: var(--one-soft); stroke: var(--one); stroke-width: 1.5; }
.fold-picture .gone { fill: none; stroke: var(--line); stroke-dasharray: 4 3; }
.fold-picture path { fill: none; stroke: var(--line); }
.fold-picture path.joined { stroke: var(--one); stroke-width: 1.5; }
"""


class FoldedPlace(NamedTuple):
    """A place where something was folded: a block or a node.

    Attributes:
        title: Name of the block or node.
        description: What was folded there.
        before: Its layers before the fold.
        after: Its layers after the fold.
        alike: How many other places of this kind there are, whatever their width.
    """

    title: str
    description: str
    before: tuple[FoldedLayer, ...]
    after: tuple[FoldedLayer, ...]
    alike: int = 0

    @property
    def saved(self) -> tuple[int, int, int]:
        """Multiply-accumulates, parameters and layers that the fold saves."""
        return (
            _macs(self.before) - _macs(self.after),
            _parameters(self.before) - _parameters(self.after),
            len(self.before) - len(self.after),
        )


def places_of(rows: Iterable[FoldStep | Change]) -> tuple[FoldedPlace, ...]:
    """The drawable places of a certificate or of a graph's changes, the largest savings first."""
    every = list(rows)
    kinds = [_kind(row) for row in every]
    places = [
        FoldedPlace(*_title_and_description(row), row.before, row.after, kinds.count(kind) - 1)
        for row, kind in zip(every, kinds, strict=True)
        if row.before or row.after
    ]
    return tuple(sorted(places, key=lambda place: place.saved, reverse=True))


def _title_and_description(row: FoldStep | Change) -> tuple[str, str]:
    if isinstance(row, Change):
        return row.place or row.rewrite, f"{row.rewrite}: {row.description}"
    return row.module, "; ".join(row.folded) + (f" ({row.equation})" if row.equation else "")


def _kind(row: FoldStep | Change) -> object:
    """A key that is equal for blocks folded in the same way; each change of a graph is its own kind."""
    return id(row) if isinstance(row, Change) else (re.sub(r"\d+", "#", row.module), row.folded)


def fold_svg(places: Sequence[FoldedPlace], title: str) -> str:
    """Draw the places in one column, as wide as a phone; empty if there are none.

    Args:
        places: The places from `places_of`; the first twelve are drawn.
        title: Name of the network.
    """
    if not places:
        return ""
    drawn, y = [], EDGE
    for place in places[:MOST_DRAWN]:
        lines, y = _draw_place(place, y)
        drawn += lines
    left = max(0, len(places) - MOST_DRAWN)
    if left:
        y += LINE
        drawn.append(f'<text class="note" x="{EDGE}" y="{y}">and {left:,} more places, which save less</text>')
    described = " ".join(_sentence(place) for place in places[:MOST_DRAWN])
    described += f" And {left:,} more places." if left else ""
    head = f'viewBox="0 0 {WIDTH} {y + EDGE}" width="100%" role="img" aria-labelledby="fold-title fold-desc"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fold-picture" {head}>',
            f'<title id="fold-title">{escape(title)}: layers before and after the fold</title>',
            f'<desc id="fold-desc">{escape(described)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{y + EDGE}"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


def _draw_place(place: FoldedPlace, top: int) -> tuple[list[str], int]:
    """Draw one place; return its SVG lines and where the next place begins."""
    alike = f" and {place.alike} of its kind" if place.alike else ""
    y = top + LINE
    lines = [f'<text class="title" x="{EDGE}" y="{y}">{escape(_short(place.title, 44 - len(alike)))}{alike}</text>']
    counts = [("parameters", _parameters(place.before), _parameters(place.after))]
    counts += [("MACs", _macs(place.before), _macs(place.after))] if _all_known(place) else []
    for what, before, after in counts:
        y += LINE + 2
        lines.append(f'<text x="{EDGE}" y="{y}">{before:,} → {after:,} {what}{_share(before, after)}</text>')
    for line in textwrap.wrap(place.description, WORDS):
        y += LINE
        lines.append(f'<text class="note" x="{EDGE}" y="{y}">{escape(line)}</text>')
    y += LINE + 6
    right = WIDTH - EDGE - BOX
    lines.append(f'<text class="note" x="{EDGE}" y="{y}">before</text>')
    lines.append(f'<text class="note" x="{right}" y="{y}">after</text>')
    y += 6
    lefts = [y + (HEIGHT + GAP) * n for n in range(len(place.before))]
    rights = _positions_after(place, lefts, y)
    joined = {name for name in rights if sum(name in each.into for each in place.before) > 1}
    ends = [y, *(each + HEIGHT + GAP for each in (*lefts, *rights.values()))]
    for each, at in zip(place.before, lefts, strict=True):
        for name in each.into:
            if name in rights:
                start, end, middle = at + HEIGHT / 2, rights[name] + HEIGHT / 2, (EDGE + BOX + right) / 2
                curve = f"M{EDGE + BOX} {start:g} C{middle:g} {start:g} {middle:g} {end:g} {right} {end:g}"
                lines.append(f'<path{" class=" + chr(34) + "joined" + chr(34) if name in joined else ""} d="{curve}"/>')
        lines += _box(each, EDGE, at, "layer" if each.into else "gone")
    for each in place.after:
        lines += _box(each, right, rights[each.name], "one" if each.name in joined else "layer")
    if not place.after:
        lines.append(f'<text class="note" x="{right}" y="{y + HEIGHT / 2:g}">nothing</text>')
    return lines, max(ends) + EDGE


def _positions_after(place: FoldedPlace, lefts: Sequence[int], top: int) -> dict[str, int]:
    """The y position of each layer after the fold: centered on its sources, without overlap."""
    wanted = {}
    for n, each in enumerate(place.after):
        sources = [at for layer, at in zip(place.before, lefts, strict=True) if each.name in layer.into]
        wanted[each.name] = (sum(sources) / len(sources) if sources else top, n)
    found: dict[str, int] = {}
    free = top
    for name, (at, _) in sorted(wanted.items(), key=lambda one: one[1]):
        found[name] = max(free, int(at))
        free = found[name] + HEIGHT + GAP
    return found


def _box(layer: FoldedLayer, x: int, y: int, kind: str) -> list[str]:
    macs = f"{layer.macs:,} MACs" if layer.macs else ""
    label = "gone" if kind == "gone" else layer.kind
    rows = (("name", layer.name), ("note small", f"{label}, {layer.parameters:,} params"), ("note small", macs))
    lines = [f'<g><title>{escape(_words(layer))}</title><rect class="{kind}" x="{x}" y="{y}" rx="4" width="{BOX}"']
    lines[0] += f' height="{HEIGHT}"/>'
    for n, (style, text) in enumerate(rows):
        short = escape(_short(text, LETTERS - 7 if style == "name" else LETTERS))
        lines.append(f'<text class="{style}" x="{x + 7}" y="{y + 14 + LINE * n}">{short}</text>')
    return [*lines, "</g>"]


def _words(layer: FoldedLayer) -> str:
    macs = f", {layer.macs:,} MACs" if layer.macs else ""
    return f"{layer.name}: {layer.kind}, {layer.parameters:,} parameters{macs}"


def _sentence(place: FoldedPlace) -> str:
    """A description for screen readers: which layers became which."""
    parts = [f"{each.name} went into {' and '.join(each.into)}" for each in place.before if each.into]
    parts += [f"{each.name} is gone" for each in place.before if not each.into]
    alike = f" and {place.alike} of its kind" if place.alike else ""
    before, after = _parameters(place.before), _parameters(place.after)
    return (
        f"{place.title}{alike}: {'; '.join(parts) or place.description}; {before:,} parameters before, {after:,} after."
    )


def _short(text: str, most: int) -> str:
    """Shorten a name to its end, which is its most specific part."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _share(before: int, after: int) -> str:
    if not before or before == after:
        return ""
    return f" ({(after - before) / before:+.1%})"


def _all_known(place: FoldedPlace) -> bool:
    layers = (*place.before, *place.after)
    known = all(each.macs is not None or each.kind == FoldedLayer.PARAMETER for each in layers)
    return known and any(each.macs for each in layers)


def _parameters(layers: Iterable[FoldedLayer]) -> int:
    return sum(each.parameters for each in layers)


def _macs(layers: Iterable[FoldedLayer]) -> int:
    return sum(each.macs or 0 for each in layers)

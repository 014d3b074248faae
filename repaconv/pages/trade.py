"""The trade-off of a conversion as a picture."""

from __future__ import annotations

from repaconv.artefacts import Raced, Trade
from repaconv.pages.curve import Point, curve_svg


def trade_svg(trade: Trade) -> str:
    """Quality on the validation split against the speedup on the target; the chosen conversion has a ring."""
    rows = (trade.taken, *trade.others)
    unchanged = Point("unconverted", "unconverted", 1.0, 1.0)
    points = [
        Point(named(row), row.kind, row.speed.median, kept(row), taken=row is trade.taken, sure=row.speed.conclusive)
        for row in rows
    ]
    return curve_svg([unchanged, *points], "quality")


def named(row: Raced) -> str:
    """In a few words."""
    replaced = [str(len(row.blocks))] if row.blocks else []
    return f"{row.kind} {', '.join([*replaced, *map(str, row.schedule)])}"


def kept(row: Raced) -> float:
    """The share of first classes that stay; of a network without classes, what the error leaves of the outputs."""
    assert row.tried is not None
    return max(0.0, 1 - row.tried.error) if row.tried.agreement is None else row.tried.agreement

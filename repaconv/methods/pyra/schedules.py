"""Merging schedules of PYRA: how many tokens go in each block."""

from __future__ import annotations

from math import floor

Shape = tuple[int, int, bool]
"""(width, depth, whether there is a distillation token)."""

_HIGH_12 = (40, 34, 30, 24, 18, 14, 10, 8, 4, 4, 3, 3)
_HIGH_24 = (20, 19, 18, 17, 15, 13, 13, 12, 10, 9, 8, 6, 6, 4, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1)

TABLE_PATCHES = 196
# The official code's, for that many patches. Its low ones end where no more tokens can go; the paper says 16 and 8
# throughout. The high ones are Table 13.
TABLES: dict[tuple[str, Shape], tuple[int, ...]] = {
    ("low", (768, 12, False)): (16,) * 11 + (10,),
    ("low", (768, 12, True)): (16,) * 6 + (10,) * 6,
    ("low", (1024, 24, False)): (8,) * 23 + (6,),
    ("high", (768, 12, False)): _HIGH_12,
    ("high", (768, 12, True)): _HIGH_12,
    ("high", (1024, 24, False)): _HIGH_24,
}


def scheduled(name: str, shape: Shape) -> tuple[int, ...] | None:
    """The official schedule of that name for a net of that shape, if there is one."""
    return TABLES.get((name, shape))


def equation_8(ratio: float, depth: int, patches: int, left: int = 4) -> tuple[int, ...]:
    """The paper's eq. 8 for f / F = ``ratio``, with ``left`` patches remaining; it adjusted the results by hand.

    Raises:
        ValueError: If the ratio is not between 0 and 1.
    """
    if not 0 < ratio < 1:
        raise ValueError("the FLOP ratio is not between 0 and 1")

    def g(block: int) -> float:
        return float((1 - block / depth) ** (1 / ratio - 1))

    # a whole number may come out a rounding below itself
    return tuple(floor((g(block - 1) - g(block)) * (patches - left) + 1e-9) for block in range(1, depth + 1))


def parse_schedule(text: str, depth: int, patches: int, shape: Shape) -> tuple[int, ...]:
    """``16,16,8``; ``low`` or ``high`` for the official tables; ``eq8:0.5`` for the paper's eq. 8.

    Raises:
        ValueError: If it is none of these, or of another depth.
    """
    if text in ("low", "high"):
        table = scheduled(text, shape)
        if table is None:
            raise ValueError(f"the official code has no {text!r} for width {shape[0]} and depth {depth}")
        return table
    if text.startswith("eq8:"):
        return equation_8(float(text.removeprefix("eq8:")), depth, patches)
    parts = text.strip("[]").replace(" ", "").split(",")
    if not all(part.isdigit() for part in parts):
        raise ValueError("neither numbers nor low, high or eq8:RATIO")
    if len(parts) != depth:
        raise ValueError(f"{len(parts)} numbers for {depth} blocks")
    return tuple(map(int, parts))

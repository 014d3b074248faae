"""Merging schedules of PYRA: how many tokens each block merges into others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

from torch import Tensor

from repaconv.backbones.tensor_names import weight_of
from repaconv.core.errors import Refused
from repaconv.method_api.settings import SettingsReader
from repaconv.results import Fact, whole_number

Shape = tuple[int, int, bool]
"""(width, depth, whether there is a distillation token)."""

_HIGH_12 = (40, 34, 30, 24, 18, 14, 10, 8, 4, 4, 3, 3)
_HIGH_24 = (20, 19, 18, 17, 15, 13, 13, 12, 10, 9, 8, 6, 6, 4, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1)

TABLE_PATCHES = 196
# The official code's schedules, for that many patches. Its low ones stop when no more tokens can merge; the paper gives
# 16 and 8 for all blocks. The high ones are the paper's Table 13.
TABLES: dict[tuple[str, Shape], tuple[int, ...]] = {
    ("low", (768, 12, False)): (16,) * 11 + (10,),
    ("low", (768, 12, True)): (16,) * 6 + (10,) * 6,
    ("low", (1024, 24, False)): (8,) * 23 + (6,),
    ("high", (768, 12, False)): _HIGH_12,
    ("high", (768, 12, True)): _HIGH_12,
    ("high", (1024, 24, False)): _HIGH_24,
}


REMAINING_PATCHES = 4
"""How many patches eq. 8 leaves unmerged."""


def official_schedule(name: str, shape: Shape) -> tuple[int, ...] | None:
    """The official schedule of that name for a network of that shape; None if there is none."""
    return TABLES.get((name, shape))


def equation_8(ratio: float, depth: int, patches: int) -> tuple[int, ...]:
    """The schedule by the paper's eq. 8, for f / F = ``ratio`` and `REMAINING_PATCHES` after the last block.

    The paper's own schedules were adjusted manually afterwards.

    Raises:
        ValueError: If the ratio is not between 0 and 1.
    """
    if not 0 < ratio < 1:
        raise ValueError("the FLOP ratio is not between 0 and 1")

    def g(block: int) -> float:
        return float((1 - block / depth) ** (1 / ratio - 1))

    # rounding may give slightly less than a whole number
    return tuple(
        floor((g(block - 1) - g(block)) * (patches - REMAINING_PATCHES) + 1e-9) for block in range(1, depth + 1)
    )


def patches_of(sizes: Mapping[str, Any]) -> int:
    """The number of patches of a network; ``sizes`` are fields of `ViTConfig`."""
    height, width = sizes["image_size"]
    return int(height * width // sizes["patch"] ** 2)


def shape_of(sizes: Mapping[str, Any], depth: int) -> Shape:
    """The network's key in the official tables; ``sizes`` are fields of `ViTConfig`."""
    return sizes["width"], depth, len(sizes["tokens"]) == 2


def parse_schedule(text: str, depth: int, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Parse a schedule: ``16,16,8``; ``low`` or ``high`` for the official tables; ``eq8:0.5`` for the paper's eq. 8.

    Args:
        text: The text to parse.
        depth: Number of blocks.
        sizes: The network's sizes, fields of `ViTConfig`.

    Raises:
        ValueError: If the text is none of these, or has another depth.
    """
    shape = shape_of(sizes, depth)
    if text in ("low", "high"):
        table = official_schedule(text, shape)
        if table is None:
            raise ValueError(f"the official code has no {text!r} for width {shape[0]} and depth {depth}")
        return table
    if text.startswith("eq8:"):
        return equation_8(float(text.removeprefix("eq8:")), depth, patches_of(sizes))
    parts = text.strip("[]").replace(" ", "").split(",")
    numbers = tuple(number for part in parts if (number := whole_number(part)) is not None)
    if len(numbers) < len(parts):
        raise ValueError("neither numbers nor low, high or eq8:RATIO")
    if len(numbers) != depth:
        raise ValueError(f"{len(numbers)} numbers for {depth} blocks")
    return numbers


def read_schedule(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], depth: int, args: Mapping[str, Any], reader: SettingsReader
) -> tuple[int, ...]:
    """Read r, the number of tokens that merge, of every block.

    It is read from the rows of pyra_a, else --set schedule, else the official table that the trainer's args name.
    Without any of these no block merges tokens.

    Raises:
        Refused: If the rows and the user disagree, if args turn merging on by an unknown schedule, or if more tokens
            are to merge than can.
    """
    asked = reader.user_value("schedule", lambda text: parse_schedule(text, depth, sizes))
    schedule, source = _schedule_and_source(
        _rows(tensors, depth), asked, args, shape_of(sizes, depth), patches_of(sizes)
    )
    if schedule is None:
        reader.facts.append(Fact(name="schedule", value="no merging", source=source))
        return (0,) * depth
    require_possible_schedule(schedule, sizes)
    reader.facts = [fact for fact in reader.facts if fact.name != "schedule"]
    against = "args.token_merging is off" if source == "--set" and args.get("token_merging") is False else ""
    reader.facts.append(Fact(name="schedule", value=list(schedule), source=source, against=against))
    return schedule


def _rows(tensors: Mapping[str, Tensor], depth: int) -> tuple[int, ...] | None:
    """The number of rows of pyra_a in every block, which may be 0; None if no block has any."""
    places = [f"blocks.{index}.pyra_a" for index in range(depth)]
    rows = tuple(
        weight_of(tensors, place, 2).shape[0] if place in tensors and tensors[place].numel() else 0 for place in places
    )
    return rows if any(rows) else None


def _schedule_and_source(
    rows: tuple[int, ...] | None, asked: tuple[int, ...] | None, args: Mapping[str, Any], shape: Shape, patches: int
) -> tuple[tuple[int, ...] | None, str]:
    """The schedule, None for no merging, and its source."""
    if rows and asked is not None and asked != rows:
        raise Refused(
            f"the rows of pyra_a give the schedule {list(rows)}, but --set schedule says {list(asked)}.",
            hint="Leave --set schedule out; the rows are what was trained.",
            code="pyra.schedule",
        )
    if rows:
        return rows, "rows of pyra_a"
    if asked is not None:
        return asked, "--set"
    if args.get("token_merging") is not True:
        return None, "args.token_merging is off" if "token_merging" in args else "no key and no args speak of merging"
    table = official_schedule(str(args.get("merging_schedule")), shape) if patches == TABLE_PATCHES else None
    if table is None:
        raise Refused(
            f"the training merged tokens by the schedule {args.get('merging_schedule')!r}, which is defined only "
            f"in its code; no such schedule is known for width {shape[0]}, depth {shape[1]} and {patches} patches.",
            hint="Give it as --set schedule=16,16,... (tokens merged in each block).",
            code="setting.needed",
        )
    return table, f"the official table {args['merging_schedule']!r} for this width and depth, by args"


def first_merging_block(schedule: Sequence[int]) -> int:
    """The index of the first block that merges tokens; the number of blocks if none does."""
    return next((index for index, r in enumerate(schedule) if r), len(schedule))


def require_possible_schedule(schedule: tuple[int, ...], sizes: Mapping[str, Any]) -> None:
    """Refuse an impossible schedule: a block can merge at most half of its patches, and no token before the patches.

    Args:
        schedule: Tokens that merge, block by block.
        sizes: The network's sizes, fields of `ViTConfig`.

    Raises:
        Refused: If more tokens are to merge, or the network outputs every patch token.
    """
    if sizes["pool"] == "none":
        raise Refused(
            "this network outputs one vector per patch, but after merging there are fewer tokens than patches.",
            hint=(
                "Merge tokens only in networks that read the class token or the mean: --set pool=avg if you read the "
                "mean."
            ),
            code="pyra.tokens",
        )
    prefix = len(sizes["tokens"]) + sizes["registers"]
    left = prefix + patches_of(sizes)
    for index, r in enumerate(schedule):
        most = (left - prefix) // 2
        if r > most:
            raise Refused(
                f"block {index} merges {r} of {left} tokens, but at most {most} can merge.",
                hint="The schedule belongs to another image size or another network.",
                code="pyra.schedule",
            )
        left -= r

"""What an order for a conversion means, and what of it makes no sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from repaconv.backbones.vit import ViTConfig
from repaconv.converting.fitting import FitBy, How, Kind
from repaconv.converting.judging import Budget
from repaconv.converting.merging import read_schedule
from repaconv.converting.parting import Parted
from repaconv.errors import Refused, UsageProblem
from repaconv.orders.converting import ConvertOrder

KINDS, FITS, CRITERIA = ("depthwise", "ensembled", "static"), ("squares", "gaussian", "mean"), ("error", "sigma")
USUAL_BUDGET = 0.02
"""The share of first classes that may change where blocks are to be chosen and no budget was given."""


class Blocks(NamedTuple):
    """Which blocks are asked for: these, or so many, or of an order as many as ``enough`` says, or a budget."""

    named: tuple[int, ...] = ()
    number: int | None = None
    enough: Callable[[Sequence[int]], int] | None = None


def read_blocks(text: str, depth: int) -> Blocks:
    """``auto``, ``3``, or ``0,2,5`` (``2,`` for one).

    Raises:
        UsageProblem: If it is none of these, or of blocks that are not there.
    """
    if text == "auto":
        return Blocks()
    parts = text.removesuffix(",").split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise _no_blocks(f"--blocks {text} is neither auto, nor a number, nor numbers with commas", depth)
    numbers = tuple(int(part) for part in parts)
    if "," not in text:
        if not 1 <= numbers[0] <= depth:
            raise _no_blocks(f"--blocks {text}: the network has {depth} blocks", depth)
        return Blocks(number=numbers[0])
    if wrong := [number for number in numbers if number >= depth]:
        raise _no_blocks(f"there is no block {wrong[0]}: the network has {depth}, from 0", depth)
    if len(set(numbers)) < len(numbers):
        raise _no_blocks(f"--blocks {text} names a block twice", depth)
    return Blocks(named=tuple(sorted(numbers)))


def _no_blocks(what: str, depth: int) -> UsageProblem:
    return UsageProblem(f"{what}.", hint=f"E.g. --blocks {max(1, depth // 2)}, or --blocks 0,1.", code="convert.blocks")


def read_how(order: ConvertOrder, config: ViTConfig) -> How:
    """The form and the fit, and what merges behind.

    Raises:
        UsageProblem: If one of them is not known, or they do not go together.
    """
    known = (("--kind", order.kind, KINDS), ("--fit", order.fit, FITS), ("--criterion", order.criterion, CRITERIA))
    for option, given, words in known:
        if given not in words:
            raise UsageProblem(
                f"{option} {given} is not known.", hint=f"Known: {', '.join(words)}.", code="convert.unknown"
            )
    if order.fit != "squares" and order.kind != "depthwise":
        raise UsageProblem(
            f"--fit {order.fit} sets kernels by hand, and --kind {order.kind} is fitted.",
            hint="Leave one of them out.",
            code="convert.fit",
        )
    if order.keep is not None:
        raise UsageProblem(
            "--keep shares what merges among all blocks, and behind a convolution alone tokens may.",
            hint="Say block by block what merges: --schedule 0,0,16,16,...",
            code="convert.schedule",
        )
    schedule = read_schedule(order.schedule, config) if order.schedule is not None else ()
    return How(cast(Kind, order.kind), order.kernel, cast(FitBy, order.fit), schedule=schedule)


def require_before(blocks: Blocks, how: How) -> None:
    """Whether the blocks to replace stand before the first that merges.

    Raises:
        UsageProblem: If not.
    """
    first = how.replaceable
    if first is None:
        return
    if first == 0 or max(blocks.named, default=0) >= first or (blocks.number or 0) > first:
        raise UsageProblem(
            f"tokens merge from block {first} on, lie on no grid there, and only the {first} blocks before can be "
            "replaced.",
            hint=f"Begin --schedule with more zeros, or name other blocks{f': --blocks {first}' if first else ''}.",
            code="convert.schedule",
        )


def read_budget(order: ConvertOrder, parted: Parted, *, classes: int, choosing: bool) -> Budget:
    """What may be lost; first classes, where blocks are to be chosen and nothing was said.

    Raises:
        UsageProblem: If there is nothing to measure it by.
    """
    budget = Budget(order.max_disagreement, order.max_accuracy_drop)
    if choosing and not budget.asked:
        budget = Budget(USUAL_BUDGET)
    if budget.asked and not classes:
        raise UsageProblem(
            "the network gives features, and a budget is of first classes.",
            hint="Say how many blocks, or which: --blocks N; the error is measured all the same.",
            code="convert.no-classes",
        )
    if budget.max_accuracy_drop is not None and not all((part.labels >= 0).any() for part in parted[1:]):
        raise UsageProblem(
            "--max-accuracy-drop needs labelled images, to choose by and to judge by.",
            hint="Give one folder a class, or 'labels' in the .npz; --max-disagreement needs none.",
            code="convert.no-labels",
        )
    return budget


def require_enough(parted: Parted, patches: int, width: int) -> None:
    """W^O has width + 1 unknowns an output: fewer tokens than that fit anything.

    Raises:
        Refused: Naming both.
    """
    tokens = len(parted.fitting.images) * patches
    if tokens <= width:
        raise Refused(
            f"{len(parted.fitting.images)} images to fit on are {tokens} tokens, and every output has {width + 1} "
            "unknowns.",
            hint="Give more images: a few hundred are usual.",
            code="convert.too-few",
        )

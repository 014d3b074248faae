"""Parse and check the options of a conversion: blocks, heads, kind of conversion, budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from repaconv.backbones.vit import ViTConfig
from repaconv.conversion.image_splits import ImageSplits
from repaconv.conversion.kernel_fitting import ConversionSettings, FitBy, Head, Kind
from repaconv.conversion.plain_vit import PlainViT
from repaconv.conversion.token_merging import read_schedule
from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.methods.pyra.merging_schedules import first_merging_block
from repaconv.results import whole_number
from repaconv.tasks.embedding import LEAST_IMAGES
from repaconv.verification.accuracy_budget import Budget

if TYPE_CHECKING:
    from repaconv.stages.convert.options import ConvertOptions

KINDS, FITS, CRITERIA = ("depthwise", "ensembled", "static"), ("squares", "gaussian", "mean"), ("error", "sigma")
DEFAULT_BUDGET = 0.02
"""Default maximum share of changed top-1 predictions if blocks are to be chosen."""


class RequestedBlocks(NamedTuple):
    """Which blocks to replace: the ``named`` ones, a ``number``, as many of a ranking as ``enough`` returns, or as many
    as the budget allows.

    For single heads, ``single`` is True: either the given ``heads`` (``named`` are their blocks) or ``number`` heads.
    """

    named: tuple[int, ...] = ()
    number: int | None = None
    enough: Callable[[Sequence[int]], int] | None = None
    heads: tuple[Head, ...] = ()
    single: bool = False

    @property
    def by_budget(self) -> bool:
        """Whether the budget determines the number of blocks."""
        return self == RequestedBlocks()


def read_blocks_or_heads(options: ConvertOptions, plain: PlainViT) -> RequestedBlocks:
    """Parse which blocks or single heads to replace.

    Raises:
        UsageProblem: If the options are invalid or name a block or head that does not exist.
        Refused: If single heads cannot be replaced in this network.
    """
    if options.heads is None:
        return read_blocks(options.blocks, len(plain.blocks))
    if (
        options.blocks != "auto"
        or options.speedup is not None
        or (options.kind, options.fit) != ("depthwise", "squares")
    ):
        raise UsageProblem(
            "--heads cannot be combined with --blocks, with --speedup or with another --kind than depthwise.",
            hint="Leave the other options out.",
            code="convert.heads",
        )
    if plain.config.prefix:
        raise Refused(
            "single heads can be replaced only in networks whose tokens are all patches; this network has other "
            "tokens, which all of its heads attend to.",
            hint="Replace whole blocks with --blocks.",
            code="convert.heads",
        )
    return read_heads(options.heads, len(plain.blocks), plain.heads)


def read_heads(text: str, depth: int, heads: int) -> RequestedBlocks:
    """Parse ``5``, or ``0.2,3.1`` (block 0's head 2, block 3's head 1; ``0.2,`` for one head).

    Raises:
        UsageProblem: If it is neither, or names a head that does not exist.
    """
    if (number := whole_number(text)) is not None:
        if not 1 <= number <= depth * heads:
            raise _no_heads(f"--heads {text}: the network has {depth * heads} heads")
        return RequestedBlocks(number=number, single=True)
    parts = [part.strip().split(".") for part in text.removesuffix(",").split(",")]
    pairs = [tuple(number for each in part if (number := whole_number(each)) is not None) for part in parts]
    if not all(len(part) == len(pair) == 2 for part, pair in zip(parts, pairs, strict=True)):
        raise _no_heads(f"--heads {text} is neither a number nor BLOCK.HEAD with commas")
    named = tuple(sorted((block, head) for block, head in pairs))
    if wrong := [f"{block}.{head}" for block, head in named if block >= depth or head >= heads]:
        raise _no_heads(f"there is no head {wrong[0]}: the network has {depth} blocks of {heads}, from 0")
    if len(set(named)) < len(named):
        raise _no_heads(f"--heads {text} names a head twice")
    return RequestedBlocks(named=tuple(sorted({block for block, _ in named})), heads=named, single=True)


def _no_heads(what: str) -> UsageProblem:
    return UsageProblem(f"{what}.", hint="E.g. --heads 4, or --heads 0.1,2.0.", code="convert.heads")


def read_blocks(text: str, depth: int) -> RequestedBlocks:
    """Parse ``auto``, ``3``, or ``0,2,5`` (``2,`` for one block).

    Raises:
        UsageProblem: If it is none of these, or names a block that does not exist.
    """
    if text == "auto":
        return RequestedBlocks()
    parts = text.removesuffix(",").split(",")
    numbers = tuple(number for part in parts if (number := whole_number(part.strip())) is not None)
    if len(numbers) < len(parts):
        raise _no_blocks(f"--blocks {text} is neither auto, nor a number, nor numbers with commas", depth)
    if "," not in text:
        if not 1 <= numbers[0] <= depth:
            raise _no_blocks(f"--blocks {text}: the network has {depth} blocks", depth)
        return RequestedBlocks(number=numbers[0])
    if wrong := [number for number in numbers if number >= depth]:
        raise _no_blocks(f"there is no block {wrong[0]}: the network has {depth}, from 0", depth)
    if len(set(numbers)) < len(numbers):
        raise _no_blocks(f"--blocks {text} names a block twice", depth)
    return RequestedBlocks(named=tuple(sorted(numbers)))


def _no_blocks(what: str, depth: int) -> UsageProblem:
    return UsageProblem(f"{what}.", hint=f"E.g. --blocks {max(1, depth // 2)}, or --blocks 0,1.", code="convert.blocks")


def read_how(options: ConvertOptions, config: ViTConfig) -> ConversionSettings:
    """Parse the kind of conversion, its fit, and the token merging after the replaced blocks.

    Raises:
        UsageProblem: If an option is unknown, or the options cannot be combined.
    """
    known = (
        ("--kind", options.kind, KINDS),
        ("--fit", options.fit, FITS),
        ("--criterion", options.criterion, CRITERIA),
    )
    for option, given, words in known:
        if given not in words:
            raise UsageProblem(
                f"{option} {given} is unknown.",
                hint=f"{did_you_mean(given, words)}Known: {', '.join(words)}.",
                code="convert.unknown",
            )
    if options.fit != "squares" and options.kind != "depthwise":
        raise UsageProblem(
            f"--fit {options.fit} sets the kernels without fitting, but --kind {options.kind} is fitted.",
            hint="Leave one of the two options out.",
            code="convert.fit",
        )
    if options.keep is not None:
        raise UsageProblem(
            "--keep spreads the merging over all blocks, but tokens may merge only after the last convolution.",
            hint="Give the number of merged tokens for each block: --schedule 0,0,16,16,...",
            code="convert.schedule",
        )
    schedule = read_schedule(options.schedule, config) if options.schedule is not None else ()
    return ConversionSettings(cast(Kind, options.kind), options.kernel, cast(FitBy, options.fit), schedule=schedule)


def require_before(blocks: RequestedBlocks, how: ConversionSettings, heads: int) -> None:
    """Require that the replaced blocks are before the first block that merges tokens.

    Raises:
        UsageProblem: If one is not.
    """
    if not any(how.schedule):
        return
    first = first_merging_block(how.schedule)
    most = first * heads if blocks.single else first
    if first == 0 or max(blocks.named, default=0) >= first or (blocks.number or 0) > most:
        raise UsageProblem(
            f"tokens merge from block {first} on, and merged tokens are on no grid, so that only the {first} blocks "
            "before it can be replaced.",
            hint="Start --schedule with more zeros, or replace other blocks.",
            code="convert.schedule",
        )


def read_budget(options: ConvertOptions, splits: ImageSplits, *, classes: int, choosing: bool) -> Budget:
    """Return the allowed loss. The default, if blocks are to be chosen, is a share of changed top-1 predictions.

    Raises:
        UsageProblem: If it cannot be measured: the network has no classes, or the images have no labels.
        Refused: If it is of nearest images, and there are too few to have one.
    """
    budget = Budget.of(options)
    of_features = not classes and budget.max_disagreement is not None and budget.max_accuracy_drop is None
    if choosing and not budget.is_limited:
        budget = Budget(DEFAULT_BUDGET)
    if budget.is_limited and not classes and not of_features:
        raise UsageProblem(
            "the network outputs features, but the budget is a share of changed top-1 predictions.",
            hint="Give the number of blocks or their indices: --blocks N. The error is measured anyway. "
            "--max-disagreement alone limits the share of images that find another nearest image.",
            code="convert.no-classes",
        )
    if budget.is_limited and of_features:
        require_neighbors(splits)
    if budget.max_accuracy_drop is not None and not all((part.labels >= 0).any() for part in splits[1:]):
        raise UsageProblem(
            "--max-accuracy-drop needs labeled images.",
            hint=(
                "Give a folder with one subfolder per class, or an .npz with 'labels'. --max-disagreement needs no "
                "labels."
            ),
            code="convert.no-labels",
        )
    return budget


def require_neighbors(splits: ImageSplits) -> None:
    """Require images that have a nearest one among others to choose.

    Raises:
        Refused: If the validation or the test split has fewer than 3.
    """
    few = [(name, len(part.images)) for name, part in splits._asdict().items() if name != "calibration"]
    if few := [(name, count) for name, count in few if count < LEAST_IMAGES]:
        raise Refused(
            f"the budget is of nearest images, which takes {LEAST_IMAGES} images or more, and there are "
            f"{' and '.join(f'{count} for {name}' for name, count in few)}.",
            hint="Give more images; a few hundred are usual.",
            code="convert.too-few",
        )


def require_enough(splits: ImageSplits, patches: int, width: int) -> None:
    """Require enough images: W^O has width + 1 unknowns per output, and fewer tokens than that fit anything.

    Raises:
        Refused: If there are too few.
    """
    tokens = len(splits.calibration.images) * patches
    if tokens <= width:
        raise Refused(
            f"{len(splits.calibration.images)} images for fitting have {tokens} tokens, but each output has "
            f"{width + 1} unknowns.",
            hint="Give more images; a few hundred are usual.",
            code="convert.too-few",
        )

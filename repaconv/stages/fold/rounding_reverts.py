"""Compare a fold with the original, and revert the steps by which it rounds worse in FP32.

Such a fold is right: in float64 it equals the original, both as computed and as written. But a value was folded away
that is small next to the other terms of a sum, for example a difference in which large numbers cancel. Such values are
kept, the smallest first: one, two, four and so on, until the comparison passes. If it never passes, rewrites are
reverted instead. The remaining fold is compared like any other.

A fold may also multiply constants whose product float32 cannot hold. Then the values between such constants are kept
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from repaconv.core.errors import GateFailed, Refused
from repaconv.results import Link
from repaconv.rewrites.fold.fold_barriers import PREFIX
from repaconv.rewrites.fold.linear_layer_composition import AFFINE
from repaconv.sources.fold_size_reverts import FoldEvaluation, Kept, Refold, Reverts, refold_without, revert_harmful
from repaconv.verification.constants_out_of_range import is_out_of_range, values_next_to_extreme_constants
from repaconv.verification.folded_graph_verification import not_equal, rounds_worse, verification_links
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.numerical_cancellation import small_values
from repaconv.verification.rounding import MEASURED_TIMES

Again = Callable[..., Kept]
"""A function that folds the graph again without its ``reverts``, and reverts what makes it larger or, unless
``measured`` is False, slower."""

FEW_KEPT_VALUES = 8
"""If at most this many values are kept, the fold is tried again without each. Each try takes a comparison."""
SMALL_VALUE_REASON = (
    f"nothing is folded across it, since it is small next to other terms of a sum: folded, the graph rounds by more "
    f"than {MEASURED_TIMES} times what the original does in FP32"
)
OUT_OF_RANGE_REASON = (
    "nothing is folded across it, since a product of the constants next to it is too large or small for FP32"
)
NOT_COMPARED_REASON = "with it no output can be compared with the original's"
ROUNDS_WORSE_REASON = f"with it the graph rounds by more than {MEASURED_TIMES} times what the original does in FP32"


def compared_with_reverts(
    source: Path,
    fold: Kept,
    given: Evaluated,
    before: Evaluated,
    refold: Refold,
    again: Again,
    *,
    unverified: bool = False,
) -> tuple[Kept, tuple[Link, ...]]:
    """Return the fold without the reverted steps, and its comparison with the original; no links if no change remains.

    Args:
        source: The graph's file, for messages.
        fold: The fold, with at least one change.
        given: The original graph.
        before: The graph that is folded: the original, possibly converted to a newer opset.
        refold: Folds the graph again without some of the rewrites.
        again: See `Again`.
        unverified: Return the fold also if nothing can be compared.

    Raises:
        GateFailed: If a fold computes something else.
        Refused: If nothing can be compared.
    """
    try:
        links = _compared(source, fold, given, unverified=unverified)
    except (GateFailed, Refused):
        found = _with_constants_apart(source, fold, given, before, again)
        if found is None:
            raise
    else:
        if _passes(links):
            return fold, links
        found = _with_values_kept(source, fold, given, _small(fold, given, before), SMALL_VALUE_REASON, again)
    if found is None:
        kept = _without_harmful_rewrites(source, fold, given, refold)
        return kept, _compared(source, kept, given, unverified=unverified)
    kept = again(reverts=found[0].reverts)  # measured now: it may be slower than the original
    if kept.reverts == found[0].reverts:
        return found
    return kept, _compared(source, kept, given, unverified=unverified)


def _with_constants_apart(
    source: Path, fold: Kept, given: Evaluated, before: Evaluated, again: Again
) -> tuple[Kept, tuple[Link, ...]] | None:
    """The fold without products of constants that FP32 cannot hold, and its comparison; None if there are none.

    See `_with_values_kept`.
    """
    if not is_out_of_range(fold.graph.model, fold.graph.in_float64, before.model):
        return None
    left = _values_of(fold)
    between = [name for name in values_next_to_extreme_constants(before.model) if name not in left]
    return _with_values_kept(source, fold, given, between, OUT_OF_RANGE_REASON, again)


def _with_values_kept(
    source: Path, fold: Kept, given: Evaluated, names: Sequence[str], why: str, again: Again
) -> tuple[Kept, tuple[Link, ...]] | None:
    """The fold that keeps values, and its comparison; None if it fails, whatever is kept.

    Args:
        source: The graph's file, for messages.
        fold: The fold that does not pass.
        given: The original graph.
        names: Names of values that may be kept, those first that are most likely to help.
        why: Why they are kept, for the message about each.
        again: See `Again`.
    """

    def keeping(values: Sequence[str]) -> tuple[Kept, tuple[Link, ...]] | None:
        """The fold that keeps these values and its comparison; None if that fails, or if no change remains."""
        with suppress(GateFailed, Refused):
            less = again(reverts=reduce(partial(_keeping, why), values, fold.reverts), measured=False)
            links = _compared(source, less, given)
            if less.changes and _passes(links):
                return less, links
        return None

    for values in _doubling_prefixes(names):
        found = keeping(values)
        if found is None:
            continue
        for value in values if 1 < len(values) <= FEW_KEPT_VALUES else ():
            fewer = [one for one in values if one != value]
            less = keeping(fewer) if fewer else None
            values, found = (fewer, less) if less is not None else (values, found)
        return found
    return None


def _without_harmful_rewrites(source: Path, fold: Kept, given: Evaluated, refold: Refold) -> Kept:
    """The fold without the rewrites by which it rounds worse, or cannot be compared; see `revert_harmful`."""

    def evaluate(one: Kept) -> FoldEvaluation:
        links = _compared(source, one, given, unverified=True)
        if links and all(link.verdict == "not verified" for link in links):
            return FoldEvaluation((np.inf, -len(one.changes)), NOT_COMPARED_REASON)
        failed = [link.figures.error or 0.0 for link in links if link.verdict == "failed"]
        return FoldEvaluation((max(failed, default=0.0), -len(one.changes)), ROUNDS_WORSE_REASON if failed else "")

    if all(change.rewrite != AFFINE.name for change in fold.changes):
        # `revert_harmful` tries the rewrites that report changes, and this one also moves constants without reporting
        other = refold_without(fold, AFFINE.name, refold, ROUNDS_WORSE_REASON)
        fold = other if other.changes and not evaluate(other).why else fold
    return revert_harmful(fold, given, refold, evaluate)


def forced_fields(fold: Kept, links: Sequence[Link], options: Sequence[str]) -> dict[str, Any]:
    """Fields of the result if no output of the fold could be compared and ``--force`` was given; else empty.

    Args:
        fold: The fold.
        links: Its comparison with the original.
        options: The options that the result records otherwise.
    """
    if not fold.changes or any(link.verdict != "not verified" for link in links):
        return {}
    return {"verdict": "not verified", "unverified": ("fold not verified",), "options": (*options, "--force")}


def _compared(source: Path, fold: Kept, given: Evaluated, *, unverified: bool = False) -> tuple[Link, ...]:
    """The comparison of a fold; empty if no change remains."""
    if not fold.changes:
        return ()
    links = verification_links(source, given, fold.graph, reverted=fold.reverts.names, unverified=unverified)
    if not _passes(links) and not rounds_worse(links):
        raise not_equal(source, links)
    return links


def _passes(links: Sequence[Link]) -> bool:
    return all(link.verdict != "failed" for link in links)


def _small(fold: Kept, given: Evaluated, before: Evaluated) -> list[str]:
    """Values that are small next to the other terms of a sum, and that were folded away; the smallest first."""
    left = _values_of(fold)
    with suppress(Exception):  # the runtime's own errors, if a value cannot be an output
        return [name for name in small_values(before.single.model, given.single.probes.feeds) if name not in left]
    return []


def _values_of(fold: Kept) -> set[str]:
    """Names of the values that a folded graph still computes."""
    return {name for node in fold.graph.model.graph.node for name in node.output}


def _doubling_prefixes(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the first value, the first two, the first four and so on."""
    count = 1
    while count < 2 * len(values):
        yield values[:count]
        count *= 2


def _keeping(why: str, reverts: Reverts, value: str) -> Reverts:
    return Reverts((*reverts.names, f"{PREFIX}{value}"), (*reverts.messages, f"{value}: {why}"))

"""Outputs that rounding moves far, judged against float64: the graph as given, evaluated in it, is the truth.

An output near zero, or behind a difference of large numbers, differs between any two graphs that round differently. So
the folded graph may be no further from the truth than the graph as given, times a stated factor; and the fold is made
once more in float64, where rounding hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.engines.contract import Array, Feeds
from repaconv.results import Figures, Link, Reason, Tolerance
from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.images_moved_by_rounding import TIMES
from repaconv.verification.model_runners import Runner
from repaconv.verification.neighborhood_comparison import FLOOR, SLACK, apart, beside, largest
from repaconv.verification.tolerances import EXPLAINED, UNDECIDED_SHARE

if TYPE_CHECKING:
    import onnx

ALGEBRA = 1e-9
"""What the fold made in float64 may differ by, of the numbers beside; or a part of what float32 loses as given:"""
PART = 64
MOVED = 1e-3
"""What the fold made in float64 may differ by, of how far the output moves there, where float32 shows no movement."""
COARSE = 16
"""How many roundings of half precision the folded graph's weights may make, of the numbers beside."""


class Ends(NamedTuple):
    """The two graphs in float32; the first also rounded otherwise."""

    given: Evaluated
    folded: Evaluated
    rounded: Sequence[Runner]


class Seen(NamedTuple):
    """One output on one probe: float32 as given and folded, the truth, and folded in float64 where that runs.

    ``swayed`` is how far other roundings move it as given. ``fused`` is whether the runtime's own fusions of the folded
    graph are no numbers where the truth is: a quotient of two sigmoids that saturate may be that, by their last bit.
    Then ``folded`` is what it gives as it is written.
    """

    given: Array
    folded: Array
    truth: Array
    anew: Array | None
    swayed: Array
    fused: bool = False

    @property
    def comparable(self) -> bool:
        """Whether all are numbers of one shape."""
        arrays = [self.given, self.folded, self.truth, *([] if self.anew is None else [self.anew])]
        numbers = all(isinstance(one, np.ndarray) and one.dtype.kind in "fiub" for one in arrays)
        return numbers and len({one.shape for one in arrays}) == 1 and self.given.dtype == self.folded.dtype


class Verdict(NamedTuple):
    """Of one output on one probe: how far the three are off, of the numbers beside; how many are wrong, and open."""

    off: tuple[float, float, float]
    wrong: int
    open: int
    of: int


def by_truth(
    links: tuple[Link, ...], ends: Ends, feeds: Sequence[Feeds], conditions: str, rtol: float, coarse: float = 0.0
) -> tuple[Link, ...]:
    """The links, and in place of those that rounding may have failed, what float64 says of them.

    Args:
        links: One an output, in their order.
        ends: What was compared.
        feeds: On what.
        conditions: How that was chosen, for the note.
        rtol: What is allowed in any case, of the numbers beside.
        coarse: By how much weights of half precision were rounded. Then float32 says less, and only the fold in float64
            passes a link.
    """
    doubted = [link.verdict == "failed" or link.reason in ("rounding_too_large", "constant_output") for link in links]
    if not any(doubted):
        return links
    ends.given.close()
    ends.folded.close()
    try:
        runs = list(_runs(ends, feeds))
    except Exception:  # whatever cannot be evaluated in float64, of many classes: then nothing more is known
        return links
    if coarse and any(one.anew is None for run in runs for one in run.values()):
        return links
    rtol = max(rtol, COARSE * coarse)
    return tuple(
        _judged(link, [run[name] for run in runs], rtol, conditions)
        if doubt and all(name in run for run in runs)
        else link
        for link, doubt, name in zip(links, doubted, runs[0], strict=False)
    )


def _runs(ends: Ends, feeds: Sequence[Feeds]) -> list[dict[str, Seen]]:
    anew = _folded_anew(ends.given.model)
    return [_seen(ends, one, ends.given.truth(one), anew.run(one) if anew is not None else {}) for one in feeds]


def _seen(ends: Ends, feeds: Feeds, truth: Mapping[str, Any], anew: Mapping[str, Any]) -> dict[str, Seen]:
    given, folded = ends.given.run(feeds), ends.folded.run(feeds)
    others = [one.run(feeds) for one in ends.rounded]
    swayed = {name: reduce(np.maximum, [_apart(one[name], given[name]) for one in others]) for name in given}
    fused = {name for name in given if _lost(folded[name], truth[name])}
    plain = {**folded, **(ends.folded.as_written(feeds) if fused else {})}
    return {
        name: Seen(given[name], plain[name], truth[name], anew.get(name), swayed[name], name in fused) for name in given
    }


def _lost(found: Any, truth: Any) -> bool:
    """Whether one is no number where the other is."""
    real = all(isinstance(one, np.ndarray) and one.dtype.kind == "f" for one in (found, truth))
    return real and found.shape == truth.shape and bool((np.isfinite(truth) & ~np.isfinite(found)).any())


def _apart(other: Any, given: Any) -> Array:
    """By how much a rounding moves it; 0 for what is no numbers, or of another shape."""
    if not (isinstance(given, np.ndarray) and given.dtype.kind == "f" and other.shape == given.shape):
        return np.zeros(np.shape(given))
    moved = apart(other.astype(np.float64), given.astype(np.float64))
    return np.where(np.isfinite(moved), moved, 0.0)


def _folded_anew(model: onnx.ModelProto) -> Runner | None:
    """The fold of the graph in float64; None where that does not run."""
    from repaconv.graph.model_rewriting import rewritten
    from repaconv.rewrites.fold.fold_pipeline import FOLDS
    from repaconv.verification.float64_graphs import Float64, widened

    try:
        return Float64(rewritten(widened(model), FOLDS)[0])
    except Exception:  # as above
        return None


def _judged(link: Link, seen: Sequence[Seen], rtol: float, conditions: str) -> Link:
    if not all(one.comparable for one in seen):
        return link
    if link.reason == "constant_output":
        return _by_movement(link, seen, conditions)
    reals = seen[0].truth.dtype.kind == "f"
    noise = _noise(seen) if reals else {}
    found = [_reals(one, rtol, noise[one.truth.shape[1:]]) if reals else _integers(one) for one in seen]
    off = [max(one.off[place] for one in found) for place in range(3)]
    wrong, open_ones, of = (sum(getattr(one, name) for one in found) for name in ("wrong", "open", "of"))
    figures = Figures(
        unit="numbers",
        compared=of,
        different=wrong or None,
        left_out=open_ones or None,
        arithmetic="FP32",
        rounding=off[0],
        source="float32 against float64",
        factor=TIMES,
        error=off[1],
        error_in_float64=None if seen[0].anew is None else off[2],
        unfused=sum(one.fused for one in seen) or None,
    )
    allowed = link.tolerance
    reason: Reason = "explained_by_rounding"
    if wrong:
        reason = "exceeds_tolerance" if reals else "discrete_values_differ"
    elif open_ones > UNDECIDED_SHARE * of:
        reason = "rounding_too_large"
    elif allowed is not None and link.metrics is not None and link.metrics.max_rel_error > (allowed.rtol or 0.0):
        allowed = allowed.model_copy(update={"rtol": link.metrics.max_rel_error, "rtol_reason": EXPLAINED})
    return _concluded(link, reason, figures, conditions, allowed)


def _concluded(link: Link, reason: Reason, figures: Figures, conditions: str, allowed: Tolerance | None) -> Link:
    """The same comparison with what float64 says of it."""
    kept = {name: getattr(link, name) for name in ("name", "reference", "candidate", "metrics")}
    return Link.concluded(reason, figures=figures, note=conditions, tolerance=allowed, **kept)


def _by_movement(link: Link, seen: Sequence[Seen], conditions: str) -> Link:
    """What is the same in float32 on every probe, and is not in float64: the fold made there, by how far it moves."""
    moves, off, first = 0.0, 0.0, {one.truth.shape: one.truth for one in reversed(seen)}
    for truth, anew in ((one.truth, one.anew) for one in seen):
        if anew is None or truth.dtype.kind != "f":
            return link
        for other in (first[truth.shape], *([truth[:1]] if truth.ndim else [])):
            moves = max(moves, float(apart(truth, other).max(initial=0.0)))
        off = max(off, float(apart(anew, truth).max(initial=0.0)))
    if not (np.isfinite(moves) and off < MOVED * moves):
        return link
    figures = Figures(error_in_float64=off / moves)
    return _concluded(link, "equal_in_float64", figures, conditions, link.tolerance)


def _noise(seen: Sequence[Seen]) -> dict[tuple[int, ...], Array]:
    """How far rounding moves the graph as given beside every number of an image, where it is most: one may cancel.

    By the shape of what an image gives.
    """
    found: dict[tuple[int, ...], Array] = {}
    for one in seen:
        own = np.maximum(_apart(one.given, one.truth), SLACK / TIMES * one.swayed)
        around = np.broadcast_to(beside(largest(one.truth), own)[1], own.shape)
        most = around.max(0, keepdims=True) if around.ndim else around
        found[own.shape[1:]] = np.maximum(found.get(own.shape[1:], 0.0), most)
    return found


def _reals(seen: Seen, rtol: float, noise: Array) -> Verdict:
    truth = seen.truth.astype(np.float64)
    size, own, folded = largest(truth), apart(seen.given.astype(np.float64), truth), apart(seen.folded, truth)
    near, around = beside(size, own)
    around = np.maximum(around, noise)
    limit = np.maximum(rtol * near, np.maximum(FLOOR * min(1.0, float(size.max(initial=0.0))), TIMES * around))
    vague = np.broadcast_to(2 * limit > near, truth.shape)
    wrong, anew = (folded > limit) & ~vague, np.zeros(truth.shape)
    if seen.anew is not None:
        anew = apart(seen.anew, truth)
        wrong, vague = wrong | (anew > np.maximum(ALGEBRA * near, around / PART)), np.zeros(truth.shape, bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = [float(np.nanmax(np.where(one > 0, one / near, 0.0), initial=0.0)) for one in (own, folded, anew)]
    return Verdict((off[0], off[1], off[2]), int(wrong.sum()), int(vague.sum()), truth.size)


def _integers(seen: Seen) -> Verdict:
    """What float32 decides otherwise than float64 hangs on a rounding, unless the fold in float64 does so, too."""
    others = [end != seen.truth for end in (seen.given, seen.folded, seen.folded if seen.anew is None else seen.anew)]
    wrong = others[2] if seen.anew is not None else others[1] & ~others[0]
    off = [float(other.mean()) if other.size else 0.0 for other in others]
    return Verdict((off[0], off[1], off[2]), int(wrong.sum()), int((others[0] | others[1]).sum()), seen.truth.size)

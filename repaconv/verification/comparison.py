"""Compare a candidate's outputs with a reference's, over batches of inputs, and give each output a verdict.

Every comparison in repaconv uses this module: `verify`, `fold`, `export`, `build`, `bench --against`, `tune`,
`compare`, `gate`, bundles and `assert_parity`. Their only difference is the scale to which an error is relative:

- `PerImage`: the largest number of the image. It is for networks on images, of which there may be many.
- `PerNeighborhood`: the largest number next to each number, along the axis where that is smallest. A small channel next
  to a large one is thus held to its own size. It is for an arbitrary graph and the graph that replaces it, on a few
  probes. There, names, types and shapes must be equal as well. `ChannelSizes` measures the sizes of channels over
  probes.

A number (of an image, or of a neighborhood) is *equal* within the tolerance. If some numbers are not equal, the
comparison measures how far rounding moves the original network (`repaconv.verification.rounding`). A difference that
rounding explains is no fault; a larger difference is a fault. If rounding explains more than `MOST_EXPLAINED`,
agreement shows little, and the number is left out.

Nothing is verified in three cases: most numbers are left out, the output changes too little between inputs, or the
measured error is not rounding (`repaconv.verification.float64_evaluator_check`). Integers and truth values are equal or
not; those that rounding decides are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused, first_line
from repaconv.engines.contract import Feeds
from repaconv.results import Accuracy, Figures, Link, Metrics, Reason, Tolerance, outputs_text
from repaconv.results.link_reasons import verdict_for
from repaconv.verification.output_metrics import MASK_NUMBER, Meter, magnitudes, without_equal_infinities
from repaconv.verification.rounding import MOST_EXPLAINED, SATURATED, Kind, Rounding, apart
from repaconv.verification.tolerances import (
    EXPLAINED,
    LEAST_LOSSY_CHANGE,
    LEAST_OUTPUT_CHANGE,
    UNDECIDED_SHARE,
    lossy_words,
    verdict_by,
)

if TYPE_CHECKING:
    from repaconv.tasks.evaluation import Evaluation

Array = NDArray[Any]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Problem = tuple[Reason, Figures]


def shapes_of(feeds: Feeds) -> Shapes:
    """Return the names and shapes of inputs.

    If an output's shape changes while these stay the same, its length depends on the inputs' numbers.
    """
    return tuple((name, np.shape(array)) for name, array in feeds.items())


# --- Count the numbers of one output that are equal, explained by rounding, left out, or different.


class Tally:
    """Counts of images or numbers, and how far rounding moves those that it explains.

    ``nans`` counts numbers that are NaN on both sides, or images of which most numbers are: they are equal, but verify
    nothing.
    """

    def __init__(self, unit: Literal["images", "numbers"]) -> None:
        self.unit: Literal["images", "numbers"] = unit
        self.compared = self.different = self.left_out = self.explained = self.nans = 0
        self.rounding = self.error = 0.0
        self.kind: Kind | None = None

    def add(self, error: Array, allowed: Array, explained: Array, scale: Array, vague: float) -> NDArray[np.bool_]:
        """Count numbers, and return the mask of those that are left out. All arrays have one shape.

        Args:
            error: The absolute errors; NaN counts as different.
            allowed: What the tolerance allows.
            explained: What rounding explains.
            scale: The size to which errors are relative.
            vague: A number is left out if rounding explains more than this share of its scale.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            beyond = ~(error <= allowed)
            different = beyond & ~(error <= explained)
            left_out = (explained > vague * scale) & ~different
            by_rounding = beyond & ~different & ~left_out
            if different.any():
                worst = float(np.max(np.where(different, error / scale, 0.0)))
                self.error = max(self.error, worst if worst == worst else np.inf)
            if by_rounding.any() or left_out.any():
                self.rounding = max(self.rounding, float(np.max((explained / scale)[by_rounding | left_out])))
        self.compared += error.size
        self.different += int(different.sum())
        self.left_out += int(left_out.sum())
        self.explained += int(by_rounding.sum())
        return left_out

    @property
    def figures(self) -> Figures:
        """The counts as figures of a link."""
        counts: dict[str, Any] = {"unit": self.unit, "compared": self.compared}
        counts |= {name: getattr(self, name) or None for name in ("different", "left_out", "explained")}
        if self.error:  # only for floating-point numbers
            counts["error"] = self.error
        if self.nans:
            counts["detail"] = f"{self.nans} of {self.compared} {self.unit} NaN on both sides"
        if self.kind is not None and (self.explained or self.left_out):
            kind = self.kind
            counts |= {"rounding": self.rounding / kind.times, "factor": kind.times}
            counts |= {"arithmetic": kind.arithmetic, "source": kind.source}
        return Figures(**counts)


class PerImage:
    """The error of an image relative to its largest number.

    A quiet image gets a scale that depends on all images, see `output_metrics`.
    """

    replaces = False
    unit: Literal["images", "numbers"] = "images"

    def __init__(self, tolerance: Tolerance, vague: float) -> None:
        self.tolerance, self.vague, self._nans = tolerance, vague, 0
        self.kind: Kind | None = None

    def add(self, a: Array, b: Array, name: str, shape: tuple[int, ...], rounding: Rounding | None) -> Array:
        """Return how far rounding moves each image [N] of a batch [N, K]; 0 if all images are within the tolerance."""
        self._nans += int(((np.isnan(a) & np.isnan(b)).sum(1) > UNDECIDED_SHARE * b.shape[1]).sum())
        a, b = without_equal_infinities(a, b)
        with np.errstate(invalid="ignore", over="ignore"):
            error, scale = np.abs(a - b).max(1, initial=0.0), magnitudes(b).max(1, initial=0.0)
            within = (error <= (self.tolerance.rtol or 0.0) * scale) | (error <= (self.tolerance.atol or 0.0))
        if rounding is None or self.tolerance.kind == "lossy" or within.all():
            return np.zeros(len(b))
        self.kind = rounding.kind
        moved = np.zeros(len(b))
        for one in rounding.of(name):  # each takes one inference: stop when all is explained
            if one.shape == shape:
                moved = np.maximum(moved, one.reshape(len(b), -1).max(1, initial=0.0))
            if (within | (error <= rounding.kind.times * moved)).all():
                break
        return moved

    def tally(self, meter: Meter) -> Tally:
        """Return the counts over all images."""
        found, scale, error = Tally(self.unit), meter.scales(), meter.column("error")
        found.nans = self._nans
        if self.tolerance.kind == "lossy":
            found.compared = len(error)
            return found
        allowed = np.maximum((self.tolerance.rtol or 0.0) * scale, self.tolerance.atol or 0.0)
        times = self.kind.times if self.kind else 0.0
        found.kind = self.kind
        found.add(error, allowed, times * meter.column("moved"), scale, self.vague)
        return found


class PerNeighborhood:
    """The error of each number relative to the largest number next to it. Numbers are not kept between probes."""

    replaces = True
    unit: Literal["images", "numbers"] = "numbers"

    def __init__(self, tolerance: Tolerance, vague: float) -> None:
        self.tolerance, self.vague, self._tally = tolerance, vague, Tally(self.unit)

    def add(self, found: Array, right: Array, call: _Call) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Add one probe; return the masks of numbers that are left out and of numbers without any error.

        NaN and infinity are without error if both sides have the same.
        """
        rounding = call.rounding
        a, b = found.astype(np.float64), right.astype(np.float64)
        error, size = apart(a, b), magnitudes(b)
        scale = neighborhood(b) if call.channels is None else call.channels.scale(call.output, size)
        relative, least = self.tolerance.rtol or 0.0, self.tolerance.atol or 0.0
        allowed = np.maximum(relative * scale, _absolute(relative, least, float(size.max(initial=0.0))))
        explained = np.zeros(b.shape)
        if rounding is not None and not (error <= allowed).all():
            self._tally.kind = rounding.kind
            moved, doubted = np.zeros(b.shape), np.ones(b.shape, np.bool_)
            for one in rounding.of(call.output):  # stop when all is explained
                moved = np.maximum(moved, one if one.shape == b.shape else np.inf)
                explained = np.where(doubted, rounding.kind.times * largest_along_least_axis(size, moved)[1], explained)
                doubted = ~(error <= np.maximum(allowed, explained))
                if not doubted.any():
                    break
        left_out = self._tally.add(error, allowed, explained, scale, self.vague)
        self._tally.nans += int((np.isnan(a) & np.isnan(b)).sum())
        return left_out, error == 0

    def tally(self, meter: Meter) -> Tally:
        """Return the counts over all probes."""
        return self._tally


Scale = type[PerImage] | type[PerNeighborhood]


class ChannelSizes:
    """The sizes of the outputs' channels over several probes; `neighborhood` knows the numbers of one probe only.

    If a probe is one image, each class is one number, which may be near zero by chance. Two sizes of a class are
    measured over all probes: its largest number, and its largest share of a probe's largest number. The smaller of
    both is used, so that a bounded class is not excused by classes that grow with the probe. The same holds for every
    axis except the first, the axis of images.
    """

    def __init__(self, probes: Iterable[Mapping[str, Any]]) -> None:
        """Measure the sizes of channels; ``probes`` are the outputs of each probe, by name."""
        self._shares: dict[tuple[str, int, int, int], Array] = {}
        self._largest: dict[tuple[str, int, int, int], Array] = {}
        for outputs in probes:
            for name, value in outputs.items():
                numbers = _numbers(value)
                if numbers is not None and numbers.size and (most := (size := magnitudes(numbers)).max()) > 0:
                    for axis in range(1, size.ndim):
                        key = name, size.ndim, axis, size.shape[axis]
                        there = _along(size, axis)
                        self._largest[key] = np.maximum(self._largest.get(key, 0.0), there)
                        self._shares[key] = np.maximum(self._shares.get(key, 0.0), there / most)

    def scale(self, output: str, size: Array) -> Array:
        """Return the scale of every number of an output, given their absolute values; compare `neighborhood`."""
        most = least = size.max(keepdims=True, initial=0.0)
        for axis in range(size.ndim):
            shape = [1] * axis + [-1] + [1] * (size.ndim - 1 - axis)
            key = output, size.ndim, axis, size.shape[axis]
            share = self._shares.get(key, 0.0) * most.max(initial=0.0)
            known = np.minimum(share, self._largest.get(key, 0.0))
            least = np.minimum(least, np.maximum(_along(size, axis), known).reshape(shape))
        return np.broadcast_to(least, size.shape)


def _along(size: Array, axis: int) -> Array:
    """Return the largest number at every index of an axis."""
    return np.asarray(size.max(tuple(other for other in range(size.ndim) if other != axis), initial=0.0))


SURE_SHARE = 1 - 1e-6
"""The share of the tolerance that `surely_within` allows: float32 rounds the error and the limit by 1e-7."""
NUMBERS_IN_CACHE = 1 << 14
"""How many numbers `surely_within` compares at a time."""
DENORMAL_RISK = 1e-30
"""If all numbers are smaller than this, products with a tolerance may be denormal."""


def surely_within(found: Array, right: Array, relative: float, least: float) -> bool:
    """Whether all numbers are surely within the tolerance of `PerNeighborhood`; takes a fraction of its time.

    Almost all numbers are within the tolerance relative to their own size, which is no larger than their neighborhood.
    The neighborhood is computed only for the others. False is no verdict: then the full comparison decides.

    Args:
        found: The candidate [...], in float32 or integers.
        right: The reference [...], in float32 or float64, which is rounded to float32, or integers of the same type.
        relative: The tolerance, relative to the neighborhood.
        least: The absolute tolerance.
    """
    if found.shape != right.shape or found.dtype.kind != right.dtype.kind or not right.size:
        return False
    if found.dtype != np.float32:
        return right.dtype.kind in "iub" and found.dtype == right.dtype and bool((found == right).all())
    found, right = np.atleast_1d(found), np.atleast_1d(right)
    with np.errstate(over="ignore"):
        most = float(np.float32(max(-right.min(), right.max())))
    if not DENORMAL_RISK < most < MASK_NUMBER:
        return False  # NaN and masks included
    least = _absolute(relative, least, most)
    beyond = _beyond(found.reshape(-1), right.reshape(-1), relative, least)
    if not beyond.size:
        return True
    right = right.astype(np.float32, copy=False)
    size, at = np.abs(right), np.unravel_index(beyond, right.shape)  # np.nonzero takes ten times as long
    error = np.abs(found[at].astype(np.float64) - right[at])
    scale = np.full(len(at[0]), most)
    for axis in range(size.ndim):
        others = tuple(other for other in range(size.ndim) if other != axis)
        scale = np.minimum(scale, size.max(others)[at[axis]])
    return bool((error <= np.maximum(relative * scale, least)).all())


def _beyond(found: Array, right: Array, relative: float, least: float) -> Array:
    """Return the indices of numbers that are not within the tolerance relative to their own size.

    A part of the numbers is compared at a time, so that intermediate arrays stay in the cache.
    """
    beyond = []
    share, floor = np.float32(SURE_SHARE * relative), np.float32(SURE_SHARE * least)
    for begin in range(0, len(right), NUMBERS_IN_CACHE):
        here = right[begin : begin + NUMBERS_IN_CACHE].astype(np.float32)
        error = found[begin : begin + NUMBERS_IN_CACHE] - here
        np.abs(error, out=error)
        limit = np.abs(here, out=here)
        limit *= share
        within = error <= np.maximum(limit, floor, out=limit)
        if not within.all():
            beyond.append(np.flatnonzero(~within) + begin)
    return np.concatenate(beyond) if beyond else np.zeros(0, np.intp)


def _absolute(relative: float, least: float, most: float) -> float:
    """Return the absolute tolerance for numbers up to ``most``; a tolerance for float64 is returned unchanged."""
    return max(least, SATURATED * min(1.0, most)) if relative >= SATURATED else least


def neighborhood(b: Array) -> Array:
    """Return the largest number next to each number, along the axis where that is smallest."""
    size = magnitudes(b)
    return np.broadcast_to(largest_along_least_axis(size, size)[0], size.shape)


def largest_along_least_axis(size: Array, moved: Array) -> tuple[Array, Array]:
    """Return the largest size next to each number, along the axis where it is smallest, and the movement there."""
    least, there = size.max(keepdims=True, initial=0.0), moved.max(keepdims=True, initial=0.0)
    for axis in range(size.ndim):
        others = tuple(other for other in range(size.ndim) if other != axis)
        along, with_it = size.max(others, keepdims=True), moved.max(others, keepdims=True)
        least, there = np.minimum(along, least), np.where(along < least, with_it, there)
    return least, there


# --- One output.


class Outcome(NamedTuple):
    """The measured result of one output. ``constant`` is whether it is the same for all inputs."""

    tally: Tally
    metrics: Metrics
    constant: bool
    accuracy: Accuracy | None = None


class Reals:
    """An output of floating-point numbers."""

    def __init__(self, tolerance: Tolerance, scale: Scale, vague: float, *, logits: bool) -> None:
        self.tolerance, self.meter = tolerance, Meter(tolerance, logits=logits)
        self.scale = scale(tolerance, vague)

    def add(self, found: Array, right: Array, call: _Call) -> None:
        """Add one batch of the candidate's and the reference's numbers."""
        rows = (1, -1) if call.whole else (-1, 1) if right.ndim < 2 else (len(right), -1)
        if isinstance(self.scale, PerNeighborhood):
            left_out, same = self.scale.add(found, right, call)
            found = np.where(left_out | same, right, found)
        a, b = found.reshape(rows), right.reshape(rows)
        moved = np.zeros(len(b))
        if isinstance(self.scale, PerImage):
            moved = self.scale.add(a, b, call.output, right.shape, call.rounding)
        self.meter.add(a, b, labels=call.labels, undecided=call.undecided, moved=moved)

    def outcome(self) -> Outcome:
        """Return the result over all batches."""
        if not self.meter.images:  # rounding decides every image
            tally = Tally("images")
            tally.compared = tally.left_out = self.meter.seen
            return Outcome(
                tally, Metrics(images=0, max_abs_error=0, max_rel_error=0, mean_abs_error=0, cosine=None), False
            )
        tally, metrics = self.scale.tally(self.meter), self.meter.metrics()
        tally.left_out += self.meter.undecided if isinstance(self.scale, PerImage) else 0
        tally.compared += self.meter.undecided if isinstance(self.scale, PerImage) else 0
        if not isinstance(self.scale, PerImage):
            metrics = metrics.model_copy(update={"undecided": tally.left_out})
        return Outcome(tally, metrics, self._constant(metrics), self.meter.counts.accuracy())

    def _constant(self, metrics: Metrics) -> bool:
        """Whether outputs change so little between inputs that the tolerance would hide a fault of a tenth of it."""
        if metrics.spread is None:
            return self.scale.replaces
        relative = (
            LEAST_LOSSY_CHANGE if self.tolerance.kind == "lossy" else LEAST_OUTPUT_CHANGE * (self.tolerance.rtol or 0.0)
        )
        return metrics.spread <= relative or self.meter.moves <= (self.tolerance.atol or 0.0)

    @property
    def worst(self) -> int:
        """The image with the largest error."""
        return self.meter.worst


class Discrete:
    """An output of integers or truth values, which are equal or different."""

    def __init__(self, tolerance: Tolerance, scale: Scale) -> None:
        self.tolerance, self.replaces = tolerance, scale.replaces
        self.numbers, self.images = Tally("numbers"), Tally("images")
        self.worst = self._left = 0
        self._first: dict[tuple[int, ...], Array] = {}
        self._moves = False

    def add(self, found: Array, right: Array, call: _Call) -> None:
        """Add one batch of both sides. Different images are left out if rounding may decide them."""
        first = self._first.setdefault(right.shape[1:], right[:1] if right.ndim else right)
        self._moves = self._moves or bool((right != first).any())
        rows = (1, -1) if call.whole or right.ndim < 1 else (len(right), -1)
        other = (found != right).reshape(rows)
        undecided = np.zeros(len(other), bool) if call.undecided is None else call.undecided
        left = np.zeros(other.shape, bool)
        if other.any() and call.rounding is not None:
            self.numbers.kind = call.rounding.kind
            for moved in call.rounding.of(call.output):
                left |= (moved > 0).reshape(rows) if moved.shape == right.shape else True
        images = other.any(1) & undecided
        left |= images[:, None]
        wrong = other & ~left
        if wrong.any() and not self.images.different:
            self.worst = self.images.compared + int(wrong.any(1).argmax())
        for tally, differ, out in ((self.numbers, wrong, left), (self.images, wrong.any(1), left.all(1) & images)):
            tally.compared += out.size
            tally.different += int(differ.sum())
            tally.left_out += int(out.sum())

    def outcome(self) -> Outcome:
        """Return the result over all batches."""
        tally = self.numbers if self.replaces else self.images
        compared = self.numbers.compared - self.numbers.left_out
        share = self.numbers.different / compared if compared else 0.0
        metrics = Metrics(
            images=self.images.compared - self.images.left_out,
            max_abs_error=float(self.numbers.different > 0),
            max_rel_error=share,
            mean_abs_error=share,
            cosine=None,
            undecided=tally.left_out,
        )
        several = self.images.compared > len(self._first)
        return Outcome(tally, metrics, not self._moves and (several or self.replaces))


class _Call(NamedTuple):
    """One output in one call."""

    output: str
    labels: NDArray[np.int64] | None
    undecided: NDArray[np.bool_] | None
    whole: bool
    rounding: Rounding | None
    channels: ChannelSizes | None


class _Output:
    """One output over all calls: its measured values, and the reason of its verdict."""

    def __init__(self, owner: Comparison, name: str, *, fixed: bool) -> None:
        self.owner, self.name, self.moves = owner, name, fixed
        self.kind: Reals | Discrete | None = None
        self.problem: Problem | None = None
        self.not_compared: Problem | None = None
        self.reshaped = self.calls = 0
        self.doubt = ""
        self._shapes: dict[Shapes, tuple[int, ...]] = {}

    def add(self, got: Any, right: Any, call: _Call, given: Shapes) -> None:
        """Add one call. Only the first problem is kept."""
        self.calls += 1
        found, expected = _numbers(got), _numbers(right)
        if got is None or right is None:
            self._fail("shape_or_type_differs", f"the {'candidate' if got is None else 'reference'} has no such output")
        elif isinstance(got, Exception):
            self._fail("does_not_run", first_line(got))
        elif expected is None or (found is None and not self.owner.scale.replaces):
            self.not_compared = "not_comparable", Figures(detail=_kind_of(right if expected is None else got))
        elif found is None or (self.owner.scale.replaces and found.dtype != expected.dtype):
            kind = type(got).__name__ if found is None else str(found.dtype)
            self._fail("shape_or_type_differs", f"{kind} for {expected.dtype}")
        elif found.shape != expected.shape:
            self._reshaped(found, expected, call)
        elif not expected.size:
            self.not_compared = self.not_compared or ("not_comparable", Figures(detail="empty for all inputs"))
        else:
            moved = bool(given) and expected.shape != self._shapes.setdefault(given, expected.shape)
            self.moves = self.moves or moved
            self._measured(expected).add(found, expected, call)
        if call.rounding is not None:
            self.doubt = self.doubt or call.rounding.doubt

    def _fail(self, reason: Reason, detail: str) -> None:
        self.problem = self.problem or (reason, Figures(detail=detail))

    def _reshaped(self, found: Array, right: Array, call: _Call) -> None:
        unsure = call.undecided is not None and call.undecided.any()
        if unsure or (call.rounding is not None and call.rounding.reshapes(call.output, right.shape)):
            self.reshaped += 1
        else:
            self._fail("shape_or_type_differs", f"shape {list(found.shape)} for {list(right.shape)}")

    def _measured(self, right: Array) -> Reals | Discrete:
        if self.kind is None:
            owner, scores = self.owner, self.owner.scores
            logits = right.ndim == 2 and right.shape[1] > 1 if scores is None else self.name == scores
            real = right.dtype.kind == "f"
            self.kind = (
                Reals(owner.allowed, owner.scale, owner.vague, logits=logits)
                if real
                else Discrete(owner.allowed, owner.scale)
            )
        return self.kind

    @property
    def worst(self) -> int:
        """The image or call with the largest error."""
        return self.kind.worst if self.kind else 0

    def link(self, note: str, figures: Mapping[str, Any], **ends: str) -> Link:
        """Return the link with its verdict; ``ends`` are the names of the link, the reference and the candidate."""
        if self.problem:
            return Link.concluded(self.problem[0], figures=self.problem[1], note=note, **ends)
        if self.reshaped and self.doubt:
            return Link.concluded("not_comparable", figures=Figures(detail=self.doubt), note=note, **ends)
        if self.reshaped > UNDECIDED_SHARE * self.calls:
            detail = f"the shape, for {self.reshaped} of {self.calls} inputs"
            return Link.concluded("rounding_decides", figures=Figures(detail=detail), note=note, **ends)
        if self.kind is None:
            reason, why = self.not_compared or ("not_run", Figures())
            return Link.concluded(reason, figures=why, note=note, **ends)
        found = self.kind.outcome()
        reason, allowed = self._reason(found), self.owner.allowed
        nothing = reason in ("rounding_decides", "rounding_too_large", "discrete_in_low_precision", "not_comparable")
        described = found.tally.figures
        if reason == "not_comparable":
            described = Figures(detail=self.doubt if self._doubtful(found.tally) else described.detail)
        words = ""
        if allowed.kind == "lossy" and isinstance(self.kind, Reals) and verdict_for(reason) != "not verified":
            evaluated = self.owner.evaluation.task if self.owner.evaluation else None
            words = lossy_words(found.metrics, allowed, found.accuracy, task=evaluated.name if evaluated else "")
        if reason == "explained_by_rounding":
            allowed = with_explained_limit(allowed, found.metrics)
        return Link.concluded(
            reason,
            figures=described.model_copy(update=figures),
            note="; ".join(filter(None, [words, note])),
            tolerance=None if nothing else allowed,
            metrics=None if nothing else found.metrics,
            accuracy=found.accuracy,
            **ends,
        )

    def _doubtful(self, tally: Tally) -> bool:
        """Whether rounding explains a difference, and its measurement is in doubt."""
        return bool(self.doubt and (tally.explained or tally.left_out))

    def _reason(self, found: Outcome) -> Reason:
        """Return the reason of the verdict; every verdict of a comparison is decided here."""
        tally, allowed = found.tally, self.owner.allowed
        discrete = isinstance(self.kind, Discrete)
        if tally.left_out == tally.compared and tally.kind is None:
            return "rounding_decides"
        if allowed.kind == "lossy" and not discrete:
            different = verdict_by(found.metrics, allowed, found.accuracy) == "failed"
        else:
            different = tally.different > 0
        if different and discrete:
            return "discrete_in_low_precision" if allowed.kind == "lossy" else "discrete_values_differ"
        if different:
            return "exceeds_tolerance"
        if self._doubtful(tally):
            return "not_comparable"
        if tally.nans > UNDECIDED_SHARE * tally.compared:
            return "not_comparable"
        if tally.left_out > UNDECIDED_SHARE * tally.compared:
            return "rounding_decides" if discrete or tally.kind is None else "rounding_too_large"
        if (found.constant or (tally.explained and _hidden(found.metrics))) and not self.moves:
            return "constant_output"
        return "explained_by_rounding" if tally.explained or tally.left_out else "within_tolerance"


# --- All outputs.


class Comparison:
    """Compares a candidate's outputs with the reference's, call by call.

    Attributes:
        candidate: The name of the candidate.
        allowed: The tolerance.
        scores: The output that holds class scores; None if every output [N, K] may hold them.
        scale: The size to which errors are relative.
        vague: See `repaconv.verification.rounding.MOST_EXPLAINED`.
        outputs: The outputs compared so far, by name.
    """

    def __init__(
        self,
        candidate: str,
        allowed: Tolerance,
        scores: str | None = "logits",
        *,
        scale: Scale = PerImage,
        fixed: Collection[str] = (),
        vague: float = MOST_EXPLAINED,
        evaluation: Evaluation | None = None,
        channels: ChannelSizes | None = None,
    ) -> None:
        """Prepare a comparison without any calls.

        Args:
            candidate: The name of the candidate.
            allowed: The tolerance.
            scores: The output that holds class scores; None if every output [N, K] may hold them.
            scale: The size to which errors are relative.
            fixed: Outputs that depend on no input, so that they need not change.
            vague: See `repaconv.verification.rounding.MOST_EXPLAINED`.
            evaluation: Compares the results in the network's task, from all outputs together, in a link of its own.
            channels: The sizes of channels over several probes, for `PerNeighborhood`.
        """
        self.candidate, self.allowed, self.scores = candidate, allowed, scores
        self.scale, self.fixed, self.vague, self.evaluation = scale, fixed, vague, evaluation
        self.channels = channels
        self.outputs: dict[str, _Output] = {}

    def add(
        self,
        found: Mapping[str, Any],
        right: Mapping[str, Any],
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
        whole: bool = False,
        rounding: Rounding | None = None,
        given: Shapes = (),
        truths: Sequence[Any] | None = None,
    ) -> None:
        """Add the outputs of one call.

        Args:
            found: The candidate's outputs, by name or in the reference's order.
            right: The reference's outputs.
            labels: Class of each image, -1 where unknown.
            undecided: The images [N] for which rounding may decide which tokens merge, or one value for the call. Those
                that differ by no more than another merge explains are left out.
            whole: Whether each output is compared as a whole, not image by image. Its shape may change between calls.
            rounding: How far rounding alone moves the reference; computed only if the tolerance does not suffice.
            given: The shapes of the inputs.
            truths: The label of each image in the network's task, None where unknown.

        Raises:
            Refused: If the outputs differ in number or shape, and the candidate is not a graph that replaces the other.
        """
        if not self.scale.replaces:
            found = self._paired(found, right, whole=whole)
        if self.evaluation is not None:
            self.evaluation.add(found, right, truths)
            found, right = (self.evaluation.aligned(outputs, end) for end, outputs in enumerate((found, right)))
        for name in (*right, *(more for more in found if more not in right)):
            if name not in self.outputs:
                self.outputs[name] = _Output(self, name, fixed=name in self.fixed)
            own = labels if name == self.scores else None
            call = _Call(name, own, undecided, whole, rounding, self.channels)
            self.outputs[name].add(found.get(name), right.get(name), call, given)

    def _paired(self, found: Mapping[str, Any], right: Mapping[str, Any], *, whole: bool) -> Mapping[str, Any]:
        """Return the candidate's outputs under the reference's names; refuse outputs of another network."""
        from repaconv.verification.model_runners import named

        if len(found) != len(right):
            raise self._of_another_network(f"{len(found)} outputs", str(len(right)))
        found = named(list(right), found)
        for name, value in found.items():
            has, wanted = _numbers(value), _numbers(right[name])  # sequences have no shape
            if has is not None and wanted is not None and has.shape != wanted.shape and not whole:
                raise self._of_another_network(f"shape {list(has.shape)}", str(list(wanted.shape)))
        return found

    def _of_another_network(self, has: str, wanted: str) -> Refused:
        return Refused(
            f"outputs differ: {self.candidate} has {has}, the reference {wanted}.",
            hint="Both must be the same network: take inputs, outputs and engines of one checkpoint.",
            code="inputs.shape",
        )

    def links(self, name: str, reference: str, note: str = "", **figures: Any) -> tuple[Link, ...]:
        """Return a link for every output, in their order, then the link of the task if it is evaluated.

        ``figures`` are further figures for every link.
        """
        evaluated, by_number = self.evaluation, self._by_number()
        several = len(by_number) > 1
        note = "; ".join(filter(None, [note, evaluated.fallback if evaluated else ""]))
        of_task: list[Link] = []
        if evaluated is not None and evaluated.task is not None:
            of_task = [evaluated.link(name=name, reference=reference, candidate=self.candidate)]
        of_outputs = (
            one.link(
                note,
                figures,
                name=name,
                reference=reference,
                candidate=f"{self.candidate}, output {output}" if several else self.candidate,
            )
            for output, one in by_number.items()
        )
        return (*of_outputs, *of_task)

    def _by_number(self) -> dict[str, _Output]:
        """The outputs that are compared as numbers: all except lists of objects, which the link of the task covers."""
        lists = self.evaluation.lists if self.evaluation is not None else ()
        return {name: one for name, one in self.outputs.items() if name not in lists}

    def metrics(self, output: str) -> Metrics:
        """Return the metrics of one output of numbers, whatever its verdict."""
        kind = self.outputs[output].kind
        assert kind is not None
        return kind.outcome().metrics

    @property
    def worst(self) -> dict[str, int]:
        """The image or call with the largest error, for each output in the order of `links`."""
        found = {name: one.worst for name, one in self._by_number().items()}
        return {**found, "": self.evaluation.worst} if self.evaluation and self.evaluation.task else found


def run_both(
    reference: Any,
    candidate: Any,
    calls: Iterable[Feeds],
    comparison: Comparison,
    rounding: Callable[[Feeds, Mapping[str, Any]], Rounding | None] = lambda _feeds, _right: None,
) -> Comparison:
    """Run both on all calls and compare them. A candidate that does not run fails the comparison.

    Args:
        reference: The runner of the reference.
        candidate: The runner of the candidate.
        calls: The inputs of each call, by name.
        comparison: The comparison to which the outputs are added; it is returned.
        rounding: Returns how far rounding moves the reference, from its inputs and outputs.
    """
    for feeds in calls:
        right = reference.run(feeds)
        try:
            found: Mapping[str, Any] = candidate.run(feeds)
        except Exception as error:  # runtimes raise many classes
            found = dict.fromkeys(right, error)
        comparison.add(found, right, rounding=rounding(feeds, right), given=shapes_of(feeds))
    return comparison


def link_between(
    name: str,
    reference: tuple[str, Array],
    candidate: tuple[str, Array],
    *,
    logits: bool,
    tolerance: Tolerance,
    labels: NDArray[np.int64] | None = None,
) -> Link:
    """Compare two outputs [N, ...], each given with its name, and return the link."""
    found = Comparison(candidate[0], tolerance, "logits" if logits else "")
    found.add({"logits": candidate[1]}, {"logits": reference[1]}, labels=labels)
    return found.links(name, reference[0])[0]


def not_verified(name: str, reference: str, candidate: str, note: str) -> Link:
    """Return a link without any comparison; ``note`` is the reason."""
    return Link.concluded("not_run", note=note, name=name, reference=reference, candidate=candidate)


def overall_link(links: Sequence[Link]) -> Link:
    """Return the link of the failed output with the largest error; if none failed, of the passed one."""
    failed = [link for link in links if link.verdict == "failed"]
    passed = [link for link in links if link.verdict == "passed"]
    worst = max(
        failed or passed or links, key=lambda link: link.metrics.max_rel_error if link.metrics else 0.0, default=None
    )
    if worst is None:
        raise ValueError("nothing was compared")
    if len(links) == 1:
        return worst
    return worst.model_copy(update={"note": "; ".join(filter(None, [outputs_text(links), worst.note]))})


def overall_link_with_task(links: Sequence[Link]) -> Link:
    """Return one link for several outputs and their task: the task's link, unless a comparison of numbers failed."""
    *numbers, of_task = links
    worst = overall_link(numbers) if numbers else None
    if of_task.task is None or (worst and worst.verdict == "failed"):
        return overall_link(links)
    return of_task.model_copy(update={"metrics": worst.metrics}) if worst else of_task


def with_explained_limit(allowed: Tolerance, metrics: Metrics) -> Tolerance:
    """Return the tolerance, raised to the measured error if rounding explains a larger one."""
    if metrics.max_rel_error <= (allowed.rtol or 0.0) or metrics.max_abs_error <= (allowed.atol or 0.0):
        return allowed
    return allowed.model_copy(update={"rtol": metrics.max_rel_error, "rtol_reason": EXPLAINED})


def _hidden(metrics: Metrics) -> bool:
    """Whether an output that is the same for all inputs would be within the error that rounding explains."""
    return metrics.spread is not None and metrics.spread <= metrics.max_rel_error


def _numbers(value: Any) -> Array | None:
    """Return an output as an array; None if it is a sequence, a map or text."""
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else None
    return array if array is not None and array.dtype.kind in "fiub" else None


def _kind_of(value: Any) -> str:
    return "a sequence" if isinstance(value, list) else "a map" if isinstance(value, dict) else "no numbers"

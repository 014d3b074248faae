"""Two ends held against each other on a few probes: every output by its name, in number, shape, type and value.

For graphs of any origin, where every number is held to those beside it; links over many images, each judged by its own
scale, are `repaconv.verification.output_comparison`. What cannot be compared is *not verified*, by name; what was the
same number on every probe proves nothing; and where a difference is more than the tolerance, what rounding alone does
to the reference says whether it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from repaconv.core.errors import first_line
from repaconv.engines.contract import Array, Feeds
from repaconv.results import Figures, Link, Metrics, Reason, Tolerance
from repaconv.results.link_reasons import verdict_for
from repaconv.verification.difference_metrics import measure
from repaconv.verification.model_runners import Runner
from repaconv.verification.tolerances import EXPLAINED, UNDECIDED_SHARE

# An output whose numbers change by less than so many tolerances over all probes would hide what a fault changes.
MOVES = 10
# What rounding may move a number by, of its neighbours, unless it is rounded to less than float32 has.
UNDECIDED = 0.01
# How much further than the few other roundings that are run another one may lie.
SLACK = 4
# What float32 keeps of 1: what saturates there (a sigmoid, a softmax) has steps of as much, however small 1 - p is.
FLOOR = float(np.finfo(np.float32).eps)


def compare(
    reference: Runner,
    candidate: Runner,
    probes: Iterable[Feeds],
    tolerance: Tolerance,
    *,
    name: str = "onnx",
    ends: tuple[str, str] = ("reference", "candidate"),
    note: str = "",
    rounded: Sequence[Runner] = (),
    fixed: Collection[str] = (),
    undecided: float = UNDECIDED,
) -> tuple[Link, ...]:
    """One link for every output of either end.

    Args:
        reference: The end that is right.
        candidate: The end to judge. Where it does not run, all its outputs fail.
        probes: Inputs by name.
        tolerance: Of an exact link. Numbers may differ by ``rtol`` of the largest beside them, along every axis;
            integers and truth values must be equal; NaN and infinity only equal themselves.
        name: Of the link.
        ends: What they are called.
        note: What the probes were.
        rounded: The reference as other roundings of its weights and inputs have it; run where the tolerance does not
            suffice. What they move by as much is rounding; integers that they change are left out, and counted.
        fixed: Outputs that hang on no input, so that they need not change between probes.
        undecided: Where rounding moves a number by more than this share of its neighbours, nothing is proved by it.
    """
    outputs: dict[str, _Output] = {}
    for feeds in probes:
        expected = reference.run(feeds)
        try:
            got: Mapping[str, Any] = candidate.run(feeds)
        except Exception as error:  # the runtime's own, of many classes
            got = dict.fromkeys(expected, error)
        others = _Others(rounded, feeds)
        for output in (*expected, *(more for more in got if more not in expected)):
            one = outputs.setdefault(output, _Output(tolerance, output in fixed, undecided))
            one.add(got.get(output), expected.get(output), partial(others.of, output), shapes_of(feeds))
    several = len(outputs) > 1
    first = [f"{ends[0]}{f', output {output}' if several else ''}" for output in outputs]
    return tuple(one.link(name, end, ends[1], note) for end, one in zip(first, outputs.values(), strict=True))


Problem = tuple[Reason, Figures] | None
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_of(feeds: Feeds) -> Shapes:
    """Of every input: where those are equal and an output's are not, its length hangs on the inputs' numbers."""
    return tuple((name, np.shape(array)) for name, array in feeds.items())


class _Others:
    """What the other roundings give, each run once, when it is asked for."""

    def __init__(self, sides: Sequence[Runner], feeds: Feeds) -> None:
        self.sides, self.feeds = sides, feeds
        self.found: list[Mapping[str, Any]] = []

    def of(self, output: str) -> Iterator[Array]:
        for place, side in enumerate(self.sides):
            if place == len(self.found):
                self.found.append(side.run(self.feeds))
            yield self.found[place][output]


class _Output:
    """One output over all probes."""

    def __init__(self, tolerance: Tolerance, fixed: bool, undecided: float) -> None:
        self.tolerance, self.moves, self.undecided = tolerance, fixed, undecided
        self.wrong: Problem = None
        self.unlike = ""
        self.numbers = self.left = self.explained = 0
        self.rounding = 0.0
        self.metrics: list[Metrics] = []
        self.seen: dict[tuple[int, ...], Array] = {}
        self.shapes: dict[Shapes, tuple[int, ...]] = {}

    def add(self, found: Any, right: Any, others: Callable[[], Iterator[Array]], given: Shapes = ()) -> None:
        """One probe, whose inputs are of the shapes ``given``; the first difference stays."""
        problem: Problem = None
        found, right = (np.asarray(end) if isinstance(end, np.generic) else end for end in (found, right))
        if right is None or found is None:
            problem = _unlike(f"the {'candidate' if found is None else 'reference'} has no such output")
        elif isinstance(found, Exception):
            problem = "does_not_run", Figures(detail=first_line(found))
        elif not isinstance(right, np.ndarray) or right.dtype.kind not in "fiub":
            self.unlike = "a sequence" if isinstance(right, list) else "a map" if isinstance(right, dict) else "strings"
        elif not isinstance(found, np.ndarray) or found.dtype != right.dtype:
            problem = _unlike(f"{getattr(found, 'dtype', type(found).__name__)} for {right.dtype}")
        elif found.shape != right.shape:
            if all(other.shape == right.shape for other in others()):
                problem = _unlike(f"shape {list(found.shape)} for {list(right.shape)}")
            else:
                self._leave(right.size, right.size)
        elif right.size:
            self.moves = self.moves or self._moved(right) or right.shape != self.shapes.setdefault(given, right.shape)
            problem = (self._reals if right.dtype.kind == "f" else self._integers)(found, right, others)
        self.wrong = self.wrong or problem

    def link(self, name: str, reference: str, candidate: str, note: str) -> Link:
        """The link with its verdict, and why where it did not pass."""
        reason, figures = self._reason()
        passed = verdict_for(reason) == "passed"
        within = [part for part in self.metrics if self._within(part)] if passed else self.metrics
        allowed, parts = self.tolerance, within or self.metrics
        if passed and not within:
            most = max(part.max_rel_error for part in self.metrics)
            allowed = allowed.model_copy(update={"rtol": most, "rtol_reason": EXPLAINED})
        metrics = _merged(parts, self.left) if parts else None
        return Link.concluded(
            reason,
            figures=figures,
            note=note,
            name=name,
            reference=reference,
            candidate=candidate,
            tolerance=allowed if metrics else None,
            metrics=metrics,
        )

    def _within(self, part: Metrics) -> bool:
        return part.max_rel_error <= (self.tolerance.rtol or 0.0) or part.max_abs_error <= (self.tolerance.atol or 0.0)

    def _reason(self) -> tuple[Reason, Figures]:
        figures = Figures(unit="numbers", compared=self.numbers, left_out=self.left or None)
        if self.explained:
            moved = {"rounding": self.rounding, "source": "moved weights and inputs", "factor": SLACK}
            update = {"explained": self.explained, "arithmetic": "FP32", **moved}
            figures = figures.model_copy(update=update)
        if self.wrong:
            return self.wrong
        if self.unlike:
            return "not_comparable", Figures(detail=self.unlike)
        if not self.numbers:
            return "not_comparable", Figures(detail="empty on every probe")
        if self.left > UNDECIDED_SHARE * self.numbers:
            return "rounding_too_large", figures
        if not self.moves:
            return "constant_output", figures
        return ("explained_by_rounding" if self.explained else "within_tolerance"), figures

    def _moved(self, right: Array) -> bool:
        """Whether it is another than on a probe before, or than in another row."""
        before = self.seen.setdefault(right.shape, right)
        rows = [right[:1]] if right.ndim else []
        limit = MOVES * (self.tolerance.rtol or 0.0) * float(largest(right).max()) if right.dtype.kind == "f" else 0.0
        with np.errstate(invalid="ignore"):
            apart = [np.abs(np.subtract(right, other, dtype=np.float64)) for other in (before, *rows)]
        return any(bool((np.nan_to_num(one) > limit).any()) for one in apart)

    def _leave(self, count: int, of: int) -> None:
        self.left, self.numbers = self.left + count, self.numbers + of

    def _integers(self, found: Array, right: Array, others: Callable[[], Iterator[Array]]) -> Problem:
        apart, moved = found != right, np.zeros(right.shape, bool)
        if apart.any():
            for other in others():
                moved |= other != right if other.shape == right.shape else True
        self._leave(int(moved.sum()), right.size)
        self._measure(np.where(moved, right, found), right)
        count = int((apart & ~moved).sum())
        return (
            ("discrete_values_differ", Figures(unit="numbers", compared=right.size, different=count)) if count else None
        )

    def _reals(self, found: Array, right: Array, others: Callable[[], Iterator[Array]]) -> Problem:
        a, b = found.astype(np.float64), right.astype(np.float64)
        error, size = apart(a, b), largest(b)
        near, _ = beside(size, size)
        limit = np.maximum((self.tolerance.rtol or 0.0) * near, FLOOR * min(1.0, float(size.max())))
        limit = np.maximum(limit, self.tolerance.atol or 0.0)
        least, open_ones = limit, np.zeros(b.shape, bool)
        if (error > limit).any():
            moved = np.zeros(b.shape)
            for other in others():
                moved = np.maximum(moved, apart(other.astype(np.float64), b) if other.shape == b.shape else np.inf)
                sway = SLACK * beside(size, moved)[1]
                open_ones = np.broadcast_to(sway > self.undecided * near, b.shape)
                limit = np.maximum(least, sway)
                if not (error > limit).any():
                    break  # one rounding that moves it as far says enough
        self._leave(int(open_ones.sum()), b.size)
        self._measure(np.where(open_ones | (error == 0), b, a), b)
        wrong = (error > limit) & ~open_ones
        explained = (error > least) & ~open_ones & ~wrong
        if explained.any():
            self.explained += int(explained.sum())
            self.rounding = max(self.rounding, float((limit / near)[explained].max()) / SLACK)
        if not wrong.any():
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            worst = float(np.nanmax(np.where(wrong, error / near, 0.0)))
        count = int(wrong.sum())
        return "exceeds_tolerance", Figures(unit="numbers", compared=b.size, different=count, error=worst)

    def _measure(self, a: Array, b: Array) -> None:
        """NaN and infinities that both have are no numbers to measure."""
        rows: tuple[int, ...] = (-1, 1) if b.ndim < 2 else b.shape
        a, b = a.astype(np.float64), b.astype(np.float64)
        a = np.where(np.isfinite(b) & np.isfinite(a), a, np.where(apart(a, b) == 0, 0.0, np.nan))
        b = np.where(np.isfinite(b), b, 0.0)
        self.metrics.append(measure(a.reshape(rows), b.reshape(rows), logits=b.ndim == 2 and b.shape[-1] > 1))


def _unlike(detail: str) -> tuple[Reason, Figures]:
    return "shape_or_type_differs", Figures(detail=detail)


def apart(a: Array, b: Array) -> Array:
    """|a - b|, 0 where both are the same NaN or infinity, infinite where one alone is."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def largest(b: Array) -> Array:
    """How large every number is; 0 for what is none."""
    return np.where(np.isfinite(b), np.abs(b, dtype=np.float64), 0.0)


def beside(size: Array, moved: Array) -> tuple[Array, Array]:
    """The largest beside each number along the axis where that is least, and the largest of another array there.

    Small channels stand beside large ones, and are held to their own.
    """
    least, there = size.max(keepdims=True), moved.max(keepdims=True)
    for axis in range(size.ndim):
        others = tuple(other for other in range(size.ndim) if other != axis)
        along, with_it = size.max(others, keepdims=True), moved.max(others, keepdims=True)
        least, there = np.minimum(along, least), np.where(along < least, with_it, there)
    return least, there


def _merged(parts: list[Metrics], left: int) -> Metrics:
    """The worst over all probes: each has a scale of its own."""
    images = sum(part.images for part in parts)
    classes = [part for part in parts if part.top1_agreement is not None]
    several = sum(part.images for part in classes) or 1
    of_classes: dict[str, Any] = {
        "kl_divergence": sum((part.kl_divergence or 0.0) * part.images for part in classes) / several,
        "top1_agreement": 1 - sum(part.top1_flips for part in classes) / several,
        "top1_smallest_margin": min(part.top1_smallest_margin or 0.0 for part in classes),
        "top1_flips": sum(part.top1_flips for part in classes),
    } if classes else {}  # fmt: skip
    return Metrics(
        images=images,
        max_abs_error=max(part.max_abs_error for part in parts),
        max_rel_error=max(part.max_rel_error for part in parts),
        mean_abs_error=sum(part.mean_abs_error * part.images for part in parts) / images,
        norm_error=max(part.norm_error for part in parts),
        cosine=min((part.cosine for part in parts if part.cosine is not None), default=None),
        undecided=left,
        **of_classes,
    )

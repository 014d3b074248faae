"""All outputs of two ends side by side, batch by batch: every one by its name, in number and shape, by its own meter.

For links over many images. Where every number of a few probes is held to those beside it, as in a graph of any origin,
that is `repaconv.verification.neighborhood_comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused
from repaconv.results import Figures, Link, Metrics, Reason, Tolerance, outputs_told
from repaconv.verification.difference_metrics import Meter, not_verified
from repaconv.verification.images_moved_by_rounding import Sway
from repaconv.verification.input_batches import Batch
from repaconv.verification.model_runners import Runner, named
from repaconv.verification.tolerances import UNDECIDED_SHARE

# --- Outputs that are decided, not computed: classes, places, truth values. They are the same, or others.

Array = NDArray[Any]


class Decided:
    """Counts numbers that are others; see `repaconv.verification.difference_metrics.Meter`.

    What a lower precision decides otherwise is counted and not judged.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        """``tolerance`` is that of the link."""
        self.tolerance = tolerance
        self.seen = self.left = self.numbers = self.others = self.worst = 0
        self._first: dict[tuple[int, ...], Array] = {}
        self._moves = False

    def add(
        self,
        candidate: Array,
        reference: Array,
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
        sway: Callable[[], Array] | None = None,
    ) -> None:
        """One batch [n, ...] of each; images that rounding may decide otherwise, and that are others, are left out.

        What is decided is moved by nothing; ``sway`` is not asked.
        """
        first = self._first.setdefault(reference.shape[1:], reference[:1])
        self._moves = self._moves or bool((reference != first).any())
        apart = (candidate != reference).reshape(len(reference), -1)
        left = apart.any(1) & (False if undecided is None else undecided)
        wrong = apart.any(1) & ~left
        if wrong.any() and not self.others:
            self.worst = self.seen + int(wrong.argmax())
        self.seen, self.left = self.seen + len(reference), self.left + int(left.sum())
        self.numbers, self.others = self.numbers + apart[~left].size, self.others + int(apart[~left].sum())

    def link(self, name: str, reference: str, candidate: str, note: str = "") -> Link:
        """The link with its verdict."""
        counted = Figures(unit="numbers", compared=self.numbers, different=self.others)
        left_out = Figures(unit="images", compared=self.seen, left_out=self.left)
        if self.left > UNDECIDED_SHARE * self.seen:
            return not_verified(name, reference, candidate, note, reason="rounding_decides", figures=left_out)
        if self.others and self.tolerance.kind == "lossy":
            lost: Reason = "discrete_in_low_precision"
            return not_verified(name, reference, candidate, note, reason=lost, figures=counted)
        if not self.others and not self._moves and self.seen > len(self._first):
            return not_verified(name, reference, candidate, note, reason="constant_output")
        share = self.others / self.numbers
        metrics = Metrics(
            images=self.seen - self.left,
            max_abs_error=float(self.others > 0),
            max_rel_error=share,
            mean_abs_error=share,
            cosine=None,
            undecided=self.left,
        )
        fields = {"name": name, "reference": reference, "candidate": candidate, "tolerance": self.tolerance}
        reason: Reason = "discrete_values_differ" if self.others else "within_tolerance"
        figures = counted if self.others else left_out
        return Link.concluded(reason, figures=figures, note=note, metrics=metrics, **fields)


# --- All outputs of two ends side by side, batch by batch: every one by its name, in number and shape, by its own
# meter.


class Comparison:
    """A candidate's outputs against the reference's.

    Attributes:
        allowed: Of the link.
        scores: Which output is the scores of classes.
        meters: What was measured so far, by output.
        unlike: Outputs that could not be compared at some call: the reason, and more of it in words.
    """

    def __init__(self, candidate: str, allowed: Tolerance, scores: str = "logits") -> None:
        """``candidate`` is what the candidate is called."""
        self.candidate, self.allowed, self.scores = candidate, allowed, scores
        self.meters: dict[str, Meter | Decided] = {}
        self.unlike: dict[str, tuple[Reason, str]] = {}

    def add(
        self,
        found: Mapping[str, Any],
        right: Mapping[str, Any],
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
        whole: bool = False,
        sway: Sway | None = None,
    ) -> None:
        """One batch; see `repaconv.verification.difference_metrics.Meter.add`.

        Args:
            found: The candidate's outputs.
            right: The reference's.
            labels: Of the images.
            undecided: Of the images, or of the one call.
            whole: Every output is one, not one for each image, and may have another shape at each call.
            sway: By how much rounding alone moves the reference.

        Raises:
            Refused: If the outputs are others, in number or in shape.
        """
        if len(found) != len(right):
            raise self._others(f"{len(found)} outputs", str(len(right)))
        for name, value in named(list(right), found).items():
            got, expected = _numbers(value), _numbers(right[name])
            if got is None or expected is None:
                self.unlike[name] = ("not_comparable", "no tensor of numbers")
                continue
            if got.shape != expected.shape and not whole:
                raise self._others(f"shape {list(got.shape)}", str(list(expected.shape)))
            if got.shape == expected.shape and expected.size and _no_number(got) and _no_number(expected):
                self.unlike.setdefault(name, ("not_comparable", "NaN on both sides"))
            elif got.shape == expected.shape and expected.size:
                meter = self.meters.setdefault(name, self._meter(name, expected))
                rows = (1, -1) if whole or expected.ndim < 2 else expected.shape
                pair = _alike(got.reshape(rows), expected.reshape(rows))
                moved = None if sway is None else partial(_moved, sway, name, expected)
                of_scores = labels if name == self.scores else None
                meter.add(*pair, labels=of_scores, undecided=undecided, sway=moved)
            elif got.shape == expected.shape:
                self.unlike.setdefault(name, ("not_comparable", "empty on every call"))
            elif (undecided is not None and undecided.any()) or _reshaped(sway, name, expected):
                self.unlike.setdefault(name, ("rounding_decides", "its shape"))
            else:
                shapes = f"shape {list(got.shape)} for {list(expected.shape)}"
                self.unlike[name] = ("shape_or_type_differs", shapes)

    def _meter(self, name: str, right: NDArray[Any]) -> Meter | Decided:
        return Meter(self.allowed, logits=name == self.scores) if right.dtype.kind == "f" else Decided(self.allowed)

    def links(self, name: str, reference: str, note: str = "") -> tuple[Link, ...]:
        """A link for every output, in the order of `meters`."""
        outputs = list(dict.fromkeys([*self.meters, *self.unlike]))
        return tuple(self._link(output, name, reference, note, several=len(outputs) > 1) for output in outputs)

    def _link(self, output: str, name: str, reference: str, note: str, *, several: bool) -> Link:
        called = f"{self.candidate}, output {output}" if several else self.candidate
        reason, detail = self.unlike.get(output, ("not_run", ""))
        if output in self.meters and reason != "shape_or_type_differs":
            return self.meters[output].link(name, reference, called, note)
        return not_verified(name, reference, called, "", reason=reason, figures=Figures(detail=detail))

    @property
    def worst(self) -> dict[str, int]:
        """Of each output, in the order of `links`, the image or call with the largest error."""
        outputs = dict.fromkeys([*self.meters, *self.unlike])
        return {name: self.meters[name].worst if name in self.meters else 0 for name in outputs}

    def _others(self, has: str, wanted: str) -> Refused:
        return Refused(
            f"the {self.candidate} has {has}, the network gives {wanted}.",
            hint="Take the input, the output and the engine of this very checkpoint.",
            code="inputs.shape",
        )


def compared(
    reference: Runner,
    candidate: Runner,
    batches: Iterable[Batch],
    called: str,
    allowed: Tolerance,
    *,
    scores: str = "logits",
    whole: bool = False,
) -> Comparison:
    """Both run on all batches, whose names are those of their inputs; see `Comparison` for ``scores``."""
    found = Comparison(called, allowed, scores)
    for batch in batches:
        found.add(candidate.run(batch.given), reference.run(batch.given), labels=batch.labels, whole=whole)
    return found


def joined(links: Sequence[Link]) -> Link:
    """One link of those of several outputs: one that failed, else of what passed the one that differs most."""
    failed = [link for link in links if link.verdict == "failed"]
    passed = [link for link in links if link.verdict == "passed"]
    worst = max(
        failed or passed or links, key=lambda link: link.metrics.max_rel_error if link.metrics else 0.0, default=None
    )
    if worst is None:
        raise ValueError("nothing was compared")
    if len(links) == 1:
        return worst
    return worst.model_copy(update={"note": "; ".join(filter(None, [outputs_told(links), worst.note]))})


def _moved(sway: Sway, name: str, right: NDArray[Any]) -> NDArray[Any]:
    """By how much rounding moves one output; by nothing where that is not known."""
    found = sway().get(name)
    return found if found is not None and found.shape == right.shape else np.zeros(right.shape)


def _reshaped(sway: Sway | None, name: str, right: NDArray[Any]) -> bool:
    """Whether rounding alone gives one output another shape: how many there are hangs on it."""
    found = None if sway is None else sway().get(name)
    return found is not None and found.shape != right.shape


def _numbers(value: Any) -> NDArray[Any] | None:
    """An output as an array; None if it is a sequence, a map or text."""
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else None
    return array if array is not None and array.dtype.kind in "fiub" else None


def _no_number(array: NDArray[Any]) -> bool:
    """Whether all of it is NaN, by which nothing can be judged."""
    return array.dtype.kind == "f" and bool(np.isnan(array).all())


def _alike(found: NDArray[Any], right: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same with 0 where both have the same infinity, as masks do, or both NaN."""
    if right.dtype.kind != "f" or found.dtype.kind != "f":
        return found, right
    same = (np.isinf(right) & (found == right)) | (np.isnan(right) & np.isnan(found))
    if not same.any():
        return found, right
    return np.where(same, 0.0, found), np.where(same, 0.0, right)

"""Compare a candidate's results with the reference's in the network's task, batch by batch: metrics, limits, a link.

Intervals are percentiles of a seeded bootstrap over the images, in which reference and candidate are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from repaconv.core.errors import Refused
from repaconv.results import Figures, Link, TaskAccuracy, TaskMetric, TaskName, TaskResult, Tolerance
from repaconv.tasks.contract import (
    Array,
    NothingToCompare,
    OnlyCandidateFinds,
    Outputs,
    Row,
    Task,
    Unmatched,
    Unreadable,
)
from repaconv.tasks.depth import Depth
from repaconv.tasks.detection import Detection
from repaconv.tasks.embedding import Embedding
from repaconv.tasks.keypoints import Keypoints
from repaconv.tasks.restoration import Restoration
from repaconv.tasks.segmentation import Segmentation
from repaconv.tasks.task_of_network import UNKNOWN, Choice, by_outputs
from repaconv.tasks.text_recognition import TextRecognition

TASKS: dict[TaskName, type[Task]] = {
    each.name: each for each in (Detection, Segmentation, Restoration, Keypoints, Depth, Embedding, TextRecognition)
}
"""The tasks with an evaluation of their own; ``classify`` is evaluated by top-1 predictions, ``other`` by numbers."""
SAMPLES, LEVEL = 500, (2.5, 97.5)
"""Samples of the bootstrap, and the percentiles of a 95% interval. An end of the interval of 200 images of shapes.py is
off by 3% to 5% of the interval's width with 500 samples, by 6% to 9% with 100, by 2% to 4% with 1000."""
ACCURACY_LOSS = 0.02
"""A lossy step may lose so much of the metric against labels; more is a failure where the whole interval is above."""
LEAST_LABELED = 20
"""Labeled images from which on the loss may be a failure: the interval of fewer is too narrow, that of one a point."""


class Evaluation:
    """The results of a candidate in one task, against the reference's and against labels.

    Attributes:
        task: The task with what was seen of the outputs; None if they are compared as numbers alone.
        fallback: Why they are, where the task was recognized and its outputs cannot be read, or where ``--task`` may
            help; empty otherwise.
    """

    def __init__(self, choice: Choice, precision: str, channels: int | None = None) -> None:
        self.choice, self.precision, self.channels = choice, precision, channels
        self.source, self.fallback = choice.source, ""
        self.task: Task | None = TASKS[choice.task](choice.about) if choice.task in TASKS else None
        self._open = choice.task is None
        self.rows: list[Row] = []
        self.labeled: list[tuple[Row, ...]] = []
        self.not_finite = False
        self.no_accuracy = ""
        self._matched: tuple[Outputs, Outputs] = {}, {}

    @property
    def lists(self) -> frozenset[str]:
        """The outputs that the link of the task is about, and not the numbers; see `Task.lists`.

        There are none where the results of both show nothing: then the numbers are all there is.
        """
        if self.task is None or not self.task.lists:
            return frozenset()
        try:
            self._summary(self.task)
        except OnlyCandidateFinds:
            return self.task.lists
        except NothingToCompare:
            return frozenset()
        return self.task.lists

    def add(self, found: Outputs, right: Outputs, labels: Sequence[Any] | None = None) -> None:
        """One batch: the candidate's and the reference's outputs by name, and what is right by labels, if known.

        Raises:
            Refused: The user named the task, and the outputs are not those of such a network; or labels are of another
                size than its results.
        """
        if self._open and all(isinstance(array, np.ndarray) for array in right.values()):
            name, shown = by_outputs(right, self.choice.about, self.channels)
            self._open, self.source = False, f"the outputs: {shown}"
            self.task = TASKS[name](self.choice.about) if name in TASKS else None
            if name == "other" and shown != UNKNOWN:
                self.fallback = f"compared as numbers: {shown}"
        self._matched = {}, {}
        if self.task is None:
            return
        try:
            if not all(isinstance(array, np.ndarray) for array in (*found.values(), *right.values())):
                raise Unreadable("its outputs are sequences or maps, not tensors")
            expected = self.task.read(right)
            got = self.task.read(_finite(found))
            if len(got) != len(expected):
                raise Unreadable(f"the candidate has results of {len(got)} images, the reference of {len(expected)}")
            if labels and len(labels) != len(expected):
                raise Unreadable(f"there are results of {len(expected)} images, and labels of {len(labels)}")
            rows = [self.task.row(a, self.task.truth(b)) for a, b in zip(got, expected, strict=True)]
        except Unreadable as problem:
            self._unreadable(problem)
            return
        self.rows += rows
        self._matched = self._rows_that_match(self.task, (found, right), zip(got, expected, strict=True))
        for place, label in enumerate(labels or ()):
            if label is not None:
                self.labeled.append(self._labeled(self.task, (got[place], expected[place]), label))
        self.not_finite = self.not_finite or _not_finite(found, right)

    def aligned(self, outputs: Outputs, end: int) -> Outputs:
        """Outputs of the last batch as they are compared by number: the candidate's (``end`` 0) or the reference's (1).

        Outputs with a row for each object of a list, e.g. scores of keypoints, have the rows of objects that match.
        """
        return {**outputs, **self._matched[end]}

    def _rows_that_match(
        self, task: Task, ends: tuple[Outputs, Outputs], images: Iterable[tuple[Any, Any]]
    ) -> tuple[Outputs, Outputs]:
        if not task.lists:
            return {}, {}
        others = [_per_row(outputs, task.lists) for outputs in ends]
        names = [name for name in others[1] if name in others[0]]
        pairs = [task.matched_rows(a, task.truth(b)) for a, b in images] if names else []
        batched = min(ends[1][name].ndim for name in task.lists) > 1

        def kept(end: int, name: str) -> Array:
            array = ends[end][name] if batched else ends[end][name][None]
            return np.concatenate([each[pair[end]] for each, pair in zip(array, pairs, strict=True)])

        candidate, reference = ({name: kept(end, name) for name in names} for end in (0, 1))
        return candidate, reference

    def _labeled(self, task: Task, results: tuple[Any, Any], label: Any) -> tuple[Row, ...]:
        """The candidate's and the reference's result of one image against its label."""
        try:
            return tuple(task.labeled_row(each, label) for each in results)
        except Unreadable as problem:
            raise Refused(
                f"the labels are not of the size of this network's results: {problem}.",
                hint=f"Give {task.labels} of that size, or image folders, with which masks are resized.",
                code="labels.size",
            ) from problem

    def _unreadable(self, problem: Unreadable) -> None:
        """Refuse outputs of another kind, or compare them as numbers if the task was only recognized."""
        assert self.task is not None
        if self.choice.asked:
            raise Refused(
                f"--task {self.task.name}: {problem}.",
                hint="Export the network with outputs of this task, or give --task other, which compares numbers.",
                code="task.outputs",
            ) from problem
        self.fallback = f"compared as numbers, not as results of {self.task.name} ({self.source}): {problem}"
        self.task, self.rows, self.labeled = None, [], []

    @property
    def worst(self) -> int:
        """The image with the least agreement."""
        assert self.task is not None
        return int(np.argmin([self.task.agreement(row) for row in self.rows])) if self.rows else 0

    def result(self) -> TaskResult:
        """All metrics with their intervals.

        Raises:
            NothingToCompare: The reference's results show nothing.
        """
        task = self.task
        assert task is not None
        rows = task.settled(self.rows)
        found, spread = task.summary(rows), _bootstrap(task.summary, rows)
        intervals = {name: _interval(values) for name, values in spread.items()}
        metrics = tuple(
            TaskMetric(
                name=each.name,
                unit=each.unit,
                value=found[each.name],
                low=intervals[each.name][0],
                high=intervals[each.name][1],
                limit=each.limits.get(self.precision),
            )
            for each in task.metrics
            if each.name in found
        )
        return TaskResult(
            task=task.name,
            source=self.source,
            layout=task.layout,
            images=len(rows),
            metrics=metrics,
            changed=task.changed,
            disagreement=_share(task.disagreement(found)),
            accuracy=self._accuracy(task),
        )

    def _summary(self, task: Task) -> dict[str, float]:
        """All metrics over all images; see `Task.summary`."""
        return task.summary(task.settled(self.rows))

    def disagreement(self) -> float:
        """How much of the reference's results changed, from 0 to 1; 1 where that is not known."""
        if self.task is None:
            return 1.0
        try:
            found = self._summary(self.task)
        except NothingToCompare:
            return 1.0
        return _share(self.task.disagreement(found))

    def _accuracy(self, task: Task) -> TaskAccuracy | None:
        """The metric against labels of both; None without labels, or if it is not known (`no_accuracy` says why).

        Raises:
            Refused: The original network agrees with the labels by chance alone, so that it has nothing to lose.
        """
        if not self.labeled:
            return None
        try:
            labeled = task.settled_labels(self.labeled)
        except Unmatched as problem:
            raise Refused(
                f"{problem}: which category is which class is not known.",
                hint="List all categories of the network in the file, one for each of its classes, in their order by "
                "id; the annotations may use some of them.",
                code="labels.categories",
            ) from problem
        name = task.accuracy
        worse = 1.0 if next(each.unit for each in task.metrics if each.name == name) == "error" else -1.0

        def both(pairs: Sequence[tuple[Row, ...]]) -> dict[str, float]:
            candidate, reference = (task.summary([pair[end] for pair in pairs])[name] for end in (0, 1))
            return {"candidate": candidate, "reference": reference, "drop": worse * (candidate - reference)}

        try:
            found = both(labeled)
        except NothingToCompare:
            self.no_accuracy = f"no {name} against the labels: they show nothing on these images"
            return None
        if not np.isfinite(list(found.values())).all():
            self.no_accuracy = f"no {name} against the labels: it is no finite number"
            return None
        if task.by_chance([pair[1] for pair in labeled], found["reference"]):
            raise Refused(
                f"the original network finds nothing of the labels: {name} {found['reference']:.2%} on "
                f"{len(labeled)} images, no better than chance.",
                hint="Are the categories, the scale and the order of the labels those of the network?",
                code="labels.mismatch",
            )
        low, high = _interval(_bootstrap(both, labeled)["drop"])
        source = "repaconv"
        ends = [task.by_library([pair[end] for pair in labeled]) for end in (0, 1)]
        if (candidate := ends[0]) is not None and (reference := ends[1]) is not None:
            found = {"candidate": candidate, "reference": reference, "drop": worse * (candidate - reference)}
            source = task.library
        return TaskAccuracy(metric=name, images=len(labeled), low=low, high=high, source=source, **found)

    def link(self, name: str, reference: str, candidate: str) -> Link:
        """The link about all outputs together, with its verdict."""
        assert self.task is not None
        of: dict[str, Any] = {"name": name, "reference": reference, "candidate": f"{candidate}, {self.task.name}"}
        if not self.rows:
            return Link.concluded("not_run", **of)
        wrong = "its outputs have NaN or infinity" if self.not_finite else ""
        try:
            found = self.result()
        except NothingToCompare as problem:
            if wrong or isinstance(problem, OnlyCandidateFinds):
                figures = Figures(unit="images", compared=len(self.rows), detail=wrong or str(problem))
                return Link.concluded("exceeds_tolerance", figures=figures, tolerance=Tolerance(kind="lossy"), **of)
            return Link.concluded("unsuitable_inputs", figures=Figures(detail=str(problem)), **of)
        accuracy = found.accuracy
        lost = accuracy is not None and accuracy.images >= LEAST_LABELED and accuracy.low > ACCURACY_LOSS
        within = found.within and not lost and not self.not_finite
        return Link.concluded(
            "within_tolerance" if within else "exceeds_tolerance",
            figures=Figures(unit="images", compared=found.images, detail=wrong),
            note=f"{found.disagreement:.2%} {found.changed}; {found.layout}; known by {found.source}"
            + (f"; {self.no_accuracy}" if self.no_accuracy else ""),
            tolerance=Tolerance(kind="lossy"),
            task=found,
            **of,
        )


def _per_row(outputs: Outputs, lists: frozenset[str]) -> list[str]:
    """All other outputs with a row for each row of the lists: [M, ...] next to [M], [N, M, ...] next to [N, M]."""
    rows = min((outputs[name].shape for name in lists), key=len)[:2]
    return [name for name, array in outputs.items() if name not in lists and array.shape[: len(rows)] == rows]


def _share(value: float) -> float:
    """A number as a share from 0 to 1; 1, the worst, for NaN."""
    return min(1.0, max(0.0, value)) if value == value else 1.0


def _interval(spread: Array) -> tuple[float, float]:
    """The 95% interval of a metric over samples of the images."""
    low, high = (float(np.percentile(spread, level)) for level in LEVEL)
    return low, high


def _bootstrap(summary: Callable[[Sequence[Any]], Mapping[str, float]], rows: Sequence[Any]) -> dict[str, Array]:
    """Every metric over samples of the images."""
    chance, found = np.random.default_rng(0), []
    for _ in range(SAMPLES):
        try:
            found.append(summary([rows[place] for place in chance.integers(0, len(rows), len(rows))]))
        except NothingToCompare:  # of a sample without any object
            continue
    found = found or [summary(rows)]
    return {name: np.asarray([each[name] for each in found]) for name in found[0]}


def _finite(outputs: Outputs) -> Outputs:
    """Outputs with zeros for what is no number; `_not_finite` finds it."""
    return {
        name: np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0) if array.dtype.kind == "f" else array
        for name, array in outputs.items()
    }


def _not_finite(found: Outputs, right: Outputs) -> bool:
    """Whether the candidate's outputs have NaN or infinity, and the reference's have none."""
    real = [name for name, array in right.items() if array.dtype.kind == "f" and np.isfinite(array).all()]
    return any(not np.isfinite(found[name]).all() for name in real)

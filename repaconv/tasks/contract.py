"""The interface of a task: how outputs are read, how the results of two networks are compared, and by which metrics.

`repaconv.tasks.evaluation` does the rest for every task: batches, intervals, limits and the verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.results import TaskName

Array = NDArray[Any]
Outputs = Mapping[str, Array]
Row = dict[str, Any]
"""What is kept of one image: counts or numbers, by name."""

BY_CHANCE = 0.01
"""Shares of agreement with labels, or above that of chance, which say that nothing agrees."""


class Unmatched(Exception):
    """It is not known which category of the labels is which class; the message is a whole clause."""


class Unreadable(Exception):
    """The outputs cannot be read as results of the task; the message is the reason, as the end of a sentence."""


class NothingToCompare(Exception):
    """The reference's results show nothing, e.g. no object in any image; the message says so."""


class OnlyCandidateFinds(NothingToCompare):
    """The reference's results show nothing, and the candidate's show something."""


@dataclass(frozen=True)
class NetworkFacts:
    """The known facts about a network, apart from its outputs.

    Attributes:
        architecture: Its name, e.g. ``transformers:DetrForObjectDetection``; empty if unknown.
        classes: The number of classes; None if unknown.
        size: (height, width) of its images in pixels; None if unknown.
        names: The names of its classes, in their order; empty if unknown.
        rotated: Whether its boxes are rotated.
    """

    architecture: str = ""
    classes: int | None = None
    size: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    rotated: bool = False


class Metric(NamedTuple):
    """A metric that a task reports.

    Attributes:
        name: Its name in the field.
        unit: See `repaconv.results.TaskMetric`.
        limits: The limit by precision; without one, the metric is only reported.
    """

    name: str
    unit: Literal["share", "dB", "error"]
    limits: Mapping[str, float] = {}


class Task(ABC):
    """One task, for one network: it remembers how the outputs are read.

    Attributes:
        name: Its name, as ``--task`` takes it.
        metrics: What it reports.
        accuracy: The metric that is compared with labels; empty if it takes none.
        labels: What labels are, in words.
        changed: What the disagreement is a share of, in words that follow the share.
        counted: What the disagreement is a share of, in the plural, e.g. ``objects``; empty if it is no count.
        library: The package that computes the metric against labels where it is installed; empty if there is none.
        layout: How the outputs are read, in words; known after the first `read`.
        lists: The outputs that `read` takes the results from and whose rows are a list in the order of scores, so that
            row i of two networks may be of two objects: they are compared number by number only if they show nothing.
    """

    name: ClassVar[TaskName]
    metrics: ClassVar[tuple[Metric, ...]]
    accuracy: ClassVar[str] = ""
    labels: ClassVar[str] = ""
    changed: ClassVar[str]
    counted: ClassVar[str] = ""
    library: ClassVar[str] = ""

    def __init__(self, about: NetworkFacts) -> None:
        self.about, self.layout, self.lists = about, "", frozenset[str]()

    @abstractmethod
    def read(self, outputs: Outputs) -> list[Any]:
        """Read the results of every image from the outputs of one batch. The reference's first batch decides how.

        Raises:
            Unreadable: The outputs are not those of this task.
        """

    def matched_rows(self, result: Any, truth: Any) -> tuple[Array, Array]:
        """Return the rows of `lists` of the matching objects of one image: the candidate's and the reference's rows."""
        raise NotImplementedError

    def truth(self, result: Any) -> Any:
        """Return the truth that results are compared with, made of the reference's result."""
        return result

    @abstractmethod
    def row(self, result: Any, truth: Any) -> Row:
        """Compare the results of one image."""

    def labeled_row(self, result: Any, label: Any) -> Row:
        """Compare the result of one image with its label.

        Raises:
            Unreadable: The label is of another size than the result.
        """
        return self.row(result, label)

    def settled_labels(self, pairs: Sequence[tuple[Row, ...]]) -> Sequence[tuple[Row, ...]]:
        """Complete the rows of `labeled_row`, (candidate's, reference's) of each image, where it takes all of them.

        Raises:
            Unmatched: It is unknown which category of the labels is which class of the network.
        """
        return pairs

    def by_chance(self, _rows: Sequence[Row], value: float) -> bool:
        """Whether this metric against labels is no better than that of a network that knows nothing of them."""
        return value < BY_CHANCE

    def by_library(self, rows: Sequence[Row]) -> float | None:
        """The metric against labels as the field's own `library` has it; None where that is not installed."""
        return None

    def settled(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Complete the rows, where an image is compared with all others."""
        return rows

    @abstractmethod
    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return all metrics over the images of these rows.

        Raises:
            NothingToCompare: The reference's results show nothing; `OnlyCandidateFinds` if the candidate's do.
        """

    @abstractmethod
    def disagreement(self, summary: Mapping[str, float]) -> float:
        """How much of the reference's results changed, from 0 to 1."""

    def count(self, rows: Sequence[Row]) -> int:
        """How many of what is `counted` the reference's results show."""
        return len(rows)

    @abstractmethod
    def agreement(self, row: Row) -> float:
        """How near one image is; the layers are searched on the image with the least."""


def only_output(outputs: Outputs, axes: Sequence[int], wanted: str) -> Array:
    """The only output of floats or integers with so many axes.

    Raises:
        Unreadable: There is none, or there are several.
    """
    found = [array for array in outputs.values() if array.ndim in axes]
    if len(found) != 1:
        raise Unreadable(f"{'none' if not found else 'several'} of its outputs ({described(outputs)}) can be {wanted}")
    return found[0]


def require_same_shape(result: Array, truth: Array) -> None:
    """Refuse labels of another size than the results.

    Raises:
        Unreadable: They differ.
    """
    if result.shape != truth.shape:
        raise Unreadable(f"results of {list(result.shape)} are compared with labels of {list(truth.shape)}")


def described(outputs: Outputs) -> str:
    """The outputs with their shapes, in words."""
    return ", ".join(f"{name} {list(np.shape(array))}" for name, array in outputs.items())


def mean(rows: Sequence[Row], name: str) -> float:
    """The mean of one number over the images."""
    return float(np.mean([row[name] for row in rows]))

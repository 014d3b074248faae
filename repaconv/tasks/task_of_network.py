"""What task a network is for: by ``--task``, by its architecture, else by the names and shapes of its outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import numpy as np

from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.results import TaskName
from repaconv.tasks.contract import NetworkFacts, Outputs
from repaconv.tasks.detection import STRIDES, after_nms
from repaconv.tasks.segmentation import COEFFICIENTS

NAMES: tuple[TaskName, ...] = get_args(TaskName)

ULTRALYTICS: dict[str, TaskName] = {
    "classify": "classify",
    "detect": "detect",
    "segment": "segment",
    "pose": "keypoints",
    "obb": "detect",
}
"""Ultralytics' names of its tasks."""

ARCHITECTURES: tuple[tuple[str, TaskName], ...] = (
    (r"transformers:\w+ForImageClassification(WithTeacher)?", "classify"),
    (r"transformers:\w+ForObjectDetection", "detect"),
    (r"transformers:\w+ForSemanticSegmentation", "segment"),
    (r"transformers:\w+ForDepthEstimation", "depth"),
    (r"transformers:\w+ForImageSuperResolution", "restore"),
    (r"transformers:VitPoseForPoseEstimation", "keypoints"),
    (r"transformers:\w+(WithProjection|ImageFeatures)", "embed"),
    (r"torchvision:(fcn|deeplabv3|lraspp)_\w+", "segment"),
    (r"torchvision:(fasterrcnn|maskrcnn|retinanet|ssd|ssdlite|fcos)\w*", "detect"),
    (r"torchvision:keypointrcnn_\w+", "keypoints"),
)
"""Names of architectures, as ``--arch`` takes them, and their tasks."""

UNKNOWN = "no known kind of output"


class Choice(NamedTuple):
    """The task of a run.

    Attributes:
        task: The task; None if its outputs decide.
        source: How it is known, in words.
        asked: Whether the user named it, so that outputs of another kind are refused.
        about: What is known of the network.
    """

    task: TaskName | None
    source: str
    asked: bool
    about: NetworkFacts


def task_named(name: str) -> TaskName:
    """The task of this name.

    Raises:
        UsageProblem: There is none.
    """
    if name not in NAMES:
        raise UsageProblem(
            f"there is no task {name!r}.",
            hint=f"{did_you_mean(name, NAMES)}Known: {', '.join(NAMES)}.",
            code="task.unknown",
        )
    return name


def by_architecture(name: str, config: Mapping[str, Any]) -> TaskName | None:
    """Return the task by the architecture's name or from an Ultralytics checkpoint; None if both leave it open."""
    if own := ULTRALYTICS.get(str(config.get("task"))):
        return own
    return next((task for pattern, task in ARCHITECTURES if re.fullmatch(pattern, name)), None)


def by_outputs(outputs: Outputs, about: NetworkFacts, channels: int | None) -> tuple[TaskName, str]:
    """The task by names and shapes of outputs, and what shows it; ``other`` if nothing does.

    Numbers per pixel may be scores of classes, an image, optical flow or heatmaps, so they show no task; what is said
    of them offers ``--task``.
    """
    names = {name.lower() for name in outputs}
    if {"boxes", "scores", "keypoints"} <= names:
        return "keypoints", "outputs named boxes, scores and keypoints"
    if {"boxes", "scores"} <= names and names & {"labels", "classes"}:
        return "detect", "outputs named boxes, scores and labels"
    if "pred_boxes" in names and names & {"logits", "pred_logits"}:
        return "detect", "outputs named logits and pred_boxes"
    if not outputs or not all(isinstance(array, np.ndarray) for array in outputs.values()):
        return "other", UNKNOWN
    first, *others = outputs.values()
    if first.ndim == 3 and about.size and first.shape[2] == _anchors(about.size) and first.shape[1] > 4:
        masks = len(others) == 1 and others[0].ndim == 4 and others[0].shape[1] == COEFFICIENTS
        if masks or not others:
            return ("segment" if masks else "detect"), "a box for each place of the grids of strides 8, 16 and 32"
    if first.ndim == 3 and not others and first.shape[2] == 6 and after_nms(first):
        return "detect", "an output of rows with corners, score and class"
    if first.ndim == 4 and not others and about.size and channels:
        high, low = np.divide(first.shape[2:], about.size)
        if high == low == 1 and first.shape[1] not in (1, channels):
            return "other", f"{first.shape[1]} numbers per pixel (--task segment if they are scores of classes)"
        if high == low and high >= 2 and high == int(high) and first.shape[1] == channels:
            return (
                "other",
                f"{channels} numbers per pixel, {int(high)} times as large (--task restore if it is an image)",
            )
    return "other", UNKNOWN


def _anchors(size: tuple[int, int]) -> int:
    return sum((size[0] // stride) * (size[1] // stride) for stride in STRIDES)

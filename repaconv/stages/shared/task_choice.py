"""The task of a run, and the evaluation of lossy steps in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import Refused, UsageProblem
from repaconv.results import NetworkFold
from repaconv.stages.shared.input_selection import preprocessing_for
from repaconv.tasks.contract import NetworkFacts
from repaconv.tasks.labels import coco_images, label_array, mask_files, read_mask
from repaconv.tasks.task_of_network import Choice, by_architecture, by_outputs, task_named
from repaconv.verification.image_files import frame, image_files, image_size
from repaconv.verification.tolerances import LOSSY

if TYPE_CHECKING:
    from repaconv.sources.source_model import SourceModel
    from repaconv.tasks.evaluation import Evaluation
    from repaconv.verification.input_batches import Batch, Inputs


def task_of(source_model: SourceModel, asked: str | None = None) -> Choice:
    """The task of a run: by ``--task`` of this command or of `fold`, by its architecture, or by its class scores.

    It is open if none of these shows it; the outputs then decide.

    Raises:
        UsageProblem: There is no such task, or it is ``classify`` and no output is class scores.
    """
    folded, scores = source_model.folded, source_model.scores
    about = _about(source_model)
    if named := asked or folded.task:
        task = task_named(named)
        if task == "classify" and scores is None:
            raise UsageProblem(
                f"--task classify: this network outputs {', '.join(source_model.outputs)}, and not one output of shape "
                "[images, classes] alone.",
                hint="If one output is class scores: fold --set classes=N.",
                code="task.classes",
            )
        return Choice(task, "--task", True, about)
    if isinstance(folded, NetworkFold) and (known := by_architecture(folded.arch, folded.config)):
        return Choice(known, "the architecture", False, about)
    if scores is not None and not scores.assumed:
        return Choice("classify", scores.source, False, about)
    return Choice(None, "", False, about)


def _about(source_model: SourceModel) -> NetworkFacts:
    """Return the known facts about the network, apart from its outputs."""
    folded = source_model.folded
    if not isinstance(folded, NetworkFold):
        return NetworkFacts(size=folded.image_size)
    yaml = folded.config.get("yaml")
    classes = yaml.get("nc") if isinstance(yaml, dict) else folded.classes
    return NetworkFacts(
        folded.arch,
        classes if isinstance(classes, int) else None,
        folded.image_size,
        _class_names(folded.config),
        rotated=folded.config.get("task") == "obb",
    )


def _class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of classes in the ``config.json`` of a Hugging Face folder, in their order; empty if it has none."""
    names = config.get("id2label")
    if not isinstance(names, dict):
        return ()
    found = tuple(str(names.get(str(number), "")) for number in range(len(names)))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(found)) else found


def size_in(shape: Sequence[int]) -> tuple[int, int] | None:
    """The (height, width) of images of this shape [N, C, H, W]; None for other inputs."""
    return (int(shape[2]), int(shape[3])) if len(shape) == 4 else None


def evaluation_of(
    source_model: SourceModel, precision: str, size: tuple[int, int] | None, asked: str | None = None
) -> Evaluation | None:
    """The evaluation of a precision in the run's task; None if it is exact, or evaluated by classes or numbers alone.

    Args:
        source_model: The source model.
        precision: The precision of the candidate.
        size: (height, width) of the images that are run.
        asked: ``--task``.
    """
    if precision not in LOSSY:
        return None
    choice = task_of(source_model, asked)
    if choice.task in ("classify", "other") or size is None:
        return None
    return evaluation_by(choice._replace(about=replace(choice.about, size=size)), source_model, precision)


def evaluation_by(choice: Choice, source_model: SourceModel, precision: str) -> Evaluation:
    """A new evaluation of a precision in this task."""
    from repaconv.tasks.evaluation import Evaluation

    return Evaluation(choice, precision, _channels(source_model))


def _channels(source_model: SourceModel) -> int | None:
    """The channels of the network's images; None if it takes others."""
    shape = source_model.inputs[0].shape if source_model.inputs else ()
    return shape[1] if len(shape) == 4 and isinstance(shape[1], int) else None


def settled(choice: Choice, source_model: SourceModel) -> Choice:
    """A choice whose task is known: the network is run on one random image where its outputs decide."""
    if choice.task is not None:
        return choice
    outputs = source_model.stored.run(source_model.random_inputs(1, 0).piece(0, 1).feeds(source_model.inputs))
    task, shown = by_outputs(outputs, choice.about, _channels(source_model))
    return choice._replace(task=task, source=f"the outputs: {shown}")


# --- Labels


def with_labels(
    source_model: SourceModel,
    given: Inputs,
    labels: Path,
    choice: Choice,
    *,
    images: Path | None = None,
    count: int | None = None,
) -> Inputs:
    """The images with what is right in each, by labels of the network's task.

    Labels of an image folder belong to the images of the same name, and are resized and cropped with them. Labels of an
    .npz are in the order of its images.

    Args:
        source_model: The source model.
        given: The images.
        labels: The labels.
        choice: The task.
        images: The folder that the images are from; None if they are of an .npz.
        count: The largest number of images taken from it.

    Raises:
        UsageProblem: The task is unknown or takes no labels.
        Refused: The labels cannot be read, or are not of these images.
    """
    files = [path.relative_to(images) for path in image_files(images, count)] if images else None
    truths: list[Any]
    if choice.task == "detect":
        truths = _of_coco(source_model, given, labels, files, images)
    elif choice.task == "segment":
        truths = _of_masks(source_model, given, labels, files, images)
    elif choice.task in ("restore", "depth") and files is None:
        truths = list(label_array(labels))
    else:
        evaluated = choice.task not in (None, "other")
        what = f"those of {choice.task} are not read" if evaluated else "the task of this network is not known"
        raise UsageProblem(
            f"--labels {labels}: {what}.",
            hint="Name the task: --task detect, segment, restore or depth (the latter two with --inputs alone). "
            "Classes are the names of subfolders, or 'labels' in the .npz.",
            code="labels.task",
        )
    if len(truths) != given.shape[0]:
        raise Refused(
            f"{labels} has labels of {len(truths)} images, and {given.name} are {given.shape[0]}.",
            hint="Give labels in the order of the images of the .npz, one for each.",
            code="labels.count",
        )
    if all(truth is None for truth in truths):
        raise Refused(
            f"{labels} has labels of none of the {given.name}.",
            hint="Files belong together by their names.",
            code="labels.count",
        )

    def piece(start: int, stop: int) -> Batch:
        return replace(given.piece(start, stop), truths=tuple(truths[start:stop]))

    known = sum(truth is not None for truth in truths)
    return replace(given, piece=piece, labels=f"{labels.name}, of {known} images")


def _of_coco(
    source_model: SourceModel, given: Inputs, path: Path, files: Sequence[Path] | None, images: Path | None
) -> list[Any]:
    found = coco_images(path)
    if files is None or images is None or given.size is None:
        return [image.objects for image in found]
    by_name, alone = {image.name: image for image in found}, _only_once(path.name for path in image_files(images))
    wanted, truths = preprocessing_for(source_model, given.size), list[Any]()
    for file in files:
        image = by_name.get(file.as_posix(), by_name.get(file.name) if file.name in alone else None)
        if image is None:
            truths.append(None)
            continue
        size = image.size if all(image.size) else image_size(images / file)
        (across, down), corner = frame(size, wanted, given.size)
        scale, moved = np.tile(np.divide((across, down), size), 2), np.tile(corner, 2)
        boxes = (image.objects.boxes * scale - moved).clip(0, np.tile(given.size[::-1], 2))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
        truths.append(image.objects._replace(boxes=boxes).only(inside))
    return truths


def _of_masks(
    source_model: SourceModel, given: Inputs, folder: Path, files: Sequence[Path] | None, images: Path | None
) -> list[Any]:
    masks = mask_files(folder)
    if files is None or images is None or given.size is None:
        return [np.asarray(read_mask(path)).astype(int) for path in masks]
    by_name = {path.relative_to(folder).with_suffix(""): path for path in masks}
    alone = _only_once(path.stem for path in image_files(images)) & _only_once(path.stem for path in masks)
    by_stem = {path.stem: path for path in masks if path.stem in alone}
    wanted, truths = preprocessing_for(source_model, given.size), list[Any]()
    for file in files:
        path = by_name.get(file.with_suffix(""), by_stem.get(file.stem))
        if path is None:
            truths.append(None)
            continue
        mask = read_mask(path)
        (across, down), (left, top) = frame(mask.size, wanted, given.size)
        height, width = given.size
        resized = mask.resize((across, down), 0).crop((left, top, left + width, top + height))  # 0: the nearest pixel
        truths.append(np.asarray(resized).astype(int))
    return truths


def _only_once(names: Iterable[str]) -> set[str]:
    """The names of one file only: files of one name in several folders do not belong together by it."""
    return {name for name, count in Counter(names).items() if count == 1}

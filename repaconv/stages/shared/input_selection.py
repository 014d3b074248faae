"""Inputs of a stage: the user's .npz file or image folder, else random inputs; and their split for lower precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core.errors import UsageProblem
from repaconv.results import ClassScores, Fact, ImageSize, Preprocessing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from repaconv.engines.contract import Feeds
    from repaconv.sources.source_model import SourceModel
    from repaconv.verification.input_batches import Batch, Inputs

CALIBRATION_IMAGES = 32
NOTHING = "the preprocessing of this network is unknown: how images are resized and normalized"


def choose_inputs(
    source_model: SourceModel,
    *,
    inputs: str | Path | None = None,
    images: str | Path | None = None,
    classes: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    size: ImageSize | None = None,
    pixels: bool = False,
    batch: int | None = None,
    by_row: bool = False,
) -> Inputs:
    """The inputs for a run's network: images, or batches of other inputs.

    Args:
        source_model: The source model, which determines inputs and preprocessing.
        inputs: An .npz file.
        images: An image folder.
        classes: A file with one class name per line, for a folder.
        count: Number of random images or batches; for a folder the largest number of images, None for all.
        seed: Seed of random inputs.
        size: (height, width); that of the fold when None.
        pixels: Make random images as pixels, so that a graph with preprocessing can take them too.
        batch: Batch size of an inference of a network that takes no images, if it is fixed.
        by_row: Whether each row of an .npz is an inference of its own, where the network takes no images and the first
            axes of its inputs are one dynamic batch.

    Raises:
        UsageProblem: If both are given, fewer images than one, there is no preprocessing for pixels, or the network
            takes no images.
    """
    from repaconv.verification import input_batches

    if inputs and images:
        raise UsageProblem("both --inputs and --images were given.", hint="Give one of them.", code="usage.inputs")
    number, size = count or input_batches.RANDOM_IMAGES, size or source_model.folded.image_size
    if size is None:
        _require_no_images(source_model, images or pixels)
        if inputs:
            return _of_file_without_images(source_model, inputs, batch, by_row=by_row)
        return source_model.random_inputs(number, seed, batch=batch)
    if inputs:
        given = input_batches.npz_inputs(
            Path(inputs), _channels(source_model), source_model.scores.classes if source_model.scores else 0
        )
    elif images:
        given = _of_folder(source_model, Path(images), Path(classes) if classes else None, count, size)
    elif pixels:
        shape = (_channels(source_model), *size)
        given = input_batches.random_pixels(shape, preprocessing_for(source_model, size), count=number, seed=seed)
    else:
        given = source_model.random_inputs(number, seed, size)
    if given.labeled and source_model.scores and source_model.scores.assumed:
        given = replace(
            given, labels=f"{given.labels}; {taken_as_scores(source_model.scores, 'its shape and these labels')}"
        )
    return replace(given, whole=source_model.folded.whole)


def _of_file_without_images(source_model: SourceModel, path: str | Path, batch: int | None, *, by_row: bool) -> Inputs:
    """The inputs in an .npz file for a network that takes no images; see `choose_inputs`.

    Raises:
        UsageProblem: ``inputs.shape`` if they are not of the fixed batch size.
    """
    from repaconv.verification import input_batches

    apart = by_row and batch in (None, 1)
    given = input_batches.npz_calls(Path(path), source_model.inputs, source_model.outputs, by_row=apart)
    if why_not := other_batch(given, source_model, batch):
        raise UsageProblem(f"{path}: {why_not}.", hint="Leave --batch out, or give such inputs.", code="inputs.shape")
    return given


def other_batch(given: Inputs, source_model: SourceModel, batch: int | None) -> str:
    """Why a graph with a fixed batch size cannot take these inputs of no images; empty if it can."""
    if batch is None or given.size is not None:
        return ""
    first = next((port for port in source_model.inputs if port.shape), None)
    if first is None or isinstance(first.shape[0], int):
        return ""
    has = len(given.piece(0, 1).feeds(source_model.inputs)[first.name])
    return "" if has == batch else f"the graph takes a batch of {batch} only, and {first.name} has {has} rows"


def taken_as_scores(scores: ClassScores, by: str) -> str:
    """The message that an output is taken as class scores though only its shape is known."""
    return (
        f"the output {scores.text} is taken as the scores of {scores.classes} classes, by {by} "
        "(if it is not: fold --set classes=0)"
    )


def scores_output(source_model: SourceModel, given: Inputs, task: str | None = None) -> str:
    """Name of the output with class scores; empty if there is none, or it is not known to be one.

    An output known by its shape only counts as class scores if the images have labels, or if ``task`` (the option of
    this command or of `fold`) is ``classify``. Any other task has none.
    """
    scores = source_model.scores
    if named := task or source_model.folded.task:
        return scores.output if scores and named == "classify" else ""
    return scores.output if scores and (given.labeled or not scores.assumed) else ""


def scores_note(source_model: SourceModel, given: Inputs, task: str | None = None) -> str:
    """Describe what was assumed about labels and class scores in a lossy comparison."""
    scores, parts = source_model.scores, [given.labels] if given.labels else []
    if scores and not (task or source_model.folded.task or scores_output(source_model, given)):
        parts.append(
            f"the output {scores.text} is compared as numbers, not as the scores of {scores.classes} classes: only its "
            f"shape says so (if it is: fold --set classes={scores.classes})"
        )
    return "; ".join(parts)


def _of_folder(
    source_model: SourceModel, folder: Path, classes: Path | None, limit: int | None, size: ImageSize
) -> Inputs:
    from repaconv.verification.input_batches import image_inputs

    return image_inputs(
        folder,
        preprocessing_for(source_model, size),
        size=size,
        channels=_channels(source_model),
        classes=source_model.scores.classes if source_model.scores else 0,
        class_names=classes,
        limit=limit,
    )


def _channels(source_model: SourceModel) -> int:
    return int(source_model.inputs[0].shape[1] or 0)


def _require_no_images(source_model: SourceModel, asked: Any) -> None:
    """Refuse images for a network that takes other inputs."""
    if asked:
        takes = ", ".join(f"{port.name} {list(port.shape)} {port.dtype}" for port in source_model.inputs)
        raise UsageProblem(
            f"this network takes no images [N, C, H, W]: {takes}.",
            hint="Give its inputs by name with --inputs FILE.npz, or leave --images out for random inputs.",
            code="inputs.none",
        )


def preprocessing_for(source_model: SourceModel, size: ImageSize | None = None) -> Preprocessing:
    """The network's preprocessing, for another image size if one is given.

    Raises:
        UsageProblem: If the preprocessing is unknown, or is for another number of channels.
    """
    from repaconv.method_api.preprocessing import at_size

    wanted, channels = source_model.folded.preprocessing, _channels(source_model)
    if wanted is None:
        why = [
            f"{fact.source} says what is not done here ({fact.against})"
            for fact in _unsupported_preprocessing(source_model)
        ]
        raise UsageProblem(
            f"{(why or [NOTHING])[0]}.",
            hint="Fold with --set mean=... --set std=..., on the scale of 0 to 255, one number for each channel (for "
            "pixels from 0 to 1: mean=0, std=255), or give --inputs FILE.npz with arrays as the network takes them.",
            code="preprocessing.none",
        )
    if channels not in (1, 3) or len(wanted.mean) not in (1, channels):
        raise UsageProblem(
            f"the network takes {channels} channels, and its preprocessing has {len(wanted.mean)} means.",
            hint="Fold with --set mean=... --set std=..., one number for each channel.",
            code="preprocessing.channels",
        )
    return at_size(wanted, size or wanted.image_size)


def _unsupported_preprocessing(source_model: SourceModel) -> list[Fact]:
    from repaconv.method_api.preprocessing import PREPROCESSING

    return [fact for fact in source_model.folded.facts if fact.name == PREPROCESSING]


def fixed_batch(source_model: SourceModel) -> int | None:
    """The batch size of a network that takes no other; else None."""
    return source_model.folded.batch if isinstance(source_model.folded.batch, int) else None


class Split(NamedTuple):
    """Images split into calibration, validation and test images.

    Attributes:
        given: All images.
        calibration: Indices of the calibration images, evenly spread.
        test: Indices of the test images.
        batch: Batch size, if it is fixed; else None.
        validation: Indices of the validation images; empty unless `halved`.
    """

    given: Inputs
    calibration: list[int]
    test: list[int]
    batch: int | None
    validation: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the outputs of a batch are compared as a whole, not by image."""
        return self.given.whole

    @classmethod
    def of(cls, given: Inputs, *, batch: int | None = None, ranges: bool = True) -> Split:
        """Half of the images calibrate, at most `CALIBRATION_IMAGES`; none if the precision needs no value ranges.

        Raises:
            UsageProblem: If there are too few.
        """
        count = given.shape[0]
        wanted = min(CALIBRATION_IMAGES, count // 2) if ranges else 0
        if ranges and not wanted:
            raise _too_few(given)
        calibration = [place * count // wanted for place in range(wanted)]
        return cls(given, calibration, sorted(set(range(count)) - set(calibration)), batch)

    def halved(self) -> Split:
        """Turn every second test image into a validation image, so that the result is reported on unseen images."""
        return self._replace(validation=tuple(self.test[::2]), test=self.test[1::2])

    @property
    def description(self) -> str:
        """The number of images in each part, in words."""
        calibrate = [f"{len(self.calibration)} for calibration"] if self.calibration else []
        choose = [f"{len(self.validation)} for validation"] if self.validation else []
        others = f"{'the other ' if calibrate else ''}{len(self.test)} for evaluation"
        return f"{self.given.name}: {', '.join([*calibrate, *choose, others])}"

    def labeled_count(self, places: Sequence[int]) -> int:
        """How many of these images have a label, of their class or of the network's task."""
        found = [self.given.piece(place, place + 1) for place in places]
        classes = sum(int((piece.labels >= 0).sum()) for piece in found if piece.labels is not None)
        return classes + sum(truth is not None for piece in found for truth in piece.truths or ())

    def calibration_batches(self) -> list[Feeds]:
        """The calibration batches; with a fixed batch size the last one is filled by repeating its own images."""
        batch = None if self.given.whole else self.batch
        calls = [call.given for call in self._calls(self.calibration)]
        return [{name: fill_batch(array, batch) for name, array in call.items()} for call in calls]

    def test_batches(self) -> Iterator[Batch]:
        """The test batches; the last may have fewer images, unless outputs are compared as a whole."""
        return self._calls(self.test)

    def validation_batches(self) -> Iterator[Batch]:
        """The validation batches; as the test batches."""
        return self._calls(self.validation)

    def _calls(self, places: Sequence[int]) -> Iterator[Batch]:
        from repaconv.verification.input_batches import Batch

        if self.given.whole and places:
            yield from self.given.only(places, self.given.name).together(self.batch).batches()
            return
        step = self.batch or 8
        for start in range(0, len(places), step):
            yield Batch.joined([self.given.piece(place, place + 1) for place in places[start : start + step]])


def _too_few(given: Inputs) -> UsageProblem:
    """The refusal of a single image or call."""
    if given.size is None:
        return UsageProblem(
            f"{given.name}: one inference cannot both calibrate a lower precision and evaluate it.",
            hint="Give more rows, if the first axes of all inputs are one dynamic batch; else leave --inputs out, and "
            "random inputs calibrate it.",
            code="inputs.too-few",
        )
    return UsageProblem(
        f"{given.name}: one image cannot both calibrate a lower precision and evaluate it.",
        hint="Give at least two images with --inputs or --images, better some hundreds.",
        code="inputs.too-few",
    )


def require_same_size(given: Inputs, size: ImageSize) -> None:
    """Refuse images of another size than the graph takes.

    Raises:
        UsageProblem: If the sizes differ.
    """
    if given.size != tuple(size):
        raise UsageProblem(
            f"{given.name} are of {' x '.join(map(str, given.size or ()))} pixels, the graph takes "
            f"{' x '.join(map(str, size))}.",
            hint="Give images of that size, or --image-size.",
            code="inputs.shape",
        )


def fill_batch(images: NDArray[Any], batch: int | None) -> NDArray[Any]:
    """A batch [n, ...] of ``batch`` images, filled by repeating these; None leaves them as they are."""
    return images if batch is None else np.resize(images, (batch, *images.shape[1:]))

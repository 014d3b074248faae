"""Inputs of a benchmark: the same images, or the same random inputs, for every measured model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import UsageProblem
from repaconv.engines.contract import GpuSession
from repaconv.results import ImageSize, Preprocessing
from repaconv.stages.bench.benchmark_subjects import BenchmarkSubject, BenchmarkSubjects
from repaconv.stages.shared.evaluation_images import MAX_IMAGES, evaluation_images, why_without_images
from repaconv.stages.shared.input_selection import scores_output
from repaconv.stages.shared.model_opening import MIN_COMPARED_IMAGES, OpenedModel
from repaconv.verification.input_batches import Batch
from repaconv.verification.model_runners import channels_first

if TYPE_CHECKING:
    from repaconv.engines.contract import Session
    from repaconv.verification.input_batches import Inputs

ADDED_IMAGES = 8
"""Images that the larger batch has in addition when memory is measured."""
RANDOM_CALLS = 2
"""Random inferences on which the outputs of networks without image inputs are compared."""


class BenchmarkInputs(NamedTuple):
    """Inputs of all models; the model under test is the first one.

    Attributes:
        batches: One batch per inference.
        shape: [C, H, W] of the images; None if the model takes no images.
        name: Description of the inputs.
        preprocessing: How image files were preprocessed.
        why_unusable: Why the outputs of a lossy model are not compared on these inputs; empty if they are.
        scores: Name of the output with class scores; empty if there is none.
        no_evidence: Why a lossy model whose outputs agree on these inputs is not verified; empty if it is.
    """

    batches: list[Batch]
    shape: tuple[int, int, int] | None
    name: str = ""
    preprocessing: str = ""
    why_unusable: str = ""
    scores: str = ""
    no_evidence: str = ""


def choose_benchmark_inputs(
    known: BenchmarkSubjects, models: Mapping[str, OpenedModel], batch: int, size: ImageSize | None, seed: int
) -> BenchmarkInputs:
    """Choose the inputs: images of this batch and size if the first model takes images, otherwise random inputs.

    Inputs that evaluated a lossy export come before random ones, for which it was not calibrated.

    Raises:
        UsageProblem: If the model has another fixed batch or size, or is an engine that takes no images.
    """
    first = known.subjects[0]
    session, source_model = models[first.name].session, known.source_model
    why_no_evidence = why_without_images(known.export.artefact if known.export is not None else None)
    if source_model is not None and source_model.folded.image_size is None:
        rows = _evaluation_rows(known, batch)
        if isinstance(rows, BenchmarkInputs):
            return rows
        return BenchmarkInputs(
            list(source_model.random_inputs(RANDOM_CALLS, seed, batch=batch).batches()),
            None,
            why_unusable=rows,
            no_evidence=why_no_evidence,
        )
    if source_model is None and not takes_images(session):
        return BenchmarkInputs(_random_inputs(first.path, session, seed), None, no_evidence=why_no_evidence)
    shape = image_shape(channels_first(session.inputs[0]), batch, size, first.path)
    own = _evaluation_inputs(known, models, shape, batch)
    if isinstance(own, BenchmarkInputs):
        return own
    count = max(1, MIN_COMPARED_IMAGES // batch) * batch
    given = _random_images(known, models, shape, count, seed)
    return BenchmarkInputs(
        list(given.batches(batch)),
        shape,
        given.name,
        why_unusable=own,
        scores=_scores(known, given),
        no_evidence=why_no_evidence,
    )


def _scores(known: BenchmarkSubjects, given: Inputs) -> str:
    return scores_output(known.source_model, given) if known.source_model else ""


def _evaluation_rows(known: BenchmarkSubjects, batch: int) -> BenchmarkInputs | str:
    """The rows that evaluated a lossy export of a network without images, in full batches; else the reason as text."""
    images = known.export.artefact.images if known.export is not None else None
    if known.source_model is None or known.export is None or images is None or images.count == 1:
        return ""
    given = evaluation_images(known.source_model, known.export.artefact, most=MAX_IMAGES)
    if isinstance(given, str):
        return given
    count = given.shape[0]
    rows = [given.piece(place % count, place % count + 1) for place in range(-(-count // batch) * batch)]
    batches = [Batch.joined(rows[start : start + batch]) for start in range(0, len(rows), batch)]
    return BenchmarkInputs(batches, None, given.name)


def _evaluation_inputs(
    known: BenchmarkSubjects, models: Mapping[str, OpenedModel], shape: tuple[int, int, int], batch: int
) -> BenchmarkInputs | str:
    """The images that evaluated a lossy export, in full batches; else the reason as text, empty if it had none."""
    if known.source_model is None or known.export is None or known.export.artefact.images is None:
        return ""
    given = evaluation_images(known.source_model, known.export.artefact, most=MAX_IMAGES)
    if isinstance(given, str):
        return given
    if given.shape[1:] != shape:
        return f"{given.name} are of {list(given.shape[1:])}, these of {list(shape)}"
    if any(each.takes_pixels for each in models.values()) and given.piece(0, 1).pixels is None:
        return f"the graph takes pixels, and {given.name} are normalized"
    count = -(-given.shape[0] // batch) * batch
    filled = given.only([place % given.shape[0] for place in range(count)], given.name)
    return BenchmarkInputs(
        list(filled.batches(batch)), shape, given.name, given.preprocessing, scores=_scores(known, given)
    )


def _random_images(
    known: BenchmarkSubjects, models: Mapping[str, OpenedModel], shape: tuple[int, int, int], count: int, seed: int
) -> Inputs:
    """Random pixels if the preprocessing is known, or nothing is known of the network; otherwise random images."""
    from repaconv.verification.input_batches import random_pixels

    source_model = known.source_model
    if source_model is None:
        return random_pixels(shape, any_preprocessing(shape), count=count, seed=seed)
    wanted = source_model.folded.preprocessing
    return (
        random_pixels(shape, wanted, count=count, seed=seed)
        if wanted
        else source_model.random_inputs(count, seed, shape[1:])
    )


def takes_images(session: Session) -> bool:
    """Whether the model has one input, which is images or pixels."""
    return len(session.inputs) == 1 and len(session.inputs[0].shape) == 4


def _random_inputs(path: Path, session: Session, seed: int) -> list[Batch]:
    """Random inputs of an arbitrary ONNX model, as its first operators expect them.

    Raises:
        UsageProblem: If it is an engine, whose inputs are unknown, or it does not run on random inputs.
    """
    import onnx

    from repaconv.verification.onnx_model_loading import require_input_shapes
    from repaconv.verification.probe_inputs import Unrunnable, probes

    if path.suffix != ".onnx":
        raise UsageProblem(
            f"{path} has the inputs {', '.join(f'{port.name} {list(port.shape)}' for port in session.inputs)}, "
            "which are not images.",
            hint="Measure the graph that it was built from, or its run folder.",
            code="bench.shape",
        )
    require_input_shapes(path, model := onnx.load(path))
    try:
        found = probes(model, session.run)
    except Unrunnable as error:
        raise UsageProblem(
            f"{path} does not run on random inputs: {error}.", hint="Fold it, and measure the run.", code="bench.shape"
        ) from error
    calls = [found.call(model, seed + n) for n in range(RANDOM_CALLS)]
    return [Batch(call, whole=True) for call in calls]


def image_shape(
    model_shape: tuple[int | str | None, ...], batch: int, size: ImageSize | None, path: Path
) -> tuple[int, int, int]:
    """[C, H, W] of the images that the model takes.

    Raises:
        UsageProblem: If the model has another fixed batch or size, or takes no images.
    """
    if len(model_shape) != 4 or not isinstance(model_shape[1], int):
        raise UsageProblem(
            f"{path} has an input of shape {list(model_shape)}, which is not images [N, C, H, W].",
            hint="bench measures models whose input is images.",
            code="bench.shape",
        )
    wanted = (batch, model_shape[1], *(size or model_shape[2:]))
    if not isinstance(wanted[2], int) or not isinstance(wanted[3], int):
        raise UsageProblem(
            f"{path} takes images of any size.", hint="Choose a size with --image-size.", code="bench.shape"
        )
    if any(isinstance(has, int) and has != want for has, want in zip(model_shape, wanted, strict=True)):
        raise UsageProblem(
            f"{path} has the fixed input shape {list(model_shape)}, but {list(wanted)} was requested.",
            hint="Leave --batch and --image-size out, or export with these values.",
            code="bench.shape",
        )
    return (wanted[1], wanted[2], wanted[3])


def any_preprocessing(shape: tuple[int, int, int]) -> Preprocessing:
    """Preprocessing for a bare graph without any: values as large as those of normalized pixels."""
    channels = shape[0]
    return Preprocessing(mean=(127.5,) * channels, std=(64.0,) * channels, image_size=shape[1:], source="none")


def memory_per_image(subjects: list[BenchmarkSubject], load: Callable[..., Any], size: ImageSize | None) -> float:
    """Bytes of memory that each further image of a batch takes, inputs included.

    It is the growth of this process's peak memory between a batch of 1 and a larger batch. Free GPU memory is not
    queried beforehand: an allocation that fails is reported by `repaconv.engines.nvidia_gpu.within_memory`.
    """
    import numpy as np

    grown = []
    for source_model in subjects:
        dims = {"height": size[0], "width": size[1]} if size else {}
        session = load(source_model, dims=dims).session
        if isinstance(session, GpuSession):
            return 1.0
        port = session.inputs[0]
        channels, height, width = image_shape(channels_first(port), 1, size, source_model.path)
        if port.shape[0] not in (None, "batch"):
            return float("inf")
        resident = []
        for images in (1, 1 + ADDED_IMAGES):
            pixels = port.dtype == "uint8"
            shape = (images, height, width, channels) if pixels else (images, channels, height, width)
            session.run({port.name: np.zeros(shape, dtype=port.dtype)})
            resident.append(_peak_bytes())
        grown.append((resident[1] - resident[0]) / ADDED_IMAGES)
    return max(*grown, 1.0)


def _peak_bytes() -> int:
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

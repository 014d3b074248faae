"""`score`: how well a convolution can replace each attention head of a plain vision transformer, over images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core import run_folder
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import payload_of
from repaconv.core.progress import Progress, silent
from repaconv.results import ScoreArtefact
from repaconv.stages.convert.image_and_option_checks import read_images, require_kernel
from repaconv.stages.convert.options import ScoreOptions
from repaconv.stages.shared.fetched_files import local_weights
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files

if TYPE_CHECKING:
    from torch import Tensor

    from repaconv.conversion.head_scores import Scores
    from repaconv.conversion.plain_vit import Reading
    from repaconv.results import Origin
    from repaconv.verification.input_batches import Inputs


def score_by(options: ScoreOptions, checkpoint: str | Path, *, progress: Progress = silent) -> ScoreArtefact:
    """Score how well a convolution can replace each attention head, by the paper's score and by measured ones.

    One pass over the images, in memory that does not grow with their number. ``errors`` needs memory for all images.

    Args:
        checkpoint: A plain vision transformer.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If the network is no plain vision transformer, or an image cannot be used.
        UsageProblem: If there are no images, or images of another size.
    """
    checkpoint = local_weights(checkpoint)
    plan = _plan(options, checkpoint)
    scores = _score(plan, progress)
    artefact = _artefact(plan, scores)
    replace_artifact(plan.path, artefact)
    return with_files(artefact, [checkpoint], [plan.path, plan.drawing])


score = by_name(score_by, ScoreOptions)


class _Plan(NamedTuple):
    """The resolved options; after this only an unusable image is refused."""

    options: ScoreOptions
    origin: Origin
    reading: Reading
    given: Inputs
    places: list[int]
    path: Path
    drawing: Path


def _plan(options: ScoreOptions, checkpoint: Path) -> _Plan:
    from repaconv.checkpoints import read_checkpoint
    from repaconv.conversion.image_splits import evenly_spaced
    from repaconv.conversion.plain_vit import read_plain

    require_kernel(options.kernel)
    found = read_checkpoint(checkpoint, options.weights)
    reading = read_plain(found, dict(options.settings or {}))
    given = read_images(options, reading)
    usual = run_folder.OUT / f"{run_folder.utf8_stem(checkpoint)}.score.json"
    path = Path(options.out) if options.out else usual
    drawing = path.with_suffix(".svg")
    require_replaceable(path, "score", drawing)
    return _Plan(options, found.origin, reading, given, evenly_spaced(given.shape[0], options.samples), path, drawing)


def _score(plan: _Plan, progress: Progress) -> Scores:
    from repaconv.conversion.head_scores import score
    from repaconv.conversion.plain_vit import PlainViT

    plain = PlainViT.of(plan.reading)
    scores = score(plain, _images(plan, progress), plan.options.kernel)
    if not plan.options.errors:
        return scores
    from repaconv.conversion.block_selection import SelectionData, single_block_errors
    from repaconv.conversion.image_splits import split_images
    from repaconv.conversion.kernel_fitting import ConversionSettings

    selection = SelectionData.of(plain, split_images(plan.given, plan.options.samples))
    return scores.with_errors(single_block_errors(selection, ConversionSettings(kernel=plan.options.kernel), progress))


def _images(plan: _Plan, progress: Progress) -> Iterator[Tensor]:
    """The sampled images, in small batches."""
    import numpy as np
    import torch

    from repaconv.conversion.image_splits import require_finite
    from repaconv.verification.input_batches import IMAGES_AT_ONCE

    for start in range(0, len(plan.places), IMAGES_AT_ONCE):
        progress("score", start, len(plan.places))
        several = []
        for place in plan.places[start : start + IMAGES_AT_ONCE]:
            several.append(plan.given.piece(place, place + 1).images)
            require_finite(several[-1], place, plan.given)
        yield torch.from_numpy(np.concatenate(several))


def _artefact(plan: _Plan, scores: Scores) -> ScoreArtefact:
    from repaconv.conversion.head_scores import scores_svg, uniform_locality

    config = plan.reading.config
    title = f"{run_folder.title_of(Path(plan.origin.path))}: mean attention around the query, by block and head"
    write_payload(plan.drawing, scores_svg(scores, title))
    return ScoreArtefact(
        made_by=made_by("torch"),
        verdict="not verified",
        options=plan.options.words(),
        other_files=(payload_of(plan.drawing, plan.path.parent),),
        origin=plan.origin,
        facts=plan.reading.facts,
        inputs=plan.given.name,
        images=len(plan.places),
        image_size=config.image_size,
        grid=config.grid,
        kernel=plan.options.kernel,
        uniform=uniform_locality(config.grid, plan.options.kernel),
        blocks=scores.blocks,
        by_sigma=scores.by_sigma,
        by_error=scores.by_error,
    )

"""The evaluation images of a lossy export: recorded with the export, and read again by later stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core.files import canonical_json, sha256_of, sha256_of_bytes
from repaconv.results import ExportArtefact, ImageSet, Link
from repaconv.sources.source_model import SourceModel
from repaconv.stages.shared.input_selection import Split, choose_inputs

if TYPE_CHECKING:
    from repaconv.verification.input_batches import Inputs

EXPORT_AGAIN = "export again, or give verify --inputs or --images"
MAX_IMAGES = 64
"""Largest number of images on which `bench` and `build` compare outputs."""
NO_IMAGES = (
    "only random images, which show little of a lossy model: give yours to export or verify, with --inputs or --images"
)
"""Why a lossy model that passes on random images is not verified."""
NO_IMAGES_OF_FP32 = (
    "only random images, which show little of a lossy model: give yours to verify, with --engine and --inputs or "
    "--images"
)
"""The same of an engine that a runtime lowers itself: the export of an FP32 graph takes no images."""


def why_without_images(exported: ExportArtefact | None) -> str:
    """Why random images do not verify a lossy model of an export, or of a file that has none."""
    return NO_IMAGES_OF_FP32 if exported is not None and exported.precision == "fp32" else NO_IMAGES


def image_set(
    split: Split | None,
    inputs: str | Path | None,
    images: str | Path | None,
    classes: str | Path | None,
) -> ImageSet | None:
    """The record of an export's images; None if there were none, or they were random."""
    given = inputs or images
    if split is None or not given:
        return None
    path, count = Path(given).resolve(), split.given.shape[0]
    return ImageSet(
        path=str(path),
        sha256=_sha256(path, count),
        count=count,
        calibration=tuple(split.calibration),
        classes=str(Path(classes).resolve()) if classes else "",
        classes_sha256=sha256_of(Path(classes)) if classes else "",
    )


def evaluation_images(source_model: SourceModel, exported: ExportArtefact, *, most: int | None = None) -> Inputs | str:
    """The images of an export that were not used for calibration; or why they cannot be read again, as text.

    Args:
        source_model: The source model, which determines inputs and preprocessing.
        exported: The export.
        most: Largest number of images, evenly spread.
    """
    known = exported.images
    if known is None:
        return NO_IMAGES
    path = Path(known.path)
    if not path.exists():
        return f"the images of its export, {path}, are not there any more; {EXPORT_AGAIN}"
    if _sha256(path, known.count) != known.sha256:
        return f"the images of its export, {path}, were changed since; {EXPORT_AGAIN}"
    if known.classes and not Path(known.classes).exists():
        return f"the class names of its export, {known.classes}, are not there any more; {EXPORT_AGAIN}"
    if known.classes_sha256 and sha256_of(Path(known.classes)) != known.classes_sha256:
        return f"the class names of its export, {known.classes}, were changed since; {EXPORT_AGAIN}"
    folder = path.is_dir()
    size = exported.image_size if isinstance(exported.image_size, tuple) else None
    given = choose_inputs(
        source_model,
        inputs=None if folder else path,
        images=path if folder else None,
        classes=known.classes or None,
        count=known.count if folder else None,
        size=size,
        by_row=known.count > 1,
    )
    places = sorted(set(range(known.count)) - set(known.calibration))
    chosen = places if most is None else _spread(places, most)
    of_them = "the" if len(chosen) == len(places) else f"{len(chosen)} of the"
    which = f", {of_them} {len(places)} not used for calibration" if known.calibration else f", {len(chosen)} of them"
    return given.only(chosen, given.name if len(chosen) == known.count else f"{given.name}{which}")


def without_evidence(link: Link, why: str) -> Link:
    """A link that passed on unsuitable inputs becomes not verified; one that failed stays failed."""
    if link.verdict != "passed":
        return link
    return link.because("unsuitable_inputs", why)


def _spread(places: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of these indices, evenly spread."""
    count = min(most, len(places))
    return [places[n * len(places) // count] for n in range(count)]


def _sha256(path: Path, count: int) -> str:
    """Hash of an .npz file, or of the names and contents of a folder's images; empty if the folder has none."""
    from repaconv.core.errors import Refused
    from repaconv.verification.image_files import image_files

    if not path.is_dir():
        return sha256_of(path)
    try:
        files = image_files(path, count)
    except Refused:
        return ""
    content = {str(file.relative_to(path)): sha256_of(file) for file in files}
    return sha256_of_bytes(canonical_json(content).encode("utf-8", "surrogateescape"))

"""What a result records of its making: versions of packages, and the files that were read and written."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from repaconv.core.errors import Refused
from repaconv.core.sharded_checkpoint import files_of
from repaconv.results import Artefact

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)


def made_by(*packages: str) -> dict[str, str]:
    """Versions of repaconv and of the packages whose work a stage's result depends on."""
    return {package: version(package) for package in ("repaconv", *packages)}


def with_files(artefact: AnyArtefact, inputs: Sequence[Path], outputs: Sequence[Path]) -> AnyArtefact:
    """Add the names of the files that a stage read and wrote; of a checkpoint in several files, all of them."""
    read = [file for each in inputs for file in _all_files(each)]
    return artefact.model_copy(update={"input_files": tuple(map(str, read)), "output_files": tuple(map(str, outputs))})


def _all_files(checkpoint: Path) -> tuple[Path, ...]:
    try:
        return files_of(checkpoint)
    except Refused:  # a part was removed after it was read; the result is written already
        return (checkpoint,)

"""What a result records of its making: versions of packages, and the files that were read and written."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from repaconv.results import Artefact

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)


def made_by(*packages: str) -> dict[str, str]:
    """Versions of repaconv and of the packages whose work a stage's result depends on."""
    return {package: version(package) for package in ("repaconv", *packages)}


def with_files(artefact: AnyArtefact, inputs: Sequence[Path], outputs: Sequence[Path]) -> AnyArtefact:
    """Add the names of the files that a stage read and wrote."""
    return artefact.model_copy(
        update={"input_files": tuple(map(str, inputs)), "output_files": tuple(map(str, outputs))}
    )

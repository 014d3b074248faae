"""Small helpers of several stages: package versions, input and output files, counts, image sizes, targets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from repaconv.core import plugins
from repaconv.core.errors import UsageProblem
from repaconv.results import Artefact, Fact, ImageSize

if TYPE_CHECKING:
    from repaconv.engines.targets import Target

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)


def made_by(*packages: str) -> dict[str, str]:
    """Versions of repaconv and of the packages whose work a stage's result depends on."""
    return {package: version(package) for package in ("repaconv", *packages)}


def with_files(artefact: AnyArtefact, took: Sequence[Path], wrote: Sequence[Path]) -> AnyArtefact:
    """Add the names of the files that a stage read and wrote."""
    return artefact.model_copy(update={"input_files": tuple(map(str, took)), "output_files": tuple(map(str, wrote))})


def contradictions(facts: Sequence[Fact]) -> tuple[str, ...]:
    """The user's settings that contradict the checkpoint, in words."""
    return tuple(
        f"--set {fact.name}={fact.value} contradicts the checkpoint: {fact.against}" for fact in facts if fact.overrules
    )


def as_image_size(size: int | str | ImageSize | None) -> ImageSize | None:
    """A size as (height, width): from one number, for a square, or from text such as ``140x126``.

    Raises:
        UsageProblem: If the text is not an image size.
    """
    from repaconv.stages.shared.option_dataclasses import SIZE, image_size

    return None if size is None else image_size(str(SIZE.format(size)), "image_size")


def default_rewrites(device: Target, method: str) -> tuple[str, ...]:
    """Names of the rewrites in a method's default preset on a target, for this machine's CPU."""
    from repaconv.benchmark.cpu_isa_level import isa_level

    return device.form(method, isa_level(device.architecture))


THREADS_PER_CPU = 16
"""More threads than this per CPU are a slip of the keyboard: a runtime may wait forever for very many."""


def require_threads(threads: int | None) -> None:
    """Refuse far more threads than this machine has CPUs. A few more share them.

    Raises:
        UsageProblem: If there are more than `THREADS_PER_CPU` for each.
    """
    cpus = os.cpu_count() or 1
    if threads is not None and threads > THREADS_PER_CPU * cpus:
        raise UsageProblem(
            f"{threads} threads per inference are far more than the CPUs of this machine, {cpus}.",
            hint=f"Give --threads {cpus}, or up to {THREADS_PER_CPU} for each CPU.",
            code="bench.threads",
        )


def load_target(name: str | Target) -> Target:
    """A target by its registered name or the path of its .toml file; ``name@variant`` selects a variant."""
    from repaconv.engines.targets import Target, from_file

    if isinstance(name, Target):
        return name
    name, _, variant = name.partition("@")
    target: Any = from_file(Path(name)) if name.endswith(".toml") else plugins.load(plugins.TARGETS, name)
    assert isinstance(target, Target)
    return target.variant(variant) if variant else target

"""What several stages need: versions, files told, counts, sizes, targets."""

from __future__ import annotations

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
    """Tell the caller which files a stage took and wrote."""
    return artefact.model_copy(update={"input_files": tuple(map(str, took)), "output_files": tuple(map(str, wrote))})


def contradictions(facts: Sequence[Fact]) -> tuple[str, ...]:
    """The user's settings that say other than the checkpoint."""
    return tuple(
        f"--set {fact.name}={fact.value} contradicts the checkpoint: {fact.against}" for fact in facts if fact.overrules
    )


def at_least_one(name: str, asked: int | None, usual: int) -> int:
    """How many, or as many as usual where nothing was asked for.

    Raises:
        UsageProblem: If none were asked for.
    """
    if asked is not None and asked < 1:
        raise UsageProblem(f"{name} is {asked}.", hint="Give a whole number above zero.", code="usage.count")
    return usual if asked is None else asked


def as_image_size(size: int | str | ImageSize | None) -> ImageSize | None:
    """A square one from one number, any as it is typed: ``140x126``.

    Raises:
        UsageProblem: If a text says none.
    """
    from repaconv.stages.shared.option_definitions import image_size

    if isinstance(size, str):
        return image_size(size, "image_size")
    return (size, size) if isinstance(size, int) else size


def usual_form(device: Target, method: str) -> tuple[str, ...]:
    """Names of the rewrites of a method's default form on a target, by the family of the processor at hand."""
    from repaconv.benchmark.cpu_isa_level import family

    return device.form(method, family(device.architecture))


def load_target(name: str | Target) -> Target:
    """A registered target by name, or the user's own by the path of its .toml; ``@`` and a name take a variant."""
    from repaconv.engines.targets import Target, from_file

    if isinstance(name, Target):
        return name
    name, _, variant = name.partition("@")
    target: Any = from_file(Path(name)) if name.endswith(".toml") else plugins.load(plugins.TARGETS, name)
    assert isinstance(target, Target)
    return target.variant(variant) if variant else target

"""What several stages need: progress, the method of a checkpoint, the two forms of a run, versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from repaconv import registry, runs
from repaconv.artefacts import Artefact, Fact, FoldArtefact, ImageSize, MethodFold
from repaconv.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.files import sha256_of

if TYPE_CHECKING:
    from torch import Tensor

    from repaconv.checkpoint import Checkpoint
    from repaconv.engines.contract import Engine, Session
    from repaconv.proof.runners import Images
    from repaconv.targets import Target
    from repaconv.trained.contract import Detection, Method, Reading

Progress = Callable[[str, int, int], None]
"""Told (what, done, in all); 0 in all means that the end is not known."""

DEPLOY, TRAINING = "deploy form", "training form"

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress for nobody."""


def made_by(*packages: str) -> dict[str, str]:
    """Versions of repaconv and of the packages whose work a stage's result depends on."""
    return {package: version(package) for package in ("repaconv", *packages)}


def with_files(artefact: AnyArtefact, took: Sequence[Path], wrote: Sequence[Path]) -> AnyArtefact:
    """Tell the caller which files a stage took and wrote."""
    return artefact.model_copy(update={"took": tuple(map(str, took)), "wrote": tuple(map(str, wrote))})


def choose_method(checkpoint: Checkpoint, wanted: str) -> tuple[Method, Detection]:
    """The method asked for, or the one whose keys are there.

    Raises:
        Refused: If none is, or several are, or the one asked for is not.
    """
    from repaconv.trained.lora import require_base

    names = list(registry.registered(registry.METHODS)) if wanted == "auto" else [wanted]
    found: list[tuple[Method, Detection]] = []
    for name in names:
        try:
            method = load_method(name)
        except EnvironmentProblem:
            if wanted == "auto":  # a broken plug-in is not this checkpoint's fault
                continue
            raise
        if (detection := method.detect(checkpoint)) and (detection.confidence != "asked" or wanted != "auto"):
            found.append((method, detection))
    found = [pair for pair in found if pair[1].confidence == "certain"] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise Refused(
            f"{checkpoint.path} has keys of several methods: {', '.join(m.name for m, _ in found)}.",
            hint="Choose one with --method.",
            code="method.ambiguous",
        )
    require_base(checkpoint)
    raise Refused(
        f"{checkpoint.path} has no keys of {wanted if wanted != 'auto' else 'any method that is known here'}.",
        hint=f"Known methods: {', '.join(registry.registered(registry.METHODS))}. See `repaconv inspect`.",
        code="method.mismatch",
    )


def load_method(name: str) -> Method:
    """A registered method, which then also takes LoRA on any linear layer.

    Raises:
        EnvironmentProblem: If it cannot be loaded, or is of another version's contract.
    """
    from repaconv.trained.contract import Method
    from repaconv.trained.lora import with_adapters

    method = registry.load(registry.METHODS, name)
    if not isinstance(method, Method):
        raise EnvironmentProblem(
            f"the method {name!r} is a {type(method).__name__}, not a repaconv.trained.contract.Method.",
            hint="Update the package that brings it, or remove it.",
            code="method.broken",
        )
    return with_adapters(method)


def read_again(folded: MethodFold, checkpoint: str | Path | None) -> tuple[Reading, Path]:
    """Read the run's checkpoint again, exactly as `fold` did.

    Raises:
        Refused: If it is gone or has changed.
    """
    from repaconv.checkpoint import read_checkpoint

    path = source_of(folded, checkpoint)
    found = read_checkpoint(path, folded.origin.weights, folded.origin.sha256)
    return load_method(folded.method).read(found, folded.settings), path


def source_of(folded: FoldArtefact, moved: str | Path | None) -> Path:
    """The file that a run was folded from, if it is still the one that it was.

    Args:
        folded: The fold.
        moved: Where it is now, if it has moved.

    Raises:
        Refused: If it is gone or has changed.
    """
    path, what = Path(moved) if moved else Path(folded.origin.path), folded.origin_told
    if not path.is_file():
        raise Refused(
            f"the run's {what} {path} is not there.",
            hint="Say where it is now with --checkpoint.",
            code="checkpoint.missing",
        )
    if sha256_of(path) != folded.origin.sha256:
        raise Refused(
            f"{path} is not the {what} that was folded: its hash is another.",
            hint="Fold it again.",
            code="checkpoint.changed",
        )
    return path


def stored_weights(run: runs.Run, folded: FoldArtefact) -> dict[str, Tensor]:
    """The folded model's weights, if they are still those that were written."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(run.payload(folded.payload))
    return tensors


def load_onnx(model: Path | bytes, folder: Path | None = None) -> Session:
    """An ONNX Runtime session on all cores that this process may use; ``folder`` has a graph's external weights."""
    from repaconv.engines.contract import SessionSpec

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    engine: Engine = registry.load(registry.ENGINES, "onnxruntime")
    return engine.open(model, SessionSpec(threads=cores or 1, weights=folder))


def image_model(model: Path | bytes, folder: Path | None = None, *, batch: int | None = None) -> Images:
    """The same as what takes images; ``batch`` is how many its graph takes at once, where that is fixed."""
    from repaconv.proof.runners import Images

    return Images(load_onnx(model, folder), batch)


def require_size(backbone: Any, config: Any, height: int, width: int) -> None:
    """Refuse images that the network cannot take.

    Raises:
        UsageProblem: Naming the size.
    """
    if backbone.takes(config, height, width):
        return
    if backbone.any_image_size:
        raise UsageProblem(
            f"images of {height} x {width} pixels are too small for this network.",
            hint="Give larger ones (--image-size, --set image_size=N, --inputs).",
            code="image-size",
        )
    taken = " x ".join(map(str, backbone.image_size(config, (height, width))))
    raise UsageProblem(
        f"this network takes images of {taken} pixels only, not of {height} x {width}.",
        hint="Its positions are for that size; give such images, or leave --image-size out.",
        code="image-size",
    )


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


def as_image_size(size: int | ImageSize | None) -> ImageSize | None:
    """A square one from one number."""
    return (size, size) if isinstance(size, int) else size


def load_target(name: str | Target) -> Target:
    """A registered target by name, or the user's own by the path of its .toml; ``@`` and a name take a variant."""
    from repaconv.targets import Target, from_file

    if isinstance(name, Target):
        return name
    name, _, variant = name.partition("@")
    target: Any = from_file(Path(name)) if name.endswith(".toml") else registry.load(registry.TARGETS, name)
    assert isinstance(target, Target)
    return target.variant(variant) if variant else target

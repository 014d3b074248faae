"""Detect the method of a checkpoint, read the checkpoint with it, and find the source file of a run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, Refused, RepaconvError, describe_exception, memory_problem
from repaconv.core.sharded_checkpoint import checkpoint_at, sha256_of_checkpoint
from repaconv.results import FoldArtefact, MethodFold

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint
    from repaconv.method_api.contract import Detection, Method, Reading


def choose_method(checkpoint: Checkpoint, wanted: str) -> tuple[Method, Detection]:
    """Return the method of a checkpoint, detected by the names of its tensors.

    Args:
        checkpoint: The checkpoint.
        wanted: Name of the method, or "auto".

    Raises:
        Refused: No method matches, several do, or the wanted one does not.
    """
    from repaconv.methods.lora import require_base

    names = list(plugins.registered(plugins.METHODS)) if wanted == "auto" else [wanted]
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
        f"{checkpoint.path} has no tensors named as those of {wanted if wanted != 'auto' else 'any known method'}.",
        hint=_detected_method_hint(checkpoint, wanted)
        + f"Known methods: {', '.join(plugins.registered(plugins.METHODS))}. "
        "Another network is folded by what builds it: fold --arch timm:NAME or ./net.py:build.",
        code="method.mismatch",
    )


def _detected_method_hint(checkpoint: Checkpoint, wanted: str) -> str:
    """A sentence that names the detected method, if another one was requested; else empty."""
    try:
        return (
            f"Its tensors are named as those of {choose_method(checkpoint, 'auto')[0].name}. "
            if wanted != "auto"
            else ""
        )
    except RepaconvError:
        return ""


def load_method(name: str) -> Method:
    """Load a registered method and add support for LoRA adapters on its linear layers.

    Raises:
        EnvironmentProblem: The method cannot be loaded, or was written for another version of the contract.
    """
    from repaconv.method_api.contract import Method
    from repaconv.methods.lora import with_adapters

    method = plugins.load(plugins.METHODS, name)
    if not isinstance(method, Method):
        raise EnvironmentProblem(
            f"the method {name!r} is a {type(method).__name__}, not a repaconv.method_api.contract.Method.",
            hint="Update the package that brings it, or remove it.",
            code="method.broken",
        )
    return with_adapters(method)


def read_again(folded: MethodFold, checkpoint: str | Path | None) -> tuple[Reading, Path]:
    """Read the run's checkpoint again, exactly as `fold` did, and return the reading and the path.

    Raises:
        Refused: The checkpoint is missing or has changed.
    """
    from repaconv.checkpoints import read_checkpoint

    path = source_of(folded, checkpoint)
    found = read_checkpoint(path, folded.origin.weights, folded.origin.sha256, again=True)
    return understood(load_method(folded.method), found, folded.settings), path


def understood(method: Method, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Reading:
    """Let the method read a checkpoint whose tensor names match it.

    Raises:
        Refused: The method cannot read it, e.g. since tensors have unexpected shapes.
    """
    try:
        return method.read(checkpoint, settings)
    except RepaconvError:
        raise
    except Exception as error:
        if (memory := memory_problem(error)) is not None:
            raise memory from error
        raise Refused(
            f"{checkpoint.path} has names of {method.name} and tensors that no network of it has "
            f"({describe_exception(error)}).",
            hint="The file is of another network, or it was changed after training; `repaconv inspect` shows its "
            "contents.",
            code="checkpoint.shape",
        ) from error


def source_of(folded: FoldArtefact, moved: str | Path | None) -> Path:
    """Return the path of the file that a run was folded from, after checking its hash.

    Args:
        folded: The result of the fold stage.
        moved: New path of the file, if it was moved; of a checkpoint in several files, its index or the folder of both.

    Raises:
        Refused: The file, or one of several, is missing or has changed.
    """
    path, what = checkpoint_at(Path(moved)) if moved else Path(folded.origin.path), folded.origin_kind
    if not path.is_file():
        raise Refused(
            f"the run's {what} {path} is not there.",
            hint="Say where it is now with --checkpoint.",
            code="checkpoint.missing",
        )
    if sha256_of_checkpoint(path) != folded.origin.sha256:
        raise Refused(
            f"{path} is not the {what} that was folded: its hash is another.",
            hint="Fold it again.",
            code="checkpoint.changed",
        )
    return path

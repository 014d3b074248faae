"""`fold`: fold a checkpoint, an ONNX graph, a named architecture or a live module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.progress import Progress, silent
from repaconv.core.run_folder import default_folder
from repaconv.core.sharded_checkpoint import checkpoint_at
from repaconv.graph.onnx_files import is_graph
from repaconv.results import GraphFold, Known, MethodFold, NetworkFold
from repaconv.sources import ultralytics_networks
from repaconv.sources.architecture_recognition import recognised
from repaconv.sources.named_architectures import CONFIG
from repaconv.stages.fold.checkpoint_fold import fold_file
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.shared.fetched_files import local_path
from repaconv.stages.shared.file_hash_check import read_hashed
from repaconv.stages.shared.option_dataclasses import (
    options_of,
    renamed,
    require_path,
    require_progress,
    setting_text,
    show_options,
    validated,
)
from repaconv.tasks.task_of_network import task_named

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints import Checkpoint

_FILE_OPTIONS = {*(each.name for each in options_of(FoldOptions)), "overrule"} - {"method"}


@overload
def fold(checkpoint: nn.Module, *, method: str = "auto", example: Any = None, **hyper: Any) -> nn.Module: ...


@overload
def fold(
    checkpoint: str | Path,
    *,
    method: str = "auto",
    arch: str | None = None,
    task: str | None = None,
    settings: Mapping[str, str] | None = None,
    weights: str | None = None,
    sha256: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    overrule: bool | None = None,
    allow_deployed: bool = False,
    identify: str | Path | None = None,
    inputs: str | Path | None = None,
    preset: str | Path = "default",
    measure: bool = True,
    progress: Progress = silent,
    **hyper: Any,
) -> MethodFold | GraphFold: ...


def fold(
    checkpoint: str | Path | nn.Module,
    *,
    method: str = "auto",
    example: Any = None,
    progress: Progress = silent,
    **arguments: Any,
) -> MethodFold | GraphFold | nn.Module:
    """Fold a checkpoint, an ONNX file, or a module in memory.

    Args:
        checkpoint: A checkpoint, for which ``model.safetensors`` and ``fold.json`` are written; an ONNX file, for which
            ``<stem>.folded.onnx`` and ``fold.json`` are written; the index of a checkpoint in several files, or the
            folder that holds them; a Hugging Face folder; an address that `repaconv.fetch` downloaded; or a
            ``torch.nn.Module``.
        method: Name of the method, or ``auto``.
        options: The options.
        example: For a module: an input (a tensor such as images [N, C, H, W], a tuple of arguments, or a dict of named
            ones); the fold is exact for calls like it, not for other methods of the module. A module takes this,
            ``method`` and model settings only.
        progress: A function that is called with each step's name, the units done and their total.
        arguments: Model settings by name, e.g. ``num_heads=3``, as in ``settings``.

    Returns:
        The result that is written as ``fold.json``; of a module, a folded copy in eval mode, with the module's device
        and types, and the rows of its certificate as the attribute ``fold_certificate``.

    Raises:
        GateFailed: If a fold is not exact; nothing is written then.
        Refused: If there is no such file, or the network cannot be folded completely; `SettingNeeded` names a setting
            that the file lacks.
        UsageProblem: If an option or setting is unknown or malformed, or has no effect on such an input.
    """
    if isinstance(checkpoint, (str, Path)):
        require_path("checkpoint", checkpoint)
    arguments = renamed(arguments, FoldOptions)
    known = {name: arguments.pop(name) for name in tuple(arguments) if name in _FILE_OPTIONS}
    options = {name: value for name, value in known.items() if name != "overrule"}
    require_progress(progress)
    checked = validated(FoldOptions, options)
    known |= {name: getattr(checked, name) for name in options} | ({} if progress is silent else {"progress": progress})
    given = known.pop("settings", None) or {}
    settings = {**given, **{name: setting_text(value) for name, value in arguments.items()}}
    if isinstance(checkpoint, (str, Path)) and example is not None:
        raise UsageProblem(
            "example is an input of a live module, and this is a file.", hint="Leave it out.", code="usage.live"
        )
    if isinstance(checkpoint, (str, Path)):
        checkpoint = local_path(checkpoint)
        if method != "auto" or not (checkpoint / CONFIG).is_file():  # the latter is folded by its architecture
            folder, checkpoint = checkpoint, checkpoint_at(checkpoint)
            if checkpoint != folder and known.get("out") is None:
                known["out"] = default_folder(folder)
    if known.get("task"):
        task_named(known["task"])  # refuses an unknown one
    if isinstance(checkpoint, (str, Path)) and is_graph(Path(checkpoint)):
        return _fold_graph(Path(checkpoint), method, settings, known)
    if isinstance(checkpoint, (str, Path)) and (known.get("arch") or Path(checkpoint).is_dir()):
        return _fold_network(Path(checkpoint), method, settings, known)
    known.pop("arch", None)
    if isinstance(checkpoint, (str, Path)):
        return _fold_checkpoint(Path(checkpoint), method, settings, known)
    from repaconv.stages.fold.module_fold import fold_live, require_foldable

    require_foldable(checkpoint)
    if known:
        raise UsageProblem(
            f"{', '.join(known)} is for checkpoint files, and this is a live module.",
            hint="fold(module, method=..., example=..., name=value) takes settings alone.",
            code="usage.live",
        )
    return fold_live(checkpoint, method, settings, example)


show_options(fold, FoldOptions)


def _fold_checkpoint(
    path: Path, method: str, settings: Mapping[str, str], arguments: Mapping[str, Any]
) -> MethodFold | NetworkFold:
    """Fold a checkpoint by its method, or as the published network that its tensors belong to."""
    if arguments.get("inputs"):
        raise UsageProblem(
            f"--inputs is for ONNX graphs, and {path} is a checkpoint.",
            hint="Leave it out; `repaconv verify --inputs FILE.npz` runs the folded model on your own.",
            code="usage.inputs",
        )
    read = read_hashed(path, arguments.get("weights"), arguments.get("sha256"))
    if method == "auto" and (config := ultralytics_networks.config_of(read)):
        name = ultralytics_networks.name_of(config["yaml"])
        return _fold_network(path, method, settings, {**arguments, "arch": name}, read=read)
    own = {name: value for name, value in arguments.items() if name != "measure"}  # a method's fold is never measured
    try:
        return fold_file(path, method=method, settings=settings, found=read, **own)
    except Refused as unknown:
        if unknown.code != "method.mismatch" or method != "auto":
            raise
        known = recognised(read, unknown)
        return _fold_network(path, method, settings, {**arguments, "arch": known.name}, known, read)


def _fold_graph(path: Path, method: str, settings: Mapping[str, str], arguments: Mapping[str, Any]) -> GraphFold:
    """Fold an ONNX file; refuse options that are for checkpoints only."""
    from repaconv.stages.fold.onnx_fold import fold_onnx_by

    named = {**arguments, "method": method != "auto"}
    if alone := _given_options(named, "weights", "arch", "identify", "allow_deployed", "method"):
        raise UsageProblem(
            f"{alone} is for checkpoints, and {path} is an ONNX graph.",
            hint="An ONNX model needs none of them: repaconv fold model.onnx [-o OUT] [--set mean=...].",
            code="usage.onnx",
        )
    given = {name: value for name, value in arguments.items() if name not in ("progress", "overrule")}
    options = FoldOptions(**{**given, "settings": settings or None, "preset": str(given.get("preset", "default"))})
    overrule, progress = arguments.get("overrule"), arguments.get("progress", silent)
    return fold_onnx_by(options, path, overrule=overrule, progress=progress)


def _fold_network(
    path: Path,
    method: str,
    settings: Mapping[str, str],
    arguments: Mapping[str, Any],
    known: Known | None = None,
    read: Checkpoint | None = None,
) -> NetworkFold:
    """Fold a network by its architecture, given by the user or ``known``; refuse options that are for methods only."""
    from repaconv.stages.fold.architecture_fold import fold_network_by

    named = {
        **arguments,
        "method": method != "auto",
        "preset": str(arguments.get("preset", "default")) != "default",
    }
    if alone := _given_options(named, "identify", "inputs", "allow_deployed", "method", "preset"):
        raise UsageProblem(
            f"{alone} is for checkpoints of a method, and {path} is folded by its architecture.",
            hint="Remove it; a preset is an option of repaconv export.",
            code="usage.arch",
        )
    given = {name: value for name, value in arguments.items() if name not in ("progress", "overrule", "preset")}
    options = FoldOptions(**{**given, "settings": settings or None})
    overrule, progress = arguments.get("overrule"), arguments.get("progress", silent)
    return fold_network_by(options, path, known=known, found=read, overrule=overrule, progress=progress)


def _given_options(arguments: Mapping[str, Any], *names: str) -> str:
    """The options among these that were given, as they are typed on the command line."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if arguments.get(name))

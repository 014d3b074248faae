"""fold: the checkpoint into its deploy form, with a certificate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, overload

from repaconv import registry, runs
from repaconv.artefacts import Cost, Fact, FoldArtefact, FoldStep, ImageSize, OnnxFoldArtefact, Payload
from repaconv.errors import GateFailed, Refused, UsageProblem
from repaconv.files import sha256_of
from repaconv.onnxfile import is_graph
from repaconv.replacing import put
from repaconv.steps.asked import as_typed
from repaconv.steps.common import Progress, choose_method, contradictions, made_by, require_size, silent, with_files
from repaconv.steps.weights import write_weights

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoint import Checkpoint
    from repaconv.trained.contract import FoldedPart, Method, Reading

_OF_FILES = ("settings", "weights", "out", "force", "overrule", "allow_deployed", "identify", "form", "progress")


@overload
def fold(checkpoint: nn.Module, *, method: str = "auto", example: Any = None, **hyper: Any) -> nn.Module: ...


@overload
def fold(
    checkpoint: str | Path,
    *,
    method: str = "auto",
    settings: Mapping[str, str] | None = None,
    weights: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    overrule: bool | None = None,
    allow_deployed: bool = False,
    identify: str | Path | None = None,
    form: str | Path = "default",
    progress: Progress = silent,
    **hyper: Any,
) -> FoldArtefact: ...


def fold(
    checkpoint: str | Path | nn.Module, *, method: str = "auto", **arguments: Any
) -> FoldArtefact | OnnxFoldArtefact | nn.Module:
    """Fold a checkpoint, an ONNX graph, or a live module of the user's own.

    Args:
        checkpoint: A checkpoint, for which ``model.safetensors`` and ``fold.json`` are written (see `fold_file`); an
            ONNX file, for which ``<stem>.folded.onnx`` is (see `repaconv.pipeline.onnx_folding.fold_onnx`); or a
            ``torch.nn.Module``, of which a folded copy is returned (see `repaconv.steps.live.fold_live`).
        method: Its method, or ``auto``.
        arguments: Those of `fold_file`, or ``example``, an input of a live module; all others are settings by name,
            e.g. ``num_heads=3``.

    Raises:
        Refused: If it cannot be folded whole.
        GateFailed: If a fold is not exact; nothing is written then.
    """
    example = arguments.pop("example", None)
    known = {name: arguments.pop(name) for name in tuple(arguments) if name in _OF_FILES}
    settings = {**(known.pop("settings", None) or {}), **{name: _as_text(value) for name, value in arguments.items()}}
    if isinstance(checkpoint, (str, Path)) and example is not None:
        raise UsageProblem(
            "example is an input of a live module, and this is a file.", hint="Leave it out.", code="usage.live"
        )
    if isinstance(checkpoint, (str, Path)) and is_graph(Path(checkpoint)):
        return _fold_graph(Path(checkpoint), method, settings, known)
    if isinstance(checkpoint, (str, Path)):
        return fold_file(checkpoint, method=method, settings=settings, **known)
    from repaconv.steps.live import fold_live

    if known:
        raise UsageProblem(
            f"{', '.join(known)} is for checkpoint files, and this is a live module.",
            hint="fold(module, method=..., example=..., name=value) takes settings alone.",
            code="usage.live",
        )
    return fold_live(checkpoint, method, settings, example)


def _fold_graph(path: Path, method: str, settings: Mapping[str, str], arguments: Mapping[str, Any]) -> OnnxFoldArtefact:
    """Fold an ONNX file; what is for checkpoints alone is refused."""
    from repaconv.pipeline.onnx_folding import fold_onnx

    alone = [name for name in ("weights", "identify", "allow_deployed") if arguments.get(name)]
    alone += [*(["method"] if method != "auto" else []), *(["set"] if settings else [])]
    alone += ["form"] if str(arguments.get("form", "default")) != "default" else []
    if alone:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in alone)
        raise UsageProblem(
            f"{options} is for checkpoints, and {path} is an ONNX graph.",
            hint="A graph says all that folding it needs: repaconv fold model.onnx [-o OUT] [--force].",
            code="usage.onnx",
        )
    return fold_onnx(
        path,
        out=arguments.get("out"),
        force=bool(arguments.get("force")),
        progress=arguments.get("progress", silent),
    )


def fold_file(
    checkpoint: str | Path,
    *,
    method: str = "auto",
    settings: Mapping[str, str] | None = None,
    weights: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    overrule: bool | None = None,
    allow_deployed: bool = False,
    identify: str | Path | None = None,
    form: str | Path = "default",
    progress: Progress = silent,
) -> FoldArtefact:
    """Fold a checkpoint into its deploy form and write ``model.safetensors`` and ``fold.json``.

    Args:
        checkpoint: The file.
        method: Its method, or ``auto``.
        settings: What the file does not tell, as ``name: value``.
        weights: Which set of the file; by rule when None.
        out: The run's folder; ``repaconv-out/<stem>`` when None.
        force: Replace another checkpoint's run. What is nobody's run is never replaced.
        overrule: Take settings that contradict the checkpoint, which every later artefact then says; as ``force`` when
            None.
        allow_deployed: Take a checkpoint that is in the paper's deploy form and fold what that leaves.
        identify: An .npz with ``input`` and the official output on it, which settles what the file does not tell.
        form: How its graphs will be written: ``default``, the target's own; ``official``, the paper's;
            ``fastest-known``, what `tune` found for these shapes on this machine; or the file that it wrote.
        progress: See `Progress`.

    Raises:
        Refused: If the checkpoint cannot be folded whole.
        GateFailed: If a fold is not exact; nothing is written then.
    """
    sha256 = None
    if Path(checkpoint).is_file():
        Thread(target=_import_torch).start()  # takes seconds; meanwhile the file is hashed
        sha256 = sha256_of(Path(checkpoint))
    import torch

    from repaconv.backbones.cost import cost_of
    from repaconv.checkpoint import claimed_accuracy, drop_pages, read_checkpoint
    from repaconv.proof.policy import exact_rtols
    from repaconv.steps.forms import chosen_form, shapes_sha256

    found = read_checkpoint(checkpoint, weights, sha256)
    chosen, detection = choose_method(found, method)
    if detection.form == "deploy" and not allow_deployed:
        raise Refused(
            f"{checkpoint} is in {chosen.name}'s deploy form already ({detection.reason}).",
            hint="Fold the checkpoint as trained, or give --allow-deployed to fold what the official code leaves.",
            code="method.deployed",
        )
    words = as_typed(
        fold_file,
        settings=settings,
        weights=weights,
        allow_deployed=allow_deployed,
        identify=identify,
        form=str(form),
    )
    identified = _identified(chosen, found, settings or {}, Path(identify)) if identify else {}
    settings = {**(settings or {}), **identified}
    trained = chosen.read(found, settings)
    overruled = _overruled(trained.facts, allowed=force if overrule is None else overrule)
    backbone = registry.load(registry.BACKBONES, trained.backbone)
    size = backbone.image_size(trained.config, trained.preprocessing.image_size)
    require_size(backbone, trained.config, *size)
    written = chosen_form(form, chosen, shapes_sha256(trained.backbone, backbone.to_json(trained.config), size))
    usual = exact_rtols()["fold"]
    whole = trained.tolerances.get("fold", usual)
    run = runs.prepare_run(Path(checkpoint), found.origin.sha256, Path(out) if out else None, force=force)

    steps: list[FoldStep] = []

    def judged() -> Iterator[FoldedPart]:
        for part in trained.parts():
            if part.step:
                allowed = usual if part.step.allowed is None else part.step.allowed
                if not part.step.max_rel_error <= allowed:
                    raise _not_exact(part.step, allowed, _parting(trained, size, whole))
                steps.append(part.step.model_copy(update={"allowed": allowed}))
                progress("fold", len(steps), 0)
            _require_proved(part, trained)
            yield part
            drop_pages(trained.tensors.values())

    with torch.device("meta"):
        expected = backbone.deploy(trained.config).state_dict()
    shape = (trained.config.in_channels, *size)
    costs: list[Cost] = []
    hashes: list[str] = []

    def described(weights: Path) -> None:
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(sha256_of, weights)  # hashed while the costs are counted
            costs.append(cost_of(trained.module, shape))
            costs.append(cost_of(lambda: backbone.deploy(trained.config), shape))
            hashes.append(digest.result())

    tensors = write_weights(run.model, expected, judged(), described)
    artefact = FoldArtefact(
        made_by=made_by("torch", "safetensors"),
        verdict="passed",
        beside=runs.clear_later_stages(run),
        unverified=overruled,
        asked=("--method", chosen.name, *words, *(["--force"] if overruled else [])),
        origin=found.origin,
        method=chosen.name,
        applied=(chosen.name, *trained.applied),
        settings=settings,
        backbone=trained.backbone,
        config=backbone.to_json(trained.config),
        form=written.name,
        rewrites=written.rewrites,
        facts=_with_sources(trained.facts, identified, identify),
        claims=claimed_accuracy(found.record),
        preprocessing=trained.preprocessing,
        image_size=size,
        any_image_size=backbone.any_image_size,
        output="logits" if trained.config.classes else "features",
        tensors=tensors,
        training=costs[0],
        deploy=costs[1],
        tolerances={**exact_rtols(_blocks([step.module for step in steps])), **trained.tolerances},
        certificate=tuple(steps),
        payload=Payload(path=run.model.name, sha256=hashes[0], bytes=run.model.stat().st_size),
    )
    put(run.fold_json, artefact)
    runs.remember(run)
    return with_files(artefact, [Path(checkpoint)], [run.model, run.fold_json])


def _overruled(facts: tuple[Fact, ...], *, allowed: bool) -> tuple[str, ...]:
    """The user's settings that say other than the checkpoint, in words.

    Raises:
        Refused: If there are any and that was not asked for.
    """
    told = contradictions(facts)
    if told and not allowed:
        raise Refused(
            f"{told[0]}.",
            hint="Leave the setting out; --force takes it, and every later artefact says so.",
            code="setting.contradicts",
        )
    return told


def _import_torch() -> None:
    import torch

    torch.empty(1, device="meta").mul(2)  # the first operation on meta imports much


def _require_proved(part: FoldedPart, trained: Reading) -> None:
    """A tensor of no module that the part's row of the certificate proves is the training form's own, to the bit.

    Raises:
        GateFailed: If it is not.
    """
    for name, value in part.tensors.items():
        if part.step and name.startswith(f"{part.step.module}."):
            continue
        own = trained.tensors.get(name)
        if own is None or own.shape != value.shape or not bool((own.double() == value.double()).all()):
            raise GateFailed(
                f"the folded {name} is not as trained, and no row of the certificate proves it; nothing was written.",
                hint="This is a defect of the method; please report it with `repaconv inspect`.",
                code="fold.not-proved",
                module=name.rpartition(".")[0],
            )


def _blocks(modules: Sequence[str]) -> int:
    """How many numbered modules the certificate's rows are of: rows within another's module are of that block."""
    outermost = [name for name in modules if not any(name.startswith(f"{other}.") for other in modules)]
    numbered = {match[0] for name in outermost if (match := re.match(r".*\.\d+", name))}
    return sum(not any(other.startswith(f"{name}.") for other in numbered) for name in numbered)


def _not_exact(step: FoldStep, tolerance: float, inside: str) -> GateFailed:
    where = f" The forms part at {inside}." if inside else ""
    return GateFailed(
        f"folding {step.module} changes it by {step.max_rel_error:.1e} in float64, more than {tolerance:.0e}; "
        f"nothing was written.{where}",
        hint="This is a defect of the method; please report it with `repaconv inspect`.",
        code="fold.not-exact",
        module=inside or step.module,
    )


def _parting(form: Reading, size: ImageSize, tolerance: float) -> str:
    """Which part of a block the training form and this fold do not share; empty if it cannot be said."""
    from repaconv.proof.data import random_inputs
    from repaconv.proof.locate import locate_between_seams
    from repaconv.proof.runners import TorchRunner

    backbone = registry.load(registry.BACKBONES, form.backbone)
    try:
        folded = {name: value for part in form.parts() for name, value in part.tensors.items()}
        training = TorchRunner(form.module(), form.tensors, double=True)
        deploy = TorchRunner(backbone.deploy(form.config), folded, double=True)
        images = random_inputs((form.config.in_channels, *size), count=1, seed=0).images
        return locate_between_seams(training, deploy, images, allowed=tolerance).module
    except (RuntimeError, ValueError, KeyError):  # a fold that is wrong may be so in its shapes, too
        return ""


def _identified(method: Method, found: Checkpoint, settings: Mapping[str, str], pair: Path) -> dict[str, str]:
    """What a recorded input and output settle.

    Raises:
        UsageProblem: If the method has nothing to settle this way, or the file holds no output.
    """
    import torch

    from repaconv.proof.data import npz_inputs

    given = npz_inputs(pair)
    whole = given.piece(0, given.shape[0])
    if method.identify is None or whole.recorded is None:
        lacking = f"{pair} holds no recorded output" if whole.recorded is None else f"{method.name} identifies nothing"
        raise UsageProblem(
            f"--identify: {lacking}.",
            hint="Give what the file does not tell with --set name=value.",
            code="usage.identify",
        )
    return method.identify(found, settings, torch.from_numpy(whole.images), torch.from_numpy(whole.recorded))


def _with_sources(facts: tuple[Fact, ...], identified: Mapping[str, str], pair: str | Path | None) -> tuple[Fact, ...]:
    """Facts that the recorded pair settled say so."""
    source = f"identified by {Path(pair).name}: the only variant with that output" if pair else ""
    return tuple(f.model_copy(update={"source": source}) if f.name in identified else f for f in facts)


def _as_text(value: Any) -> str:
    """A setting from Python as the command line would write it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

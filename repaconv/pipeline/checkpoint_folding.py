"""fold, for a checkpoint: into its deploy form, with a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import Cost, Fact, FoldStep, ImageSize, MethodFold, Payload, TensorInfo
from repaconv.backbones.sizes import require_size
from repaconv.beside import workers
from repaconv.errors import Refused, UsageProblem
from repaconv.files import alone_in, sha256_of
from repaconv.orders.knobs import by_name
from repaconv.orders.stages import FoldOrder
from repaconv.progress import Progress, silent
from repaconv.replacing import put
from repaconv.steps.certifying import blocks, certified
from repaconv.steps.common import contradictions, made_by, with_files
from repaconv.steps.fold_layers import with_layers
from repaconv.steps.pinning import read_hashed
from repaconv.steps.weights import write_weights
from repaconv.subjects.origin import choose_method, understood

if TYPE_CHECKING:
    from repaconv.checkpoint import Checkpoint
    from repaconv.steps.forms import Written
    from repaconv.trained.contract import Detection, Method, Reading


def fold_file_by(
    order: FoldOrder,
    checkpoint: str | Path,
    *,
    found: Checkpoint | None = None,
    overrule: bool | None = None,
    progress: Progress = silent,
) -> MethodFold:
    """Fold a checkpoint into its deploy form and write ``model.safetensors`` and ``fold.json``.

    Args:
        checkpoint: The file.
        order: What is asked for.
        found: What was read of it already.
        overrule: Take settings that contradict the checkpoint, which every later artefact then says; as ``force`` when
            None.
        progress: See `Progress`.

    Raises:
        Refused: If the checkpoint cannot be folded whole.
        GateFailed: If a fold is not exact; nothing is written then.
    """
    found = found or read_hashed(Path(checkpoint), order.weights, order.sha256)
    plan = _plan(order, found, order.force if overrule is None else overrule)
    with alone_in(plan.run.folder):
        done = _folded(plan, progress)
        artefact = _artefact(plan, done)
        put(plan.run.fold_json, artefact)
        runs.remember(plan.run)
    return with_files(artefact, [Path(checkpoint)], [plan.run.model, plan.run.fold_json])


fold_file = by_name(fold_file_by, FoldOrder)


class _Plan(NamedTuple):
    """What an order comes to for a checkpoint: nothing of it is refused any more but a fold that is not exact."""

    order: FoldOrder
    found: Checkpoint
    method: Method
    settings: Mapping[str, str]
    identified: Mapping[str, str]
    trained: Reading
    overruled: tuple[str, ...]
    backbone: Any
    size: ImageSize
    written: Written
    run: runs.Run


def _plan(order: FoldOrder, found: Checkpoint, overrule: bool) -> _Plan:
    """Everything that may be refused, before anything is written."""
    checkpoint = found.path
    from repaconv.steps.forms import chosen_form, shapes_sha256

    method, detection = choose_method(found, order.method)
    _require_trained(checkpoint, method, detection, allowed=order.allow_deployed)
    given = order.settings or {}
    identified = _identified(method, found, given, Path(order.identify)) if order.identify else {}
    settings = {**given, **identified}
    trained = understood(method, found, settings)
    overruled = _overruled(trained.facts, allowed=overrule)
    backbone = registry.load(registry.BACKBONES, trained.backbone)
    size = backbone.image_size(trained.config, trained.preprocessing.image_size)
    require_size(backbone, trained.config, *size)
    config = backbone.to_json(trained.config)
    shapes = shapes_sha256({"backbone": trained.backbone, "config": config, "image_size": list(size)})
    written = chosen_form(order.preset, method.official_rewrites, shapes)
    run = runs.prepare_run(checkpoint, found.origin.sha256, Path(order.out) if order.out else None, force=order.force)
    return _Plan(order, found, method, settings, identified, trained, overruled, backbone, size, written, run)


def _require_trained(checkpoint: Path, method: Method, detection: Detection, *, allowed: bool) -> None:
    """Refuse what the official code folded already, unless that was asked for."""
    if detection.form == "deploy" and not allowed:
        raise Refused(
            f"{checkpoint} already has the inference-time architecture of {method.name} ({detection.reason}).",
            hint="Fold the checkpoint as trained, or accept it as it is with --allow-deployed.",
            code="method.deployed",
        )


def _identified(method: Method, found: Checkpoint, settings: Mapping[str, str], pair: Path) -> dict[str, str]:
    """What a recorded input and output settle.

    Raises:
        UsageProblem: If the method has nothing to settle this way, or the file holds no output.
    """
    import torch

    from repaconv.proof.data import npz_inputs

    given = npz_inputs(pair)
    whole = given.piece(0, given.shape[0])
    if method.identify is None or not whole.recorded:
        lacking = f"{pair} holds no recorded output" if not whole.recorded else f"{method.name} identifies nothing"
        raise UsageProblem(
            f"--identify: {lacking}.",
            hint="Give the settings missing from the checkpoint with --set name=value.",
            code="usage.identify",
        )
    (output,) = whole.recorded.values()
    return method.identify(found, settings, torch.from_numpy(whole.images), torch.from_numpy(output))


def _with_sources(facts: tuple[Fact, ...], identified: Mapping[str, str], pair: str | Path | None) -> tuple[Fact, ...]:
    """Facts that the recorded pair settled say so."""
    source = f"identified by {Path(pair).name}: the only variant with that output" if pair else ""
    return tuple(f.model_copy(update={"source": source}) if f.name in identified else f for f in facts)


def _overruled(facts: tuple[Fact, ...], *, allowed: bool) -> tuple[str, ...]:
    """The user's settings that say other than the checkpoint, in words.

    Raises:
        Refused: If there are any and that was not asked for.
    """
    told = contradictions(facts)
    if told and not allowed:
        raise Refused(
            f"{told[0]}.",
            hint=(
                "Leave the setting out, or accept it with --force; the contradiction is then recorded in every later "
                "result."
            ),
            code="setting.contradicts",
        )
    return told


class _Folded(NamedTuple):
    """What was written, and what is known of it."""

    tensors: tuple[TensorInfo, ...]
    steps: tuple[FoldStep, ...]
    training: Cost
    deploy: Cost
    sha256: str


def _folded(plan: _Plan, progress: Progress) -> _Folded:
    """Fold part by part, judge each, write it; nothing stays of what is not exact."""
    import torch

    from repaconv.backbones.cost import cost_of

    trained, backbone = plan.trained, plan.backbone
    with torch.device("meta"):
        expected = backbone.deploy(trained.config).state_dict()
    shape = (trained.config.in_channels, *plan.size)
    steps: list[FoldStep] = []
    known: list[tuple[Cost, Cost, str]] = []

    def described(weights: Path) -> None:
        with workers(1) as pool:
            digest = pool.submit(sha256_of, weights)  # hashed while the costs are counted
            costs = cost_of(trained.module, shape), cost_of(lambda: backbone.deploy(trained.config), shape)
            known.append((*costs, digest.result()))
        plan.found.require_unchanged()

    parts = certified(trained, plan.size, steps, progress)
    tensors = write_weights(plan.run.model, expected, parts, described)
    return _Folded(tensors, tuple(steps), *known[0])


def _artefact(plan: _Plan, done: _Folded) -> MethodFold:
    from repaconv.checkpoint import claimed_accuracy
    from repaconv.proof.policy import exact_rtols

    trained, model = plan.trained, plan.run.model
    forced = ["--force"] if plan.overruled else []
    depth = blocks([step.module for step in done.steps])
    return MethodFold(
        made_by=made_by("torch", "safetensors"),
        verdict="passed",
        other_files=runs.clear_later_stages(plan.run),
        unverified=plan.overruled,
        options=("--method", plan.method.name, *plan.order.words(), *forced),
        origin=plan.found.origin,
        method=plan.method.name,
        applied=(plan.method.name, *trained.applied),
        settings=dict(plan.settings),
        backbone=trained.backbone,
        config=plan.backbone.to_json(trained.config),
        preset=plan.written.name,
        rewrites=plan.written.rewrites,
        fp32_modules=plan.written.keep,
        quantizer=plan.written.quantizer,
        facts=_with_sources(trained.facts, plan.identified, plan.order.identify),
        claims=claimed_accuracy(plan.found.record),
        preprocessing=trained.preprocessing,
        image_size=plan.size,
        any_image_size=plan.backbone.any_image_size,
        output="logits" if trained.config.classes else "features",
        tensors=done.tensors,
        training=done.training,
        deploy=done.deploy,
        tolerances={**exact_rtols(depth), **trained.tolerances},
        certificate=with_layers(plan.found, plan.method, plan.settings, trained, plan.size, done.steps),
        payload=Payload(path=model.name, sha256=done.sha256, bytes=model.stat().st_size),
    )

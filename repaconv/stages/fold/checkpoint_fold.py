"""Fold a checkpoint of a known method into its deploy form (inference-time architecture), with a certificate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.backbones.image_size_check import require_size
from repaconv.core import plugins, run_folder
from repaconv.core.errors import GateFailed, Refused, UsageProblem
from repaconv.core.files import lock_folder, sha256_of
from repaconv.core.memory_release import freed_memory_kept
from repaconv.core.progress import Progress, silent
from repaconv.core.thread_pool import thread_pool
from repaconv.method_api.preprocessing import require_channels
from repaconv.method_api.settings import contradictions
from repaconv.results import Cost, Fact, FoldStep, ImageSize, MethodFold, Payload, TensorInfo
from repaconv.results.link_reasons import limit_in_words
from repaconv.sources.method_detection import choose_method, understood
from repaconv.sources.pickled_module_attributes import require_same_settings
from repaconv.stages.fold.layer_correspondence import with_layers
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.shared.file_hash_check import read_hashed
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.safetensors_weights import write_weights
from repaconv.tasks.task_of_network import task_named

if TYPE_CHECKING:
    from repaconv.backbones.parameter_and_mac_counts import NormModules
    from repaconv.checkpoints import Checkpoint
    from repaconv.method_api.contract import Detection, FoldedPart, Method, Reading
    from repaconv.stages.shared.preset_choice import GraphPreset


# The certificate: every folded part is verified


def verified_parts(
    trained: Reading, size: ImageSize, steps: list[FoldStep], progress: Progress
) -> Iterator[FoldedPart]:
    """Yield the parts of a fold, each after it is verified, and append its row of the certificate to ``steps``.

    Raises:
        GateFailed: If a part is not exact, or contains a changed tensor that no row of the certificate covers.
    """
    from repaconv.checkpoints import drop_pages
    from repaconv.verification.tolerances import exact_rtols

    usual = exact_rtols()["fold"]
    for part in trained.parts():
        if part.step:
            allowed = usual if part.step.allowed is None else part.step.allowed
            if not part.step.max_rel_error <= allowed:
                raise _not_exact(
                    part.step, allowed, _divergent_module(trained, size, trained.tolerances.get("fold", usual))
                )
            steps.append(part.step.model_copy(update={"allowed": allowed}))
            progress("fold", len(steps), 0)
        _require_covered(part, trained)
        yield part
        drop_pages(trained.tensors.values())


def _require_covered(part: FoldedPart, trained: Reading) -> None:
    """Require that every tensor outside the module of the part's row is equal to the trained one, bit by bit.

    Raises:
        GateFailed: If it is not.
    """
    for name, value in part.tensors.items():
        if part.step and name.startswith(f"{part.step.module}."):
            continue
        own = trained.tensors.get(name)
        if own is None or own.shape != value.shape or not bool((own.double() == value.double()).all()):
            raise GateFailed(
                f"the folded tensor {name} differs from the trained one, and no row of the certificate covers it; "
                "nothing was written.",
                hint="This is a defect of the method; please report it with the output of `repaconv inspect`.",
                code="fold.not-verified",
                module=name.rpartition(".")[0],
            )


def count_blocks(modules: Sequence[str]) -> int:
    """Number of blocks (numbered modules) that the rows of a certificate belong to; nested blocks count once."""
    outermost = [name for name in modules if not any(name.startswith(f"{other}.") for other in modules)]
    numbered = {match[0] for name in outermost if (match := re.match(r".*\.\d+", name))}
    return sum(not any(other.startswith(f"{name}.") for other in numbered) for name in numbered)


def _not_exact(step: FoldStep, tolerance: float, inside: str) -> GateFailed:
    where = f" The training-time and the folded network first differ at {inside}." if inside else ""
    return GateFailed(
        f"folding {step.module} changes it by {step.max_rel_error:.1e} in float64, more than "
        f"{limit_in_words(tolerance)}; nothing was written.{where}",
        hint="This is a defect of the method; please report it with the output of `repaconv inspect`.",
        code="fold.not-exact",
        module=inside or step.module,
    )


def _divergent_module(trained: Reading, size: ImageSize, tolerance: float) -> str:
    """The module at which the training-time and the folded network first differ; empty if unknown."""
    from repaconv.verification.divergence_location import locate_between_seams
    from repaconv.verification.input_batches import random_inputs
    from repaconv.verification.model_runners import TorchRunner

    backbone = plugins.load(plugins.BACKBONES, trained.backbone)
    try:
        folded = {name: value for part in trained.parts() for name, value in part.tensors.items()}
        training = TorchRunner(trained.module(), trained.tensors, double=True)
        deploy = TorchRunner(backbone.deploy(trained.config), folded, double=True)
        images = random_inputs((trained.config.in_channels, *size), count=1, seed=0).images
        return locate_between_seams(training, deploy, {"input": images}, allowed=tolerance).module
    except (RuntimeError, ValueError, KeyError):  # a wrong fold may also have wrong shapes
        return ""


# The fold itself


@freed_memory_kept()  # every block makes float64 arrays of the same sizes
def fold_file_by(
    options: FoldOptions,
    checkpoint: str | Path,
    *,
    found: Checkpoint | None = None,
    overrule: bool | None = None,
    progress: Progress = silent,
) -> MethodFold:
    """Fold a checkpoint into its deploy form and write ``model.safetensors`` and ``fold.json``.

    Args:
        checkpoint: The file.
        options: The options.
        found: The checkpoint, if it was read already.
        overrule: Accept settings that contradict the checkpoint; every later result then records them. The value of
            ``force`` when None.
        progress: See `Progress`.

    Raises:
        Refused: If the checkpoint cannot be folded completely.
        GateFailed: If a fold is not exact; nothing is written then.
    """
    found = found or read_hashed(Path(checkpoint), options.weights, options.sha256)
    plan = _plan(options, found, options.force if overrule is None else overrule)
    with lock_folder(plan.run.folder):
        done = _write_fold(plan, progress)
        artefact = run_folder.write_fold(plan.run, _artefact(plan, done))
        run_folder.set_newest(plan.run)
    return with_files(artefact, [Path(checkpoint)], [plan.run.model, plan.run.fold_json])


fold_file = by_name(fold_file_by, FoldOptions)


class _Plan(NamedTuple):
    """The options resolved for one checkpoint. After this, it is refused only if its fold is not exact."""

    options: FoldOptions
    found: Checkpoint
    method: Method
    settings: Mapping[str, str]
    identified: Mapping[str, str]
    trained: Reading
    overruled: tuple[str, ...]
    backbone: Any
    size: ImageSize
    written: GraphPreset
    run: run_folder.Run


def _plan(options: FoldOptions, found: Checkpoint, overrule: bool) -> _Plan:
    """Make every check that comes before anything is written."""
    checkpoint = found.path
    from repaconv.stages.shared.preset_choice import choose_preset, shapes_sha256

    out = Path(options.out) if options.out else None
    with thread_pool(1) as pool:  # hashes the files that will be replaced while the checkpoint is read
        run = pool.submit(run_folder.prepare_run, checkpoint, found.origin.sha256, out, force=options.force)
        method, detection = choose_method(found, options.method)
        _require_trained(checkpoint, method, detection, allowed=options.allow_deployed)
        given = options.settings or {}
        identified = _identified_settings(method, found, given, Path(options.identify)) if options.identify else {}
        settings = {**given, **identified}
        trained = understood(method, found, settings)
        require_same_settings(trained, found)
        require_channels(settings, trained.preprocessing, trained.config.in_channels)
        overruled = _accepted_contradictions(trained.facts, allowed=overrule)
        backbone = plugins.load(plugins.BACKBONES, trained.backbone)
        size = backbone.image_size(trained.config, trained.preprocessing.image_size)
        require_size(backbone, trained.config, *size)
        config = backbone.to_json(trained.config)
        shapes = shapes_sha256({"backbone": trained.backbone, "config": config, "image_size": list(size)})
        written = choose_preset(options.preset, method.official_rewrites, shapes)
    return _Plan(
        options, found, method, settings, identified, trained, overruled, backbone, size, written, run.result()
    )


def _require_trained(checkpoint: Path, method: Method, detection: Detection, *, allowed: bool) -> None:
    """Refuse a checkpoint that already has the deploy form, unless that is allowed."""
    if detection.form == "deploy" and not allowed:
        raise Refused(
            f"{checkpoint} already has the inference-time architecture of {method.name} ({detection.reason}).",
            hint="Fold the checkpoint as trained, or accept it as it is with --allow-deployed.",
            code="method.deployed",
        )


def _identified_settings(method: Method, found: Checkpoint, settings: Mapping[str, str], pair: Path) -> dict[str, str]:
    """Settings that a recorded input and output of the network identify.

    Raises:
        UsageProblem: If the method identifies no settings, or the file has no recorded output.
    """
    import torch

    from repaconv.verification.input_batches import npz_inputs

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
    """The facts, with the recorded pair as the source of those that it identified."""
    source = f"identified by {Path(pair).name}: the only variant with that output" if pair else ""
    return tuple(f.model_copy(update={"source": source}) if f.name in identified else f for f in facts)


def _accepted_contradictions(facts: tuple[Fact, ...], *, allowed: bool) -> tuple[str, ...]:
    """Messages about the user's settings that contradict the checkpoint.

    Raises:
        Refused: If there are any and they are not allowed.
    """
    sentences = contradictions(facts)
    if sentences and not allowed:
        raise Refused(
            f"{sentences[0]}.",
            hint=(
                "Leave the setting out, or accept it with --force; the contradiction is then recorded in every later "
                "result."
            ),
            code="setting.contradicts",
        )
    return sentences


class _WrittenFold(NamedTuple):
    """The written tensors, the costs before and after, the rows of the certificate, and the hash of the file."""

    tensors: tuple[TensorInfo, ...]
    training: Cost
    deploy: Cost
    norms: NormModules
    certificate: tuple[FoldStep, ...]
    sha256: str


def _write_fold(plan: _Plan, progress: Progress) -> _WrittenFold:
    """Fold part by part, verify each part, and write it; an inexact part leaves no file."""
    import torch

    from repaconv.backbones.parameter_and_mac_counts import cost_of, norms_of

    trained, backbone = plan.trained, plan.backbone
    with torch.device("meta"):
        expected = backbone.deploy(trained.config).state_dict()
    shape = (trained.config.in_channels, *plan.size)
    steps: list[FoldStep] = []
    known: list[tuple[Cost, Cost, NormModules, tuple[FoldStep, ...], str]] = []

    def described(weights: Path) -> None:
        with thread_pool(1) as pool:
            digest = pool.submit(sha256_of, weights)  # and put on the disk, while the rest is computed
            costs = cost_of(trained.module, shape), cost_of(lambda: backbone.deploy(trained.config), shape)
            norms = norms_of(lambda: backbone.deploy(trained.config), shape)
            rows = with_layers(plan.found, plan.method, plan.settings, trained, plan.size, steps, weights)
            known.append((*costs, norms, rows, digest.result()))
        plan.found.require_unchanged()

    parts = verified_parts(trained, plan.size, steps, progress)
    tensors = write_weights(plan.run.model, expected, parts, described)
    return _WrittenFold(tensors, *known[0])


def _artefact(plan: _Plan, done: _WrittenFold) -> MethodFold:
    from repaconv.checkpoints import claimed_accuracy
    from repaconv.rewrites.fold.unfolded_linear_operators import norms_remain
    from repaconv.verification.tolerances import depth_reason, exact_rtols

    trained, model = plan.trained, plan.run.model
    forced = ["--force"] if plan.overruled else []
    depth = count_blocks([step.module for step in done.certificate])
    limits = exact_rtols(depth)
    deep = dict.fromkeys(limits, depth_reason(depth)) if depth_reason(depth) else {}
    own = dict.fromkeys(trained.tolerances, f"set by the method {plan.method.name} for this network")
    return MethodFold(
        made_by=made_by("torch", "safetensors"),
        verdict="passed",
        unverified=plan.overruled,
        options=("--method", plan.method.name, *plan.options.words(), *forced),
        origin=plan.found.origin,
        method=plan.method.name,
        applied=(plan.method.name, *trained.applied),
        settings=dict(plan.settings),
        task=task_named(plan.options.task) if plan.options.task else None,
        backbone=trained.backbone,
        config=plan.backbone.to_json(trained.config),
        preset=plan.written.name,
        rewrites=plan.written.rewrites,
        fp32_modules=plan.written.fp32_modules,
        quantizer=plan.written.quantizer,
        facts=_with_sources(trained.facts, plan.identified, plan.options.identify),
        claims=claimed_accuracy(plan.found.record),
        preprocessing=trained.preprocessing,
        image_size=plan.size,
        any_image_size=plan.backbone.any_image_size,
        output="logits" if trained.config.classes else "features",
        tensors=done.tensors,
        training=done.training,
        deploy=done.deploy,
        not_folded=tuple(norms_remain(*done.norms)),
        tolerances={**limits, **trained.tolerances},
        tolerance_reasons={**deep, **own, **trained.tolerance_reasons},
        certificate=done.certificate,
        payload=Payload(path=model.name, sha256=done.sha256, bytes=model.stat().st_size),
    )

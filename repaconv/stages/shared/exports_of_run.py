"""The exports of a run, and which of them a stage uses."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.core.export_variants import Variant, default_image_size
from repaconv.core.files import canonical_json, read_artefact, sha256_of_bytes, stage_of
from repaconv.core.terminal import relative_path
from repaconv.results import ExportArtefact, FoldArtefact, ImageSize
from repaconv.stages.shared.target_lookup import load_target

if TYPE_CHECKING:
    from repaconv.engines.targets import Target

_GRAPH_SETTINGS = {"opset", "newest_opset", "forms", "unsupported_ops", "forbids", "typed_by"}


class Export(NamedTuple):
    """An export of a run.

    Attributes:
        artefact: Its result.
        path: The result's file.
        variant: The name that distinguishes it from the run's other exports.
    """

    artefact: ExportArtefact
    path: Path
    variant: Variant


def target_sha256(device: Target) -> str:
    """Hash of the target settings that affect graphs: targets of the same name may differ in them."""
    plain = device.model_dump(mode="json", include=_GRAPH_SETTINGS)
    if device.fp32_operators:  # where there are none, earlier exports keep their hash
        plain["fp32_operators"] = device.fp32_operators
    plain["lacks"] = plain.pop("unsupported_ops")  # its former name, so that earlier exports keep their hash
    return sha256_of_bytes(canonical_json(plain).encode())


def exports_of(run: run_folder.Run, folded: FoldArtefact) -> list[Export]:
    """All exports of a run, those with the fewest special settings first.

    Raises:
        Refused: If one was made from other weights.
    """
    found = []
    for path in run.later_stages():
        if stage_of(path) != "export":
            continue
        artefact = read_artefact(path, ExportArtefact)
        if artefact.model_sha256 != folded.payload.sha256:
            raise Refused(
                f"{path} was exported from other weights than {run.payload_of_fold(folded)}.",
                hint="Export again: repaconv export",
                code="artefact.hash",
            )
        found.append(Export(artefact, path, Variant.of(artefact, folded)))
    return sorted(found, key=lambda each: (each.variant.name.count("."), each.variant.name))


def export_for(
    run: run_folder.Run,
    folded: FoldArtefact,
    target: str | Target,
    precision: str = "fp32",
    *,
    model: Path | None = None,
    batch: int | None = None,
    image_size: ImageSize | None = None,
    form: str | None = None,
    form_size: ImageSize | None = None,
) -> Export:
    """Choose the export for a target in a precision.

    If there are several, it is the one with the requested properties, and default values of all others: dynamic batch,
    the network's image size, no preprocessing, the fold's preset, the target's opset, no modules kept in FP32. Without
    such an export, it is the only one that accepts the batch and the image size. Otherwise the choice is refused.

    Args:
        run: The run.
        folded: Its fold.
        target: The target.
        precision: Precision of the graph.
        model: The ONNX file, if it is known; it decides.
        batch: Batch size that the graph must accept.
        image_size: Image size that the graph must accept.
        form: The rewrite preset of the export, by its name or its file's name.
        form_size: The image size for which that preset was tuned, if for one size; exports of others do not count.

    Raises:
        Refused: If an export of the run was made from other weights.
        UsageProblem: If there is none for that target, or several and nothing decides.
    """
    device, size = load_target(target), image_size or default_image_size(folded)
    every = exports_of(run, folded)
    found = [each for each in every if (each.artefact.target, each.artefact.precision) == (device.name, precision)]
    found = [each for each in found if each.artefact.target_sha256 == target_sha256(device)]
    if model is not None:
        found = [each for each in found if _file(run, each).resolve() == model.resolve()]
    found = [each for each in found if form in (None, each.artefact.preset)]
    if form_size is not None and model is None:
        found = [each for each in found if each.artefact.image_size == form_size]
    if not found:
        raise _no_export(run, every, target, device, precision, model, form)
    if len(found) == 1:
        return found[0]
    usual = (batch or folded.batch, size, False, form or folded.preset, None, ())
    exact = [each for each in found if _chosen_properties(each) == usual]
    fitting = [each for each in found if _accepts(each, batch, image_size)]
    if len(exact) == 1 or len(fitting) == 1:
        return (exact if len(exact) == 1 else fitting)[0]
    raise UsageProblem(
        f"{run.folder} has several {precision} ONNX models for {device.name}: "
        f"{', '.join(str(_file(run, each)) for each in found)}.",
        hint="Give one of these files instead of the run folder. bench also selects by --batch and --image-size.",
        code="run.several-models",
    )


def _chosen_properties(
    export: Export,
) -> tuple[int | str, ImageSize | str | None, bool, str, int | None, tuple[str, ...]]:
    """The properties of an export that options choose."""
    has = export.artefact
    return has.batch, has.image_size, has.preprocessing, has.preset, has.chosen_opset, has.fp32_modules


def _accepts(export: Export, batch: int | None, size: ImageSize | None) -> bool:
    """Whether the export accepts this batch and image size; None accepts any."""
    has = export.artefact
    return has.batch in ("dynamic", batch or has.batch) and has.image_size in (None, "dynamic", size or has.image_size)


def float32_counterpart(run: run_folder.Run, folded: FoldArtefact, low: ExportArtefact) -> Export | None:
    """The FP32 export for the same target, preferably with the same other properties."""
    found = [
        each
        for each in exports_of(run, folded)
        if each.artefact.precision == "fp32" and each.artefact.target == low.target
    ]
    alike = Variant.of(low, folded).model_copy(update={"precision": "fp32", "fp32_modules": ()})
    return min(found, key=lambda each: each.variant != alike, default=None)


def _file(run: run_folder.Run, export: Export) -> Path:
    return run.folder / export.artefact.payload.path


def _no_export(
    run: run_folder.Run,
    every: list[Export],
    target: str | Target,
    device: Target,
    precision: str,
    model: Path | None,
    form: str | None,
) -> UsageProblem:
    """The error that no export fits: why, and the command that makes one."""
    if precision not in (known := dict.fromkeys((*run_folder.PRECISIONS, *device.precisions))):
        return UsageProblem(
            f"there is no precision {precision!r}.",
            hint=f"{did_you_mean(precision, known)}Known: {', '.join(known)}.",
            code="precision",
        )
    wanted = Variant(target=target if isinstance(target, str) else device.name, precision=precision)
    none = f"{run.folder} has no {precision} ONNX model for {device.name} yet"
    if model is not None:
        none = f"{model} is no {precision} ONNX model of {run.folder} for {device.name}"
    elif form is not None:
        none += f" in the form {form}"
    elif any((each.artefact.target, each.artefact.precision) == (device.name, precision) for each in every):
        none += " but for what the target said before"
    others = ", ".join(each.variant.full for each in every)
    text = f"; it has {others}" if others else ""
    options = f"{wanted.options} --preset {form}" if form else wanted.options
    there = {each.artefact.precision: None for each in every if each.artefact.target == device.name}
    there.pop(precision, None)
    instead = f", or take the one that it has with --precision {next(iter(there))}" if len(there) == 1 else ""
    named = "" if run_folder.is_newest(run) else f" {shlex.quote(relative_path(str(run.folder)))}"
    hint = f"repaconv export{named} {options}{instead}"
    if model is not None and model.suffix == ".onnx" and run.folder.resolve() not in model.resolve().parents:
        hint = f"To take another network than this run's, fold it first: repaconv fold {shlex.quote(str(model))}"
    return UsageProblem(f"{none}{text}.", hint=hint, code="run.no-model")

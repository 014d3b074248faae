"""`export`: write the folded model as ONNX, in FP32 or a lower precision, and verify every step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.core.export_variants import Variant, image_size_of_variant
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import lock_folder, payload_of
from repaconv.core.progress import Progress, silent
from repaconv.core.temporary_folders import scratch_folder
from repaconv.graph.onnx_files import opset_of
from repaconv.onnx_export.fp16_and_int8 import QUANTIZERS
from repaconv.onnx_export.onnx_simplifiers import TOOLS
from repaconv.results import ExportArtefact, FoldArtefact, ImageSize, Link
from repaconv.rewrites.presets import DEFAULT, NAMED, chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec, SourceModel
from repaconv.sources.source_of_run import source_model_of
from repaconv.sources.verified_onnx_export import Graph, write_graph
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.shared.evaluation_images import NO_IMAGES, image_set, without_evidence
from repaconv.stages.shared.exports_of_run import exports_of, target_sha256
from repaconv.stages.shared.input_selection import (
    CALIBRATION_IMAGES,
    Split,
    choose_inputs,
    fixed_batch,
    preprocessing_for,
    require_same_size,
    scores_note,
)
from repaconv.stages.shared.lower_precision import LowPrecisionGraph, int8_for, lower_and_compare, require_supported
from repaconv.stages.shared.option_dataclasses import as_image_size, by_name
from repaconv.stages.shared.preset_choice import GraphPreset, preset_for, resolve_export_preset
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import default_rewrites, load_target
from repaconv.stages.shared.task_choice import task_of

if TYPE_CHECKING:
    import onnx as onnx_package

    from repaconv.engines.targets import Target
    from repaconv.graph.rewrite_contract import Rewrite


def export_by(
    options: ExportOptions,
    run: str | Path | None = None,
    *,
    onnx: str | Path | None = None,
    progress: Progress = silent,
) -> ExportArtefact:
    """Export the folded model to ONNX, simplify it, lower its precision, and verify every step under ONNX Runtime.

    Args:
        run: The run folder; the newest run when None.
        options: The options.
        onnx: The file to write. When None it is ``model.onnx`` in the run folder, or a name with every option that is
            not the default, such as ``model.jetson-nano.fp16.onnx``.
        progress: A function that is called with each step's name, the units done and their total.

    Returns:
        The result. Its verdict is failed if the outputs of the graph differ from those of the folded model, and not
        verified if they could not be compared.

    Raises:
        GateFailed, Refused: If an earlier check failed and ``allow_unverified`` is false, or the folded model was
            changed.
        UsageProblem: If there is no run, the network does not accept that image size, there are too few images or
            images of another size, or repaconv did not write the file that would be replaced.
    """
    progress("open the run", 0, 0)
    plan = _plan(options, run, onnx)
    with lock_folder(plan.run.folder), scratch_folder(plan.run.folder) as scratch:
        graph = _graph(plan, scratch, progress)
        typed = _in_precision(plan, graph, progress)
        model = _finished(plan, graph, typed, scratch)
        _require_replaceable(plan.run, plan.slot, plan.path)  # another command may have written it meanwhile
        data = write_graph(model, plan.path, graph.data)
        artefact = _artefact(plan, graph, typed, model, data)
        replace_artifact(plan.slot, artefact)
    return with_files(
        artefact, [plan.run.payload_of_fold(plan.folded)], [plan.path, *([data] if data else []), plan.slot]
    )


export = by_name(export_by, ExportOptions)


class _Plan(NamedTuple):
    """The options resolved for one run: the target, the rewrites, the images, and the files to write."""

    options: ExportOptions
    options_given: tuple[str, ...]
    run: run_folder.Run
    folded: FoldArtefact
    overridden: tuple[str, ...]
    target: Target
    device: Target
    source_model: SourceModel
    size: ImageSize | None
    dynamic_size: bool
    opset: int
    newest: int
    form: GraphPreset
    rewrites: tuple[Rewrite, ...]
    given: Split | None
    variant: Variant
    path: Path
    slot: Path


def _plan(options: ExportOptions, run: str | Path | None, onnx: str | Path | None) -> _Plan:
    """Make every check that comes before the network is exported."""
    _require_known(options)
    if onnx and not Path(onnx).name:
        raise UsageProblem(
            f"{onnx} is a folder, and a file is written here.",
            hint="Give the path of a file, e.g. one in that folder.",
            code="usage.exists",
        )
    if onnx is not None and Path(onnx).suffix != ".onnx" and not Path(onnx).is_dir():
        raise UsageProblem(
            f"{onnx} is not of the form NAME.onnx, by which the other commands know an ONNX model.",
            hint=f"Give a name that is, e.g. {Path(onnx).with_suffix('.onnx')}.",
            code="export.name",
        )
    taken = run_folder.find_run(Path(run) if run else None)
    source_model = source_model_of(taken)
    folded = source_model.folded
    task_of(source_model, options.task)  # refuses an unknown one
    options = resolve_export_preset(options, folded)
    overridden = run_folder.require_passed_checks(taken, folded, unverified=options.allow_unverified, exports=False)
    target = load_target(options.target)
    device = target.at_opset(options.opset)
    written = preset_for(options.preset, source_model, device, options.quantizer)
    require_supported(device, options.precision, written.quantizer)
    size = _size(options, source_model)
    dynamic_size = folded.any_image_size and options.image_size is None
    newest = device.newest
    if options.precision == "int8":
        newest = int8_for(device, written.quantizer).opset(newest)
        if options.opset and newest < options.opset:
            raise UsageProblem(
                f"INT8 for {device.name} by {written.quantizer or QUANTIZERS[0]} is written in opset {newest} at most.",
                hint=f"Give --opset {newest}, or leave it out.",
                code="export.opset",
            )
    opset = min(device.opset, newest)
    wanted = default_rewrites(device, folded.called) if written.rewrites is None else written.rewrites
    form = chosen(device.rewrites_for(wanted, options.precision), newest, options.precision)
    kept = _fp32_patterns(options)
    variant = Variant(
        target=device.name,
        form=Variant.form_of(written.name),
        opset=options.opset,
        precision=options.precision,
        fp32_modules=kept,
        batch="dynamic" if options.batch in (None, folded.batch) else options.batch,
        image_size=image_size_of_variant("dynamic" if dynamic_size else size, folded),
        preprocessing=options.with_preprocessing,
    )
    if options.with_preprocessing:
        preprocessing_for(source_model)
    slot, path = taken.export_json(variant.name), Path(onnx) if onnx else taken.onnx(variant.name)
    if path.resolve() == taken.payload_of_fold(folded).resolve():
        raise UsageProblem(
            f"{path} is the folded network that is exported.",
            hint="Give another file with -o, or leave -o out.",
            code="usage.exists",
        )
    _require_replaceable(taken, slot, path)
    return _Plan(
        options=options,
        options_given=(*(["-o", str(onnx)] if onnx else []), *options.words()),
        run=taken,
        folded=folded,
        overridden=overridden,
        target=target,
        device=device,
        source_model=source_model,
        size=size,
        dynamic_size=dynamic_size,
        opset=opset,
        newest=newest,
        form=written,
        rewrites=form.rewrites,
        given=_images(options, source_model, size, dynamic_size),
        variant=variant,
        path=path,
        slot=slot,
    )


def _require_replaceable(run: run_folder.Run, slot: Path, path: Path) -> None:
    """Refuse to overwrite a file that no export of this run wrote."""
    require_replaceable(slot, "export", path, path.with_name(f"{path.name}.data"), known=[run.fold_json])


def _size(options: ExportOptions, source_model: SourceModel) -> ImageSize | None:
    """The image size, if the network accepts it; None if the network takes no images."""
    size = as_image_size(options.image_size) or source_model.folded.image_size
    if size:
        source_model.require_size(*size)
    return size


def _require_known(options: ExportOptions) -> None:
    """Refuse unknown precisions and simplifiers."""
    for what, named, known in (
        ("precision", options.precision, run_folder.PRECISIONS),
        ("simplifier", options.simplifier, ("auto", *TOOLS)),
    ):
        if named not in known:
            hint = f"{did_you_mean(named, known)}Known: {', '.join(known)}."
            raise UsageProblem(f"there is no {what} {named!r}.", hint=hint, code=what)


def _fp32_patterns(options: ExportOptions) -> tuple[str, ...]:
    """The patterns of ``--keep-fp32``; refuse them for an FP32 export."""
    kept = (options.keep_fp32,) if isinstance(options.keep_fp32, str) else tuple(options.keep_fp32 or ())
    if kept and options.precision == "fp32":
        raise UsageProblem(
            "--keep-fp32 names layers that a lower precision keeps in FP32, and this export is in FP32.",
            hint="Give --precision int8, fp16 or bf16, or leave --keep-fp32 out.",
            code="export.keep-fp32",
        )
    return kept


def _images(
    options: ExportOptions, source_model: SourceModel, size: ImageSize | None, dynamic_size: bool
) -> Split | None:
    """The images that calibrate and evaluate a lower precision; None for FP32."""
    if options.precision == "fp32":
        return None
    count = 2 * CALIBRATION_IMAGES if options.preset is None or options.preset in NAMED else None  # as in tune
    fixed = options.batch or fixed_batch(source_model)
    given = choose_inputs(
        source_model,
        inputs=options.inputs,
        images=options.images,
        classes=options.classes,
        count=count,
        seed=1,
        size=size,
        batch=fixed,
        by_row=True,
    )
    if given.size and size:
        source_model.require_size(*given.size)
        if not dynamic_size:
            require_same_size(given, size)
    return Split.of(given, batch=fixed, ranges=options.precision != "bf16")


def _graph(plan: _Plan, scratch: Path, progress: Progress) -> Graph:
    """Export the FP32 graph with the rewrites of the preset."""
    tools = TOOLS if plan.options.simplifier == "auto" else (plan.options.simplifier,)
    spec = GraphSpec(
        size=plan.size,
        opset=plan.opset,
        newest=plan.newest,
        unsupported_ops=plan.device.unsupported_ops,
        batch=plan.options.batch,
        dynamic_size=plan.dynamic_size,
        rewrites=plan.rewrites,
        simplifiers=tools if plan.options.simplify else (),
    )
    return plan.source_model.graph(DEPLOY, spec, scratch=scratch, progress=progress)


def _in_precision(plan: _Plan, graph: Graph, progress: Progress) -> LowPrecisionGraph:
    """Convert the graph to the chosen precision."""
    from repaconv.onnx_export.fp32_layer_selection import nodes_kept_in_fp32

    if plan.given is None:
        return LowPrecisionGraph(graph.model)
    if graph.data is not None:
        raise Refused(
            "the weights take more than 2 GiB; such a network cannot be converted to lower precision yet.",
            hint="Export it in fp32, and let the target's own tools lower it.",
            code="export.too-large",
        )
    precision, form = plan.options.precision, plan.form
    activations = precision == "int8" and int8_for(plan.device, form.quantizer).activations
    kept = nodes_kept_in_fp32(
        graph.model, plan.variant.fp32_modules, precision, partial(_plain_export, plan), activations=activations
    )
    typed = lower_and_compare(
        graph.model,
        precision,
        plan.given,
        plan.source_model,
        device=plan.device,
        form=form,
        nodes=kept,
        task=plan.options.task,
        progress=progress,
    )
    if plan.options.inputs or plan.options.images:
        return typed
    return typed._replace(links=tuple(without_evidence(link, NO_IMAGES) for link in typed.links))


def _plain_export(plan: _Plan) -> onnx_package.ModelProto | None:
    """The run's FP32 export for the same target, otherwise for another, without large weights; None if absent."""
    from repaconv.graph.onnx_files import read_graph

    try:
        plain = [each.artefact for each in exports_of(plan.run, plan.folded) if each.artefact.precision == "fp32"]
        plain.sort(key=lambda artefact: artefact.target != plan.device.name)
        return read_graph(run_folder.onnx_model_of(plan.run, plain[0])) if plain else None
    except Refused:  # made of other weights, changed or missing: its names cannot be used
        return None


def _finished(plan: _Plan, graph: Graph, typed: LowPrecisionGraph, scratch: Path) -> onnx_package.ModelProto:
    """The graph as it is written: with its metadata, and with preprocessing nodes if requested."""
    from repaconv.onnx_export.preprocessing_nodes import with_preprocessing
    from repaconv.onnx_export.torch_exporter import add_metadata, check

    pixels = plan.options.with_preprocessing
    model = with_preprocessing(typed.model, preprocessing_for(plan.source_model)) if pixels else typed.model
    if plan.options.opset not in (None, opset_of(model)):
        raise Refused(
            f"this network cannot be written in opset {plan.options.opset}: ONNX's converter leaves it in opset "
            f"{opset_of(model)}.",
            hint="Leave --opset out, or export the network again from its framework.",
            code="export.opset",
        )
    check(model, scratch if graph.data else None)
    add_metadata(model, _metadata(plan, graph.links[0]))
    return model


def _metadata(plan: _Plan, exported: Link) -> dict[str, str]:
    """The metadata that the ONNX file carries."""
    folded, options = plan.folded, plan.options
    allowed = exported.tolerance.rtol if exported.tolerance else 0
    return {
        "repaconv.method": folded.called,
        "repaconv.version": made_by()["repaconv"],
        "repaconv.source_sha256": folded.origin.sha256,
        "repaconv.model_sha256": folded.payload.sha256,
        "repaconv.precision": options.precision,
        "repaconv.image_size": "x".join(map(str, plan.size or ())),
        "repaconv.lossy": "no" if options.precision == "fp32" else "yes",
        "repaconv.preprocessing": folded.preprocessing.model_dump_json() if folded.preprocessing else "",
        "repaconv.preprocessing_in_graph": "yes" if options.with_preprocessing else "no",
        "repaconv.tolerance": f"{allowed:g} relative to the largest output of each image",
        "repaconv.unverified": "; ".join(plan.overridden),
    }


def _artefact(
    plan: _Plan, graph: Graph, typed: LowPrecisionGraph, model: onnx_package.ModelProto, data: Path | None
) -> ExportArtefact:
    from repaconv.onnx_export.fp16_and_int8 import unquantized_layers
    from repaconv.onnx_export.target_operator_rules import violations
    from repaconv.onnx_export.torch_exporter import operators_of
    from repaconv.verification.tolerances import verdict_of

    precision, device, here = plan.options.precision, plan.device, isa_level(plan.device.architecture)
    against = violations(model, plan.newest, device.unsupported_ops, device.forbids, device.domains)
    return ExportArtefact(
        made_by=made_by("torch", "onnx", "onnxscript", "onnxsim", "onnxruntime"),
        verdict="failed" if against else verdict_of([graph.links[0], *typed.links]),
        unverified=plan.overridden,
        options=plan.options_given,
        variant=plan.variant.name,
        target=plan.device.name,
        architecture=plan.device.architecture,
        target_sha256=target_sha256(plan.target),
        precision=precision,
        preprocessing=plan.options.with_preprocessing,
        fp32_nodes=typed.fp32_nodes,
        fp32_modules=plan.variant.fp32_modules,
        unquantized_layers=() if precision == "fp32" else unquantized_layers(typed.model, precision),
        calibration=plan.given.description if plan.given else "",
        image_preprocessing=plan.given.given.preprocessing if plan.given else "",
        scores=scores_note(plan.source_model, plan.given.given, plan.options.task) if plan.given else "",
        images=image_set(plan.given, plan.options.inputs, plan.options.images, plan.options.classes),
        quantizer=(plan.form.quantizer or QUANTIZERS[0]) if precision == "int8" else "",
        unsupported_ops=plan.device.unsupported_ops,
        violations=tuple(against),
        preset=plan.form.name,
        unmeasured=here if plan.form.name == DEFAULT and plan.device.guesses(here) else "",
        rewrites=tuple(dict.fromkeys(change.rewrite for change in graph.changes)),
        changes=graph.changes,
        chosen_opset=plan.options.opset,
        exporter_opset=plan.opset,
        opset=opset_of(model),
        batch=plan.options.batch or plan.folded.batch,
        image_size="dynamic" if plan.dynamic_size else plan.size,
        simplified=graph.simplified,
        simplifier=graph.simplifier,
        nodes=len(model.graph.node),
        operators=operators_of(model),
        model_sha256=plan.folded.payload.sha256,
        links=(*graph.links, *typed.links),
        payload=payload_of(plan.path, plan.run.folder),
        data=payload_of(data, plan.run.folder) if data else None,
    )

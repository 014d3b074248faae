"""export: the folded model as ONNX, proved against it, in float32 or typed lower."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import ExportArtefact, FoldArtefact, ImageSize, Link
from repaconv.errors import Refused, UsageProblem
from repaconv.exporters.simplify import TOOLS
from repaconv.files import payload_of, read_artefact
from repaconv.onnxfile import opset_of
from repaconv.replacing import put, require_ours
from repaconv.steps.asked import as_typed
from repaconv.steps.common import (
    DEPLOY,
    Progress,
    as_image_size,
    at_least_one,
    load_onnx,
    load_target,
    made_by,
    require_size,
    silent,
    stored_weights,
    with_files,
)
from repaconv.steps.exports import target_sha256
from repaconv.steps.graphs import BF16_NOTE, proved_graph, runnable, write_graph
from repaconv.steps.inputs import CALIBRATION_IMAGES, Split, choose_inputs, filled, require_same_size
from repaconv.variants import Variant, unusual

if TYPE_CHECKING:
    import onnx as onnx_package


def export(
    run: str | Path | None = None,
    *,
    onnx: str | Path | None = None,
    target: str = "x86-64",
    precision: str = "fp32",
    batch: int | None = None,
    image_size: int | ImageSize | None = None,
    simplify: bool = True,
    simplifier: str = "auto",
    with_preprocessing: bool = False,
    inputs: str | Path | None = None,
    images: str | Path | None = None,
    unverified: bool = False,
    progress: Progress = silent,
) -> ExportArtefact:
    """Export the folded model to ONNX, simplify it, type it, and prove every step under ONNX Runtime.

    Args:
        run: The run's folder; the newest when None.
        onnx: The file to write; ``model.onnx`` of the run when None, or ``model.jetson-nano.fp16.onnx`` and so on: what
            is not usual stands in the name, so that exports lie beside each other.
        target: Whose opset is written: a name, or the path of a .toml.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``; all but the first are lossy.
        batch: A fixed batch; free when None.
        image_size: A fixed size, a square by one number; where the backbone takes any, free when None.
        simplify: Run a simplifier, and keep its graph if it computes the same.
        simplifier: ``onnxsim``, ``onnxslim``, or ``auto``: the first, and the second where that fails.
        with_preprocessing: Let the graph take pixels (uint8, [B, H, W, C], RGB) and normalise them itself.
        inputs: An .npz of images to measure a lower precision on: some calibrate it, the others judge it.
        images: A folder of them instead. Without either, random images are taken, and the artefact says so.
        unverified: Go on behind a failed verdict, and record it.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if the graph does not compute what the folded model does, and not verified
        where that cannot be told.

    Raises:
        GateFailed: If an earlier stage failed and ``unverified`` was not asked for.
        Refused: If the folded model is gone or changed.
        UsageProblem: If there is no run, the network does not take that image size, there are too few images or of
            another size, or a file is there already that is somebody else's.
    """
    from repaconv.exporters.precision import INT8_OPSET, in_float
    from repaconv.exporters.preprocessing import with_preprocessing as with_pixels
    from repaconv.exporters.rules import violations
    from repaconv.exporters.to_onnx import add_metadata, check, operators_of
    from repaconv.forms.choice import chosen
    from repaconv.proof.verdicts import verdict_of

    if precision not in runs.PRECISIONS:
        raise UsageProblem(
            f"there is no precision {precision!r}.", hint=f"Known: {', '.join(runs.PRECISIONS)}.", code="precision"
        )
    if simplifier not in ("auto", *TOOLS):
        raise UsageProblem(
            f"there is no simplifier {simplifier!r}.", hint=f"Known: auto, {', '.join(TOOLS)}.", code="simplifier"
        )
    if batch is not None:
        at_least_one("batch", batch, batch)
    words = as_typed(
        export,
        target=target,
        precision=precision,
        batch=batch,
        image_size=image_size,
        simplify=simplify,
        simplifier=simplifier,
        with_preprocessing=with_preprocessing,
        inputs=inputs,
        images=images,
        unverified=unverified,
    )
    tools = TOOLS if simplifier == "auto" else (simplifier,)
    taken = runs.find_run(Path(run) if run else None)
    folded = read_artefact(taken.fold_json, FoldArtefact)
    overridden = runs.require_sound(taken, folded, unverified=unverified)
    device = load_target(target)
    if precision not in device.precisions:
        raise UsageProblem(
            f"the target {device.name} does not compute in {precision}.",
            hint=f"It takes {', '.join(device.precisions)}.",
            code="precision",
        )
    if precision == "bf16" and device.typed_by == "runtime":
        raise UsageProblem(
            f"{device.runtime} makes bf16 of a float32 graph itself.",
            hint=f"repaconv export --onnx --target {device.name}, then build --target {device.name} --precision bf16.",
            code="precision",
        )
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    config = backbone.from_json(folded.config)
    size = as_image_size(image_size) or folded.image_size
    require_size(backbone, config, *size)
    free_size = folded.any_image_size and image_size is None
    opset = min(device.opset, INT8_OPSET) if precision == "int8" else device.opset
    newest = device.newest_opset or device.opset
    wanted = device.form(folded.method) if folded.rewrites is None else folded.rewrites
    form = chosen(device.kept(wanted, precision), opset if precision == "int8" else newest)
    variant = Variant(
        target=device.name,
        form=Variant.form_of(folded.form),
        precision=precision,
        batch="dynamic" if batch is None else batch,
        image_size=unusual("dynamic" if free_size else size, folded),
        preprocessing=with_preprocessing,
    )
    slot, path = taken.export_json(variant.name), Path(onnx) if onnx else taken.onnx(variant.name)
    require_ours(slot, "export", path, path.with_name(f"{path.name}.data"), known=[taken.fold_json])
    given = None
    if precision != "fp32":
        count = 2 * CALIBRATION_IMAGES
        taking = choose_inputs(folded, config, inputs=inputs, images=images, count=count, seed=1, size=size)
        require_size(backbone, config, *taking.shape[2:])
        if not free_size:
            require_same_size(taking, size)
        given = Split.of(taking, batch=batch, ranges=precision != "bf16")
    with tempfile.TemporaryDirectory(prefix=".export-", dir=taken.folder) as temporary:
        scratch = Path(temporary)
        graph = proved_graph(
            DEPLOY,
            backbone.deploy(config),
            stored_weights(taken, folded),
            (config.in_channels, *size),
            output=folded.output,
            opset=opset,
            lacks=device.lacks,
            batch=batch,
            free_size=free_size,
            tolerances=folded.tolerances,
            rewrites=form.rewrites,
            simplifiers=tools if simplify else (),
            scratch=scratch,
            progress=progress,
        )
        typed = _Typed(graph.model)
        if given is not None and graph.data is not None:
            raise Refused(
                "the weights take more than 2 GiB; lower precision of such a net is not written yet.",
                hint="Export it in fp32, and let the target's own tools lower it.",
                code="export.too-large",
            )
        if given is not None:
            symmetric = "zero-points" in device.forbids
            typed = _typed(graph.model, precision, given, folded, config, symmetric=symmetric, progress=progress)
        model = with_pixels(typed.model, folded.preprocessing) if with_preprocessing else typed.model
        check(model, scratch if graph.data else None)
        entries = _metadata(folded, precision, overridden, graph.links[0], size, with_preprocessing=with_preprocessing)
        add_metadata(model, entries)
        data = write_graph(model, path, graph.data)
        against = violations(model, newest, device.lacks, device.forbids)
        verdict = "failed" if against else verdict_of([graph.links[0], *typed.links])
        artefact = ExportArtefact(
            made_by=made_by("torch", "onnx", "onnxscript", "onnxsim", "onnxruntime"),
            verdict=verdict,
            unverified=overridden,
            asked=("--onnx", *([str(onnx)] if onnx else []), *words),
            variant=variant.name,
            target=device.name,
            target_sha256=target_sha256(device),
            precision=precision,
            preprocessing=with_preprocessing,
            islands=typed.islands,
            in_float=() if precision == "fp32" else in_float(typed.model, precision),
            calibration=given.told if given else "",
            lacks=device.lacks,
            violations=tuple(against),
            form=folded.form,
            rewrites=tuple(dict.fromkeys(change.rewrite for change in graph.changes)),
            changes=graph.changes,
            exporter_opset=opset,
            opset=opset_of(model),
            batch="dynamic" if batch is None else batch,
            image_size="dynamic" if free_size else size,
            simplified=graph.simplified,
            simplifier=graph.simplifier,
            nodes=len(model.graph.node),
            operators=operators_of(model),
            model_sha256=folded.payload.sha256,
            links=(*graph.links, *typed.links),
            payload=payload_of(path, taken.folder),
            data=payload_of(data, taken.folder) if data else None,
        )
        put(slot, artefact)
        return with_files(artefact, [taken.model], [path, *([data] if data else []), slot])


class _Typed(NamedTuple):
    model: onnx_package.ModelProto
    links: tuple[Link, ...] = ()
    islands: tuple[str, ...] = ()


def _typed(
    model: onnx_package.ModelProto,
    precision: str,
    given: Split,
    folded: FoldArtefact,
    config: Any,
    *,
    symmetric: bool,
    progress: Progress,
) -> _Typed:
    """The graph in that precision, judged by the float32 one on images that did not calibrate it."""
    from repaconv.proof.locate import broken, locate
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance
    from repaconv.proof.runners import FixedBatch, decides
    from repaconv.proof.traces import OnnxTrace

    progress(f"to {precision}", 0, 0)
    calibrating = given.calibrating()
    typed, kept = in_precision(model, precision, calibrating, symmetric=symmetric)
    logits = folded.output == "logits"
    choosing = decides(registry.load(registry.BACKBONES, folded.backbone).deploy(config))
    meter = Meter(tolerance(precision, logits=logits, decides=choosing), logits=logits)
    runs_here = runnable(typed, precision)
    before, after = (FixedBatch(load_onnx(form.SerializeToString()), given.batch) for form in (model, runs_here))
    progress(f"{precision} against float32", 0, 0)
    for piece in given.judges():
        meter.add(after.run(piece), before.run(piece))
    link = meter.link(precision, "ONNX, float32", f"ONNX, {precision}", BF16_NOTE if precision == "bf16" else "")
    right, wrong = (OnnxTrace(form, load_onnx, by_module=False) for form in (model, runs_here))
    # a layer that is broken is so on what calibrated it; that another image goes beyond a range is the link's to judge
    first = calibrating[0] if calibrating else filled(next(given.judges()), given.batch)
    link = broken(link, locate(right, wrong, first, allowed=None, decides=choosing))
    return _Typed(typed, (link,), kept)


def in_precision(
    model: onnx_package.ModelProto, precision: str, pieces: list[Any], *, symmetric: bool
) -> tuple[onnx_package.ModelProto, tuple[str, ...]]:
    """The graph typed lower, by ranges on these images, and the nodes that stay in float32."""
    from repaconv.exporters.bfloat16 import to_bf16
    from repaconv.exporters.precision import islands, to_fp16, to_int8
    from repaconv.proof.ranges import largest_values

    if precision == "fp16":
        kept = tuple(islands(model, largest_values(model, load_onnx, pieces)))
        return to_fp16(model, kept), kept
    if precision == "bf16":
        return to_bf16(model), ()
    return to_int8(model, pieces, symmetric=symmetric), ()


def _metadata(
    folded: FoldArtefact,
    precision: str,
    overridden: tuple[str, ...],
    exported: Link,
    size: ImageSize,
    *,
    with_preprocessing: bool,
) -> dict[str, str]:
    """What the file says of itself wherever it goes."""
    allowed = exported.tolerance.rtol if exported.tolerance else 0
    return {
        "repaconv.method": folded.method,
        "repaconv.version": made_by()["repaconv"],
        "repaconv.source_sha256": folded.origin.sha256,
        "repaconv.model_sha256": folded.payload.sha256,
        "repaconv.precision": precision,
        "repaconv.image_size": "x".join(map(str, size)),
        "repaconv.lossy": "no" if precision == "fp32" else "yes",
        "repaconv.preprocessing": folded.preprocessing.model_dump_json(),
        "repaconv.preprocessing_in_graph": "yes" if with_preprocessing else "no",
        "repaconv.tolerance": f"{allowed:g} relative to the largest output of each image",
        "repaconv.unverified": "; ".join(overridden),
    }

"""export: the folded model as ONNX, proved against it."""

from __future__ import annotations

from pathlib import Path

from repaconv import registry, runs
from repaconv.artefact import (
    ExportArtefact,
    FoldArtefact,
    ImageSize,
    VerifyArtefact,
    payload_of,
    read_artefact,
    write_artefact,
)
from repaconv.pipeline.common import (
    DEPLOY,
    Progress,
    as_image_size,
    load_target,
    made_by,
    require_size,
    silent,
    stored_weights,
    with_files,
)
from repaconv.pipeline.graphs import proved_graph, write_graph


def export(
    run: str | Path | None = None,
    *,
    onnx: str | Path | None = None,
    target: str = "x86-64",
    batch: int | None = None,
    image_size: int | ImageSize | None = None,
    unverified: bool = False,
    progress: Progress = silent,
) -> ExportArtefact:
    """Export the folded model to ONNX, simplify it, and prove both graphs under ONNX Runtime.

    Args:
        run: The run's folder; the newest when None.
        onnx: The file to write; ``model.onnx`` in the run's folder when None.
        target: Whose opset is written: a name, or the path of a .toml.
        batch: A fixed batch; free when None.
        image_size: A fixed size, a square by one number; where the backbone takes any, free when None.
        unverified: Go on behind a failed verdict, and record it.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if the graph does not compute what the folded model does.

    Raises:
        GateFailed: If an earlier stage failed and ``unverified`` was not asked for.
        Refused: If the folded model is gone or changed.
        UsageProblem: If there is no run, or the network does not take that image size.
    """
    from repaconv.exporters.to_onnx import add_metadata, operators_of

    taken = runs.find_run(Path(run) if run else None)
    folded = read_artefact(taken.fold_json, FoldArtefact)
    overridden = _overridden(taken, folded, unverified=unverified)
    device = load_target(target)
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    config = backbone.from_json(folded.config)
    size = as_image_size(image_size) or folded.image_size
    require_size(backbone, config, *size)
    free_size = folded.any_image_size and image_size is None
    graph = proved_graph(
        DEPLOY,
        backbone.deploy(config),
        stored_weights(taken, folded),
        (config.in_channels, *size),
        output=folded.output,
        opset=device.opset,
        batch=batch,
        free_size=free_size,
        tolerances=folded.tolerances,
        progress=progress,
    )
    add_metadata(
        graph.model,
        {
            "repaconv.method": folded.method,
            "repaconv.version": made_by()["repaconv"],
            "repaconv.source_sha256": folded.origin.sha256,
            "repaconv.model_sha256": folded.payload.sha256,
            "repaconv.preprocessing": folded.preprocessing.model_dump_json(),
            "repaconv.tolerance": f"{graph.links[0].tolerance:g} relative to the largest output",
            "repaconv.unverified": "; ".join(overridden),
        },
    )
    path = Path(onnx) if onnx else taken.onnx
    write_graph(graph.model, path)
    artefact = ExportArtefact(
        made_by=made_by("torch", "onnx", "onnxscript", "onnxsim", "onnxruntime"),
        verdict="passed" if graph.sound else "failed",
        unverified=overridden,
        target=device.name,
        opset=device.opset,
        batch="dynamic" if batch is None else batch,
        image_size="dynamic" if free_size else size,
        simplified=graph.simplified,
        simplifier=graph.simplifier,
        nodes=len(graph.model.graph.node),
        operators=operators_of(graph.model),
        model_sha256=folded.payload.sha256,
        links=graph.links,
        payload=payload_of(path, taken.folder),
    )
    write_artefact(taken.export_json, artefact)
    return with_files(artefact, [taken.model], [path, taken.export_json])


def _overridden(run: runs.Run, folded: FoldArtefact, *, unverified: bool) -> tuple[str, ...]:
    """What failed before and was overridden; a verification of other weights than these says nothing."""
    overridden = runs.require_passed(folded, run.fold_json, unverified=unverified)
    if run.verify_json.is_file():
        verified = read_artefact(run.verify_json, VerifyArtefact)
        if verified.model_sha256 == folded.payload.sha256:
            overridden += runs.require_passed(verified, run.verify_json, unverified=unverified)
    return overridden

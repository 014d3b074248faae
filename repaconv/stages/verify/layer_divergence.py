"""Find the layer at which a failed link of an ONNX model or an engine first differs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins, run_folder
from repaconv.core.errors import RepaconvError
from repaconv.core.temporary_folders import scratch_folder
from repaconv.results import ExportArtefact, Location, Tolerance
from repaconv.sources.verified_onnx_export import runnable
from repaconv.stages.shared.engine_files import runtime_lowers
from repaconv.stages.shared.exports_of_run import Export, float32_counterpart
from repaconv.stages.shared.lower_precision import loader_for
from repaconv.stages.shared.model_opening import open_model
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.model_runners import load_onnx

if TYPE_CHECKING:
    from repaconv.engines.contract import Feeds, Session
    from repaconv.engines.targets import Target
    from repaconv.sources.source_model import SourceModel

RECORDED = Location(
    module="",
    reason="only the output was recorded; check the settings missing from the checkpoint: "
    "--set eps, num_heads, norm and the weights that were taken",
)
OTHER_FORM = (
    "the float32 graph of this run has other rewrites, so their layers do not correspond; export compared both "
    "layer by layer in one form"
)
ENGINE = Location(module="", reason="an engine shows no values on the way; the links before it say where to look")


def within_graph(
    source_model: SourceModel, exported: ExportArtefact, path: Path, feeds: Feeds, allowed: Tolerance
) -> Location:
    """Compare the folded network with its graph layer by layer, or a graph of lower precision with the FP32 one."""
    import onnx

    from repaconv.verification.divergence_location import locate
    from repaconv.verification.model_runners import OnnxValues

    if exported.data is not None:
        return Location(module="", reason="a graph above 2 GiB is not followed")
    candidate = _bare(onnx.load(path), exported)
    if allowed.kind == "lossy":
        return _against_float32_graph(source_model, exported, candidate, feeds)
    known = plugins.registered(plugins.REWRITES)
    moved = [name for name in exported.rewrites if name not in known or not plugins.load(plugins.REWRITES, name).keeps]
    if moved:
        return Location(
            module="", reason=f"layer search skipped: the rewrites {', '.join(moved)} change intermediate values"
        )
    traced = OnnxValues(candidate, load_onnx, by_module=source_model.by_module)
    return locate(source_model.stored.trace(), traced, [_filled(feeds, {exported.batch})], allowed=allowed.rtol)


def _against_float32_graph(
    source_model: SourceModel, exported: ExportArtefact, candidate: Any, feeds: Feeds
) -> Location:
    """Compare a graph of lower precision with the run's FP32 graph layer by layer."""
    import onnx

    from repaconv.verification.divergence_location import locate
    from repaconv.verification.model_runners import OnnxValues

    counterpart = float32_counterpart(source_model.run, source_model.folded, exported)
    if counterpart is None:
        return Location(module="", reason="followed layer by layer only next to the float32 graph: export that, too")
    single = counterpart.artefact
    fixed = {exported.batch, single.batch} - {"dynamic"}
    size = next(iter(feeds.values())).shape[2:]
    if len(fixed) > 1 or single.image_size not in (None, "dynamic", size):
        return Location(module="", reason="not followed: the float32 graph takes another batch or image size")
    if set(single.rewrites) != set(exported.rewrites):
        return Location(module="", reason=OTHER_FORM)
    reference = _bare(onnx.load(run_folder.onnx_model_of(source_model.run, single)), single)
    load = loader_for(exported.architecture, exported.precision)
    before, after = (OnnxValues(*of, by_module=False) for of in ((reference, load_onnx), (candidate, load)))
    return locate(before, after, [_filled(feeds, fixed)], allowed=None, decides=source_model.decides)


def within_engine(
    source_model: SourceModel, export: Export, target: str, precision: str, feeds: Feeds, allowed: Tolerance
) -> Location:
    """Compare a target's runtime with ONNX Runtime layer by layer, with the intermediate values as outputs.

    A runtime that loads engine files builds one for each piece of the graph. A value that is an output is not fused
    with the node that reads it.
    """
    import onnx

    from repaconv.verification.divergence_location import locate
    from repaconv.verification.model_runners import OnnxValues

    exported = export.artefact
    if exported.data is not None or exported.precision == "bf16":
        return Location(module="", reason="an engine of a graph above 2 GiB, or in bfloat16, is not followed")
    bare = _bare(onnx.load(run_folder.onnx_model_of(source_model.run, exported)), exported)
    filled = _filled(feeds, {exported.batch})
    limit = allowed.rtol if allowed.kind == "exact" else None
    with scratch_folder() as folder:
        try:
            load = partial(_shown, load_target(target), precision, filled, folder / "shown.onnx")
            right, wrong = (OnnxValues(bare, each, by_module=source_model.by_module) for each in (load_onnx, load))
            found = locate(right, wrong, [filled], allowed=limit, decides=source_model.decides)
        except RepaconvError as problem:
            return Location(module="", reason=f"not followed: {problem.message}")
    fused = "" if found.module else ", where they are not fused"
    return found.model_copy(update={"reason": f"{found.reason}{fused}"})


def _shown(device: Target, precision: str, feeds: Feeds, path: Path, content: bytes) -> Session:
    """Load a graph with a target's runtime, for these inputs [N, C, H, W]."""
    path.write_bytes(content)
    count, _, *size = next(iter(feeds.values())).shape
    dims = {"batch": count, **dict(zip(("height", "width"), size, strict=False))}
    return open_model(
        path, device, precision if runtime_lowers(device, precision) else None, threads=1, dims=dims
    ).session


def _bare(model: Any, exported: ExportArtefact) -> Any:
    """The graph without preprocessing, in a form that runs here."""
    from repaconv.onnx_export.preprocessing_nodes import without_preprocessing

    return runnable(without_preprocessing(model) if exported.preprocessing else model, exported.precision)


def _filled(feeds: Feeds, batches: set[Any]) -> Feeds:
    """Repeat one image to the fixed batch size of the graphs; inputs of that size are returned alike."""
    count = max([1, *(int(batch) for batch in batches - {"dynamic"})])
    if next(iter(feeds.values())).shape[:1] == (count,):
        return feeds
    return {name: array.repeat(count, 0) for name, array in feeds.items()}

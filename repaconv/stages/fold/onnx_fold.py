"""Fold an arbitrary ONNX graph without knowing its method, and compare the folded graph with the original."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core import run_folder
from repaconv.core.changed_input_files import require_unchanged, stamp_of
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.file_replacement import write_payload
from repaconv.core.files import lock_folder, payload_of, sha256_of
from repaconv.core.memory_release import rare_garbage_collection
from repaconv.core.progress import Progress, silent
from repaconv.graph.graph_without_weights import write_model
from repaconv.graph.onnx_files import opset_of
from repaconv.method_api.preprocessing import FoundPreprocessing, Images, Sized, images_by, require_channels
from repaconv.method_api.settings import SettingsReader
from repaconv.onnx_export.torch_exporter import operators_of
from repaconv.results import GraphFold, ImageSize, Link, Origin
from repaconv.rewrites.presets import DEFAULT, OFFICIAL
from repaconv.sources.class_score_outputs import asked_classes, class_scores
from repaconv.sources.fold_size_reverts import Kept
from repaconv.sources.graph_fold import folded, parts_not_folded
from repaconv.sources.graph_fold_record import GraphProperties, image_channels, measured_properties, recorded
from repaconv.sources.onnx_source import UpgradedGraph, with_supported_opset
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.fold.rounding_reverts import compared_with_reverts, forced_fields
from repaconv.stages.fold.speed_reverts import fold_with_reverts
from repaconv.stages.shared.file_hash_check import require_pinned
from repaconv.stages.shared.preset_choice import GraphPreset, choose_preset, require_known_preset
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.tasks.task_of_network import task_named
from repaconv.verification.folded_graph_verification import FOLDED, GIVEN, require_runnable, verification_links
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.onnx_model_loading import inputs_of, loaded

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds
ANY_SIZE = (224, 224)
"""Image size (height, width) that is assumed before the graph is run."""


@rare_garbage_collection()
def fold_onnx_by(
    options: FoldOptions, path: str | Path, *, overrule: bool | None = None, progress: Progress = silent
) -> GraphFold:
    """Fold an ONNX graph into a run: ``<stem>.folded.onnx`` and ``fold.json``.

    If nothing folds, the original graph is written and verified like any other, so that later stages can use it.

    Args:
        path: The graph; its external weights are in the same folder.
        options: The options. ``out`` is the run folder, or an .onnx file to which the folded graph is also written.
            ``settings`` may describe the preprocessing.
        overrule: Write a fold of which no output can be compared, as not verified; every later result then records it.
            The value of ``force`` when None.
        progress: See `Progress`.

    Raises:
        Refused: If it is no valid ONNX file, needs files outside its folder, has more than 2 GiB, does not run, or has
            no output that can be compared; nothing is written then.
        GateFailed: If the folded graph computes something else; nothing is written then.
        UsageProblem: If repaconv did not write the file that would be replaced.
    """
    plan = _plan(options, Path(path))
    progress("load", 0, 0)
    given = Evaluated(plan.model, plan.sample)
    require_runnable(plan.source, given.single)
    progress("fold", 0, 0)
    upgraded = with_supported_opset(given)
    refold = partial(folded, plan.source, upgraded.graph.model)
    again = partial(fold_with_reverts, given, upgraded.graph, refold, measured=options.measure, progress=progress)
    kept = again()
    unverified = options.force if overrule is None else overrule
    upgraded = upgraded.verified(plan.source, given, unverified=unverified) if kept.changes else upgraded
    kept = Kept(given, ()) if upgraded.left else kept
    links: tuple[Link, ...] = ()
    if kept.changes:
        progress("compare under ONNX Runtime", 0, 0)
        kept, links = compared_with_reverts(
            plan.source, kept, given, upgraded.graph, refold, again, unverified=unverified
        )
    links = links if kept.changes else _unchanged_links(plan, given)
    progress("compare in float64", 0, 0)
    properties = measured_properties(plan.source, given, kept.graph)
    with lock_folder(plan.run.folder):
        target = plan.run.folder / plan.payload
        write_payload(target, partial(write_model, kept.graph.model))
        if plan.copied:
            write_payload(plan.copied, partial(copyfile, target))
        artefact = run_folder.write_fold(plan.run, _artefact(plan, properties, given, upgraded, kept, links))
        run_folder.set_newest(plan.run)
    inputs = [plan.source, *([Path(options.inputs)] if options.inputs else [])]
    outputs = [target, plan.run.fold_json, *([plan.copied] if plan.copied else [])]
    return with_files(artefact, inputs, outputs)


class _Plan(NamedTuple):
    """The options resolved for one graph. After this, it is refused only if it cannot be folded and verified."""

    options: FoldOptions
    source: Path
    sha256: str
    model: onnx.ModelProto
    sample: Feeds | None
    written: GraphPreset
    run: run_folder.Run
    payload: str
    copied: Path | None


def _plan(options: FoldOptions, source: Path) -> _Plan:
    """Make every check that comes before the graph is folded."""
    stamp = stamp_of(source)
    require_pinned(source, options.sha256)
    model, out = loaded(source), Path(options.out) if options.out else None
    copied = out if out is not None and out.suffix == ".onnx" else None
    sha256, payload = sha256_of(source), f"{run_folder.utf8_stem(source)}{run_folder.FOLDED}"
    require_unchanged(source, stamp)
    images, _ = _images_and_classes(options.settings or {}, _declared_size(model))
    if (channels := image_channels(inputs_of(model))) is not None:
        require_channels(options.settings or {}, images.preprocessing, channels)
    run = run_folder.prepare_run(
        source,
        sha256,
        None if copied else out,
        force=options.force,
        payload=payload,
        files=[copied] if copied else (),
    )
    return _Plan(
        options=options,
        source=source,
        sha256=sha256,
        model=model,
        sample=_sample(options, model),
        written=_preset_of(options),
        run=run,
        payload=payload,
        copied=copied,
    )


def _sample(options: FoldOptions, model: onnx.ModelProto) -> Feeds | None:
    """Inputs that the user recorded for the graph; None if none are given."""
    from repaconv.verification.input_batches import npz_calls

    return npz_calls(Path(options.inputs), inputs_of(model), ()).piece(0, 1).given if options.inputs else None


def _preset_of(options: FoldOptions) -> GraphPreset:
    """The rewrite preset by name.

    A file of `tune` is found by the shapes of the folded graph, which are not known yet.

    Raises:
        UsageProblem: If it is a file of `tune`, or unknown.
    """
    if options.preset not in (DEFAULT, OFFICIAL):
        require_known_preset(options.preset)
        raise UsageProblem(
            f"--preset {options.preset} was measured on a folded graph, and this graph is not folded yet.",
            hint="Fold it without --preset, then run: repaconv export --preset NAME.",
            code="usage.onnx",
        )
    return choose_preset(options.preset, (), "")


def _images_and_classes(settings: Mapping[str, str], usual: Sized) -> tuple[Images, int | None]:
    """The preprocessing and the number of classes from the user's settings; an ONNX graph contains neither.

    Raises:
        Refused: If the settings give an image size that the graph does not accept.
        UsageProblem: If there is no such setting, or its value does not parse.
    """
    reader = SettingsReader(settings)
    images, classes = images_by(FoundPreprocessing("", {}, []), reader, usual), asked_classes(reader)
    reader.done()
    return images, classes


def _declared_size(model: onnx.ModelProto) -> Sized:
    """The image size that the graph declares; `ANY_SIZE` if it declares none."""
    shape = inputs_of(model)[0].shape
    if len(shape) == 4 and isinstance(shape[2], int) and isinstance(shape[3], int):
        return _fixed((shape[2], shape[3]))
    return Sized(ANY_SIZE, "", assumed=True)


def _fixed(size: ImageSize) -> Sized:
    return Sized(size, "the graph, which takes no other", fixed=True)


def _images(plan: _Plan, properties: GraphProperties) -> tuple[Images | None, int | None]:
    """Preprocessing and number of classes, for the image size that the graph was found to accept.

    The preprocessing is None if the graph takes no images.
    """
    settings = plan.options.settings or {}
    if properties.image_size is None:
        return None, _images_and_classes(settings, Sized(ANY_SIZE, "", assumed=True))[1]
    any_size = Sized(properties.image_size, "the graph takes any size", assumed=True)
    return _images_and_classes(settings, any_size if properties.any_image_size else _fixed(properties.image_size))


def _unchanged_links(plan: _Plan, given: Evaluated) -> tuple[Link, ...]:
    """Compare the written graph, in a new session, with the original, if nothing folds.

    Few inputs are run first, and more only if these leave an output undecided. An output that cannot be compared, or
    that the graph does not compute the same twice, is *not verified*.
    """
    from repaconv.verification.comparison import not_verified

    links: tuple[Link, ...] = ()
    written = Evaluated(given.model, given.sample)
    for few in (True, False):
        try:
            links = verification_links(plan.source, given, written, few=few, unverified=True)
        except Refused as refused:
            links = (not_verified("onnx", GIVEN, FOLDED, refused.message),)
        if all(link.verdict == "passed" for link in links):
            break
    unequal = "the same graph gives other numbers when it runs again"
    return tuple(link.because("not_comparable", unequal) if link.verdict == "failed" else link for link in links)


def _artefact(
    plan: _Plan,
    properties: GraphProperties,
    given: Evaluated,
    upgraded: UpgradedGraph,
    kept: Kept,
    links: tuple[Link, ...],
) -> GraphFold:
    """The result: what was folded, and the costs before and after."""
    copies = [payload_of(plan.copied, plan.run.folder)] if plan.copied else []
    images, classes = _images(plan, properties)
    left = (*upgraded.left, *kept.reverts.messages, *parts_not_folded(kept.graph.model))
    every = (*upgraded.links, *links) if kept.changes else links
    record = recorded(
        upgraded.graph, kept.graph if kept.changes else upgraded.graph, kept.changes, every, properties, left
    )
    # The nodes of the original, not those of the upgraded graph, to which the opset converter may have added some
    record["nodes"] = len(given.model.graph.node), len(kept.graph.model.graph.node)
    record["operators"], options = operators_of(kept.graph.model), plan.options.words()
    return GraphFold(
        made_by=made_by("onnx", "onnx-ir", "onnxruntime"),
        other_files=tuple(copies),
        origin=_origin(plan),
        settings=dict(plan.options.settings or {}),
        task=task_named(plan.options.task) if plan.options.task else None,
        preset=plan.written.name,
        rewrites=plan.written.rewrites,
        fp32_modules=plan.written.fp32_modules,
        quantizer=plan.written.quantizer,
        preprocessing=images.preprocessing if images else None,
        image_size=images.size if images else None,
        facts=images.facts if images else (),
        scores=class_scores(properties.widths, classes),
        opset=opset_of(plan.model),
        payload=payload_of(plan.run.folder / plan.payload, plan.run.folder),
        reverted=kept.reverts.names,
        **{"options": options, **record, **forced_fields(kept, links, options)},
    )


def _origin(plan: _Plan) -> Origin:
    return Origin(
        path=str(plan.source.resolve()),
        sha256=plan.sha256,
        bytes=plan.source.stat().st_size,
        container="ONNX",
        weights=".",
        weights_reason="the graph's own",
    )

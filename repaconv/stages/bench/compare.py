"""`compare`: the difference of two models' outputs on the same inputs, their sizes, and optionally their latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import Refused, UsageProblem, describe_exception
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.progress import Progress, silent
from repaconv.engines.contract import shapes_text
from repaconv.results import BenchArtefact, CompareArtefact, Link, Tolerance
from repaconv.sources.class_score_outputs import class_scores
from repaconv.stages.bench.compared_models import ComparedModel, lower_precision, open_for_comparison
from repaconv.stages.bench.options import BenchOptions, CompareOptions
from repaconv.stages.bench.stage import bench_by
from repaconv.stages.shared.common_options import require_threads
from repaconv.stages.shared.engine_files import build_of
from repaconv.stages.shared.evaluation_images import MAX_IMAGES, NO_IMAGES, evaluation_images, without_evidence
from repaconv.stages.shared.exports_of_run import exports_of
from repaconv.stages.shared.input_selection import choose_inputs, scores_output
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.shared.task_choice import evaluation_of
from repaconv.verification.float64_evaluator_check import graph_rounding
from repaconv.verification.rounding import network_rounding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.engines.contract import Feeds, Port
    from repaconv.results import ExportArtefact
    from repaconv.verification.input_batches import Inputs
    from repaconv.verification.rounding import Rounding


class ComparedInputs(NamedTuple):
    """Inputs of both models.

    Attributes:
        name: Description of the inputs.
        pairs: The same inputs as each of the two takes them, with their labels, batch by batch.
        scores: Name of the output with class scores; empty if there is none.
        no_evidence: Why a pass on these inputs has no meaning; empty if it has.
        why_unusable: Why the result on these inputs is "not verified" in any case; empty if it counts.
    """

    name: str
    pairs: Iterator[tuple[Feeds, Feeds, NDArray[np.int64] | None]]
    scores: str = ""
    no_evidence: str = ""
    why_unusable: str = ""


def compare_by(
    options: CompareOptions, reference: str | Path, candidate: str | Path, *, progress: Progress = silent
) -> CompareArtefact:
    """Compare two models on the same inputs: the difference of their outputs, their size, and optionally their latency.

    A model is a run folder, an .onnx file, an engine, or a checkpoint that was folded here; of such a checkpoint the
    training-time network is used. The lower precision of the two decides the tolerance, as in `verify`. Random inputs
    are those of the run's network if one of the models belongs to a run; otherwise inputs that the reference accepts.

    Args:
        reference: The model that is taken as correct.
        candidate: The model that is compared with it.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If a model is missing, does not accept the inputs of the other, or their outputs cannot be compared.
        UsageProblem: If a model is a checkpoint without a run, or has no file that can be measured.
    """
    from repaconv.verification.tolerances import LARGEST_RTOL, bounded

    if options.rtol is not None:
        bounded("the tolerance --rtol", options.rtol, LARGEST_RTOL)
    device = load_target(options.target)
    require_threads(options.threads)
    threads = options.threads or device.bench.threads
    if options.out:
        require_replaceable(Path(options.out), "compare")
    progress("compare: load", 0, 0)
    right, other = (open_for_comparison(Path(each), device, threads) for each in (reference, candidate))
    if options.speed and not (right.path and other.path):
        raise UsageProblem(
            "--speed compares ONNX models and engines, and one of the two is neither.",
            hint="Export it first: repaconv export",
            code="compare.speed",
        )
    given = _choose_inputs(options, right, other)
    links = _compare_outputs(options, right, other, given, progress)
    measured = _measure_latency(options, right, other, progress) if options.speed else None
    artefact = _artefact(options, right, other, given.name, links, measured)
    if options.out:
        artefact = replace_artifact(Path(options.out), artefact)
    took = [Path(each) for each in (reference, candidate)]
    return with_files(artefact, took, [Path(options.out)] if options.out else [])


compare = by_name(compare_by, CompareOptions)


def _choose_inputs(options: CompareOptions, right: ComparedModel, other: ComparedModel) -> ComparedInputs:
    """Choose the inputs: those that were given, else the evaluation images of a lossy export, else random inputs."""
    from repaconv.verification.input_batches import npz_calls

    source_model = right.source_model or other.source_model
    ports = right.runner.inputs, other.runner.inputs
    if source_model is None and not options.inputs:
        return _random_inputs(options, right, lower_precision(right, other))
    if source_model is None:
        given = npz_calls(Path(str(options.inputs)), ports[0], (), labels=True)
        return ComparedInputs(given.name, _pairs(given, ports))
    pixels = any(port.dtype == "uint8" for own in ports for port in own)
    own = None if options.inputs else _evaluation_images(right, other, pixels)
    if own is None or isinstance(own, str):
        count = None if options.inputs else options.count
        given = choose_inputs(source_model, inputs=options.inputs, count=count, seed=options.seed, pixels=pixels)
    else:
        given = own
    no_evidence, why_unusable = (own, "") if own == NO_IMAGES else ("", own if isinstance(own, str) else "")
    return ComparedInputs(
        given.name, _pairs(given, ports), scores_output(source_model, given), str(no_evidence), why_unusable
    )


def _pairs(given: Inputs, ports: tuple[Sequence[Port], Sequence[Port]]) -> Iterator[tuple[Feeds, Feeds, Any]]:
    return ((batch.feeds(ports[0]), batch.feeds(ports[1]), batch.labels) for batch in given.batches())


def _evaluation_images(right: ComparedModel, other: ComparedModel, pixels: bool) -> Inputs | str | None:
    """The images that evaluated the export of a lossy model, or the reason as text why there are none; None if both are
    exact.
    """
    lossy = next((end for end in (other, right) if end.stated != "fp32"), None)
    if lossy is None:
        return None
    exported = _export_of(lossy)
    if exported is None or lossy.source_model is None:
        return NO_IMAGES
    given = evaluation_images(lossy.source_model, exported, most=MAX_IMAGES)
    if not isinstance(given, str) and pixels and given.piece(0, 1).pixels is None:
        return f"the graph takes pixels, and {given.name} are normalized"
    return given


def _export_of(end: ComparedModel) -> ExportArtefact | None:
    """The export of its run that this file is, or that this engine was built from."""
    if end.source_model is None or end.path is None:
        return None
    built = build_of(end.path)
    sha256 = built.onnx_sha256 if built else end.record.sha256
    exports = (each.artefact for each in exports_of(end.source_model.run, end.source_model.folded))
    return next((each for each in exports if each.payload.sha256 == sha256), None)


def _random_inputs(options: CompareOptions, right: ComparedModel, low: str) -> ComparedInputs:
    """Random inputs of an arbitrary ONNX model: the number of the options, and others of other sizes and ranges."""
    from repaconv.verification.folded_graph_verification import unrunnable
    from repaconv.verification.onnx_model_loading import loaded
    from repaconv.verification.probe_inputs import Unrunnable, probes

    graph = right.path is not None and right.path.suffix == ".onnx"
    if not graph or low != "fp32":
        why = (
            f"nothing says what {right.record.name} takes"
            if not graph
            else f"{low} is lossy, and is evaluated on real inputs"
        )
        raise UsageProblem(f"{why}.", hint="Give inputs with --inputs x.npz.", code="compare.inputs")
    assert right.path is not None
    model = loaded(right.path)
    try:
        found = probes(model, right.runner.run)
    except Unrunnable as problem:
        raise unrunnable(right.path, model, problem) from problem
    asked = (found.call(model, [options.seed, number]) for number in range(options.count))
    name = f"{options.count} random inputs, seed {options.seed}; {found.description}"
    return ComparedInputs(name, ((feeds, feeds, None) for feeds in chain(found.feeds, asked)))


def _compare_outputs(
    options: CompareOptions, right: ComparedModel, other: ComparedModel, given: ComparedInputs, progress: Progress
) -> tuple[Link, ...]:
    """One comparison per output."""
    from repaconv.verification.comparison import Comparison
    from repaconv.verification.tolerances import tolerance

    source_model = right.source_model or other.source_model
    low = lower_precision(right, other)
    link = "agreement" if low == "fp32" else low
    usual: dict[str, Any] = {}
    if source_model:
        has = source_model.folded
        usual = {"usual": has.tolerances, "reasons": has.tolerance_reasons, "decides": source_model.decides}
    roundings, compared = _roundings(options, right, other, low), None
    for number, (own, its, labels) in enumerate(given.pairs):
        progress("compare: run", number, 0)
        expected, got = _run_model(right, own), _run_model(other, its)
        whole = source_model.folded.whole if source_model else not _row_per_image(expected, own)
        if compared is None:
            scores = given.scores if source_model or whole else _class_scores(options, expected, labels)
            if options.rtol is None:
                allowed = tolerance(link, logits=bool(scores), **usual)
            else:
                allowed = Tolerance(kind="exact", rtol=options.rtol, rtol_reason="given by --rtol")
            evaluation = evaluation_of(source_model, low, source_model.folded.image_size) if source_model else None
            compared = Comparison(other.record.name, allowed, scores, evaluation=evaluation)
        rounding = None if roundings is None or _has_pixels(own) else roundings(own)
        compared.add(got, expected, labels=None if whole else labels, whole=whole, rounding=rounding)
    assert compared is not None
    links = compared.links("agreement", right.record.name)
    if given.why_unusable:
        return tuple(each.because("unsuitable_inputs", given.why_unusable) for each in links)
    return tuple(without_evidence(each, given.no_evidence) for each in links) if given.no_evidence else links


def _class_scores(options: CompareOptions, outputs: Mapping[str, Any], labels: NDArray[np.int64] | None) -> str:
    """Name of a bare model's output with class scores, decided by the outputs' shapes; empty if there is none."""
    from repaconv.verification.input_batches import require_labels

    widths = {name: each.shape[1] for name, each in outputs.items() if each.ndim == 2 and each.dtype.kind == "f"}
    found = class_scores(widths, None)
    if found is None or (labels is None and found.assumed):
        return ""
    if labels is not None:
        require_labels(Path(str(options.inputs)), labels, len(outputs[found.output]), found.classes)
    return found.output


def _roundings(
    options: CompareOptions, right: ComparedModel, other: ComparedModel, low: str
) -> Callable[[Feeds], Rounding] | None:
    """The FP32 rounding error of the reference as a function of its inputs; None with --rtol, or if it is unknown."""
    if options.rtol is not None:
        return None
    if source_model := right.source_model or other.source_model:
        return partial(network_rounding, source_model)
    bare = right.path is not None and right.path.suffix == ".onnx" and low == "fp32"
    return graph_rounding(right.path) if bare and right.path else None


def _has_pixels(feeds: Mapping[str, Any]) -> bool:
    return any(array.dtype.name == "uint8" for array in feeds.values())


def _run_model(end: ComparedModel, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return end.runner.run(feeds)
    except Exception as error:  # each runtime raises classes of its own
        raise Refused(
            f"{end.record.name} does not run on {shapes_text(feeds)}: {describe_exception(error)}.",
            hint="It takes inputs of these sizes, so the model itself may be damaged: export it again."
            if _takes(end.runner.inputs, feeds)
            else "Both models must take the same inputs. Give inputs with --inputs x.npz.",
            code="compare.inputs",
        ) from error


def _takes(ports: Sequence[Port], feeds: Mapping[str, Any]) -> bool:
    """Whether these are the inputs that a model declares, in name, type and size."""
    given = {name: (array.dtype.name, array.shape) for name, array in feeds.items()}
    return {port.name for port in ports} == set(given) and all(
        (port.dtype, len(port.shape)) == (given[port.name][0], len(given[port.name][1]))
        and all(
            size in (own, None) or isinstance(size, str)
            for size, own in zip(port.shape, given[port.name][1], strict=True)
        )
        for port in ports
    )


def _row_per_image(outputs: Mapping[str, Any], feeds: Mapping[str, Any]) -> bool:
    """Whether every output has one row per input image."""
    rows = {getattr(each, "shape", ())[:1] for each in (*outputs.values(), *feeds.values())}
    return len(rows) == 1 and rows != {()} and all(getattr(each, "ndim", 0) > 1 for each in outputs.values())


def _measure_latency(
    options: CompareOptions, right: ComparedModel, other: ComparedModel, progress: Progress
) -> BenchArtefact:
    """Latency of the candidate and of the reference, in interleaved rounds."""
    asked = BenchOptions(
        target=options.target, against=right.path, threads=options.threads, rounds=options.rounds, seed=options.seed
    )
    return bench_by(asked, other.path, progress=progress)


def _artefact(
    options: CompareOptions,
    right: ComparedModel,
    other: ComparedModel,
    name: str,
    links: tuple[Link, ...],
    measured: BenchArtefact | None,
) -> CompareArtefact:
    from repaconv.verification.tolerances import verdict_of

    return CompareArtefact(
        made_by=made_by("torch", "onnxruntime"),
        verdict=verdict_of(links),
        options=options.words(),
        reference=right.record,
        candidate=other.record,
        inputs=name,
        links=links,
        measured=measured,
    )

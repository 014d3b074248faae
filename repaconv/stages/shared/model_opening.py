"""Open a model with the runtime that it needs, in one way for all commands, and compare the outputs of two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins, run_folder
from repaconv.graph.onnx_files import metadata_of, read_graph
from repaconv.results import Link
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.engine_files import build_of, engine_of, open_engine
from repaconv.stages.shared.task_choice import evaluation_of, size_in
from repaconv.verification.float64_evaluator_check import graph_rounding
from repaconv.verification.onnx_model_loading import inputs_of
from repaconv.verification.rounding import network_rounding
from repaconv.verification.tolerances import coarser

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.engines.contract import BuildSpec, Network, Session, SessionSpec
    from repaconv.engines.targets import Target
    from repaconv.sources.source_model import SourceModel
    from repaconv.verification.input_batches import Batch

MIN_COMPARED_IMAGES = 8
"""Smallest number of images on which outputs are compared."""


class OpenedModel(NamedTuple):
    """A model ready to run.

    Attributes:
        session: Its session.
        engine: Name and version of the runtime.
        precision: The precision in which it computes.
        profiles: Whether the runtime can profile it, which is the case for graphs but not for engine files.
    """

    session: Session
    engine: str
    precision: str
    profiles: bool

    @property
    def takes_pixels(self) -> bool:
        """Whether its one input is images as uint8."""
        return [(port.dtype, len(port.shape)) for port in self.session.inputs] == [("uint8", 4)]


def open_model(
    model: Path | Network,
    device: Target,
    precision: str | None = None,
    *,
    threads: int,
    dims: Mapping[str, int],
    streams: int = 1,
    settings: tuple[str, ...] = (),
) -> OpenedModel:
    """Load a model: a graph or a module with the target's runtime, an engine file with its own runtime.

    A runtime that opens only engines builds one from the graph first.

    Args:
        model: An .onnx file, an engine, or a PyTorch module.
        device: The target.
        precision: Precision in which the runtime computes a float32 graph; None takes that of the file.
        threads: Threads per inference.
        dims: Sizes of dynamic dimensions, by name.
        streams: Number of inferences at once.
        settings: Settings of the target's runtime in addition to its defaults.

    Raises:
        EnvironmentProblem: If the runtime, or the device it needs, is missing here.
        Refused: If the runtime does not accept the model.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.engines.session_loading import load_session

    engine = plugins.load(plugins.ENGINES, device.runtime)
    spec = SessionSpec(threads=threads, precision=precision or "fp32", sizes=dims, streams=streams, settings=settings)
    if not isinstance(model, Path):
        return OpenedModel(
            load_session(engine, model, spec), f"{engine.name} {engine.version()}", spec.precision, False
        )
    built = build_of(model)
    computed = precision or (built.precision if built else precision_of(model))
    if settings and precision is None:  # some settings depend on the precision of the graph
        spec = replace(spec, precision=computed)
    if built is not None or model.suffix != ".onnx" or "networks" in engine.can:
        engine, session = (
            engine_of(model, built),
            open_engine(model, built, threads=threads, sizes=dims, streams=streams),
        )
    elif "engines" in engine.can:
        options = _build_request(model, device, computed, spec)
        session = load_session(engine, engine.build(options).engine, spec)
    else:
        session = load_session(engine, model, spec)
    profiles = built is None and "profile" in engine.can
    return OpenedModel(session, f"{engine.name} {engine.version()}", computed, profiles)


def _build_request(graph: Path, device: Target, precision: str, spec: SessionSpec) -> BuildSpec:
    """Build options of an engine for these sizes only; a dynamic batch gets the target's batch size by default."""
    from repaconv.engines.contract import BuildSpec

    sizes, free = {"batch": device.bench.batch, **spec.sizes}, {}
    for port in inputs_of(read_graph(graph)):
        if not all(isinstance(size, int) for size in port.shape):
            usual = device.bench.batch
            shape = tuple(size if isinstance(size, int) else sizes.get(str(size), usual) for size in port.shape)
            free[port.name] = (shape, shape, shape)
    capabilities = (device.compute_capability,) if device.compute_capability else ()
    return BuildSpec(graph, precision, capabilities, free, threads=spec.threads)


def precision_of(path: Path) -> str:
    """The precision in a graph's metadata; FP32 by default."""
    return metadata_of(path).get("repaconv.precision", "fp32") if path.suffix == ".onnx" else "fp32"


def compare_outputs(
    run: run_folder.Run | None,
    models: Mapping[str, OpenedModel],
    calls: Sequence[Batch],
    outputs: Sequence[Mapping[str, Mapping[str, Any]]],
    graph: Path | None = None,
    scores: str = "",
) -> Link | None:
    """Compare the outputs of two models, with the tolerance of the lower precision of the two.

    Args:
        run: The run whose tolerances apply; None takes the default policy.
        models: The two models, the measured one first.
        calls: Their inputs, batch by batch.
        outputs: Their outputs by batch, model and output name.
        graph: The ONNX file of the other model, if it belongs to no run.
        scores: Name of a run's output with class scores; without a run it is the output named logits.

    Returns:
        The link over all outputs, whose reference is the model of the higher precision; None if the outputs are not
        comparable.
    """
    from repaconv.verification.comparison import Comparison, overall_link_with_task
    from repaconv.verification.model_runners import named
    from repaconv.verification.tolerances import tolerance

    source_model, other = models
    names = list(outputs[0][source_model])
    if len(names) != len(outputs[0][other]):
        return None
    outputs = [{source_model: each[source_model], other: named(names, each[other])} for each in outputs]
    if not _same_shapes(outputs[0][source_model], outputs[0][other]):
        return None
    low = coarser([each.precision for each in models.values()])
    link = "agreement" if low == "fp32" else low
    backwards = low == models[other].precision != models[source_model].precision
    reference, candidate = (source_model, other) if backwards else (other, source_model)
    network = source_model_of(run) if run else None
    whole = network.folded.whole if network else not _by_image(outputs[0][source_model].values())
    usual: dict[str, Any] = {}
    if network:
        has = network.folded
        usual = {"usual": has.tolerances, "reasons": has.tolerance_reasons, "decides": network.decides}
    scores = scores if network else "logits"
    shape = next(iter(calls[0].given.values())).shape
    evaluation = evaluation_of(network, low, size_in(shape)) if network else None
    allowed = tolerance(link, logits=scores in names, **usual)
    compared = Comparison(candidate, allowed, scores, evaluation=evaluation)
    own = graph_rounding(graph) if graph and low == "fp32" else None
    session = models[other].session
    roundings, ports = (partial(network_rounding, network), network.inputs) if network else (own, session.inputs)
    for call, each in zip(calls, outputs, strict=True):
        undecided = _undecided(network, call) if low == "fp32" else None
        rounding = None if roundings is None else roundings(call.feeds(ports))
        compared.add(each[candidate], each[reference], undecided=undecided, whole=whole, rounding=rounding)
    return overall_link_with_task(compared.links("agreement", reference))


def _undecided(network: SourceModel | None, call: Batch) -> NDArray[np.bool_] | None:
    """For networks that make decisions: the images in which rounding could change one."""
    if network is None or not network.decides:
        return None
    network.stored.run(call.feeds(network.inputs))
    return network.stored.undecided


def _by_image(outputs: Iterable[Any]) -> bool:
    """Whether all outputs have the same number of rows."""
    shapes: list[tuple[int, ...]] = [getattr(output, "shape", ()) for output in outputs]
    return all(len(shape) > 1 for shape in shapes) and len({shape[0] for shape in shapes}) == 1


def _same_shapes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the outputs of the same name have the same shape."""
    return all(getattr(one[name], "shape", None) == getattr(other[name], "shape", ()) for name in one)

"""Two models of any engines beside each other: what runs each, in what precision, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins, run_folder
from repaconv.graph.onnx_files import read_graph, said_by
from repaconv.results import Link
from repaconv.sources.source_of_run import subject_of
from repaconv.stages.shared.engine_files import built_as, engine_of, open_engine
from repaconv.verification.float32_rounding_error import sway_of, swayer_of
from repaconv.verification.onnx_model_loading import inputs_of
from repaconv.verification.tolerances import coarser

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.engines.contract import Network, Order, Session, SessionSpec
    from repaconv.engines.targets import Target
    from repaconv.sources.source_model import Subject
    from repaconv.verification.input_batches import Batch

COMPARED = 8
"""Images at least, by which outputs are compared."""


class Opened(NamedTuple):
    """A model ready to run: its session, the engine's name and version, and the precision that it computes in.

    ``profiles`` says whether the engine can tell where the time goes: of graphs, not of what was built of them.
    """

    session: Session
    engine: str
    precision: str
    profiles: bool

    @property
    def takes_pixels(self) -> bool:
        """Whether its one input are bytes of an image."""
        return [(port.dtype, len(port.shape)) for port in self.session.inputs] == [("uint8", 4)]


def opened(
    model: Path | Network,
    device: Target,
    precision: str | None = None,
    *,
    threads: int,
    dims: Mapping[str, int],
    streams: int = 1,
    settings: tuple[str, ...] = (),
) -> Opened:
    """Load a model: a graph or a network by the target's runtime, an engine by its own.

    A runtime that opens engines alone builds one of the graph first.

    Args:
        model: An .onnx file, an engine, or a network in memory.
        device: The target.
        precision: That the target's runtime is to compute a float32 graph in; what the file says when None.
        threads: Of one inference.
        dims: Sizes of free dimensions, by name.
        streams: Calls at once.
        settings: Of the target's runtime, beside its defaults.

    Raises:
        EnvironmentProblem: If the runtime, or the device it needs, is not here.
        Refused: If it does not take the model.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.engines.session_loading import load_session

    engine = plugins.load(plugins.ENGINES, device.runtime)
    spec = SessionSpec(threads=threads, precision=precision or "fp32", sizes=dims, streams=streams, settings=settings)
    if not isinstance(model, Path):
        return Opened(load_session(engine, model, spec), f"{engine.name} {engine.version()}", spec.precision, False)
    built = built_as(model)
    says = built.precision if built else precision_of(model)
    if settings and precision is None:  # of which there are others for other graphs
        spec = replace(spec, precision=says)
    if built is not None or model.suffix != ".onnx" or "networks" in engine.can:
        engine, session = (
            engine_of(model, built),
            open_engine(model, built, threads=threads, sizes=dims, streams=streams),
        )
    elif "engines" in engine.can:
        options = _ordered(model, device, says if precision is None else precision, spec)
        session = load_session(engine, engine.build(options).engine, spec)
    else:
        session = load_session(engine, model, spec)
    profiles = built is None and "profile" in engine.can
    return Opened(session, f"{engine.name} {engine.version()}", precision or says, profiles)


def _ordered(graph: Path, device: Target, precision: str, spec: SessionSpec) -> Order:
    """An engine of a graph for these sizes alone; a free batch is the target's where nothing says it."""
    from repaconv.engines.contract import Order

    sizes, free = {"batch": device.bench.batch, **spec.sizes}, {}
    for port in inputs_of(read_graph(graph)):
        if not all(isinstance(size, int) for size in port.shape):
            usual = device.bench.batch
            shape = tuple(size if isinstance(size, int) else sizes.get(str(size), usual) for size in port.shape)
            free[port.name] = (shape, shape, shape)
    capabilities = (device.compute_capability,) if device.compute_capability else ()
    return Order(graph, precision, capabilities, free, threads=spec.threads)


def precision_of(path: Path) -> str:
    """What a graph says of itself; float32 where it says nothing."""
    return said_by(path).get("repaconv.precision", "fp32") if path.suffix == ".onnx" else "fp32"


def agreement(
    run: run_folder.Run | None,
    models: Mapping[str, Opened],
    calls: Sequence[Batch],
    outputs: Sequence[Mapping[str, Mapping[str, Any]]],
    graph: Path | None = None,
    scores: str = "",
) -> Link | None:
    """Whether both compute the same, by the rule of what they are: a lossy one's where one of them is lossy.

    Args:
        run: Whose they are, which says what is allowed; the policy alone when None.
        models: The two, the subject first.
        calls: What they were called with.
        outputs: Of both, by model and by name, call by call.
        graph: The file of the other one, where that is an .onnx and no run knows it.
        scores: Which output of a run is the scores of classes; without a run it is the one called logits.

    Returns:
        The link of all outputs, judged against the one that is less lossy; None if their outputs do not compare.
    """
    from repaconv.verification.output_comparison import Comparison, joined
    from repaconv.verification.tolerances import tolerance

    subject, other = models
    if not _comparable(outputs[0][subject], outputs[0][other]):
        return None
    low = coarser([opened.precision for opened in models.values()])
    link = "agreement" if low == "fp32" else low
    backwards = low == models[other].precision != models[subject].precision
    reference, candidate = (subject, other) if backwards else (other, subject)
    names, network = list(outputs[0][subject]), subject_of(run) if run else None
    whole = network.folded.whole if network else not _by_image(outputs[0][subject].values())
    usual: dict[str, Any] = {}
    if network:
        has = network.folded
        usual = {"usual": has.tolerances, "reasons": has.tolerance_reasons, "decides": network.decides}
    scores = scores if network else "logits"
    compared = Comparison(candidate, tolerance(link, logits=scores in names, **usual), scores)
    own = swayer_of(graph) if graph and low == "fp32" else None
    sways, ports = (partial(sway_of, network), network.inputs) if network else (own, models[other].session.inputs)
    for call, each in zip(calls, outputs, strict=True):
        got, right = (dict(zip(names, each[end].values(), strict=True)) for end in (candidate, reference))
        undecided = _undecided(network, call) if low == "fp32" else None
        sway = None if sways is None else sways(call.feeds(ports))
        compared.add(got, right, undecided=undecided, whole=whole, sway=sway)
    return joined(compared.links("agreement", reference))


def _undecided(network: Subject | None, call: Batch) -> NDArray[np.bool_] | None:
    """In which images rounding may decide otherwise, of a network that decides something."""
    if network is None or not network.decides:
        return None
    network.stored.run(call.feeds(network.inputs))
    return network.stored.undecided


def _by_image(outputs: Iterable[Any]) -> bool:
    """Whether every output has as many rows."""
    shapes: list[tuple[int, ...]] = [getattr(output, "shape", ()) for output in outputs]
    return all(len(shape) > 1 for shape in shapes) and len({shape[0] for shape in shapes}) == 1


def _comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether they have as many outputs, of the same shapes."""
    pairs = zip(one.values(), other.values(), strict=False)
    return len(one) == len(other) and all(getattr(a, "shape", None) == getattr(b, "shape", ()) for a, b in pairs)

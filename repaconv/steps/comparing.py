"""Two models of any engines beside each other: what runs each, in what precision, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import Link
from repaconv.onnxfile import said_by
from repaconv.proof.policy import coarser
from repaconv.steps.engines import built_as, engine_of, open_engine
from repaconv.steps.subject import subject_of

if TYPE_CHECKING:
    from repaconv.engines.contract import Network
    from repaconv.proof.runners import Images
    from repaconv.targets import Target

COMPARED = 8
"""Images at least, by which outputs are compared."""


class Opened(NamedTuple):
    """A model ready to run: its session, the engine's name and version, and the precision that it computes in.

    ``profiles`` says whether the engine can tell where the time goes: of graphs, not of what was built of them.
    """

    session: Images
    engine: str
    precision: str
    profiles: bool


def opened(
    model: Path | Network, device: Target, precision: str | None = None, *, threads: int, dims: Mapping[str, int]
) -> Opened:
    """Load a model: a graph or a network by the target's runtime, an engine by its own.

    Args:
        model: An .onnx file, an engine, or a network in memory.
        device: The target.
        precision: That the target's runtime is to compute a float32 graph in; what the file says when None.
        threads: Of one inference.
        dims: Sizes of free dimensions, by name.

    Raises:
        EnvironmentProblem: If the runtime, or the device it needs, is not here.
        Refused: If it does not take the model.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.proof.runners import Images

    engine = registry.load(registry.ENGINES, device.runtime)
    spec = SessionSpec(threads=threads, precision=precision or "fp32", sizes=dims)
    if not isinstance(model, Path):
        return Opened(Images(engine.open(model, spec)), f"{engine.name} {engine.version()}", spec.precision, False)
    built = built_as(model)
    says = built.precision if built else precision_of(model)
    if built is not None or model.suffix != ".onnx" or "networks" in engine.can:
        engine, session = engine_of(model, built), open_engine(model, built, threads=threads, sizes=dims)
    else:
        session = Images(engine.open(model, spec))
    profiles = built is None and "profile" in engine.can
    return Opened(session, f"{engine.name} {engine.version()}", precision or says, profiles)


def precision_of(path: Path) -> str:
    """What a graph says of itself; float32 where it says nothing."""
    return said_by(path).get("repaconv.precision", "fp32") if path.suffix == ".onnx" else "fp32"


def agreement(
    run: runs.Run | None, models: Mapping[str, Opened], outputs: Sequence[Mapping[str, Any]], *, logits: bool
) -> Link | None:
    """Whether both compute the same, by the rule of what they are: a lossy one's where one of them is lossy.

    Args:
        run: Whose they are, which says what is allowed; the policy alone when None.
        models: The two, the subject first.
        outputs: Of both by name [n, K], batch by batch.
        logits: Whether they are logits.

    Returns:
        The link, judged against the one that is less lossy; None if their outputs do not compare.
    """
    from repaconv.proof.outputs import Comparison
    from repaconv.proof.policy import tolerance

    subject, other = models
    if outputs[0][subject].shape != outputs[0][other].shape or outputs[0][subject].ndim != 2:
        return None
    low = coarser([opened.precision for opened in models.values()])
    link = "agreement" if low == "fp32" else low
    backwards = low == models[other].precision != models[subject].precision
    reference, candidate = (subject, other) if backwards else (other, subject)
    name = "logits" if logits else "output"
    compared = Comparison(candidate, tolerance(link, logits=logits, **_allowed(run)))
    for each in outputs:
        compared.add({name: each[candidate]}, {name: each[reference]})
    return compared.links("agreement", reference)[0]


def _allowed(run: runs.Run | None) -> dict[str, Any]:
    """What of a run's network bears on tolerances."""
    if run is None:
        return {}
    subject = subject_of(run)
    return {"usual": subject.folded.tolerances, "decides": subject.decides}

"""compare: any two models on the same inputs: outputs, sizes, and where asked speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.artefacts import BenchArtefact, CompareArtefact, Link, Tolerance
from repaconv.engines.contract import shapes_told
from repaconv.errors import Refused, UsageProblem, said_by
from repaconv.orders.deploying import CompareOrder
from repaconv.orders.knobs import by_name
from repaconv.orders.stages import BenchOrder
from repaconv.pipeline.measuring import bench_by
from repaconv.progress import Progress, silent
from repaconv.proof.policy import coarser
from repaconv.replacing import put, require_ours
from repaconv.steps.common import at_least_one, load_target, made_by, with_files
from repaconv.steps.ends import End, end_of
from repaconv.steps.inputs import choose_inputs
from repaconv.subjects.swaying import sway_of, swayer_of

if TYPE_CHECKING:
    from repaconv.engines.contract import Feeds
    from repaconv.proof.swayed import Sway

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The same inputs, as either end takes them."""


def compare_by(
    order: CompareOrder, reference: str | Path, candidate: str | Path, *, progress: Progress = silent
) -> CompareArtefact:
    """Compare two models on the same inputs: the difference of their outputs, their size, and optionally their latency.

    A model is a run folder, an .onnx file, an engine, or a checkpoint that was folded here; of such a checkpoint the
    training-time network is used. The lower precision of the two decides the tolerance, as in `verify`. Random inputs
    are those of the run's network if one of the models belongs to a run; otherwise inputs that the reference accepts.

    Args:
        reference: The model that is taken as correct.
        candidate: The model that is compared with it.
        order: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If a model is missing, does not accept the inputs of the other, or their outputs cannot be compared.
        UsageProblem: If a model is a checkpoint without a run, or has no file that can be measured.
    """
    device = load_target(order.target)
    threads = at_least_one("threads", order.threads, device.bench.threads)
    if order.out:
        require_ours(Path(order.out), "compare")
    progress("compare: load", 0, 0)
    right, other = (end_of(Path(each), device, threads) for each in (reference, candidate))
    if order.speed and not (right.path and other.path):
        raise UsageProblem(
            "--speed compares ONNX models and engines, and one of the two is neither.",
            hint="Export it first: repaconv export",
            code="compare.speed",
        )
    name, pairs = _inputs(order, right, other)
    links = _links(order, right, other, pairs, progress)
    measured = _measured(order, right, other, progress) if order.speed else None
    artefact = _artefact(order, right, other, name, links, measured)
    if order.out:
        artefact = put(Path(order.out), artefact)
    took = [Path(each) for each in (reference, candidate)]
    return with_files(artefact, took, [Path(order.out)] if order.out else [])


compare = by_name(compare_by, CompareOrder)


def _inputs(order: CompareOrder, right: End, other: End) -> tuple[str, Iterator[Pair]]:
    """What both are run on, and what that is called."""
    subject = right.subject or other.subject
    ports = right.runner.inputs, other.runner.inputs
    if subject is not None:
        pixels = any(port.dtype == "uint8" for own in ports for port in own)
        count = None if order.inputs else order.count
        given = choose_inputs(subject, inputs=order.inputs, count=count, seed=order.seed, pixels=pixels)
        return given.name, ((batch.feeds(ports[0]), batch.feeds(ports[1])) for batch in given.batches())
    if order.inputs:
        from repaconv.proof.data import npz_calls

        calls = npz_calls(Path(order.inputs), ports[0], ())
        return calls.name, ((batch.feeds(ports[0]), batch.feeds(ports[1])) for batch in calls.batches())
    return _probed(right, coarser([right.told.precision, other.told.precision]))


def _probed(right: End, low: str) -> tuple[str, Iterator[Pair]]:
    """Inputs that a graph of any origin takes, found by trying."""
    from repaconv.proof.probes import Unrunnable, probes
    from repaconv.subjects.given import loaded

    graph = right.path is not None and right.path.suffix == ".onnx"
    if not graph or low != "fp32":
        why = (
            f"nothing says what {right.told.name} takes"
            if not graph
            else f"{low} is lossy, and is evaluated on real inputs"
        )
        raise UsageProblem(f"{why}.", hint="Give inputs with --inputs x.npz.", code="compare.inputs")
    assert right.path is not None
    try:
        found = probes(loaded(right.path), right.runner.run)
    except Unrunnable as problem:
        raise Refused(
            f"{right.told.name} could not be run on generated inputs: {problem}.",
            hint="Give inputs with --inputs x.npz.",
            code="compare.inputs",
        ) from problem
    return found.told, ((feeds, feeds) for feeds in found.feeds)


def _links(order: CompareOrder, right: End, other: End, pairs: Iterator[Pair], progress: Progress) -> tuple[Link, ...]:
    """One for every output."""
    from repaconv.proof.outputs import Comparison
    from repaconv.proof.policy import tolerance

    subject = right.subject or other.subject
    low = coarser([right.told.precision, other.told.precision])
    link = "agreement" if low == "fp32" else low
    known = subject.scores if subject and subject.scores and not subject.scores.assumed else None
    usual: dict[str, Any] = {"usual": subject.folded.tolerances, "decides": subject.decides} if subject else {}
    allowed = Tolerance(kind="exact", rtol=order.rtol) if order.rtol else tolerance(link, logits=bool(known), **usual)
    compared = Comparison(other.told.name, allowed, known.output if known else "")
    sways = _sways(order, right, other, low)
    for number, (own, its) in enumerate(pairs):
        progress("compare: run", number, 0)
        expected, got = _ran(right, own), _ran(other, its)
        whole = subject.folded.whole if subject else not _by_image(expected, own)
        compared.add(got, expected, whole=whole, sway=None if sways is None or _pixels(own) else sways(own))
    return tuple(compared.links("agreement", right.told.name))


def _sways(order: CompareOrder, right: End, other: End, low: str) -> Callable[[Feeds], Sway] | None:
    """By how much rounding alone moves the reference, of a call; None where that is not asked, or not known."""
    if order.rtol:
        return None
    if subject := right.subject or other.subject:
        return partial(sway_of, subject)
    bare = right.path is not None and right.path.suffix == ".onnx" and low == "fp32"
    return swayer_of(right.path) if bare and right.path else None


def _pixels(feeds: Mapping[str, Any]) -> bool:
    return any(array.dtype.name == "uint8" for array in feeds.values())


def _ran(end: End, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return end.runner.run(feeds)
    except Exception as error:  # the runtime's own, of many classes
        raise Refused(
            f"{end.told.name} does not run on {shapes_told(feeds)}: {said_by(error)}.",
            hint="Both models must take the same inputs. Give inputs with --inputs x.npz.",
            code="compare.inputs",
        ) from error


def _by_image(outputs: Mapping[str, Any], feeds: Mapping[str, Any]) -> bool:
    """Whether every output has a row for each of the inputs'."""
    rows = {getattr(each, "shape", ())[:1] for each in (*outputs.values(), *feeds.values())}
    return len(rows) == 1 and rows != {()} and all(getattr(each, "ndim", 0) > 1 for each in outputs.values())


def _measured(order: CompareOrder, right: End, other: End, progress: Progress) -> BenchArtefact:
    """The candidate with the reference beside it, round by round."""
    asked = BenchOrder(
        target=order.target, against=right.path, threads=order.threads, rounds=order.rounds, seed=order.seed
    )
    return bench_by(asked, other.path, progress=progress)


def _artefact(
    order: CompareOrder, right: End, other: End, name: str, links: tuple[Link, ...], measured: BenchArtefact | None
) -> CompareArtefact:
    from repaconv.proof.verdicts import verdict_of

    return CompareArtefact(
        made_by=made_by("torch", "onnxruntime"),
        verdict=verdict_of(links),
        options=order.words(),
        reference=right.told,
        candidate=other.told,
        inputs=name,
        links=links,
        measured=measured,
    )

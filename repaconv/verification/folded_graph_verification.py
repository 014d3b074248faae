"""The proof of a folded graph: it and the graph as given under ONNX Runtime, on inputs that excite both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import GateFailed, Refused, first_line
from repaconv.results import Link, Tolerance
from repaconv.verification.evaluated_graph import Evaluated, key_of
from repaconv.verification.float64_reference import Ends, by_truth
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.onnx_model_loading import checker_says
from repaconv.verification.tolerances import LOSSY, depth_reason, exact_rtols, tolerance
from repaconv.verification.weight_jitter import stored

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds
    from repaconv.verification.probe_inputs import Unrunnable

GIVEN, FOLDED = "original ONNX", "ONNX folded"
HALVES = {10: ("fp16", 2.0**-12), 16: ("bf16", 2.0**-9)}
"""ONNX's numbers of half precisions: the link where it is run in them, and by how much a rounding moves a number, as a
rule: half of what it may."""
ROUNDINGS = 3
"""Other roundings of the graph as given that are run where a difference is more than its tolerance."""


def proved(
    source: Path, before: Evaluated, after: Evaluated, ends: tuple[str, str] = (GIVEN, FOLDED)
) -> tuple[Link, ...]:
    """Every output before against after under ONNX Runtime.

    In float32, whatever the weights are stored in: there nothing is allowed but what the folded weights' rounding to
    their own precision explains. A graph of half precision is run as it is stored, too, where the runtime can: there
    something might overflow.

    Raises:
        Refused: If the graph as given does not run, or if nothing could be compared.
    """
    from repaconv.verification.probe_inputs import Unrunnable

    deep = {"onnx": depth_reason(depth_of(before.model))}
    allowed = tolerance("onnx", usual=usual_rtols(before.model), reasons=deep)
    coarse = _rounded_anew(before.model, after.model)
    try:
        links = _compared(source, before.single, after.single, "onnx", allowed, coarse, ends)
    except Unrunnable as error:
        raise unrunnable(source, before.model, error) from error
    if not any(link.verdict in ("passed", "failed") for link in links):
        raise Refused(
            f"no output of {source} could be compared: {links[0].note if links else 'it has none'}.",
            hint="Nothing was verified, so nothing was written. Give a graph whose outputs are tensors of numbers that "
            "depend on its inputs.",
            code="fold.not-proved",
        )
    links += _as_stored(source, before, after) if ends[1] == FOLDED else ()
    for end in (before, after):
        end.single.close()
        end.close()
    return links


def usual_rtols(model: onnx.ModelProto) -> dict[str, float]:
    """What the policy allows a graph of so many layers, by link."""
    return exact_rtols(depth_of(model))


def depth_of(model: onnx.ModelProto) -> int:
    """How many blocks it has, as far as tolerances are concerned: six layers with weights count as one."""
    return sum(node.op_type in ("MatMul", "Gemm", "Conv") for node in model.graph.node) // 6


def unrunnable(source: Path, model: onnx.ModelProto, error: Unrunnable) -> Refused:
    """What is raised where no inputs are found on which a graph runs."""
    if why := checker_says(model):
        return Refused(
            f"{source} is not valid ONNX: {why}; it does not run under ONNX Runtime either.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        )
    suspects = ", ".join(error.suspects)
    why = f" The input that it does not take is probably {suspects}." if suspects else ""
    arrays = ", ".join(f"{name}=..." for name in error.inputs)
    sample = f"Give inputs that it takes: --inputs FILE.npz, written by numpy.savez(FILE, {arrays})."
    return Refused(
        f"{source} does not run under ONNX Runtime on {error.on}: {first_line(error)}.{why}",
        hint=sample
        if error.drawable
        else "Without running it, nothing could be verified. Export it with other inputs.",
        code="onnx.unrunnable",
    )


def _as_stored(source: Path, before: Evaluated, after: Evaluated) -> tuple[Link, ...]:
    """The same in half precision, to what that may do; none where nothing is, or where the runtime lacks it."""
    from repaconv.verification.probe_inputs import Unrunnable

    kinds = {weight.data_type for weight in stored(before.model).values()}
    name = next((HALVES[kind][0] for kind in HALVES if kind in kinds), "")
    if not name or not _loads(before):
        return ()
    try:
        limit = Tolerance(kind="exact", rtol=LOSSY[name][1], rtol_reason=f"run in {name}, as it is stored")
        return _compared(source, before, after, name, limit)
    except Unrunnable:
        return ()


def _loads(graph: Evaluated) -> bool:
    try:
        return bool(graph.session)
    except Refused:
        return False


def _compared(
    source: Path,
    before: Evaluated,
    after: Evaluated,
    name: str,
    allowed: Tolerance,
    coarse: Mapping[str, float] = MappingProxyType({}),
    ends: tuple[str, str] = (GIVEN, FOLDED),
) -> tuple[Link, ...]:
    """A link for every output; raises Unrunnable where no probes are found."""
    from repaconv.verification.neighborhood_comparison import UNDECIDED, compare
    from repaconv.verification.probe_inputs import unmoved

    _require_opened(source, before)
    found = before.probes
    with suppress(Exception):  # the runtime's own; it is raised again where they are compared
        for each in found.feeds:
            before.run(each)
    before.close()  # either is as large as its weights
    _require_opened(source, after, folded=True)
    by = (allowed.rtol or 0.0) / 10
    rounded = [_Rounded((before, after), by, seed, coarse, found.feeds) for seed in range(ROUNDINGS)]
    links = compare(
        before,
        after,
        found.feeds,
        allowed,
        name=name,
        ends=ends,
        note=found.told,
        rounded=rounded,
        fixed=unmoved(before.model),
        undecided=max([UNDECIDED, *(LOSSY[link][1] for link, by in HALVES.values() if by in coarse.values())]),
    )
    if ends[1] != FOLDED or name != "onnx":
        return links
    coarsest = max(coarse.values(), default=0.0)
    return by_truth(links, Ends(before, after, rounded), found.feeds, found.told, by * 10, coarsest)


def _rounded_anew(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, float]:
    """The constants of half precision that went into others, by name, and how far a rounding moves those."""
    halves, left = (
        {name: weight for name, weight in stored(model).items() if weight.data_type in HALVES}
        for model in (before, after)
    )
    kept = {_numbers(weight) for weight in left.values()}
    return {name: HALVES[weight.data_type][1] for name, weight in halves.items() if _numbers(weight) not in kept}


def _numbers(weight: onnx.TensorProto) -> tuple[int, bytes]:
    from onnx import numpy_helper

    return weight.data_type, numpy_helper.to_array(weight).tobytes()


def _require_opened(source: Path, graph: Evaluated, *, folded: bool = False) -> None:
    """Refuse a graph that ONNX Runtime does not load."""
    try:
        graph.session  # noqa: B018
    except Refused as error:
        why = error.message.partition(": ")[2].removesuffix(".")
        defect = "This is a defect of repaconv; please report it with `repaconv inspect` of the file."
        raise Refused(
            f"ONNX Runtime does not load {'the fold of ' * folded}{source}: {why}.",
            hint=defect if folded else "It cannot be verified; give a graph of standard operators.",
            code="onnx.rewrite" if folded else "onnx.unloadable",
        ) from error


class _Rounded:
    """The first of both ends with numbers that are rounded otherwise.

    It is as large as the graph, and there are several: when it is first asked, after both ends, those let their
    sessions go, it runs on all probes, and is let go itself.
    """

    def __init__(
        self,
        ends: tuple[Evaluated, Evaluated],
        by: float,
        seed: int,
        coarse: Mapping[str, float],
        probes: Sequence[Feeds],
    ) -> None:
        self.ends, self.by, self.seed, self.coarse, self.probes = ends, by, seed, coarse, probes
        self._known: dict[bytes, Mapping[str, Any]] = {}

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """See `repaconv.verification.model_runners.Runner`."""
        from repaconv.verification.weight_jitter import jittered_feeds, moved

        key = key_of(feeds)
        if key not in self._known:
            for end in self.ends:
                end.close()
            session = load_onnx(moved(self.ends[0].model, self.by, self.seed, self.coarse))
            for probe in self.probes:
                with suppress(Exception):  # the runtime's own; it is raised to whoever asks for that probe
                    self._known[key_of(probe)] = session.run(jittered_feeds(probe, self.by, self.seed))
            if key not in self._known:
                self._known[key] = session.run(jittered_feeds(feeds, self.by, self.seed))
        return self._known[key]


def not_equal(source: Path, links: tuple[Link, ...]) -> GateFailed:
    """What is raised where a link failed."""
    worst = next(link for link in links if link.verdict == "failed")
    return GateFailed(
        f"the folded graph does not compute what {source} does ({worst.reference.removeprefix(GIVEN + ', ')}: "
        f"{worst.note}); nothing was written.",
        hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
        code="fold.not-equal",
    )

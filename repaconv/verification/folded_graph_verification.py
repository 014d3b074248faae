"""The verification of a folded graph: it and the original under ONNX Runtime, on inputs that excite both.

1. Outputs are compared in FP32, by the tolerance alone.
2. An output that is left open is compared in float64, where that runs. The fold in float64, before it is rounded,
   must be equal to the original there up to `ALGEBRA_RTOL`; so its algebra is right. The folded graph must be that fold
   with every constant rounded. If it is not, or if FP32 leaves open what it computes, it is evaluated in float64,
   too, and may differ by no more than the rounding of its weights explains. So it was written down right. In FP32 it
   may be no further from the original in float64 than the original in FP32 is, times a stated factor. As float64
   takes as long as all else, it evaluates some of the inputs: the smallest one, and those that FP32 leaves open by
   how large channels are over all inputs. What does not pass by them is evaluated for all.
3. Where nothing evaluates the graph in float64, the original with moved weights and inputs says how far rounding goes.
4. What is equal in float64 and differs in FP32 alone is compared once more, both graphs with the choices (TopK) that
   the original makes in FP32 (`cut_at_discrete_operators`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core.errors import GateFailed, Refused, first_line
from repaconv.engines.contract import Array, Feeds
from repaconv.graph.float64_rewriting import DOUBLE, Weights, is_only_rounded
from repaconv.graph.invalid_graphs import misfit
from repaconv.graph.onnx_files import constants_of, opset_of
from repaconv.graph.operator_facts import OLDEST_OPSET
from repaconv.results import Figures, Link, Tolerance
from repaconv.verification.comparison import Channels, Comparison, PerNeighborhood, neighborhood, raised, run_both
from repaconv.verification.cut_at_discrete_operators import cut_at_choices
from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.float64_agreement import differing_operators
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.input_batches import arrays_to_save
from repaconv.verification.onnx_model_loading import checker_error
from repaconv.verification.rounding import (
    ALGEBRA_RTOL,
    ALGEBRAIC,
    HALF_ROUNDINGS,
    HALVES,
    JITTER,
    JITTER_SHARE,
    JITTERED_TIMES,
    MEASURED,
    MOST_EXPLAINED,
    MOVED_SHARE,
    ROUNDING_SAMPLES,
    TO_FLOAT64,
    WRITTEN,
    WRITTEN_MOVED,
    Jittered,
    Movement,
    Rounding,
    apart,
    jitter_rounding,
    movement,
)
from repaconv.verification.tolerances import LOSSY, depth_reason, exact_rtols, tolerance

if TYPE_CHECKING:
    import onnx

    from repaconv.verification.probe_inputs import Probes, Unrunnable

GIVEN, FOLDED = "original ONNX", "ONNX folded"
OLDEST_IN_FULL = 7
"""The oldest opset of which ONNX Runtime has all operators."""
UNDECIDED = ("rounding_too_large", "constant_output")
"""Reasons of a link that leave open whether two outputs are equal. So does one that chooses numbers: `_chooses`."""


def verification_links(
    source: Path,
    before: Evaluated,
    after: Evaluated,
    ends: tuple[str, str] = (GIVEN, FOLDED),
    reverted: Collection[str] = (),
    *,
    few: bool = False,
) -> tuple[Link, ...]:
    """Every output before against after under ONNX Runtime.

    In float32, whatever the weights are stored in: there nothing is allowed but what the folded weights' rounding to
    their own precision explains. A graph of half precision is run as it is stored, too, where the runtime can: there
    something might overflow.

    Args:
        source: The graph's file, for messages.
        before: The original.
        after: What replaces it.
        ends: What the two are called.
        reverted: What was reverted of the fold; see `repaconv.rewrites.fold.fold_pipeline.without`.
        few: Whether only one input of each size is compared, in FP32 alone, without those of other gains and those
            that are sought because an output of integers was the same for all.

    Raises:
        Refused: If the graph as given does not run, or if nothing could be compared.
    """
    from repaconv.verification.probe_inputs import Unrunnable

    deep = {"onnx": depth_reason(depth_of(before.model))}
    allowed = tolerance("onnx", usual=usual_rtols(before.model), reasons=deep)
    coarse = _rounded_anew(before.model, after.model)
    try:
        links = _compared(source, before.single, after.single, "onnx", allowed, coarse, ends, reverted, few=few)
        if ends[1] == FOLDED and not coarse and rounds_worse(links):
            links = _with_given_choices(source, before.single, after.single, allowed, links, reverted)
    except Unrunnable as error:
        raise unrunnable(source, before.model, error) from error
    if not any(link.verdict in ("passed", "failed") for link in links):
        raise Refused(
            f"no output of {source} could be compared: {links[0].note if links else 'it has none'}.",
            hint="Nothing was verified, so nothing was written. Give inputs on which the outputs differ with --inputs "
            "FILE.npz, or a graph whose outputs are tensors of numbers that depend on its inputs.",
            code="fold.not-proved",
        )
    links += _as_stored(source, before, after) if ends[1] == FOLDED else ()
    for end in (before, after):
        end.single.close()
        end.close()
    return links


def _with_given_choices(
    source: Path,
    before: Evaluated,
    after: Evaluated,
    allowed: Tolerance,
    links: tuple[Link, ...],
    reverted: Collection[str],
) -> tuple[Link, ...]:
    """The same links, but passed if both graphs compute the same where they continue with the same choices.

    Of what failed it is known that it is equal in float64, as it is computed and as it is written. What is left is
    that FP32 rounding chooses other rows; all that the choices are made of is compared by the same rules.
    """
    try:
        cut = cut_at_choices(before, after)
        if cut is None:
            return links
        first, second, operators = cut
        found = _compared(source, first, second, "onnx", allowed, {}, (GIVEN, FOLDED), reverted)
    except Exception:  # the runtime's own, of a graph that does not run in parts
        return links
    if any(link.verdict != "passed" for link in found):
        return links
    detail = f"FP32 rounding decides what {operators} chooses; after the same choices, the outputs are equal"
    return tuple(_equal_after_choices(link, detail) if link.verdict == "failed" else link for link in links)


def _equal_after_choices(link: Link, detail: str) -> Link:
    figures = link.figures.model_copy(update={"detail": detail})
    equal = link.model_copy(update={"figures": figures}).because("equal_in_float64", detail)
    return equal.model_copy(update={"metrics": None, "tolerance": None})  # of numbers behind other choices


def usual_rtols(model: onnx.ModelProto) -> dict[str, float]:
    """What the policy allows a graph of so many layers, by link."""
    return exact_rtols(depth_of(model))


def depth_of(model: onnx.ModelProto) -> int:
    """How many blocks it has, as far as tolerances are concerned: six layers with weights count as one."""
    return sum(node.op_type in ("MatMul", "Gemm", "Conv") for node in model.graph.node) // 6


def unrunnable(source: Path, model: onnx.ModelProto, error: Unrunnable) -> Refused:
    """What is raised where no inputs are found on which a graph runs."""
    if why := checker_error(model) or misfit(model):
        return Refused(
            f"{source} is not valid ONNX: {why}; it does not run under ONNX Runtime either.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        )
    if isinstance(error.__cause__, Refused) and error.__cause__.code == "onnx.unloadable":
        return _not_loaded(source, model, error.__cause__.message)
    suspects = ", ".join(error.suspects)
    why = f" The input that it does not take is probably {suspects}." if suspects else ""
    arrays = arrays_to_save(error.inputs)
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

    kinds = {weight.data_type for weight in constants_of(before.model.graph).values()}
    name = next((HALVES[kind][0] for kind in HALVES if kind in kinds), "")
    if not name or not _loads(before):
        return ()
    try:
        limit = Tolerance(kind="exact", rtol=LOSSY[name][1], rtol_reason=f"run in {name}, as it is stored")
        return _compared(source, before, after, name, limit, {}, (GIVEN, FOLDED))
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
    coarse: Mapping[str, float],
    ends: tuple[str, str],
    reverted: Collection[str] = (),
    *,
    few: bool = False,
) -> tuple[Link, ...]:
    """A link for every output; raises Unrunnable where no probes are found."""
    _require_opened(source, before)
    probes = replace(before.probes, more=tuple) if few else before.probes
    with suppress(Exception):  # the runtime's own; it is raised again where they are compared
        for each in probes.feeds:
            before.run(each)
    before.close()  # either is as large as its weights
    _require_opened(source, after, folded=True)
    return _Pair(before, after, probes, name, allowed, coarse, ends, reverted).links(fp32_alone=few)


def _open(links: Mapping[str, Link]) -> set[str]:
    """Outputs that differ by more than is allowed so far."""
    return {output for output, link in links.items() if link.verdict == "failed" or link.reason == "rounding_too_large"}


def _constant(links: Mapping[str, Link]) -> set[str]:
    return {output for output, link in links.items() if link.reason == "constant_output"}


class _Pair:
    """Two graphs that are compared on probes.

    Attributes:
        coarse: Weights that were rounded to half precision anew, and how far that moves each.
        reverted: What was reverted of the fold, which is made once more in float64.
        moved: The original with other roundings, each opened when it is first asked.
        moved_written: The folded graph in float64, with other roundings of its weights.
        chosen: The inputs that are evaluated in float64.
    """

    doubt = ""
    """What of the original's evaluation in float64 is not ONNX Runtime's; empty if all is, or was not asked for."""

    def __init__(
        self,
        before: Evaluated,
        after: Evaluated,
        probes: Probes,
        name: str,
        allowed: Tolerance,
        coarse: Mapping[str, float],
        ends: tuple[str, str],
        reverted: Collection[str],
    ) -> None:
        from repaconv.verification.probe_inputs import input_independent_outputs

        self.before, self.after, self.probes = before, after, probes
        self.name, self.allowed, self.coarse, self.ends = name, allowed, coarse, ends
        self.reverted = reverted
        self.fixed, self._anew = input_independent_outputs(before.model), _made(before.model, after.model)
        self.chosen: Sequence[Feeds] = probes.feeds
        self._drawn_for: Sequence[Feeds] = ()

    def _draw(self, feeds: Sequence[Feeds]) -> None:
        """Prepare the graphs with other roundings, which run on all of these inputs when one is first asked."""
        if feeds is self._drawn_for:
            return
        written = partial(Jittered, self.after, WRITTEN_MOVED, anew=self._anew, double=True)
        given = partial(Jittered, self.before, JITTER_SHARE * (self.allowed.rtol or 0.0))
        self.moved_written = [written(seed, feeds, {}, (self.before,)) for seed in range(ROUNDING_SAMPLES)]
        self.moved = [given(seed, feeds, self.coarse, (self.after,)) for seed in range(ROUNDING_SAMPLES)]
        self._drawn_for = feeds

    def links(self, *, fp32_alone: bool = False) -> tuple[Link, ...]:
        """One for every output.

        Weights that were rounded to half precision move the folded graph by more than FP32 rounding does. That is
        measured by moving them, so there float64 comes last.
        """
        found = self._by_output(run_both(self.before, self.after, self.probes.feeds, self._comparison()))
        if fp32_alone:
            return tuple(found.values())
        if self.coarse:
            found |= self._by_jitter(_open(found))
            found |= self._in_float64(_open(found), _constant(found))
        else:
            told = self._in_float64(_open(found), _constant(found))
            found |= told
            found |= self._by_jitter(_open(found) - told.keys())
        doubted = _open(found) if self.doubt else set()
        return tuple(link.noted(self.doubt) if output in doubted else link for output, link in found.items())

    def _comparison(
        self,
        allowed: Tolerance | None = None,
        vague: float = MOST_EXPLAINED,
        channels: Channels | None = None,
        fixed: Collection[str] = (),
    ) -> Comparison:
        allowed, fixed = allowed or self.allowed, {*self.fixed, *fixed}
        scale = PerNeighborhood
        return Comparison(self.ends[1], allowed, None, scale=scale, fixed=fixed, vague=vague, channels=channels)

    def _by_output(self, found: Comparison) -> dict[str, Link]:
        return dict(zip(found.outputs, found.links(self.name, self.ends[0], self.probes.told), strict=True))

    def _by_jitter(self, doubted: Collection[str]) -> dict[str, Link]:
        """By how far moved weights and inputs move the original."""
        if not doubted:
            return {}
        self._draw(self.probes.feeds)
        noises = [LOSSY[link][1] for link, by in HALVES.values() if by in self.coarse.values()]
        found = self._comparison(vague=max([MOST_EXPLAINED, *noises]))
        run_both(self.before, self.after, self.probes.feeds, found, partial(jitter_rounding, self.moved))
        return {output: link for output, link in self._by_output(found).items() if output in doubted}

    # --- in float64

    @cached_property
    def _channels(self) -> Channels:
        return Channels(map(self.before.run, self.probes.feeds))

    @property
    def _others(self) -> list[Feeds]:
        """The inputs that are compared in FP32 alone."""
        return [each for each in self.probes.feeds if all(each is not one for one in self.chosen)]

    @property
    def _told(self) -> str:
        others = f"in float64 for {len(self.chosen)} of {len(self.probes.feeds)} inputs" if self._others else ""
        return "; ".join(filter(None, [others, self.probes.told]))

    def _inputs_for_float64(self, differ: Collection[str], constant: Collection[str]) -> Sequence[Feeds]:
        """The smallest one, and those that FP32 leaves open by how large channels are over all of them.

        How far inputs move an output in float64 is known by all of them alone.
        """
        feeds = self.probes.feeds
        if constant or self.coarse:
            return feeds

        def left_open(each: Feeds) -> bool:
            found = run_both(self.before, self.after, [each], self._comparison(channels=self._channels))
            return not _open(self._by_output(found)).isdisjoint(differ)

        smallest = min(feeds, key=lambda each: sum(array.size for array in each.values()))
        found = [each for each in feeds if each is smallest or left_open(each)]
        return feeds if len(found) == len(feeds) else found

    def _in_float64(self, differ: Collection[str], constant: Collection[str]) -> dict[str, Link]:
        """Of the outputs that float64 tells of, where it runs.

        An output that some inputs do not show to be equal is evaluated for all: that it has numbers, or that rounding
        chooses others, may be seen by other inputs alone.
        """
        if self.name != "onnx" or not (differ or constant):
            return {}
        self.chosen = self._inputs_for_float64(differ, constant)
        told = self._told_by_float64(differ, constant)
        if self._others and not self.doubt and not all(_is_equal(told.get(output)) for output in differ):
            self.chosen = self.probes.feeds
            told = self._told_by_float64(differ, constant)
        return told

    def _told_by_float64(self, differ: Collection[str], constant: Collection[str]) -> dict[str, Link]:
        """The same, for the inputs that are chosen."""
        feeds = self.chosen
        self._draw(feeds)
        self.before.close()
        self.after.close()
        try:
            with self.before.float64.weights_kept():
                self.doubt = differing_operators(self.before.model, self.before.float64, *feeds)
                if self.doubt:
                    return {}
                self.before.truths(feeds)
            exact = self._exact()
            if exact is None and (self.coarse or self._others):
                return {}
            folded = exact.run_all(feeds) if exact else [{} for _ in feeds]
            del exact  # as large as the weights in float64
            calls = [self._call(*each) for each in zip(feeds, folded, strict=True)]
            answers = {output: self._of_output(output, [call.of(output) for call in calls]) for output in differ}
            answers |= {output: self._by_movement(output, [call.of(output) for call in calls]) for output in constant}
        except Exception:  # whatever cannot be evaluated in float64, of many classes: then nothing more is known
            return {}
        several = len(calls[0].original) > 1
        return {
            output: link.model_copy(update={"candidate": f"{link.candidate}, output {output}"} if several else {})
            for output, link in answers.items()
            if link is not None
        }

    def _folded_in_float64(self) -> tuple[onnx.ModelProto, Weights]:
        from repaconv.graph.float64_rewriting import rewritten_in_float64
        from repaconv.rewrites.fold.fold_pipeline import without

        known = self.after.in_float64
        found = rewritten_in_float64(self.before.model, without(self.reverted))[0] if known is None else known
        return found.model, found.weights

    def _fixed(self, output: str) -> Collection[str]:
        """The output, where one input may be all that is compared: whether it changes is seen by all, in FP32."""
        return [output] if self._others else []

    def _exact(self) -> Float64 | None:
        """The candidate in float64, a fold as it is made there; None where that does not run."""
        try:
            if self.ends[1] != FOLDED:
                return self.after.float64
            return Float64(*self._folded_in_float64())
        except Exception:  # as above
            return None

    def _call(self, feeds: Feeds, exact: Mapping[str, Any]) -> _Call:
        truth, folded = self.before.truth(feeds), self.after.run(feeds)
        unfused = {name for name in truth if _overflows(folded.get(name), truth[name])}
        if unfused:
            folded |= self.after.as_written(feeds)
        return _Call(feeds, self.before.run(feeds), folded, truth, exact, unfused)

    def _of_output(self, output: str, calls: Sequence[_OneOutput]) -> Link | None:
        """What float64 says of one output; None where its numbers do not compare."""
        if not all(call.comparable for call in calls):
            return None
        own = [_own_rounding(call.original, call.truth) for call in calls]
        algebra = self._algebra(output, calls, own) if calls[0].exact is not None else None
        if algebra is not None and algebra.verdict != "passed":
            return algebra
        is_real = calls[0].truth.dtype.kind == "f"
        rounded = algebra is not None and is_real and self._is_only_rounded
        written = self._written(output, calls) if algebra is not None and not rounded else None
        if written is not None and written.verdict == "failed":
            return written
        judged = rounded or written is not None  # how it was written down
        allowed = max(self.allowed.rtol or 0.0, HALF_ROUNDINGS * max(self.coarse.values(), default=0.0))
        channels = self._channels if self._others else None
        found = self._comparison(self.allowed.model_copy(update={"rtol": allowed}), channels=channels)
        for call, moved in zip(calls, own, strict=True):
            if not is_real and algebra is not None and (judged or self.coarse):
                moved = np.where(call.folded != call.truth, inf, moved)  # equal in float64: FP32 decides otherwise
            elif judged:
                moved = _blurred(call.truth, moved)
            right = {output: call.truth}
            rounding = Rounding(MEASURED, partial(self._movements, output, call, moved))
            found.add({output: call.folded.astype(call.truth.dtype)}, right, rounding=rounding)
        for feeds in self._others:
            found.add({output: self.after.run(feeds)[output]}, {output: self.before.run(feeds)[output]})
        exactly = algebra.metrics.max_rel_error if algebra is not None and algebra.metrics else None
        figures = {"error_in_float64": exactly, "unfused": sum(call.unfused for call in calls) or None}
        (link,) = found.links(self.name, f"{self.ends[0]}, float64", self._told, **figures)
        if self._others and not judged:
            return None
        if rounded and (_chooses(link) or link.reason in UNDECIDED):  # FP32 does not say that it computes the same
            written = self._written(output, calls)
            if written is None and self._others:
                return None
            if written is not None and written.verdict == "failed":
                return written
        # where rounding moves numbers by all that is next to them, it chooses others: the boxes that a detector keeps
        chosen = written is not None and written.verdict == "passed" and _chooses(link)
        if self._others or algebra is None or not (chosen or link.reason in UNDECIDED):
            return link
        link = link.because("equal_in_float64")
        if chosen or link.figures.left_out == link.figures.compared:  # nothing was measured in FP32
            return link.model_copy(update={"metrics": None, "tolerance": None})
        metrics = found.metrics(output)
        return link.model_copy(update={"metrics": metrics, "tolerance": raised(found.allowed, metrics)})

    def _movements(self, output: str, call: _OneOutput, own: Array) -> Iterator[Movement]:
        """The original's error in FP32; where that is small by chance, how far moved weights and inputs move it."""
        yield {output: own}
        for other in self.moved:
            moved = movement(other.run(call.feeds), {output: call.original})
            yield {name: JITTERED_TIMES / MEASURED.times * array for name, array in moved.items()}
        yield from self._like_errors(output, call)

    def _like_errors(self, output: str, call: _OneOutput) -> Iterator[Movement]:
        """The error in FP32 of the original with moved weights and inputs: other draws of its own error.

        They also see rounding inside operations that no weight enters. Other probes tell nothing of this one: there the
        original may be conditioned otherwise.
        """
        for other in self.moved if call.truth.dtype.kind == "f" else ():
            found, exact = other.run(call.feeds)[output], other.truth(call.feeds)[output]
            if found.shape == exact.shape == call.truth.shape:
                yield {output: _own_rounding(found, exact)}

    def _algebra(self, output: str, calls: Sequence[_OneOutput], own: Sequence[Array]) -> Link:
        """The fold computed in float64 against the original there."""
        probes, others = self.chosen, (self.after,)
        doubles = [
            Jittered(self.before, JITTER * TO_FLOAT64, n, probes, {}, others, double=True)
            for n in range(ROUNDING_SAMPLES)
        ]

        def movements(call: _OneOutput, moved: Array) -> Iterator[Movement]:
            if call.truth.dtype.kind == "f":
                yield {output: moved}
            for other in doubles:  # of values that are equal in float64, its rounding may choose another
                further = movement(other.run(call.feeds), {output: call.truth}, discrete=True)
                yield {name: JITTERED_TIMES / ALGEBRAIC.times * array for name, array in further.items()}
            yield from self._like_errors(output, call)

        found = self._comparison(Tolerance(kind="exact", rtol=ALGEBRA_RTOL), fixed=self._fixed(output))
        for call, moved in zip(calls, own, strict=True):
            rounding = Rounding(ALGEBRAIC, partial(movements, call, moved))
            found.add({output: call.exact}, {output: call.truth}, rounding=rounding)
        detail = "computed in float64"
        (link,) = found.links(self.name, f"{self.ends[0]}, float64", self._told, detail=detail)
        return link

    def _written(self, output: str, calls: Sequence[_OneOutput]) -> Link | None:
        """The folded graph as it was written, in float64; None where that does not run, or is in half precision."""
        if self.coarse:
            return None
        found = self._comparison(fixed=self._fixed(output))
        try:
            self.after.truths([call.feeds for call in calls])
            for call in calls:
                written, rounding = self._as_written(output, call)
                found.add({output: written}, {output: call.truth}, rounding=rounding)
        except Exception:  # whatever cannot be evaluated in float64, of many classes
            return None
        detail = "the folded graph as it was written, computed in float64"
        unfused = sum(call.unfused for call in calls) or None
        (link,) = found.links(self.name, f"{self.ends[0]}, float64", self._told, detail=detail, unfused=unfused)
        if link.verdict == "failed" and self._rounding_chose(link, output, calls):
            return link.because("equal_in_float64")
        return link

    @cached_property
    def _is_only_rounded(self) -> bool:
        """Whether the folded graph is the fold in float64, every constant rounded to float32, and nothing else."""
        known = self.after.in_float64
        return known is not None and is_only_rounded(self.after.model, known)

    def _rounding_chose(self, link: Link, output: str, calls: Sequence[_OneOutput]) -> bool:
        """Whether the written graph differs by its weights' rounding alone, which chooses other numbers.

        Moved weights need not put a number on the very rank where the rounded ones do. So the weights of the fold in
        float64 are rounded: computed in float64, that is the written graph.
        """
        if not _chooses(link):
            return False
        try:
            rounded = Float64(*_rounded(*self._folded_in_float64()))
            found = self._comparison(Tolerance(kind="exact", rtol=ALGEBRA_RTOL), fixed=self._fixed(output))
            for call, right in zip(calls, rounded.run_all([call.feeds for call in calls]), strict=True):
                found.add({output: self.after.truth(call.feeds)[output]}, {output: right[output]})
        except Exception:  # whatever cannot be evaluated in float64, of many classes
            return False
        return found.links("", "", "")[0].reason == "within_tolerance"

    def _as_written(self, output: str, call: _OneOutput) -> tuple[Array, Rounding]:
        """What the folded graph computes in float64, and how far the rounding of its weights moves that.

        A graph that is only rounded differs from the fold in float64 by the rounding of its weights. As far as the
        original's own error in FP32, that is known without moving any.
        """
        written = self.after.truth(call.feeds)[output]

        def known() -> Iterator[Movement]:
            if call.exact is not None and call.truth.dtype.kind == "f" and self._is_only_rounded:
                own = _own_rounding(call.original, call.truth)
                yield {output: np.minimum(apart(call.exact, written), own)}

        return written, jitter_rounding(self.moved_written, call.feeds, {output: written}, WRITTEN, known())

    def _written_within(self, limit: float, output: str, call: _OneOutput) -> bool:
        """Whether the folded graph as it was written is off by less, besides what its weights' rounding explains."""
        written, rounding = self._as_written(output, call)
        off, explained = apart(written, call.truth), np.zeros(written.shape)
        for moved in chain([explained], rounding.of(output)):  # each takes as long as the network
            explained = np.maximum(explained, moved if moved.shape == written.shape else 0.0)
            if float(np.where(off > WRITTEN.times * explained, off, 0.0).max(initial=0.0)) < limit:
                return True
        return False

    def _by_movement(self, output: str, calls: Sequence[_OneOutput]) -> Link | None:
        """What is one number in FP32 for all inputs, and is not in float64: the fold there, by how far it moves."""
        if not all(call.comparable and call.exact is not None and call.truth.dtype.kind == "f" for call in calls):
            return None
        first = {call.truth.shape: call.truth for call in reversed(calls)}
        moves = off = 0.0
        for call in calls:
            for other in (first[call.truth.shape], *([call.truth[:1]] if call.truth.ndim else [])):
                moves = max(moves, float(apart(call.truth, other).max(initial=0.0)))
            off = max(off, float(apart(call.exact, call.truth).max(initial=0.0)))
        least = MOVED_SHARE * moves
        if not (np.isfinite(moves) and off < least):
            return None
        if not self.coarse and not all(self._written_within(least, output, call) for call in calls):
            return None
        ends = {"name": self.name, "reference": f"{self.ends[0]}, float64", "candidate": self.ends[1]}
        figures = Figures(error_in_float64=off / moves)
        return Link.concluded("equal_in_float64", figures=figures, note=self.probes.told, **ends)


class _Call(NamedTuple):
    """All outputs on one probe: of the original and the folded graph in FP32, of the original and the fold in float64.

    ``unfused`` are outputs that the runtime's own fusions of the folded graph make infinite where the original is
    finite: a quotient of two sigmoids that saturate may be that, by their last bit. Then ``folded`` is what the graph
    gives as it is written.
    """

    feeds: Feeds
    original: Mapping[str, Any]
    folded: Mapping[str, Any]
    truth: Mapping[str, Any]
    exact: Mapping[str, Any]
    unfused: Collection[str]

    def of(self, output: str) -> _OneOutput:
        original, folded, truth, exact = (
            one.get(output) for one in (self.original, self.folded, self.truth, self.exact)
        )
        return _OneOutput(self.feeds, original, folded, truth, exact, output in self.unfused)


class _OneOutput(NamedTuple):
    """The same of one output."""

    feeds: Feeds
    original: Any
    folded: Any
    truth: Any
    exact: Any
    unfused: bool

    @property
    def comparable(self) -> bool:
        """Whether all are numbers of one shape."""
        arrays = [self.original, self.folded, self.truth, *([] if self.exact is None else [self.exact])]
        numbers = all(isinstance(one, np.ndarray) and one.dtype.kind in "fiub" for one in arrays)
        return numbers and len({one.shape for one in arrays}) == 1 and self.original.dtype == self.folded.dtype


def _overflows(found: Any, truth: Any) -> bool:
    """Whether one is no number where the other is."""
    real = all(isinstance(one, np.ndarray) and one.dtype.kind == "f" for one in (found, truth))
    return real and found.shape == truth.shape and bool((np.isfinite(truth) & ~np.isfinite(found)).any())


def _is_equal(link: Link | None) -> bool:
    """Whether numbers were compared and are equal, but for rounding."""
    return link is not None and link.reason in ("within_tolerance", "explained_by_rounding")


def _chooses(link: Link) -> bool:
    """Whether an output differs where rounding moves numbers by all that is next to them, so that it chooses others."""
    return link.reason == "exceeds_tolerance" and (link.figures.rounding or 0.0) >= 1.0


def _rounded(model: onnx.ModelProto, weights: Weights) -> tuple[onnx.ModelProto, Weights]:
    """A graph in float64 with weights that are rounded to float32."""
    import onnx_ir as ir
    from onnx import numpy_helper

    from repaconv.graph.graph_without_weights import with_initializers

    def rounded(weight: onnx.TensorProto) -> onnx.TensorProto:
        if weight.data_type != DOUBLE or weight.name in weights:
            return weight
        return numpy_helper.from_array(in_single(numpy_helper.to_array(weight)), weight.name)

    def in_single(numbers: Array) -> Array:
        return numbers.astype(np.float32).astype(np.float64)

    def read(weight: ir.TensorProtocol) -> ir.TensorProtocol:
        return ir.tensor(in_single(weight.numpy()))

    lazy = {name: ir.LazyTensor(partial(read, each), each.dtype, each.shape) for name, each in weights.items()}
    return with_initializers(model, map(rounded, model.graph.initializer)), lazy


def _own_rounding(single: Array, truth: Array) -> Array:
    """How far the original in FP32 is from itself in float64, on one probe.

    A number may be exact there by chance, so each is moved as in the image of that probe where it is moved most,
    relative to the numbers next to it.
    """
    own = movement({"": single}, {"": truth}, discrete=True)[""]
    if truth.dtype.kind != "f":
        return own
    scale = neighborhood(truth)
    share = np.divide(own, scale, out=np.zeros(own.shape), where=np.isfinite(own) & (scale > 0))
    return np.asarray((share.max(0, initial=0.0) if share.ndim else share) * scale)


def _blurred(truth: Array, own: Array) -> Array:
    """The same, but of numbers that FP32 gets wrong by more than `MOST_EXPLAINED`, the most of all in that image.

    What FP32 keeps of such a slice may be a single value (a normalization of numbers that it cannot tell apart), which
    is exact in all draws or off by a whole step. They are left out, as the original has them no more right; an error
    beyond all rounding of that image is none.
    """
    inner = tuple(range(1, own.ndim))
    most = np.where(np.isfinite(own), own, 0.0).max(inner, keepdims=True, initial=0.0)
    return np.where(own > MOST_EXPLAINED * neighborhood(truth), np.maximum(own, most), own)


def _rounded_anew(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, float]:
    """The constants of half precision that went into others, by name, and how far a rounding moves those."""
    halves, left = (
        {name: weight for name, weight in constants_of(model.graph).items() if weight.data_type in HALVES}
        for model in (before, after)
    )
    kept = {_numbers(weight) for weight in left.values()}
    return {name: HALVES[weight.data_type][1] for name, weight in halves.items() if _numbers(weight) not in kept}


def _made(before: onnx.ModelProto, after: onnx.ModelProto) -> Collection[str]:
    """The constants that a fold computed and rounded, by name; a single number may be one."""
    given, made = constants_of(before.graph), constants_of(after.graph)
    return {
        name
        for name, weight in made.items()
        if weight.data_type
        and not (
            name in given and given[name].data_type == weight.data_type and _numbers(given[name]) == _numbers(weight)
        )
    }


def _numbers(weight: onnx.TensorProto) -> tuple[int, bytes]:
    from onnx import numpy_helper

    return weight.data_type, numpy_helper.to_array(weight).tobytes()


def _require_opened(source: Path, graph: Evaluated, *, folded: bool = False) -> None:
    """Refuse a graph that ONNX Runtime does not load."""
    try:
        graph.session  # noqa: B018
    except Refused as error:
        raise _not_loaded(source, graph.model, error.message, folded=folded) from error


def _not_loaded(source: Path, model: onnx.ModelProto, message: str, *, folded: bool = False) -> Refused:
    """What is raised where ONNX Runtime does not load a graph, by the message of its engine."""
    why = message.partition(": ")[2].removesuffix(".")
    defect = "This is a defect of repaconv; please report it with `repaconv inspect` of the file."
    return Refused(
        f"ONNX Runtime does not load {'the fold of ' * folded}{source}: {why}.",
        hint=defect if folded else f"{_how_to_load(model, why)} Without running it, nothing could be verified.",
        code="onnx.rewrite" if folded else "onnx.unloadable",
    )


def _how_to_load(model: onnx.ModelProto, why: str) -> str:
    """What to do about a graph that ONNX Runtime does not load, by what it says."""
    if "not a registered function" in why or "No Op registered" in why:
        return (
            "This ONNX Runtime has no such operator: write it with standard ones, or fold what is before and after it."
        )
    if "guarantees* support" in why:
        return "Its opset is newer than this ONNX Runtime: update that, or export it again with a lower opset."
    if "IR version" in why:
        return "Its file format is newer than this ONNX Runtime: update that, or write a lower model.ir_version."
    if "same node name" in why:
        return "Give each node a name of its own, or none."
    if "Could not find an implementation" in why:
        if (opset := opset_of(model)) < OLDEST_IN_FULL:
            return (
                f"The graph is of opset {opset}, of which it lacks some operators: export it for opset {OLDEST_OPSET} "
                f"or newer, or convert it by onnx.version_converter.convert_version(model, {OLDEST_OPSET})."
            )
        double = any(value.type.tensor_type.elem_type == DOUBLE for value in model.graph.input)
        return (
            "It has few operators in float64: export the network in float32, net.float()."
            if double
            else "It lacks this operator in this type: export it in float32, or for another opset."
        )
    return "Export it again; `repaconv inspect` shows what it holds."


def rounds_worse(links: tuple[Link, ...]) -> bool:
    """Whether all that failed differs in FP32 alone, and the fold in float64 equals the original."""
    failed = [link for link in links if link.verdict == "failed"]
    return bool(failed) and all(
        link.reason == "exceeds_tolerance" and link.figures.error_in_float64 is not None for link in failed
    )


def not_equal(source: Path, links: tuple[Link, ...]) -> GateFailed:
    """What is raised where a link failed."""
    worst = next(link for link in links if link.verdict == "failed")
    return GateFailed(
        f"the folded graph does not compute what {source} does ({worst.candidate.removeprefix(FOLDED + ', ')}: "
        f"{worst.note}); nothing was written.",
        hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
        code="fold.not-equal",
    )

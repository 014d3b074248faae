"""Verify a folded graph: run it and the original graph on probe inputs, and compare every output.

1. All outputs are compared in FP32, by the tolerance alone. Those that pass are verified.
2. The other outputs are compared in float64, if the graph can be evaluated in float64. Three things must hold:

   - The algebra is right: the fold in float64, before its weights are rounded, equals the original in float64 up to
     `ALGEBRA_RTOL`.
   - The graph was written correctly: it is the fold in float64 with every constant rounded to FP32. If it is not
     exactly that, or if FP32 shows nothing of what it computes, the written graph is evaluated in float64, too. It may
     differ from the original by no more than the rounding of its weights explains.
   - It rounds no worse: in FP32, the folded graph is no further from the original in float64 than the original in FP32
     is, times a stated factor (`rounding.MEASURED_TIMES`).

   Evaluation in float64 takes longer than everything else, so that it first runs on some of the inputs only: on the
   smallest one, and on those for which FP32 does not show that the outputs are equal. An output that does not pass on
   these inputs is evaluated on all inputs.
3. If the graph cannot be evaluated in float64, rounding is estimated: the original graph runs with slightly moved
   weights and inputs, and the folded graph may differ by as much as these runs do, times a stated factor
   (`rounding.JITTERED_TIMES`).
4. An output that is equal in float64 and differs in FP32 is compared once more. Both graphs then continue with the
   choices (TopK) that the original makes in FP32 (`cut_at_discrete_operators`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core.errors import EnvironmentProblem, GateFailed, Refused, RepaconvError, first_line
from repaconv.core.memory_release import freed_memory_kept
from repaconv.engines.contract import Array, Feeds
from repaconv.graph.float64_rewriting import DOUBLE, Weights, is_only_rounded
from repaconv.graph.graph_without_weights import inferred_element_types
from repaconv.graph.invalid_graphs import misfit
from repaconv.graph.onnx_files import constants_of, opset_of
from repaconv.graph.operator_facts import OLDEST_OPSET
from repaconv.results import Figures, Link, Tolerance
from repaconv.verification.comparison import (
    ChannelSizes,
    Comparison,
    PerNeighborhood,
    neighborhood,
    run_both,
    with_explained_limit,
)
from repaconv.verification.cut_at_discrete_operators import cut_at_choices
from repaconv.verification.float64_evaluator_check import differing_operators
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.graph_with_cached_outputs import Evaluated
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
"""Reasons of a link that leave open whether two outputs are equal; see also `_rounding_may_choose`."""


@freed_memory_kept()
def verification_links(
    source: Path,
    before: Evaluated,
    after: Evaluated,
    labels: tuple[str, str] = (GIVEN, FOLDED),
    reverted: Collection[str] = (),
    *,
    few: bool = False,
    unverified: bool = False,
) -> tuple[Link, ...]:
    """Compare every output of two graphs under ONNX Runtime, and return one link for each output.

    Both graphs run in FP32, also if their weights are stored in half precision. A difference is allowed only as far as
    the rounding of the folded weights explains it. A graph whose weights are in half precision also runs in that
    precision, if the runtime can run it, because numbers might overflow there.

    Args:
        source: The graph's file, for messages.
        before: The original graph.
        after: The graph that replaces it.
        labels: The names of the two graphs in the links.
        reverted: The rewrites that were reverted; see `repaconv.rewrites.fold.fold_pipeline.without`.
        few: Compare one input of each size only, at the usual gain and in FP32 alone.
        unverified: Return the links also if nothing could be compared.

    Raises:
        Refused: If the original graph does not run, or if nothing could be compared.
    """
    from repaconv.verification.probe_inputs import Unrunnable

    deep = {"onnx": depth_reason(depth_of(before.model))}
    allowed = tolerance("onnx", usual=usual_rtols(before.model), reasons=deep)
    coarse = _weights_rounded_to_half_again(before.model, after.model)
    try:
        links = _compared(source, before.single, after.single, "onnx", allowed, coarse, labels, reverted, few=few)
        if labels[1] == FOLDED and not coarse and rounds_worse(links):
            links = _with_choices_of_original(source, before.single, after.single, allowed, links, reverted)
    except Unrunnable as error:
        raise unrunnable(source, before.model, error) from error
    if not any(link.verdict in ("passed", "failed") for link in links):
        if unverified:
            return links
        raise Refused(
            f"no output of {source} could be compared: {links[0].note if links else 'it has none'}.",
            hint="Nothing was verified, so nothing was written. Give inputs on which the outputs differ with --inputs "
            "FILE.npz, or a graph whose outputs are tensors of numbers that depend on its inputs. --force writes the "
            "fold as not verified.",
            code="fold.not-verified",
        )
    links += _links_in_half_precision(source, before, after) if labels[1] == FOLDED else ()
    for graph in (before, after):
        graph.single.close()
        graph.close()
    return links


def _with_choices_of_original(
    source: Path,
    before: Evaluated,
    after: Evaluated,
    allowed: Tolerance,
    links: tuple[Link, ...],
    reverted: Collection[str],
) -> tuple[Link, ...]:
    """Pass the failed links if both graphs compute the same after the same choices; else return the links unchanged.

    The failed outputs are known to be equal in float64, both as folded and as written. What remains is that FP32
    rounding chooses other rows. The values that the choices are made from are compared by the same rules.
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
    return equal.model_copy(update={"metrics": None, "tolerance": None})  # they are of numbers after other choices


def usual_rtols(model: onnx.ModelProto) -> dict[str, float]:
    """Return the relative tolerance of every link, for a graph with as many layers as this one."""
    return exact_rtols(depth_of(model))


def depth_of(model: onnx.ModelProto) -> int:
    """Return the number of blocks for the tolerances: six layers with weights count as one block."""
    return sum(node.op_type in ("MatMul", "Gemm", "Conv") for node in model.graph.node) // 6


def unrunnable(source: Path, model: onnx.ModelProto, error: Unrunnable) -> RepaconvError:
    """Return the error to raise if no inputs were found on which a graph runs."""
    if isinstance(error.__cause__, MemoryError):
        return EnvironmentProblem(
            f"there is not enough memory to run {source}: {first_line(error)}.",
            hint="Export it for smaller inputs, or run it on a machine with more memory.",
            code="environment.memory",
        )
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
        if error.helped_by_sample
        else "Without running it, nothing could be verified. Export it with other inputs.",
        code="onnx.unrunnable",
    )


def _links_in_half_precision(source: Path, before: Evaluated, after: Evaluated) -> tuple[Link, ...]:
    """Compare the graphs in the half precision of their weights.

    Returns no links if no weight is in half precision, or if the runtime cannot run the graph in that precision.
    """
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
    labels: tuple[str, str],
    reverted: Collection[str] = (),
    *,
    few: bool = False,
) -> tuple[Link, ...]:
    """Return a link for every output. Raises Unrunnable if no probe inputs are found."""
    _require_opened(source, before)
    probes = replace(before.probes, more=tuple) if few else before.probes
    with suppress(Exception):  # any exception of the runtime; the comparison raises it again
        for each in probes.feeds:
            before.run(each)
    before.close()  # each open session is as large as its weights
    _require_opened(source, after, folded=True)
    return _GraphComparison(before, after, probes, name, allowed, coarse, labels, reverted).links(fp32_alone=few)


def _differing_outputs(links: Mapping[str, Link]) -> set[str]:
    """Return the outputs that differ by more than is allowed so far."""
    return {output for output, link in links.items() if link.verdict == "failed" or link.reason == "rounding_too_large"}


def _constant_outputs(links: Mapping[str, Link]) -> set[str]:
    return {output for output, link in links.items() if link.reason == "constant_output"}


class _GraphComparison:
    """Two graphs that are compared on probes.

    Attributes:
        coarse: The names of weights that the fold rounded to half precision again, and how far that moves each.
        reverted: The rewrites that were reverted. The fold in float64 leaves them out, too.
        moved: The original graph with moved weights and inputs. Each opens its session when it first runs.
        moved_written: The folded graph in float64 with moved weights.
        chosen: The inputs that are evaluated in float64.
    """

    doubt = ""
    """Which operators of the original compute something else in float64 than under ONNX Runtime; empty if none does."""

    def __init__(
        self,
        before: Evaluated,
        after: Evaluated,
        probes: Probes,
        name: str,
        allowed: Tolerance,
        coarse: Mapping[str, float],
        labels: tuple[str, str],
        reverted: Collection[str],
    ) -> None:
        from repaconv.verification.probe_inputs import input_independent_outputs

        self.before, self.after, self.probes = before, after, probes
        self.name, self.allowed, self.coarse, self.labels = name, allowed, coarse, labels
        self.reverted = reverted
        self.fixed, self._anew = input_independent_outputs(before.model), _constants_of_fold(before.model, after.model)
        self.chosen: Sequence[Feeds] = probes.feeds
        self._prepared_for: Sequence[Feeds] = ()

    def _prepare_moved_graphs(self, feeds: Sequence[Feeds]) -> None:
        """Prepare the graphs with moved weights. None runs before a result of it is needed; see `Jittered`."""
        if feeds is self._prepared_for:
            return
        written = partial(Jittered, self.after, WRITTEN_MOVED, anew=self._anew, double=True)
        given = partial(Jittered, self.before, JITTER_SHARE * (self.allowed.rtol or 0.0))
        self.moved_written = [written(seed, feeds, {}, (self.before,)) for seed in range(ROUNDING_SAMPLES)]
        self.moved = [given(seed, feeds, self.coarse, (self.after,)) for seed in range(ROUNDING_SAMPLES)]
        for one in (*self.moved, *self.moved_written):
            one.others += [other for other in self.moved if other is not one]
        self._prepared_for = feeds

    def links(self, *, fp32_alone: bool = False) -> tuple[Link, ...]:
        """Return a link for every output.

        Weights that were rounded to half precision again move the folded graph further than FP32 rounding does. This
        is measured by moving the weights, so that float64 comes last for such a graph.
        """
        found = self._by_output(run_both(self.before, self.after, self.probes.feeds, self._comparison()))
        if fp32_alone:
            return tuple(found.values())
        if self.coarse:
            found |= self._by_jitter(_differing_outputs(found))
            found |= self._in_float64(_differing_outputs(found), _constant_outputs(found))
        else:
            in_float64 = self._in_float64(_differing_outputs(found), _constant_outputs(found))
            found |= in_float64
            found |= self._by_jitter(_differing_outputs(found) - in_float64.keys())
        doubted = _differing_outputs(found) if self.doubt else set()
        return tuple(link.noted(self.doubt) if output in doubted else link for output, link in found.items())

    def _comparison(
        self,
        allowed: Tolerance | None = None,
        vague: float = MOST_EXPLAINED,
        channels: ChannelSizes | None = None,
        fixed: Collection[str] = (),
    ) -> Comparison:
        allowed, fixed = allowed or self.allowed, {*self.fixed, *fixed}
        scale = PerNeighborhood
        return Comparison(self.labels[1], allowed, None, scale=scale, fixed=fixed, vague=vague, channels=channels)

    def _by_output(self, found: Comparison) -> dict[str, Link]:
        return dict(zip(found.outputs, found.links(self.name, self.labels[0], self.probes.description), strict=True))

    def _by_jitter(self, doubted: Collection[str]) -> dict[str, Link]:
        """Compare the doubted outputs, allowing as much as moved weights and inputs move the original graph."""
        if not doubted:
            return {}
        self._prepare_moved_graphs(self.probes.feeds)
        noises = [LOSSY[link][1] for link, by in HALVES.values() if by in self.coarse.values()]
        found = self._comparison(vague=max([MOST_EXPLAINED, *noises]))
        run_both(self.before, self.after, self.probes.feeds, found, partial(jitter_rounding, self.moved))
        return {output: link for output, link in self._by_output(found).items() if output in doubted}

    # --- in float64

    @cached_property
    def _channels(self) -> ChannelSizes:
        return ChannelSizes(map(self.before.run, self.probes.feeds))

    @property
    def _others(self) -> list[Feeds]:
        """The inputs that are compared in FP32 alone."""
        return [each for each in self.probes.feeds if all(each is not one for one in self.chosen)]

    @property
    def _inputs_text(self) -> str:
        """Describe the inputs, and how many of them are evaluated in float64."""
        others = (
            f"{len(self.chosen)} of {len(self.probes.feeds)} inputs also computed in float64" if self._others else ""
        )
        return "; ".join(filter(None, [others, self.probes.description]))

    def _inputs_for_float64(self, differ: Collection[str], constant: Collection[str]) -> Sequence[Feeds]:
        """Return the smallest input, and the inputs for which FP32 does not show that the outputs are equal.

        All inputs are returned for constant outputs: how far inputs move them in float64 is only known from all inputs.
        """
        feeds = self.probes.feeds
        if constant or self.coarse:
            return feeds

        def shows_difference(each: Feeds) -> bool:
            found = run_both(self.before, self.after, [each], self._comparison(channels=self._channels))
            return not _differing_outputs(self._by_output(found)).isdisjoint(differ)

        smallest = min(feeds, key=lambda each: sum(array.size for array in each.values()))
        found = [each for each in feeds if each is smallest or shows_difference(each)]
        return feeds if len(found) == len(feeds) else found

    def _in_float64(self, differ: Collection[str], constant: Collection[str]) -> dict[str, Link]:
        """Return the links of the outputs that can be compared in float64.

        If the chosen inputs do not show that an output is equal, all inputs are evaluated. Only another input may show
        that the output has finite numbers, or that rounding chooses other rows.
        """
        if self.name != "onnx" or not (differ or constant):
            return {}
        self.chosen = self._inputs_for_float64(differ, constant)
        in_float64 = self._links_in_float64(differ, constant)
        if self._others and not self.doubt and not all(_is_equal(in_float64.get(output)) for output in differ):
            self.chosen = self.probes.feeds
            in_float64 = self._links_in_float64(differ, constant)
        return in_float64

    def _links_in_float64(self, differ: Collection[str], constant: Collection[str]) -> dict[str, Link]:
        """Return the same links, for the chosen inputs only."""
        feeds = self.chosen
        self._prepare_moved_graphs(feeds)
        self.before.close()
        self.after.close()
        try:
            with self.before.float64.weights_kept():
                self.doubt = differing_operators(self.before.model, self.before.float64, *feeds)
                if self.doubt:
                    return {}
                self.before.truths(feeds)
            self.before.close()
            exact = self._exact()
            if exact is None and (self.coarse or self._others):
                return {}
            folded = exact.run_all(feeds) if exact else [{} for _ in feeds]
            del exact  # as large as the weights in float64
            calls = [self._call(*each) for each in zip(feeds, folded, strict=True)]
            answers = {output: self._of_output(output, [call.of(output) for call in calls]) for output in differ}
            answers |= {output: self._by_movement(output, [call.of(output) for call in calls]) for output in constant}
        except Exception:  # evaluation in float64 raises many classes; without it, nothing more is known
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
        """Return the output if only some inputs are evaluated in float64: FP32 shows on all of them that it changes."""
        return [output] if self._others else []

    def _exact(self) -> Float64 | None:
        """Return the candidate in float64, for a fold the fold that is computed in float64; None if it does not run."""
        try:
            if self.labels[1] != FOLDED:
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
        """Return the link of one output in float64; None if its numbers cannot be compared."""
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
        written_is_right = rounded or written is not None
        found, link = self._compared_in_fp32(output, calls, own, algebra, written_is_right=written_is_right)
        if self._others and not written_is_right:
            return None
        # FP32 does not show that the written graph computes the same.
        if rounded and (_rounding_may_choose(link) or link.reason in UNDECIDED):
            written = self._written(output, calls)
            if written is None and self._others:
                return None
            if written is not None and written.verdict == "failed":
                return written
        # rounding may choose other numbers, e.g. the boxes that a detector keeps
        chosen = written is not None and written.verdict == "passed" and _rounding_may_choose(link)
        if self._others or algebra is None or not (chosen or link.reason in UNDECIDED):
            return link
        link = link.because("equal_in_float64")
        if chosen or link.figures.left_out == link.figures.compared:  # nothing was measured in FP32
            return link.model_copy(update={"metrics": None, "tolerance": None})
        metrics = found.metrics(output)
        return link.model_copy(update={"metrics": metrics, "tolerance": with_explained_limit(found.allowed, metrics)})

    def _compared_in_fp32(
        self,
        output: str,
        calls: Sequence[_OneOutput],
        own: Sequence[Array],
        algebra: Link | None,
        *,
        written_is_right: bool,
    ) -> tuple[Comparison, Link]:
        """Compare the candidate in FP32 with the original in float64, and count what rounding explains as no fault.

        Args:
            output: The output's name.
            calls: The output in each call.
            own: How far the original's own rounding moves the output of each call.
            algebra: The link of `_algebra`; None for a candidate that is not a fold.
            written_is_right: Whether the written graph computes the same in float64.
        """
        is_real = calls[0].truth.dtype.kind == "f"
        allowed = max(self.allowed.rtol or 0.0, HALF_ROUNDINGS * max(self.coarse.values(), default=0.0))
        channels = self._channels if self._others else None
        found = self._comparison(self.allowed.model_copy(update={"rtol": allowed}), channels=channels)
        for call, moved in zip(calls, own, strict=True):
            if not is_real and algebra is not None and (written_is_right or self.coarse):
                moved = np.where(call.folded != call.truth, inf, moved)  # equal in float64: FP32 decides otherwise
            elif written_is_right:
                moved = _with_largest_error_where_vague(call.truth, moved)
            right = {output: call.truth}
            rounding = Rounding(MEASURED, partial(self._movements, output, call, moved))
            found.add({output: call.folded.astype(call.truth.dtype)}, right, rounding=rounding)
        for feeds in self._others:
            found.add({output: self.after.run(feeds)[output]}, {output: self.before.run(feeds)[output]})
        exactly = algebra.metrics.max_rel_error if algebra is not None and algebra.metrics else None
        figures = {"error_in_float64": exactly, "unfused": sum(call.unfused for call in calls) or None}
        (link,) = found.links(self.name, f"{self.labels[0]}, float64", self._inputs_text, **figures)
        return found, link

    def _movements(self, output: str, call: _OneOutput, own: Array) -> Iterator[Movement]:
        """Yield the original's error in FP32, then how far moved weights and inputs move it.

        The error alone may be small by chance.
        """
        yield {output: own}
        for other in self.moved:
            moved = movement(other.run(call.feeds), {output: call.original})
            yield {name: JITTERED_TIMES / MEASURED.times * array for name, array in moved.items()}
        yield from self._errors_of_moved_graphs(output, call)

    def _errors_of_moved_graphs(self, output: str, call: _OneOutput) -> Iterator[Movement]:
        """Yield the FP32 errors of the original with moved weights and inputs, as further samples of its own error.

        They include rounding inside operations that read no weight. Errors on other probes are no samples: the original
        may be conditioned differently there.
        """
        for other in self.moved if call.truth.dtype.kind == "f" else ():
            found, exact = other.run(call.feeds)[output], other.truth(call.feeds)[output]
            if found.shape == exact.shape == call.truth.shape:
                yield {output: _own_rounding(found, exact)}

    def _algebra(self, output: str, calls: Sequence[_OneOutput], own: Sequence[Array]) -> Link:
        """Compare the fold computed in float64 with the original in float64."""
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
            yield from self._errors_of_moved_graphs(output, call)

        found = self._comparison(Tolerance(kind="exact", rtol=ALGEBRA_RTOL), fixed=self._fixed(output))
        for call, moved in zip(calls, own, strict=True):
            rounding = Rounding(ALGEBRAIC, partial(movements, call, moved))
            found.add({output: call.exact}, {output: call.truth}, rounding=rounding)
        detail = "computed in float64"
        (link,) = found.links(self.name, f"{self.labels[0]}, float64", self._inputs_text, detail=detail)
        return link

    def _written(self, output: str, calls: Sequence[_OneOutput]) -> Link | None:
        """Compare the written graph in float64 with the original; None if it does not run or is in half precision."""
        if self.coarse:
            return None
        found = self._comparison(fixed=self._fixed(output))
        try:
            self.after.truths([call.feeds for call in calls])
            for call in calls:
                written, rounding = self._as_written(output, call)
                found.add({output: written}, {output: call.truth}, rounding=rounding)
        except Exception:  # evaluation in float64 raises many classes
            return None
        detail = "the folded graph as it was written, computed in float64"
        unfused = sum(call.unfused for call in calls) or None
        (link,) = found.links(
            self.name, f"{self.labels[0]}, float64", self._inputs_text, detail=detail, unfused=unfused
        )
        if link.verdict == "failed" and self._rounding_chose(link, output, calls):
            return link.because("equal_in_float64")
        return link

    @cached_property
    def _is_only_rounded(self) -> bool:
        """Whether the folded graph is the fold in float64, every constant rounded to float32, and nothing else."""
        known = self.after.in_float64
        return known is not None and is_only_rounded(self.after.model, known)

    def _rounding_chose(self, link: Link, output: str, calls: Sequence[_OneOutput]) -> bool:
        """Whether the written graph differs only because the rounding of its weights chooses other numbers.

        Moved weights need not choose the same numbers as the rounded weights do. Therefore the weights of the fold in
        float64 are rounded: evaluated in float64, that must be the written graph.
        """
        if not _rounding_may_choose(link):
            return False
        try:
            rounded = Float64(*_rounded(*self._folded_in_float64()))
            found = self._comparison(Tolerance(kind="exact", rtol=ALGEBRA_RTOL), fixed=self._fixed(output))
            for call, right in zip(calls, rounded.run_all([call.feeds for call in calls]), strict=True):
                found.add({output: self.after.truth(call.feeds)[output]}, {output: right[output]})
        except Exception:  # evaluation in float64 raises many classes
            return False
        return found.links("", "", "")[0].reason == "within_tolerance"

    def _as_written(self, output: str, call: _OneOutput) -> tuple[Array, Rounding]:
        """Return the output of the written graph in float64, and how far the rounding of its weights moves it.

        A graph that is only rounded differs from the fold in float64 by the rounding of its weights. Up to the
        original's own error in FP32, this difference is counted as rounding without moving any weights.
        """
        written = self.after.truth(call.feeds)[output]

        def known() -> Iterator[Movement]:
            if call.exact is not None and call.truth.dtype.kind == "f" and self._is_only_rounded:
                own = _own_rounding(call.original, call.truth)
                yield {output: np.minimum(apart(call.exact, written), own)}

        return written, jitter_rounding(self.moved_written, call.feeds, {output: written}, WRITTEN, known())

    def _written_within(self, limit: float, output: str, call: _OneOutput) -> bool:
        """Whether every error of the written graph is below the limit or explained by the rounding of its weights."""
        written, rounding = self._as_written(output, call)
        off, explained = apart(written, call.truth), np.zeros(written.shape)
        for moved in chain([explained], rounding.of(output)):  # each takes as long as the network
            explained = np.maximum(explained, moved if moved.shape == written.shape else 0.0)
            if float(np.where(off > WRITTEN.times * explained, off, 0.0).max(initial=0.0)) < limit:
                return True
        return False

    def _by_movement(self, output: str, calls: Sequence[_OneOutput]) -> Link | None:
        """Compare an output that is constant in FP32 and changes in float64, relative to how far it changes there.

        A change that float64 may have rounded into it shows nothing.
        """
        if not all(call.comparable and call.exact is not None and call.truth.dtype.kind == "f" for call in calls):
            return None
        first = {call.truth.shape: call.truth for call in reversed(calls)}
        moves = off = 0.0
        for call in calls:
            rounded = ALGEBRA_RTOL * neighborhood(call.truth)
            for other in (first[call.truth.shape], *([call.truth[:1]] if call.truth.ndim else [])):
                moved = apart(call.truth, other)
                moves = max(moves, float(np.where(moved > rounded, moved, 0.0).max(initial=0.0)))
            off = max(off, float(apart(call.exact, call.truth).max(initial=0.0)))
        least = MOVED_SHARE * moves
        if not (np.isfinite(moves) and off < least):
            return None
        if not self.coarse and not all(self._written_within(least, output, call) for call in calls):
            return None
        names = {"name": self.name, "reference": f"{self.labels[0]}, float64", "candidate": self.labels[1]}
        figures = Figures(error_in_float64=off / moves)
        return Link.concluded("equal_in_float64", figures=figures, note=self.probes.description, **names)


class _Call(NamedTuple):
    """All outputs on one probe.

    Attributes:
        feeds: The inputs.
        original: Outputs of the original in FP32.
        folded: Outputs of the folded graph in FP32.
        truth: Outputs of the original in float64.
        exact: Outputs of the fold in float64; empty if it does not run.
        unfused: Outputs that are infinite only because of the runtime's own fusions, e.g. a quotient of two saturated
            sigmoids. Their ``folded`` is computed without these fusions.
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
    """The same values for one output; see `_Call`."""

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
    """Whether an output is infinite or NaN where the true output is finite."""
    real = all(isinstance(one, np.ndarray) and one.dtype.kind == "f" for one in (found, truth))
    return real and found.shape == truth.shape and bool((np.isfinite(truth) & ~np.isfinite(found)).any())


def _is_equal(link: Link | None) -> bool:
    """Whether numbers were compared and are equal except for rounding."""
    return link is not None and link.reason in ("within_tolerance", "explained_by_rounding")


def _rounding_may_choose(link: Link) -> bool:
    """Whether rounding may have chosen other numbers: it moves some by as much as the largest number next to them."""
    return link.reason == "exceeds_tolerance" and (link.figures.rounding or 0.0) >= 1.0


def _rounded(model: onnx.ModelProto, weights: Weights) -> tuple[onnx.ModelProto, Weights]:
    """Return a graph in float64 whose weights are rounded to float32."""
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
    """Return the error of the original in FP32 against itself in float64, on one probe.

    A number may be exact by chance. Its error is therefore the largest of this number over the images of the probe,
    relative to the numbers next to it.
    """
    own = movement({"": single}, {"": truth}, discrete=True)[""]
    if truth.dtype.kind != "f":
        return own
    scale = neighborhood(truth)
    share = np.divide(own, scale, out=np.zeros(own.shape), where=np.isfinite(own) & (scale > 0))
    return np.asarray((share.max(0, initial=0.0) if share.ndim else share) * scale)


def _with_largest_error_where_vague(truth: Array, own: Array) -> Array:
    """Return the errors, with those above `MOST_EXPLAINED` replaced by the largest error of their image.

    The comparison leaves out numbers with such large errors, because the original has them no more right. FP32 may keep
    a single value of such a slice, e.g. of a normalization of numbers that it cannot tell apart. That value is exact in
    all samples or off by a whole step. An error beyond the largest error of the image still fails.
    """
    inner = tuple(range(1, own.ndim))
    most = np.where(np.isfinite(own), own, 0.0).max(inner, keepdims=True, initial=0.0)
    return np.where(own > MOST_EXPLAINED * neighborhood(truth), np.maximum(own, most), own)


def _weights_rounded_to_half_again(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, float]:
    """Return the constants in half precision that the fold merged into others, and how far rounding moves these."""
    halves, left = (
        {name: weight for name, weight in constants_of(model.graph).items() if weight.data_type in HALVES}
        for model in (before, after)
    )
    kept = {_numbers(weight) for weight in left.values()}
    return {name: HALVES[weight.data_type][1] for name, weight in halves.items() if _numbers(weight) not in kept}


def _constants_of_fold(before: onnx.ModelProto, after: onnx.ModelProto) -> Collection[str]:
    """Return the names of the constants that the fold computed and rounded; a constant may be a single number."""
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


def require_runnable(source: Path, graph: Evaluated) -> None:
    """Refuse a graph that ONNX Runtime does not load, or does not run on any inputs that were found, before it folds.

    The inputs that were found, and the outputs on them, are kept for the comparison, and so is the session of a graph
    that is not large.

    Raises:
        Refused: If it does not run.
        EnvironmentProblem: If there is not enough memory to run it.
    """
    from repaconv.verification.probe_inputs import Unrunnable

    _require_opened(source, graph)
    try:
        graph.probes  # noqa: B018
    except Unrunnable as error:
        raise unrunnable(source, graph.model, error) from error
    finally:
        graph.release_while_folding()


def _require_opened(source: Path, graph: Evaluated, *, folded: bool = False) -> None:
    """Refuse a graph that ONNX Runtime does not load."""
    try:
        graph.session  # noqa: B018
    except Refused as error:
        raise _not_loaded(source, graph.model, error.message, folded=folded) from error


def _not_loaded(source: Path, model: onnx.ModelProto, message: str, *, folded: bool = False) -> Refused:
    """Return the error to raise if ONNX Runtime does not load a graph; ``message`` is that of its engine."""
    if not folded and (invalid := checker_error(model)):
        return Refused(
            f"{source} is not valid ONNX: {invalid}; ONNX Runtime does not load it either.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        )
    why = message.partition(": ")[2].removesuffix(".")
    defect = "This is a defect of repaconv; please report it with `repaconv inspect` of the file."
    return Refused(
        f"ONNX Runtime does not load {'the fold of ' * folded}{source}: {why}.",
        hint=defect if folded else f"{_how_to_load(model, why)} Without running it, nothing could be verified.",
        code="onnx.rewrite" if folded else "onnx.unloadable",
    )


def _how_to_load(model: onnx.ModelProto, why: str) -> str:
    """Return what to do about a graph that ONNX Runtime does not load, by the reason that it gives."""
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
    if "smaller than kernel" in why:
        return "Its pools cannot be padded by a whole window: export the padding as a Pad before the pool."
    if "Could not find an implementation" in why:
        if (opset := opset_of(model)) < OLDEST_IN_FULL:
            return (
                f"The graph is of opset {opset}, of which it lacks some operators: export it for opset {OLDEST_OPSET} "
                f"or newer, or convert it by onnx.version_converter.convert_version(model, {OLDEST_OPSET})."
            )
        if any(value.type.tensor_type.elem_type == DOUBLE for value in model.graph.input):
            return "It has few operators in float64: export the network in float32, net.float()."
        if _reads_float64(model, why):
            return (
                "What it reads became float64 within the network, which torch's older exporter does: export it by "
                "torch.onnx.export(..., dynamo=True)."
            )
        return "It lacks this operator in this type: export it in float32, or for another opset."
    return "Export it again; `repaconv inspect` shows what it holds."


def _reads_float64(model: onnx.ModelProto, why: str) -> bool:
    """Whether the node that ONNX Runtime names in its reason reads numbers in float64."""
    named = re.search(r"node with name '(.+?)'", why)
    read = {name for node in model.graph.node if named and node.name == named[1] for name in node.input}
    types = inferred_element_types(model) if read else {}
    return any(types.get(name) == DOUBLE for name in read)


def rounds_worse(links: tuple[Link, ...]) -> bool:
    """Whether every failed output differs in FP32 only, while the fold in float64 equals the original."""
    failed = [link for link in links if link.verdict == "failed"]
    return bool(failed) and all(
        link.reason == "exceeds_tolerance" and link.figures.error_in_float64 is not None for link in failed
    )


def not_equal(source: Path, links: tuple[Link, ...]) -> GateFailed:
    """Return the error to raise if a link failed."""
    worst = next(link for link in links if link.verdict == "failed")
    return GateFailed(
        f"the folded graph does not compute what {source} does ({worst.candidate.removeprefix(FOLDED + ', ')}: "
        f"{worst.note}); nothing was written.",
        hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
        code="fold.not-equal",
    )

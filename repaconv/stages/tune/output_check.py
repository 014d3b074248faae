"""Whether a configuration of `tune` computes the baseline's outputs, on inputs that would show a fault.

Not every input shows a fault. On noise, the scores of a text detector are at most 1e-5. ONNX Runtime's sigmoid computes
with numbers near 1 and is off by 1e-7, which is 1% of such a score. A saturated score is 1 whatever the weights are.
Batches of inputs are therefore compared one after the other, until one decides:

1. the user's images;
2. random inputs;
3. random images with larger and smaller numbers (`probe_inputs.PROBE_GAINS`).

A difference larger than the tolerance and than rounding rejects a configuration at once. A batch accepts it if its
outputs equal the baseline's, or those of the network in float64, and if the batch shows a planted fault: the baseline
with weights that are moved by 1% has to fail on it. A configuration is rejected if no batch decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import Refused
from repaconv.results import Deployment, ImageSize, Verdict
from repaconv.stages.shared.input_selection import fixed_batch
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.verification.float64_evaluator_check import NEAR_ONE, differing_operators
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.model_runners import FixedBatch, load_onnx
from repaconv.verification.probe_inputs import PROBE_GAINS
from repaconv.verification.rounding import MEASURED, Rounding, apart, moved_weights, movement, network_rounding

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds
    from repaconv.sources.source_model import SourceModel
    from repaconv.verification.input_batches import Batch, Inputs
    from repaconv.verification.model_runners import RunnerWithInputs

PLANTED_FAULT = 0.01
"""By how much the weights of the planted fault are moved, relative to themselves."""
CHECKED_IMAGES = 3
"""Images of a batch on which outputs are compared, unless the batch size is fixed."""

Outputs = Mapping[str, Any]


@dataclass
class OutputCheck:
    """Checks that FP32 configurations give the baseline's outputs; a wrong one is not measured.

    Attributes:
        graphs: The configurations' graphs.
        baseline: The configuration whose outputs are expected.
        given: The user's images or inputs; None for random ones.
    """

    graphs: Candidates
    baseline: Deployment
    given: Inputs | None = None
    _batches: list[ComparedBatch] = field(default_factory=list)

    def refusal(self, deployment: Deployment, session: RunnerWithInputs, batch: int | None) -> Refused | None:
        """Why a configuration may not be used; None if its outputs are right, and for lower precision.

        Args:
            deployment: The configuration.
            session: Runs it.
            batch: The session's batch size, if it is fixed.
        """
        if deployment.precision != "fp32" or (verdict := self.verdict(session, batch)) == "passed":
            return None
        if verdict == "failed":
            return Refused("its outputs differ from those of the baseline.", hint="Do not use it.", code="tune.wrong")
        if deployment == self.baseline:  # what is used without a search
            return None
        return Refused(
            "its outputs on these inputs cannot tell whether they are those of the baseline. Give images that the "
            "network is meant for (--images, --inputs).",
            hint="Give --images or --inputs.",
            code="tune.undecided",
        )

    def verdict(self, session: RunnerWithInputs, batch: int | None) -> Verdict:
        """Whether what a session computes in FP32 is right; *not verified* if no batch of inputs decides."""
        for precisely in (False, True):
            for place, call in enumerate(self._inputs):
                if place == len(self._batches):
                    self._batches.append(ComparedBatch(self.graphs, self.baseline, self._original, call))
                verdict = self._batches[place].verdict(session, batch, precisely=precisely)
                if verdict != "not verified":
                    return verdict
        return "not verified"

    @cached_property
    def _original(self) -> Evaluated:
        """The network's graph without rewrites."""
        import onnx

        return Evaluated(onnx.load(self.graphs.exact(self.baseline.model_copy(update={"rewrites": ()}))))

    @cached_property
    def _inputs(self) -> list[Batch]:
        return list(check_batches(self.graphs.source_model, self.given, self.graphs.image_size))


@dataclass
class ComparedBatch:
    """A batch of inputs on which outputs are compared; what the baseline computes of it is kept.

    Attributes:
        graphs: The configurations' graphs.
        baseline: The configuration whose outputs are expected.
        original: The network's graph without rewrites.
        call: The inputs.
    """

    graphs: Candidates
    baseline: Deployment
    original: Evaluated
    call: Batch

    def verdict(self, session: RunnerWithInputs, batch: int | None, *, precisely: bool) -> Verdict:
        """Return the verdict of a session's outputs; *not verified* if the batch cannot show a difference.

        Args:
            session: Runs the configuration.
            batch: The session's batch size, if it is fixed.
            precisely: Whether outputs are also compared if they are so small that an activation's rounding may hide a
                difference. This takes an evaluation in float64; another batch may decide without one.
        """
        if not self._finite:
            return "not verified"
        found = FixedBatch(session, None if self.call.whole else batch).run(self.call.feeds(session.inputs))
        plain = self._compared(found, self._expected)
        if plain != "failed":
            return "passed" if plain == "passed" and self._shows_fault() else "not verified"
        if not precisely and self._largest_difference(found) <= NEAR_ONE:
            return "not verified"
        verdict = self._compared(found, self._expected, self._rounding)
        if verdict == "passed":
            return verdict if self._shows_fault(self._rounding) else "not verified"
        return "passed" if verdict == "not verified" and precisely and self._is_exact(found) else verdict

    def _largest_difference(self, found: Outputs) -> float:
        """Largest absolute difference from the expected outputs; infinite if shapes differ or a number is missing."""
        every = [np.inf]
        pairs = list(zip(found.values(), self._expected.values(), strict=True))
        if all(np.shape(one) == np.shape(other) for one, other in pairs):
            arrays = [(np.asarray(one, np.float64), np.asarray(other, np.float64)) for one, other in pairs]
            every = [float(apart(one, other).max(initial=0.0)) for one, other in arrays]
        return max(every)

    def _is_exact(self, found: Outputs) -> bool:
        """Whether outputs equal those of the network in float64, in which rounding hides no fault.

        ONNX Runtime's own outputs may round too much to decide, while another runtime rounds less.
        """
        faulty = self._moved(self.original.model)
        if faulty is None or self._exact is None or self._compared(found, self._exact) != "passed":
            return False
        try:
            wrong = Float64(faulty).run(self._feeds)
        except Exception:  # an operator has no float64 evaluation; of many classes
            return False
        return self._compared(wrong, self._exact) == "failed" and not self._doubt()

    def _compared(self, found: Outputs, right: Outputs, rounding: Rounding | None = None) -> Verdict:
        """The verdict on all outputs; *not verified* if rounding hides one of them."""
        from repaconv.verification.comparison import Comparison
        from repaconv.verification.tolerances import tolerance, verdict_of

        found = dict(zip(right, found.values(), strict=True))
        compared = Comparison("form", tolerance("form", usual=self._subject.folded.tolerances))
        compared.add(found, right, whole=self.call.whole, rounding=rounding)
        links = compared.links("form", "default preset")
        hidden = any(link.reason in ("rounding_too_large", "rounding_decides") for link in links)
        verdict = verdict_of(links)
        return "not verified" if verdict == "passed" and hidden else verdict

    def _shows_fault(self, rounding: Rounding | None = None) -> bool:
        """Whether the planted fault fails on this batch; also true if there are no weights, or no real-valued output.

        Integers may stay the same in spite of a fault, so they cannot show one.
        """
        real = any(np.asarray(array).dtype.kind == "f" for array in self._expected.values())
        return not real or self._faulty is None or self._compared(self._faulty, self._expected, rounding) == "failed"

    @cached_property
    def _faulty(self) -> Outputs | None:
        """Outputs of the planted fault; None if there is nothing to move."""
        import onnx

        moved = self._moved(onnx.load(self.graphs.path(self.baseline)))
        return None if moved is None else self._run(load_onnx(moved))

    def _moved(self, model: onnx.ModelProto) -> onnx.ModelProto | None:
        """A graph with moved weights; None if it has none."""
        moved = moved_weights(model, PLANTED_FAULT, seed=0)
        return None if moved == model else moved

    @cached_property
    def _expected(self) -> Outputs:
        return self._run(load_onnx(self.graphs.path(self.baseline)))

    def _run(self, right: RunnerWithInputs) -> Outputs:
        return dict(zip(self._subject.outputs, right.run(self.call.feeds(right.inputs)).values(), strict=True))

    @cached_property
    def _finite(self) -> bool:
        """Whether the baseline's outputs are numbers: a random image with a gain may overflow."""
        arrays = (np.asarray(array) for array in self._expected.values())
        return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")

    @property
    def _subject(self) -> SourceModel:
        return self.graphs.source_model

    @property
    def _feeds(self) -> Feeds:
        return self.call.feeds(self._subject.inputs)

    @cached_property
    def _exact(self) -> Outputs | None:
        """Outputs in float64; None if nothing evaluates the network so.

        The run of a graph has no float64 reference if FP32 is far from it on random inputs, as where outputs are tiny.
        """
        if self._subject.by_module:
            return self._subject.reference.run(self._feeds)
        try:
            return self.original.truth(self._feeds)
        except Exception:  # an operator has no float64 evaluation; of many classes
            return None

    @cached_property
    def _rounding(self) -> Rounding | None:
        exact = self._exact
        if exact is None or self._subject.by_module:
            return None if exact is None else network_rounding(self._subject, self._feeds, exact)
        return Rounding(MEASURED, lambda: [movement(self.original.run(self._feeds), exact)], self._doubt)

    def _doubt(self) -> str:
        """Why the evaluation in float64 is not the network's; empty if it is."""
        if self._subject.by_module:
            return self._subject.reference.float64_doubt(self._feeds)
        return differing_operators(self.original.model, self.original.float64, self._feeds)


def check_batches(source_model: SourceModel, given: Inputs | None, size: ImageSize | None = None) -> Iterator[Batch]:
    """The inputs on which outputs are compared, in this order; see the module.

    Args:
        source_model: The source model.
        given: The user's images or inputs.
        size: (height, width) of random images; the network's usual size when None.
    """
    fixed = fixed_batch(source_model)
    count = fixed or (1 if source_model.folded.whole else CHECKED_IMAGES)
    if given is not None:
        yield _of_given(given, count, fixed)
    drawn = source_model.random_inputs(count, 0, size).piece(0, count)
    yield drawn
    if source_model.folded.image_size is not None and all(array.dtype.kind == "f" for array in drawn.given.values()):
        for gain in PROBE_GAINS:
            yield replace(drawn, given={name: array * array.dtype.type(gain) for name, array in drawn.given.items()})


def _of_given(given: Inputs, count: int, fixed: int | None) -> Batch:
    """Return some of the given images, evenly spread. A fixed batch is filled by repeating them."""
    if given.whole:
        return given.together(fixed).piece(0, 1)
    every = given.shape[0]
    places = [place * every // count for place in range(count)]
    places = places if fixed else sorted(set(places))
    return given.only(places, given.name).piece(0, len(places))

"""Whether a configuration of `tune` computes the baseline's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repaconv.results import Deployment
from repaconv.stages.tune.search import Candidates
from repaconv.verification.model_runners import FixedBatch, load_onnx
from repaconv.verification.rounding import network_rounding

if TYPE_CHECKING:
    from repaconv.engines.contract import Session
    from repaconv.sources.source_model import Subject
    from repaconv.verification.input_batches import Batch


@dataclass
class OutputCheck:
    """Checks that FP32 configurations give the baseline's outputs on one batch; a wrong one is not measured."""

    graphs: Candidates
    baseline: Deployment
    expected: Any = None

    def passes(self, deployment: Deployment, session: Session, batch: int | None) -> bool:
        """Whether the configuration's outputs are right; ``batch`` is the session's fixed batch size. Lower precision
        passes here.
        """
        from repaconv.verification.comparison import Comparison
        from repaconv.verification.tolerances import tolerance, verdict_of

        if deployment.precision != "fp32":
            return True
        subject = self.graphs.subject
        call = output_check_batch(subject)
        if self.expected is None:
            right = load_onnx(self.graphs.path(self.baseline))
            self.expected = right.run(call.feeds(right.inputs))
        found = Comparison("form", tolerance("form", usual=subject.folded.tolerances))
        got = FixedBatch(session, None if call.whole else batch).run(call.feeds(session.inputs))
        rounding = network_rounding(subject, call.feeds(subject.inputs))
        outputs = dict(zip(self.expected, got.values(), strict=True))
        found.add(outputs, self.expected, whole=call.whole, rounding=rounding)
        return verdict_of(found.links("form", "default preset")) == "passed"


def output_check_batch(subject: Subject) -> Batch:
    """Random inputs for checking FP32 configurations: 3 images, the fixed batch, or one call of other inputs."""
    count = subject.folded.batch if isinstance(subject.folded.batch, int) else 1 if subject.folded.whole else 3
    return subject.drawn(count, 0).piece(0, count)

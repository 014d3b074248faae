"""Lower precision as a choice of the tuner: lossy, and only within what the user allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.artefacts import LoweredCandidate, Ratio
from repaconv.errors import UsageProblem
from repaconv.files import write_bytes
from repaconv.orders.stages import TuneOrder
from repaconv.progress import Progress
from repaconv.proof.policy import bounded
from repaconv.proof.runners import load_onnx, named
from repaconv.steps.inputs import Split, choose_inputs
from repaconv.steps.precisions import in_precision
from repaconv.subjects.proved import runnable

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds
    from repaconv.subjects.subject import Subject
    from repaconv.targets import Target

SMALLEST = 0.001
"""The share of images below which a disagreement is not told from none."""


class Lowered(NamedTuple):
    """The fastest precision that is allowed, all that were tried, and the images by which they were judged."""

    precision: str
    rows: tuple[LoweredCandidate, ...]
    images: str


def lowered(
    order: TuneOrder,
    subject: Subject,
    graph: Callable[[str, int], onnx.ModelProto],
    precisions: Sequence[str],
    device: Target,
    *,
    measure: Callable[[Path, Mapping[str, Path]], Mapping[str, Ratio]],
    scratch: Path,
    progress: Progress,
) -> Lowered:
    """Type the winning graph lower, and keep what disagrees with float32 on no more images than that.

    Some images calibrate, the others judge; what does not pass as a link of its precision is out, whatever is allowed.

    Args:
        order: Which images judge, and on what share of them the first class may be another.
        subject: The network.
        graph: The winner's form, as far as a precision keeps it, in no newer opset than that.
        precisions: To try; none for none.
        device: The target.
        measure: Rounds of graphs beside the float32 one.
        scratch: Where graphs go.
        progress: See `Progress`.
    """
    from repaconv.exporters.precision import INT8_OPSET

    if not precisions:
        return Lowered("fp32", (), "")
    given = enough_images(order, subject)
    calibrating, judging = given.calibrating(), list(given.judges())
    newest = device.newest_opset or device.opset
    reference = graph("fp32", newest)
    right = _outputs(reference, judging)
    write_bytes(first := scratch / "fp32.onnx", reference.SerializeToString())
    rows, paths = [], {}
    for precision in precisions:
        progress(f"tune: {precision}", 0, 0)
        model = graph(precision, min(device.opset, INT8_OPSET) if precision == "int8" else newest)
        typed, _ = in_precision(model, precision, calibrating, symmetric="zero-points" in device.forbids)
        outputs = _outputs(runnable(typed, precision), judging)
        rows.append(_judged(precision, outputs, right, allowed=order.max_disagreement or 0.0, decides=subject.decides))
        if not rows[-1].told:
            write_bytes(path := scratch / f"{precision}.onnx", typed.SerializeToString())
            paths[precision] = path
    return _fastest(rows, measure(first, paths) if paths else {}, given.told)


def _judged(
    precision: str,
    outputs: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Any]],
    *,
    allowed: float,
    decides: bool,
) -> LoweredCandidate:
    """A precision by its outputs beside float32's; ``told`` says why it is out, if it is."""
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance

    meter = Meter(tolerance(precision, decides=decides), logits=True)
    for output, expected in zip(outputs, right, strict=True):
        meter.add(*(next(iter(each.values())) for each in (output, expected)))
    link, found = meter.link(precision, "ONNX, float32", f"ONNX, {precision}"), meter.metrics()
    other = found.top1_flips / found.images
    told = "" if link.verdict == "passed" else f"{link.verdict} as a link"
    told = "disagrees with float32 more than allowed" if other > allowed else told
    return LoweredCandidate(precision=precision, images=found.images, disagreement=other, link=link, told=told)


def _fastest(rows: Sequence[LoweredCandidate], ratios: Mapping[str, Ratio], images: str) -> Lowered:
    """Of what is allowed, the fastest that is shown to be faster than float32; else that."""
    rows = [
        row if row.told else row.model_copy(update={"ratio": ratios.get(row.precision), "told": "allowed"})
        for row in rows
    ]
    faster = [row for row in rows if row.ratio is not None and row.ratio.low > 1]
    best = max(faster, key=lambda row: row.ratio.median if row.ratio else 0.0, default=None)
    return Lowered(best.precision if best else "fp32", tuple(rows), images)


def enough_images(order: TuneOrder, subject: Subject) -> Split:
    """The images for lower precision.

    Raises:
        UsageProblem: If those that judge are so few that one of them is more than what is allowed.
    """
    given = Split.of(choose_inputs(subject, inputs=order.inputs, images=order.images))
    allowed = bounded("max_disagreement", order.max_disagreement or 0.0, 1)
    wanted = ceil(1 / max(allowed, SMALLEST))
    if len(given.judging) < wanted:
        raise UsageProblem(
            f"{given.told}: they cannot tell whether no more than {allowed:.2%} get another first class.",
            hint=f"Give {wanted + len(given.fitting)} images or more, or allow more with --max-disagreement.",
            code="tune.too-few",
        )
    return given


def _outputs(model: onnx.ModelProto, calls: list[Feeds]) -> list[Mapping[str, Any]]:
    session = load_onnx(model.SerializeToString())
    names = [port.name for port in session.inputs]
    return [session.run(named(names, call)) for call in calls]

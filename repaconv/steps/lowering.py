"""Lower precision as a choice of the tuner: lossy, and only within what the user allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv import registry
from repaconv.artefacts import FoldArtefact, LoweredCandidate, Ratio
from repaconv.errors import UsageProblem
from repaconv.files import write_bytes
from repaconv.orders.stages import TuneOrder
from repaconv.proof.policy import bounded
from repaconv.steps.common import Progress, image_model
from repaconv.steps.graphs import runnable
from repaconv.steps.inputs import Split, choose_inputs
from repaconv.steps.precisions import in_precision

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

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
    folded: FoldArtefact,
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
        folded: The network.
        graph: The winner's form, as far as a precision keeps it, in no newer opset than that.
        precisions: To try; none for none.
        device: The target.
        measure: Rounds of graphs beside the float32 one.
        scratch: Where graphs go.
        progress: See `Progress`.
    """
    from repaconv.exporters.precision import INT8_OPSET
    from repaconv.proof.runners import decides

    if not precisions:
        return Lowered("fp32", (), "")
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    given = enough_images(order, folded)
    calibrating, judging = given.calibrating(), list(given.judges())
    newest = device.newest_opset or device.opset
    reference = graph("fp32", newest)
    right = _outputs(reference, judging)
    choosing = decides(backbone.deploy(backbone.from_json(folded.config)))
    write_bytes(first := scratch / "fp32.onnx", reference.SerializeToString())
    rows, paths = [], {}
    for precision in precisions:
        progress(f"tune: {precision}", 0, 0)
        model = graph(precision, min(device.opset, INT8_OPSET) if precision == "int8" else newest)
        typed, _ = in_precision(model, precision, calibrating, symmetric="zero-points" in device.forbids)
        outputs = _outputs(runnable(typed, precision), judging)
        rows.append(_judged(precision, outputs, right, allowed=order.max_disagreement or 0.0, decides=choosing))
        if not rows[-1].told:
            write_bytes(path := scratch / f"{precision}.onnx", typed.SerializeToString())
            paths[precision] = path
    return _fastest(rows, measure(first, paths) if paths else {}, given.told)


def _judged(
    precision: str,
    outputs: Sequence[NDArray[np.floating]],
    right: Sequence[NDArray[np.floating]],
    *,
    allowed: float,
    decides: bool,
) -> LoweredCandidate:
    """A precision by its outputs beside float32's; ``told`` says why it is out, if it is."""
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance

    meter = Meter(tolerance(precision, decides=decides), logits=True)
    for output, expected in zip(outputs, right, strict=True):
        meter.add(output, expected)
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


def enough_images(order: TuneOrder, folded: FoldArtefact) -> Split:
    """The images for lower precision.

    Raises:
        UsageProblem: If those that judge are so few that one of them is more than what is allowed.
    """
    config = registry.load(registry.BACKBONES, folded.backbone).from_json(folded.config)
    given = Split.of(choose_inputs(folded, config, inputs=order.inputs, images=order.images))
    allowed = bounded("max_disagreement", order.max_disagreement or 0.0, 1)
    wanted = ceil(1 / max(allowed, SMALLEST))
    if len(given.judging) < wanted:
        raise UsageProblem(
            f"{given.told}: they cannot tell whether no more than {allowed:.2%} get another first class.",
            hint=f"Give {wanted + len(given.fitting)} images or more, or allow more with --max-disagreement.",
            code="tune.too-few",
        )
    return given


def _outputs(model: onnx.ModelProto, pieces: list[NDArray[np.float32]]) -> list[NDArray[np.floating]]:
    session = image_model(model.SerializeToString())
    return [session.run(piece) for piece in pieces]

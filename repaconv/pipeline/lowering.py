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
    folded: FoldArtefact,
    graph: Callable[[str, int], onnx.ModelProto],
    precisions: Sequence[str],
    device: Target,
    *,
    allowed: float,
    inputs: str | Path | None,
    images: str | Path | None,
    measure: Callable[[Path, Mapping[str, Path]], Mapping[str, Ratio]],
    scratch: Path,
    progress: Progress,
) -> Lowered:
    """Type the winning graph lower, and keep what disagrees with float32 on no more images than that.

    Some images calibrate, the others judge; what does not pass as a link of its precision is out, whatever is allowed.

    Args:
        folded: The network.
        graph: The winner's form, as far as a precision keeps it, in no newer opset than that.
        precisions: To try; none for none.
        device: The target.
        allowed: Share of images whose first class may be another.
        inputs: An .npz of images.
        images: A folder of them.
        measure: Rounds of graphs beside the float32 one.
        scratch: Where graphs go.
        progress: See `Progress`.
    """
    from repaconv.exporters.precision import INT8_OPSET
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance
    from repaconv.proof.runners import decides

    if not precisions:
        return Lowered("fp32", (), "")
    config = registry.load(registry.BACKBONES, folded.backbone).from_json(folded.config)
    given = enough_images(folded, inputs, images, allowed=allowed)
    calibrating, judging = given.calibrating(), list(given.judges())
    newest = device.newest_opset or device.opset
    reference = graph("fp32", newest)
    right = _outputs(reference, judging)
    choosing = decides(registry.load(registry.BACKBONES, folded.backbone).deploy(config))
    write_bytes(first := scratch / "fp32.onnx", reference.SerializeToString())
    rows, paths = [], {}
    for precision in precisions:
        progress(f"tune: {precision}", 0, 0)
        model = graph(precision, min(device.opset, INT8_OPSET) if precision == "int8" else newest)
        typed, _ = in_precision(model, precision, calibrating, symmetric="zero-points" in device.forbids)
        meter = Meter(tolerance(precision, decides=choosing), logits=True)
        for output, expected in zip(_outputs(runnable(typed, precision), judging), right, strict=True):
            meter.add(output, expected)
        link, found = meter.link(precision, "ONNX, float32", f"ONNX, {precision}"), meter.metrics()
        other = found.top1_flips / found.images
        row = LoweredCandidate(precision=precision, images=found.images, disagreement=other, link=link, told="")
        if other > allowed or link.verdict != "passed":
            why = "disagrees with float32 more than allowed" if other > allowed else f"{link.verdict} as a link"
            rows.append(row.model_copy(update={"told": why}))
            continue
        rows.append(row)
        write_bytes(path := scratch / f"{precision}.onnx", typed.SerializeToString())
        paths[precision] = path
    ratios = measure(first, paths) if paths else {}
    rows = [
        row if row.told else row.model_copy(update={"ratio": ratios.get(row.precision), "told": "allowed"})
        for row in rows
    ]
    faster = [row for row in rows if row.ratio is not None and row.ratio.low > 1]
    best = max(faster, key=lambda row: row.ratio.median if row.ratio else 0.0, default=None)
    return Lowered(best.precision if best else "fp32", tuple(rows), given.told)


def enough_images(
    folded: FoldArtefact, inputs: str | Path | None, images: str | Path | None, *, allowed: float
) -> Split:
    """The images for lower precision.

    Raises:
        UsageProblem: If those that judge are so few that one of them is more than what is allowed.
    """
    config = registry.load(registry.BACKBONES, folded.backbone).from_json(folded.config)
    given = Split.of(choose_inputs(folded, config, inputs=inputs, images=images))
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

"""How much each group of layers loses in int8 while all others stay in float32: a forward pass each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from repaconv.artefacts import Sensitivity
from repaconv.progress import Progress
from repaconv.proof.runners import load_onnx, named

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds


def sensitivities(
    model: onnx.ModelProto, calls: Sequence[Feeds], *, symmetric: bool, progress: Progress
) -> list[Sensitivity]:
    """The groups of a float32 graph that gives logits, the most sensitive first.

    Args:
        model: It.
        calls: Images: they calibrate, and on them it is measured. What a deployment loses others judge.
        symmetric: See `repaconv.exporters.precision.to_int8`.
        progress: See `Progress`.
    """
    from repaconv.exporters.layers import groups_of, nodes_of, only_in_int8
    from repaconv.exporters.precision import to_int8
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance

    low = to_int8(model, calls, symmetric=symmetric)
    groups = groups_of(model)

    def logits(graph: onnx.ModelProto) -> list[Any]:
        session = load_onnx(graph.SerializeToString())
        ports = [port.name for port in session.inputs]
        return [next(iter(session.run(named(ports, call)).values())) for call in calls]

    right = logits(model)
    found = []
    for place, group in enumerate(groups):
        progress("tune: layers in int8", place, len(groups))
        meter = Meter(tolerance("int8"), logits=True)
        for got, expected in zip(logits(only_in_int8(model, low, nodes_of(model, group))), right, strict=True):
            meter.add(got, expected)
        seen = meter.metrics()
        flips = seen.top1_flips / seen.images
        found.append(Sensitivity(layers=group, disagreement=flips, kl_divergence=seen.kl_divergence or 0.0))
    return sorted(found, key=lambda each: (-each.kl_divergence, -each.disagreement))

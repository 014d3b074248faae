"""How much each group of layers loses in int8 while all others stay in float32: a forward pass each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from repaconv.artefacts import Sensitivity
from repaconv.progress import Progress
from repaconv.proof.runners import named
from repaconv.steps.precisions import int8_for, loader_for

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds
    from repaconv.targets import Target


def sensitivities(
    model: onnx.ModelProto, calls: Sequence[Feeds], device: Target, output: int = 0, *, progress: Progress
) -> list[Sensitivity]:
    """The groups of a float32 graph that gives logits, the most sensitive first.

    Args:
        model: It.
        calls: Images: they calibrate, and on them it is measured. What a deployment loses others judge.
        device: For which int8 would be.
        output: The place of the logits among the outputs.
        progress: See `Progress`.
    """
    from repaconv.exporters.layers import groups_of, nodes_of, only_in_int8
    from repaconv.exporters.precision import to_int8
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance

    low = to_int8(model, calls, how=int8_for(device))
    groups, load = groups_of(model), loader_for(device.architecture, "int8")

    def logits(graph: onnx.ModelProto) -> list[Any]:
        session = load(graph.SerializeToString())
        ports = [port.name for port in session.inputs]
        return [list(session.run(named(ports, call)).values())[output] for call in calls]

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

"""What a target can do at most: as it states, or as this machine does where it is the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv import registry
from repaconv.artefacts import Limits
from repaconv.errors import UsageProblem
from repaconv.steps.elsewhere import why_not_here
from repaconv.steps.engines import takes_networks

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine
    from repaconv.targets import Target


def limits_of(device: Target, precision: str, threads: int, *, lowered: bool) -> Limits:
    """Those that the target states, else those of this machine if it is the target.

    Args:
        device: The target.
        precision: In which the graph multiplies.
        threads: Of one inference.
        lowered: Whether the runtime computes a float32 graph in that precision.

    Raises:
        UsageProblem: If neither is to be had.
    """
    from repaconv.measure.limits import measured_limits
    from repaconv.measure.protocol import pinned

    if device.limits is not None:
        return device.limits
    engine: Engine = registry.load(registry.ENGINES, device.runtime)
    if engine.device != "cpu" or why_not_here(device):
        raise UsageProblem(
            f"{device.name} ({device.about}) covers many devices, so the peak throughput of yours is unknown.",
            hint="\n  ".join(
                [
                    "Describe yours in a file, with the figures of its data sheet (dense), and give --target "
                    "./mine.toml:",
                    *_own(device),
                ]
            ),
            code="estimate.limits",
        )
    in_memory = takes_networks(device)  # ONNX Runtime stands for a runtime that opens no graphs, in float32
    engine = registry.load(registry.ENGINES, "onnxruntime") if in_memory else engine
    with pinned(threads):
        return measured_limits(engine, "fp32" if in_memory else precision, threads, typed_here=not lowered)


def _own(device: Target) -> list[str]:
    """The lines of a target of the user's own; each of the figures is his."""
    peaks = ", ".join(f"{precision} = ..." for precision in device.precisions)
    return [
        f'extends = "{device.name}"',
        "[limits]",
        'device = "which one, at which clock"',
        f"peak_tflops = {{ {peaks} }}",
        "bandwidth_gb_s = ...",
        "launch_us = ...",
        'source = ["its data sheet"]',
    ]

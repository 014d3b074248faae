"""Monitor an NVIDIA GPU during a measurement: clocks, temperature, power, throttling and other processes.

It uses NVML (nvidia-ml-py), if installed. It ran on an H200; the tests use recorded values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

# Bits of NVML's clock event reasons (nvml.h). The power cap is normal under load; the others are faults.
SLOWDOWN_REASONS = {
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x8: "the hardware's slowdown",
    0x80: "the power supply",
}
POWER_CAPPED = 0x4
CLOCK_CHANGE = 0.1
"""Relative change of the clock that counts as a disturbance."""


class GpuState(NamedTuple):
    """The state of a GPU at one moment; unknown values are None. ``others`` is the number of other processes on it."""

    sm_mhz: int | None
    memory_mhz: int | None
    celsius: int | None
    watts: float | None
    reasons: int
    others: int

    def values(self) -> dict[str, float]:
        """Return the values by name and unit."""
        named = {"MHz": self.sm_mhz, "memory MHz": self.memory_mhz, "C": self.celsius, "W": self.watts}
        return {f"GPU {unit}": float(value) for unit, value in named.items() if value is not None}


def sample_gpu() -> GpuState | None:
    """Return the current state of the GPU that torch uses first; None if NVML is not available."""
    with suppress(Exception):  # NVML may be missing, and has its own error classes
        import pynvml as nvml

        gpu = _handle(nvml)
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return GpuState(
            sm_mhz=_or_none(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            memory_mhz=_or_none(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_MEM),
            celsius=_or_none(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            watts=(milli := _or_none(nvml.nvmlDeviceGetPowerUsage, gpu)) and round(milli / 1e3, 1),
            reasons=_or_none(ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0,
            others=max(0, len(_or_none(nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()) - 1),
        )
    return None


def describe_gpu() -> dict[str, Any]:
    """Describe the first GPU for a result: name, compute capability, memory, CUDA, driver, limits; empty if none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    device = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "name": device.name,
        "compute_capability": f"{device.major}.{device.minor}",
        "memory_gib": round(device.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    with suppress(Exception):
        import pynvml as nvml

        gpu = _handle(nvml)
        found["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        found["power_limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
        found["largest_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
    return found


def invalidating_reasons(moments: Sequence[GpuState]) -> Iterator[str]:
    """Yield the reasons that invalidate a measurement."""
    for bit, cause in SLOWDOWN_REASONS.items():
        if count := sum(bool(moment.reasons & bit) for moment in moments):
            yield f"throttled: the GPU slowed down for {cause}, at {count} of {len(moments)} moments"


def disturbance_reasons(moments: Sequence[GpuState]) -> Iterator[str]:
    """Yield the reasons that may have influenced a measurement."""
    if others := max((moment.others for moment in moments), default=0):
        yield f"{others} other process{'es' if others > 1 else ''} on the GPU"
    clocks = [moment.sm_mhz for moment in moments if moment.sm_mhz]
    if clocks and max(clocks) > (1 + CLOCK_CHANGE) * min(clocks):
        capped = any(moment.reasons & POWER_CAPPED for moment in moments)
        yield f"the GPU's clock moved from {min(clocks)} to {max(clocks)} MHz{', at its power limit' * capped}"


def _handle(nvml: Any) -> Any:
    """Return NVML's handle of torch's first GPU; CUDA_VISIBLE_DEVICES may make it another than NVML's first."""
    import torch

    nvml.nvmlInit()
    with suppress(Exception):
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode())
    return nvml.nvmlDeviceGetHandleByIndex(0)


def _or_none(ask: Any, *given: Any) -> Any:
    with suppress(Exception):
        return ask(*given)
    return None

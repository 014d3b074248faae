"""The machine that a number comes from."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "onnx", "onnxruntime", "torch")


def fingerprint(cores: tuple[int, ...]) -> dict[str, Any]:
    """Processor, cores used, governor, load, system and library versions; unknown is None, never a guess."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_used": list(cores),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def machine_key(machine: Mapping[str, Any]) -> str:
    """What must be the same for two latencies to be compared: processor, cores, memory, kind of system."""
    system = str(machine.get("system")).split(" ")
    return f"{machine.get('cpu')}, {machine.get('cores')} cores, {system[0]} {system[-1]}"


def _cpu_model() -> str | None:
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, None) or platform.processor() or None


def _memory_gib() -> float | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 1024**2, 1)
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None

"""Describe the machine on which a result was measured."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.gpu_monitor import describe_gpu
from repaconv.core.thread_pool import CONTROL_GROUP, cpu_quota

PACKAGES = ("numpy", "onnx", "onnxruntime", "torch")


def fingerprint(cores: tuple[int, ...], *, gpu: bool = False) -> dict[str, Any]:
    """Describe CPU, ISA level, cores in use, governor, load, system and library versions; with ``gpu`` the GPU.

    Unknown values are None.
    """
    return {
        "cpu": cpu_model(),
        "cpu_number": cpu_number(),
        "family": isa_level(platform.machine()),
        "cores": os.cpu_count(),
        "cores_used": list(cores),
        "caches": caches(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "container": limits(),
        **({"board": board} if (board := jetson()) else {}),
        **({"gpu": describe_gpu()} if gpu else {}),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
    }


def caches(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, str]:
    """Return cache sizes by level and kind, e.g. ``L1 Data``, ``L2 Unified``."""
    found = {}
    for index in sorted(cpu.glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if level and kind and size:
            found[f"L{level} {kind}"] = size
    return found


def limits(group: Path = CONTROL_GROUP) -> dict[str, str]:
    """Return the CPU and memory limits of a container; empty if there are none."""
    found = {}
    if quota := cpu_quota(group):
        found["cpus"] = f"{quota:g}"
    memory = _read(str(group / "memory.max")) or "max"
    if memory.isdigit():
        found["memory_gib"] = f"{int(memory) / 1024**3:.1f}"
    return found


def jetson(ask: Callable[[list[str]], str] | None = None) -> dict[str, Any]:
    """Describe a Jetson: release, power mode, clocks and one line of tegrastats; empty on other machines.

    Untested (no hardware available); the tests parse recorded output of boards.
    """
    release = _read("/etc/nv_tegra_release")
    if release is None and ask is None:
        return {}
    ask = ask or _ask
    stats = ask(["timeout", "2", "tegrastats", "--interval", "500"]).splitlines()
    return {
        "release": release or "",
        "power_mode": power_mode(ask(["nvpmodel", "-q"])),
        "jetson_clocks": ask(["jetson_clocks", "--show"]),
        **({"tegrastats": tegrastats(stats[0])} if stats else {}),
    }


def power_mode(text: str) -> str:
    """Parse the power mode, e.g. ``15W``, from the output of ``nvpmodel -q``; empty if there is none."""
    found = re.search(r"NV Power Mode:\s*(\S+)", text)
    return found[1] if found else ""


def tegrastats(line: str) -> dict[str, Any]:
    """Parse a line of tegrastats: memory, load and clock of each core, temperatures, GPU load, power."""
    memory = re.search(r"RAM (\d+)/(\d+)MB", line)
    cores = re.search(r"CPU \[([^\]]*)\]", line)
    gpu = re.search(r"GR3D_FREQ (\d+)%(?:@\[?(\d+))?", line)
    return {
        "ram_mb": [int(memory[1]), int(memory[2])] if memory else [],
        "cores": cores[1].split(",") if cores else [],
        "gpu_percent": int(gpu[1]) if gpu else None,
        "celsius": {name: float(value) for name, value in re.findall(r"(\w+)@(-?[\d.]+)C", line)},
        "milliwatts": {name: int(value) for name, value in re.findall(r"(\w+) (\d+)(?:mW)?/\d+(?:mW)?(?=\s|$)", line)},
    }


def _ask(command: list[str]) -> str:
    """Return the output of a command, whatever its exit code; empty if it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine_key(machine: Mapping[str, Any]) -> str:
    """Return what must be equal for two latencies to be comparable: GPU, CPU, number of cores, kind of system.

    Clouds give CPUs of several ISA levels and generations the same name. They may differ twofold in speed, and in
    which rewrite preset is fastest. The key therefore includes ISA level and CPU number.
    """
    system = str(machine.get("system")).split(" ")
    described = machine.get("gpu") or machine.get("card")  # "card" is its name in results of release 0.1
    gpu = f"{described.get('name')}, " if described else ""
    of_family = f" ({machine['family']})" if machine.get("family") else ""
    number = f" {machine['cpu_number']}" if machine.get("cpu_number") else ""
    return f"{gpu}{machine.get('cpu')}{number}{of_family}, {machine.get('cores')} cores, {system[0]} {system[-1]}"


def cpu_model() -> str | None:
    """Return the name of the CPU."""
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, None) or platform.processor() or None


def cpu_number(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the CPU generation: family and model on x86 (``26.2``), implementer and part on ARM (``0x41.0xd0c``)."""
    fields = dict(
        re.findall(r"^(cpu family|model|CPU implementer|CPU part)\s*:\s*(\w+)\s*$", _read(str(cpuinfo)) or "", re.M)
    )
    pairs = (("cpu family", "model"), ("CPU implementer", "CPU part"))
    return next((".".join(fields[name] for name in pair) for pair in pairs if fields.keys() >= set(pair)), None)


def _memory_gib() -> float | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 1024**2, 1)
    return None


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return None

"""Monitor the machine during a measurement: other load, clocks, temperatures, and the speed of a core."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from repaconv.benchmark.gpu_monitor import GpuState

JIFFY_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class MachineState:
    """The state of the machine at one moment; unknown values are None or missing."""

    clock_s: float
    own_s: float
    busy_s: dict[int, float]
    steal_s: float
    khz: dict[int, int]
    celsius: dict[str, float]
    throttled: int
    loop_ms: float
    load_1min: float | None


@dataclass(frozen=True)
class MachineChanges:
    """Changes of the machine's state during a measurement.

    Attributes:
        seconds: Duration.
        others: Share of the machine's CPU time used by other processes.
        others_here: The same on the cores in use; None if unknown.
        steal_time: Steal time: share of CPU time taken by the hypervisor.
        speed: Time of a fixed loop at the end relative to the beginning; above 1 the core became slower.
        throttled: Number of times that the CPU throttled for heat.
        before, after: Clocks of the cores in use in kHz, temperatures in degrees Celsius, load; for a GPU MHz, degrees
            Celsius and watts.
        gpu: Sampled states of the measured GPU, if any.
    """

    seconds: float
    others: float | None
    others_here: float | None
    steal_time: float | None
    speed: float
    throttled: int
    before: dict[str, float]
    after: dict[str, float]
    gpu: tuple[GpuState, ...] = ()


def state() -> MachineState:
    """Sample the machine's state; the timed loop takes some milliseconds."""
    busy, steal_time = _busy()
    return MachineState(
        clock_s=time.perf_counter(),
        own_s=time.process_time(),
        busy_s=busy,
        steal_s=steal_time,
        khz={n: int(text) for n in busy if (text := _read(_CPU / f"cpu{n}/cpufreq/scaling_cur_freq")).isdigit()},
        celsius=_celsius(),
        throttled=sum(
            int(text) for n in busy if (text := _read(_CPU / f"cpu{n}/thermal_throttle/core_throttle_count")).isdigit()
        ),
        loop_ms=_loop_ms(),
        load_1min=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    )


def changes_between(
    before: MachineState, after: MachineState, cores: Sequence[int], gpu: Sequence[GpuState] = ()
) -> MachineChanges:
    """Return the changes between two states, without their timed loops.

    Args:
        before, after: The states.
        cores: The cores in use; empty if any may be. The clocks of others mean nothing: idle ones slow down.
        gpu: GPU states in between.
    """
    seconds = after.clock_s - before.clock_s
    own = after.own_s - before.own_s
    busy = {n: after.busy_s[n] - before.busy_s[n] for n in after.busy_s if n in before.busy_s}
    here = [busy[n] for n in cores if n in busy]
    # Jiffies are coarse: a difference of a few is not significant.
    slack = 3 * JIFFY_S

    def share(total: float, count: int) -> float:
        return max(0.0, total - own - slack * count) / (seconds * count)

    return MachineChanges(
        seconds=seconds,
        others=share(sum(busy.values()), len(busy)) if busy else None,
        others_here=share(sum(here), len(here)) if here and len(here) == len(cores) else None,
        steal_time=max(0.0, after.steal_s - before.steal_s - slack) / (seconds * len(busy)) if busy else None,
        speed=after.loop_ms / before.loop_ms,
        throttled=after.throttled - before.throttled,
        before=_values_by_name(before, cores) | (gpu[0].values() if gpu else {}),
        after=_values_by_name(after, cores) | (gpu[-1].values() if gpu else {}),
        gpu=tuple(gpu),
    )


def cores_by_preference(cores: Collection[int], cpu: Path = _CPU) -> list[int]:
    """Return these logical cores in the order in which to measure on them.

    One of every physical core comes before a second one, and a fast core before a slow one, which processors with cores
    of two kinds have. Of equal ones the last comes first: interrupts and other processes tend to use the first.
    """

    def number(core: int, name: str) -> int:
        text = _read(cpu / f"cpu{core}" / name)
        return int(text) if text.isdigit() else 0

    taken: Counter[str] = Counter()
    keys = {}
    for core in sorted(cores, reverse=True):
        physical = _read(cpu / f"cpu{core}/topology/thread_siblings_list") or str(core)
        keys[core] = taken[physical], -number(core, "cpu_capacity"), -number(core, "cpufreq/cpuinfo_max_freq")
        taken[physical] += 1
    return sorted(keys, key=lambda core: keys[core])


def _values_by_name(moment: MachineState, cores: Sequence[int]) -> dict[str, float]:
    load = {} if moment.load_1min is None else {"load": moment.load_1min}
    clocks = {f"cpu{n} kHz": float(value) for n, value in moment.khz.items() if not cores or n in cores}
    return {**load, **clocks, **{f"{name} C": value for name, value in moment.celsius.items()}}


def _busy() -> tuple[dict[int, float], float]:
    """Return the busy seconds of each core since the system started, and the steal time of all."""
    found, steal_time = {}, 0.0
    for line in _read(Path("/proc/stat")).splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit():
            user, nice, system, _idle, _wait, irq, soft, steal, *_ = (*map(int, numbers), *[0] * 8)
            found[int(name[3:])] = JIFFY_S * (user + nice + system + irq + soft)
            steal_time += JIFFY_S * steal
    return found, steal_time


def _celsius() -> dict[str, float]:
    zones = Path("/sys/class/thermal")
    found = {}
    for zone in sorted(zones.glob("thermal_zone*")) if zones.is_dir() else []:
        text = _read(zone / "temp")
        if text.lstrip("-").isdigit():
            found[_read(zone / "type") or zone.name] = int(text) / 1000
    return found


def _loop_ms() -> float:
    """Return the best time of a fixed loop, which shows the speed of the core independently of its reported clock."""
    best = float("inf")
    for _ in range(15):
        begin = time.perf_counter_ns()
        total = 0
        for number in range(40_000):
            total += number
        best = min(best, (time.perf_counter_ns() - begin) / 1e6)
    return best


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


# --- Measure the peak resident memory of an operation in this process, beyond what was resident before.


class PeakMemory:
    """Measures peak memory from its construction on. The process must do nothing else meanwhile.

    Free memory that the process still holds is first returned to the system; using it again would not be measured
    otherwise.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process, self._before = process, 0
        self._was_reset = False
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            process.joinpath("clear_refs").write_text("5", "utf-8")  # resets the peak to the current value
            self._before = self._bytes("VmHWM")
            self._was_reset = True

    def peak(self) -> int | None:
        """Return the additional peak memory in bytes so far; None if the system does not report it."""
        return max(0, self._bytes("VmHWM") - self._before) if self._was_reset else None

    def _bytes(self, name: str) -> int:
        """Read a value in KiB from Linux's status file."""
        lines = (self._process / "status").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024

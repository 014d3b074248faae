"""Benchmark protocols of the papers, read from protocols.toml, to compare results with published ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.core.toml_positions import parse_toml
from repaconv.results import Record

MEMORY_SHARE = 0.5


class PaperProtocol(Record):
    """A benchmark protocol. A field of None leaves the setting to the target.

    ``scaled_to_memory`` reduces the batch to the largest power of two that fits in free memory. ``first_in_line``
    selects real-time priority, as ``chrt -f 99``.
    """

    name: str = ""
    about: str = ""
    source: str = ""
    batch: int | None = None
    threads: int | None = None
    rounds: int | None = None
    warmup_rounds: int | None = None
    scaled_to_memory: bool = False
    first_in_line: bool = False

    def images(self, usual: int, bytes_an_image: Callable[[], float]) -> int:
        """Return the batch size; the memory per image is computed only if needed."""
        if self.batch is None or not self.scaled_to_memory:
            return self.batch or usual
        room, images = MEMORY_SHARE * free_bytes(), 1
        each = bytes_an_image()
        while 2 * images <= self.batch and 2 * images * each <= room:
            images *= 2
        return images

    def description(self, batch: int) -> str:
        """Describe the protocol in one line."""
        if not self.name:
            return ""
        scaled = f" (batch {batch} of {self.batch}: what memory holds)" if self.batch not in (None, batch) else ""
        return f"{self.name}: {self.about}; {self.source}{scaled}"


def protocol_named(name: str | None) -> PaperProtocol:
    """Return a protocol by name; None gives one that leaves all settings to the target.

    Raises:
        UsageProblem: If there is no such protocol.
    """
    if name is None:
        return PaperProtocol()
    table, _ = parse_toml(
        files("repaconv.benchmark").joinpath("protocols.toml").read_text("utf-8"), "protocols.toml", "protocol"
    )
    if name not in table:
        raise UsageProblem(
            f"unknown protocol {name!r}.",
            hint=f"{did_you_mean(name, table)}Known: {', '.join(table)}.",
            code="protocol.unknown",
        )
    return PaperProtocol(name=name, **table[name])


def free_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the available memory of the machine, or of the container if that has less; 1 GiB if unknown."""
    free = []
    with suppress(OSError, StopIteration):
        lines = meminfo.read_text("utf-8").splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # without a limit it is "max"
        limit, used = (int((group / f"memory.{name}").read_text("utf-8")) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text("utf-8"), re.MULTILINE)
        free.append(max(0, limit - used + (int(cached[1]) if cached else 0)))
    return min(free, default=2**30)

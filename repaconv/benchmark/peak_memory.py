"""Measure the peak resident memory of an operation in this process, beyond what was resident before."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path


class PeakMemory:
    """Measures peak memory from its construction on. The process must do nothing else meanwhile.

    Free memory that the process still holds is first returned to the system; using it again would not be measured
    otherwise.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process, self._before = process, 0
        self._told = False
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            process.joinpath("clear_refs").write_text("5")  # resets the peak to the current value
            self._before = self._bytes("VmHWM")
            self._told = True

    def peak(self) -> int | None:
        """Return the additional peak memory in bytes so far; None if the system does not report it."""
        return max(0, self._bytes("VmHWM") - self._before) if self._told else None

    def _bytes(self, name: str) -> int:
        """Read a value in KiB from Linux's status file."""
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024

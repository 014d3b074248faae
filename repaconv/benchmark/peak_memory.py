"""How much memory something takes that this process does: what is resident at its peak, beyond what was before."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path


class Taken:
    """From its making on; of a process that does nothing else meanwhile.

    Memory that is free, and still with the process, goes back to the system first, or it would be taken unseen.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process, self._before = process, 0
        self._told = False
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            process.joinpath("clear_refs").write_text("5")  # the peak is what there is now
            self._before = self._bytes("VmHWM")
            self._told = True

    def peak(self) -> int | None:
        """Bytes until now; None where the system does not tell."""
        return max(0, self._bytes("VmHWM") - self._before) if self._told else None

    def _bytes(self, name: str) -> int:
        """Of Linux's status file, in which it stands in KiB."""
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024

"""Files that change while they are read: nothing is kept of what was made of them.

One that is written to has another size or time afterwards. One that is cut while it is mapped is no end of this
process, as the kernel would have it (SIGBUS, at the first page that the file no longer has): what is gone reads as
zeros, and is remembered until somebody asks. Weights are mapped by this package, and by those that it uses.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

from repaconv.core.errors import Refused

SA_SIGINFO, SA_NODEFER = 0x4, 0x40000000  # <bits/sigaction.h>
BUS_ADRERR = 2  # <bits/siginfo-consts.h>: a page that is not there, not a broken one
CODE, ADDRESS = 8, 16  # of si_code and si_addr in a siginfo_t of 64 bits
MAP_FIXED = 0x10  # <bits/mman-linux.h>
FAILED = ctypes.c_void_p(-1).value

Stamp = tuple[int, int]
"""Size and time of a file in nanoseconds; zeros where it is gone."""

_CUT: list[str] = []


class _Action(ctypes.Structure):
    """glibc's and musl's struct sigaction on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_before = _Action()


def stamp_of(path: Path) -> Stamp:
    """Which bytes a file has, as far as its folder tells."""
    try:
        known = path.stat()
    except (OSError, ValueError):  # no file can be called that
        return 0, 0
    return known.st_size, known.st_mtime_ns


def require_unchanged(path: Path, before: Stamp) -> None:
    """Hold a file to what it was before it was read.

    Raises:
        Refused: ``file.changed``, if it was written to since.
    """
    if stamp_of(path) != before:
        raise _changed(str(path))


def require_none_cut() -> None:
    """Refuse to go on with what was read of a file that was cut since this was last asked.

    Raises:
        Refused: ``file.changed``.
    """
    if _CUT:
        path = _CUT[0]
        _CUT.clear()
        raise _changed(path)


def _changed(path: str) -> Refused:
    return Refused(
        f"{path} changed while it was being read; nothing was written.",
        hint="Wait until the program that writes it has finished, and run the command again.",
        code="file.changed",
    )


@cache
def watch() -> None:
    """From now on a page that is gone is no end of this interpreter; once is enough. Linux alone."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
        action = _Action(handler=ctypes.cast(_STRUCK, ctypes.c_void_p).value, flags=SA_SIGINFO | SA_NODEFER)
        _c().sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_before))


@cache
def _c() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return found


def _gone(number: int, told: int, _context: int) -> None:
    """Put empty pages where they are gone; the read that was interrupted, which is no interpreter's own, goes on."""
    address = ctypes.c_size_t.from_address(told + ADDRESS).value
    page = address - address % mmap.PAGESIZE
    if ctypes.c_int.from_address(told + CODE).value == BUS_ADRERR:
        end, path = _mapping(page)
        _CUT.append(path)
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        if _c().mmap(page, end - page, access, kind, -1, 0) != FAILED:
            return
    _c().sigaction(number, ctypes.byref(_before), None)  # not ours: it strikes again


def _mapping(page: int) -> tuple[int, str]:
    """Where the mapping of a page ends, and its file."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        bounds, *rest = line.split(maxsplit=5)
        start, _, end = bounds.partition("-")
        if int(start, 16) <= page < int(end, 16):
            return int(end, 16), rest[4].removesuffix(" (deleted)") if len(rest) == 5 else "a file"
    return page + mmap.PAGESIZE, "a file"


_STRUCK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_gone)

"""Detects input files that change while they are read, so that no result of them is written.

A file that was written to has a different size or modification time afterwards. If a memory-mapped file is truncated,
the kernel sends SIGBUS on access to a page that the file no longer has, which would end the process. A signal handler
maps zeros there instead and records the file; `require_none_truncated` reports it. Weights are mapped by this package
and by libraries that it uses.
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
BUS_ADRERR = 2  # <bits/siginfo-consts.h>: a page that does not exist, not a hardware error
CODE, ADDRESS = 8, 16  # offsets of si_code and si_addr in a 64-bit siginfo_t
MAP_FIXED = 0x10  # <bits/mman-linux.h>
MAP_FAILED = ctypes.c_void_p(-1).value

Stamp = tuple[int, int]
"""Size and modification time (ns) of a file; zeros if it does not exist."""

_TRUNCATED: list[str] = []


class _Action(ctypes.Structure):
    """struct sigaction of glibc and musl on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_before = _Action()


def stamp_of(path: Path) -> Stamp:
    """Return the size and modification time of a file."""
    try:
        known = path.stat()
    except (OSError, ValueError):  # not a valid file name
        return 0, 0
    return known.st_size, known.st_mtime_ns


def require_unchanged(path: Path, before: Stamp) -> None:
    """Refuse a file that was written to since ``before`` was taken.

    Raises:
        Refused: ``file.changed``.
    """
    if stamp_of(path) != before:
        raise _changed(str(path))


def require_none_truncated() -> None:
    """Refuse to continue if a memory-mapped file was truncated since the last call.

    Raises:
        Refused: ``file.changed``.
    """
    if _TRUNCATED:
        path = _TRUNCATED[0]
        _TRUNCATED.clear()
        raise _changed(path)


def _changed(path: str) -> Refused:
    return Refused(
        f"{path} changed while it was being read; nothing was written.",
        hint="Wait until the program that writes it has finished, and run the command again.",
        code="file.changed",
    )


@cache
def install_sigbus_handler() -> None:
    """Install the SIGBUS handler, so that a truncated memory-mapped file does not end the process. Once per process;
    Linux only."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
        action = _Action(handler=ctypes.cast(_HANDLER, ctypes.c_void_p).value, flags=SA_SIGINFO | SA_NODEFER)
        _libc().sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_before))


@cache
def _libc() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return found


def _on_sigbus(number: int, info: int, _context: int) -> None:
    """SIGBUS handler: map zero pages in place of the missing ones, so that the interrupted read continues."""
    address = ctypes.c_size_t.from_address(info + ADDRESS).value
    page = address - address % mmap.PAGESIZE
    if ctypes.c_int.from_address(info + CODE).value == BUS_ADRERR:
        end, path = _mapping(page)
        _TRUNCATED.append(path)
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        if _libc().mmap(page, end - page, access, kind, -1, 0) != MAP_FAILED:
            return
    _libc().sigaction(number, ctypes.byref(_before), None)  # another cause: raise the signal again


def _mapping(page: int) -> tuple[int, str]:
    """Return the end address of the mapping that contains a page, and its file."""
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        bounds, *rest = line.split(maxsplit=5)
        start, _, end = bounds.partition("-")
        if int(start, 16) <= page < int(end, 16):
            return int(end, 16), rest[4].removesuffix(" (deleted)") if len(rest) == 5 else "a file"
    return page + mmap.PAGESIZE, "a file"


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_sigbus)

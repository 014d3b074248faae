"""What files and folders hold, by digest. What has not been touched since it was hashed is not read again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from repaconv.core.files import sha256_of, sha256_of_bytes
from repaconv.results import Record

GONE = "gone"
SETTLED_NS = 2_000_000_000
"""What was written less long ago is read again: within the tick of a clock, a second writing leaves the same stamp."""


class Seen(Record):
    """A digest, and the stamp of what it is of: inodes, sizes and times, the last of which no program sets."""

    stamp: str
    sha256: str


class Digests:
    """Digests of files and folders.

    Args:
        seen: Those of before, by path.
    """

    def __init__(self, seen: dict[str, Seen]) -> None:
        self.before, self.seen = seen, dict[str, Seen]()

    def of(self, path: Path) -> str:
        """SHA-256 of a file; of a folder that of the names and digests in it; `GONE` where there is neither."""
        files = {name: file.stat() for name, file in _files(path)}
        if not files and not path.is_dir():
            return GONE
        stamps = [f"{n} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for n, s in files.items()]
        stamp = sha256_of_bytes("\n".join(stamps).encode(errors="surrogateescape"))
        name = str(path.resolve())
        known = self.seen.get(name) or self.before.get(name)
        if known is None or known.stamp != stamp:
            known = Seen(stamp=stamp, sha256=_content(path))
        if max((s.st_ctime_ns for s in files.values()), default=0) < time.time_ns() - SETTLED_NS:
            self.seen[name] = known
        return known.sha256


def _content(path: Path) -> str:
    if path.is_file():
        return sha256_of(path)
    lines = [f"{sha256_of(file)} {name}" for name, file in _files(path)]
    return sha256_of_bytes("\n".join(lines).encode(errors="surrogateescape"))


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """The file, or all in the folder by name, links followed; what Python compiled is nobody's input."""
    if path.is_file():
        yield "", path
    been: set[str] = set()
    for folder, inside, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        inside[:] = sorted(name for name in inside if name != "__pycache__") if real not in been else []
        for name in sorted(files) if real not in been else ():
            if (file := Path(folder, name)).is_file():
                yield file.relative_to(path).as_posix(), file
        been.add(real)

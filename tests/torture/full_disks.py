"""Stages on a disk with room for a given number of pages or files. A stage completes or is refused, and completes
afterwards on a disk with enough room.

Everything that a stage may write is on that disk: its folder, temporary files, the user's home and caches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import repaconv
from repaconv.core.errors import EnvironmentProblem
from repaconv.core.files import PART
from repaconv.distributed.sweep import sweep
from torture import damaged_artefacts, killed_long_commands, killed_stages
from torture.killed_stages import Prepare, Stage
from torture.sandbox import Case

BYTES = os.sysconf("SC_PAGESIZE")
ROOMY = {"size": 64 << 20, "nr_inodes": 4096}


def _int8(at: Path) -> object:
    return repaconv.export(at / "run", target="x86-64", precision="int8")


def _run(at: Path) -> object:
    """Of which each step says for itself what went wrong."""
    done = repaconv.run(at / "r.toml")
    if wrong := [check for check in done.checks if check.verdict == "error"]:
        assert done.exit_code == EnvironmentProblem.exit_code
        raise EnvironmentProblem(wrong[0].message, code="+".join(sorted({check.code for check in wrong})))
    assert done.exit_code in (0, 5), done.checks  # ten rounds say little
    return done


def _sweep(at: Path) -> object:
    """Of which each row says for itself what went wrong."""
    done = sweep(at / "m.toml", out=at / "run")
    if wrong := [row.problem for row in done.rows if row.problem]:
        raise EnvironmentProblem(wrong[0], code="write.failed" if "cannot write" in wrong[0] else "other")
    assert done.verdict == "passed", done.rows
    return done


def _bundle(at: Path) -> object:
    return repaconv.bundle(at / "run", target="orin-nano", count=2)


@cache
def _for_a_board() -> Path:
    """A run with an export for one, made by a child."""
    at = damaged_artefacts.scratch("torture-board-")
    killed_stages.with_a_run(at)
    assert not killed_stages.told_by(lambda at: repaconv.export(at / "run", target="orin-nano"), at)
    return at


def _with_a_board(at: Path) -> None:
    shutil.copytree(_for_a_board(), at, dirs_exist_ok=True)
    fold = at / "run/fold.json"
    fold.write_text(fold.read_text().replace(str(_for_a_board()), str(at)))


def _report(at: Path) -> object:
    return repaconv.report(at / "run", paper=False)


EVERY = {"pages": range(18), "files": range(10)}
SOME = {"pages": range(0, 45, 6), "files": range(0, 16, 3)}
MORE = {"pages": range(0, 97, 8), "files": range(0, 33, 4)}
BUT = ("build, again", "export, of another fold")
STAGES: dict[str, tuple[Stage, Prepare, dict[str, range]]] = {
    **{name: (*rest, EVERY) for name, rest in killed_stages.BY_STEPS.items() if name not in BUT},
    "report": (_report, killed_stages.with_a_run, EVERY),
    "bundle": (_bundle, _with_a_board, EVERY),
    "export to int8": (_int8, killed_stages.with_a_run, SOME),
    "run": (_run, killed_long_commands.STAGES["run"][1], MORE),
    "sweep": (_sweep, killed_long_commands.STAGES["sweep"][1], SOME),
    "tune": (*killed_long_commands.STAGES["tune"][:2], SOME),
}
"""By name: the stage, what is there before, and the rooms that are left to it, up to what is enough."""


class Room(NamedTuple):
    """What is left on the disk: pages of memory, and names for files and folders."""

    pages: int = 1 << 10
    files: int = 1 << 10


@contextmanager
def disk(at: Path) -> Iterator[Path]:
    """A disk of its own in a folder that is made for it.

    Raises:
        PermissionError: If this user may not mount one.
    """
    at.mkdir()
    _mount(at, *(f"{name}={most}" for name, most in ROOMY.items()))
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
        at.rmdir()


def _mount(at: Path, *options: str) -> None:
    words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(at)]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.decode())


def leave(at: Path, room: Room) -> None:
    """Make the disk as small as what is on it and that room."""
    now = os.statvfs(at)
    size, files = (now.f_blocks - now.f_bfree + room.pages) * BYTES, now.f_files - now.f_ffree + room.files
    _mount(at, "remount", f"size={size}", f"nr_inodes={files}")


def ended_with(room: Room, stage: Stage, prepare: Prepare, at: Path) -> str:
    """``sound`` if it is done in that room, ``refused`` if it says so, and is done as soon as there is more.

    Raises:
        AssertionError: If it ends otherwise, for want of something else, or leaves something by half.
    """
    (at / "tmp").mkdir()
    prepare(at)
    leave(at, room)
    said = killed_stages.told_by(partial(_all_on_it, stage), at)
    assert not said or said.startswith("write.failed: "), said
    _require_whole(at)
    leave(at, Room())
    again = killed_stages.told_by(partial(_all_on_it, stage), at)
    assert not again, f"after {said!r}, and with room: {again}"
    _require_whole(at)
    return "refused" if said else "sound"


def _all_on_it(stage: Stage, at: Path) -> object:
    """In a child of its own: nothing of this is undone."""
    os.environ |= {"HOME": str(at), "XDG_CACHE_HOME": str(at / "cache"), "TMPDIR": str(at / "tmp")}
    tempfile.tempdir = str(at / "tmp")
    os.chdir(at)
    return stage(at)


def _require_whole(at: Path) -> None:
    killed_stages.require_whole(at)
    left = [path for path in at.rglob("*") if path.name.endswith(PART) or path.parent.name == "tmp"]
    assert not left, f"left behind: {left}"


def full(name: str) -> Iterator[Case]:
    """A stage with every room that it is given."""
    damaged_artefacts.whole_run()  # by a child that listens to nothing
    stage, prepare, rooms = STAGES[name]
    for what, lefts in rooms.items():
        for left in lefts:
            read = partial(_read, room=Room(**{what: left}), stage=stage, prepare=prepare)
            yield Case(f"full disks: {name}", f"{left} {what}", lambda folder: folder / "disk", read, alone=True)


def _read(at: Path, room: Room, stage: Stage, prepare: Prepare) -> str:
    with disk(at):
        return ended_with(room, stage, prepare, at)

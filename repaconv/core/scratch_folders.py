"""Folders to work in, which go again; a disk that is full is told of whatever library met it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repaconv.core.errors import EnvironmentProblem
from repaconv.core.files import SCRATCH, unwritable

ROOM = 1 << 16
"""Bytes without which a disk is full, and what went wrong there went wrong for that."""


@contextmanager
def scratch_folder(folder: Path | None = None) -> Iterator[Path]:
    """A folder in ``folder`` to work in, which goes again; where temporary files go when None.

    Raises:
        EnvironmentProblem: If there can be none, or no room is left while it is worked in.
    """
    hint = "Make it a folder that you may write to" if folder else "Set TMPDIR to a folder that you may write to"
    where = f"in {folder or 'a folder for temporary files'}"
    try:
        scratch = tempfile.TemporaryDirectory(prefix=SCRATCH if folder else "repaconv-", dir=folder)
    except OSError as error:
        raise unwritable(where, error, hint) from error
    with scratch as name:
        try:
            yield Path(name)
        except EnvironmentProblem:
            raise
        except Exception as error:  # libraries say anything where they could not write
            _require_room(Path(name), where, hint, error)
            raise


def _require_room(folder: Path, where: str, hint: str, error: Exception) -> None:
    try:
        (folder / "room").write_bytes(bytes(ROOM))
    except OSError as full:
        raise unwritable(where, full, hint) from error

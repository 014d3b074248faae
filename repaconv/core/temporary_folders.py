"""Temporary working folders, removed after use; a full disk is reported whichever library met it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repaconv.core.errors import EnvironmentProblem
from repaconv.core.files import SCRATCH, write_error

DISK_TEST_BYTES = 1 << 16
"""Bytes written to test whether the disk is full. If that fails, the full disk caused the original error."""


@contextmanager
def scratch_folder(folder: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder, remove it afterwards. Its parent is ``folder``, or the system's if None.

    Raises:
        EnvironmentProblem: If the folder cannot be created, or the disk becomes full while it is used.
    """
    hint = "Make it a folder that you may write to" if folder else "Set TMPDIR to a folder that you may write to"
    where = f"in {folder or 'a folder for temporary files'}"
    try:
        scratch = tempfile.TemporaryDirectory(prefix=SCRATCH if folder else "repaconv-", dir=folder)
    except OSError as error:
        raise write_error(where, error, hint) from error
    with scratch as name:
        try:
            yield Path(name)
        except EnvironmentProblem:
            raise
        except Exception as error:  # libraries raise any exception when a write fails
            _require_room(Path(name), where, hint, error)
            raise


def _require_room(folder: Path, where: str, hint: str, error: Exception) -> None:
    try:
        (folder / "room").write_bytes(bytes(DISK_TEST_BYTES))
    except OSError as full:
        raise write_error(where, full, hint) from error

"""Check a file's SHA-256 before anything else of it is read."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.sharded_checkpoint import files_of, sha256_of_checkpoint, stamps_of_checkpoint
from repaconv.core.thread_pool import thread_pool

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint


def require_pinned(path: Path, wanted: str | None, found: str | None = None) -> str | None:
    """Compare a file's SHA-256 with the expected one, before anything else of it is read.

    Args:
        path: The file; if it does not exist, nothing is checked here.
        wanted: The expected hash, 64 hexadecimal digits; None checks nothing.
        found: The file's hash, if it is known already.

    Returns:
        The file's hash, if it was computed or given.

    Raises:
        UsageProblem: If ``wanted`` is not a SHA-256.
        Refused: If the hashes differ.
    """
    if wanted is None:
        return found
    if not re.fullmatch(r"[0-9a-fA-F]{64}", wanted):
        raise UsageProblem(
            f"--sha256 {wanted} is not 64 hexadecimal digits.",
            hint="Give the hash as sha256sum prints it; `repaconv inspect` shows that of a checkpoint.",
            code="usage.sha256",
        )
    found = found or (sha256_of_checkpoint(path) if path.is_file() else None)
    if found and found != wanted.lower():
        raise Refused(
            f"{path} has the SHA-256 {found}, but {wanted.lower()} was expected; it was not read further.",
            hint="It is another file, or it was damaged: download it again. If it is the right file, give its hash.",
            code="file.sha256",
        )
    return found


def read_hashed(checkpoint: Path, weights: str | None, pinned: str | None = None) -> Checkpoint:
    """Read a checkpoint after hashing it, which runs while torch is imported, since both take seconds.

    Args:
        checkpoint: The file.
        weights: The set of weights to read; None chooses by rule.
        pinned: The expected hash, if there is one.

    Raises:
        UsageProblem, Refused: As `require_pinned` and `repaconv.checkpoints.read_checkpoint` do.
    """
    sha256 = stamps = None
    if all(map(_worth_hashing, files_of(checkpoint))):
        stamps = stamps_of_checkpoint(checkpoint)
        with thread_pool(1) as pool:
            importing = pool.submit(import_module, "torch")
            sha256 = sha256_of_checkpoint(checkpoint)
            importing.result()  # the import must be finished before torch is used
    from repaconv.checkpoints import read_checkpoint

    found = read_checkpoint(checkpoint, weights, require_pinned(checkpoint, pinned, sha256))
    found.require_unchanged(stamps)
    return found


def _worth_hashing(path: Path) -> bool:
    """Whether it is a readable file, and not a truncated ZIP archive."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(2) != b"PK" or is_zipfile(file)
    except OSError:  # reading it later reports the problem
        return False

"""A file that is known by its hash: no other is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

from repaconv.core.change_guard import stamp_of
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.files import sha256_of
from repaconv.core.thread_pool import workers

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint


def require_pinned(path: Path, wanted: str | None, found: str | None = None) -> str | None:
    """Hold a file to the SHA-256 that was asked for, before anything else is read of it.

    Args:
        path: The file; what is none is left to who reads it.
        wanted: 64 hexadecimal digits; nothing is asked for when None.
        found: The file's own, where it is known.

    Returns:
        The file's own, where it was looked at.

    Raises:
        UsageProblem: If ``wanted`` is no SHA-256.
        Refused: If the file has another.
    """
    if wanted is None:
        return found
    if not re.fullmatch(r"[0-9a-fA-F]{64}", wanted):
        raise UsageProblem(
            f"--sha256 {wanted} is not 64 hexadecimal digits.",
            hint="Give the hash as sha256sum prints it; `repaconv inspect` shows that of a file.",
            code="usage.sha256",
        )
    found = found or (sha256_of(path) if path.is_file() else None)
    if found and found != wanted.lower():
        raise Refused(
            f"{path} has the SHA-256 {found}, but {wanted.lower()} was expected; it was not read further.",
            hint="It is another file, or it was damaged: download it again. If it is the right file, give its hash.",
            code="file.sha256",
        )
    return found


def read_hashed(checkpoint: Path, weights: str | None, pinned: str | None = None, *, built: bool = True) -> Checkpoint:
    """A checkpoint, hashed while torch is imported, which takes seconds, and held to the hash that it is to have.

    Args:
        checkpoint: The file.
        weights: Which of its sets; by rule when None.
        pinned: The hash that it is to have, if that is known.
        built: Whether a network is built of it, on the meta device, whose first operation imports much.

    Raises:
        UsageProblem, Refused: As `require_pinned` and `repaconv.checkpoints.read_checkpoint` do.
    """
    sha256 = stamp = None
    if _worth_hashing(checkpoint):
        stamp = stamp_of(checkpoint)
        with workers(1) as beside:
            importing = beside.submit(_import_torch, meta=built)
            sha256 = sha256_of(checkpoint)
            importing.result()  # what is half imported is no module yet
    from repaconv.checkpoints import read_checkpoint

    found = read_checkpoint(checkpoint, weights, require_pinned(checkpoint, pinned, sha256))
    found.require_unchanged(stamp)
    return found


def _worth_hashing(checkpoint: Path) -> bool:
    """Whether it is a file that can be read, and no archive that has lost its end, whatever its length."""
    try:
        if not checkpoint.is_file():
            return False
        with checkpoint.open("rb") as file:
            return file.read(2) != b"PK" or is_zipfile(file)
    except OSError:  # reading it says what is wrong
        return False


def _import_torch(*, meta: bool) -> None:
    import torch

    if meta:
        torch.empty(1, device="meta").mul(2)

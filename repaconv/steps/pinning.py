"""A file that is known by its hash: no other is read."""

from __future__ import annotations

import re
from pathlib import Path

from repaconv.errors import Refused, UsageProblem
from repaconv.files import sha256_of


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
            hint="As sha256sum writes it; `repaconv inspect` says a file's.",
            code="usage.sha256",
        )
    found = found or (sha256_of(path) if path.is_file() else None)
    if found and found != wanted.lower():
        raise Refused(
            f"{path} has the SHA-256 {found}, and {wanted.lower()} was asked for; nothing else of it was read.",
            hint="It is another file than the one that was pinned, or it was damaged on its way: get it again.",
            code="file.sha256",
        )
    return found

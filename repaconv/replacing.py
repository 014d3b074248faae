"""What a stage may replace or remove: what an artefact names, while its hash is still the one that was written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from repaconv.artefacts import Artefact, Payload
from repaconv.errors import UsageProblem
from repaconv.files import payload_of, sha256_of, sha256_of_bytes, stage_of, write_artefact, write_text

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)

SEAL = "\n<!-- repaconv; sha256 of what stands above: {} -->\n"
"""The last line of a page, which has no artefact beside it."""


def named_by(*artefacts: Path) -> dict[Path, set[str]]:
    """The files that artefacts name, and the hashes that they were written with."""
    found: dict[Path, set[str]] = {}
    for artefact in artefacts:
        if not stage_of(artefact):
            continue
        plain = json.loads(artefact.read_text())
        for entry in (plain.get("payload"), plain.get("data"), *(plain.get("beside") or ())):
            if isinstance(entry, dict) and {"path", "sha256"} <= entry.keys():
                found.setdefault((artefact.parent / str(entry["path"])).resolve(), set()).add(str(entry["sha256"]))
    return found


def require_ours(slot: Path, stage: str, *files: Path, known: Sequence[Path] = ()) -> None:
    """Refuse to write over what is somebody else's. Asked before anything is written.

    Args:
        slot: Where the stage's artefact goes: nothing is there, or an artefact of that stage.
        stage: Its name.
        files: What else it writes: nothing is there, or what this slot's artefact names, unchanged.
        known: Other artefacts that may name it.

    Raises:
        UsageProblem: Naming the file.
    """
    named = named_by(slot, *known)
    taken = [slot] if os.path.lexists(slot) and stage_of(slot) != stage else []
    taken += [file for file in files if os.path.lexists(file) and not _unchanged(file, named)]
    if taken:
        raise _foreign(taken[0])


def put(slot: Path, artefact: AnyArtefact) -> AnyArtefact:
    """Write an artefact in the place of the one before, of which what is unchanged and only that one named goes.

    What of it lies outside the slot's folder, where a user asked for it, stays. The new artefact names it on, so that
    it may be replaced some day.

    Returns:
        The artefact as it was written.
    """
    before = named_by(slot)
    write_artefact(slot, artefact)
    gone = {file: hashes for file, hashes in before.items() if file not in named_by(slot)}
    if stays := _remove(gone, slot.parent):
        artefact = artefact.model_copy(update={"beside": (*artefact.beside, *stays)})
        write_artefact(slot, artefact)
    return artefact


def remove(slot: Path, names_on: Path) -> tuple[Payload, ...]:
    """Remove an artefact, and what it names in its own folder if that is unchanged.

    Returns:
        What it names elsewhere and is unchanged, for an artefact in the folder ``names_on``.
    """
    stays = _remove(named_by(slot), slot.parent, names_on)
    slot.unlink()
    return stays


def write_page(path: Path, text: str) -> None:
    """Write a page with a seal at its end, by which it is known again.

    Raises:
        UsageProblem: If there is a file that is no such page, or one that was changed.
    """
    if os.path.lexists(path) and not _sealed(path):
        raise _foreign(path)
    write_text(path, text + SEAL.format(sha256_of_bytes(text.encode())))


def _foreign(path: Path) -> UsageProblem:
    return UsageProblem(
        f"{path} is there already, and is not what repaconv wrote there.",
        hint="It is left as it is. Move it away, or give another place.",
        code="usage.exists",
    )


def _sealed(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_bytes().decode()
        above = text[: -len(SEAL.format("0" * 64))]
        return text == above + SEAL.format(sha256_of_bytes(above.encode()))
    return False


def _unchanged(file: Path, named: dict[Path, set[str]]) -> bool:
    return file.is_file() and sha256_of(file) in named.get(file.resolve(), ())


def _remove(named: dict[Path, set[str]], folder: Path, names_on: Path | None = None) -> tuple[Payload, ...]:
    """Of what is unchanged, remove what lies in that folder; returns what lies elsewhere."""
    unchanged = [file for file in sorted(named) if _unchanged(file, named)]
    elsewhere = [file for file in unchanged if not file.is_relative_to(folder.resolve())]
    for file in unchanged:
        if file not in elsewhere:
            file.unlink()
    return tuple(payload_of(file, (names_on or folder).resolve()) for file in elsewhere)

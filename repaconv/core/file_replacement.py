"""What a stage may replace or remove: what an artefact names, while its hash is still the one that was written.

A file comes before the artefact that names it. Between the two a note lies beside it, which says which file that is: so
a stage that was killed there finds its own again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from repaconv.core.errors import EnvironmentProblem, UsageProblem
from repaconv.core.files import (
    PART,
    SCRATCH,
    payload_of,
    sha256_of,
    sha256_of_bytes,
    stage_of,
    write_artefact,
    write_text,
    write_with,
)
from repaconv.results import Artefact, Payload

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)

SEAL = "\n<!-- repaconv; sha256 of what stands above: {} -->\n"
"""The last line of a page, which has no artefact beside it."""
NOTE = ".repaconv-note"


def named_by(*artefacts: Path) -> dict[Path, set[str]]:
    """The files that artefacts name, and the hashes that they were written with."""
    found: dict[Path, set[str]] = {}
    for artefact in artefacts:
        if not stage_of(artefact):
            continue
        for file, sha256 in _named_in(json.loads(artefact.read_text()), artefact.parent):
            found.setdefault(file, set()).add(sha256)
    return found


def _named_in(plain: Mapping[str, Any], folder: Path) -> Iterator[tuple[Path, str]]:
    for entry in (plain.get("payload"), plain.get("data"), *(plain.get("other_files") or plain.get("beside") or ())):
        if isinstance(entry, dict) and {"path", "sha256"} <= entry.keys():
            yield (folder / str(entry["path"])).resolve(), str(entry["sha256"])


def write_payload(path: Path, content: bytes | str | Callable[[Path], None]) -> None:
    """Atomically write what an artefact will name: bytes, text, or what fills the temporary file that it is given.

    Raises:
        EnvironmentProblem: If the folder cannot be written; ``path`` is then as it was before.
    """

    def writer(temporary: Path) -> None:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        write_text(_note(path), _which(temporary))  # putting it in place does not change which it is

    write_with(path, writer)


def moved(source: Path) -> Callable[[Path], None]:
    """The content of what a stage brings to its place, for `write_payload`: a file on the same disk."""

    def put_there(temporary: Path) -> None:
        source.replace(temporary)

    return put_there


def left_over(path: Path) -> bool:
    """Whether a stage that was killed left it: half a file, a note, what it noted, or a folder to work in."""
    return path.name.endswith((PART, NOTE)) or path.name.startswith(SCRATCH) or _noted(path)


def _note(path: Path) -> Path:
    return path.with_name(f".{path.name}{NOTE}")


def _which(path: Path) -> str:
    """Which file it is, as it was last written."""
    known = path.stat()
    return f"{known.st_dev} {known.st_ino} {known.st_size} {known.st_mtime_ns}\n"


def _noted(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        return not path.is_symlink() and _note(path).read_text() == _which(path)
    return False


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
    named = [file for file, _ in _named_in(artefact.model_dump(), slot.parent)]
    before = {file: hashes for file, hashes in named_by(slot).items() if file not in named}
    if left := [file for file in before if _unchanged(file, before)]:  # named on until they are gone
        write_artefact(slot, _with(artefact, *(payload_of(file, slot.parent) for file in left)))
    artefact = _with(artefact, *_remove(before, slot.parent))
    write_artefact(slot, artefact)
    for file in named:
        _note(file).unlink(missing_ok=True)
    return artefact


def _with(artefact: AnyArtefact, *beside: Payload) -> AnyArtefact:
    return artefact.model_copy(update={"other_files": (*artefact.other_files, *beside)}) if beside else artefact


def remove(slot: Path, names_on: Path) -> tuple[Payload, ...]:
    """Remove an artefact, and what it names in its own folder if that is unchanged.

    Returns:
        What it names elsewhere and is unchanged, for an artefact in the folder ``names_on``.
    """
    stays = _remove(named_by(slot), slot.parent, names_on)
    for file in (names_on / each.path for each in stays):
        with suppress(EnvironmentProblem):  # somebody took that place from us
            write_text(_note(file), _which(file))
    slot.unlink()
    return stays


def remove_written(files: Mapping[Path, str]) -> None:
    """Remove files that are still what was written: those whose hash is the one given."""
    for file in (file for file, sha256 in files.items() if file.is_file() and sha256_of(file) == sha256):
        file.unlink()


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
        f"{path} already exists, and its contents were not written by repaconv.",
        hint="It was not changed. Move it away, or give another path.",
        code="usage.exists",
    )


def _sealed(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_bytes().decode()
        above = text[: -len(SEAL.format("0" * 64))]
        return text == above + SEAL.format(sha256_of_bytes(above.encode()))
    return False


def _unchanged(file: Path, named: dict[Path, set[str]]) -> bool:
    return file.is_file() and (_noted(file) or sha256_of(file) in named.get(file.resolve(), ()))


def _remove(named: dict[Path, set[str]], folder: Path, names_on: Path | None = None) -> tuple[Payload, ...]:
    """Of what is unchanged, remove what lies in that folder; returns what lies elsewhere."""
    unchanged = [file for file in sorted(named) if _unchanged(file, named)]
    elsewhere = [file for file in unchanged if not file.is_relative_to(folder.resolve())]
    for file in unchanged:
        if file not in elsewhere:
            file.unlink()
    return tuple(payload_of(file, (names_on or folder).resolve()) for file in elsewhere)

"""Replacing and removing output files: only files that an artifact names and whose hash is unchanged.

A file is written before the artifact that names it. In between, a note next to the file records its inode, size and
time, so that the file is recognized as our own after a stage was killed at that point.
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
    is_unchanged,
    payload_of,
    require_valid_name,
    require_writable,
    sha256_of,
    sha256_of_bytes,
    stage_of,
    text_bytes,
    write_artefact,
    write_text,
    write_with,
)
from repaconv.results import Artefact, Payload

AnyArtefact = TypeVar("AnyArtefact", bound=Artefact)

SEAL = "\n<!-- repaconv; sha256 of what stands above: {} -->\n"
"""The last line of a page, which has no artifact that records its hash."""
NOTE = ".repaconv-note"


def files_named_by(*artefacts: Path) -> dict[Path, set[str]]:
    """Return the files that artifacts name, with the hashes that were recorded."""
    found: dict[Path, set[str]] = {}
    for artefact in artefacts:
        if not stage_of(artefact):
            continue
        for file, sha256 in _named_in(json.loads(artefact.read_text("utf-8")), artefact.parent):
            found.setdefault(file, set()).add(sha256)
    return found


def _named_in(plain: Mapping[str, Any], folder: Path) -> Iterator[tuple[Path, str]]:
    for entry in (plain.get("payload"), plain.get("data"), *(plain.get("other_files") or plain.get("beside") or ())):
        if isinstance(entry, dict) and {"path", "sha256"} <= entry.keys():
            yield (folder / str(entry["path"])).resolve(), str(entry["sha256"])


def write_payload(path: Path, content: bytes | str | Callable[[Path], None]) -> None:
    """Atomically write a file that an artifact will name: bytes, text, or a function that fills a temporary file.

    Raises:
        EnvironmentProblem: If the folder cannot be written; ``path`` is then unchanged.
    """

    def writer(temporary: Path) -> None:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(text_bytes(content) if isinstance(content, str) else content)
        write_text(_note(path), _file_identity(temporary))  # renaming changes neither inode, size nor time

    write_with(path, writer)


def move_from(source: Path) -> Callable[[Path], None]:
    """Return a writer for `write_payload` that moves a file on the same disk."""

    def put_there(temporary: Path) -> None:
        source.replace(temporary)

    return put_there


def is_left_over(path: Path) -> bool:
    """Return whether a killed stage left this path: a partial file, a note, a file with a note, or a working folder."""
    return path.name.endswith((PART, NOTE)) or path.name.startswith(SCRATCH) or _has_note(path)


def _note(path: Path) -> Path:
    return path.with_name(f".{path.name}{NOTE}")


def _file_identity(path: Path) -> str:
    """Identify a file by device, inode, size and modification time."""
    known = path.stat()
    return f"{known.st_dev} {known.st_ino} {known.st_size} {known.st_mtime_ns}\n"


def _has_note(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        return not path.is_symlink() and _note(path).read_text("utf-8") == _file_identity(path)
    return False


def require_replaceable(slot: Path, stage: str, *files: Path, known: Sequence[Path] = ()) -> None:
    """Refuse to overwrite files that were not written by repaconv. Called before anything is written.

    Args:
        slot: Path of the stage's artifact: must not exist, or contain an artifact of that stage.
        stage: Name of the stage.
        files: Other files to write: must not exist, or be named by the artifact in ``slot`` and unchanged.
        known: Other artifacts that may name these files.

    Raises:
        UsageProblem: If a file was written by something else or changed; the message names it.
        Refused: If one of them is no valid name for a file.
        EnvironmentProblem: If the folder of one of them cannot be written.
    """
    for file in (slot, *files):
        require_valid_name(file)
    named = files_named_by(slot, *known)
    taken = [slot] if os.path.lexists(slot) and stage_of(slot) != stage else []
    taken += [file for file in files if os.path.lexists(file) and not _unchanged(file, named)]
    if taken:
        raise _existing_file_error(taken[0])
    for file in (slot, *files):
        require_writable(file)


def replace_artifact(slot: Path, artefact: AnyArtefact) -> AnyArtefact:
    """Write an artifact in place of the previous one, and remove the unchanged files that only the previous one named.

    Such files outside the folder of ``slot`` remain, because the user chose the place. The new artifact keeps naming
    them, so that they can be replaced later.

    Returns:
        The artefact as it was written.
    """
    named = [file for file, _ in _named_in(artefact.model_dump(), slot.parent)]
    before = {file: hashes for file, hashes in files_named_by(slot).items() if file not in named}
    if left := [file for file in before if _unchanged(file, before)]:  # named until they are removed
        write_artefact(slot, _with_other_files(artefact, *(payload_of(file, slot.parent) for file in left)))
    artefact = _with_other_files(artefact, *_remove(before, slot.parent))
    write_artefact(slot, artefact)
    for file in named:
        _note(file).unlink(missing_ok=True)
    return artefact


def _with_other_files(artefact: AnyArtefact, *files: Payload) -> AnyArtefact:
    return artefact.model_copy(update={"other_files": (*artefact.other_files, *files)}) if files else artefact


def remove_artifact(slot: Path, names_on: Path) -> tuple[Payload, ...]:
    """Remove an artifact, and the unchanged files in its folder that it names.

    Returns:
        The unchanged files that it names elsewhere, with paths relative to the folder ``names_on``.
    """
    stays = _remove(files_named_by(slot), slot.parent, names_on)
    for file in (names_on / each.path for each in stays):
        with suppress(EnvironmentProblem):  # the folder is no longer writable
            write_text(_note(file), _file_identity(file))
    slot.unlink()
    return stays


def remove_written(files: Mapping[Path, str]) -> None:
    """Remove the files whose hash is still the given one."""
    for file in (file for file, sha256 in files.items() if is_unchanged(file, sha256)):
        file.unlink()


def require_replaceable_page(path: Path) -> None:
    """Refuse to overwrite a page as `write_page` does, before anything is written."""
    require_valid_name(path)
    if os.path.lexists(path) and not _sealed(path):
        raise _existing_file_error(path)
    require_writable(path)


def write_page(path: Path, text: str) -> None:
    """Write a page whose last line contains its hash, so that it is recognized later.

    Raises:
        UsageProblem: If the file exists and is not such a page, or was changed.
        EnvironmentProblem: If it cannot be written.
    """
    require_replaceable_page(path)
    write_text(path, text + SEAL.format(sha256_of_bytes(text_bytes(text))))


def _existing_file_error(path: Path) -> UsageProblem:
    if path.is_dir():
        return UsageProblem(
            f"{path} is a folder, and a file is written here.",
            hint="Give the path of a file, e.g. one in that folder.",
            code="usage.exists",
        )
    return UsageProblem(
        f"{path} already exists, and is not an unchanged output of this run.",
        hint="It was not changed. Move it away, or give another path.",
        code="usage.exists",
    )


def _sealed(path: Path) -> bool:
    if not path.is_file():  # a device may have no end
        return False
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_bytes().decode()
        above = text[: -len(SEAL.format("0" * 64))]
        return text == above + SEAL.format(sha256_of_bytes(above.encode()))
    return False


def _unchanged(file: Path, named: dict[Path, set[str]]) -> bool:
    return file.is_file() and (_has_note(file) or sha256_of(file) in named.get(file.resolve(), ()))


def _remove(named: dict[Path, set[str]], folder: Path, names_on: Path | None = None) -> tuple[Payload, ...]:
    """Remove the unchanged files in that folder, and return those elsewhere."""
    unchanged = [file for file in sorted(named) if _unchanged(file, named)]
    elsewhere = [file for file in unchanged if not file.is_relative_to(folder.resolve())]
    for file in unchanged:
        if file not in elsewhere:
            file.unlink()
    return tuple(payload_of(file, (names_on or folder).resolve()) for file in elsewhere)

"""Files as all stages write and read them: canonical JSON, hashes, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from errno import ENAMETOOLONG
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from repaconv.core import change_guard
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.results import PREVIOUS, SCHEMA_VERSION, Payload, Record

AnyRecord = TypeVar("AnyRecord", bound=Record)

PART = ".repaconv-part"
"""How ends the name of a file while it is written."""
SCRATCH = ".repaconv-work-"
"""How begins the name of a folder that a stage works in."""
_HELD: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())
"""The folders that this command keeps others out of."""


def canonical_json(value: Record | dict[str, Any]) -> str:
    """Sorted keys, two spaces, one newline at the end: equal values are equal bytes."""
    plain = value.model_dump(mode="json") if isinstance(value, Record) else value
    return json.dumps(finite(plain), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(plain: Any) -> Any:
    """The same with ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` for what JSON has no number for; they read back."""
    if isinstance(plain, dict):
        return {key: finite(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [finite(value) for value in plain]
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    return plain


def from_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: If it is none, or nested deeper than anything that is meant.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def require_nameable(path: Path) -> None:
    """Refuse what no file can be called, whether there is one or not.

    Raises:
        Refused: ``file.name``.
    """
    try:
        path.stat()
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == ENAMETOOLONG:
            raise Refused(
                f"{path} is not a valid file name.", hint="Check the path for typing errors.", code="file.name"
            ) from error


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces: large ones, since other threads hold the interpreter between them."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(1 << 24, os.fstat(file.fileno()).st_size or 1))
        while read := file.readinto(buffer):
            digest.update(memoryview(buffer)[:read])
    return digest.hexdigest()


def sha256_of_bytes(content: bytes) -> str:
    """Hex digest of what is in memory."""
    return hashlib.sha256(content).hexdigest()


def cache_folder(what: str) -> Path:
    """Where this user's machine keeps things of that kind between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repaconv" / what


def payload_of(path: Path, folder: Path) -> Payload:
    """Describe a file as seen from the artefact's folder, by where the two are: a way up out of a link is another."""
    relative = Path(os.path.relpath(path.parent.resolve() / path.name, folder.resolve())).as_posix()
    return Payload(path=relative, sha256=sha256_of(path), bytes=path.stat().st_size)


def write_with(path: Path, writer: Callable[[Path], None]) -> None:
    """Let ``writer`` fill a temporary file beside ``path``, then put it in place in one step.

    Raises:
        EnvironmentProblem: If the folder cannot be written; ``path`` is then as it was before.
        Refused: If a file that was read for it was cut meanwhile.
    """
    temporary, handle = None, None
    created = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
        temporary = Path(name)
        _locked(handle)
        writer(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        change_guard.require_none_cut()
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise unwritable(str(path), error, "Give a folder that you may write to with -o") from error
    finally:
        if handle is not None:
            os.close(handle)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: somebody else is there already
                for folder in created:
                    folder.rmdir()


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Keep other commands from writing a run's folder; the kernel lets go of it with the process, and no file is left.

    What a command that was killed there left half-written goes. A stage may hold a folder that its caller holds.

    Args:
        folder: None where nothing is written.

    Raises:
        EnvironmentProblem: If another command writes there, or the folder cannot be made.
    """
    if folder is None or folder.resolve() in _HELD.get():
        yield
        return
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(f"in {folder}", error, "Give a folder that you may write to with -o") from error
    try:
        if not _locked(held):
            raise EnvironmentProblem(
                f"another command is writing to {folder}.",
                hint="Wait until it has finished, or give another folder with -o.",
                code="run.busy",
            )
        before = _HELD.set(_HELD.get() | {folder.resolve()})
        try:
            _sweep(folder)
            yield
        finally:
            _HELD.reset(before)
    finally:
        os.close(held)
        with suppress(OSError):  # not empty: something was written
            for each in created:
                each.rmdir()


def _locked(handle: int) -> bool:
    """Keep others from a file or folder until it is closed; False if another has it."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as some of the network are
        return True
    return True


def _remove_left(path: Path) -> None:
    """Remove what commands that were killed while they wrote this file left beside it; one that is writing holds it."""
    for left in path.parent.glob(f".{escape(path.name)}.*{PART}"):
        with suppress(OSError), left.open("rb") as file:
            if _locked(file.fileno()):
                left.unlink()


def _sweep(folder: Path) -> None:
    """Remove what commands that were killed left in a folder that nobody else writes in."""
    for path in [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]:
        with suppress(OSError):  # a folder that may only be read
            if path.name.endswith(PART) and path.is_file():
                path.unlink()
            elif path.name.startswith(SCRATCH) and path.is_dir() and path.parent == folder:
                shutil.rmtree(path)


def unwritable(what: str, error: OSError, hint: str) -> EnvironmentProblem:
    """What is raised where something cannot be written."""
    told = f"cannot write {what}: {error.strerror or error}."
    return EnvironmentProblem(told, hint=f"{hint}, and check the free space.", code="write.failed")


def write_bytes(path: Path, content: bytes) -> None:
    """Atomically write bytes."""

    def writer(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_with(path, writer)


def write_text(path: Path, text: str) -> None:
    """Atomically write UTF-8 text; what of a file's name is none comes as JSON has it, ``\\udcff``."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_artefact(path: Path, artefact: Record) -> None:
    """Atomically write ``<stage>.json``."""
    write_text(path, canonical_json(artefact))


def read_artefact(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read ``<stage>.json`` back.

    Raises:
        Refused: If it is not JSON, of a newer or a much older schema version, or not of this kind.
    """
    try:
        plain = from_json(path.read_text(encoding="utf-8"))
        version = plain.get("schema_version", SCHEMA_VERSION) if isinstance(plain, dict) else SCHEMA_VERSION
        if version == PREVIOUS["schema_version"]:
            return kind.model_validate({**plain, "schema_version": SCHEMA_VERSION}, context=PREVIOUS)
        if version != SCHEMA_VERSION:
            raise Refused(
                f"{path} has schema version {version}, but this version of repaconv reads {SCHEMA_VERSION} and "
                f"{PREVIOUS['schema_version']}.",
                hint="Run the stage again with this version of repaconv.",
                code="artefact.schema",
            )
        return kind.model_validate(plain)
    except (ValidationError, ValueError, OSError) as error:
        first = str(error).splitlines()[0]
        raise Refused(
            f"{path} is not a readable {kind.__name__}: {first}.",
            hint="Run the stage that writes it again.",
            code="artefact.unreadable",
        ) from error


def stage_of(path: Path) -> str:
    """Which stage an artefact is of; empty if the file is no artefact."""
    try:
        plain: Any = from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, OSError):
        return ""
    ours = isinstance(plain, dict) and "schema_version" in plain
    return str(plain.get("stage", "")) if ours else ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

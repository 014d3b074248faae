"""Reading and writing files for all stages: canonical JSON, hashes, atomic writes, locks on folders."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from errno import EACCES, EDQUOT, EISDIR, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EROFS
from functools import wraps
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from repaconv.core import changed_input_files
from repaconv.core.errors import EnvironmentProblem, Refused, unreadable
from repaconv.core.toml_positions import problems
from repaconv.results import PREVIOUS, SCHEMA_VERSION, Payload, Record

AnyRecord = TypeVar("AnyRecord", bound=Record)
AnyValue = TypeVar("AnyValue")

LONGEST_NAME = 255
"""Longest name of a file or folder in bytes, on nearly all file systems."""
CHECKPOINT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".ckpt", ".tar")
"""What checkpoints are called."""
PART = ".repaconv-part"
"""Suffix of a file while it is being written."""
SCRATCH = ".repaconv-work-"
"""Prefix of a stage's working folder."""
TIME_STEP_NS = 2_000_000_000
"""Longest step between two times that a file system tells apart (FAT)."""
_LOCKED_FOLDERS: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())
"""The folders that this command has locked."""


def canonical_json(value: Record | dict[str, Any]) -> str:
    """Return JSON with sorted keys, two spaces of indentation and a final newline: equal values give equal bytes."""
    plain = value.model_dump(mode="json") if isinstance(value, Record) else value
    return json.dumps(json_safe(plain), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def json_safe(plain: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; they read
    back."""
    if isinstance(plain, dict):
        return {key: json_safe(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [json_safe(value) for value in plain]
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    return plain


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: If it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def require_valid_name(path: Path) -> None:
    """Refuse a path that cannot be a file's, e.g. because it is too long, whether or not the file exists.

    Raises:
        Refused: ``file.name``.
    """
    require_no_tilde(path)
    try:
        path.stat()
    except UnicodeEncodeError as error:
        raise Refused(
            f"{path} has letters that the encoding of this locale, {error.encoding}, lacks.",
            hint="Run the command again with PYTHONUTF8=1 in its environment.",
            code="file.name",
        ) from error
    except ValueError as error:
        raise Refused(
            f"{path} is not a valid file name.", hint="Check the path for typing errors.", code="file.name"
        ) from error
    except OSError as error:
        if error.errno == ELOOP:
            raise Refused(
                f"{path} leads through a symbolic link that leads back to itself.",
                hint="Remove the link, or give another path.",
                code="file.name",
            ) from error
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
        if error.errno == ENAMETOOLONG or longest > LONGEST_NAME:  # of a folder that is missing, it is not found first
            what = f"has a name of {longest} bytes" if longest > LONGEST_NAME else "is longer than a path may be"
            raise Refused(
                f"{path} {what}; a file or folder may have {LONGEST_NAME}.",
                hint="Shorten it, or give a shorter output path with -o.",
                code="file.name",
            ) from error


def require_no_tilde(path: Path, folder: Path = Path()) -> None:
    """Refuse ``~/file``, unless there is a folder of that name: a shell leaves the ``~`` of ``--out=~/file`` as it is.

    Args:
        path: The path as the user wrote it.
        folder: The folder that it is relative to.

    Raises:
        Refused: ``file.name``.
    """
    if not str(path).startswith("~") or os.path.lexists(folder / path.parts[0]):
        return
    with suppress(RuntimeError, ValueError):  # there is no such user: it is a name that begins with ~
        expanded = path.expanduser()
        raise Refused(
            f"{path} begins with ~, which only a shell replaces, and not in quotes or after '='.",
            hint=f"Give {expanded}.",
            code="file.name",
        )


def require_reachable(path: Path) -> None:
    """Refuse a path in a folder that this user may not search.

    Raises:
        Refused: ``file.unreadable``, or the path cannot be a file's.
    """
    require_valid_name(path)
    try:
        path.stat()
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError:  # it does not exist, which is reported by who reads it
        return


def require_file(path: Path, hint: str, code: str) -> None:
    """Refuse a path that is not that of a regular file, which may be read more than once.

    Args:
        path: The path.
        hint: What to do if nothing is there.
        code: The error code.

    Raises:
        Refused: If there is nothing, a folder, a pipe or a device.
    """
    require_reachable(path)
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a file.", hint=hint, code=code)
    if path.exists() and not path.is_file():
        raise Refused(
            f"{path} is a pipe or a device, not a regular file.",
            hint="Save it as a file first, because it is read more than once.",
            code=code,
        )
    if not path.is_file():
        raise Refused(f"there is no file {path}.", hint=hint, code=code)


def is_utf8(path: Path) -> bool:
    """Return whether a path is UTF-8; libraries open no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def exists(path: Path) -> bool:
    """Return whether a file or folder exists; what is not a valid file name does not."""
    try:
        require_valid_name(path)
    except Refused:
        return False
    return path.exists()


def once_per_content(function: Callable[[Path], AnyValue]) -> Callable[[Path], AnyValue]:
    """Decorate a function of a file, so that it reads an unchanged file once per process.

    A file is unchanged if its inode, size and times are. File systems may store times in steps of up to two seconds, so
    a result is kept only if the file was older than that when it was read.
    """
    results: dict[tuple[int, ...], AnyValue] = {}

    @wraps(function)
    def read_once(path: Path) -> AnyValue:
        before = _state(path)
        if before in results:
            return results[before]
        result = function(path)
        if _state(path) == before and time.time_ns() - max(before[3:]) > TIME_STEP_NS:
            results[before] = result
        return result

    return read_once


def _state(path: Path) -> tuple[int, ...]:
    """Device, inode, size, and times (ns) of the last change of content and of attributes. Programs can set the first
    time, but not the second."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@once_per_content
def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. It is read in large blocks, since other threads take the interpreter in between.

    Raises:
        Refused: If this user may not read it.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(min(1 << 24, os.fstat(file.fileno()).st_size or 1))
            while read := file.readinto(buffer):
                digest.update(memoryview(buffer)[:read])
    except PermissionError as error:
        raise unreadable(path) from error
    return digest.hexdigest()


def is_unchanged(path: Path, sha256: str) -> bool:
    """Return whether the file is there and has that SHA-256."""
    return path.is_file() and sha256_of(path) == sha256


def sha256_of_bytes(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def cache_folder(what: str) -> Path:
    """Return the user's cache folder for that kind of file."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repaconv" / what


def payload_of(path: Path, folder: Path) -> Payload:
    """Describe a file by its path relative to the artifact's folder. Symbolic links are resolved first, because ``..``
    out of a link leads elsewhere."""
    relative = Path(os.path.relpath(path.parent.resolve() / path.name, folder.resolve())).as_posix()
    return Payload(path=relative, sha256=sha256_of(path), bytes=path.stat().st_size)


def write_with(path: Path, writer: Callable[[Path], None]) -> None:
    """Let ``writer`` fill a temporary file next to ``path``, then rename it atomically.

    Raises:
        EnvironmentProblem: If the folder cannot be written; ``path`` is then unchanged.
        Refused: If ``path`` cannot be a file's, or an input file was truncated while it was being read.
    """
    require_valid_name(path)
    temporary, handle = None, None
    created = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path)
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=PART, dir=path.parent)
        temporary = Path(name)
        _try_lock(handle)
        writer(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        changed_input_files.require_none_truncated()
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise write_error(str(path), error, "Give a folder that you may write to with -o") from error
    finally:
        if handle is not None:
            os.close(handle)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: another process wrote to it
                for folder in created:
                    folder.rmdir()


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Lock a run folder against other commands. The kernel releases the lock when the process ends; no file is left.

    Partial files of killed commands are removed. A stage may lock a folder that its caller has locked.

    Args:
        folder: The folder; None if nothing is written.

    Raises:
        EnvironmentProblem: If another command has locked the folder, or it cannot be created.
        Refused: If ``folder`` cannot be a folder's name.
    """
    if folder is None or folder.resolve() in _LOCKED_FOLDERS.get():
        yield
        return
    require_valid_name(folder)
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise write_error(f"in {folder}", error, "Give a folder that you may write to with -o") from error
    try:
        if not _try_lock(held):
            raise EnvironmentProblem(
                f"another command is writing to {folder}.",
                hint="Wait until it has finished, or give another folder with -o.",
                code="run.busy",
            )
        before = _LOCKED_FOLDERS.set(_LOCKED_FOLDERS.get() | {folder.resolve()})
        try:
            _remove_left_in(folder)
            yield
        finally:
            _LOCKED_FOLDERS.reset(before)
    finally:
        os.close(held)
        with suppress(OSError):  # not empty: something was written
            for each in created:
                each.rmdir()


def _try_lock(handle: int) -> bool:
    """Lock a file or folder until it is closed; return False if another process has locked it."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, e.g. some network file systems
        return True
    return True


def _prefix(path: Path) -> str:
    """How the names of a file's temporary files begin; the hash of its name in place of one that is too long for it."""
    name = os.fsencode(path.name)
    return f".{path.name if len(name) <= LONGEST_NAME // 2 else sha256_of_bytes(name)}."


def _remove_left(path: Path) -> None:
    """Remove the temporary files that killed commands left next to this file. A running command locks its own."""
    for left in path.parent.glob(f"{escape(_prefix(path))}*{PART}"):
        with suppress(OSError), left.open("rb") as file:
            if _try_lock(file.fileno()):
                left.unlink()


def _remove_left_in(folder: Path) -> None:
    """Remove what killed commands left in a folder that no other command is writing to."""
    for path in [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]:
        with suppress(OSError):  # a read-only folder
            if path.name.endswith(PART) and path.is_file():
                path.unlink()
            elif path.name.startswith(SCRATCH) and path.is_dir() and path.parent == folder:
                shutil.rmtree(path)


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written later; nothing is written now.

    A file without a name is created and dropped: a file system may be read-only, or take no files, as /proc.

    Raises:
        EnvironmentProblem: ``write.failed``: the path is a folder, a pipe or a device, or the nearest part of it that
            exists is no folder or one in which this user can create no file.
        Refused: If it cannot be a file's path.
    """
    require_valid_name(path)
    around = next((each for each in path.parents if os.path.lexists(each)), Path())
    if path.is_dir():
        why = os.strerror(EISDIR)
    elif path.exists() and not path.is_file():  # a rename would put a file in its place, also of /dev/null
        why = "it is a pipe or a device, not a regular file"
    elif not around.is_dir():
        why = f"{around}: {os.strerror(ENOTDIR)}"
    elif not os.access(around, os.W_OK | os.X_OK):
        read_only = os.statvfs(around).f_flag & os.ST_RDONLY
        why = f"{around}: {os.strerror(EROFS if read_only else EACCES)}"
    else:
        try:
            tempfile.TemporaryFile(dir=around).close()
        except OSError as error:
            full = error.errno in (ENOSPC, EDQUOT)
            why = f"{around}: {error.strerror if full else 'no file can be created there'}"
        else:
            return
    raise write_error(str(path), OSError(why), "Give another path")


def write_error(what: str, error: OSError, hint: str) -> EnvironmentProblem:
    """Return the error for a path that cannot be written."""
    message = f"cannot write {what}: {error.strerror or error}."
    return EnvironmentProblem(message, hint=f"{hint}, and check the free space.", code="write.failed")


def write_bytes(path: Path, content: bytes) -> None:
    """Atomically write bytes."""

    def writer(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_with(path, writer)


def text_bytes(text: str) -> bytes:
    """Return a text in UTF-8. Undecodable bytes of file names are written as JSON does, ``\\udcff``."""
    return text.encode(errors="backslashreplace")


def write_text(path: Path, text: str) -> None:
    """Atomically write the `text_bytes` of a text."""
    write_bytes(path, text_bytes(text))


def write_artefact(path: Path, artefact: Record) -> None:
    """Atomically write an artifact, ``<stage>.json``."""
    write_text(path, canonical_json(artefact))


def read_artefact(
    path: Path,
    kind: type[AnyRecord],
    *,
    what: str = "",
    hint: str = "Run the command that writes it again.",
    code: str = "artefact.unreadable",
) -> AnyRecord:
    """Read an artifact, ``<stage>.json``.

    Args:
        path: The file.
        kind: The class of the artifact.
        what: What the refusal says that the file is not, e.g. ``file of baselines``; by default, a result of its stage.
        hint: The hint of that refusal.
        code: The code of that refusal.

    Raises:
        Refused: If it is not JSON, has an unsupported schema version, or is not of this kind.
    """
    try:
        plain = parse_json(path.read_text(encoding="utf-8"))
        version = plain.get("schema_version", SCHEMA_VERSION) if isinstance(plain, dict) else SCHEMA_VERSION
        if version == PREVIOUS["schema_version"]:
            return kind.model_validate({**plain, "schema_version": SCHEMA_VERSION}, context=PREVIOUS)
        if version != SCHEMA_VERSION:
            raise Refused(
                f"{path} has schema version {version}, but this version of repaconv reads {SCHEMA_VERSION} and "
                f"{PREVIOUS['schema_version']}.",
                hint="Run the command that writes it again, with this version of repaconv.",
                code="artefact.schema",
            )
        return kind.model_validate(plain)
    except PermissionError as error:
        raise unreadable(path) from error
    except (ValidationError, ValueError, OSError) as error:
        wrong = problems(error, "", {})[0].message if isinstance(error, ValidationError) else str(error).splitlines()[0]
        stage = kind.model_fields["stage"].default if "stage" in kind.model_fields else "repaconv"
        raise Refused(
            f"{path} is not a readable {what or f'result of {stage}'}: {wrong.lstrip(': ').rstrip('.')}.",
            hint=hint,
            code=code,
        ) from error


def stage_of(path: Path) -> str:
    """Return the stage of an artifact; empty if the file is not an artifact."""
    try:
        plain: Any = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, OSError):
        return ""
    ours = isinstance(plain, dict) and "schema_version" in plain
    return str(plain.get("stage", "")) if ours else ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

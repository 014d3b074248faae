"""A checkpoint in several files, as ``save_pretrained`` of Hugging Face writes a large one: an index and its parts.

The index, e.g. ``model.safetensors.index.json``, names the file of each tensor under ``weight_map``. It stands for the
whole checkpoint: the user gives its path, and results record it. The functions here take the path of any checkpoint;
one in a single file has only that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from repaconv.core.changed_input_files import Stamp, stamp_of
from repaconv.core.errors import Refused, describe_exception, unreadable
from repaconv.core.files import require_reachable, sha256_of, sha256_of_bytes
from repaconv.core.thread_pool import thread_pool, usable_cpus

INDEX = ".index.json"
"""How the name of an index ends, after the name that the checkpoint would have in one file."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""File names of the weights in a Hugging Face folder, in one file each, in order of preference."""
_PART_NAME = re.compile(r"(.+)-\d{5}-of-(?!00001\.)\d{5}(\.safetensors|\.bin)")
"""File names of the parts that ``save_pretrained`` writes if there are several."""


def is_index(path: Path) -> bool:
    """Whether a path is named as an index; it need not exist."""
    return path.name.endswith(INDEX) and not path.is_dir()


def weights_in(folder: Path) -> Path | None:
    """The weights of a Hugging Face folder: one file, or the index of several; None if it has none."""
    names = (each for name in WEIGHTS for each in (name, f"{name}{INDEX}"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def checkpoint_at(path: Path) -> Path:
    """The checkpoint at a path: the index in a folder that holds a checkpoint in several files; else the path itself.

    Raises:
        Refused: If the folder holds several of them, and none has the usual name.
    """
    if not path.is_dir():
        return path
    if weights := weights_in(path):
        return weights if is_index(weights) else path
    found = sorted(each for suffix in ("safetensors", "bin") for each in path.glob(f"*.{suffix}{INDEX}"))
    if len(found) > 1:
        raise Refused(
            f"{path} holds several checkpoints: {', '.join(each.name for each in found)}.",
            hint=f"Give one of them, e.g. {found[0]}.",
            code="checkpoint.directory",
        )
    return found[0] if found else path


def weight_map(index: Path) -> dict[str, str]:
    """Return the name of each tensor's part, relative to the folder of the index.

    Raises:
        Refused: ``checkpoint.index`` if it is not an index, or names a file outside its folder; ``checkpoint.missing``
            or ``file.unreadable`` if it cannot be read.
    """
    require_reachable(index)
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_distinct)
    except FileNotFoundError:
        raise Refused(
            f"there is no file {index}.", hint="Check the path to the checkpoint.", code="checkpoint.missing"
        ) from None
    except PermissionError as error:
        raise unreadable(index) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _no_index(index, describe_exception(error)) from error
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(part, str) for part in named.values()):
        raise _no_index(index, "it has no weight_map with the file of each tensor")
    for part in dict.fromkeys(named.values()):
        place = PurePosixPath(part)
        if "\\" in part:
            raise _no_index(
                index,
                f"it names the file {part!r} with a backslash, as on Windows",
                hint=f"Write / in place of \\ in {index.name}.",
            )
        if place.is_absolute() or ".." in place.parts or not place.parts:
            raise _no_index(index, f"it names the file {part!r}, which is not inside its folder")
        if part.endswith(INDEX):
            raise _no_index(index, f"it names {part!r}, an index, as a part")
    return named


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: If a name occurs twice, of which JSON parsers take the last.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name!r} twice")
        found[name] = value
    return found


def _no_index(
    index: Path,
    why: str,
    *,
    hint: str = "Download it again, or save the model again: save_pretrained writes the index with the parts.",
) -> Refused:
    return Refused(
        f"{index} is not the index of a checkpoint in several files: {why}.",
        hint=hint,
        code="checkpoint.index",
    )


def part_names(index: Path) -> list[str]:
    """Return the names of the parts in the index, sorted.

    Raises:
        Refused: As `weight_map` does.
    """
    return sorted(set(weight_map(index).values()))


def parts_of(index: Path) -> dict[str, Path]:
    """Return the parts by their names in the index, in the order of these names.

    Raises:
        Refused: ``checkpoint.part`` if one of them is missing or no regular file, or as `weight_map` does.
    """
    parts = {name: index.parent / name for name in part_names(index)}
    for part in parts.values():
        require_reachable(part)
        if not part.is_file():
            what = "is not a regular file" if part.exists() else "is missing"
            raise Refused(
                f"{part} {what}, and {index.name} names it as a part of the checkpoint.",
                hint=f"Download or copy all parts into the folder of {index.name}.",
                code="checkpoint.part",
            )
    return parts


def files_of(checkpoint: Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint: the index and its parts, or the one file.

    Raises:
        Refused: As `parts_of` does.
    """
    return (checkpoint, *parts_of(checkpoint).values()) if is_index(checkpoint) else (checkpoint,)


def require_no_part(file: Path) -> None:
    """Refuse one of the parts in place of the whole checkpoint: by its name, or because an index next to it names it.

    Raises:
        Refused: ``checkpoint.partitioned``.
    """
    index, name = _index_naming(file), _PART_NAME.fullmatch(file.name)
    if index is None and name is None:
        return
    wanted = index or file.with_name("".join((*name.groups(), INDEX)) if name else "")
    raise Refused(
        f"{file} is one of several files that hold the weights of one model.",
        hint=f"Give the index, which names all of them: {wanted}"
        if wanted.is_file()
        else f"Download their index and all parts into this folder, and give the index: {wanted}",
        code="checkpoint.partitioned",
    )


def _index_naming(file: Path) -> Path | None:
    """The index next to a file that names it as one of several parts."""
    with suppress(OSError):  # a folder that may not be listed
        for index in sorted(file.parent.glob(f"*{INDEX}")):
            with suppress(Refused):
                if len(named := part_names(index)) > 1 and file.name in named:
                    return index
    return None


def sha256_of_checkpoint(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint: of the file, or of what ``sha256sum`` prints for the index and its parts.

    So ``sha256sum model.safetensors.index.json model-*.safetensors | sha256sum`` prints it, too, in the folder.

    Raises:
        Refused: As `files_of` does.
    """
    if not is_index(checkpoint):
        return sha256_of(checkpoint)
    files = {checkpoint.name: checkpoint, **parts_of(checkpoint)}
    with thread_pool(usable_cpus()) as pool:
        hashes = pool.map(sha256_of, files.values())
        lines = [f"{digest}  {name}\n" for digest, name in zip(hashes, files, strict=True)]
    return sha256_of_bytes("".join(lines).encode(errors="surrogateescape"))


def is_unchanged_checkpoint(checkpoint: Path, sha256: str) -> bool:
    """Return whether the checkpoint is there with all its parts and has that `sha256_of_checkpoint`."""
    with suppress(Refused):
        return checkpoint.is_file() and sha256_of_checkpoint(checkpoint) == sha256
    return False


def bytes_of_checkpoint(checkpoint: Path) -> int:
    """Return the size of all files of a checkpoint."""
    return sum(file.stat().st_size for file in files_of(checkpoint))


def stamps_of_checkpoint(checkpoint: Path) -> dict[Path, Stamp]:
    """Return the stamp of each file of a checkpoint, that of an index from before it was read.

    Raises:
        Refused: As `files_of` does.
    """
    first = stamp_of(checkpoint)
    return {file: stamp_of(file) for file in files_of(checkpoint)} | {checkpoint: first}


def resolved_checkpoint(checkpoint: Path) -> Path:
    """Return the absolute path of a checkpoint, without links.

    An index that is a link stays one: its parts are next to the link, as in the cache of the Hugging Face hub.
    """
    return checkpoint.parent.resolve() / checkpoint.name if is_index(checkpoint) else checkpoint.resolve()

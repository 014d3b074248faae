"""Detect the format of a checkpoint file and read it: torch zip, torch legacy (sequential and tar), safetensors.

A checkpoint in several files is read part by part; each may have any of the formats.

Files are memory-mapped, and no code in them is run. Formats: torch/serialization.py (zip since torch 1.6; sequential
since 0.1.10; tar before), and the safetensors header. Pages are read when a tensor is used, so reading does not copy
the weights.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shlex
import struct
import tarfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from repaconv.checkpoints.memory_mapping import Checksums, Contents, map_file, truncated_file, view_as_dtype
from repaconv.checkpoints.other_model_formats import require_no_other_format
from repaconv.checkpoints.restricted_unpickler import Placeholder, StorageIds, StorageKind, strided, unpickle
from repaconv.core import changed_input_files
from repaconv.core.errors import Refused, RepaconvError, describe_exception, first_names, unreadable
from repaconv.core.files import CHECKPOINT_SUFFIXES, require_reachable
from repaconv.core.progress import LOGGER
from repaconv.core.sharded_checkpoint import INDEX, WEIGHTS, is_index, parts_of, require_no_part, weight_map
from repaconv.core.thread_pool import thread_pool, usable_cpus

# --- Read the zip format of torch.save, ``<name>/data.pkl`` and ``<name>/data/<key>``, and verify its checksums.
#
# torch.load ignores the CRC-32 that the zip stores for each record, so that a flipped bit changes a weight without
# notice. Here every record of a used tensor is verified.

PIECE_BYTES = 1 << 18
THREADED_BYTES = 1 << 24
MOST_UNPACKED_BYTES = 1 << 26
"""Bytes that compressed records may unpack to beyond four times the file size; torch does not compress records."""
EXPORTED = ("models/model.json", "serialized_exported_program.json")
"""The record of the graph in an archive of torch.export, since torch 2.8 and before."""


class StorageRecord(NamedTuple):
    """The bytes of a storage: address in memory, position and size in the file, and CRC-32 from the zip index."""

    address: int
    start: int
    size: int
    crc: int


@dataclass
class ZipChecksums(Checksums):
    """The CRC-32 of each stored record that the pickle refers to."""

    description: str = "CRC-32 of each record"
    path: Path = Path()
    records: list[StorageRecord] = field(default_factory=list)

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Verify the records that hold these tensors.

        Raises:
            Refused: ``checkpoint.damaged``, with the first tensor whose bytes have changed.
        """
        records = sorted(self.records)
        used: dict[StorageRecord, str] = {}
        for name, tensor in tensors.items():
            place = bisect_right(records, tensor.data_ptr(), key=lambda record: record.address) - 1
            # Otherwise it is empty, or from a compressed record, whose CRC was verified when it was read.
            if place >= 0 and tensor.data_ptr() < records[place].address + records[place].size:
                used.setdefault(records[place], name)
        with self.path.open("rb") as file:
            for record, found in zip(used, _crcs(file.fileno(), used), strict=True):
                if found != record.crc:
                    raise Refused(
                        f"{used[record]} is damaged: its bytes in {self.path} have the CRC-32 {found:08x}, but "
                        f"{record.crc:08x} was recorded when they were saved.",
                        hint="Download or copy the file again. Its contents are not what was trained.",
                        code="checkpoint.damaged",
                    )


def _crcs(file: int, records: Collection[StorageRecord]) -> Iterator[int]:
    """Yield the CRC-32 of each record in order; on all CPU cores if there are enough bytes."""
    if sum(record.size for record in records) < THREADED_BYTES:
        yield from map(partial(_crc, file), records)
        return
    with thread_pool(usable_cpus()) as pool:
        yield from pool.map(partial(_crc, file), records)


def _crc(file: int, record: StorageRecord) -> int:
    found, at, end = 0, record.start, record.start + record.size
    while at < end and (piece := os.pread(file, min(end - at, PIECE_BYTES), at)):
        found, at = zlib.crc32(piece, found), at + len(piece)
    return found


class Archive:
    """The records of one zip file. Stored ones are memory-mapped; compressed ones are unpacked and verified."""

    def __init__(self, path: Path, index: zipfile.ZipFile) -> None:
        """Read the index.

        Raises:
            Refused: If two records have the same name, or if it is not an archive of torch.save.
        """
        self.path, self.index, self.bytes = path, index, map_file(path)
        self.entries = {info.filename: info for info in index.infolist()}
        if len(self.entries) < len(index.infolist()):
            raise truncated_file(path, "two of its records have one name")
        pickles = [name for name in self.entries if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or any(name.endswith("constants.pkl") for name in self.entries):
            if any(name.endswith(EXPORTED) for name in self.entries):
                raise Refused(
                    f"{path} is a program of torch.export, not a checkpoint.",
                    hint="Export it to ONNX and fold that: torch.onnx.export(torch.export.load(FILE), f='model.onnx').",
                    code="checkpoint.type",
                )
            require_no_other_format(path)
            kind = "a TorchScript archive" if pickles else "a zip file without data.pkl"
            raise Refused(
                f"{path} is {kind}, not a checkpoint.",
                hint="An .npz holds arrays: give it with --inputs."
                if path.suffix == ".npz"
                else "Save the trained module's state_dict() with torch.save or safetensors.",
                code="checkpoint.type",
            )
        self.root = pickles[0][: -len("data.pkl")]
        # torch writes a CRC of 0 with set_crc32_options(False); a pickle does not have it by chance.
        self.without = not any(info.CRC for info in index.infolist())
        self.unpacked = 0
        self.checksums = ZipChecksums(path=path)

    def small(self, name: str) -> bytes:
        """Read a whole record and verify its checksum.

        Raises:
            Refused: If its bytes have changed.
        """
        info = self.entries[f"{self.root}{name}"]
        if info.compress_type != zipfile.ZIP_STORED:
            return self._unpacked(info)
        start = self._start(info, info.file_size)
        content = bytes(self.bytes[start : start + info.file_size].numpy())
        if not self.without and zlib.crc32(content) != info.CRC:
            raise truncated_file(self.path, f"the bytes of {name} are not those that were saved")
        return content

    def storage(self, key: str, dtype: torch.dtype, elements: int) -> Tensor:
        """Return the elements of a storage, [elements].

        Raises:
            Refused: If it is missing or has another size than described.
        """
        wanted = elements * dtype.itemsize
        info = self.entries.get(f"{self.root}data/{key}")
        if info is None:
            raise truncated_file(self.path, f"storage {key} is not in the archive")
        if info.file_size != wanted:
            raise truncated_file(self.path, f"storage {key} has {info.file_size} bytes where {wanted} are described")
        if info.compress_type != zipfile.ZIP_STORED:
            content = bytearray(self._unpacked(info))
            return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        start = self._start(info, wanted)
        found = view_as_dtype(self.bytes[start : start + wanted], dtype)
        self.checksums.records.append(StorageRecord(found.data_ptr(), start, wanted, info.CRC))
        return found

    def _unpacked(self, info: zipfile.ZipInfo) -> bytes:
        self.unpacked += info.file_size
        if self.unpacked > 4 * self.bytes.numel() + MOST_UNPACKED_BYTES:
            raise truncated_file(self.path, f"{info.filename} claims to unpack to {info.file_size:,} bytes")
        return self.index.read(info)

    def _start(self, info: zipfile.ZipInfo, size: int) -> int:
        """Return where a stored record begins: after its local header, whose lengths may differ from the index."""
        header = bytes(self.bytes[info.header_offset : info.header_offset + 30].numpy())
        if len(header) < 30 or header[:4] != b"PK\3\4":
            raise truncated_file(self.path, f"{info.filename} is not where its directory says")
        start: int = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if start + size > self.bytes.numel():
            raise truncated_file(self.path, f"{info.filename} reaches beyond the end of the file")
        return start


def open_zip(path: Path) -> Contents:
    """Read the archive.

    Raises:
        Refused: If it is not an archive of torch.save, or incomplete.
    """
    try:
        index = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise truncated_file(path, "its zip directory, which stands at the end, is not there") from error
    with index:
        archive = Archive(path, index)
        if f"{archive.root}byteorder" in archive.entries and archive.small("byteorder").strip() == b"big":
            raise Refused(
                f"{path} was saved on a big-endian machine, which is not supported.",
                hint="Load it and save it again on a little-endian machine, or save it as .safetensors.",
                code="checkpoint.type",
            )
        found = unpickle(io.BytesIO(archive.small("data.pkl")), StorageIds(archive.storage))
    checksums: Checksums = Checksums("none: saved without") if archive.without else archive.checksums
    return Contents("torch zip", found.value, found.placeholders, checksums)


# --- Read torch.save's formats from before torch 1.6 (2020): sequential (since 0.1.10) and tar (before).
#
# Files are memory-mapped, and no code in them is run.

# torch/serialization.py MAGIC_NUMBER and PROTOCOL_VERSION
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
LEGACY_STARTS = tuple(pickle.dumps(LEGACY_MAGIC, protocol) for protocol in range(2, 6))
"""The first bytes of the sequential format, for each pickle protocol that torch.save may be given."""

# Sequential format: magic, protocol, system, object, storage keys, then (elements, bytes) per storage.


def _meta(_key: str, dtype: torch.dtype, elements: int) -> Tensor:
    return torch.empty(elements, dtype=dtype, device="meta")


def open_sequential(path: Path) -> Contents:
    """Read magic, protocol, system, the object, storage keys, then (elements, bytes) per storage.

    Raises:
        Refused: If the file is incomplete.
    """
    file_bytes = map_file(path)
    with path.open("rb") as file:
        unpickle(file)
        if (protocol := unpickle(file).value) != LEGACY_PROTOCOL:
            raise truncated_file(path, f"unknown protocol {protocol!r}")
        unpickle(file)
        begin = file.tell()
        # The bytes follow the object that describes them, so it is read twice: to find the bytes, and to use them.
        ids = StorageIds(_meta)
        unpickle(file, ids)
        places = _sequential_places(path, file, ids.described)
        file.seek(begin)
        found = unpickle(file, StorageIds(lambda key, dtype, _: view_as_dtype(file_bytes[slice(*places[key])], dtype)))
    return Contents("torch legacy", found.value, found.placeholders)


def _sequential_places(
    path: Path, file: IO[bytes], described: dict[str, tuple[torch.dtype, int]]
) -> dict[str, tuple[int, int]]:
    """Return the byte range of every storage's elements."""
    size = path.stat().st_size
    places = {}
    for key in unpickle(file).value:
        if key not in described:
            raise truncated_file(path, f"storage {key} is not described")
        dtype, elements = described[key]
        header = file.read(8)
        start, end = file.tell(), file.tell() + elements * dtype.itemsize
        if len(header) < 8 or end > size:
            raise truncated_file(path, f"storage {key} reaches beyond the end of the file")
        if struct.unpack("<q", header)[0] != elements:
            raise truncated_file(path, f"storage {key} is not as long as described")
        places[key] = (start, end)
        file.seek(end)
    if missing := sorted(described.keys() - places.keys()):
        raise truncated_file(path, f"storage {missing[0]} is missing")
    return places


# Tar format: members storages, tensors, pickle (torch < 0.1.10).


def open_tar(path: Path) -> Contents:
    """Read the members ``storages``, ``tensors`` and ``pickle``.

    Raises:
        Refused: If the file is incomplete.
    """
    file_bytes = map_file(path)
    try:
        with tarfile.open(path, "r:") as archive, path.open("rb") as file:
            members = {member.name: member.offset_data for member in archive.getmembers()}
            file.seek(members["storages"])
            storages = _tar_storages(file, file_bytes)
            file.seek(members["tensors"])
            objects: dict[int, Tensor] = {**storages, **_tar_tensors(file, storages)}
            file.seek(members["pickle"])
            # A tuple is a module's class with its source text; anything else is the id of a tensor.
            found = unpickle(file, lambda pid: pid[0] if isinstance(pid, tuple) else objects[int(pid)])
    except (LookupError, tarfile.TarError, struct.error, pickle.UnpicklingError, TypeError, ValueError) as error:
        raise truncated_file(path, f"not a whole torch tar archive ({describe_exception(error)})") from error
    return Contents("torch legacy tar", found.value, found.placeholders)


def _tar_storages(file: IO[bytes], whole: Tensor) -> dict[int, Tensor]:
    """Read flat tensors by id: a count, then per storage (id, location, type), length and bytes; then views."""
    storages: dict[int, Tensor] = {}
    for _ in range(unpickle(file).value):
        key, _location, kind = unpickle(file).value
        if not isinstance(kind, StorageKind):
            raise ValueError(f"storage {key} is of an unknown type")
        (elements,) = struct.unpack("<q", file.read(8))
        start = file.tell()
        end = start + elements * kind.dtype.itemsize
        if elements < 0 or end > whole.numel():
            raise ValueError(f"storage {key} reaches beyond the end of the file")
        storages[key] = view_as_dtype(whole[start:end], kind.dtype)
        file.seek(end)
    for view, root, start, elements in unpickle(file).value:
        storages[view] = storages[root][start : start + elements]
    return storages


def _tar_tensors(file: IO[bytes], storages: dict[int, Tensor]) -> dict[int, Tensor]:
    """Read tensors by id: a count, then per tensor (id, storage, type), rank, shape, strides and offset."""
    tensors = {}
    for _ in range(unpickle(file).value):
        key, storage, _type = unpickle(file).value
        (dims, _) = struct.unpack("<ii", file.read(8))
        shape = struct.unpack(f"<{dims}q", file.read(8 * dims))
        stride = struct.unpack(f"<{dims}q", file.read(8 * dims))
        (start,) = struct.unpack("<q", file.read(8))
        tensors[key] = strided(storages[storage], start, shape, stride)
    return tensors


# --- Detect the format of a checkpoint file and read it: torch zip, torch legacy (sequential and tar), safetensors.


def open_container(path: Path) -> Contents:
    """Read a checkpoint of any known format: one file, or the index of several.

    Raises:
        Refused: With one of the codes ``checkpoint.missing``, ``.directory``, ``.empty``, ``.type``, ``.truncated``,
            ``.corrupt``, ``.unsafe-global``, ``.index``, ``.part``, ``.partitioned``.
    """
    changed_input_files.install_sigbus_handler()
    if is_index(path):
        return _open_parts(path)
    require_reachable(path)
    if path.is_file():
        require_no_part(path)
    return _open_file(path)


def _open_file(path: Path) -> Contents:
    """Read one file of any known format."""
    try:
        return _open_by_first_bytes(path)
    except RepaconvError:
        raise
    except Exception as error:  # a hostile or broken file can raise any error
        raise truncated_file(path, describe_exception(error)) from error


def _missing_file_hint(path: Path) -> str:
    """Return a hint for a missing file: OWNER/NAME without a suffix may be a repository on the hub."""
    text = path.as_posix()
    if path.suffix or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) or path.parent.exists():
        return "Check the path to the checkpoint."
    return f"Check the path to the checkpoint. For a model on the hub: repaconv fetch hf://{text}"


def _open_by_first_bytes(path: Path) -> Contents:
    if path.is_dir():
        require_no_other_format(path)
        several = several_files_hint(path)
        hint = f"It is {several}." if several else files_inside(path)
        raise Refused(f"{path} is a folder, not a checkpoint.", hint=hint, code="checkpoint.directory")
    if path.exists() and not path.is_file():
        raise Refused(
            f"{path} is a pipe or a device, not a regular file.",
            hint="Save it as a file first, because it is read more than once.",
            code="checkpoint.type",
        )
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except (FileNotFoundError, NotADirectoryError):  # the latter of net.pth/x
        raise Refused(f"there is no file {path}.", hint=_missing_file_hint(path), code="checkpoint.missing") from None
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {error.strerror}.",
            hint="Copy it to another disk and try again.",
            code="checkpoint.missing",
        ) from error
    if not head:
        raise Refused(
            f"{path} is empty.", hint="The download or the save failed. Get the file again.", code="checkpoint.empty"
        )
    if head.startswith(b"PK"):
        return open_zip(path)
    if head.startswith(LEGACY_STARTS):
        return open_sequential(path)
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < LONGEST_HEADER:
        return _safetensors(path)
    if len(head) >= 262 and head[257:262] == b"ustar":
        return open_tar(path)
    if b'"weight_map"' in head:
        raise Refused(
            f"{path} is not named as the index of a checkpoint in several files is.",
            hint=f"Rename it, e.g. to {path.with_name(f'{WEIGHTS[0]}{INDEX}')}, and give that.",
            code="checkpoint.type",
        )
    require_no_other_format(path, head)
    raise Refused(
        f"{path} is not a checkpoint: {_what_it_looks_like(path, head)}.",
        hint=_pickle_hint(path)
        if head[:1] == b"\x80"
        else "Give a .pth, .pt, .bin or .safetensors file that holds a state dict.",
        code="checkpoint.type",
    )


def several_files_hint(folder: Path) -> str:
    """How to join weights that a distributed training saved in several files of a folder; empty if it has none."""
    if any(folder.glob("*_optim_states.pt")) and not (folder / _DEEPSPEED).is_file():
        above = folder.parent if folder.name else folder.resolve().parent
        folder = above if (above / _DEEPSPEED).is_file() else folder  # the script takes the folder of all steps
    joined = folder.parent / (folder.name or "joined")  # the current folder has no name
    source, target = shlex.quote(str(folder)), shlex.quote(f"{joined}.pth")
    if (folder / ".metadata").is_file():
        command = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {source} {target}"
        return f"a checkpoint of torch.distributed.checkpoint: {command}; then repaconv fold {target}"
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*/*_optim_states.pt")):
        command = f"python {shlex.quote(str(folder / _DEEPSPEED))} {source} {target}"
        return f"a checkpoint of DeepSpeed: {command}; then repaconv fold the file that this writes"
    return ""


_DEEPSPEED = "zero_to_fp32.py"


def files_inside(path: Path) -> str:
    """Return a hint for a folder in the place of a checkpoint: the file to give instead."""
    files = sorted(each for each in path.iterdir() if each.suffix in CHECKPOINT_SUFFIXES and each.is_file())
    return f"Give the file, e.g. {files[0]}." if files else "Give the .pth, .pt, .bin or .safetensors file."


def _pickle_hint(path: Path) -> str:
    """How to save the arrays of a pickle as weights, such as a .pkl of detectron2, whose model zoo has no others."""
    target = str(path.with_suffix(".pth"))
    code = (
        f'import pickle, torch; w = pickle.load(open({json.dumps(str(path))}, "rb"), encoding="latin1"); w = '
        f'w.get("model", w); torch.save({{k: torch.as_tensor(v) for k, v in w.items()}}, {json.dumps(target)})'
    )
    return (
        f"If it holds arrays by name, as detectron2's do, and you trust it, for this runs the code in it: "
        f"python -c {shlex.quote(code)}; then repaconv fold {shlex.quote(target)}."
    )


COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7-Zip",
}
"""Programs that compress files, by the first bytes of what they write."""


def _what_it_looks_like(path: Path, head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, so run `git lfs pull` first"
    if head.lstrip()[:1] == b"<":
        return "it is a web page, so the download got an error page instead of the file"
    if head.lstrip()[:1] in (b"{", b"["):
        return "it is JSON text"
    if head[:1] == b"\x80":
        return "it is a pickle that torch.save did not write"
    if (head[:1] == b"\x08" and (b"onnx" in head.lower() or path.suffix == ".onnx")) or b"pytorch" in head[:64]:
        return "it looks like an ONNX model, which `repaconv fold` and, in Python, repaconv.inspect_file take"
    if program := next((program for start, program in COMPRESSED.items() if head.startswith(start)), ""):
        return f"it is compressed by {program}, so decompress it first"
    return f"it begins with {head[:8]!r}"


# safetensors.

LONGEST_HEADER = 2**40
"""More bytes than any header has. The first eight bytes say how many it has; eight letters would say more."""


def _safetensors(path: Path) -> Contents:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise truncated_file(path, str(error)) from error
    return Contents("safetensors", {**tensors, "__metadata__": {k: _maybe_json(v) for k, v in metadata.items()}})


def _maybe_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# Several files, whose index names the part of each tensor.

MOST_NAMED = 3
"""Most tensors that a warning names."""


@dataclass
class PartsChecksums(Checksums):
    """The checksums of all parts, each of which covers only the tensors of its part."""

    parts: tuple[Checksums, ...] = ()

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Verify the tensors in each part."""
        for part in self.parts:
            part.require(tensors)


def _open_parts(index: Path) -> Contents:
    """Read all parts, which stay memory-mapped, as one state dict.

    Raises:
        Refused: If a part is missing or cannot be read, lacks a tensor that the index says is in it, or holds one that
            the index says is in another part.
    """
    place_of, parts = weight_map(index), parts_of(index)
    promised: dict[str, set[str]] = {name: set() for name in parts}
    for tensor, place in place_of.items():
        promised[place].add(tensor)
    opened = {name: _open_file(part) for name, part in parts.items()}
    value: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    unnamed: list[str] = []
    for name, contents in opened.items():
        entries = _entries_of_part(index, parts[name], contents, promised[name], place_of)
        if isinstance(given := entries.pop("__metadata__", {}), Mapping):
            metadata |= given
        unnamed += (str(each) for each in entries if each not in place_of)
        value |= {each: entry for each, entry in entries.items() if each in place_of}
    if unnamed:
        LOGGER.warning("not read: %s, which %s does not name", first_names(unnamed, MOST_NAMED), index.name)
    containers, checksums = (
        ", ".join(dict.fromkeys(each))
        for each in (
            [contents.container for contents in opened.values()],
            [contents.checksums.description for contents in opened.values()],
        )
    )
    return Contents(
        f"{containers} in {len(parts)} part{'s' * (len(parts) > 1)}"
        + (f", {len(unnamed)} tensor{'s' * (len(unnamed) > 1)} not read" if unnamed else ""),
        {**value, **({"__metadata__": metadata} if metadata else {})},
        tuple(dict.fromkeys(each for contents in opened.values() for each in contents.placeholders)),
        PartsChecksums(checksums, tuple(contents.checksums for contents in opened.values())),
    )


def _entries_of_part(
    index: Path, part: Path, contents: Contents, promised: Collection[str], place_of: Mapping[str, str]
) -> dict[str, Any]:
    """The contents of a part: the tensors that the index promises, metadata, and what the index does not name.

    Raises:
        Refused: If it lacks one of them, or holds one that the index says is in another part.
    """
    found = dict(contents.value) if isinstance(contents.value, Mapping) else {}
    # what only other code could build is refused later, with the name of that code
    lacks = [name for name in promised if not isinstance(found.get(name), (Tensor, Placeholder))]
    more = [name for name in found if name in place_of and name not in promised]
    if not lacks and not more:
        return found
    raise Refused(
        f"{part} has no tensor {min(lacks)}, which {index.name} says is in it."
        if lacks
        else f"{part} holds {more[0]}, which {index.name} says is in {place_of[more[0]]}.",
        hint="Index and parts are of different saves, or one is damaged: download or save all of them again.",
        code="checkpoint.part",
    )

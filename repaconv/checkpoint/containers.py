"""The file formats: torch zip, torch legacy (sequential and tar), safetensors. All memory-mapped, none run.

Formats: torch/serialization.py (zip since torch 1.6; sequential since 0.1.10; tar before), and the
safetensors header. A mapped file is read page by page when a tensor is used, so reading costs no second
copy of the weights.
"""

from __future__ import annotations

import json
import mmap
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from repaconv.checkpoint.pickles import StorageIds, StorageKind, strided, unpickle
from repaconv.errors import Refused

# torch/serialization.py MAGIC_NUMBER and PROTOCOL_VERSION
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


@dataclass(frozen=True)
class Contents:
    """What a file holds: its container, its object as data, and globals that became placeholders."""

    container: str
    value: Any
    placeholders: tuple[str, ...] = ()


def open_container(path: Path) -> Contents:
    """Read a checkpoint file of any known container.

    Raises:
        Refused: With one of the codes ``checkpoint.missing``, ``.directory``, ``.empty``, ``.type``,
            ``.truncated``, ``.corrupt``, ``.unsafe-global``.
    """
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a checkpoint.", hint=_inside(path), code="checkpoint.directory")
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except FileNotFoundError:
        raise Refused(
            f"there is no file {path}.", hint="Check the path to the checkpoint.", code="checkpoint.missing"
        ) from None
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {error.strerror}.", hint="Check its permissions.", code="checkpoint.missing"
        ) from error
    if not head:
        raise Refused(
            f"{path} is empty.", hint="The download or the save failed; get it again.", code="checkpoint.empty"
        )
    if head.startswith(b"PK"):
        return _zip(path)
    if head[:2] == b"\x80\x02" and _starts_with_magic(path):
        return _sequential(path)
    if len(head) > 8 and head[8:9] == b"{":
        return _safetensors(path)
    if len(head) >= 262 and head[257:262] == b"ustar":
        return _tar(path)
    raise Refused(
        f"{path} is not a checkpoint: {_what_it_looks_like(head)}.",
        hint="Give a .pth, .pt, .bin or .safetensors file that holds a state dict.",
        code="checkpoint.type",
    )


def _inside(path: Path) -> str:
    files = sorted(p for p in path.iterdir() if p.suffix in (".pth", ".pt", ".bin", ".safetensors"))
    return f"Give the file, e.g. {files[0]}." if files else "Give the .pth, .pt, .bin or .safetensors file."


def _what_it_looks_like(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, so run `git lfs pull` first"
    if head.lstrip()[:1] == b"<":
        return "it is a web page, so the download got an error page instead of the file"
    if head[:1] == b"\x80":
        return "it is a pickle that torch.save did not write"
    if (head[:1] == b"\x08" and b"onnx" in head.lower()) or b"pytorch" in head[:64]:
        return "it looks like an ONNX model"
    return f"it begins with {head[:8]!r}"


def _truncated(path: Path, detail: str) -> Refused:
    return Refused(
        f"{path} is truncated or corrupt: {detail}.",
        hint="Download or copy it again, and compare its size or hash with the source's.",
        code="checkpoint.truncated",
    )


_MAPPINGS: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""Live mappings by the address of their storage, which holds them."""


def _mapped(path: Path) -> Tensor:
    """The file as uint8 [bytes], private: what is written to it never reaches the file."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    _MAPPINGS[raw.untyped_storage().data_ptr()] = mapping
    return raw


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Give back the memory that reading mapped tensors took; reading them again brings it back from the file."""
    for start in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
        mapping = _MAPPINGS.get(start)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements; copies only where the file did not align them."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)


# --- zip: <name>/data.pkl, <name>/data/<key> ------------------------------------------------------


def _zip(path: Path) -> Contents:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise _truncated(path, "its zip directory, which stands at the end, is not there") from error
    with archive:
        names = archive.namelist()
        pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or any(name.endswith("constants.pkl") for name in names):
            kind = "a TorchScript archive" if pickles else "a zip file without data.pkl"
            raise Refused(
                f"{path} is {kind}, not a checkpoint.",
                hint="Save the trained module's state_dict() with torch.save or safetensors.",
                code="checkpoint.type",
            )
        root = pickles[0][: -len("data.pkl")]
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder").strip() == b"big":
            raise Refused(
                f"{path} was saved on a big-endian machine, which is not supported.",
                hint="Load and save it once on a little-endian machine, or as .safetensors.",
                code="checkpoint.type",
            )
        mapped = _mapped(path)

        def storage_bytes(key: str, dtype: torch.dtype, elements: int) -> Tensor:
            wanted = elements * dtype.itemsize
            try:
                info = archive.getinfo(f"{root}data/{key}")
            except KeyError:
                raise _truncated(path, f"storage {key} is not in the archive") from None
            if info.file_size < wanted:
                raise _truncated(path, f"storage {key} has {info.file_size} bytes where {wanted} are needed")
            if info.compress_type != zipfile.ZIP_STORED:
                content = bytearray(archive.read(info)[:wanted])
                return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            start = _data_offset(mapped, info.header_offset)
            if start + wanted > mapped.numel():
                raise _truncated(path, f"storage {key} reaches beyond the end of the file")
            return _typed(mapped[start : start + wanted], dtype)

        try:
            with archive.open(pickles[0]) as stream:
                found = unpickle(stream, StorageIds(storage_bytes))
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise _truncated(path, str(error)) from error
    return Contents("torch zip", found.value, found.placeholders)


def _data_offset(mapped: Tensor, header: int) -> int:
    """Where a stored entry's bytes begin: after its local header, whose lengths may differ from the index."""
    name_and_extra = bytes(mapped[header + 26 : header + 30].tolist())
    return header + 30 + sum(struct.unpack("<HH", name_and_extra)) if len(name_and_extra) == 4 else mapped.numel()


# --- sequential: magic, protocol, system, object, storage keys, then (elements, bytes) a storage ---


def _starts_with_magic(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return bool(unpickle(file).value == LEGACY_MAGIC)
        except Refused:
            return False


def _meta(_key: str, dtype: torch.dtype, elements: int) -> Tensor:
    return torch.empty(elements, dtype=dtype, device="meta")


def _sequential(path: Path) -> Contents:
    mapped = _mapped(path)
    with path.open("rb") as file:
        unpickle(file)
        if (protocol := unpickle(file).value) != LEGACY_PROTOCOL:
            raise _truncated(path, f"unknown protocol {protocol!r}")
        unpickle(file)
        begin = file.tell()
        # The bytes stand behind the object that describes them: walk it once to find them, once to use them.
        ids = StorageIds(_meta)
        unpickle(file, ids)
        places = _sequential_places(path, file, ids.described)
        file.seek(begin)
        found = unpickle(file, StorageIds(lambda key, dtype, _: _typed(mapped[slice(*places[key])], dtype)))
    return Contents("torch legacy", found.value, found.placeholders)


def _sequential_places(
    path: Path, file: IO[bytes], described: dict[str, tuple[torch.dtype, int]]
) -> dict[str, tuple[int, int]]:
    """Byte range of every storage's elements."""
    size = path.stat().st_size
    places = {}
    for key in unpickle(file).value:
        if key not in described:
            raise _truncated(path, f"storage {key} is not described")
        dtype, elements = described[key]
        header = file.read(8)
        start, end = file.tell(), file.tell() + elements * dtype.itemsize
        if len(header) < 8 or end > size:
            raise _truncated(path, f"storage {key} reaches beyond the end of the file")
        if struct.unpack("<q", header)[0] != elements:
            raise _truncated(path, f"storage {key} is not as long as described")
        places[key] = (start, end)
        file.seek(end)
    if missing := sorted(described.keys() - places.keys()):
        raise _truncated(path, f"storage {missing[0]} is missing")
    return places


# --- tar: members storages, tensors, pickle (torch < 0.1.10) ---------------------------------------


def _tar(path: Path) -> Contents:
    mapped = _mapped(path)
    try:
        with tarfile.open(path, "r:") as archive, path.open("rb") as file:
            members = {member.name: member.offset_data for member in archive.getmembers()}
            file.seek(members["storages"])
            storages = _tar_storages(file, mapped)
            file.seek(members["tensors"])
            objects: dict[int, Tensor] = {**storages, **_tar_tensors(file, storages)}
            file.seek(members["pickle"])
            # A tuple names a module's class with its source text, anything else a tensor.
            found = unpickle(file, lambda pid: pid[0] if isinstance(pid, tuple) else objects[int(pid)])
    except (LookupError, tarfile.TarError, struct.error, pickle.UnpicklingError, TypeError, ValueError) as error:
        raise _truncated(path, f"not a whole torch tar archive ({error})") from error
    return Contents("torch legacy tar", found.value, found.placeholders)


def _tar_storages(file: IO[bytes], mapped: Tensor) -> dict[int, Tensor]:
    """Flat tensors by id: a count, then (id, location, type), a length and the bytes each; then views."""
    storages: dict[int, Tensor] = {}
    for _ in range(unpickle(file).value):
        key, _location, kind = unpickle(file).value
        if not isinstance(kind, StorageKind):
            raise ValueError(f"storage {key} is of an unknown type")
        (elements,) = struct.unpack("<q", file.read(8))
        start = file.tell()
        end = start + elements * kind.dtype.itemsize
        if elements < 0 or end > mapped.numel():
            raise ValueError(f"storage {key} reaches beyond the end of the file")
        storages[key] = _typed(mapped[start:end], kind.dtype)
        file.seek(end)
    for view, root, start, elements in unpickle(file).value:
        storages[view] = storages[root][start : start + elements]
    return storages


def _tar_tensors(file: IO[bytes], storages: dict[int, Tensor]) -> dict[int, Tensor]:
    """Tensors by id: a count, then (id, storage, type), dimensions, shape, strides and offset each."""
    tensors = {}
    for _ in range(unpickle(file).value):
        key, storage, _type = unpickle(file).value
        (dims, _) = struct.unpack("<ii", file.read(8))
        shape = struct.unpack(f"<{dims}q", file.read(8 * dims))
        stride = struct.unpack(f"<{dims}q", file.read(8 * dims))
        (start,) = struct.unpack("<q", file.read(8))
        tensors[key] = strided(storages[storage], start, shape, stride)
    return tensors


# --- safetensors -----------------------------------------------------------------------------------


def _safetensors(path: Path) -> Contents:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _truncated(path, str(error)) from error
    return Contents("safetensors", {**tensors, "__metadata__": {k: _maybe_json(v) for k, v in metadata.items()}})


def _maybe_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text

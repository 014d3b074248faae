"""Read torch.save's formats from before torch 1.6 (2020): sequential (since 0.1.10) and tar (before).

Files are memory-mapped, and no code in them is run.
"""

from __future__ import annotations

import pickle
import struct
import tarfile
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from repaconv.checkpoints.memory_mapping import Contents, map_file, truncated_file, view_as_dtype
from repaconv.checkpoints.restricted_unpickler import StorageIds, StorageKind, strided, unpickle
from repaconv.core.errors import Refused, describe_exception

# torch/serialization.py MAGIC_NUMBER and PROTOCOL_VERSION
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001

# Sequential format: magic, protocol, system, object, storage keys, then (elements, bytes) per storage.


def starts_with_magic(path: Path) -> bool:
    """Return whether the file has the sequential format."""
    with path.open("rb") as file:
        try:
            return bool(unpickle(file).value == LEGACY_MAGIC)
        except Refused:
            return False


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

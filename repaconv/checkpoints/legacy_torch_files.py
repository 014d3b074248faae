"""torch.save's files of before 2020 (torch 0.1.10 to 1.5), one pickle after the other. Memory-mapped, none run."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from repaconv.checkpoints.memory_mapping import Contents, broken, mapped, typed
from repaconv.checkpoints.restricted_unpickler import StorageIds, unpickle
from repaconv.core.errors import Refused

# torch/serialization.py MAGIC_NUMBER and PROTOCOL_VERSION
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


def starts_with_magic(path: Path) -> bool:
    """Whether the file is of the sequential kind."""
    with path.open("rb") as file:
        try:
            return bool(unpickle(file).value == LEGACY_MAGIC)
        except Refused:
            return False


def _meta(_key: str, dtype: torch.dtype, elements: int) -> Tensor:
    return torch.empty(elements, dtype=dtype, device="meta")


def open_sequential(path: Path) -> Contents:
    """Magic, protocol, system, the object, storage keys, then (elements, bytes) a storage.

    Raises:
        Refused: If it is not whole.
    """
    file_bytes = mapped(path)
    with path.open("rb") as file:
        unpickle(file)
        if (protocol := unpickle(file).value) != LEGACY_PROTOCOL:
            raise broken(path, f"unknown protocol {protocol!r}")
        unpickle(file)
        begin = file.tell()
        # The bytes stand behind the object that describes them: walk it once to find them, once to use them.
        ids = StorageIds(_meta)
        unpickle(file, ids)
        places = _sequential_places(path, file, ids.described)
        file.seek(begin)
        found = unpickle(file, StorageIds(lambda key, dtype, _: typed(file_bytes[slice(*places[key])], dtype)))
    return Contents("torch legacy", found.value, found.placeholders)


def _sequential_places(
    path: Path, file: IO[bytes], described: dict[str, tuple[torch.dtype, int]]
) -> dict[str, tuple[int, int]]:
    """Byte range of every storage's elements."""
    size = path.stat().st_size
    places = {}
    for key in unpickle(file).value:
        if key not in described:
            raise broken(path, f"storage {key} is not described")
        dtype, elements = described[key]
        header = file.read(8)
        start, end = file.tell(), file.tell() + elements * dtype.itemsize
        if len(header) < 8 or end > size:
            raise broken(path, f"storage {key} reaches beyond the end of the file")
        if struct.unpack("<q", header)[0] != elements:
            raise broken(path, f"storage {key} is not as long as described")
        places[key] = (start, end)
        file.seek(end)
    if missing := sorted(described.keys() - places.keys()):
        raise broken(path, f"storage {missing[0]} is missing")
    return places

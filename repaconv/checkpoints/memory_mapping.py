"""A file in memory, page by page: what every container's reader returns, and the mapping that it reads from."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from repaconv.core.errors import Refused


@dataclass
class Checksums:
    """What a file says of its own bytes, in a few words; most formats say nothing."""

    told: str = "the format has none"

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold the bytes of these tensors to it; ``checkpoint.damaged`` where they are others than were saved."""


@dataclass(frozen=True)
class Contents:
    """What a file holds: its container, its object as data, globals that became placeholders, and its checksums."""

    container: str
    value: Any
    placeholders: tuple[str, ...] = ()
    checksums: Checksums = field(default_factory=Checksums)


def broken(path: Path, detail: str) -> Refused:
    """That a file is not whole."""
    return Refused(
        f"{path} is truncated or corrupt: {detail}.",
        hint="Download or copy it again, and compare its size or hash with the source.",
        code="checkpoint.truncated",
    )


_MAPPINGS: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""Live mappings by the address of their storage, which holds them."""


def mapped(path: Path) -> Tensor:
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


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements; copies only where the file did not align them."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)

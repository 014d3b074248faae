"""Memory-map checkpoint files, and the contents that every format's reader returns."""

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
    """The checksums of a file and their description; most formats have none."""

    description: str = "the format has none"

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Verify the bytes of these tensors; refuse with ``checkpoint.damaged`` if they differ."""


@dataclass(frozen=True)
class Contents:
    """The contents of a file: format, object as plain data, globals replaced by placeholders, and checksums."""

    container: str
    value: Any
    placeholders: tuple[str, ...] = ()
    checksums: Checksums = field(default_factory=Checksums)


def truncated_file(path: Path, detail: str) -> Refused:
    """Return the error for a truncated or corrupt file."""
    return Refused(
        f"{path} is truncated or corrupt: {detail}.",
        hint="Download or copy it again, and compare its size or hash with the source.",
        code="checkpoint.truncated",
    )


_MAPPINGS: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""Live mappings by the address of their storage, which keeps them alive."""


def map_file(path: Path) -> Tensor:
    """Map a file as uint8 [bytes], privately: writing to the tensor does not change the file."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    _MAPPINGS[raw.untyped_storage().data_ptr()] = mapping
    return raw


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Release the memory of mapped tensors; reading them again loads it from the file."""
    for start in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
        mapping = _MAPPINGS.get(start)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)


def view_as_dtype(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements; they are copied only if the file does not align them."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)

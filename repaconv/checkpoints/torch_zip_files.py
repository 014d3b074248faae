"""Read the zip format of torch.save, ``<name>/data.pkl`` and ``<name>/data/<key>``, and verify its checksums.

torch.load ignores the CRC-32 that the zip stores for each record, so that a flipped bit changes a weight without
notice. Here every record of a used tensor is verified.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from repaconv.checkpoints.memory_mapping import Checksums, Contents, map_file, truncated_file, view_as_dtype
from repaconv.checkpoints.restricted_unpickler import StorageIds, unpickle
from repaconv.core.errors import Refused
from repaconv.core.thread_pool import thread_pool

PIECE = 1 << 18
WORTH_THREADS = 1 << 24
UNPACKED = 1 << 26
"""Bytes that compressed records may unpack to beyond four times the file size; torch does not compress records."""


class Record(NamedTuple):
    """The bytes of a storage: address in memory, position and size in the file, and CRC-32 from the zip index."""

    address: int
    start: int
    size: int
    crc: int


@dataclass
class ZipChecksums(Checksums):
    """The CRC-32 of each stored record that the pickle refers to."""

    told: str = "CRC-32 of each record"
    path: Path = Path()
    records: list[Record] = field(default_factory=list)

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Verify the records that hold these tensors.

        Raises:
            Refused: ``checkpoint.damaged``, with the first tensor whose bytes have changed.
        """
        records = sorted(self.records)
        used: dict[Record, str] = {}
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


def _crcs(file: int, records: Collection[Record]) -> Iterator[int]:
    """Yield the CRC-32 of each record in order; on all CPU cores if there are enough bytes."""
    if sum(record.size for record in records) < WORTH_THREADS:
        yield from map(partial(_crc, file), records)
        return
    with thread_pool(os.cpu_count()) as pool:
        yield from pool.map(partial(_crc, file), records)


def _crc(file: int, record: Record) -> int:
    found, at, end = 0, record.start, record.start + record.size
    while at < end and (piece := os.pread(file, min(end - at, PIECE), at)):
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
            kind = "a TorchScript archive" if pickles else "a zip file without data.pkl"
            raise Refused(
                f"{path} is {kind}, not a checkpoint.",
                hint="Save the trained module's state_dict() with torch.save or safetensors.",
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
        self.checksums.records.append(Record(found.data_ptr(), start, wanted, info.CRC))
        return found

    def _unpacked(self, info: zipfile.ZipInfo) -> bytes:
        self.unpacked += info.file_size
        if self.unpacked > 4 * self.bytes.numel() + UNPACKED:
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

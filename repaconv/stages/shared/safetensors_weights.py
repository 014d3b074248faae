"""Write safetensors files: checkpoints, and folded weights part by part, so that they never have to be in memory at
once.

The library's own writer wants all tensors at once and copies them. The format is its published one: the
header's length, the header as JSON, the bytes of the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from repaconv.core.errors import GateFailed, Refused
from repaconv.core.file_replacement import write_payload
from repaconv.core.thread_pool import thread_pool
from repaconv.results import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from repaconv.method_api.contract import FoldedPart

DISK_BYTES = 1 << 26
"""Bytes from which a file is put on the disk while more is written; small files wait for the disk once."""
_NAMES = {"float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a checkpoint with its metadata; equal contents give equal bytes.

    The library's own writer orders the metadata at random.
    """
    from safetensors.torch import save

    plain = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, dict(metadata))
    after = 8 + int.from_bytes(plain[:8], "little")
    text = json.dumps(json.loads(plain[8:after]), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_payload(path, b"".join((len(text).to_bytes(8, "little"), text, memoryview(plain)[after:])))


def write_weights(
    path: Path, expected: Mapping[str, Tensor], parts: Iterable[FoldedPart], described: Callable[[Path], None]
) -> tuple[TensorInfo, ...]:
    """Write the parts' tensors, floats as float32, atomically: after an error there is no file.

    Args:
        path: The file.
        expected: State dict of the inference-time network, on the meta device.
        parts: float64 tensors by name; together they must be exactly those of ``expected``.
        described: Called with the complete temporary file before it is moved to ``path``; it writes the file's
            description, so that the weights are hardly ever there without it.

    Returns:
        Name, shape and dtype of every tensor, by name.

    Raises:
        GateFailed: If the parts are not those of the inference-time network.
        Refused: If float32 cannot represent a value.
    """
    infos = tuple(
        TensorInfo(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(expected.items())
    )
    header, offsets, end = _header(infos, expected)

    def writer(temporary: Path) -> None:
        with temporary.open("wb") as file, _DiskWrites(file) as disk:
            file.write(header)
            _write_parts(file, parts, expected, offsets, disk)
            file.truncate(end)
            file.flush()
            disk.begin(end)
            described(temporary)

    write_payload(path, writer)
    return infos


class _DiskWrites:
    """Has the system put a large file on the disk while the rest is computed, so that the end does not wait for all."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.started, self.pool, self.running = file, 0, thread_pool(1), Future[None]()
        self.running.set_result(None)

    def __enter__(self) -> _DiskWrites:
        return self

    def __exit__(self, *failed: object) -> None:
        self.pool.shutdown()
        if not any(failed):
            self.running.result()

    def begin(self, written: int) -> None:
        """Start when enough bytes were added to the file, if the disk is not busy with those before.

        Args:
            written: Number of bytes that were written.
        """
        if written - self.started >= DISK_BYTES and self.running.done():
            self.running.result()
            self.started, self.running = written, self.pool.submit(os.fsync, self.file.fileno())


def _header(infos: Iterable[TensorInfo], expected: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The file's first bytes, the offset of each tensor in the file, and the file's length."""
    header, offsets, end = {}, {}, 0
    for info in sorted(infos, key=lambda info: (-expected[info.name].element_size(), info.name)):
        start, end = end, end + expected[info.name].numel() * expected[info.name].element_size()
        header[info.name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
        offsets[info.name] = start
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in offsets.items()}, begin + end


def _write_parts(
    file: BinaryIO,
    parts: Iterable[FoldedPart],
    expected: Mapping[str, Tensor],
    offsets: Mapping[str, int],
    disk: _DiskWrites,
) -> None:
    """Write every tensor at its offset; one part is written while the next is computed."""
    from repaconv.checkpoints.tensor_sanity_checks import are_finite  # imports torch, which makes the parts

    left = set(expected)
    written_bytes = 0

    def write(part: FoldedPart) -> None:
        nonlocal written_bytes
        for name, value in part.tensors.items():
            if name not in left or value.shape != expected[name].shape:
                raise _not_the_deploy_form(f"{name} {list(value.shape)}")
            left.remove(name)
            stored = value.detach().to(expected[name].dtype).contiguous()
            if not are_finite(stored):
                raise _exceeds_float32(name)
            file.seek(offsets[name])
            file.write(stored.numpy().data)
            written_bytes += stored.nbytes
        disk.begin(written_bytes)

    with thread_pool(1) as pool:
        written: Future[None] | None = None
        for part in parts:
            if written:
                written.result()
            written = pool.submit(write, part)
        if written:
            written.result()
    if left:
        raise _not_the_deploy_form(f"no {min(left)}")


def _not_the_deploy_form(what: str) -> GateFailed:
    return GateFailed(
        f"the fold gives {what}, which is not in the inference-time architecture; nothing was written.",
        hint="This is a defect of the method; please report it with the output of `repaconv inspect`.",
        code="fold.not-whole",
    )


def _exceeds_float32(name: str) -> Refused:
    return Refused(
        f"the folded tensor {name} has values that float32 cannot represent; nothing was written.",
        hint="Folded weights are stored in float32, which ends at 3.4e38. Rescale these weights, or train again.",
        code="fold.float32",
    )

"""Keep weights in a temporary file instead of in memory, for graphs whose weights are read rarely, one at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir

FILE_BYTES = 2**23
"""Bytes of all weights from which they are written to a file; it is not worth it for fewer."""


def in_file(weights: Iterable[ir.TensorProtocol]) -> dict[ir.TensorProtocol, ir.TensorProtocol]:
    """Write weights to a temporary file; return for each a tensor that reads its numbers when they are asked for.

    The file has no name where the system allows that, and is removed with the last of the tensors. What does not fit
    onto the disk is left out, and so are weights that take less than `FILE_BYTES` together.
    """
    import onnx_ir as ir

    every = list(weights)
    found: dict[ir.TensorProtocol, ir.TensorProtocol] = {}
    if sum(weight.nbytes for weight in every) < FILE_BYTES:
        return found
    try:
        file = _WeightFile()
        for weight in every:
            read = file.reader_of(weight.numpy())
            found[weight] = ir.LazyTensor(partial(_tensor, read), weight.dtype, weight.shape, name=weight.name)
    except OSError:  # a full disk
        pass
    return found


def _tensor(read: partial[NDArray[Any]]) -> ir.TensorProtocol:
    import onnx_ir as ir

    return ir.tensor(read())


class _WeightFile:
    """An open temporary file of arrays; several threads may read it."""

    def __init__(self) -> None:
        self._file, self._lock = tempfile.TemporaryFile(prefix="repaconv-", buffering=0), Lock()  # noqa: SIM115
        finalize(self, self._file.close)

    def reader_of(self, array: NDArray[Any]) -> partial[NDArray[Any]]:
        """Append an array; return a function that reads it."""
        place, left = self._file.tell(), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        while left:
            left = left[self._file.write(left) :]
        return partial(self._read, place, array.dtype, array.shape)

    def _read(self, place: int, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        found = np.empty(shape, kind)
        left = found.reshape(-1).view(np.uint8).data
        with self._lock:
            self._file.seek(place)
            while left:
                count = self._file.readinto(left)
                if not count:
                    raise OSError("a temporary file of weights was truncated")
                left = left[count:]
        return found

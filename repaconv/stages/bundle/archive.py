"""What a bundle is: a tarball of one folder, in which ``calls.npz`` holds what goes into the network and comes out."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CALLS, DESCRIBED = "calls.npz", "bundle.json"
STORED = {"f": "<f4", "i": "<i8", "u": "<i8", "b": "|b1"}
"""As what outputs are stored, by their kind."""


class Call(NamedTuple):
    """One call: every input as the graph takes it, every output in float64, and how many of its images count."""

    inputs: tuple[NDArray[Any], ...]
    outputs: tuple[NDArray[Any], ...]
    used: int


def as_npz(calls: Sequence[Call]) -> bytes:
    """``input_<call>_<number>`` and ``output_<call>_<number>``, little-endian; equal calls are equal bytes."""
    import numpy as np

    arrays: dict[str, NDArray[Any]] = {}
    for at, call in enumerate(calls):
        for number, array in enumerate(call.inputs):
            arrays[f"input_{at}_{number}"] = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        for number, array in enumerate(call.outputs):
            arrays[f"output_{at}_{number}"] = np.ascontiguousarray(array, STORED[array.dtype.kind])
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def expected_in(bundle: Path) -> tuple[dict[str, Any], list[tuple[NDArray[np.generic], ...]]]:
    """What a bundle says of itself, and its outputs, call by call."""
    import numpy as np

    with tarfile.open(bundle, "r:gz") as tar:
        found = {Path(member.name).name: tar.extractfile(member) for member in tar}
        described = json.loads(found[DESCRIBED].read())  # type: ignore[union-attr]
        with np.load(io.BytesIO(found[CALLS].read()), allow_pickle=False) as held:  # type: ignore[union-attr]
            numbers = range(len(described["outputs"]))
            calls = [tuple(held[f"output_{at}_{number}"] for number in numbers) for at in range(described["calls"])]
    return described, calls


def pack(path: Path, folder: str, content: Mapping[str, bytes], graph: Mapping[str, Path]) -> None:
    """Write the tarball. Equal content is equal bytes: sorted, and without times or owners.

    Args:
        path: Where.
        folder: The one that all of it is in.
        content: Small files by name.
        graph: Large ones.
    """
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0, compresslevel=1) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in sorted(content):
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode = len(content[name]), 0o755 if name == "run.py" else 0o644
            tar.addfile(info, io.BytesIO(content[name]))
        for name, place in graph.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode = place.stat().st_size, 0o644
            with place.open("rb") as file:
                tar.addfile(info, file)

"""Parse the output files of trtexec, from TensorRT 8 to 11.

Times are those of GPU kernels only. The latency that trtexec prints includes data transfers up to TensorRT 10 and
excludes them from 11 on, so it is not comparable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused

_BANNER = re.compile(r"TensorRT\.trtexec \[TensorRT v([\d.]+)\]")
_SUMMARY = re.compile(r"GPU Compute Time: .*?median = ([\d.]+) ms")
# Type names in the file formats. The order matters: "BFloat16" contains "Float".
_TYPES = (
    ("BF16", ("bf16", "bfloat16")),
    ("HALF", ("fp16", "half", "float16")),
    ("FP8", ("fp8",)),
    ("INT8", ("int8",)),
    ("FLOAT", ("fp32", "float")),
)
_COMPUTING = re.compile(r"conv|gemm|matmul|matrixmultiply|mha", re.IGNORECASE)


class LayerTime(NamedTuple):
    """Mean time of one layer in milliseconds."""

    name: str
    mean_ms: float


def version_of(text: str) -> str:
    """Parse the version from trtexec's banner: ``8.2.1`` from ``[TensorRT v8201]``; empty if there is none."""
    found = _BANNER.search(text)
    if not found:
        return ""
    digits = found[1]
    if "." in digits:
        return ".".join(digits.split(".")[:3])
    number, base = int(digits), 1000 if len(digits) < 6 else 10000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def compute_ms(rows: Any) -> NDArray[np.float64]:
    """Return the kernel time of each query in milliseconds, from ``--exportTimes``.

    Raises:
        Refused: If the file has another format.
    """
    try:
        found = np.asarray([float(row["computeMs"]) for row in rows], dtype=np.float64)
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable("times", error) from error
    if not len(found) or not np.isfinite(found).all() or (found <= 0).any():
        raise _unreadable("times", ValueError("they are not all above zero"))
    return found


def median_ms(log: str) -> float | None:
    """Return the median kernel time that trtexec printed, to check the exported times; None if there is none."""
    found = _SUMMARY.search(log)
    return float(found[1]) if found else None


def layer_times(rows: Any) -> list[LayerTime]:
    """Return the layer times from ``--exportProfile``, whose first row is the number of runs.

    Raises:
        Refused: If the file has another format.
    """
    try:
        return [LayerTime(str(row["name"]), float(row["averageMs"])) for row in rows if "name" in row]
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable("profile", error) from error


def outputs(rows: Any) -> dict[str, NDArray[np.float64]]:
    """Return the outputs from ``--exportOutput``, by name; trtexec writes six digits of each number.

    Raises:
        Refused: If the file has another format.
    """
    try:
        return {
            str(row["name"]): np.asarray(row["values"], dtype=np.float64).reshape(
                [int(size) for size in str(row["dimensions"]).split("x")]
            )
            for row in rows
        }
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable("outputs", error) from error


def layer_types(info: Any) -> dict[str, int]:
    """Count products by type, from ``--exportLayerInfo`` or the engine inspector.

    Empty if the types are missing, as without ``--profilingVerbosity=detailed`` or if all is compiled into one
    node.

    Raises:
        Refused: If the file has another format.
    """
    found: Counter[str] = Counter()
    for layer in _layers(info):
        if isinstance(layer, Mapping) and _computes(layer) and (kind := _type_of(layer)):
            found[f"{layer.get('LayerType')}.{kind}"] += 1
    return dict(sorted(found.items()))


def fused_attentions(info: Any) -> int:
    """Count the kernels that compute a whole attention; 0 also if the layers are not described."""
    return sum(isinstance(layer, Mapping) and "mha" in str(layer.get("Name")) for layer in _layers(info))


def described_layers(info: Any) -> tuple[int, int]:
    """Return the number of layers, and how many of them have more information than their name."""
    layers = _layers(info)
    return len(layers), sum(isinstance(layer, Mapping) for layer in layers)


def _layers(info: Any) -> Sequence[Any]:
    layers = info.get("Layers") if isinstance(info, Mapping) else None
    if not isinstance(layers, list):
        raise _unreadable("layers", ValueError("there is no list of Layers"))
    return layers


def _computes(layer: Mapping[str, Any]) -> bool:
    """Return whether a layer is a product, by its type; for generated kernels (kgen) by its name."""
    kind, name = str(layer.get("LayerType", "")), str(layer.get("Name", ""))
    return bool(_COMPUTING.search(name if kind.lower() == "kgen" else kind)) and not name.startswith("Reformat")


def _type_of(layer: Mapping[str, Any]) -> str:
    """Return the type of a layer's weights if given (TensorRT 8), else of its first input."""
    weights = layer.get("Weights")
    if isinstance(weights, Mapping) and weights.get("Type"):
        return _named(str(weights["Type"]))
    for tensor in layer.get("Inputs") or ():
        if isinstance(tensor, Mapping):
            text = next((tensor[key] for key in ("Datatype", "DataType", "Format/Datatype") if key in tensor), "")
            if kind := _named(str(text)):
                return kind
    return ""


def _named(text: str) -> str:
    lowered = text.lower()
    return next((name for name, words in _TYPES if any(word in lowered for word in words)), "")


def _unreadable(what: str, error: Exception) -> Refused:
    return Refused(
        f"these are not the {what} of trtexec: {error!r}.",
        hint="Give the files that trtexec of TensorRT 8 to 11 wrote.",
        code="trtexec.format",
    )

"""What trtexec writes, from TensorRT 8 to 11.

Times are of the GPU's kernels alone: from 11 on the latency that trtexec prints leaves the transfers out, which 10 and
older put in, so the two do not compare.
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
# How the formats call the types; the order tells "BFloat16" from "Float", "FP16" from "BF16".
_TYPES = (
    ("BF16", ("bf16", "bfloat16")),
    ("HALF", ("fp16", "half", "float16")),
    ("FP8", ("fp8",)),
    ("INT8", ("int8",)),
    ("FLOAT", ("fp32", "float")),
)
_COMPUTING = re.compile(r"conv|gemm|matmul|matrixmultiply|mha", re.IGNORECASE)


class LayerTime(NamedTuple):
    """Milliseconds of one layer, the mean over the runs."""

    name: str
    mean_ms: float


def version_of(text: str) -> str:
    """``8.2.1`` from the banner ``[TensorRT v8201]``, ``10.3.0`` from ``v100300``; empty if there is none."""
    found = _BANNER.search(text)
    if not found:
        return ""
    digits = found[1]
    if "." in digits:
        return ".".join(digits.split(".")[:3])
    number, base = int(digits), 1000 if len(digits) < 6 else 10000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def compute_ms(rows: Any) -> NDArray[np.float64]:
    """Kernel milliseconds of each query, of ``--exportTimes``.

    Raises:
        Refused: If that is not what it is.
    """
    try:
        found = np.asarray([float(row["computeMs"]) for row in rows], dtype=np.float64)
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable("times", error) from error
    if not len(found) or not np.isfinite(found).all() or (found <= 0).any():
        raise _unreadable("times", ValueError("they are not all above zero"))
    return found


def median_ms(log: str) -> float | None:
    """The median that trtexec printed, to hold the exported times against; None if it printed none."""
    found = _SUMMARY.search(log)
    return float(found[1]) if found else None


def layer_times(rows: Any) -> list[LayerTime]:
    """``--exportProfile``, whose first row counts the runs.

    Raises:
        Refused: If that is not what it is.
    """
    try:
        return [LayerTime(str(row["name"]), float(row["averageMs"])) for row in rows if "name" in row]
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable("profile", error) from error


def outputs(rows: Any) -> dict[str, NDArray[np.float64]]:
    """``--exportOutput``: arrays by name; six digits of each number are written.

    Raises:
        Refused: If that is not what it is.
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
    """Types of what computes, of ``--exportLayerInfo`` or the engine inspector; empty if they are not told.

    They are not without ``--profilingVerbosity=detailed``, nor of what was compiled into one node.

    Raises:
        Refused: If that is not what it is.
    """
    found: Counter[str] = Counter()
    for layer in _layers(info):
        if isinstance(layer, Mapping) and _computes(layer) and (kind := _type_of(layer)):
            found[f"{layer.get('LayerType')}.{kind}"] += 1
    return dict(sorted(found.items()))


def fused_attentions(info: Any) -> int:
    """How many kernels compute a whole attention; 0 also where no layer is told of."""
    return sum(isinstance(layer, Mapping) and "mha" in str(layer.get("Name")) for layer in _layers(info))


def layers_told(info: Any) -> tuple[int, int]:
    """How many layers there are, and of how many more is told than the name."""
    layers = _layers(info)
    return len(layers), sum(isinstance(layer, Mapping) for layer in layers)


def _layers(info: Any) -> Sequence[Any]:
    layers = info.get("Layers") if isinstance(info, Mapping) else None
    if not isinstance(layers, list):
        raise _unreadable("layers", ValueError("there is no list of Layers"))
    return layers


def _computes(layer: Mapping[str, Any]) -> bool:
    """By what it is; a kernel that was generated (kgen) says so in its name alone."""
    kind, name = str(layer.get("LayerType", "")), str(layer.get("Name", ""))
    return bool(_COMPUTING.search(name if kind.lower() == "kgen" else kind)) and not name.startswith("Reformat")


def _type_of(layer: Mapping[str, Any]) -> str:
    """Of its weights where they are told of (TensorRT 8), else of its first input."""
    weights = layer.get("Weights")
    if isinstance(weights, Mapping) and weights.get("Type"):
        return _named(str(weights["Type"]))
    for tensor in layer.get("Inputs") or ():
        if isinstance(tensor, Mapping):
            told = next((tensor[key] for key in ("Datatype", "DataType", "Format/Datatype") if key in tensor), "")
            if kind := _named(str(told)):
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

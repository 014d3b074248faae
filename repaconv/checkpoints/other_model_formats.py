"""Recognize models of TensorFlow, PaddlePaddle, TensorRT and others, and say what to fold instead.

Formats of frameworks are converted to ONNX. Formats for one runtime hold a model that was changed for it, so the model
from which they were made is folded instead.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from repaconv.core.errors import Refused

KERAS = "Load it in Keras and save it with model.export({!r}); then {}."
PADDLE = "Export the network to ONNX with paddle.onnx.export, or its inference model with paddle2onnx; then fold that."
MADE_FOR_A_RUNTIME = "Fold the ONNX model or the checkpoint from which it was made."

BY_FIRST_BYTES = {  # those of a TensorFlow Lite model are after its size
    b"ftrt": "a TensorRT engine",
    b"GGUF": "a GGUF file",
    b"7767517": "an ncnn model",
}
BY_SUFFIX = {
    ".engine": "a TensorRT engine",
    ".plan": "a TensorRT engine",
    ".trt": "a TensorRT engine",
    ".gguf": "a GGUF file",
    ".mlmodel": "a Core ML model",
    ".mlpackage": "a Core ML model",
    ".mnn": "an MNN model",
    ".om": "a model for Ascend",
    ".rknn": "a model for Rockchip's NPU",
    ".hef": "a model for Hailo's accelerator",
}
PADDLE_SUFFIXES = (".pdparams", ".pdopt", ".pdmodel", ".pdiparams")


def require_no_other_format(path: Path, head: bytes = b"") -> None:
    """Refuse a file or folder of another format that is recognized.

    Args:
        path: The file or folder.
        head: The first bytes of the file.

    Raises:
        Refused: ``checkpoint.type``.
    """
    if known := _other_format(path, head):
        what, hint = known
        raise Refused(f"{path} is {what}, not a checkpoint.", hint=hint, code="checkpoint.type")


def _other_format(path: Path, head: bytes) -> tuple[str, str] | None:
    """What a file or folder is, and what to do with it."""
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model", f"Convert it to ONNX: {_by_tf2onnx('tflite', path)}."
    if (path / "saved_model.pb").is_file():
        return "a SavedModel of TensorFlow", f"Convert it to ONNX: {_by_tf2onnx('saved-model', path)}."
    if head.startswith(b"\x89HDF") or path.suffix == ".keras":
        saved = path.with_name("saved_model")
        what = "a model of Keras" if path.suffix == ".keras" else "an HDF5 file, as Keras writes"
        return what, KERAS.format(str(saved), _by_tf2onnx("saved-model", saved))
    if path.suffix in PADDLE_SUFFIXES or (path.is_dir() and any(path.glob("*.pdiparams"))):
        return "a model of PaddlePaddle", PADDLE
    if b"<net" in head:
        return "a model of OpenVINO", MADE_FOR_A_RUNTIME
    for start, what in BY_FIRST_BYTES.items():
        if head.startswith(start):
            return what, MADE_FOR_A_RUNTIME
    return (BY_SUFFIX[path.suffix], MADE_FOR_A_RUNTIME) if path.suffix in BY_SUFFIX else None


def _by_tf2onnx(option: str, path: Path) -> str:
    """The commands that convert a model of TensorFlow and fold it."""
    source, target = (shlex.quote(str(each)) for each in (path, path.with_suffix(".onnx")))
    return f"python -m tf2onnx.convert --{option} {source} --output {target}; then repaconv fold {target}"

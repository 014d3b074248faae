"""The NVIDIA GPU of this machine as torch detects it, and the errors if there is none or its memory is too small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from repaconv.core.errors import EnvironmentProblem, require_module
from repaconv.engines.contract import Feeds


class Gpu(NamedTuple):
    """A GPU: its name, compute capability (e.g. ``9.0``), and memory in bytes."""

    name: str
    capability: str
    memory: int


def first_gpu() -> Gpu | None:
    """Return the first GPU, or None if torch detects none."""
    torch = require_module("torch", "torch", "pip install torch")
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    return Gpu(str(device.name), f"{device.major}.{device.minor}", int(device.total_memory))


def require_gpu(engine: str) -> Gpu:
    """Return the first GPU.

    Raises:
        EnvironmentProblem: If torch detects none, with the reason.
    """
    torch = require_module("torch", "torch", "pip install torch")
    if (found := first_gpu()) is None:
        built = torch.version.cuda
        why = f"torch {torch.__version__} is built without CUDA" if built is None else "its driver answers for none"
        raise EnvironmentProblem(
            f"{engine} needs an NVIDIA GPU, and none was found: {why}.",
            hint="Run it on a machine with a GPU. --target cpu-torch and --target x86-64 measure this machine.",
            code="gpu.missing",
        )
    return found


@contextmanager
def within_memory(images: int) -> Iterator[None]:
    """Report a lack of GPU memory in this block as an error about the batch size.

    Raises:
        EnvironmentProblem: If the GPU memory is too small for a batch of this size.
    """
    try:
        yield
    except Exception as error:  # torch, ONNX Runtime and TensorRT have no common error class
        if not out_of_memory(error):
            raise
        raise EnvironmentProblem(
            f"the GPU memory is too small for a batch of {images} images.",
            hint="Use a smaller batch size.",
            code="gpu.memory",
        ) from error


def batch_of(feeds: Feeds) -> int:
    """Return the batch size: the length of the first input that has rows, or 1 if none has."""
    return next((len(array) for array in feeds.values() if array.ndim), 1)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error of a runtime reports a lack of memory."""
    message = f"{type(error).__name__}: {error}".lower()
    return any(words in message for words in ("outofmemory", "out of memory", "failed to allocate memory", "bfc_arena"))

"""The NVIDIA card of this machine, as torch sees it: whether there is one, and what is raised where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from repaconv.core.errors import EnvironmentProblem, require_module


class Card(NamedTuple):
    """A card: its name, its compute capability (``9.0``), and its memory in bytes."""

    name: str
    capability: str
    memory: int


def card() -> Card | None:
    """The first card; None if torch sees none."""
    torch = require_module("torch", "torch", "pip install torch")
    if not torch.cuda.is_available():
        return None
    told = torch.cuda.get_device_properties(0)
    return Card(str(told.name), f"{told.major}.{told.minor}", int(told.total_memory))


def require_card(engine: str) -> Card:
    """The first card.

    Raises:
        EnvironmentProblem: If torch sees none, and why.
    """
    torch = require_module("torch", "torch", "pip install torch")
    if (found := card()) is None:
        built = torch.version.cuda
        why = f"torch {torch.__version__} is built without CUDA" if built is None else "its driver answers for none"
        raise EnvironmentProblem(
            f"{engine} needs an NVIDIA GPU, and none was found: {why}.",
            hint="Run it on a machine with a GPU. --target cpu-torch and --target x86-64 measure this machine.",
            code="card.missing",
        )
    return found


@contextmanager
def within_memory(images: int) -> Iterator[None]:
    """What runs in here on so many images may take more memory than the card has.

    Raises:
        EnvironmentProblem: If it does.
    """
    try:
        yield
    except Exception as error:  # torch, ONNX Runtime and TensorRT have no kind of error in common
        if not out_of_memory(error):
            raise
        raise EnvironmentProblem(
            f"the GPU memory is too small for a batch of {images} images.",
            hint="Use a smaller batch size.",
            code="card.memory",
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether a runtime says that memory does not suffice."""
    told = f"{type(error).__name__}: {error}".lower()
    return any(words in told for words in ("outofmemory", "out of memory", "failed to allocate memory", "bfc_arena"))

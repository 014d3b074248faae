"""A training between two epochs, in a file: with it the next one has the same bits as if nothing had happened."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import torch

from repaconv.conversion.finetuning.training_loop import State
from repaconv.conversion.image_splits import Parted
from repaconv.core.errors import Refused


def save(state: State, path: Path) -> None:
    """Write it."""
    torch.save(state, path)


def load(path: Path) -> State:
    """Read it back; nothing in it is run.

    Raises:
        Refused: If it is no such file.
    """
    try:
        found: Any = torch.load(path, weights_only=True)
        return {name: found[name] for name in ("net", "average", "best", "optimiser", "whitened", "steps")}
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise Refused(
            f"{path} is not the state of an interrupted training.",
            hint="Start from the beginning with --restart.",
            code="finetune.state",
        ) from error


def digest(parted: Parted) -> str:
    """Of all images in their order, and their classes: the same training needs the same."""
    total = hashlib.sha256()
    for part in parted:
        total.update(part.images.numpy().tobytes())
        total.update(part.labels.tobytes())
    return total.hexdigest()

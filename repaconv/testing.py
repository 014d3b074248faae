"""Checkpoints of our own making, for the demo, for tests and for the conformance of plug-ins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from repaconv import registry
from repaconv.artefact import write_with
from repaconv.errors import UsageProblem

if TYPE_CHECKING:
    from repaconv.methods.contract import Method


def write_example(method: str, arch: str, path: Path, seed: int) -> None:
    """Write a training-form checkpoint with seeded weights, contained as mmengine publishes its own.

    Raises:
        UsageProblem: If the method has no such architecture.
    """
    import torch

    known: Method = registry.load(registry.METHODS, method)
    if arch not in known.archs:
        raise UsageProblem(
            f"{method} has no architecture {arch!r}.", hint=f"Known: {', '.join(known.archs)}.", code="demo.arch"
        )
    content = {"meta": {"epoch": 0, "made_by": "repaconv"}, "state_dict": known.example(arch, seed)}
    write_with(path, lambda temporary: torch.save(content, temporary))

"""A large file of weights is flushed to the disk while it is written, and a disk that fails leaves no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repaconv.core.errors import EnvironmentProblem
from repaconv.method_api.contract import FoldedPart
from repaconv.stages.shared import safetensors_weights
from repaconv.stages.shared.safetensors_weights import write_weights

WEIGHTS = {f"layer{n}.weight": torch.randn(64, 64, dtype=torch.float64) for n in range(4)}


def written(path, seen):
    with torch.device("meta"):
        expected = {name: torch.empty(64, 64) for name in WEIGHTS}
    parts = (FoldedPart({name: tensor}) for name, tensor in WEIGHTS.items())
    write_weights(path, expected, parts, lambda _: seen.append("described"))


@pytest.mark.parametrize(("limit", "times"), [(1, {2, 3, 4, 5, 6}), (1 << 26, {1})])
def test_a_large_file_reaches_the_disk_while_it_is_written(limit, times, monkeypatch):
    seen, write_through = [], os.fsync

    def on_disk(file):
        if os.fstat(file).st_size >= 64 * 64 * 4:  # the note that repaconv wrote the file is smaller
            seen.append("on disk")
        write_through(file)

    monkeypatch.setattr(safetensors_weights, "DISK_BYTES", limit)
    monkeypatch.setattr(os, "fsync", on_disk)
    written(Path("model.safetensors"), seen)
    assert seen.count("on disk") in times
    assert seen[-1] == "on disk"
    assert all(torch.equal(found, WEIGHTS[name].float()) for name, found in load_file("model.safetensors").items())


def test_a_disk_that_fails_meanwhile_leaves_no_file(monkeypatch):
    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_weights, "DISK_BYTES", 1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        written(Path("run/model.safetensors"), [])
    assert not Path("run").exists()

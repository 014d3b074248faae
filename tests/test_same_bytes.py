"""The same input gives the same bytes: whatever the order of sets, the threads, or how often."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from foreign_faults import NETS
from torture.nets import net

FOLD = """
import sys, torch, repaconv
torch.set_num_threads(int(sys.argv[2]))
repaconv.fold("c.onnx", out=f"{sys.argv[1]}/graph", measure=False)
repaconv.export(f"{sys.argv[1]}/graph")
repaconv.fold("c.pth", out=f"{sys.argv[1]}/checkpoint", settings={"num_heads": "3", "idle_ratio": "0.75"})
"""


def written(folder, threads, seed):
    """Every file that folds and an export leave, of a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-c", FOLD, folder, str(threads)], env=environment, check=True)
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A checkpoint and a graph."""
    monkeypatch.chdir(tmp_path)
    torch.save(net("repavit").whole, "c.pth")
    (tmp_path / "c.onnx").write_bytes(NETS["encoder"].model().SerializeToString())
    return tmp_path


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(given):
    first = written(given / "0", 1, 0)
    assert {"fold.json", "export.json", "model.onnx", "model.safetensors"} <= {path.name for path in first}
    for number, (threads, seed) in enumerate([(1, 1), (2, 0), (2, 2), (1, 12345)], 1):
        again = written(given / str(number), threads, seed)
        assert first == again, [str(path) for path in first if first[path] != again.get(path)]

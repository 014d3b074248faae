"""The same input gives the same bytes, whatever the order of sets, the number of threads, or how often it is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planted_graph_faults import NETS
from torture.small_checkpoints import net

FOLD = """
import sys, torch, repaconv
torch.set_num_threads(int(sys.argv[2]))
repaconv.fold("c.onnx", out=f"{sys.argv[1]}/graph", measure=False)
repaconv.export(f"{sys.argv[1]}/graph")
repaconv.fold("c.pth", out=f"{sys.argv[1]}/checkpoint", settings={"num_heads": "3", "idle_ratio": "0.75"})
"""


FEIGNED = {
    "SSE4": {
        "OPENBLAS_CORETYPE": "Nehalem",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 X86_V3",
    },
    "AVX2": {
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""What has torch's and numpy's libraries take this for an older processor."""


def written(folder, threads, seed, **feigned):
    """Every file that folds and an export leave, of a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(threads), **feigned}
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


def without_errors(fold_json):
    """What fold.json says, but for what float64 rounding came to."""
    return re.sub(rb'"max_rel_error": [^,\n]*', b"", fold_json)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", FEIGNED)
def test_with_fewer_instructions_all_but_the_errors_of_rounding_is_the_same(given, instructions):
    first, again = (written(given / name, 1, 0, **FEIGNED.get(name, {})) for name in ("here", instructions))
    assert first.keys() == again.keys()
    differ = {path for path in first if first[path] != again[path]}
    assert differ <= {Path("checkpoint/fold.json")}
    assert all(without_errors(first[path]) == without_errors(again[path]) for path in differ)

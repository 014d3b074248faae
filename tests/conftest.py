"""Shared fixtures: small checkpoints of each method, and official checkpoints where they are next to the project."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import export_cache
import hypothesis
import numpy as np
import pytest
import torch

from repaconv.backbones.metaformer import MetaFormerConfig
from repaconv.methods.riformer import METHOD

SHARED = Path(__file__).resolve().parents[2] / "shared" / "checkpoints"
OFFICIAL = sorted((SHARED / "riformer").glob("*.pth"))


def one_quick(paths):
    """The first of several alike in `make test`, the others in `make test-slow`; each exports a network of its own."""
    return quick_where([*paths][:1].__contains__, paths, ids=lambda path: Path(path).stem)


def quick_where(quick, rows, ids=lambda row: None):
    """Rows of parameters: those that are ``quick`` in `make test`, the others in `make test-slow`."""
    marks = [[] if quick(row) else [pytest.mark.slow] for row in rows]
    values = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*value, marks=mark, id=ids(row)) for value, mark, row in zip(values, marks, rows, strict=True)]


def one_net_a_method(rows, later=("pyra",)):
    """The first net of each method in `make test`, its others in `make test-slow`.

    A row is a name like ``repavit-tiny-swin``, or a tuple that begins with method and arch. ``later`` are methods of
    which all wait for `make test-slow`: a graph of PYRA takes as long as all others together.
    """
    seen, found = set(later), []
    for row in rows:
        name = "-".join(row[:2]) if isinstance(row, tuple) else row
        method = name.partition("-")[0]
        values = row if isinstance(row, tuple) else (row,)
        found.append(pytest.param(*values, marks=[pytest.mark.slow] if method in seen else [], id=name))
        seen.add(method)
    return found


TINY = MetaFormerConfig(layers=(1, 2), widths=(8, 12), hidden=(16, 30), classes=5)

torch.onnx.export = export_cache.cached(torch.onnx.export)
hypothesis.settings.register_profile(
    "without a clock", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("without a clock")


def pytest_configure(config):
    """One folder of exports for all workers of the session."""
    if not hasattr(config, "workerinput"):
        os.environ[export_cache.FOLDER] = tempfile.mkdtemp(prefix="repaconv-exported-")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(export_cache.FOLDER, ""), ignore_errors=True)


def pytest_collection_finish():
    """What is imported by now stays, and need not be looked through for what may go."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
    if not SHARED.is_dir():
        terminalreporter.write_line(f"official checkpoints are absent ({SHARED}): their tests did not run", yellow=True)
    if not Path("/usr/sbin/sshd").is_file():
        terminalreporter.write_line("sshd is absent: no board was reached by ssh", yellow=True)
    if not find_spec("tensorrt_rtx"):
        terminalreporter.write_line("TensorRT-RTX is absent: no engine was built", yellow=True)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Every test runs in a folder of its own, so that repaconv-out/ is its own too, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr("repaconv.sources.verified_onnx_export._LAST_EXPORT", {})
    monkeypatch.delenv("COLUMNS", raising=False)  # a terminal's, as wide as that of whoever starts the tests


@pytest.fixture(autouse=True)
def same_random_numbers(request, monkeypatch):
    """A test's random numbers, weights included, do not depend on which tests ran before it in the same process."""
    torch.manual_seed(7)
    for module in filter(None, (sys.modules.get("planted_graph_faults"), request.module)):
        if isinstance(getattr(module, "RANDOM", None), np.random.Generator):
            monkeypatch.setattr(module, "RANDOM", np.random.default_rng(7))


@pytest.fixture
def exported_afresh(monkeypatch):
    """torch's exporter runs every time, whatever was asked before."""
    monkeypatch.delenv(export_cache.FOLDER)


@pytest.fixture
def tiny_weights() -> dict[str, torch.Tensor]:
    return METHOD.example(TINY, seed=3)


@pytest.fixture
def tiny(tmp_path) -> Path:
    return save_tiny(tmp_path)


def save_tiny(folder: Path) -> Path:
    path = folder / "tiny.pth"
    torch.save({"state_dict": METHOD.example(TINY, seed=3), "args": {"img_size": 32}}, path)
    return path


@pytest.fixture
def repaconv(capfd):
    """Run the command line as a shell would see it: (exit code, stdout, stderr)."""
    from repaconv.cli.main import main

    def run(*arguments: object) -> tuple[int, str, str]:
        for handler in logging.getLogger("distributed").handlers:
            handler.stream = sys.stderr  # not that of the test in which Dask was imported, closed with it
        capfd.readouterr()  # what others said before, in threads of theirs, too
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return int(left.value.code or 0), out, err

    return run


assert sys.version_info >= (3, 10)
gc.set_threshold(100_000)  # as the command line has it

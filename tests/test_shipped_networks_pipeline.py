"""All stages with the shipped networks, for every kind of target, on every runtime that is here: no command crashes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest

from repaconv import models
from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem
from repaconv.stages.shared.target_lookup import load_target

ENVIRONMENT, INCONCLUSIVE = 3, 5
HERE = ("x86-64", "x86-64-openvino", "cpu-torch", "cpu-torch@compiled")
ABSENT = {"runtime.missing", "gpu.missing", "build.elsewhere", "bench.elsewhere"}
"""No such runtime, or no such device."""
INT8 = ("x86-64", "x86-64-openvino")


def targets() -> list[str]:
    """Each whose runtime is here, and one of the others for each kind of graph that they take."""
    packaged = [load_target(name) for name in plugins.registered(plugins.TARGETS)]
    kinds: dict[object, str] = {}
    for target in (*packaged, *(one.variant(name) for one in packaged for name in one.variants)):
        kind: object = (target.opset, target.unsupported_ops, target.forbids, target.domains)
        with suppress(EnvironmentProblem):
            kind = plugins.load(plugins.ENGINES, target.runtime).version() and target.name
        kinds.setdefault(kind, target.name)
    return sorted(kinds.values())


class Chain:
    """Commands on one run, each in a process of its own, as a shell would start it."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}

    def __call__(self, row: str, *words: object, allowed: dict[int, set[str]] | None = None) -> int:
        """A command's exit code: 0, or one of ``allowed``, for one of these reasons where it gives one."""
        command = [sys.executable, "-m", "repaconv", *map(str, words), "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        message = f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert 0 <= done.returncode < 128, message  # else a signal, of this process or of a shell's
        assert "Traceback" not in done.stderr, message
        reasons = [error["code"] for error in json.loads(done.stdout)["errors"]]
        assert done.returncode in {0, *(allowed or {})}, message
        if done.returncode:
            assert set(reasons) <= (allowed or {})[done.returncode], message
            assert reasons or done.returncode == INCONCLUSIVE, message
        self.table.setdefault(row, []).append(" ".join([str(words[0]), str(done.returncode), *reasons]))
        return done.returncode


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")
@pytest.mark.parametrize("method", models.METHODS)
def test_every_command_ends_with_an_exit_code_of_its_own(method, record_property):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    chain = Chain()
    chain("all", "fold", models.checkpoint(method), "--out", "run")
    for name in targets():
        where, here = ("run", "--target", name), name in HERE
        by_torch = load_target(name).runtime.startswith("torch")
        built = {ENVIRONMENT: {"build.nothing"} if by_torch else set() if here else ABSENT}
        measured = {INCONCLUSIVE: set(), **({} if here else {ENVIRONMENT: ABSENT})}
        if not by_torch:  # which runs the module
            chain(name, "export", *where)
        chain(name, "build", *where, allowed=built)
        chain(name, "bench", *where, "--rounds", 2, allowed=measured)
        if name in INT8:
            lower = (*where, "--precision", "int8")
            chain(f"{name} int8", "export", *lower, "--inputs", models.CALIBRATION)
            chain(f"{name} int8", "build", *lower, allowed=built)
            chain(f"{name} int8", "bench", *lower, "--rounds", 2, allowed=measured)
    chain("all", "verify", "run")
    for row, codes in chain.table.items():
        record_property(f"{method}, {row}", ", ".join(codes))
    assert set(HERE) <= set(chain.table)

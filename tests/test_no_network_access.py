"""No telemetry, no network: what commands and optional packages ask of the system, by strace, without a route."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from debian_packages import install
from test_crash_guard import tiny_graph

PACKAGES = ("openvino", "nncf", "onnxruntime", "onnxsim", "onnxslim", "torch", "dask", "timm", "transformers")
IMPORTED = f"""
from importlib.util import find_spec
from repaconv.core.errors import require_module
for name in {PACKAGES}:
    if find_spec(name):
        require_module(name, name, "")
"""
BENCH = ["bench", "tiny.onnx", "--target", "x86-64-openvino", "--rounds", "20"]


def traced(folder, *command) -> str:
    """What a command asked the system for, in a network namespace of its own."""
    if not shutil.which("strace"):
        install("strace")
    if not (shutil.which("strace") and shutil.which("unshare") and os.geteuid() == 0):
        pytest.skip("strace, unshare or root is absent")
    calls = "trace=connect,sendto,sendmsg,openat,open,creat,mkdir,mkdirat"
    words = ["unshare", "-n", "strace", "-f", "-qq", "-e", calls, "-o", "trace", sys.executable, *command]
    places = {name: str(folder) for name in ("HOME", "TMPDIR")} | {"XDG_CACHE_HOME": str(folder / ".cache")}
    environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    if "unshare failed" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode in (0, 5), done.stderr  # a loaded machine makes a bench inconclusive
    return (folder / "trace").read_text(errors="replace")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "repaconv", "doctor"], id="doctor"),
        pytest.param(["-m", "repaconv", *BENCH], id="bench", marks=pytest.mark.slow),
        pytest.param(["-c", IMPORTED], id="packages", marks=pytest.mark.slow),
    ],
)
def test_no_name_is_looked_up_and_nothing_is_written_elsewhere(tmp_path, command):
    if "bench" in command:
        pytest.importorskip("openvino", reason="OpenVINO is absent")
    tiny_graph(tmp_path)
    trace = traced(tmp_path, *command)
    assert "openat(" in trace
    asked = [line for line in trace.splitlines() if re.search(r"AF_INET6?\b", line)]
    assert [line for line in asked if "127.0.0.1" not in line and '"::1"' not in line] == []
    written = re.findall(r'open(?:at)?\([^"]*"(/[^"]+)", O_(?:WRONLY|RDWR)[^)]*\) = \d', trace)
    made = re.findall(r'mkdir(?:at)?\([^"]*"(/[^"]+)", \w+\) = 0', trace)
    elsewhere = [path for path in (*written, *made) if not path.startswith((str(tmp_path), "/dev/", "/proc/"))]
    assert elsewhere == []
    assert not (tmp_path / "intel").exists()


def test_strace_is_installed_on_a_ci_machine_alone(tmp_path, monkeypatch):
    """By an apt-get that knows no package before its lists are updated, as in a fresh image."""
    tools = tmp_path / "tools"
    tools.mkdir()
    apt = f'#!/bin/sh\ncd {tools}\n[ "$1" = update ] && : > lists && exit\n[ -f lists ] || exit 100\n'
    (tools / "apt-get").write_text(f'{apt}for name; do :; done\n: > "$name"; /bin/chmod +x "$name"\n')
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        traced(tmp_path)
    assert not (tools / "lists").exists()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(
        pytest.skip.Exception, match="unshare"
    ):  # which comes with every system, and is not on this PATH
        traced(tmp_path)
    assert shutil.which("strace")

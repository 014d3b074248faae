"""ONNX's backend test models through `fold`: none gives wrong outputs, none crashes, and each refusal has a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("onnx_backend_suite.py")
WORKERS = 2
LEAST = 1000
"""Of the models that ONNX Runtime runs as recorded, so many come out the same at least."""
REASONS = {
    "onnx.unrunnable: of type sequence": "its inputs are sequences or optional values, which no .npz holds",
    "onnx.unrunnable: of type optional": "the same",
    "onnx.random: in every inference": "its outputs are random numbers",
    "onnx.invalid: takes nothing": "it has no inputs, and nothing to compare by",
}
"""Why a model may be refused: the code, and what the sentence says; what that means."""


def run(start: int) -> list[dict[str, str]]:
    """Every `WORKERS`-th case, in a process of its own; one that a case ends goes on behind it."""
    every: list[dict[str, str]] = []
    done: list[str] = []
    while True:
        command = [sys.executable, str(PROGRAM), str(start), str(WORKERS), *done]
        child = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        every += [line for line in lines if "name" in line]
        if child.returncode == 0:
            return every
        assert lines, child.stderr
        every.append({"name": lines[-1].get("begins", ""), "result": "crashed", "why": f"{child.returncode}"})
        done = [line["name"] for line in every]


@pytest.mark.slow
def test_no_model_of_onnx_s_backend_suite_comes_out_wrong():
    with ThreadPoolExecutor(WORKERS) as pool:
        found = [line for lines in pool.map(run, range(WORKERS)) for line in lines]
    bad = [line for line in found if line["result"] in ("wrong", "crashed", "internal error")]
    bad += [line for line in found if "defect of repaconv" in line.get("hint", "")]
    assert not bad, bad
    count = Counter(line["result"] for line in found)
    assert count["the same"] >= LEAST, count
    refused = [line for line in found if line["result"] == "refused"]
    reasons = Counter(next((reason for reason in REASONS if fits(reason, line)), line["why"]) for line in refused)
    sys.stdout.write(json.dumps({**count, "refused by reason": reasons}, indent=1))
    assert set(reasons) <= set(REASONS), reasons


def fits(reason: str, line: dict[str, str]) -> bool:
    """Whether a refusal is for that reason."""
    code, _, says = reason.partition(": ")
    return line["code"] == code and says in line["why"]

"""Arguments of the Python functions that are of another type than they take."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import repaconv as rc
from repaconv.core.errors import RepaconvError, UsageProblem

STAGES = (
    *("verify", "export", "bench", "report", "save", "inspect"),
    *("inspect_file", "tune", "new_recipe", "fetch", "run"),
)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("given", [3, {}, np.ones(2), b"x"], ids=["number", "dict", "array", "bytes"])
def test_what_is_no_path_is_refused_with_the_reason(name, given):
    """An empty dict was taken for the newest run, and an array ended in NumPy's own error."""
    with pytest.raises(UsageProblem, match="input should be a path") as caught:
        getattr(rc, name)(given)
    assert caught.value.code == "usage.arguments"


def test_of_several_paths_each_is_one():
    for call in (lambda: rc.gate([3]), lambda: rc.gate(3), lambda: rc.compare_runs(["a", 3], out="x.html")):
        with pytest.raises(UsageProblem, match="=3: input should be a path"):
            call()
    with pytest.raises(UsageProblem, match="candidate=None: input should be a path"):
        rc.compare("a.onnx", None)


@pytest.mark.parametrize("given", [None, 3, b"x", [], {"a": torch.ones(2)}, onnx.ModelProto()], ids=str)
def test_what_is_neither_a_file_nor_a_module_is_refused_with_the_reason(given):
    for arguments in ({}, {"out": "run"}):
        with pytest.raises(UsageProblem, match=f"an object of the type {type(given).__name__} is neither a file nor"):
            rc.fold(given, **arguments)


def test_an_empty_path_is_not_the_current_folder():
    for call in (rc.fold, rc.inspect, rc.new_recipe):
        with pytest.raises(UsageProblem, match="checkpoint is empty"):
            call("")
    with pytest.raises(RepaconvError, match="no readable config"):
        rc.fold(".")

"""What tests/test_former_module_names.py runs: every part of the package is found and used."""

from __future__ import annotations

from pathlib import Path

import onnx

import repaconv
from repaconv.testing import check_method, write_example


def main() -> None:
    check_method("older", "small", Path("conformance"))
    write_example("older", "small", Path("older.pth"), 2)
    done = repaconv.fold("older.pth")
    assert done.method == "older"
    print("method")
    assert done.backbone == "older"
    print("backbone")
    exported = repaconv.export(target="older-board")
    assert exported.verdict == "passed", exported
    assert [change.rewrite for change in exported.changes] == ["older-negation"]
    assert "Neg" in {node.op_type for node in onnx.load("repaconv-out/older/model.older-board.onnx").graph.node}
    print("rewrite")
    built = repaconv.build(target="older-board")
    assert (built.verdict, built.runtime.split()[0]) == ("passed", "older-runtime")
    print("engine")
    assert built.target == "older-board"
    print("target")

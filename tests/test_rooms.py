"""The plan of the house: who may import whom, and which doors stay shut until they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import repaconv

HOUSE = Path(repaconv.__file__).parent
LEVELS = {
    "errors": 0,
    "artefacts": 0,
    "registry": 0,
    "files": 0,
    "replacing": 0,
    "variants": 0,
    "affine": 1,
    "convolution": 1,
    "ranks": 1,
    "checkpoint": 1,
    "runs": 1,
    "toml": 1,
    "onnxfile": 1,
    "orders": 2,
    "recipe": 3,
    "backbones": 2,
    "graphs": 2,
    "engines": 2,
    "trained": 3,
    "proof": 3,
    "exporters": 3,
    "targets": 3,
    "forms": 3,
    "folds": 3,
    "measure": 3,
    "pages": 3,
    "skeletons": 4,
    "methods": 5,
    "live": 6,
    "steps": 7,
    "pipeline": 8,
    "testing": 9,
    "farm": 9,
    "cli": 10,
}


def imports(path: Path) -> set[str]:
    """Rooms that a file imports when it runs; what stands under TYPE_CHECKING does not run."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "repaconv":
            inside = node.module.split(".")[1:]
            found |= {inside[0]} if inside else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("repaconv.")}
    return found


def test_a_room_imports_only_from_below():
    files = [path for path in HOUSE.rglob("*.py") if path.parent != HOUSE or path.stem[:2] != "__"]
    assert len(files) > 30
    for path in files:
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        for other in imports(path) - {room}:
            below = LEVELS[other] < LEVELS[room] or LEVELS[other] == LEVELS[room] == 0
            assert below, f"{path}: {room} imports {other}"


def test_help_and_version_import_nothing_heavy():
    for arguments in (["--help"], ["--version"], ["fold", "--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "repaconv", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0
        loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
        assert "typer" in loaded
        assert not loaded & {"torch", "onnx", "onnxruntime", "onnxsim", "numpy", "safetensors"}


def test_importing_the_package_imports_nothing_heavy():
    code = "import repaconv, sys; print(sorted({'torch', 'onnx', 'typer', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

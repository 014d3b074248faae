"""The plan of the house: who may import whom, and which doors stay shut until they are needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import repaconv

HOUSE = Path(repaconv.__file__).parent
PLAN = Path(__file__).parents[1] / "CONTRIBUTING.md"


def levels() -> dict[str, int]:
    """Rooms by level, as CONTRIBUTING's table has them; what it names within a room is none."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PLAN.read_text(), re.MULTILINE)
    named = [(name.rstrip("/"), int(level)) for level, text in rows for name in re.findall(r"`([\w/]+)`", text)]
    return {name: level for name, level in named if name in rooms()}


def rooms() -> set[str]:
    folders = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    return folders | {path.stem for path in HOUSE.glob("*.py") if path.stem[:2] != "__"}


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


def test_every_room_stands_in_the_plan_and_says_what_it_is():
    assert rooms() == set(levels())
    for path in HOUSE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())) or path.name == "__init__.py", path
    for name in rooms():
        if (HOUSE / name).is_dir():
            assert ast.get_docstring(ast.parse((HOUSE / name / "__init__.py").read_text())), name


def test_a_room_imports_only_from_below():
    level = levels()
    files = [path for path in HOUSE.rglob("*.py") if path.parent != HOUSE or path.stem[:2] != "__"]
    assert len(files) > 30
    for path in files:
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        for other in imports(path) - {room}:
            below = level[other] < level[room] or level[other] == level[room] == 0
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

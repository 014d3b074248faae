"""Run folders of the previous schema version, of every kind of source, as the release before wrote them, are still
read.

tests/data/schema2 was written by the last version of schema 2: a method's checkpoint (exported, built, measured, tuned,
estimated), a network by ``--arch``, an ONNX model, a conversion, a fine-tuned conversion, a recipe's run, a baseline.
``@HERE@`` stands for the folder in which they were made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from repaconv.results import PREVIOUS, SCHEMA_VERSION

STORED = Path(__file__).parent / "data" / "schema2"
RUNS = ("method", "network", "graph", "converted", "finetuned")


@pytest.fixture
def stored(tmp_path):
    """The stored folders, in the folder of this test."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    Path("repaconv-out").mkdir()
    shutil.move("recipe-run", "repaconv-out/recipe")
    for path in Path().rglob("*.json"):
        path.write_text(path.read_text().replace("@HERE@", str(tmp_path)))


@pytest.mark.parametrize("run", RUNS)
def test_every_stage_continues_from_a_run_of_the_previous_schema(run, stored, repaconv):
    before = {path: json.loads(path.read_text()) for path in Path(run).rglob("*.json")}
    assert {each["schema_version"] for each in before.values()} == {PREVIOUS["schema_version"]}
    for typed in (["verify", run], ["report", run, "--format", "markdown"], ["export", run]):
        code, _, err = repaconv(*typed, "-q")
        assert code == 0, (typed, err)
    if (Path(run) / "build").is_dir():
        assert repaconv("build", run, "--target", "x86-64", "-q")[0] == 0
        assert repaconv("bench", run, "--rounds", "6", "-q")[0] in (0, 5)
    after = {path: json.loads(path.read_text()) for path in Path(run).rglob("*.json")}
    assert after[Path(run) / "verify.json"]["schema_version"] == SCHEMA_VERSION
    assert after[Path(run) / "fold.json"] == before[Path(run) / "fold.json"]  # it is read, and not written again

"""The repositories in examples/ work as committed: the commands of their READMEs, their tests, their workflows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from test_bundle_and_collect import on_the_board
from test_docs import blocks
from test_gate_command import ACTION, act

from repaconv.core import plugins
from repaconv.stages.recipe.recipe_file import read_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def typed(example: str) -> list[str]:
    """The lines of the README's sh blocks."""
    return [line for block in blocks(EXAMPLES / example / "README.md", "sh") for line in block.splitlines()]


def run(*command: str, folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    known = filter(None, [path, os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(known)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def copied(request, tmp_path):
    """A copy of an example, as the files are committed."""
    there = EXAMPLES / request.param
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", ".", folder=there).stdout.splitlines()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(there / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("copied", ["method-plugin"], indirect=True)
def test_the_plugin_is_found_passes_its_tests_and_deploys_what_it_trained(copied, repaconv, monkeypatch):
    """Every line of the README. What `pip install -e` does without the network: the package's folder and metadata."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]) == {plugins.METHODS, plugins.BACKBONES}
    info = copied / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"].items()
    text = "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in points
    )
    (info / "entry_points.txt").write_text(text)

    install, test, train, *commands = typed("method-plugin")
    assert install == 'pip install -e ".[test]"'
    assert test == "pytest"
    source = str(copied / "src")
    assert "2 passed" in run(sys.executable, "-m", "pytest", folder=copied, path=source).stdout
    program, *words = train.split()
    assert program == "python"
    run(sys.executable, *words, "3", folder=copied, path=source)  # three epochs of twenty

    monkeypatch.syspath_prepend(source)
    code, out, _ = repaconv("doctor", "-v")
    assert code == 0
    assert out.count("repaconv_dirac:") == 2
    assert [command.split()[1] for command in commands] == ["fold", "export", "verify"]
    for command in commands:
        code, _, err = repaconv(*command.split()[1:])
        assert code == 0, err
    assert json.loads(Path("repaconv-out/dirac/fold.json").read_text())["method"] == "dirac"
    folded = json.loads(Path("repaconv-out/dirac/fold.json").read_text())["certificate"]
    assert [row["module"] for row in folded] == [f"blocks.{n}" for n in range(6)]


@pytest.mark.parametrize("copied", ["deployment"], indirect=True)
def test_the_deployment_passes_its_gate_and_makes_the_bundle_that_its_readme_names(copied, repaconv):
    for line in typed("deployment"):
        assert line.split()[0] == "make"
        run(*line.split(), f"PYTHON={sys.executable}", folder=copied)
    text = (copied / "gate.xml").read_text()
    assert 'failures="0" errors="0"' in text
    checks = {"export: int8", "verify: int8", "verify: fp16", "bundle: bundle"}
    assert checks <= set(re.findall(r'name="([^"]+)"', text))
    (bundle,) = copied.glob("*.tar.gz")
    archive, program = re.search(r"tar xzf (\S+) && python3 (\S+)", (copied / "README.md").read_text()).groups()
    assert archive == bundle.name
    with tarfile.open(bundle) as tar:
        assert program in tar.getnames()
    # Other weights are refused before anything is made of them.
    shutil.copy(copied / "weights" / "calibration.npz", copied / "weights" / "repavit.pth")
    code, out, _ = repaconv("gate", "recipes/server.toml", "--format", "json")
    assert code == 4
    (check,) = json.loads(out)["data"]["recipes"][0]["checks"]
    assert "SHA-256" in check["message"]


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["deployment"], indirect=True)
def test_what_the_board_computed_is_collected_as_the_readme_says(copied, repaconv):
    run("make", "bundle", f"PYTHON={sys.executable}", folder=copied)
    done, result = on_the_board(next(copied.glob("*.tar.gz")), "10.3")
    assert done.returncode == 0, done.stderr
    result.rename("result.tar.gz")
    collect = re.search(r"`repaconv (collect [^`]*)`", (copied / "README.md").read_text())[1]
    code, out, err = repaconv(*collect.split())
    assert code == 0, err
    assert "measured on the board" in out


def test_the_committed_baseline_is_of_the_network_of_the_recipe():
    """What the gate compares with: an entry by the name of the recipe, of a network with these counts."""
    folder = EXAMPLES / "deployment"
    recipe, _ = read_recipe(folder / "speed" / "server.toml")
    found = json.loads((folder / "speed" / recipe.bench.baseline).read_text())
    entries = {name: entry for machine in found["machines"].values() for name, entry in machine.items()}
    assert all(name.startswith("speed/server.toml, ") for name in entries)
    assert {entry["network"]["kind"] for entry in entries.values()} == {"repavit on vit"}


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["deployment"], indirect=True)
def test_the_latency_is_compared_with_the_baseline_of_another_machine(copied, repaconv):
    """An entry of another machine fails nothing, whatever is measured here."""
    run("make", "weights", f"PYTHON={sys.executable}", folder=copied)
    known = json.loads(Path("baselines.json").read_text())
    (entries,) = known["machines"].values()
    Path("baselines.json").write_text(json.dumps({**known, "machines": {"another board": entries}}))
    code, out, _ = repaconv("gate", "speed/server.toml", "--format", "json")
    assert code in (0, 5)
    assert "another machine (another board)" in json.loads(out)["data"]["recipes"][0]["checks"][-1]["message"]


def test_the_workflow_of_the_deployment_calls_the_action_with_inputs_that_it_has():
    """Its recipes exist, and the action runs on them up to the gate, which reads them (here: without the weights)."""
    steps = yaml.safe_load((EXAMPLES / "deployment/.github/workflows/gate.yml").read_text())["jobs"]["gate"]["steps"]
    (step,) = [step for step in steps if "/.github/actions/gate@" in step.get("uses", "")]
    assert set(step["with"]) <= set(yaml.safe_load(ACTION.read_text())["inputs"])
    assert [*(EXAMPLES / "deployment").glob(step["with"]["recipes"])]


@pytest.mark.parametrize("copied", ["deployment"], indirect=True)
def test_the_action_refuses_a_deployment_without_its_weights(copied):
    steps = yaml.safe_load((copied / ".github/workflows/gate.yml").read_text())["jobs"]["gate"]["steps"]
    (step,) = [step for step in steps if "/.github/actions/gate@" in step.get("uses", "")]
    code, given_out, summary, _ = act(copied, **step["with"])
    assert (code, given_out) == (2, {"exit-code": "2"})
    assert "weights" in summary

"""The workflows, issue forms and files for contributors refer to what exists, and agree on the version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXAMPLES = sorted(ROOT.glob("examples/*/.github/workflows/*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS + EXAMPLES, ids=lambda path: path.stem + path.parents[2].name)
def test_a_workflow_runs_targets_that_exist_and_may_not_write_by_default(path):
    makefile = path.parents[2] / "Makefile"
    targets = re.findall(r"^([a-z-]+):", makefile.read_text(), re.M) if makefile.is_file() else []
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= set(targets)
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_every_supported_python_is_tested():
    versions = read(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert versions[0] == lowest
    assert [int(version.partition(".")[2]) for version in versions] == list(range(10, 10 + len(versions)))


def test_images_of_a_release_are_those_of_the_docker_folder():
    for entry in read(ROOT / ".github/workflows/release.yml")["jobs"]["images"]["strategy"]["matrix"]["include"]:
        assert (ROOT / "docker" / f"{entry['image']}.Dockerfile").is_file()


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_exist(path, repaconv):
    form = read(path)
    fields = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(set(fields)) == len(fields)
    assert form["name"]
    assert form["description"]
    for command in set(re.findall(r"repaconv ([a-z]+)", path.read_text())):
        assert repaconv(command, "--help")[0] == 0


def test_package_citation_and_changelog_have_one_version():
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert read(ROOT / "CITATION.cff")["version"] == version
    newest = re.search(r"^## \[(\S+)\] - (.+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == version
    assert newest[2] == "unreleased" or re.fullmatch(r"20\d\d-\d\d-\d\d", newest[2])


def test_the_changelog_is_what_users_notice_by_kind():
    """Keep a Changelog's sections, in its order, and short enough to be read."""
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        found = re.findall(r"^### (.+)", section, re.M)
        assert found == [kind for kind in kinds if kind in found]
        assert len(section.splitlines()) <= 150

"""The table of supported versions agrees with pyproject.toml, constraints.txt, the lock, the workflows and the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from repaconv.core import plugins
from repaconv.graph.operator_facts import OLDEST_OPSET

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = tomllib.loads((ROOT / "docs" / "_versions.toml").read_text())
PACKAGES = VERSIONS["packages"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def lower_bounds(lines):
    """The lower bound of each requirement, by name."""
    requirements = [Requirement(line) for line in lines]
    return {each.name: next(s.version for s in each.specifier if s.operator == ">=") for each in requirements}


def installed():
    """What CI installs on a newer Python, by name."""
    found = {}
    for file in ("requirements.lock", "constraints.txt"):  # TensorRT-RTX is in the constraints alone
        rows = re.findall(r"^([\w-]+)==([\d.]+)(.*)$", (ROOT / file).read_text(), re.M)
        found |= {name.removesuffix("-cu13"): version for name, version, marker in rows if "<" not in marker}
    return found


def test_the_table_has_each_package_with_its_lower_bound():
    optional = [
        line
        for name, lines in EXTRAS.items()
        if name not in ("all", "dev", "docs", "farm", "quantise")
        for line in lines
    ]
    assert {name: row["lowest"] for name, row in PACKAGES.items()} == lower_bounds(PROJECT["dependencies"] + optional)


def test_an_extra_and_the_development_tools_have_one_lower_bound():
    bounds = {name: row["lowest"] for name, row in PACKAGES.items()}
    shared = lower_bounds(EXTRAS["dev"])
    assert {name: bound for name, bound in shared.items() if name in bounds} == {
        name: bounds[name] for name in shared if name in bounds
    }


@pytest.mark.parametrize("name", PACKAGES)
def test_a_version_that_is_called_tested_is_one_that_tests_run_with(name):
    tested = PACKAGES[name]["tested"]
    if "lowest" in tested:  # `make test-lowest` installs repaconv[dev]
        assert name in lower_bounds(PROJECT["dependencies"] + EXTRAS["dev"])
    assert ("newest" in tested) == (name in installed())
    if "newest" in tested:
        assert PACKAGES[name]["newest"] == installed()[name]


def test_pythons_are_those_of_the_package_and_of_the_workflow():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert (pythons[0], pythons[-1]) == (VERSIONS["python"]["lowest"], VERSIONS["python"]["newest"])
    assert PROJECT["requires-python"] == f">={VERSIONS['python']['lowest']}"
    assert [f"Programming Language :: Python :: {each}" for each in pythons] == [
        each for each in PROJECT["classifiers"] if "Python :: 3." in each
    ]


def test_the_lowest_versions_run_on_the_lowest_python():
    lowest = VERSIONS["python"]["lowest"]
    makefile = (ROOT / "Makefile").read_text()
    assert f"$(or $(LOWEST_PYTHON),{lowest})" in makefile
    job = pytest.importorskip("yaml").safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["lowest"]
    assert [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})] == [
        lowest
    ]


def test_opsets_are_those_of_the_code_and_the_targets():
    targets = [plugins.load(plugins.TARGETS, name) for name in plugins.registered(plugins.TARGETS)]
    written = [min(each.opset for each in targets), max(each.newest for each in targets)]
    assert VERSIONS["opsets"]["written"] == written
    assert written[0] == OLDEST_OPSET
    assert VERSIONS["opsets"]["read"][1] == written[1]

"""The lock file with its hashes, and the page of licenses, agree with pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from repaconv.core.plugins import EXTRAS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI = {"python_version": "3.11", "python_full_version": "3.11.7", "sys_platform": "linux", "platform_machine": "x86_64"}
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def there(lines):
    """Requirements, by name, that hold on CI's machine."""
    found = map(Requirement, lines)
    return {canonicalize_name(each.name): each for each in found if not each.marker or each.marker.evaluate(CI)}


LOCKED = re.findall(
    r"^(\S+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", (ROOT / "requirements.lock").read_text(), re.M
)
VERSIONS = {name: Version(version) for name, version, _ in LOCKED}
FORMER = ("farm", "quantise")
"""Extras that install what another one does: its former name."""


def test_doctor_knows_every_extra_and_all_has_those_that_need_no_gpu():
    asked = PROJECT["optional-dependencies"]
    brought = {name: {Requirement(line).name for line in lines} for name, lines in asked.items()}
    known = {extra.name: set(extra.packages) for extra in EXTRAS}
    assert known == {name: packages for name, packages in brought.items() if name not in ("all", "dev", *FORMER)}
    (everything,) = asked["all"]
    assert Requirement(everything).extras == set(known) - {"onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "docs"}


def test_types_go_along_with_the_package():
    assert (ROOT / "repaconv" / "py.typed").is_file()


def test_doctor_is_short_and_names_the_line_that_installs(repaconv, monkeypatch):
    monkeypatch.setattr("repaconv.core.plugins._is_installed", lambda package: package != "timm")
    code, out, _ = repaconv("doctor")
    assert code == 0
    assert re.search(r"^ not installed +timm", out, re.M)
    assert "pip install 'repaconv[EXTRA]'" in out
    code, out, _ = repaconv("doctor", "-v")
    assert code == 0
    assert "networks of timm: --arch timm:NAME: timm not here: pip install 'repaconv[timm]'" in out
    assert "6 work" in next(line for line in out.splitlines() if line.split()[:1] == ["methods"])


def test_doctor_fits_a_screen_where_nothing_is_installed(repaconv, monkeypatch):
    monkeypatch.setattr("repaconv.core.plugins._is_installed", lambda package: False)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = repaconv("doctor")
    assert code == 0
    assert len(out.splitlines()) <= 24
    assert "x86-64-openvino" in out


def test_every_line_of_the_lock_is_a_version_with_hashes():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert len(LOCKED) == len(VERSIONS) == len([line for line in lines if line and line[0] not in "# "])
    assert VERSIONS["torch"].local == "cpu"
    assert {"hatchling", "editables"} <= set(VERSIONS)  # nothing else is fetched to build repaconv


@pytest.mark.parametrize("asked", ["dependencies", "dev"])
def test_the_lock_has_what_the_project_asks_for(asked):
    lines = PROJECT["dependencies"] if asked == "dependencies" else PROJECT["optional-dependencies"][asked]
    for name, requirement in there(lines).items():
        assert name in VERSIONS, f"{name}: make lock"
        assert requirement.specifier.contains(VERSIONS[name]), f"{requirement}: make lock"


def test_the_lock_keeps_to_the_constraints():
    for name, pin in there(PINS).items():
        assert name not in VERSIONS or pin.specifier.contains(VERSIONS[name]), f"{pin}: make lock"


def test_no_dependency_is_without_its_licence():
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", (ROOT / "docs" / "licenses.md").read_text(), re.M)
    result = {name: Version(version) for name, version, _ in rows if name not in ("package", "---")}
    assert set(there(PROJECT["dependencies"])) <= set(result), "make sbom"
    assert all(VERSIONS[name] == version for name, version in result.items()), "make sbom"
    assert not [name for name, _, licence in rows if licence == "not declared"]

"""The images, as far as they can be held without a container engine: see docker/README.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docker_steps import ROOT, copied, run_lines

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def test_there_is_one_for_each_kind_of_machine():
    assert {path.stem for path in FILES} == {"x86-64", "arm64", "tensorrt", "jetson"}


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is absent")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(path):
    done = subprocess.run([HADOLINT, "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_are_pinned_run_without_root_and_say_how_they_are_tested(path):
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)", text, flags=re.M)
    assert bases
    assert all(re.search(r":\S*\d", base) for base in bases), bases
    assert re.findall(r"^USER (\S+)", text, flags=re.M)[-1] == "10001"
    assert text.index("USER 10001") > text.rindex("RUN ")
    assert "-c constraints.txt" in text
    assert re.search(r"docker run .* demo --arch s12", text)
    assert f"docker/{path.name}" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_run_lines_are_shell_and_name_what_there_is(path):
    lines = run_lines(path)
    assert lines
    for line in lines:
        assert subprocess.run(["sh", "-n", "-c", line], check=False).returncode == 0, line
    extras = set(re.findall(r"\.\[(\w+)\]", " ".join(lines)))
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert all(f"{extra} = [" in declared for extra in extras)


def test_what_goes_into_the_images_is_enough_to_install(tmp_path):
    """pip resolves it, pinned, from what .dockerignore lets in."""
    copied(tmp_path)
    line = next(line for line in run_lines(ROOT / "docker" / "x86-64.Dockerfile") if "pip install" in line)
    wanted = line.partition("pip install")[2].replace("--no-cache-dir", "").replace("${PIP_ARGS}", "").replace('"', "")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", *wanted.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

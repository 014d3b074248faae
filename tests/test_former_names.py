"""Plug-ins that were written against release 0.1 work unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import structure

from repaconv.core.former_module_names import FORMER

PLUGIN = Path(__file__).parent / "data" / "plugin_of_0_1"


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_gives_todays_module(former):
    sys.modules.pop(f"repaconv.{former}", None)
    with pytest.warns(
        DeprecationWarning, match=rf"repaconv\.{former} is deprecated: use .* It is removed in repaconv 0\.3\.0\."
    ):
        found = import_module(f"repaconv.{former}")
    for name in FORMER[former].split():
        for entry, value in vars(import_module(f"repaconv.{name}")).items():
            if not entry.startswith("__"):
                assert getattr(found, entry) is value


def test_no_former_name_hides_a_module_of_today():
    assert not {f"repaconv.{former}" for former in FORMER} & set(structure.modules())


def test_a_plugin_package_of_0_1_works(tmp_path):
    """A method, a backbone, a rewrite, an engine and a target, installed as a package of its own."""
    (tmp_path / "conformance").mkdir()
    code = "import plugin_check; plugin_check.main()"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["method", "backbone", "rewrite", "engine", "target"]

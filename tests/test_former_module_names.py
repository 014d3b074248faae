"""Plug-ins that were written for release 0.1 work unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import package_structure
import pytest

from repaconv import results
from repaconv.core.former_module_names import FORMER
from repaconv.engines import contract
from repaconv.engines.contract import SessionSpec
from repaconv.engines.session_loading import load_session
from repaconv.method_api import preprocessing, settings
from repaconv.results import Link

PLUGIN = Path(__file__).parent / "data" / "plugin_of_0_1"


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_gives_todays_module(former):
    sys.modules.pop(f"repaconv.{former}", None)
    with warnings.catch_warnings(record=True) as seen:  # of a former package, too, where it was not imported before
        warnings.simplefilter("always")
        found = import_module(f"repaconv.{former}")
    sentence = rf"repaconv\.{former} is deprecated: use .* It is removed in repaconv 0\.3\.0\."
    assert any(each.category is DeprecationWarning and re.match(sentence, str(each.message)) for each in seen)
    for name in FORMER[former].split():
        for entry, value in vars(import_module(f"repaconv.{name}")).items():
            if not entry.startswith("__"):
                assert getattr(found, entry) is value


def test_a_module_imported_from_a_former_package_replaces_none_of_today():
    """In a process of its own: others have imported former names already."""
    program = (
        "import repaconv.stages.shared.common_options as today\n"
        "import repaconv.orders.shared as former, repaconv.stages.shared\n"
        "assert former is today and repaconv.stages.shared is not today"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_no_former_name_hides_a_module_of_today():
    assert not {f"repaconv.{former}" for former in FORMER} & set(package_structure.modules())


def test_functions_and_properties_of_0_1_that_plugins_may_use_have_their_former_names():
    link = Link(name="onnx", verdict="passed", reference="a", candidate="b", tolerance=None, metrics=None)
    scores = results.ClassScores(output="logits", classes=10, source="its shape")
    metric = results.TaskMetric(name="psnr", value=40.0, unit="dB", low=39.0, high=41.0)
    feeds, record = {"x": np.zeros((1, 3))}, {"meta": {"arch": {"depth": 2}}}
    pairs = [
        (lambda: contract.shapes_told(feeds), contract.shapes_text(feeds)),
        (lambda: settings.said_in(record, "meta", "arch"), {"depth": 2}),
        (lambda: contract.OnCard, contract.GpuSession),
        (lambda: contract.Order, contract.BuildSpec),
        (lambda: contract.BuildSpec(Path("m.onnx"), fp32_nodes=("softmax",)).islands, ("softmax",)),
        (
            lambda: contract.BuildSpec(Path("m.onnx"), islands=("x",)),
            contract.BuildSpec(Path("m.onnx"), fp32_nodes=("x",)),
        ),
        (
            lambda: preprocessing.preprocessing_of({}, {}, knobs=settings.SettingsReader({"image_size": "32"})),
            preprocessing.preprocessing_of({}, {}, settings.SettingsReader({"image_size": "32"})),
        ),
        (lambda: preprocessing.Told, preprocessing.FoundPreprocessing),
        (lambda: settings.Knobs, settings.SettingsReader),
        (lambda: settings.SettingsReader({"depth": "3"}).asked("depth", int), 3),
        (lambda: contract.Built(b"", {}, "", {}, proved="its log", runs_here=True).types_source, "its log"),
        (lambda: contract.Built(b"", {}, "", {}, "its log", runs_here=True).proved, "its log"),
        (lambda: results.Pace, results.SpeedTarget),
        (lambda: results.Raced, results.SpeedTrial),
        (lambda: results.outputs_told, results.outputs_text),
        (lambda: link.lossy_told, link.lossy_text),
        (lambda: scores.told, scores.text),
        (lambda: metric.told(), metric.text()),
    ]
    for former, today in pairs:
        match = r"is deprecated: use .* It is removed in repaconv 0\.3\.0\."
        with pytest.warns(DeprecationWarning, match=match) as seen:
            assert former() == today
        assert seen[0].filename == __file__


def test_a_gpu_session_of_a_plugin_may_have_the_former_names():
    engine = SimpleNamespace(
        name="theirs",
        open=lambda model, spec: SimpleNamespace(clocked=lambda feeds: lambda: 7.5, fallen=lambda feeds: ("TopK_3",)),
    )
    with pytest.warns(DeprecationWarning, match="of the sessions of theirs is deprecated: use") as seen:
        session = load_session(engine, b"", SessionSpec())
    assert len(seen) == 2
    assert isinstance(session, contract.GpuSession)
    assert (session.gpu_timed_call({})(), session.nodes_on_cpu({})) == (7.5, ("TopK_3",))


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

"""repaconv: fold a trained vision model exactly into its inference-time architecture, verify, export and benchmark it.

``inspect``, ``fold``, ``fetch``, ``score``, ``convert``, ``finetune``, ``verify``, ``export``, ``build``, ``bundle``,
``collect``, ``bench``, ``compare``, ``deploy``, ``gate``, ``run``, ``report``, ``save``, ``table`` and ``tune`` are the
commands of the same names; they take the same arguments and return the results that these write. ``new_recipe`` is
``new-recipe``, ``inspect_file`` is ``inspect`` for graphs and engines, ``estimate`` is ``bench --estimate``,
``throughput`` is ``bench --objective throughput``, ``compare_runs`` is ``report`` of several.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from repaconv.core import former_module_names

# ONNX Runtime's Linux builds since 1.29 send telemetry about each model that is loaded, unless this is set before.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

former_module_names.install()

if TYPE_CHECKING:
    from repaconv.core.errors import EnvironmentProblem as EnvironmentProblem
    from repaconv.core.errors import GateFailed as GateFailed
    from repaconv.core.errors import Inconclusive as Inconclusive
    from repaconv.core.errors import Refused as Refused
    from repaconv.core.errors import RepaconvError as RepaconvError
    from repaconv.core.errors import UsageProblem as UsageProblem
    from repaconv.stages.bench.compare import compare as compare
    from repaconv.stages.bench.estimate import estimate as estimate
    from repaconv.stages.bench.stage import bench as bench
    from repaconv.stages.bench.throughput import throughput as throughput
    from repaconv.stages.build.stage import build as build
    from repaconv.stages.bundle.collect import collect as collect
    from repaconv.stages.bundle.stage import bundle as bundle
    from repaconv.stages.convert.finetune import finetune as finetune
    from repaconv.stages.convert.score import score as score
    from repaconv.stages.convert.stage import convert as convert
    from repaconv.stages.deploy.stage import deploy as deploy
    from repaconv.stages.export.stage import export as export
    from repaconv.stages.fetch.stage import fetch as fetch
    from repaconv.stages.fold.stage import fold as fold
    from repaconv.stages.inspect.stage import inspect as inspect
    from repaconv.stages.inspect.stage import inspect_file as inspect_file
    from repaconv.stages.paper_table.stage import table as table
    from repaconv.stages.recipe.gate import gate as gate
    from repaconv.stages.recipe.new_recipe import new_recipe as new_recipe
    from repaconv.stages.recipe.run import run as run
    from repaconv.stages.report.runs_comparison import compare_runs as compare_runs
    from repaconv.stages.report.stage import report as report
    from repaconv.stages.save.stage import save as save
    from repaconv.stages.tune.stage import tune as tune
    from repaconv.stages.verify.stage import verify as verify

_FILES = {
    "bench": "bench.stage",
    "build": "build.stage",
    "bundle": "bundle.stage",
    "collect": "bundle.collect",
    "compare": "bench.compare",
    "compare_runs": "report.runs_comparison",
    "convert": "convert.stage",
    "deploy": "deploy.stage",
    "estimate": "bench.estimate",
    "export": "export.stage",
    "fetch": "fetch.stage",
    "finetune": "convert.finetune",
    "fold": "fold.stage",
    "gate": "recipe.gate",
    "inspect": "inspect.stage",
    "inspect_file": "inspect.stage",
    "new_recipe": "recipe.new_recipe",
    "report": "report.stage",
    "run": "recipe.run",
    "save": "save.stage",
    "score": "convert.score",
    "table": "paper_table.stage",
    "throughput": "bench.throughput",
    "tune": "tune.stage",
    "verify": "verify.stage",
}
"""The module in `repaconv.stages` of each stage."""

__all__ = list(_FILES)


ERRORS = ("EnvironmentProblem", "GateFailed", "Inconclusive", "Refused", "RepaconvError", "UsageProblem")
"""The exceptions, of `repaconv.core.errors`."""


def __dir__() -> list[str]:
    """Return the names of the stages and exceptions only."""
    return [*__all__, *ERRORS]


def __getattr__(name: str) -> Any:
    """Import a stage or an exception at its first use, so that `import repaconv` is fast."""
    if name in ERRORS:
        return getattr(import_module("repaconv.core.errors"), name)
    if name in _FILES:
        return getattr(import_module(f"repaconv.stages.{_FILES[name]}"), name)
    raise AttributeError(f"module 'repaconv' has no attribute {name!r}")

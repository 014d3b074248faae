"""repaconv: fold a trained vision model exactly into its fastest deploy form, prove it, export it, measure it.

``inspect``, ``fold``, ``fetch``, ``score``, ``convert``, ``finetune``, ``verify``, ``export``, ``build``, ``bundle``,
``collect``, ``bench``, ``compare``, ``deploy``, ``gate``, ``run``, ``report``, ``save``, ``table`` and ``tune`` are the
commands of the same names; they take the same arguments and return the artefacts that these write. ``new_recipe`` is
``new-recipe``, ``inspect_file`` is ``inspect`` for graphs and engines, ``estimate`` is ``bench --estimate``,
``throughput`` is ``bench --objective throughput``, ``compare_runs`` is ``report`` of several.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# ONNX Runtime's Linux builds since 1.29 tell their maker of each graph that is opened, unless this is there before.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from repaconv.pipeline.building import build as build
    from repaconv.pipeline.bundling import bundle as bundle
    from repaconv.pipeline.collecting import collect as collect
    from repaconv.pipeline.comparing import compare as compare
    from repaconv.pipeline.comparing_runs import compare_runs as compare_runs
    from repaconv.pipeline.converting import convert as convert
    from repaconv.pipeline.deploying import deploy as deploy
    from repaconv.pipeline.estimating import estimate as estimate
    from repaconv.pipeline.exporting import export as export
    from repaconv.pipeline.fetching import fetch as fetch
    from repaconv.pipeline.file_inspection import inspect_file as inspect_file
    from repaconv.pipeline.finetuning import finetune as finetune
    from repaconv.pipeline.folding import fold as fold
    from repaconv.pipeline.gating import gate as gate
    from repaconv.pipeline.inspection import inspect as inspect
    from repaconv.pipeline.measuring import bench as bench
    from repaconv.pipeline.recipe_writing import new_recipe as new_recipe
    from repaconv.pipeline.reporting import report as report
    from repaconv.pipeline.running import run as run
    from repaconv.pipeline.saving import save as save
    from repaconv.pipeline.scoring import score as score
    from repaconv.pipeline.streaming import throughput as throughput
    from repaconv.pipeline.tables import table as table
    from repaconv.pipeline.tuning import tune as tune
    from repaconv.pipeline.verification import verify as verify

_FILES = {
    "bench": "measuring",
    "build": "building",
    "bundle": "bundling",
    "collect": "collecting",
    "compare": "comparing",
    "compare_runs": "comparing_runs",
    "convert": "converting",
    "deploy": "deploying",
    "estimate": "estimating",
    "export": "exporting",
    "fetch": "fetching",
    "finetune": "finetuning",
    "fold": "folding",
    "gate": "gating",
    "inspect": "inspection",
    "inspect_file": "file_inspection",
    "new_recipe": "recipe_writing",
    "report": "reporting",
    "run": "running",
    "save": "saving",
    "score": "scoring",
    "table": "tables",
    "throughput": "streaming",
    "tune": "tuning",
    "verify": "verification",
}
"""Each stage's file in `repaconv.pipeline`."""

__all__ = list(_FILES)


def __dir__() -> list[str]:
    """The stages, and nothing that is here for their sake."""
    return __all__


def __getattr__(name: str) -> Any:
    """Load a stage, and no other, when it is first asked for: `import repaconv` stays quick, and so does `inspect`."""
    if name in _FILES:
        return getattr(import_module(f"repaconv.pipeline.{_FILES[name]}"), name)
    raise AttributeError(f"module 'repaconv' has no attribute {name!r}")

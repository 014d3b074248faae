"""repaconv: fold a trained vision model exactly into its fastest deploy form, prove it, export it, measure it.

``inspect``, ``fold``, ``fetch``, ``score``, ``convert``, ``finetune``, ``verify``, ``export``, ``build``, ``bundle``,
``collect``, ``bench``, ``compare``, ``deploy``, ``gate``, ``run``, ``report``, ``save``, ``table`` and ``tune`` are the
commands of the same names; they take the same arguments and return the artefacts that these write. ``new_recipe`` is
``new-recipe``, ``inspect_file`` is ``inspect`` for graphs and engines, ``estimate`` is ``bench --estimate``,
``throughput`` is ``bench --objective throughput``, ``compare_runs`` is ``report`` of several.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# ONNX Runtime's Linux builds since 1.29 tell their maker of each graph that is opened, unless this is there before.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from repaconv.pipeline import bench as bench
    from repaconv.pipeline import build as build
    from repaconv.pipeline import bundle as bundle
    from repaconv.pipeline import collect as collect
    from repaconv.pipeline import compare as compare
    from repaconv.pipeline import compare_runs as compare_runs
    from repaconv.pipeline import convert as convert
    from repaconv.pipeline import deploy as deploy
    from repaconv.pipeline import estimate as estimate
    from repaconv.pipeline import export as export
    from repaconv.pipeline import fetch as fetch
    from repaconv.pipeline import finetune as finetune
    from repaconv.pipeline import fold as fold
    from repaconv.pipeline import gate as gate
    from repaconv.pipeline import inspect as inspect
    from repaconv.pipeline import inspect_file as inspect_file
    from repaconv.pipeline import new_recipe as new_recipe
    from repaconv.pipeline import report as report
    from repaconv.pipeline import run as run
    from repaconv.pipeline import save as save
    from repaconv.pipeline import score as score
    from repaconv.pipeline import table as table
    from repaconv.pipeline import throughput as throughput
    from repaconv.pipeline import tune as tune
    from repaconv.pipeline import verify as verify

__all__ = [
    "bench",
    "build",
    "bundle",
    "collect",
    "compare",
    "compare_runs",
    "convert",
    "deploy",
    "estimate",
    "export",
    "fetch",
    "finetune",
    "fold",
    "gate",
    "inspect",
    "inspect_file",
    "new_recipe",
    "report",
    "run",
    "save",
    "score",
    "table",
    "throughput",
    "tune",
    "verify",
]


def __dir__() -> list[str]:
    """The stages, and nothing that is here for their sake."""
    return __all__


def __getattr__(name: str) -> Any:
    """Load a stage when it is first asked for, so that `import repaconv` stays quick."""
    if name in __all__:
        from repaconv import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'repaconv' has no attribute {name!r}")

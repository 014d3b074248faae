"""Load the rewrites of a rewrite preset by name, without those that a graph of its opset and precision cannot use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from repaconv.core import plugins
from repaconv.graph.rewrite_contract import Rewrite

FP32 = "fp32"
DEFAULT, OFFICIAL, FASTEST = "default", "official", "fastest-known"
NAMED = (DEFAULT, OFFICIAL, FASTEST)
"""The target's own preset, the paper's preset, and the preset that the tuner found fastest for these shapes on this
machine. All other presets are files of the target."""


class Chosen(NamedTuple):
    """The loaded rewrites of a preset.

    Attributes:
        rewrites: The rewrites to apply, in order.
        left_out: Names of the rewrites that need a newer opset.
    """

    rewrites: tuple[Rewrite, ...]
    left_out: tuple[str, ...]


def chosen(names: Iterable[str], newest_opset: int, precision: str = FP32) -> Chosen:
    """Load rewrites by name, and separate those that need an opset above ``newest_opset``.

    In lower precision those for FP32 alone are left out, as those that the target does not use in it.

    Raises:
        UsageProblem: If no rewrite has one of the names, or it was removed.
        EnvironmentProblem: If a rewrite cannot be loaded.
    """
    rewrites = [plugins.load(plugins.REWRITES, name) for name in names]
    rewrites = [rewrite for rewrite in rewrites if precision == FP32 or not rewrite.fp32_only]
    kept = tuple(rewrite for rewrite in rewrites if rewrite.opset <= newest_opset)
    return Chosen(kept, tuple(rewrite.name for rewrite in rewrites if rewrite.opset > newest_opset))

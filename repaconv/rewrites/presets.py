"""Which rewrites a form is: by name, in their order, as far as a graph's opset can say them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from repaconv.core import plugins
from repaconv.graph.rewrite_contract import Rewrite

DEFAULT, OFFICIAL, FASTEST = "default", "official", "fastest-known"
NAMED = (DEFAULT, OFFICIAL, FASTEST)
"""The target's own form, the paper's, and the tuner's for these shapes on this machine; all others are its files."""


class Chosen(NamedTuple):
    """The rewrites to apply, in order, and those that the opset cannot say."""

    rewrites: tuple[Rewrite, ...]
    left_out: tuple[str, ...]


def chosen(names: Iterable[str], newest_opset: int) -> Chosen:
    """The rewrites of those names.

    Raises:
        UsageProblem: If there is none of a name, or it was removed.
        EnvironmentProblem: If one cannot be loaded.
    """
    rewrites = [plugins.load(plugins.REWRITES, name) for name in names]
    kept = tuple(rewrite for rewrite in rewrites if rewrite.opset <= newest_opset)
    return Chosen(kept, tuple(rewrite.name for rewrite in rewrites if rewrite.opset > newest_opset))

"""The interface of a rewrite: one exact change of a graph, with its name and its condition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

Apply = Callable[["ir.Model"], Iterator[Change]]
"""Changes the model in place wherever the rewrite is valid, and yields each change; constants are made in float64."""


@dataclass(frozen=True)
class Rewrite:
    """One exact change of a graph.

    Attributes:
        name: Its name in a rewrite preset.
        valid: The condition under which it is exact, in one sentence; elsewhere it changes nothing.
        apply: See `Apply`.
        opset: The oldest opset that has the operators it writes.
        keeps: Whether every named value and every module output that remains has the same numbers as before. If not,
            intermediate values cannot be compared with another preset.
        order: Its position in a preset that the tuner composes: a rewrite comes after those whose output it matches.
        fp32_only: Whether no graph in lower precision uses it, since it would lose more there than what it replaces.
        alone: Whether it is left out if an earlier rewrite changed the graph.
    """

    name: str
    valid: str
    apply: Apply
    opset: int = 0
    order: int = 50
    keeps: bool = False
    fp32_only: bool = False
    alone: bool = False

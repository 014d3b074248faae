"""What a rewrite is: one exact change of a graph, with its name and when it is valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

Apply = Callable[["ir.Model"], Iterator[Change]]
"""Changes the model in place wherever the rewrite is valid, and tells each place; constants are made in float64."""


@dataclass(frozen=True)
class Rewrite:
    """One exact change of a graph.

    Attributes:
        name: As it stands in a form.
        valid: When it is exact, in one sentence; elsewhere it changes nothing.
        apply: See `Apply`.
        opset: The oldest opset that can say what it writes.
        keeps: Whether every value that the graph still has by name, or behind a module, is what it was; else nothing on
            the way can be compared with another form.
        order: Its place in a form that the tuner puts together: what looks for what another writes comes later.
    """

    name: str
    valid: str
    apply: Apply
    opset: int = 0
    order: int = 50
    keeps: bool = False

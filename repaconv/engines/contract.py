"""What a runtime that builds is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, usual and largest shape of an input."""


def _no_tick(_what: str, _done: int, _total: int) -> None:
    """Progress for nobody."""


@dataclass(frozen=True)
class Order:
    """An engine that is wanted.

    Attributes:
        model: The ONNX file; its weights may lie in a file beside it.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``: what the graph is typed in, or what the runtime is to use.
        capabilities: Compute capabilities of the GPUs that it is for, e.g. ``8.9``.
        shapes: Of each input that has free dimensions.
        islands: Nodes that are to compute in float32.
        here: Whether it is for a machine of this one's kind.
        threads: Of one inference, on processors.
        workspace: Bytes of scratch memory that a kernel may take; the runtime's own limit when None.
        timing_cache: What earlier builds measured of kernels, serialised; None lets the builder measure all.
        replay: Fail where the timing cache has no answer, so that the same engine comes out.
        tick: Told how far a long build is.
    """

    model: Path
    precision: str = "fp32"
    capabilities: tuple[str, ...] = ()
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    islands: tuple[str, ...] = ()
    here: bool = True
    threads: int = 1
    workspace: int | None = None
    timing_cache: bytes | None = None
    replay: bool = False
    tick: Callable[[str, int, int], None] = _no_tick


@dataclass(frozen=True)
class Built:
    """An engine.

    Attributes:
        engine: Serialised.
        types: How many of what computes are of which type, ``MATRIX_MULTIPLY.HALF`` for one; ``INT8`` where int8 is
            multiplied.
        log: The builder's.
        options: What was set, to be set again when it is loaded.
        proved: What the types were read from.
        may_stay: Types that are no fault where int8 was asked for: of products that the runtime does not quantise.
        runs_here: Whether it can be loaded and compared on this machine.
        timing_cache: As it is after the build, if there is such a thing.
    """

    engine: bytes
    types: Mapping[str, int]
    log: str
    options: Mapping[str, str]
    proved: str
    runs_here: bool
    may_stay: tuple[str, ...] = ()
    timing_cache: bytes | None = None


def label(precision: str) -> str:
    """How a precision is called in `Built.types`."""
    return {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int8": "INT8"}[precision]


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as an artefact has them."""
    return {name: str(value) for name, value in sorted(options.items())}

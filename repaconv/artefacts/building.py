"""What ``build`` leaves: an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from repaconv.artefacts.records import Artefact, Link, Payload


class BuildArtefact(Artefact):
    """An engine for a target.

    ``layer_types`` counts the types of what computes, ``MATRIX_MULTIPLY.HALF`` for one; ``note`` says what they were
    read from. ``builder_options`` are the runtime's, ``settings`` those among them of a deployment that `tune` found,
    ``timing_cache`` is the hash of TensorRT's measurements after the build. ``links`` compare the engine with its model
    where it runs on the machine that built it. ``variant`` is that of the export, in the engine's precision.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"options": "builder_options"}

    stage: str = "build"
    variant: str = ""
    target: str
    runtime: str
    compute_capability: str
    precision: str
    layer_types: dict[str, int]
    builder_options: dict[str, str] = Field(default={})
    settings: tuple[str, ...] = ()
    timing_cache: str = ""
    note: str
    links: tuple[Link, ...] = ()
    onnx_sha256: str
    payload: Payload

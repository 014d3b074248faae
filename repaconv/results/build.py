"""The result of ``build``: an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from repaconv.results.records import Artefact, Link, Payload


class BuildArtefact(Artefact):
    """The result of ``build``: an engine for a target, what precision it computes in, and whether it computes the same.

    Attributes:
        stage: The command that wrote this result, ``build``.
        variant: The name of the engine in the run: target, precision and what else differs from the default, e.g.
            ``x86-64.int8``.
        target: The name of the target.
        runtime: The name and version of the runtime that built the engine, e.g. ``tensorrt 10.3.0``.
        compute_capability: The CUDA compute capability of the target's GPU, e.g. ``8.7``; empty for a CPU.
        precision: The precision that was asked for.
        layer_types: The number of layers that compute convolutions and matrix products, by kind and data type, e.g.
            ``MATRIX_MULTIPLY.HALF``.
        builder_options: The options that the runtime built the engine with, by the runtime's own names.
        settings: The runtime settings that ``tune`` found, as ``name=value``; empty if the engine was not built for a
            tuned deployment.
        timing_cache: The SHA-256 of TensorRT's timing cache after the build; empty for other runtimes.
        note: What ``layer_types`` was read from, which layers keep another precision and why, and limits of the engine.
        links: The comparison of the engine with its ONNX model, for each output; empty if the engine does not run on
            the machine that built it.
        onnx_sha256: The SHA-256 of the ONNX model that the engine was built from.
        payload: The engine.
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

"""What ``inspect`` leaves: what a checkpoint, a graph or an engine holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from repaconv.artefacts.records import SCHEMA_VERSION, Cost, Fact, Known, Origin, Record, WeightSet
from repaconv.artefacts.results import Result


class BlockCost(Record):
    """What one block costs in both forms."""

    name: str
    training: Cost
    deploy: Cost


class Inspection(Result):
    """What a checkpoint holds; the result of ``inspect``. ``problems`` say why it cannot be folded;
    ``missing_settings`` are the settings without which it cannot, each with an example.

    ``networks`` are told where no method knows it: several exact ones compute different things with equal tensors.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"lacks": "missing_settings"}

    SHOWN: ClassVar[tuple[str, ...]] = ("method", "form")

    schema_version: int = SCHEMA_VERSION
    stage: str = "inspect"
    origin: Origin
    sets: tuple[WeightSet, ...]
    placeholders: tuple[str, ...]
    method: str | None
    form: str | None
    reason: str
    confidence: str = ""
    applied: tuple[str, ...] = ()
    backbone: str | None = None
    facts: tuple[Fact, ...] = ()
    problems: tuple[str, ...] = ()
    missing_settings: dict[str, str] = Field(default_factory=dict)
    training: Cost | None = None
    deploy: Cost | None = None
    blocks: tuple[BlockCost, ...] = ()
    networks: tuple[Known, ...] = ()


class FileInspection(Result):
    """What an ONNX graph or an engine says of itself, read as bytes; the result of ``inspect`` for those."""

    SHOWN: ClassVar[tuple[str, ...]] = ("kind", "path")

    schema_version: int = SCHEMA_VERSION
    stage: str = "inspect"
    path: str
    kind: str
    sha256: str
    bytes: int
    facts: tuple[Fact, ...]
    problems: tuple[str, ...] = ()

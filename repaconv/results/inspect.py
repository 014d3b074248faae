"""The result of ``inspect``: what a checkpoint, an ONNX model or an engine contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from repaconv.results.records import SCHEMA_VERSION, Cost, Fact, Known, Origin, Record, Result, WeightSet


class BlockCost(Record):
    """The cost of one block in the training form and in the deploy form.

    Attributes:
        name: The name of the block's module, e.g. ``blocks.0``.
        training: Its cost in the training form.
        deploy: Its cost in the deploy form.
    """

    name: str
    training: Cost
    deploy: Cost


class Inspection(Result):
    """The result of ``inspect`` for a checkpoint: what it contains, and whether it can be folded.

    Attributes:
        schema_version: The version of the schema of results.
        stage: The command that wrote this result, ``inspect``.
        origin: The checkpoint, and which weights of it were read.
        sets: All state dicts in the file.
        placeholders: The Python classes and functions that the file refers to, by their full names; none of them was
            imported or run.
        method: The registered name of the method whose tensor names the checkpoint has; null if it is of no known
            method.
        form: ``training`` if the checkpoint has the training form, ``deploy`` if it was folded already; null without a
            method.
        reason: The tensor names that show the method, or why there is no method.
        confidence: ``certain`` if only this method has such tensor names, ``possible`` if another method has them as
            well; empty without a method.
        applied: The folds that would be applied: the method, and others such as ``layer scale``; empty if it cannot be
            folded.
        backbone: The registered name of the network family; null if the checkpoint cannot be folded by a method.
        facts: The settings and sizes of the network with their sources, then the accuracies that the checkpoint
            records. Of a pickled module its class, and of a checkpoint of Ultralytics its architecture, task, classes,
            image size and version.
        problems: Why the checkpoint cannot be folded, and which settings contradict it; empty if there is no problem.
        missing_settings: The settings missing from the checkpoint that a fold needs, each with an example of its value.
        training: The cost of the training form; null if the checkpoint cannot be folded by a method.
        deploy: The cost of the deploy form; null if the checkpoint cannot be folded by a method.
        blocks: The cost of each block that both forms have.
        networks: Without a method: the published networks with these tensors, else the nearest ones. Several exact ones
            compute different functions with equal tensors.
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

    @property
    def needs_arch(self) -> bool:
        """Whether ``--arch`` must say what builds the network: no method does, nor the file, nor one published name."""
        contained = any(fact.name == "architecture" for fact in self.facts)
        return self.method is None and not contained and sum(each.exact for each in self.networks) != 1


class FileInspection(Result):
    """The result of ``inspect`` for an ONNX model or an engine, whose file is read and not loaded.

    Attributes:
        schema_version: The version of the schema of results.
        stage: The command that wrote this result, ``inspect``.
        path: The path of the file as it was given.
        kind: ``ONNX graph``, ``TensorRT engine``, ``TensorRT-RTX engine``, ``OpenVINO compiled model``, ``ONNX Runtime
            model`` or ``unknown``.
        sha256: The SHA-256 of the file.
        bytes: The size of the file in bytes, without external weights.
        facts: What the file contains: opset, inputs, outputs, operators and metadata of an ONNX model; the header of an
            engine and, if repaconv built it, its target and precision.
        problems: What is wrong with the file, e.g. missing external weights; empty if nothing is.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("kind", "path")

    schema_version: int = SCHEMA_VERSION
    stage: str = "inspect"
    path: str
    kind: str
    sha256: str
    bytes: int
    facts: tuple[Fact, ...]
    problems: tuple[str, ...] = ()

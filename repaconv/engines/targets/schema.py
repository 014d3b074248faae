"""The fields of a target file. A target describes a device: its runtime, limits and rewrite presets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from repaconv.core import plugins
from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.core.toml_positions import Positions, first_problem, parse_toml, read_toml
from repaconv.graph.operator_facts import OLDEST_OPSET
from repaconv.results import PREVIOUS, Limits, Record


class BenchDefaults(Record):
    """Default benchmark settings of a target.

    Attributes:
        threads: Threads per inference.
        batch: Images per inference.
        rounds: Measured rounds.
        warmup_rounds: Rounds before these, which are not measured.
    """

    threads: int
    batch: int
    rounds: int
    warmup_rounds: int


class Variant(Record):
    """Differences of a target with another system; omitted fields are the target's.

    Attributes:
        runtime: Another engine.
        runtime_version: Its version on the device.
        board_python: Another version of Python.
        opset: Another opset.
        unsupported_ops: Other operators that the parser does not support.
        forbids: Other features that it does not support.
        precisions: Other precisions.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"lacks": "unsupported_ops"}

    runtime: str | None = None
    runtime_version: str | None = None
    board_python: str | None = None
    opset: int | None = None
    unsupported_ops: tuple[str, ...] | None = None
    forbids: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None


class Target(Record):
    """A device: its runtime, the operators that it supports, and how it is measured.

    Attributes:
        name: Name of the target and of files made for it: letters, digits, ``_`` and ``-``.
        about: What the device is, in a few words.
        runtime: Name of a registered engine.
        runtime_version: Its version on the device.
        compute_capability: Compute capability of its GPU.
        architecture: Architecture of its CPU as in ``platform.machine()``, if the model runs on the CPU.
        board_python: Python version on the device.
        opset: The opset that is exported, and the newest that the parser supports unless ``newest_opset`` is given.
        newest_opset: The newest opset to which a rewrite preset may raise a graph. A target or variant that sets
            ``opset`` does not inherit it.
        forms: The rewrites of the default preset, in order: by method, or under ``default`` for all others. Under the
            name of a lower precision: those of them that its graphs use. Under ``safest``: those for CPUs without
            measurements.
        measured: By CPU ISA level (`repaconv.benchmark.cpu_isa_level`), or by the name of a GPU: the measurement that
            the default preset rests on. An ISA level may have presets of its own: ``default@amx``, or for a method
            ``pyra@amx``.
        unsupported_ops: Operators of the opset that the parser does not support.
        forbids: Other features that it does not support; see `repaconv.onnx_export.target_operator_rules`.
        domains: Supported operator domains other than ONNX's own.
        fp32_operators: By lower precision, the operators that the runtime does not compute in it: they stay in FP32.
        precisions: Supported precisions. For tf32 the graph is float32, and the runtime computes in TF32.
        typed_by: Whether bf16 is the type of the graph, or a setting of the runtime for a float32 graph.
        quantizers: Quantizers that `tune` tries in addition to ONNX Runtime's.
        source: The sources of these values.
        other_runtimes: Targets with other runtimes on the same device, which `tune` tries.
        bench: Default settings of `bench`.
        limits: Peak throughput and bandwidth for `bench --estimate`. A series of GPUs has none.
        variants: The same device with other systems, e.g. ``orin-nano@jp5.1``.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "lacks": "unsupported_ops",
        "quantisers": "quantizers",
        "beside": "other_runtimes",
    }

    name: str = Field(pattern=r"^[\w-]+(@[\w-]+(\.\d+)*)?$")
    about: str
    runtime: str
    runtime_version: str = ""
    compute_capability: str = ""
    architecture: str = ""
    board_python: str = ""
    opset: int = Field(ge=OLDEST_OPSET)
    newest_opset: int | None = None
    forms: dict[str, tuple[str, ...]] = Field(default={})
    measured: dict[str, str] = Field(default={})
    unsupported_ops: tuple[str, ...] = ()
    forbids: tuple[
        Literal["topk-from-a-value", "scatter-add", "float64", "dynamic-batch", "zero-points", "uint8"], ...
    ] = ()
    domains: tuple[str, ...] = ()
    fp32_operators: dict[Annotated[str, Field(pattern="^(fp16|bf16|int8)$")], tuple[str, ...]] = Field(default={})
    precisions: tuple[Literal["fp32", "tf32", "fp16", "bf16", "int8"], ...]
    typed_by: Literal["graph", "runtime"] = "graph"
    quantizers: tuple[Literal["onnxruntime-symmetric", "nncf", "nncf-symmetric"], ...] = ()
    source: tuple[str, ...] = ()
    other_runtimes: tuple[str, ...] = ()
    bench: BenchDefaults
    limits: Limits | None = None
    variants: dict[Annotated[str, Field(pattern=r"^[\w-]+(\.\d+)*$")], Variant] = Field(default={})

    @field_validator("newest_opset")
    @classmethod
    def _not_older(cls, newest: int | None, known: ValidationInfo) -> int | None:
        opset = known.data.get("opset")
        if newest is not None and opset is not None and newest < opset:
            raise ValueError(f"is {newest}, older than opset = {opset}")
        return newest

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    def at_opset(self, opset: int | None) -> Target:
        """Return the target with this opset as its only one.

        Raises:
            UsageProblem: If the target does not support the opset, or it cannot be exported.
        """
        if opset is None:
            return self
        if not OLDEST_OPSET <= opset <= self.newest:
            opsets = f"{OLDEST_OPSET}" + f" to {self.newest}" * (self.newest > OLDEST_OPSET)
            raise UsageProblem(
                f"no model of opset {opset} is written for the target {self.name}.",
                hint=f"Give --opset {opsets}, or a target whose runtime reads opset {opset}.",
                code="export.opset",
            )
        return self.model_copy(update={"opset": opset, "newest_opset": None})

    @property
    def newest(self) -> int:
        """The newest supported opset."""
        return self.newest_opset or self.opset

    def form(self, method: str, family: str = "") -> tuple[str, ...]:
        """Return the rewrite names of a method's default preset on a CPU of this ISA level."""
        if self.guesses(family) and "safest" in self.forms:
            return self.forms["safest"]
        names = (f"{method}@{family}", method, f"default@{family}", "default")
        return next((self.forms[name] for name in names if name in self.forms), ())

    def guesses(self, family: str) -> bool:
        """Return whether there are no measurements for this ISA level; False if the level is unknown."""
        return bool(family) and family not in self.measured

    def rewrites_for(self, rewrites: tuple[str, ...], precision: str) -> tuple[str, ...]:
        """Return the rewrites that a precision keeps."""
        return tuple(name for name in rewrites if name in self.forms.get(precision, rewrites))

    @field_validator("name")
    @classmethod
    def _is_no_opset(cls, name: str) -> str:
        """Refuse names such as opset17: files exported with ``--opset`` have the same suffix."""
        if re.fullmatch(r"opset\d+", name):
            raise ValueError(f"{name!r} would name files as --opset {name[5:]} does; choose another name")
        return name

    def variant(self, name: str) -> Target:
        """Return the target with another system.

        Raises:
            UsageProblem: If there is no such variant.
        """
        if name not in self.variants:
            known = ", ".join(f"{self.name}@{each}" for each in self.variants) or "none"
            raise UsageProblem(
                f"the target {self.name} has no variant {name!r}.",
                hint=f"{did_you_mean(name, self.variants)}Known variants: {known}.",
                code="target.variant",
            )
        other = self.variants[name].model_dump(exclude_none=True)
        return self.model_copy(update=_over({}, {**other, "name": f"{self.name}@{name}", "variants": {}}))


def packaged(name: str) -> Target:
    """Load a target of this package by the name of its file."""
    return parse(files("repaconv.engines.targets").joinpath(f"{name}.toml").read_text("utf-8"), f"{name}.toml")


def from_file(path: Path) -> Target:
    """Load a user's target file; with ``extends`` it overrides fields of a registered target.

    Raises:
        UsageProblem: If the file cannot be read or is not a valid target, with the line.
    """
    table, lines = read_toml(path, "target")
    base = plugins.load(plugins.TARGETS, str(table.pop("extends"))).model_dump() if "extends" in table else {}
    return _validated(_over(base, table), lines, str(path))


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge fields over those of a base target; ``newest_opset`` is inherited only with ``opset``."""
    return {**base, **({"newest_opset": None} if "opset" in own else {}), **own}


def parse(text: str, where: str) -> Target:
    """Parse the TOML text of a target.

    Raises:
        UsageProblem: If a field is missing or wrong, with its name and line.
    """
    return _validated(*parse_toml(text, where, "target"), where)


def _validated(table: dict[str, Any], lines: Positions, where: str) -> Target:
    try:
        return Target.model_validate(table, context=PREVIOUS)  # a user's file may use former field names
    except ValidationError as error:
        raise UsageProblem(
            first_problem(error, where, lines),
            hint=f"A target that is valid: {Path(__file__).with_name('x86-64.toml')}",
            code="target.invalid",
        ) from error

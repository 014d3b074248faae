"""A target is a device as data; this is what its file may say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from repaconv.core import plugins
from repaconv.core.errors import UsageProblem
from repaconv.core.toml_positions import Lines, first_problem, parse_toml, read_toml
from repaconv.results import PREVIOUS, Limits, Record

OLDEST = 13
"""The oldest opset that is written (`repaconv.onnx_export.opset_lowering`)."""


class BenchDefaults(Record):
    """The protocol, where a command does not say otherwise."""

    threads: int
    batch: int
    rounds: int
    warmup_rounds: int


class Variant(Record):
    """What is another on the same device with another system; what is left out is the target's."""

    FORMER: ClassVar[Mapping[str, str]] = {"lacks": "unsupported_ops"}

    runtime: str | None = None
    runtime_version: str | None = None
    board_python: str | None = None
    opset: int | None = None
    unsupported_ops: tuple[str, ...] | None = None
    forbids: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None


class Target(Record):
    """A device: its runtime, what its parser takes, how it is measured.

    Attributes:
        name: What files of it are called after: letters, digits, ``_`` and ``-``.
        runtime: A registered engine's name; ``runtime_version`` is the device's own.
        compute_capability: Of its GPU.
        architecture: Of its processor, as ``platform.machine()`` calls it, where that is what computes.
        board_python: Of the system on the device.
        opset: What is written, and the newest that the parser reads unless ``newest_opset`` says otherwise.
        newest_opset: What a form may raise it to. A target or variant that gives ``opset`` alone takes none over from
            what it extends.
        forms: The rewrites of the default form, in order: by method, or under ``default`` for all others; under a lower
            precision's name, those that its graphs keep; under ``safest`` those of a processor that nobody measured.
        measured: By processor family (`repaconv.benchmark.cpu_isa_level`), on what the default form there rests, and
        when. A family may have forms of its own, ``default@amx``, or a method: ``pyra@amx``.
        unsupported_ops: Operators that the parser does not know in that opset.
        forbids: What else it does not take; see `repaconv.onnx_export.target_operator_rules`.
        domains: Of operators that it knows beside ONNX's own.
        precisions: What it computes in. No graph is typed in tf32: the runtime computes float32 ones so.
        typed_by: Whether bf16 stands in the graph, or is what the runtime makes of a float32 one.
        quantizers: Beside ONNX Runtime's, those whose int8 graphs are worth a try on this runtime (`tune`).
        source: Where this is from.
        beside: Targets that are other runtimes on the same device, which `tune` tries.
        limits: What it can do at most: what `bench --estimate` goes by. A family of cards has none.
        variants: The same device with other systems: ``orin-nano@jp5.1``.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"lacks": "unsupported_ops", "quantisers": "quantizers"}

    name: str = Field(pattern=r"^[\w-]+(@[\w-]+(\.\d+)*)?$")
    about: str
    runtime: str
    runtime_version: str = ""
    compute_capability: str = ""
    architecture: str = ""
    board_python: str = ""
    opset: int = Field(ge=OLDEST)
    newest_opset: int | None = None
    forms: dict[str, tuple[str, ...]] = Field(default={})
    measured: dict[str, str] = Field(default={})
    unsupported_ops: tuple[str, ...] = ()
    forbids: tuple[
        Literal["topk-from-a-value", "scatter-add", "float64", "dynamic-batch", "zero-points", "uint8"], ...
    ] = ()
    domains: tuple[str, ...] = ()
    precisions: tuple[Literal["fp32", "tf32", "fp16", "bf16", "int8"], ...]
    typed_by: Literal["graph", "runtime"] = "graph"
    quantizers: tuple[Literal["onnxruntime-symmetric", "nncf", "nncf-symmetric"], ...] = ()
    source: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
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
        """Its name, as it is typed."""
        return self.name

    def at_opset(self, opset: int | None) -> Target:
        """The target as if its parser read that opset and no newer one.

        Raises:
            UsageProblem: If it does not read it, or nothing here writes it.
        """
        if opset is None:
            return self
        if not OLDEST <= opset <= self.newest:
            raise UsageProblem(
                f"no model of opset {opset} is written for the target {self.name}.",
                hint=f"Give --opset {OLDEST} to {self.newest}, or a target whose runtime reads opset {opset}.",
                code="export.opset",
            )
        return self.model_copy(update={"opset": opset, "newest_opset": None})

    @property
    def newest(self) -> int:
        """The newest opset that it reads."""
        return self.newest_opset or self.opset

    def form(self, method: str, family: str = "") -> tuple[str, ...]:
        """Names of the rewrites of a method's default form here, on a processor of that family."""
        if self.guesses(family) and "safest" in self.forms:
            return self.forms["safest"]
        names = (f"{method}@{family}", method, f"default@{family}", "default")
        return next((self.forms[name] for name in names if name in self.forms), ())

    def guesses(self, family: str) -> bool:
        """Whether nobody measured what is fast on such a processor; not of a family that is not known."""
        return bool(family) and family not in self.measured

    def kept(self, rewrites: tuple[str, ...], precision: str) -> tuple[str, ...]:
        """Of a form, what is kept in that precision."""
        return tuple(name for name in rewrites if name in self.forms.get(precision, rewrites))

    @field_validator("name")
    @classmethod
    def _is_no_opset(cls, name: str) -> str:
        """Files of an export for a target are named as those with ``--opset`` would be."""
        if re.fullmatch(r"opset\d+", name):
            raise ValueError(f"{name!r} would name files as --opset {name[5:]} does; choose another name")
        return name

    def variant(self, name: str) -> Target:
        """The target with that system.

        Raises:
            UsageProblem: If it has none of that name.
        """
        if name not in self.variants:
            known = ", ".join(f"{self.name}@{each}" for each in self.variants) or "none"
            raise UsageProblem(
                f"the target {self.name} has no variant {name!r}.",
                hint=f"Known variants: {known}.",
                code="target.variant",
            )
        other = self.variants[name].model_dump(exclude_none=True)
        return self.model_copy(update=_over({}, {**other, "name": f"{self.name}@{name}", "variants": {}}))


def packaged(name: str) -> Target:
    """A target of this package, by the stem of its file."""
    return parse(files("repaconv.engines.targets").joinpath(f"{name}.toml").read_text(), f"{name}.toml")


def from_file(path: Path) -> Target:
    """A target of the user's own; one that ``extends`` a registered one says only what is other.

    Raises:
        UsageProblem: If it cannot be read or is not a target, with the line that is wrong.
    """
    table, lines = read_toml(path, "target")
    base = plugins.load(plugins.TARGETS, str(table.pop("extends"))).model_dump() if "extends" in table else {}
    return _validated(_over(base, table), lines, str(path))


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What one says over another; the newest opset goes with the opset that it belongs to."""
    return {**base, **({"newest_opset": None} if "opset" in own else {}), **own}


def parse(text: str, where: str) -> Target:
    """Read a target's TOML text.

    Raises:
        UsageProblem: Naming the line and the field that is missing or wrong.
    """
    return _validated(*parse_toml(text, where, "target"), where)


def _validated(table: dict[str, Any], lines: Lines, where: str) -> Target:
    try:
        return Target.model_validate(table, context=PREVIOUS)  # a user's file may have former names
    except ValidationError as error:
        raise UsageProblem(
            first_problem(error, where, lines), hint="See repaconv/engines/targets/x86-64.toml.", code="target.invalid"
        ) from error

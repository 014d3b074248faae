"""What a recipe may say: its sections and their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from repaconv.artefacts import Record
from repaconv.orders.converting import ConvertOrder
from repaconv.orders.knobs import Knob, Order, knobs
from repaconv.orders.stages import BenchOrder, BuildOrder, BundleOrder, ExportOrder, Target, VerifyOrder

Precision = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class ExportSection(ExportOrder):
    """Which graphs are made: one a precision."""

    precisions: Annotated[tuple[Precision, ...], Knob("In which the graph is exported, each apart.")] = ("fp32",)


@dataclass(frozen=True, kw_only=True)
class BenchSection(BenchOrder):
    """What is measured, and how much slower than the baseline it may be.

    ``target`` is that of the export where it is left out.
    """

    target: Target = ""
    precision: Annotated[Precision, Knob("Which of the run's ONNX models.")] = "fp32"
    rounds: Annotated[int | None, Knob("Measured, interleaved rounds.", least=10)] = None
    require: Annotated[bool, Knob("Fail where there is no baseline to judge by.")] = False
    max_regression: Annotated[float, Knob("How much longer than the baseline it may take."), Field(gt=0)] = 0.05


@dataclass(frozen=True, kw_only=True)
class BuildSection(BuildOrder):
    """Which engine is built; ``target`` is that of the export where it is left out."""

    target: Target = ""
    precision: Annotated[Precision, Knob("Of the engine, and of the graph that it is built from.")] = "fp32"


@dataclass(frozen=True, kw_only=True)
class BundleSection(BundleOrder):
    """What is packed for a board; ``target`` is that of the export, images are those of verify, where left out."""

    target: Target = ""


@dataclass(frozen=True, kw_only=True)
class ReportSection(Order):
    """The page on which it all ends."""

    format: Annotated[Literal["html", "markdown", "json"], Knob("How it is written.")] = "html"
    paper: Annotated[bool, Knob("The paper's own figures beside ours.")] = True


SECTIONS: dict[str, type[Order]] = {
    "convert": ConvertOrder,
    "verify": VerifyOrder,
    "export": ExportSection,
    "build": BuildSection,
    "bundle": BundleSection,
    "bench": BenchSection,
    "report": ReportSection,
}

NOT_HERE: dict[str, tuple[str, ...]] = {
    "convert": ("settings", "weights", "out", "force"),
    "build": ("form", "unverified"),
    "bundle": ("checkpoint", "unverified", "out"),
    "report": (),
    "verify": ("checkpoint", "drift", "out"),
    "export": ("precision", "form", "unverified"),
    "bench": ("form", "update_baseline", "accept_inconclusive", "unverified", "out"),
}
"""What a section's order may be asked for elsewhere, and no recipe says."""


OPTIONAL = ("reference", "convert", "export", "build", "bundle", "bench", "report")
"""Sections that a recipe may go without; one that is ``false`` is left out though the recipe below has it."""


class Reference(Record):
    """What somebody else says of this network, and what to expect here; it is shown and not judged."""

    source: str
    model: str = ""
    top1: float | None = Field(default=None, gt=0, le=100)
    parameters: str = ""
    macs: str = ""
    speed: str = ""
    expect: str = ""


class Recipe(Record):
    """One checkpoint's, ONNX graph's or Hugging Face folder's way. Paths are relative to the recipe's folder.

    ``sha256`` pins the checkpoint: another file is refused.
    ``extends`` names a recipe that says what this one does not; a section that is ``false`` here is left out.

    ``arch`` is what builds a network of no known method, as ``fold --arch`` has it; a ``FILE.py:FUNCTION`` is run.
    ``force`` takes settings that contradict the checkpoint; the gate then says so.
    """

    checkpoint: str
    extends: str | None = None
    arch: str | None = None
    method: str = "auto"
    force: bool = False
    weights: str | None = None
    sha256: str | None = None
    out: str | None = None
    form: str = "default"
    set: dict[str, str | int | float | bool | list[int]] = Field(default={})
    reference: Reference | None = None
    convert: ConvertOrder | None = None
    verify: VerifyOrder = VerifyOrder()
    export: ExportSection | None = ExportSection()
    build: BuildSection | None = None
    bundle: BundleSection | None = None
    bench: BenchSection | None = None
    report: ReportSection | None = ReportSection()

    @property
    def settings(self) -> dict[str, str]:
        """``[set]`` as the command line would give it."""
        return {
            name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in self.set.items()
        }


def own_file(arch: str) -> str:
    """The Python file of ``FILE.py:FUNCTION``; empty for a library's architecture."""
    file = arch.partition(":")[0]
    return file if file.endswith(".py") else ""


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors that complete TOML: what a section may have, in the words of its options."""
    found = Recipe.model_json_schema()
    for name in OPTIONAL:  # TOML has no null
        kinds = found["properties"][name]["anyOf"]
        found["properties"][name]["anyOf"] = [{"const": False} if kind == {"type": "null"} else kind for kind in kinds]
    for name, order in SECTIONS.items():
        keys = found["$defs"][order.__name__]["properties"]
        for each in knobs(order):
            if each.name in NOT_HERE[name]:
                del keys[each.name]
            else:
                keys[each.name]["description"] = each.knob.help
    return found

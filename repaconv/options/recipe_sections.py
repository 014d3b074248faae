"""What a recipe may say: its sections and their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from repaconv.options.conversion_options import ConvertOrder
from repaconv.options.option_definitions import Knob, Order, knobs
from repaconv.options.shared_options import Target
from repaconv.options.stage_options import BenchOrder, BuildOrder, BundleOrder, ExportOrder, VerifyOrder
from repaconv.results import Record

Precision = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class VerifySection(VerifyOrder):
    """What is verified, on which images, and how accurate every version of the network must be.

    The limits are no part of what `verify` is asked for: its result is judged by them each time.
    """

    min_top1: Annotated[
        float | None,
        Knob("Lowest top-1 accuracy in percent, e.g. 75.0; needs images with labels.", recorded=False),
        Field(gt=1, le=100),
    ] = None
    max_drop: Annotated[
        float,
        Knob("How many points the top-1 accuracy may be below [reference] top1.", recorded=False),
        Field(ge=0, lt=100),
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class ExportSection(ExportOrder):
    """Which graphs are made: one a precision."""

    precisions: Annotated[tuple[Precision, ...], Knob("Precisions to export; one ONNX model each.")] = ("fp32",)


@dataclass(frozen=True, kw_only=True)
class BenchSection(BenchOrder):
    """What is measured, and how much slower than the baseline it may be.

    ``target`` is that of the export where it is left out.
    """

    target: Target = ""
    precision: Annotated[Precision, Knob("Precision of the ONNX model to measure.")] = "fp32"
    rounds: Annotated[int | None, Knob("Number of measured, interleaved rounds.", least=10)] = None
    require: Annotated[bool, Knob("Fail if there is no baseline to compare with.")] = False
    max_regression: Annotated[float, Knob("Largest latency increase over the baseline, e.g. 0.05."), Field(gt=0)] = 0.05


@dataclass(frozen=True, kw_only=True)
class BuildSection(BuildOrder):
    """Which engine is built; ``target`` is that of the export where it is left out."""

    target: Target = ""
    precision: Annotated[Precision, Knob("Precision of the engine and of its ONNX model.")] = "fp32"


@dataclass(frozen=True, kw_only=True)
class BundleSection(BundleOrder):
    """What is packed for a board; ``target`` is that of the export, images are those of verify, where left out."""

    target: Target = ""


@dataclass(frozen=True, kw_only=True)
class ReportSection(Order):
    """The page on which it all ends."""

    format: Annotated[Literal["html", "markdown", "json"], Knob("Format of the report.")] = "html"
    paper: Annotated[bool, Knob("Include the figures of the paper.")] = True


SECTIONS: dict[str, type[Order]] = {
    "convert": ConvertOrder,
    "verify": VerifySection,
    "export": ExportSection,
    "build": BuildSection,
    "bundle": BundleSection,
    "bench": BenchSection,
    "report": ReportSection,
}

NOT_HERE: dict[str, tuple[str, ...]] = {
    "convert": ("settings", "weights", "out", "force"),
    "build": ("preset", "allow_unverified"),
    "bundle": ("checkpoint", "preset", "allow_unverified", "out"),
    "report": (),
    "verify": ("checkpoint", "drift", "out"),
    "export": ("precision", "preset", "allow_unverified"),
    "bench": ("preset", "update_baseline", "accept_inconclusive", "allow_unverified", "out"),
}
"""What a section's order may be asked for elsewhere, and no recipe says."""


OPTIONAL = ("reference", "convert", "export", "build", "bundle", "bench", "report")
"""Sections that a recipe may go without; one that is ``false`` is left out though the recipe below has it."""


class Reference(Record):
    """What somebody else says of this network, and what to expect here; of it ``top1`` alone is enforced."""

    source: str = Field(description="Source of the figures: a paper and its table.")
    model: str = Field(default="", description="Name of the model in the source.")
    top1: float | None = Field(
        default=None,
        description="Top-1 accuracy in percent, e.g. 81.3; enforced where the images of [verify] have labels.",
        gt=1,
        le=100,
    )
    parameters: str = Field(default="", description="Number of parameters, as printed in the source.")
    macs: str = Field(default="", description="Number of MACs, as printed in the source.")
    speed: str = Field(default="", description="Speed, as printed in the source.")
    expect: str = Field(default="", description="What to expect from this recipe.")


class Recipe(Record):
    """One checkpoint's, ONNX graph's or Hugging Face folder's way. Paths are relative to the recipe's folder."""

    checkpoint: str = Field(description="Checkpoint, ONNX model or Hugging Face folder.")
    extends: str | None = Field(default=None, description="Recipe whose keys are used where this one has none.")
    arch: str | None = Field(
        default=None, description="How to build the network: timm:NAME, or FILE.py:FUNCTION (which runs that file)."
    )
    method: str = Field(default="auto", description="Method of the checkpoint, or auto to recognize it.")
    force: bool = Field(default=False, description="Accept settings that contradict the checkpoint; results record it.")
    weights: str | None = Field(
        default=None, description="Set of weights to read, if the file has several, e.g. model_ema."
    )
    sha256: str | None = Field(
        default=None, description="SHA-256 of the checkpoint; any other file is refused.", pattern="^[0-9a-fA-F]{64}$"
    )
    out: str | None = Field(default=None, description="Run folder; the default is repaconv-out/<name of the recipe>.")
    preset: str = Field(
        default="default", description="How graphs are written: default, official, fastest-known or tune's file."
    )
    set: dict[str, str | int | float | bool | list[int]] = Field(
        default={}, description="Settings that the checkpoint lacks, by name."
    )
    reference: Reference | None = Field(default=None, description="Published figures of this network.")
    convert: ConvertOrder | None = Field(default=None, description="Convert the network (lossy) instead of folding it.")
    verify: VerifySection = Field(default=VerifySection(), description="What is verified, on which images.")
    export: ExportSection | None = Field(
        default=ExportSection(), description="Which ONNX models are exported; false for none."
    )
    build: BuildSection | None = Field(
        default=None, description="Engine to build, if the target's runtime is installed."
    )
    bundle: BundleSection | None = Field(default=None, description="Bundle for a board that builds its own engines.")
    bench: BenchSection | None = Field(
        default=None, description="What is measured, and the baseline that it is compared with."
    )
    report: ReportSection | None = Field(default=ReportSection(), description="The report; false for none.")

    @property
    def settings(self) -> dict[str, str]:
        """``[set]`` as the command line would give it."""
        return {
            name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in self.set.items()
        }


FORMER = {"form": "preset"}
"""Top-level keys that had another name in the previous release, and are still read for this one."""


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

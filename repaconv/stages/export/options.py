"""Options of `export`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from repaconv.deprecation import Deprecation
from repaconv.stages.shared.common_options import (
    CLASSES_OF_IMAGES,
    AllowUnverified,
    Classes,
    EvaluatedTask,
    Images,
    Target,
    is_tune_result,
)
from repaconv.stages.shared.option_dataclasses import (
    BATCH,
    GRAPH,
    IMAGES,
    PATTERNS,
    PRECISION,
    SHAPES,
    SIZE,
    TARGET,
    NoEffect,
    Option,
    Options,
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of `repaconv.export`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(("simplifier",), lambda options: not options.simplify, "no simplifier is run"),
        NoEffect(
            ("inputs", "images"),
            lambda options: options.precision == "fp32" and not is_tune_result(options.preset),
            "only lower precision (int8, fp16, bf16) uses images",
        ),
        NoEffect(
            ("quantizer",),
            lambda options: options.precision != "int8" and not is_tune_result(options.preset),
            "nothing is quantized; give precision int8",
        ),
        CLASSES_OF_IMAGES,
        NoEffect(
            ("keep_fp32",),
            lambda options: options.precision == "fp32" and not is_tune_result(options.preset),
            "float32 keeps every layer; give a lower precision",
        ),
    )

    target: Target = "x86-64"
    opset: Annotated[
        int | None,
        Option("ONNX opset of the graph, e.g. 17.", least=13, default_text="from the target", panel=TARGET),
    ] = None
    precision: Annotated[
        str,
        Option(
            "Precision of weights and computation: fp32, fp16, bf16 or int8; all but fp32 are lossy.", panel=PRECISION
        ),
    ] = "fp32"
    keep_fp32: Annotated[
        tuple[str, ...] | None,
        Option(
            "Modules or ONNX nodes that a lower precision keeps in FP32: a name or a glob, e.g. head or 'blocks.0.*'; "
            "repeatable.",
            metavar="NAME|GLOB",
            text=PATTERNS,
            panel=PRECISION,
        ),
    ] = None
    batch: Annotated[
        int | None,
        Option(
            "Batch size: a fixed number, or dynamic.",
            metavar="dynamic|N",
            least=1,
            text=BATCH,
            usual="dynamic",
            panel=SHAPES,
        ),
    ] = None
    image_size: Annotated[
        int | tuple[int, int] | None,
        Option(
            "Fixed image size in pixels: N or HEIGHTxWIDTH, e.g. 224 or 140x126.",
            text=SIZE,
            default_text="dynamic if the network allows it",
            panel=SHAPES,
        ),
    ] = None
    simplify: Annotated[
        bool,
        Option(
            "Simplify the graph; the simplified one is kept if its outputs are verified to be the same.", panel=GRAPH
        ),
    ] = True
    simplifier: Annotated[
        str, Option("Simplifier: onnxsim, onnxslim, or auto, the first one that succeeds.", panel=GRAPH)
    ] = "auto"
    preset: Annotated[
        str | None,
        Option(
            "Rewrite preset: default, official, fastest-known, or the result file of `tune`.",
            default_text="the preset recorded by fold",
            panel=GRAPH,
            former=Deprecation("form", "preset", removed_in="0.3.0"),
        ),
    ] = None
    with_preprocessing: Annotated[
        bool, Option("Take pixels as input (uint8, NHWC, RGB) and normalize them inside the graph.", panel=GRAPH)
    ] = False
    quantizer: Annotated[
        str | None,
        Option(
            "INT8 quantizer: onnxruntime or nncf (for OpenVINO); append -symmetric for symmetric activations.",
            default_text="that of the preset, else onnxruntime",
            panel=PRECISION,
            former=Deprecation("quantiser", "quantizer", removed_in="0.3.0"),
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Option(
            "Images (.npz: 'input' [N, C, H, W], optionally 'labels' [N]) that calibrate and evaluate a lower "
            "precision.",
            panel=IMAGES,
        ),
    ] = None
    images: Images = None
    classes: Classes = None
    task: EvaluatedTask = None
    allow_unverified: AllowUnverified = False

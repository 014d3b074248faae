"""Results of ``export``: the ONNX model of the folded network, and of the original one for ``bench``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from repaconv.results.records import Artefact, Change, ImageSet, ImageSize, Link, Payload


class TrainingArtefact(Artefact):
    """The original network (training-time architecture) as an ONNX model, exported for comparison by ``bench``.

    It is exported again if the checkpoint, its settings or the keys in ``like`` change. ``options`` is always empty:
    this result follows from the fold and the export, whatever options the ``bench`` that needs it has.

    Attributes:
        variant: What differs from the default in target, opset, batch size or image size, e.g. ``jetson-nano.b1``;
            empty if nothing does.
        source_sha256: The SHA-256 of the checkpoint.
        settings: The settings of the fold, by name, as text.
        like: The keys of the folded network's export that this one has to match, with their values: ``exporter_opset``,
            ``unsupported_ops``, ``batch``, ``image_size`` and ``made_by``.
        payload: The ONNX file.
        data: The file with the weights of an ONNX model above 2 GiB; null if they are in the ONNX file.
    """

    stage: str = "training"
    variant: str = ""
    source_sha256: str
    settings: dict[str, str]
    like: dict[str, Any]
    payload: Payload
    data: Payload | None = None


class ExportArtefact(Artefact):
    """An ONNX model of the folded network, and the links that verify it.

    The verdict is that of the model that was written. A simplified graph that gave other outputs is discarded, and a
    rewrite of the preset that did is left out: the link has failed, but the export has not.

    Attributes:
        variant: What differs from the default, as in the name of the file, e.g. ``int8`` or ``jetson-nano.b1``; empty
            if nothing does.
        target: The target, by name.
        architecture: The CPU architecture of the target, e.g. ``x86_64``; empty if the target is not a CPU.
        target_sha256: The SHA-256 of what the target states about graphs (opset, presets, operators), to notice that it
            changed.
        precision: The precision of the model: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        preprocessing: Whether the model takes pixels (uint8) and normalizes them itself.
        fp32_nodes: The nodes that a model of lower precision keeps in FP32, by name: those that ``--keep-fp32`` or the
            preset chose, those that the target does not compute in that precision, and in FP16 those whose values would
            overflow. Empty for ``fp32``.
        fp32_modules: The names and patterns given with ``--keep-fp32``; empty if none were.
        unquantized_layers: The nodes (MatMul, Gemm, Conv) of a model of lower precision that do not compute in that
            precision, by name; empty for ``fp32``.
        calibration: The images that set the value ranges and those that evaluated the model, in words; empty for
            ``fp32``.
        images: The same images, recorded so that later commands can read them again; null for ``fp32``, or if they were
            random.
        image_preprocessing: How image files were read, in words; empty if there were none.
        scores: Where the labels are from, and whether an output was compared as class scores, in words; empty for
            ``fp32``, or if there was nothing to decide.
        quantizer: The INT8 quantizer, e.g. ``onnxruntime`` or ``nncf``; empty for other precisions.
        unsupported_ops: The operators that the target does not support; the model is written without them.
        violations: What the target does not accept in the model all the same, in words; the export has failed if there
            is any.
        preset: The rewrite preset: ``default``, ``official``, ``fastest-known`` or the name of a result file of
            ``tune``.
        unmeasured: The CPU ISA level of this machine, if the ``default`` preset was used and no measurement shows what
            is faster on such a CPU; empty otherwise.
        rewrites: The rewrites of the preset that changed the graph, by name.
        changes: Every change that these rewrites made, with its place in the graph.
        opset: The ONNX opset of the model.
        chosen_opset: The opset given with ``--opset``; null if none was.
        exporter_opset: The opset in which the network was exported first, before rewrites that need a newer one; null
            in files of earlier versions.
        batch: The batch size of the model: ``dynamic``, or a fixed number.
        image_size: (height, width) in pixels, or ``dynamic``; null if the network takes no images.
        simplified: Whether the model is the simplifier's graph: false if it was discarded, failed or was not asked for.
        simplifier: The simplifier that was run to the end, with its version; ``none`` if there is none.
        nodes: The number of nodes of the model.
        operators: How many nodes the model has of each operator, by its name.
        model_sha256: The SHA-256 of the folded network's file that was exported.
        links: The links: ``exported``, then ``form`` if rewrites changed the graph or one of them failed,
            ``simplified``, and those of the lower precision. The verdict goes by ``exported`` and those of the lower
            precision.
        payload: The ONNX file.
        data: The file with the weights of an ONNX model above 2 GiB; null if they are in the ONNX file.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "islands": "fp32_nodes",
        "in_float": "unquantized_layers",
        "quantiser": "quantizer",
        "lacks": "unsupported_ops",
        "form": "preset",
    }

    stage: str = "export"
    variant: str = ""
    target: str
    architecture: str = ""
    target_sha256: str = ""
    precision: str = "fp32"
    preprocessing: bool = False
    fp32_nodes: tuple[str, ...] = ()
    fp32_modules: tuple[str, ...] = ()
    unquantized_layers: tuple[str, ...] = ()
    calibration: str = ""
    images: ImageSet | None = None
    image_preprocessing: str = ""
    scores: str = ""
    quantizer: str = ""
    unsupported_ops: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    preset: str = "default"
    unmeasured: str = ""
    rewrites: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    opset: int
    chosen_opset: int | None = None
    exporter_opset: int | None = None
    batch: int | Literal["dynamic"]
    image_size: ImageSize | Literal["dynamic"] | None
    simplified: bool
    simplifier: str
    nodes: int
    operators: dict[str, int]
    model_sha256: str
    links: tuple[Link, ...]
    payload: Payload
    data: Payload | None = None

"""What ``export`` leaves: an ONNX model, and the training form's beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from repaconv.artefacts.records import Artefact, Change, ImageSet, ImageSize, Link, Payload


class TrainingArtefact(Artefact):
    """The training form as ONNX, to be measured beside the deploy form.

    It is made again when one of the others changes: the checkpoint and its settings, or what of the deploy form's
    export it is ``like``.
    """

    stage: str = "training"
    variant: str = ""
    source_sha256: str
    settings: dict[str, str]
    like: dict[str, Any]
    payload: Payload
    data: Payload | None = None


class ExportArtefact(Artefact):
    """The ONNX graph and the links that lead to it.

    ``preprocessing`` says that the graph takes pixels and normalises them itself. ``lacks`` are the operators that the
    target does not know, ``violations`` what it does not take all the same. ``fp32_nodes`` are the nodes of a float16
    graph that compute in float32, ``fp32_modules`` the names and globs by which `--keep-fp32` chose such nodes,
    ``chosen_opset`` the opset that `--opset` asked for, ``unquantized_layers`` the linear layers and convolutions of a
    typed graph that are not of its precision, ``calibration`` what its ranges were measured on, ``images`` the same to
    be read again (None where they were random), ``image_preprocessing`` how image files were read, ``scores`` what was
    decided of labels and of the output that may be class scores, ``quantizer`` who wrote int8. ``rewrites`` are those
    of the form that changed something, ``changes`` where and how; ``exporter_opset`` is what they started from.
    ``data`` are the weights that have a file of their own, above 2 GiB. The verdict is that of the graph that was
    written: a simplifier's that was thrown away is a failed link and no failed export. ``variant`` is its name in the
    run (`repaconv.variants`), ``target_sha256`` what the target said that bears on graphs. ``unmeasured`` is this
    processor's family, where nobody measured the default form that was taken; ``architecture`` the processor's, where
    one computes it. ``image_size`` is None where the graph takes no images.
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

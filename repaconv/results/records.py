"""What the results of several commands consist of: facts, payloads, costs, links and their tolerances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from repaconv.deprecation import former_attribute, former_names
from repaconv.results.link_reasons import (
    PHRASES,
    Reason,
    Verdict,
    limit_in_words,
    reason_in_words,
    sentence,
    verdict_for,
)

SCHEMA_VERSION = 3
PREVIOUS = {"schema_version": SCHEMA_VERSION - 1}
"""The context in which `Record.model_validate` reads a file of the previous schema version."""


ImageSize = tuple[int, int]
"""(height, width) in pixels."""


LONGEST_SIDE = 2**16
"""Longest side of an image in pixels: the formats of photographs end there (JPEG at 65,535)."""


def whole_number(text: str) -> int | None:
    """The whole number that decimal digits write; None for any other text, e.g. ², and for too many digits."""
    try:
        return int(text) if text.isdecimal() else None
    except ValueError:  # Python parses no more than 4300 digits
        return None


def parse_image_size(text: str) -> ImageSize:
    """``224`` or ``140x126`` (height x width); ``140,126``, as lists of Python and TOML are written, is the same.

    Raises:
        ValueError: If it is neither, or larger than any image file.
    """
    sides = [whole_number(side) or 0 for side in text.lower().replace(",", "x").split("x")]
    if len(sides) > 2 or 0 in sides:
        raise ValueError("neither a number of pixels nor HEIGHTxWIDTH")
    if max(sides) > LONGEST_SIDE:
        raise ValueError(f"larger than an image can be, {LONGEST_SIDE:,} pixels a side")
    return sides[0], sides[-1]


class Record(BaseModel):
    """A frozen result; unknown fields are errors, so a newer file is not half-read."""

    FORMER: ClassVar[Mapping[str, str]] = {}
    """What fields were called in the previous schema version: former name to name."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, plain: Any, info: ValidationInfo) -> Any:
        if info.context != PREVIOUS or not isinstance(plain, dict):
            return plain
        former = {old: new for each in reversed(cls.__mro__) for old, new in vars(each).get("FORMER", {}).items()}
        return {former.get(name, name): value for name, value in plain.items()}

    def __dir__(self) -> list[str]:
        """Return the names without those of pydantic, but for the ones that make a dict or JSON of a result.

        Neither are ``FORMER`` and ``SHOWN`` among them, which are about the class and not about the result.
        """
        kept, of_the_class = {"model_dump", "model_dump_json"}, {"FORMER", "SHOWN"}
        return [
            name
            for name in super().__dir__()
            if name in kept or name.startswith("__") or not (hasattr(BaseModel, name) or name in of_the_class)
        ]


class Fact(Record):
    """A setting, size or other property that was used for a model, with its source and with what contradicts it.

    Attributes:
        name: The name of the property, e.g. ``depth``; of a setting, the name that ``--set`` has for it, e.g.
            ``num_heads``.
        value: The value that was used.
        source: Where the value comes from: ``--set``, ``shapes``, ``keys``, or a part of the checkpoint such as
            ``args``.
        against: What the checkpoint contains that contradicts the value; empty if nothing does.
        overrules: Whether the user set the value with ``--set`` although the checkpoint contradicts it.
        assumed: Whether the checkpoint does not contain the value, so that a default was used.
    """

    name: str
    value: Any
    source: str
    against: str = ""
    overrules: bool = False
    assumed: bool = False


class Claim(Fact):
    """An accuracy that the checkpoint's own metadata records, e.g. timm's ``metric``; it is shown and not verified.

    Attributes:
        value: The top-1 accuracy as a share of 1; ``source`` has the key and the figure as the checkpoint records them.
    """

    value: float


class Payload(Record):
    """A file that a result describes: its path, its hash and its size.

    Attributes:
        path: The path of the file, relative to the folder of the result that names it.
        sha256: The SHA-256 of the file, in hexadecimal digits.
        bytes: The size of the file in bytes.
    """

    path: str
    sha256: str
    bytes: int


class WeightSet(Record):
    """One state dict of a checkpoint file, which may contain several, e.g. a moving average of the weights.

    Attributes:
        path: The place of the state dict in the file as ``--weights`` takes it, e.g. ``model_ema``; ``.`` is the whole
            file.
        tensors: The number of tensors in the state dict.
        parameters: The number of elements of all tensors in the state dict, buffers included.
    """

    path: str
    tensors: int
    parameters: int


class Origin(Record):
    """The checkpoint or ONNX file that a run was made from, and which weights of it were used.

    Attributes:
        path: The absolute path of the file when it was read; of a checkpoint in several files, that of the index.
        sha256: The SHA-256 of the file; later commands refuse a file with another hash. Of a checkpoint in several
            files, the SHA-256 of what ``sha256sum`` prints for the index and its parts in the order of their names.
        bytes: The size of the file in bytes, or of all files together.
        container: The file format: ``torch zip``, ``torch legacy``, ``torch legacy tar``, ``safetensors`` or ``ONNX``;
            followed by the number of parts, e.g. ``safetensors in 3 parts``, if there is an index.
        checksums: Which of the file's own checksums the weights were compared with, e.g. ``CRC-32 of each record``, or
            that the format has none; empty for an ONNX file.
        weights: The place of the state dict that was used, e.g. ``state_dict``; ``.`` is the whole file.
        weights_reason: Why this state dict was used, e.g. ``the only weights in the file``.
        stripped: The prefixes that were removed from the names of the tensors, e.g. ``module``; empty if there were
            none.
    """

    path: str
    sha256: str
    bytes: int
    container: str
    checksums: str = ""
    weights: str
    weights_reason: str
    stripped: tuple[str, ...] = ()


class Preprocessing(Record):
    """How an image file becomes the input of the network: resize, center crop, normalization.

    Attributes:
        mean: The mean of each channel on the 0..255 scale, in the order of ``channel_order``; it is subtracted.
        std: The standard deviation of each channel on the 0..255 scale, by which the difference is divided.
        channel_order: The order of the channels that the network takes: ``RGB`` or ``BGR``.
        image_size: The height and width in pixels after the center crop, which is the input size of the network.
        resize_edge: The length in pixels to which the shorter edge is resized before the crop, or both edges if
            ``keep_ratio`` is false. Null: the longer side of ``image_size``, or ``image_size`` itself if ``keep_ratio``
            is false.
        keep_ratio: Whether the resize keeps the aspect ratio.
        interpolation: The interpolation of the resize, by Pillow's name, e.g. ``bicubic``.
        source: Where the values come from, e.g. ``--set``, ``args`` or ``meta.cfg``, and what in the checkpoint was not
            used.
        assumed: The keys of this record for which the checkpoint has no value, so that defaults were used.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channel_order: Literal["RGB", "BGR"] = "RGB"
    image_size: ImageSize
    resize_edge: int | None = None
    keep_ratio: bool = True
    interpolation: str = "bicubic"
    source: str
    assumed: tuple[str, ...] = ()


class ClassScores(Record):
    """The output of a network that contains its class scores, and why it is taken as that.

    Attributes:
        output: The name of the output, which has the shape (images, classes).
        classes: The number of classes.
        source: Why the output is taken as class scores: ``--set classes``, ``the architecture``, ``the checkpoint's
            head``, ``its name`` or ``its shape``.
        assumed: Whether only the shape suggests it. The output is then compared as class scores only on images with
            labels.
    """

    output: str
    classes: int
    source: str
    assumed: bool = False

    @property
    def text(self) -> str:
        """Which output it is, by its shape."""
        return f"{self.output!r} [N, {self.classes}]"

    told = former_attribute("told", "text", removed_in="0.3.0")


class ImageSet(Record):
    """The images by which a lossy export was calibrated and is evaluated, so that later commands can read them again.

    Attributes:
        path: The absolute path of the .npz file or of the folder of images.
        sha256: The SHA-256 of the .npz file, or of the names and contents of the images that were taken from the
            folder.
        count: The number of images that were taken.
        calibration: The positions, from 0, of the images that set the value ranges; all others evaluate. Empty if none
            was needed for that, as for FP16.
        classes: The absolute path of the file with the names of the classes, if one was given.
        classes_sha256: The SHA-256 of that file; empty in results of versions before 0.2.
    """

    path: str
    sha256: str
    count: int
    calibration: tuple[int, ...] = ()
    classes: str = ""
    classes_sha256: str = ""


class FoldedLayer(Record):
    """A layer with weights before or after a fold.

    Attributes:
        name: The name of the module in PyTorch, or of the node in an ONNX graph.
        kind: The class of the module, e.g. ``Conv2d``, or the operator of the node, e.g. ``Conv``; ``parameter`` for a
            parameter that a module with submodules has itself.
        parameters: The number of its parameters; of a node, the floating-point numbers among its constant inputs.
        macs: Its multiply-accumulates for one image; null if they are not known, e.g. because a size is dynamic.
        into: The names of the layers after the fold that contain its weights; empty for a layer that was removed, and
            for one that is listed as after the fold.
    """

    PARAMETER: ClassVar[str] = "parameter"
    """The kind of what a module with other modules in it holds itself: it multiplies nothing."""

    name: str
    kind: str
    parameters: int
    macs: int | None = None
    into: tuple[str, ...] = ()


class Change(Record):
    """One exact change of an ONNX graph: the rewrite that made it, the node, and what was changed.

    Attributes:
        rewrite: The name of the rewrite, as in the list of rewrites.
        place: The name of the node that was changed; empty if the node has no name.
        description: What was changed, as a short text.
        before: The layers with weights that the change removed; empty if there are none, and in runs of older versions.
        after: The layers with weights that replaced them; empty if there are none, and in runs of older versions.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"told": "description"}

    rewrite: str
    place: str
    description: str
    before: tuple[FoldedLayer, ...] = ()
    after: tuple[FoldedLayer, ...] = ()


class TensorInfo(Record):
    """Name, shape and data type of one tensor of the folded model.

    Attributes:
        name: The name of the tensor in ``model.safetensors``.
        shape: The size of each dimension; empty for a single number.
        dtype: The data type by torch's name, e.g. ``float32``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Cost(Record):
    """The parameters and the multiply-accumulates (MACs) of a network or a block.

    Attributes:
        parameters: The number of parameters, without buffers.
        macs: The multiply-accumulates of all convolutions and matrix products for one image.
        layer_macs: The part of ``macs`` in layers with weights: without the products of two activations in attention.
    """

    parameters: int
    macs: int
    layer_macs: int


class Metrics(Record):
    """How far the outputs of a candidate differ from those of the reference, over all images.

    Errors are relative to each image, so that an image with large outputs hides no error in the others. The outputs of
    a model without images are measured in the same way: one inference, or one row of a small output, is then one image.

    Attributes:
        images: The number of images that were compared, without those that ``undecided`` counts.
        max_abs_error: The largest absolute difference of two numbers. For integer and boolean outputs of a link: 1 if
            any number differs, else 0.
        max_rel_error: The largest absolute difference in an image, divided by the largest absolute number of the
            reference in that image (or by a quarter of the median over all images if that is larger); of the image
            where this is largest. For integer and boolean outputs of a link: the share of numbers that differ.
        mean_abs_error: The mean absolute difference over all numbers of all images.
        norm_error: The L2 norm of the difference in an image, divided by that of the reference; of the image where this
            is largest.
        cosine: The smallest cosine similarity of an image; of class scores, after their mean is subtracted. Null if the
            output has no direction: one number per image, the scores of two classes, or integers.
        spread: The largest absolute difference between the reference's output for any image and for the first image,
            divided by its largest absolute number. A link cannot pass if this is within the tolerance, since a constant
            output shows nothing. Null for a single image.
        kl_divergence: The mean over the images of the Kullback-Leibler divergence of the candidate's softmax from the
            reference's, in nats; null if the output has no class scores.
        top1_agreement: The share of images with the same top-1 prediction; null if the output has no class scores.
        top1_smallest_margin: The smallest lead of the reference's top-1 class over its second class in an image,
            divided by the largest absolute score of that image; null if the output has no class scores.
        top1_flips: The number of images whose top-1 prediction changed.
        top1_flips_that_matter: The number of changed top-1 predictions in which the reference's lead over the class
            that the candidate chose is larger than the ``noise`` of the tolerance.
        top1_flips_within_noise: The number of the other changed top-1 predictions.
        top1_close: The number of images in which the reference's lead over its second class is at most the ``noise`` of
            the tolerance, so that rounding may change the prediction.
        examples: Up to ten images with a changed top-1 prediction, the largest lost lead first: the position of the
            image, from 0, and the lead as in ``top1_smallest_margin``.
        undecided: The number of images that were left out because rounding decides, e.g., which tokens merge in them.
            For an arbitrary ONNX model: the number of output numbers that were left out because they depend on
            rounding.
    """

    images: int
    max_abs_error: float
    max_rel_error: float
    mean_abs_error: float
    norm_error: float = 0.0
    cosine: float | None
    spread: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    top1_smallest_margin: float | None = None
    top1_flips: int = 0
    top1_flips_that_matter: int = 0
    top1_flips_within_noise: int = 0
    top1_close: int = 0
    examples: tuple[tuple[int, float], ...] = ()
    undecided: int = 0


class Tolerance(Record):
    """How large a difference a link allows.

    An exact link passes if ``max_rel_error`` is at most ``rtol`` or ``max_abs_error`` at most ``atol``. A lossy link
    passes if the cosine, the norm error, the changed top-1 predictions and the loss of accuracy are within their
    limits. A null limit is not checked. In the fold of an ONNX model, ``rtol`` is relative to the largest number next
    to each number, not to the largest of the image.

    Attributes:
        kind: ``exact`` for two versions that compute the same function, ``lossy`` for a lower precision.
        rtol: The largest ``max_rel_error`` of an exact link. Where rounding alone explains a larger error, it is that
            error, and the ``note`` of the link reports it. Null for a lossy link, and if only ``atol`` was given.
        rtol_reason: Why ``rtol`` is not the usual limit of its kind of link; empty if it is.
        atol: The largest ``max_abs_error`` of an exact link, from ``--atol``; null if it was not given.
        cosine: The smallest ``cosine`` of a lossy link; null for an exact one.
        norm_error: The largest ``norm_error`` of a lossy link; null for an exact one.
        flips: The largest share of all images whose top-1 prediction may change in spite of a lead above ``noise``;
            null for an exact link and without class scores.
        flips_within_noise: The share of the images with a lead up to ``noise`` whose top-1 prediction may change; more
            fail only if they are too many to be explained by chance. Null for an exact link and without class scores.
        accuracy_loss: The largest loss of top-1 accuracy as a share of 1, on images with labels; the link fails if the
            whole 95% interval of the loss is above it. Null for an exact link and without class scores.
        noise: The lead of a top-1 class, relative to the largest absolute score of the image, up to which rounding may
            change the prediction.
    """

    kind: Literal["exact", "lossy"]
    rtol: float | None = None
    rtol_reason: str = ""
    atol: float | None = None
    cosine: float | None = None
    norm_error: float | None = None
    flips: float | None = None
    flips_within_noise: float | None = None
    accuracy_loss: float | None = None
    noise: float = 0.0

    @property
    def description(self) -> str:
        """Description of the limits."""
        if self.kind == "exact":
            limits = ((self.rtol, "relative"), (self.atol, "absolute"))
            return " or ".join(f"{limit_in_words(value)} {kind}" for value, kind in limits if value is not None)
        near = f"limits: cosine {self.cosine}, error {self.norm_error or 0.0:.1%}"
        if self.flips is None or self.flips_within_noise is None:
            return near
        beyond, within = f"{self.flips:.0%} flips beyond {self.noise:.0%}", f"{self.flips_within_noise:.0%} within"
        return f"{near}, {beyond}, {within}"


class Accuracy(Record):
    """The top-1 accuracy of the reference and of the candidate on the same labeled images.

    Attributes:
        images: The number of images with labels.
        reference: The top-1 accuracy of the reference, as a share of 1.
        candidate: The top-1 accuracy of the candidate, as a share of 1.
        only_reference: The number of images that only the reference classifies correctly.
        only_candidate: The number of images that only the candidate classifies correctly.
        difference: The accuracy of the candidate minus that of the reference, as a share of 1.
        low: The lower bound of the 95% interval of the difference (paired; Agresti and Min, 2005).
        high: The upper bound of the 95% interval of the difference.
        p_value: The p-value of McNemar's exact test on the images that only one of the two classifies correctly.
    """

    images: int
    reference: float
    candidate: float
    only_reference: int
    only_candidate: int
    difference: float
    low: float
    high: float
    p_value: float


TaskName = Literal["classify", "detect", "segment", "restore", "keypoints", "depth", "embed", "recognize", "other"]
"""What a network is for. ``other`` is compared by its numbers alone."""


class TaskMetric(Record):
    """One metric of a task: the candidate's results compared with the reference's, over all images.

    Attributes:
        name: The name of the metric in the field, e.g. ``mAP50-95``, ``mean IoU`` or ``PSNR``.
        unit: ``share`` (0 to 1, higher is better), ``dB`` (higher is better) or ``error`` (relative, lower is better).
        value: The metric.
        low: The lower bound of its 95% interval over the images (bootstrap).
        high: The upper bound of that interval.
        limit: The value that a candidate must reach, or of an error the largest that is allowed; null if the metric is
            only reported.
    """

    name: str
    unit: Literal["share", "dB", "error"]
    value: float
    low: float
    high: float
    limit: float | None = None

    @property
    def within(self) -> bool:
        """Whether it meets its limit; NaN meets none."""
        if self.limit is None:
            return True
        return self.value <= self.limit if self.unit == "error" else self.value >= self.limit

    def text(self, value: float | None = None) -> str:
        """A value of this metric with its unit, its own if none is given."""
        number = self.value if value is None else value
        return f"{number:.1f} dB" if self.unit == "dB" else f"{number:.1%}"

    told = former_attribute("told", "text", removed_in="0.3.0")


class TaskAccuracy(Record):
    """A metric of the reference and of the candidate against labels, on the same images.

    Attributes:
        metric: The name of the metric, e.g. ``mAP50-95``.
        images: The number of images with labels.
        reference: The metric of the reference.
        candidate: The metric of the candidate.
        drop: How much worse the candidate is: the difference of the two, positive if the reference is better.
        low: The lower bound of the 95% interval of ``drop`` (paired bootstrap over the images).
        high: The upper bound of that interval.
        source: What computed it: ``pycocotools`` or ``repaconv``.
    """

    metric: str
    images: int
    reference: float
    candidate: float
    drop: float
    low: float
    high: float
    source: str = "repaconv"


class TaskResult(Record):
    """The results of a network in its own task: those of the candidate compared with those of the reference.

    Attributes:
        task: The task, e.g. ``detect``.
        source: How the task is known: ``--task``, the architecture, or the outputs.
        layout: How the outputs were read, e.g. ``Ultralytics: 3 classes, NMS at IoU 0.7``.
        images: The number of images that were compared.
        metrics: The metrics of the task.
        changed: What ``disagreement`` is a share of, in words that follow it, e.g. ``of objects changed``.
        disagreement: How much of the reference's results changed, from 0 to 1: what ``--max-disagreement`` limits.
        accuracy: Both compared with labels; null without labels.
    """

    task: TaskName
    source: str
    layout: str
    images: int
    metrics: tuple[TaskMetric, ...]
    changed: str
    disagreement: float
    accuracy: TaskAccuracy | None = None

    @property
    def within(self) -> bool:
        """Whether all metrics meet their limits."""
        return all(metric.within for metric in self.metrics)

    @property
    def description(self) -> str:
        """All metrics, each with its limit."""
        limits = {metric.name: f" (limit {metric.text(metric.limit)})" for metric in self.metrics if metric.limit}
        return ", ".join(f"{metric.name} {metric.text()}{limits.get(metric.name, '')}" for metric in self.metrics)


class Drift(Record):
    """How far the reference and the candidate differ at one place inside the network, on one image.

    Attributes:
        place: The place, e.g. ``output of blocks.0`` or ``input of blocks.0.norm2``.
        max_rel_error: The largest absolute difference, divided by the largest absolute value of the reference.
        rms_rel_error: The root mean square of the difference, divided by that of the reference's values.
    """

    place: str
    max_rel_error: float
    rms_rel_error: float


class Location(Record):
    """The first module at which the reference and the candidate of a link differ.

    Attributes:
        module: The name of the module in the checkpoint, or of the node in the ONNX graph; several are separated by
            commas. Empty if no module could be named or the link passed.
        reason: How the module was found, or why none could be named.
        drift: The differences at all places that were compared, in the order of computation; empty if none was.
    """

    module: str
    reason: str
    drift: tuple[Drift, ...] = ()


class Figures(Record):
    """The numbers behind the reason of a link; those that do not apply are null or empty.

    Attributes:
        unit: What ``compared``, ``different``, ``left_out`` and ``explained`` count: ``images``; ``probes``, the random
            inputs of an arbitrary ONNX model; or ``numbers`` of the output.
        compared: How many there are.
        different: How many differ by more than is allowed.
        left_out: How many were left out, since rounding decides them.
        explained: How many differ by more than the tolerance, but by no more than rounding explains.
        arithmetic: Whose rounding that is: ``FP32`` or ``float64``.
        rounding: How far rounding alone moves the original network, relative to its output.
        source: How that was measured: ``float32 against float64``, ``moved inputs``, or ``moved weights and inputs``.
        factor: How many times that is allowed.
        error: The largest error of the candidate, relative to the numbers next to it.
        error_in_float64: The same of the candidate computed in float64.
        unfused: On how many probes the candidate ran without fusions of the runtime, whose result was not finite.
        detail: What else belongs to the reason: the two shapes, the message of the runtime, or how many are NaN
            on both sides.
    """

    unit: Literal["", "images", "probes", "numbers"] = ""
    compared: int | None = None
    different: int | None = None
    left_out: int | None = None
    explained: int | None = None
    arithmetic: Literal["", "FP32", "float64"] = ""
    rounding: float | None = None
    source: Literal["", "float32 against float64", "moved inputs", "moved weights and inputs"] = ""
    factor: float | None = None
    error: float | None = None
    error_in_float64: float | None = None
    unfused: int | None = None
    detail: str = ""


class TaskIfAny(Record):
    """A record whose JSON has ``task`` only if there is one."""

    @model_serializer(mode="wrap")
    def _without_absent_task(self, plain: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202
        # a return type would replace the schema
        found = plain(self)
        if found.get("task") is None:
            found.pop("task", None)
        return found


class Link(TaskIfAny):
    """One comparison in the verification chain: a candidate against a reference on the same inputs, with a verdict.

    Attributes:
        name: The kind of comparison: ``converted``, ``recorded``, ``fold``, ``stored``, ``exported``, ``form``,
            ``simplified``, ``onnx``, ``preprocessing``, ``engine``, ``agreement``, or the precision of a lossy one,
            e.g. ``int8``.
        variant: The variant of the export that the link is about, e.g. ``int8`` or ``jetson-nano.fp16``; empty for the
            default export, in ``export.json`` itself, and for links that are not about an export.
        sha256: The SHA-256 of the ONNX model or engine that `verify` ran; empty for other links.
        inputs: The inputs of this link, if they are not those of the whole result; else empty.
        reference: The reference, e.g. ``training form, float64``, or ``original, float64`` of an ONNX model.
        candidate: The candidate, e.g. ``ONNX under ONNX Runtime``; with the name of the output if the model has
            several.
        tolerance: The difference that is allowed; null if nothing was compared.
        metrics: The difference that was measured; null if nothing was compared.
        verdict: ``passed`` or ``failed``; ``not verified`` if nothing was compared or the comparison shows nothing.
        reason: Why the link has this verdict, as one word for programs; each reason has one verdict. Of a result of an
            older version, the reason that its ``note`` gives.
        figures: The numbers behind the reason.
        note: The reason and its figures in words, and under which conditions they were measured; may be empty.
        accuracy: The top-1 accuracy of both on images with labels; null without labels or class scores.
        location: Where the candidate first differs from the reference; null if that was not searched for, as for an
            exact link that passed.
        task: The results in the network's own task, e.g. the objects of a detector, for the link about all outputs
            together; absent from all other links.
    """

    name: str
    variant: str = ""
    sha256: str = ""
    inputs: str = ""
    reference: str
    candidate: str
    tolerance: Tolerance | None
    metrics: Metrics | None
    verdict: Verdict
    reason: Reason
    figures: Figures = Figures()
    note: str = ""
    accuracy: Accuracy | None = None
    location: Location | None = None
    task: TaskResult | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_reason(cls, plain: Any) -> Any:
        """A file of a version before reasons has them in words alone."""
        if not isinstance(plain, dict) or "reason" in plain:
            return plain
        return {**plain, "reason": reason_in_words(plain.get("verdict", ""), plain.get("note", ""))}

    @classmethod
    def concluded(cls, reason: Reason, *, figures: Figures | None = None, note: str = "", **fields: Any) -> Link:
        """A link with the verdict of its reason.

        Args:
            reason: Why it has this verdict.
            figures: The numbers behind that.
            note: What else there is to know of how it was measured; it follows the reason in words.
            fields: The other fields of a link.
        """
        found = Figures() if figures is None else figures
        words = "; ".join(filter(None, [sentence(reason, found), note]))
        return cls(
            **{"tolerance": None, "metrics": None, **fields},
            reason=reason,
            verdict=verdict_for(reason),
            figures=found,
            note=words,
        )

    def because(self, reason: Reason, detail: str = "") -> Link:
        """Return the link with another reason and its verdict; the sentence of the reason goes before the note."""
        words = "; ".join(filter(None, [sentence(reason, Figures(detail=detail)), self.note]))
        return self.model_copy(update={"reason": reason, "verdict": verdict_for(reason), "note": words})

    def noted(self, words: str) -> Link:
        """Return the link with these words added to its note; verdict and reason stay."""
        return self.model_copy(update={"note": "; ".join(filter(None, [self.note, words]))})

    @property
    def limit_text(self) -> str:
        """Why the relative limit of an exact link is not the usual one; empty if it is."""
        allowed = self.tolerance
        if allowed is None or allowed.rtol is None or not allowed.rtol_reason:
            return ""
        return f"the limit is {limit_in_words(allowed.rtol)}: {allowed.rtol_reason}"

    @property
    def lossy_text(self) -> str:
        """The measured values of a lossy link, each with its limit; empty if nothing was measured."""
        seen, allowed = self.metrics, self.tolerance
        if self.task is not None:
            return self.task.description
        if seen is None or allowed is None or allowed.kind == "exact":
            return ""
        cosine = [] if seen.cosine is None else [(f"cosine {seen.cosine:.4f}", f"{allowed.cosine}")]
        error = [] if allowed.norm_error is None else [(f"error {seen.norm_error:.1%}", f"{allowed.norm_error:.1%}")]
        flips: list[tuple[str, str]] = []
        if seen.top1_agreement is not None and allowed.flips is not None and allowed.flips_within_noise is not None:
            beyond = f"{seen.top1_flips_that_matter} of {seen.images} with a lead above {allowed.noise:.0%}"
            within = f"{seen.top1_flips_within_noise} of {seen.top1_close} with a smaller one"
            flips = [(f"changed top-1 predictions: {beyond}", f"{allowed.flips:.0%}")]
            flips += [(within, f"{allowed.flips_within_noise:.0%}")]
        return ", ".join(f"{measured} (limit {limit})" for measured, limit in (*cosine, *error, *flips))

    lossy_told = former_attribute("lossy_told", "lossy_text", removed_in="0.3.0")


def outputs_text(links: Sequence[Link]) -> str:
    """Describe how many of several outputs passed, failed and were not verified, and why not."""
    verdicts = Counter(link.verdict for link in links)
    why = Counter(PHRASES[link.reason] or link.figures.detail for link in links if link.verdict == "not verified")
    reasons = [f"{count}: {reason}" if len(why) > 1 else reason for reason, count in why.most_common() if reason]
    parts = [f"{verdicts['passed']} of {len(links)} outputs passed"]
    parts += [f"{verdicts['failed']} failed"] if verdicts["failed"] else []
    unverified = verdicts["not verified"]
    because = f" ({', '.join(reasons)})" if reasons else ""
    parts += [f"{unverified} not verified{because}"] if why else []
    return ", ".join(parts)


if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"outputs_told": outputs_text}, removed_in="0.3.0")


class Artefact(Record):
    """The keys that every result has that is written to a file.

    Attributes:
        schema_version: The version of the schema of results.
        stage: What wrote this result: the name of the command, e.g. ``fold``, or ``throughput``, ``estimate``,
            ``training`` and ``runs-report`` for further results of ``bench``, ``export`` and ``report``.
        made_by: The versions of repaconv and of the packages that the result depends on, by the name of the package.
        verdict: ``passed`` or ``failed``; ``not verified`` if something was to be compared and nothing could be shown.
        unverified: The failed checks that ``--allow-unverified`` overrode here or in an earlier step, e.g. ``verify
            failed``, the settings that contradict the checkpoint, and ``fold not verified`` if no output of the fold
            could be compared; empty if there are none.
        options: The arguments and options of the command as they would be typed, without those that are defaults. Empty
            in results that no options decide (``training``, ``report``, ``runs-report``, ``collect``).
        other_files: The files that belong to this result besides ``payload`` and ``data``. Of a fold also files outside
            the run folder that exports of an earlier fold wrote there.
        input_files: The paths of the files that this call read; given to the caller and not stored.
        output_files: The paths of the files that this call wrote; given to the caller and not stored.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "asked": "options",
        "beside": "other_files",
        "took": "input_files",
        "wrote": "output_files",
    }

    schema_version: int = SCHEMA_VERSION
    stage: str
    made_by: dict[str, str]
    verdict: Verdict
    unverified: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    other_files: tuple[Payload, ...] = ()
    input_files: tuple[str, ...] = Field(default=(), exclude=True)
    output_files: tuple[str, ...] = Field(default=(), exclude=True)

    def __repr__(self) -> str:
        """Return the class, the verdict and the file; all else is in the fields."""
        doubted = ["inconclusive"] if getattr(self, "inconclusive", False) else []
        return f"<{' '.join([type(self).__name__, self.verdict, *doubted, *self.output_files[-1:]])}>"

    def __str__(self) -> str:
        """Return what the command prints."""
        return _as_printed(self)

    def __rich_repr__(self) -> Iterator[tuple[str, Any]]:
        """Its fields that are one value, for rich's printers."""
        for name, value in self:
            if isinstance(value, (str, int, float, bool)) and name not in ("schema_version", "stage"):
                yield name, value


class Known(Record):
    """A published network whose tensors have the names and shapes of those in a checkpoint, or nearly so.

    Attributes:
        name: The name as ``--arch`` takes it, e.g. ``timm:mobileone_s1``.
        also: Other names of the same network.
        exact: Whether all names and shapes are equal, except for the number of classes.
        differs: How the checkpoint differs from the network, as a short text; empty if it does not.
    """

    name: str
    also: tuple[str, ...] = ()
    exact: bool
    differs: str = ""


# --- Results that a command returns and does not store.


class Result(Record):
    """A result that a command returns and does not store; its ``repr`` has only the fields that ``SHOWN`` names."""

    SHOWN: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        """Return the class and the fields that `SHOWN` names."""
        return f"<{' '.join([type(self).__name__, *(f'{name}={getattr(self, name)!r}' for name in self.SHOWN)])}>"

    def __str__(self) -> str:
        """Return what the command prints."""
        return _as_printed(self)


def _as_printed(done: Record) -> str:
    """A result as its command prints it; its ``repr`` if no command prints it."""
    printing = import_module("repaconv.cli.text_and_json_output")
    return printing.printed_text(done) or repr(done)

"""Results of ``fold``: a folded network, and what differs by the kind of fold.

`FoldArtefact` has the keys that every fold has; ``kind`` in the file says which of its subclasses the file is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from repaconv.results.records import (
    Artefact,
    Change,
    Claim,
    ClassScores,
    Cost,
    Fact,
    FoldedLayer,
    ImageSize,
    Known,
    Link,
    Origin,
    Payload,
    Preprocessing,
    Record,
    TaskIfAny,
    TaskName,
    TensorInfo,
    outputs_text,
)

NOTHING_TO_FOLD = "nothing to fold: the network stays as it is"
NO_GAIN = (
    "nothing to fold: rewrites were tried and undone, since none makes the network smaller or faster, or they increase "
    "rounding errors in FP32"
)
"""What every fold says that changed nothing: of a file, of an architecture, of a live module."""


class FoldStep(Record):
    """One row of the certificate of a method fold: what was folded in one module, and the error in float64.

    Attributes:
        module: The module that was folded, by its dotted name in the folded network.
        folded: What was folded into what, one text for each, e.g. ``norm's affine -> head``; empty where nothing was.
        not_folded: What stays in the module as it is, one text for each, with the reason if it has one.
        equation: The equation of the paper that the step follows, e.g. ``eqs. 3-4``; empty if there is none.
        max_rel_error: The largest error of this step alone, in float64: max|folded - trained| / max|trained| of the
            module's output on random input, or of its weights where only those change. In the certificate of a module
            in memory, the error of the whole module for each step that is not compared alone.
        allowed: The largest ``max_rel_error`` with which the step passes: 1e-12, or another limit that ``reason``
            explains. Never null in a ``fold.json``.
        reason: Why ``allowed`` is another limit than 1e-12; empty if it is that.
        before: The layers with weights in the module before the fold, named relative to the module. Listed in the first
            row of each kind of block; empty in the other rows, and in all rows if listing them would take too long.
        after: The layers with weights in the module after the fold, named and listed like ``before``.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"left": "not_folded"}

    module: str
    folded: tuple[str, ...]
    not_folded: tuple[str, ...] = ()
    equation: str = ""
    max_rel_error: float
    allowed: float | None = None
    reason: str = ""
    before: tuple[FoldedLayer, ...] = ()
    after: tuple[FoldedLayer, ...] = ()


class Sizes(Record):
    """Sizes and value ranges of the random inputs with which a graph is run.

    Attributes:
        usual: The size of each dynamic dimension in an ordinary inference, by name; a dimension without a name is
            called e.g. ``input[0]``. Empty if all dimensions are fixed.
        other: A second set of sizes of the same dimensions, with which the graph was run as well.
        batch: The name of the batch dimension, the first one of the first input; empty if it is fixed.
        sides: The names of the dynamic height and width of the images; empty if these are fixed or there are no images.
        gain: The factor on normally distributed random inputs: one with which no output of the graph overflows.
        below: The exclusive upper bound of random integers for inputs whose meaning the graph does not show: 10, 2 or
            1; with 1 they are all 1.
        held: Inputs that have the same values in every inference, by name: those of the sample given with ``--inputs``
            that are integers or have at most 16 numbers. Empty without a sample.
        unit: Whether random inputs are from 0 to 1, as pixels are, since the graph gives NaN or infinity on normally
            distributed ones, or does not run on them.
    """

    usual: dict[str, int] = Field(default={})
    other: dict[str, int] = Field(default={})
    batch: str = ""
    sides: tuple[str, ...] = ()
    gain: float = 1.0
    below: int = 1
    held: dict[str, Any] = Field(default={})
    unit: bool = False


Batch = int | Literal["dynamic"]
Saved = tuple[tuple[str, float, float], ...]


class FoldArtefact(TaskIfAny, Artefact):
    """The keys of every fold, whatever was folded.

    Attributes:
        origin: The file that was folded, and which weights of it were read.
        applied: What was folded, by name: for a method the method itself and any additions in the checkpoint (LoRA,
            LayerScale); for a graph the rewrites that changed it.
        settings: The settings given with ``--set`` or found by ``--identify``, by name, as text.
        preset: The rewrite preset that exports of this run use: ``default``, ``official``, ``fastest-known`` or the
            name of a result file of ``tune``.
        rewrites: The rewrites of ``preset``, by name, in their order; null for ``default``, where the target of the
            export chooses them.
        fp32_modules: The modules that an INT8 export keeps in FP32, by name, if ``preset`` is a result file of
            ``tune``; empty otherwise.
        quantizer: The INT8 quantizer of the result file of ``tune`` that is the ``preset``; empty if that names none,
            and for all other presets.
        facts: Every setting that was used and is not a weight (e.g. number of heads, image size), with its source. Of a
            network that is folded as a graph only those of its images; empty if it takes no images.
        claims: The top-1 accuracies that the checkpoint's own training record states; empty if it states none, and for
            networks that are folded as a graph.
        preprocessing: How an image is resized and normalized for the network; null if nothing says it or the network
            takes no images.
        image_size: (height, width) in pixels of the network's images; null if its input is not one batch of images. If
            ``any_image_size`` is true, the size that is used unless another is given.
        any_image_size: Whether the network takes images of other sizes, too.
        batch: The batch size that the network takes: ``dynamic``, or a fixed number. It is 1 if the first axis of the
            input is not a batch, or if the graph runs with 1 only.
        whole: Whether an output is compared as a whole, and not image by image: true if the outputs have no row for
            each image, or the network takes no images.
        tolerances: The largest relative error of each exact link of this network, by the name of the link. It grows
            with the network's depth, and with the rounding errors that the network itself has in FP32.
        tolerance_reasons: Why such a limit is not the usual one, by the name of the link; without links that have the
            usual one.
        not_folded: What was not folded, and why, in words: norms that remain; of a graph also linear operators that
            remain next to each other. Empty in method folds of earlier versions.
        payload: The file of the folded network: ``model.safetensors`` for a method, an ONNX file for a graph.
        task: What the network is for, by ``--task``; absent if the option was not given.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"form": "preset", "keep": "fp32_modules", "quantiser": "quantizer"}

    stage: str = "fold"
    origin: Origin
    applied: tuple[str, ...]
    settings: dict[str, str]
    preset: str = "default"
    rewrites: tuple[str, ...] | None = None
    fp32_modules: tuple[str, ...] = ()
    quantizer: str = ""
    facts: tuple[Fact, ...] = ()
    claims: tuple[Claim, ...] = ()
    preprocessing: Preprocessing | None
    image_size: ImageSize | None
    any_image_size: bool
    batch: Batch = "dynamic"
    whole: bool = False
    tolerances: dict[str, float]
    tolerance_reasons: dict[str, str] = Field(default_factory=dict)
    not_folded: tuple[str, ...] = ()
    payload: Payload
    task: TaskName | None = None

    @property
    def called(self) -> str:
        """The name under which targets list its default preset: that of the method, or ``graph``."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """Description of the folded network in a few words."""
        raise NotImplementedError

    @property
    def origin_kind(self) -> str:
        """The kind of file that was folded."""
        return "checkpoint"

    @property
    def shapes(self) -> dict[str, Any]:
        """The properties that all networks of the same shapes share."""
        raise NotImplementedError

    @property
    def saved(self) -> Saved:
        """The costs before and after the fold, by name."""
        raise NotImplementedError

    @property
    def done(self) -> str:
        """The fold in one sentence."""
        raise NotImplementedError


class MethodFold(FoldArtefact):
    """The fold of a checkpoint of a known method.

    Later commands rebuild the network from this file and ``model.safetensors`` alone.

    Attributes:
        kind: Always ``method``.
        method: The registered name of the method, e.g. ``repavit``.
        backbone: The registered name of the network family that the folded network is built from, e.g. ``vit``.
        config: The configuration of that network family, by name, e.g. width, patch size, blocks and classes.
        preprocessing: How an image is resized and normalized for the network; values that neither the checkpoint nor
            the user states are listed in its ``assumed``.
        image_size: (height, width) in pixels of the network's images.
        output: Whether the network outputs class scores (``logits``) or ``features``.
        tensors: Name, shape and dtype of every tensor in ``model.safetensors``.
        training: Parameters and MACs of the training-time architecture, for one image of ``image_size``.
        deploy: Parameters and MACs of the inference-time architecture, for the same image.
        certificate: The certificate: one row for each part of the network that was folded.
    """

    kind: Literal["method"] = "method"
    method: str
    backbone: str
    config: dict[str, Any]
    preprocessing: Preprocessing
    image_size: ImageSize
    output: Literal["logits", "features"]
    tensors: tuple[TensorInfo, ...]
    training: Cost
    deploy: Cost
    certificate: tuple[FoldStep, ...]

    @property
    def image_channels(self) -> int:
        """Channels of the network's images; 3 where the configuration of a plug-in does not name them."""
        return int(self.config.get("in_channels", 3))

    @property
    def called(self) -> str:
        """The method."""
        return self.method

    @property
    def description(self) -> str:
        """The method and its backbone."""
        return f"{self.method} on {self.backbone}"

    @property
    def shapes(self) -> dict[str, Any]:
        """The backbone and its configuration."""
        return {"backbone": self.backbone, "config": self.config, "image_size": list(self.image_size)}

    @property
    def saved(self) -> Saved:
        """The costs of one image before and after the fold, by name."""
        return (
            ("parameters", self.training.parameters, self.deploy.parameters),
            ("MACs per image", self.training.macs, self.deploy.macs),
        )

    @property
    def done(self) -> str:
        """How many parts, how exactly, and what was allowed more."""
        largest = max((step.max_rel_error for step in self.certificate), default=0.0)
        text = f"{len(self.certificate)} parts of {self.method} folded, each within {largest:.1e} (float64)"
        return text + "".join(f"; {step.module}: {step.reason}" for step in self.certificate if step.reason)


class GraphFold(FoldArtefact):
    """The fold of an ONNX graph, which needs no knowledge of a method; the folded graph is the file ``payload``.

    If ``changes`` is empty, nothing was folded, and the folded graph is the original one. The verdict is *passed* if at
    least one link passed and none failed. With ``--no-measure`` the same graph gives the same bytes on every machine,
    unless something is reverted because of its rounding in FP32, which depends on the CPU.

    Attributes:
        kind: Always ``graph``.
        image_channels: Channels of the network's images; null if its input is not one batch of images.
        scores: The output that is the scores of classes; null if none is.
        structure: The SHA-256 of the folded graph without the values of constants of more than one axis: equal for
            networks that differ only in such weights.
        float64: What evaluates the original graph in float64 for comparison, in words; empty if nothing can.
        sizes: Sizes and value ranges of the random inputs with which the graph is run.
        opset: The ONNX opset of the original graph; of a network that was exported for the fold, the one it was
            exported in.
        parameters: The number of parameters [before, after] the fold.
        macs: The MACs of one inference [before, after] the fold, with dynamic dimensions at ``sizes.usual``; null if
            the shapes in the graph are not known.
        nodes: The number of nodes of the graph [before, after] the fold.
        operators: How many nodes the folded graph has of each operator, by its name.
        changes: Every exact change of the graph: which rewrite, where, and what it did; empty if nothing was folded.
        reverted: The rewrites that were reverted, by name, because they made the graph larger, slower in a
            measurement on this machine, or less accurate in FP32; and ``value:NAME`` for a value across which nothing
            was folded, because that is less accurate. ``not_folded`` has the reasons.
        links: The comparisons of the outputs before and after the fold, one for each output; of a network that was
            exported for the fold, the first one compares it with its exported graph. An output that could not be
            compared is a link that is *not verified*. If nothing was folded, the graph is compared with itself.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"left": "not_folded", "taken_back": "reverted"}

    kind: Literal["graph"] = "graph"
    image_channels: int | None = None
    scores: ClassScores | None = None
    structure: str
    float64: str
    sizes: Sizes
    opset: int
    parameters: tuple[int, int]
    macs: tuple[int, int] | None
    nodes: tuple[int, int]
    operators: dict[str, int]
    changes: tuple[Change, ...]
    reverted: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def called(self) -> str:
        """``graph``."""
        return "graph"

    @property
    def unchanged(self) -> str:
        """Why the graph is as it was given; empty where something was folded."""
        if self.changes:
            return ""
        return NO_GAIN if self.reverted else NOTHING_TO_FOLD

    @property
    def description(self) -> str:
        """Description of the folded graph in a few words."""
        return "an ONNX graph"

    @property
    def origin_kind(self) -> str:
        """The kind of file that was folded: a graph."""
        return "graph"

    @property
    def shapes(self) -> dict[str, Any]:
        """The structure of the graph, without its weights."""
        return {"structure": self.structure, "sizes": self.sizes.usual}

    @property
    def macs_counted(self) -> str:
        """The label of the MACs: those of one inference, at these values of its dynamic dimensions."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.usual.items())
        return f"MACs per inference{f' at {sizes}' if sizes else ''}"

    @property
    def saved(self) -> Saved:
        """The costs of one inference before and after the fold, by name."""
        macs = [(self.macs_counted, *self.macs)] if self.macs else []
        return (("parameters", *self.parameters), *macs, ("nodes", *self.nodes))

    @property
    def done(self) -> str:
        """How many changes, and how many outputs were verified."""
        if self.unchanged:
            return self.unchanged
        return f"{len(self.changes)} changes of the graph; {outputs_text(self.links)}"


class Exporting(Record):
    """What PyTorch's exporter itself folded, before repaconv did: counts in the module and in the exported graph.

    Attributes:
        parameters: The number of parameters [in the module, in the exported graph].
        batchnorms: The number of BatchNorms [that run in one inference of the module, that are nodes of the exported
            graph].
    """

    parameters: tuple[int, int]
    batchnorms: tuple[int, int]

    @property
    def description(self) -> str:
        """Empty where it folded no BatchNorm."""
        run, remain = self.batchnorms
        if run <= remain:
            return ""
        numbers = f"{self.parameters[0]:,} parameters in the module, {self.parameters[1]:,} in its graph"
        return f"torch's exporter folded {run - remain:,} of {run:,} BatchNorms ({numbers})"


class NetworkFold(GraphFold):
    """The fold of a network of no known method: built by its architecture, exported to ONNX, and folded as a graph.

    Attributes:
        kind: Always ``network``.
        arch: The architecture that was built: e.g. ``timm:mobileone_s1``, ``transformers:ViTModel``,
            ``ultralytics:yolo11n.yaml``, or the path of a Python file and its function, ``/path/net.py:build``.
        known: The published network that the weights were recognized as; null if the architecture was named by
            ``--arch`` or by a Hugging Face folder.
        config: The ``config.json`` of a Hugging Face folder, or what a checkpoint of Ultralytics says of its network:
            its YAML, task and version; empty otherwise.
        classes: The number of classes that the network distinguishes: 0 if it outputs features, null if that is not
            known.
        exporter: What exported the network to ONNX: ``torch's exporter`` or ``torch's old exporter``.
        exporting: What the exporter itself folded; null in a run of an earlier version.
        data: The ONNX file of the network as it was exported, in float64, before the fold.
    """

    kind: Literal["network"] = "network"  # type: ignore[assignment]
    arch: str
    known: Known | None = None
    config: dict[str, Any]
    classes: int | None
    exporter: str
    exporting: Exporting | None = None
    data: Payload

    @property
    def unchanged(self) -> str:
        """Why the graph is unchanged; the exporter may have folded all BatchNorms. Empty if something was folded."""
        text = self.exporting.description if self.exporting else ""
        return f"nothing more to fold: {text}" if text and super().unchanged == NOTHING_TO_FOLD else super().unchanged

    @property
    def description(self) -> str:
        """Its architecture."""
        return self.arch

    @property
    def origin_kind(self) -> str:
        """Weights."""
        return "checkpoint"


KINDS: dict[str, type[FoldArtefact]] = {"method": MethodFold, "graph": GraphFold, "network": NetworkFold}
"""What a fold's file says of itself, and what it then is."""

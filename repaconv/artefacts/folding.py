"""What ``fold`` leaves: a folded network, and what only networks of its origin have.

`FoldArtefact` is what every stage may ask of any; ``kind`` in the file tells which of the others it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from repaconv.artefacts.records import (
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
    TensorInfo,
    outputs_told,
)

NOTHING_TO_FOLD = "nothing to fold: the network stays as it is"
"""What every fold says that changed nothing: of a file, of an architecture, of a live module."""


class FoldStep(Record):
    """One row of the fold certificate: what went where, and the float64 difference it makes.

    ``max_rel_error`` is max|folded - training| / max|training| of the module's output on random input, or of its
    weights where those alone change. ``allowed`` is what this step alone may differ by; where that is not the
    policy's, ``reason`` says why. A method leaves it None for the policy's. ``before`` are the module's layers with
    weights and ``after`` those of its fold, in the first row of each kind of block.
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
    """What a graph of any origin takes, as its inputs are drawn.

    ``usual`` are the free sizes by name, as a call has them that is no probe, ``other`` others that it takes; ``batch``
    is the name of the one that is a batch, ``sides`` are those of height and width, where they are free. ``gain`` is a
    factor on inputs that are drawn normally, at which nothing overflows, ``below`` bounds integers of no known use.
    ``held`` are inputs that always have these values, by name: those of a sample that are parameters and no data.
    """

    usual: dict[str, int] = Field(default={})
    other: dict[str, int] = Field(default={})
    batch: str = ""
    sides: tuple[str, ...] = ()
    gain: float = 1.0
    below: int = 1
    held: dict[str, Any] = Field(default={})


Batch = int | Literal["dynamic"]
Saved = tuple[tuple[str, float, float], ...]


class FoldArtefact(Artefact):
    """A folded network, whatever it came from: what its later stages go by.

    ``applied`` names all that was folded. ``preset`` is how it will be written, by name, ``rewrites`` that in full;
    None leaves it to the target of the export; in int8 that form leaves the modules ``fp32_modules`` in float32, and
    ``quantizer`` writes it, where the tuner found that. ``tolerances`` are those of the links that this net cannot hold
    at the policy's. ``claims`` are the accuracies that the checkpoint's own record has. ``image_size`` is that of the
    usual images, None where the network does not take one input of images; ``preprocessing`` is None where nothing
    tells it. ``batch`` is what a call takes, ``whole`` says that its outputs are judged as one and not as one for each
    image.
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
    payload: Payload

    @property
    def called(self) -> str:
        """By which targets know its form, and people it: a method, or what kind of network it is."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """What it is, for people."""
        raise NotImplementedError

    @property
    def origin_kind(self) -> str:
        """What kind of file it came from."""
        return "checkpoint"

    @property
    def shapes(self) -> dict[str, Any]:
        """What all networks of the same shapes share."""
        raise NotImplementedError

    @property
    def saved(self) -> Saved:
        """What it costs before and after, by name."""
        raise NotImplementedError

    @property
    def done(self) -> str:
        """The fold in one sentence."""
        raise NotImplementedError


class MethodFold(FoldArtefact):
    """A method's checkpoint: later stages rebuild it from this and ``model.safetensors`` alone.

    ``applied`` names the method, and what the checkpoint carried besides (LoRA, LayerScale).
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
        """Of one image."""
        return (
            ("parameters", self.training.parameters, self.deploy.parameters),
            ("MACs per image", self.training.macs, self.deploy.macs),
        )

    @property
    def done(self) -> str:
        """How many parts, how exactly, and what was allowed more."""
        largest = max((step.max_rel_error for step in self.certificate), default=0.0)
        told = f"{len(self.certificate)} parts of {self.method} folded, each within {largest:.1e} (float64)"
        return told + "".join(f"; {step.module}: {step.reason}" for step in self.certificate if step.reason)


class GraphFold(FoldArtefact):
    """An ONNX graph with everything folded that needs no knowledge of its method; beside it, the folded graph.

    ``changes`` say what was done where; where there are none, the graph is as it was given, but for its file.
    ``links`` compare the outputs before and after. ``macs`` are those of one call with free sizes at 1, before and
    after; None where shapes are not known. ``left`` says what was not folded and why, and which linear operators still
    stand behind or beside another. ``opset`` is that of the graph as given. ``verdict`` is passed where a link passed
    and none failed; outputs that could not be compared are links that are *not verified*, by name. ``structure`` is a
    hash of the graph without its weights, ``float64`` says what evaluates it in float64; empty where nothing does, or
    where float32 is so far from it that it tells nothing.
    ``sizes`` are of its inputs. ``taken_back`` are rewrites that enlarged the graph, or that a measurement on
    some machine, which ``left`` names, found slower; without that (``--no-measure``) the same graph gives the same
    bytes everywhere. ``scores`` is the output that gives classes, None where none does.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"left": "not_folded", "taken_back": "reverted"}

    kind: Literal["graph"] = "graph"
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
    not_folded: tuple[str, ...] = ()
    reverted: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def called(self) -> str:
        """A graph of any origin."""
        return "graph"

    @property
    def unchanged(self) -> str:
        """Why the graph is as it was given; empty where something was folded."""
        if self.changes:
            return ""
        return "all of the fold was reverted" if self.reverted else NOTHING_TO_FOLD

    @property
    def description(self) -> str:
        """Where it is from."""
        return "an ONNX graph"

    @property
    def origin_kind(self) -> str:
        """A graph."""
        return "graph"

    @property
    def shapes(self) -> dict[str, Any]:
        """The graph but for its weights."""
        return {"structure": self.structure, "sizes": self.sizes.usual}

    @property
    def macs_counted(self) -> str:
        """What the multiply-accumulates are of: one inference, at these values of its dynamic dimensions."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.usual.items())
        return f"MACs per inference{f' at {sizes}' if sizes else ''}"

    @property
    def saved(self) -> Saved:
        """Of one inference."""
        macs = [(self.macs_counted, *self.macs)] if self.macs else []
        return (("parameters", *self.parameters), *macs, ("nodes", *self.nodes))

    @property
    def done(self) -> str:
        """How many changes, and what was proved of them."""
        if self.unchanged:
            return self.unchanged
        return f"{len(self.changes)} changes of the graph; {outputs_told(self.links)}"


class Exporting(Record):
    """What torch's exporter folded before anything else did: counts of the module, and of the graph that it wrote.

    ``batchnorms`` are those that run in one inference, and those that are nodes of the graph.
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
    """A network that no method knows, folded by its graph: what builds it again, and its exported graph.

    ``arch`` is what was named: ``timm:mobileone_s1``, ``transformers:ViTModel``, ``./net.py:build``; ``config`` is the
    one of a Hugging Face folder; ``known`` is what it was recognised as, where nobody named it. ``data`` is the graph
    as exported in float64, ``exporter`` says by what, and ``exporting`` what that folded itself; None in a run of an
    older version. ``classes`` is None where it is not known what it tells apart.
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
        """As of any graph; where the exporter folded BatchNorms, there was something to fold."""
        told = self.exporting.description if self.exporting else ""
        return f"nothing more to fold: {told}" if told and super().unchanged == NOTHING_TO_FOLD else super().unchanged

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

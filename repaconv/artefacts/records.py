"""What several stages' results are made of: facts, payloads, costs, links and their tolerances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

SCHEMA_VERSION = 3
PREVIOUS = {"schema_version": SCHEMA_VERSION - 1}
"""The context in which `Record.model_validate` reads a file of the previous schema version."""


Verdict = Literal["passed", "failed", "not verified"]


ImageSize = tuple[int, int]
"""(height, width) in pixels."""


def parse_image_size(text: str) -> ImageSize:
    """``224`` or ``140x126`` (height x width).

    Raises:
        ValueError: If it is neither.
    """
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError("neither a number of pixels nor HEIGHTxWIDTH")
    return int(sides[0]), int(sides[-1])


class Record(BaseModel):
    """A frozen result; unknown fields are errors, so a newer file is not half-read."""

    FORMER: ClassVar[Mapping[str, str]] = {}
    """What fields were called in the previous schema version: former name to name."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, plain: Any, info: ValidationInfo) -> Any:
        if info.context != PREVIOUS or not isinstance(plain, dict):
            return plain
        former = {old: new for each in reversed(cls.__mro__) for old, new in vars(each).get("FORMER", {}).items()}
        return {former.get(name, name): value for name, value in plain.items()}


class Fact(Record):
    """A value used about a checkpoint, where it comes from and what speaks against it.

    ``overrules``: it is the user's, and the file or its weights say otherwise. ``assumed``: nothing says it, and a
    default was taken.
    """

    name: str
    value: Any
    source: str
    against: str = ""
    overrules: bool = False
    assumed: bool = False


class Claim(Fact):
    """An accuracy, as a share of 1, that a checkpoint's own record has."""

    value: float


class Payload(Record):
    """A file beside the artefact; ``path`` is relative to the artefact's folder."""

    path: str
    sha256: str
    bytes: int


class WeightSet(Record):
    """One state dict of a container; ``path`` is its dotted place, ``.`` for the whole file."""

    path: str
    tensors: int
    parameters: int


class Origin(Record):
    """The checkpoint that a run started from, and which weights of it were taken.

    ``checksums`` are those of the file that its weights were held to.
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
    """What happens to an image before the network; mean and std on the 0..255 scale, per channel.

    ``resize_edge`` is the shorter edge's length, the image size's longer side where None; with ``keep_ratio`` False,
    both edges', the image size itself where None. ``assumed`` are the fields that nothing says: defaults were taken.
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
    """The output of a network that is the scores of its classes, [images, classes], and what says so.

    ``assumed`` if only its shape does: then it is taken as that where images have labels.
    """

    output: str
    classes: int
    source: str
    assumed: bool = False

    @property
    def told(self) -> str:
        """Which output it is, by its shape."""
        return f"{self.output!r} [N, {self.classes}]"


class ImageSet(Record):
    """The images that calibrated and evaluated an export, by which later stages read the same ones again.

    ``path`` is an .npz file or a folder. ``sha256`` is that of the file, or of the names and contents of the images
    that were taken from the folder. ``count`` is how many were taken; of these, those at the places ``calibration`` set
    value ranges, and all others evaluate.
    """

    path: str
    sha256: str
    count: int
    calibration: tuple[int, ...] = ()


class FoldedLayer(Record):
    """A layer before or after a fold, and ``into`` which layers after it went; empty where it is gone.

    ``macs`` are those of one image; None where they are not known.
    """

    PARAMETER: ClassVar[str] = "parameter"
    """The kind of what a module with other modules in it holds itself: it multiplies nothing."""

    name: str
    kind: str
    parameters: int
    macs: int | None = None
    into: tuple[str, ...] = ()


class Change(Record):
    """One exact change of a graph: by which rewrite, at which node, and what it did there.

    ``before`` are the layers with weights that went, ``after`` those that came; empty in a run of an older version.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"told": "description"}

    rewrite: str
    place: str
    description: str
    before: tuple[FoldedLayer, ...] = ()
    after: tuple[FoldedLayer, ...] = ()


class TensorInfo(Record):
    """Name, shape and dtype of one tensor of the folded model."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Cost(Record):
    """Parameters, and multiply-accumulates of one image; ``layer_macs`` are those of layers with weights alone."""

    parameters: int
    macs: int
    layer_macs: int


class Metrics(Record):
    """How two outputs of shape [N, K] differ.

    Of each image apart, and the worst of them: ``max_rel_error`` is max|a - b| / max|b|, ``norm_error`` is
    ||a - b|| / ||b||, and ``cosine`` the smallest, of logits around their mean; None for a single number. An image near
    zero is measured by what is usual of the others (`repaconv.proof.parity`). ``mean_abs_error`` is over all numbers,
    ``spread`` how far the reference's outputs lie from that of the first image, relative to the largest; None for one
    image. For logits: ``kl_divergence`` KL(softmax b || softmax a) in nats, its mean over the images;
    ``top1_agreement`` is 1 - ``top1_flips`` / images, where ``top1_flips`` counts other first classes: those in which
    the reference's lead over the class chosen instead is more than the noise matter (``top1_flips_that_matter``), the
    others are ``top1_flips_within_noise``, of the ``top1_close`` images whose first class leads by no more than that at
    all. ``examples`` lists some flips, by image and lead. Leads and margins are relative to the image's max|b|.
    ``undecided`` counts images left out, where rounding decides which tokens merge; of a graph of any origin, numbers
    left out that hang on a rounding.
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
    """What a link allows; None is not judged.

    An ``exact`` link passes where max_rel_error <= rtol or max_abs_error <= atol. A ``lossy`` one is never held to
    those: it passes by cosine and norm_error, by the flips of first classes, and by the loss of accuracy where there
    are labels. Neither passes where the outputs of all images are as much alike as that.
    ``flips`` is the share of all images that may lose a lead of more than ``noise``, ``flips_within_noise`` the share
    of those with a smaller lead that may lose it; more of these is no fault where chance explains it.
    """

    kind: Literal["exact", "lossy"]
    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None
    norm_error: float | None = None
    flips: float | None = None
    flips_within_noise: float | None = None
    accuracy_loss: float | None = None
    noise: float = 0.0

    @property
    def description(self) -> str:
        """What is allowed, in words."""
        if self.kind == "exact":
            limits = ((self.rtol, "relative"), (self.atol, "absolute"))
            return " or ".join(f"{value:.0e} {kind}" for value, kind in limits if value is not None)
        near = f"limits: cosine {self.cosine}, error {self.norm_error or 0.0:.1%}"
        if self.flips is None or self.flips_within_noise is None:
            return near
        beyond, within = f"{self.flips:.0%} flips beyond {self.noise:.0%}", f"{self.flips_within_noise:.0%} within"
        return f"{near}, {beyond}, {within}"


class Accuracy(Record):
    """Top-1 accuracy of both ends on the same labelled images.

    ``difference`` is candidate minus reference with its 95% interval (paired, Agresti and Min 2005), ``p_value`` that
    of McNemar's exact test on the images that one end alone gets right.
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


class Drift(Record):
    """The difference of both ends at one place on the way: max|a - b| / max|b|, and the same of root mean squares."""

    place: str
    max_rel_error: float
    rms_rel_error: float


class Location(Record):
    """Where two ends part: the first ``module``, in the user's names, and what was compared up to there.

    ``module`` is empty where nothing can be said; ``reason`` says why, or what the name rests on.
    """

    module: str
    reason: str
    drift: tuple[Drift, ...] = ()


class Link(Record):
    """One step of the chain of proof: two ends, what is allowed between them, a verdict.

    ``variant`` is that of the export which it is about, where it is not the usual one; ``sha256`` is the hash of the
    graph or engine that was run. ``inputs`` are what it was run on, where that is not what the result says of all.
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
    note: str = ""
    accuracy: Accuracy | None = None
    location: Location | None = None

    @property
    def lossy_told(self) -> str:
        """What was measured of a lossy link, each with its limit; empty where nothing was, and of an exact one."""
        seen, allowed = self.metrics, self.tolerance
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


def outputs_told(links: Sequence[Link]) -> str:
    """What became of each of several outputs: how many passed, failed and were not verified, and why not."""
    verdicts = Counter(link.verdict for link in links)
    why = Counter(link.note.partition(":")[0] for link in links if link.verdict == "not verified")
    reasons = [f"{count}: {reason}" if len(why) > 1 else reason for reason, count in why.most_common() if reason]
    told = [f"{verdicts['passed']} of {len(links)} outputs passed"]
    told += [f"{verdicts['failed']} failed"] if verdicts["failed"] else []
    open_ones = verdicts["not verified"]
    told += [f"{open_ones} not verified ({', '.join(reasons)})" if reasons else f"{open_ones} not verified"] * bool(why)
    return ", ".join(told)


class Artefact(Record):
    """What all stages share.

    ``unverified`` names the failed proofs that were overridden, and the settings that overrule the checkpoint.
    ``options`` is what the stage was asked for, as options of its command. ``other_files`` are the files that this
    stage wrote besides its payload; of a fold, what exports of an earlier one wrote outside the run. ``input_files``
    and ``output_files`` are the files of this call; they are told to the caller and not stored.
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
        """What it is, its verdict, and where it lies: all else is in its fields."""
        return f"<{' '.join([type(self).__name__, self.verdict, *self.output_files[-1:]])}>"

    def __rich_repr__(self) -> Iterator[tuple[str, Any]]:
        """Its fields that are one value, for rich's printers."""
        for name, value in self:
            if isinstance(value, (str, int, float, bool)) and name not in ("schema_version", "stage"):
                yield name, value


class Known(Record):
    """A published network that a checkpoint is of, or near to.

    ``also`` are other names of the same. ``exact`` means all tensors, but for the number of classes; ``differs`` says
    in what it is another.
    """

    name: str
    also: tuple[str, ...] = ()
    exact: bool
    differs: str = ""

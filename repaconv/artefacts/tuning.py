"""What ``tune`` leaves: every deployment that was considered, and the one that was taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from repaconv.artefacts.benching import Ratio
from repaconv.artefacts.records import Artefact, ImageSize, Link, Record


class Deployment(Record):
    """One way to run a network: what is fastest on a machine is all of it together.

    ``target`` is whose rules its graph follows, ``runtime`` that target's engine. ``rewrites`` are the form's,
    ``precision`` is the graph's, or what such a runtime makes of a float32 one; ``fp32_modules`` are modules whose
    layers int8 leaves in float32, ``quantizer`` who wrote that where it was not ONNX Runtime's. ``settings`` are
    NAME=VALUE of the runtime's own, beside its defaults. ``streams`` calls run at once, each of ``batch`` images on
    ``threads`` threads.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"keep": "fp32_modules", "quantiser": "quantizer"}

    target: str
    runtime: str
    rewrites: tuple[str, ...]
    precision: str = "fp32"
    fp32_modules: tuple[str, ...] = ()
    quantizer: str = ""
    settings: tuple[str, ...] = ()
    threads: int = 1
    streams: int = 1
    batch: int = 1


class Candidate(Record):
    """A deployment that was considered, and what came of it.

    ``expected`` is how many times as fast as the baseline it should be, by the effects of its rewrites alone;
    ``rounds`` and ``ratio`` (an image's time, against the baseline in the same rounds) are of its longest measurement,
    None if there was none. ``memory_bytes`` are those it took at its peak to be opened and to run once, of this process
    and beside others; None where it was not opened now, or the system does not tell. Of a lossy one ``disagreement`` is
    the share of the images that choose whose first class is another than in float32, ``link`` how it was judged on
    those. ``description`` says how far it came.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"told": "description"}

    deployment: Deployment
    expected: float | None = None
    rounds: int = 0
    ratio: Ratio | None = None
    memory_bytes: int | None = None
    disagreement: float | None = None
    link: Link | None = None
    description: str


class Sensitivity(Record):
    """What int8 loses in some layers alone, all others in float32, on the images that calibrate.

    ``layers`` are modules, ``disagreement`` is the share of the images with another first class, ``kl_divergence`` the
    mean over the images, in nats.
    """

    layers: tuple[str, ...]
    disagreement: float
    kl_divergence: float


class TuneArtefact(Artefact):
    """The fastest deployment of a network on a machine, and the evidence.

    ``shapes_sha256`` is the hash of backbone, config and image size, for all checkpoints of which it holds; a lossy one
    holds for these weights alone, of which ``model_sha256`` is the hash, else empty. ``baseline`` is the target's own
    form and runtime with their defaults, against which every ratio is. ``allowed_disagreement`` and
    ``allowed_accuracy_drop`` are shares of the images, None where nothing was said of them; with neither only exact
    deployments were allowed. Of a lossy ``deployment``, or one that made way for an exact one, ``disagreement``
    and ``link`` are what it loses on those of the ``images`` that chose nothing. ``sensitivities`` are by target, the
    most sensitive layers first, where int8 of all layers lost too much. ``skipped`` are runtimes not tried, and why.
    ``image_preprocessing`` says how image files were read, ``scores`` what was decided of the output whose top-1
    predictions count. ``complete`` says whether nothing was left because ``budget_s`` was spent.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"left_out": "skipped"}

    stage: str = "tune"
    target: str
    runtimes: dict[str, str]
    objective: str = "latency"
    method: str
    shapes_sha256: str
    model_sha256: str = ""
    image_size: ImageSize | None
    seed: int
    baseline: Deployment
    deployment: Deployment
    ratio: Ratio | None
    allowed_disagreement: float | None = None
    allowed_accuracy_drop: float | None = None
    candidates: tuple[Candidate, ...]
    images: str = ""
    image_preprocessing: str = ""
    scores: str = ""
    disagreement: float | None = None
    link: Link | None = None
    sensitivities: dict[str, tuple[Sensitivity, ...]] = Field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    seconds: float
    budget_s: float = 0.0
    complete: bool = True
    machine: dict[str, Any]
    note: str = ""

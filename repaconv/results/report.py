"""The results of ``report``: a page of one run, or of several."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Literal

from pydantic import SerializeAsAny

from repaconv.deprecation import former_attribute
from repaconv.results.bench import BenchArtefact, EstimateArtefact, Ratio, ThroughputArtefact
from repaconv.results.build import BuildArtefact
from repaconv.results.bundle_and_collect import CollectArtefact
from repaconv.results.convert import ConvertArtefact, FinetuneArtefact
from repaconv.results.export import ExportArtefact
from repaconv.results.fold import FoldArtefact
from repaconv.results.link_reasons import Verdict
from repaconv.results.records import SCHEMA_VERSION, Accuracy, Artefact, Cost, Link, Record, Result
from repaconv.results.verify import VerifyArtefact

# --- What ``table`` leaves: the paper's figures next to ours.


class TableRow(Record):
    """One model of a table in the paper: the figures as printed, and those that repaconv counts.

    Attributes:
        table: The table of the paper, as the method's file of figures names it.
        model: The model, as the method's file of figures names it.
        form: The form whose figures are compared: the training form or the deploy form.
        cost: The parameters and MACs that repaconv counts.
        parameters: The number of parameters as printed, e.g. ``4.4M``; empty if the paper does not print it.
        macs: The number of operations as printed, in ``unit``; empty if the paper does not print it.
        counted: Which operations ``macs`` has: ``all``, or only those of ``layers`` with weights.
        unit: The unit of ``macs``; one MAC is two FLOPs.
        agrees: Whether each printed figure equals the counted one, rounded to the printed digits.
        remark: Why a figure differs; empty if ``agrees`` is true.
    """

    table: str
    model: str
    form: Literal["training", "deploy"]
    cost: Cost
    parameters: str
    macs: str
    counted: Literal["all", "layers"]
    unit: Literal["MACs", "FLOPs"]
    agrees: bool
    remark: str


class PaperTable(Result):
    """The result of ``table``: the figures of a method's paper next to those that repaconv counts.

    Attributes:
        schema_version: The version of the schema of results.
        method: The registered name of the method.
        paper: The paper that the figures are from.
        rows: One row for each model of the paper's tables.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("method",)

    schema_version: int = SCHEMA_VERSION
    method: str
    paper: str
    rows: tuple[TableRow, ...]


# --- The results of ``report``: a page of one run, or of several.

OF_THE_RUN = ("converted", "recorded", "fold", "stored", "engine")
"""Links that are of no export, or of an engine, which the run is about."""
LOWER_PRECISIONS = ("fp16", "bf16", "int8")


class Report(Artefact):
    """The result of ``report``: everything that a run contains about its current fold.

    Attributes:
        stage: The command that wrote this result, ``report``.
        title: The name of the checkpoint or ONNX file, and the method or kind of network.
        converted: The conversion that made the network; null if none did.
        trained: The training after a conversion that made the network; null if none did.
        folded: The fold.
        verified: The verification of the folded model, without links of files that the run no longer has; null if there
            is none.
        exports: The exported ONNX models.
        benches: The latencies that were measured of the run's current models.
        throughputs: The throughputs that were measured of the run's current models.
        estimates: The latencies that were estimated for the run's current models.
        builds: The engines that were built from the run's current models.
        collected: The results of boards that ran the run's current models.
        links: The links of the verification, the exports, the engines and the boards, each once.
        before_after: What the fold saves: a name, the value before and the value after; the last is the size of the
            weights in FP32, in bytes.
        worst_fold: The largest relative error of the fold in float64: over the rows of the certificate, or over the
            ``fold`` links of a graph or network without a method.
        open: What has not been verified or measured, and which files have changed, one sentence each.
        paper: The figures of the method's paper; null if the method has none or they were not asked for.
        commands: The commands that make all figures again.
        library: The library that loads the saved folder, ``timm`` or ``transformers``, in the model card of ``save``;
            else empty.
    """

    stage: str = "report"
    title: str
    converted: ConvertArtefact | None = None
    trained: FinetuneArtefact | None = None
    folded: SerializeAsAny[FoldArtefact]
    verified: VerifyArtefact | None
    exports: tuple[ExportArtefact, ...]
    benches: tuple[BenchArtefact, ...]
    throughputs: tuple[ThroughputArtefact, ...] = ()
    estimates: tuple[EstimateArtefact, ...] = ()
    builds: tuple[BuildArtefact, ...]
    collected: tuple[CollectArtefact, ...]
    links: tuple[Link, ...]
    before_after: tuple[tuple[str, float, float], ...]
    worst_fold: float
    open: tuple[str, ...]
    paper: PaperTable | None
    commands: tuple[str, ...]
    library: str = ""

    @property
    def chosen(self) -> frozenset[str]:
        """The variants that the run is about: those that were measured or built, and each in float32, which it is
        compared with; the plainest export where there are none."""
        used = {row.latencies[0].sha256 for row in self.benches} | {row.rows[0].sha256 for row in self.throughputs}
        of = {build.payload.sha256: build.onnx_sha256 for build in self.builds}
        graphs = used | set(of.values())
        found = [each.variant for each in self.exports if each.payload.sha256 in graphs]
        found = found or [each.variant for each in self.exports[:1]]
        exact = [".".join(part for part in name.split(".") if part not in LOWER_PRECISIONS) for name in found]
        return frozenset([*found, *exact])

    def command_of(self, link: Link) -> str:
        """The command that made a link of this report, since two may make one of the same name."""
        if self.verified and link in self.verified.links:
            return "verify"
        if any(link in built.links for built in self.builds):
            return "build"
        return "collect" if any(link in board.links for board in self.collected) else "export"

    @property
    def others(self) -> tuple[int, ...]:
        """Links by their place that are of other variants, unless they failed."""
        chosen = self.chosen
        return tuple(
            place
            for place, link in enumerate(self.links)
            if link.name not in OF_THE_RUN and link.variant not in chosen and link.verdict != "failed"
        )

    @property
    def others_text(self) -> str:
        """Description of the links `others`: their number, variants and verdicts; empty if there are none."""
        links = [self.links[place] for place in self.others]
        if not links:
            return ""
        verdicts = Counter(link.verdict for link in links)
        names = dict.fromkeys(link.variant or "default" for link in links)
        text = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        return f"{len(links)} links of exports that were neither built nor measured ({', '.join(names)}): {text}"

    others_told = former_attribute("others_told", "others_text", removed_in="0.3.0")


class ReportRow(Record):
    """One of several runs in a report.

    Attributes:
        title: The name of the run folder.
        called: The method, or the kind of network.
        page: The path of the run's own report, relative to this page; empty if it has none.
        verdict: ``failed`` if any result of the run failed or a file changed; else ``passed``.
        open: The number of things that have not been verified or measured.
        worst_fold: The largest relative error of the fold in float64.
        worst_single: The largest relative error of all other exact links; null if none was run.
        saved: What the fold saves: a name, the value before and the value after, e.g. parameters.
        accuracy: The top-1 accuracy from the last exact link on images with labels; null if there is none.
        lower: The smallest share of images that keep their top-1 prediction, by precision.
        target: The target, precision, threads and batch size of the measurement; empty if there is none.
        before_ms: The median latency in milliseconds of the model that was measured with it, usually the training form;
            null if there is none.
        after_ms: The median latency of the run's model in milliseconds; null if it was not measured.
        ratio: The speedup; null if there is only one model.
        quality: ``trusted``, ``noisy`` or ``inconclusive``; empty if nothing was measured.
        reasons: Why the measurement is not trusted.
    """

    title: str
    called: str
    page: str
    verdict: Verdict
    open: int
    worst_fold: float
    worst_single: float | None
    saved: tuple[tuple[str, float, float], ...]
    accuracy: Accuracy | None
    lower: tuple[tuple[str, float], ...]
    target: str = ""
    before_ms: float | None = None
    after_ms: float | None = None
    ratio: Ratio | None = None
    quality: str = ""
    reasons: tuple[str, ...] = ()


class RunsReport(Artefact):
    """The result of ``report`` for several runs: one row for each.

    Attributes:
        stage: What wrote this result, ``runs-report``: the command ``report`` with several runs.
        rows: The runs in the order in which they were given.
    """

    stage: str = "runs-report"
    rows: tuple[ReportRow, ...]

    @property
    def counted(self) -> tuple[str, ...]:
        """What any of them counts, in order."""
        return tuple(dict.fromkeys(name for row in self.rows for name, _, _ in row.saved))

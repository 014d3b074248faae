"""What ``report`` leaves: a page of a run, or of several beside each other."""

from __future__ import annotations

from collections import Counter

from pydantic import SerializeAsAny

from repaconv.artefacts.benching import BenchArtefact, Ratio
from repaconv.artefacts.building import BuildArtefact
from repaconv.artefacts.bundling import CollectArtefact
from repaconv.artefacts.converting import ConvertArtefact
from repaconv.artefacts.estimating import EstimateArtefact
from repaconv.artefacts.exporting import ExportArtefact
from repaconv.artefacts.finetuning import FinetuneArtefact
from repaconv.artefacts.folding import FoldArtefact
from repaconv.artefacts.records import Accuracy, Artefact, Link, Record, Verdict
from repaconv.artefacts.tables import PaperTable
from repaconv.artefacts.throughput import ThroughputArtefact
from repaconv.artefacts.verifying import VerifyArtefact

OF_THE_RUN = ("converted", "recorded", "fold", "stored", "engine")
"""Links that are of no export, or of an engine, which the run is about."""
LOWER = ("fp16", "bf16", "int8")


class Report(Artefact):
    """A run on one page.

    ``converted`` or ``trained`` is what made the network, if a conversion or a training did, ``open`` what nobody
    looked at; ``commands`` make every figure again. ``library`` loads the folder in which its card stands, if one does.
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
        exact = [".".join(part for part in name.split(".") if part not in LOWER) for name in found]
        return frozenset([*found, *exact])

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
    def others_told(self) -> str:
        """How many links those are, of which variants, and what became of them; empty where there are none."""
        links = [self.links[place] for place in self.others]
        if not links:
            return ""
        verdicts = Counter(link.verdict for link in links)
        names = dict.fromkeys(link.variant or "the usual one" for link in links)
        told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        return f"{len(links)} links of variants that are neither measured nor built here ({', '.join(names)}): {told}"


class ReportRow(Record):
    """A run among several.

    Attributes:
        title: Its folder's name.
        called: What was folded.
        page: Its own report, as seen from the page of all; empty where it has none.
        verdict: Of its report.
        open: How many things nobody looked at.
        worst_fold: The largest difference of the fold, in float64.
        worst_single: The largest relative error of what computes the same in float32; None where nothing was run.
        saved: What is counted, before and after.
        accuracy: Of the last graph or module in float32 that labelled images went through.
        lower: Share of images that keep their first class, by precision.
        target: Where it was measured, with its threads and batch; empty where it was not.
        before_ms: Median of the training form beside it; None where none ran.
        after_ms: Median of the deploy form.
        ratio: How many times as fast.
        quality: Whether the measurement can be believed.
        reasons: What speaks against it.
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
    """Several runs on one page, a row each."""

    stage: str = "runs-report"
    rows: tuple[ReportRow, ...]

    @property
    def counted(self) -> tuple[str, ...]:
        """What any of them counts, in order."""
        return tuple(dict.fromkeys(name for row in self.rows for name, _, _ in row.saved))

"""What ``report`` leaves: a page."""

from __future__ import annotations

from pydantic import SerializeAsAny

from repaconv.artefacts.benching import BenchArtefact
from repaconv.artefacts.building import BuildArtefact
from repaconv.artefacts.bundling import CollectArtefact
from repaconv.artefacts.estimating import EstimateArtefact
from repaconv.artefacts.exporting import ExportArtefact
from repaconv.artefacts.folding import FoldArtefact
from repaconv.artefacts.records import Artefact, Link
from repaconv.artefacts.tables import PaperTable
from repaconv.artefacts.verifying import VerifyArtefact


class Report(Artefact):
    """A run on one page. ``open`` is what nobody looked at, ``commands`` make every figure again."""

    stage: str = "report"
    title: str
    folded: SerializeAsAny[FoldArtefact]
    verified: VerifyArtefact | None
    exports: tuple[ExportArtefact, ...]
    benches: tuple[BenchArtefact, ...]
    estimates: tuple[EstimateArtefact, ...] = ()
    builds: tuple[BuildArtefact, ...]
    collected: tuple[CollectArtefact, ...]
    links: tuple[Link, ...]
    before_after: tuple[tuple[str, float, float], ...]
    worst_fold: float
    open: tuple[str, ...]
    paper: PaperTable | None
    commands: tuple[str, ...]

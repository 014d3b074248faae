"""What every stage leaves behind, as frozen results.

An artefact is a payload file and beside it ``<stage>.json`` (`repaconv.files` writes both). The same input gives the
same bytes, so nothing here carries a time stamp; what a clock says belongs to the measurements of ``bench`` alone.
"""

from repaconv.artefacts.benching import Baseline as Baseline
from repaconv.artefacts.benching import Baselines as Baselines
from repaconv.artefacts.benching import BenchArtefact as BenchArtefact
from repaconv.artefacts.benching import HistoryEntry as HistoryEntry
from repaconv.artefacts.benching import Latency as Latency
from repaconv.artefacts.benching import ModuleTime as ModuleTime
from repaconv.artefacts.benching import NodeTime as NodeTime
from repaconv.artefacts.benching import Profile as Profile
from repaconv.artefacts.benching import Quality as Quality
from repaconv.artefacts.benching import Ratio as Ratio
from repaconv.artefacts.benching import Regression as Regression
from repaconv.artefacts.building import BuildArtefact as BuildArtefact
from repaconv.artefacts.bundling import BundleArtefact as BundleArtefact
from repaconv.artefacts.bundling import CollectArtefact as CollectArtefact
from repaconv.artefacts.bundling import LayerTime as LayerTime
from repaconv.artefacts.estimating import EstimateArtefact as EstimateArtefact
from repaconv.artefacts.estimating import Limits as Limits
from repaconv.artefacts.estimating import NodeEstimate as NodeEstimate
from repaconv.artefacts.exporting import ExportArtefact as ExportArtefact
from repaconv.artefacts.exporting import TrainingArtefact as TrainingArtefact
from repaconv.artefacts.folding import KINDS as KINDS
from repaconv.artefacts.folding import FoldArtefact as FoldArtefact
from repaconv.artefacts.folding import FoldStep as FoldStep
from repaconv.artefacts.folding import GraphFold as GraphFold
from repaconv.artefacts.folding import MethodFold as MethodFold
from repaconv.artefacts.folding import NetworkFold as NetworkFold
from repaconv.artefacts.folding import Sizes as Sizes
from repaconv.artefacts.gating import Check as Check
from repaconv.artefacts.gating import GatedRecipe as GatedRecipe
from repaconv.artefacts.gating import GateReport as GateReport
from repaconv.artefacts.inspecting import BlockCost as BlockCost
from repaconv.artefacts.inspecting import FileInspection as FileInspection
from repaconv.artefacts.inspecting import Inspection as Inspection
from repaconv.artefacts.records import SCHEMA_VERSION as SCHEMA_VERSION
from repaconv.artefacts.records import Accuracy as Accuracy
from repaconv.artefacts.records import Artefact as Artefact
from repaconv.artefacts.records import Change as Change
from repaconv.artefacts.records import Cost as Cost
from repaconv.artefacts.records import Drift as Drift
from repaconv.artefacts.records import Fact as Fact
from repaconv.artefacts.records import ImageSize as ImageSize
from repaconv.artefacts.records import Link as Link
from repaconv.artefacts.records import Location as Location
from repaconv.artefacts.records import Metrics as Metrics
from repaconv.artefacts.records import Origin as Origin
from repaconv.artefacts.records import Payload as Payload
from repaconv.artefacts.records import Preprocessing as Preprocessing
from repaconv.artefacts.records import Record as Record
from repaconv.artefacts.records import TensorInfo as TensorInfo
from repaconv.artefacts.records import Tolerance as Tolerance
from repaconv.artefacts.records import Verdict as Verdict
from repaconv.artefacts.records import WeightSet as WeightSet
from repaconv.artefacts.records import parse_image_size as parse_image_size
from repaconv.artefacts.reporting import Report as Report
from repaconv.artefacts.sweeping import SweepArtefact as SweepArtefact
from repaconv.artefacts.sweeping import SweepRow as SweepRow
from repaconv.artefacts.tables import PaperTable as PaperTable
from repaconv.artefacts.tables import TableRow as TableRow
from repaconv.artefacts.tuning import Candidate as Candidate
from repaconv.artefacts.tuning import LoweredCandidate as LoweredCandidate
from repaconv.artefacts.tuning import TuneArtefact as TuneArtefact
from repaconv.artefacts.verifying import VerifyArtefact as VerifyArtefact

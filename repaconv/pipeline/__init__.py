"""The stages, one file each, and the only place that knows their order. Rooms meet here.

Every stage returns its artefact and says nothing; ``progress`` is told how far a long one is.
"""

from repaconv.pipeline.building import build as build
from repaconv.pipeline.bundling import bundle as bundle
from repaconv.pipeline.collecting import collect as collect
from repaconv.pipeline.comparing import compare as compare
from repaconv.pipeline.comparing_runs import compare_runs as compare_runs
from repaconv.pipeline.converting import convert as convert
from repaconv.pipeline.deploying import deploy as deploy
from repaconv.pipeline.estimating import estimate as estimate
from repaconv.pipeline.exporting import export as export
from repaconv.pipeline.fetching import fetch as fetch
from repaconv.pipeline.file_inspection import inspect_file as inspect_file
from repaconv.pipeline.finetuning import finetune as finetune
from repaconv.pipeline.folding import fold as fold
from repaconv.pipeline.gating import gate as gate
from repaconv.pipeline.inspection import inspect as inspect
from repaconv.pipeline.measuring import bench as bench
from repaconv.pipeline.recipe_writing import new_recipe as new_recipe
from repaconv.pipeline.reporting import report as report
from repaconv.pipeline.running import run as run
from repaconv.pipeline.saving import save as save
from repaconv.pipeline.scoring import score as score
from repaconv.pipeline.streaming import throughput as throughput
from repaconv.pipeline.tables import table as table
from repaconv.pipeline.tuning import tune as tune
from repaconv.pipeline.verification import verify as verify

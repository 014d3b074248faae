"""Choose the class of a run's source model by the kind of its fold result."""

from __future__ import annotations

from pathlib import Path

from repaconv.core import run_folder
from repaconv.results import GraphFold, MethodFold, NetworkFold
from repaconv.sources.source_model import SourceModel


def source_model_of(run: run_folder.Run, checkpoint: str | Path | None = None) -> SourceModel:
    """Return the source model of a run.

    Args:
        run: The run.
        checkpoint: New path of its checkpoint or graph, if the file was moved.
    """
    from repaconv.sources.checkpoint_source import CheckpointSource
    from repaconv.sources.named_architecture_source import ArchitectureSource
    from repaconv.sources.onnx_source import OnnxSource

    folded = run_folder.fold_of(run)
    if isinstance(folded, MethodFold):
        return CheckpointSource(run, folded, checkpoint)
    if isinstance(folded, NetworkFold):
        return ArchitectureSource(run, folded, checkpoint)
    assert isinstance(folded, GraphFold)
    return OnnxSource(run, folded, checkpoint)

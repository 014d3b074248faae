"""Choose the class of a run's source model by the kind of its fold result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core import run_folder
from repaconv.results import GraphFold, MethodFold, NetworkFold
from repaconv.sources.source_model import Subject

if TYPE_CHECKING:
    pass


def subject_of(run: run_folder.Run, checkpoint: str | Path | None = None) -> Subject:
    """Return the source model of a run.

    Args:
        run: The run.
        checkpoint: New path of its checkpoint or graph, if the file was moved.
    """
    from repaconv.sources.checkpoint_source import CheckpointSubject
    from repaconv.sources.named_architecture_source import NetworkSubject
    from repaconv.sources.onnx_source import GraphSubject

    folded = run_folder.fold_of(run)
    if isinstance(folded, MethodFold):
        return CheckpointSubject(run, folded, checkpoint)
    if isinstance(folded, NetworkFold):
        return NetworkSubject(run, folded, checkpoint)
    assert isinstance(folded, GraphFold)
    return GraphSubject(run, folded, checkpoint)

"""The source model of a run: the one place that knows the kinds of origins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from repaconv import runs
from repaconv.artefacts import GraphFold, MethodFold, NetworkFold
from repaconv.subjects.subject import Subject

if TYPE_CHECKING:
    pass


def subject_of(run: runs.Run, checkpoint: str | Path | None = None) -> Subject:
    """What a run is of.

    Args:
        run: The run.
        checkpoint: Where its checkpoint is now, if it has moved.
    """
    from repaconv.subjects.checkpoint import CheckpointSubject
    from repaconv.subjects.graph import GraphSubject
    from repaconv.subjects.network import NetworkSubject

    folded = runs.fold_of(run)
    if isinstance(folded, MethodFold):
        return CheckpointSubject(run, folded, checkpoint)
    if isinstance(folded, NetworkFold):
        return NetworkSubject(run, folded, checkpoint)
    assert isinstance(folded, GraphFold)
    return GraphSubject(run, folded, checkpoint)

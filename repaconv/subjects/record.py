"""What a fold of a graph is recorded as: its changes, what they cost before and after, and what was left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repaconv.artefacts import Change, Link
from repaconv.exporters.to_onnx import operators_of
from repaconv.proof.verdicts import verdict_of
from repaconv.subjects.evaluated import Evaluated
from repaconv.subjects.given import looked_into
from repaconv.subjects.taken import Taken


def recorded(
    before: Evaluated,
    after: Evaluated,
    changes: Sequence[Change],
    links: Sequence[Link],
    taken: Taken,
    left: Sequence[str],
) -> dict[str, Any]:
    """Fields of `repaconv.artefacts.GraphFold`, all but where it came from and what was asked for."""
    from repaconv.folds.standing import standing
    from repaconv.graphs.costs import macs, macs_at, parameters

    given, smaller = before.settled, after.settled
    usual = taken.sizes.usual
    multiplied = (macs_at(before.model, usual), macs_at(after.model, usual)) if usual else (macs(given), macs(smaller))
    return {
        "verdict": verdict_of(links),
        "applied": tuple(dict.fromkeys(change.rewrite for change in changes)),
        "any_image_size": taken.any_image_size,
        "batch": taken.batch,
        "whole": taken.whole,
        "tolerances": taken.tolerances,
        "structure": taken.structure,
        "float64": taken.float64,
        "sizes": taken.sizes,
        "parameters": (parameters(before.stored), parameters(after.stored)),
        "macs": None if None in multiplied else multiplied,
        "nodes": (len(before.model.graph.node), len(after.model.graph.node)),
        "operators": operators_of(after.model),
        "changes": tuple(changes),
        "not_folded": (*left, *(standing(smaller) if looked_into(after.model) else ())),
        "links": tuple(links),
    }

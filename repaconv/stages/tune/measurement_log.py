"""What a search measured, kept as it comes: of the shapes, whatever the weights, so that another search has it too."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from repaconv.core.files import canonical_json, sha256_of_bytes, write_text
from repaconv.core.progress import Progress
from repaconv.results import Deployment, Ratio
from repaconv.stages.tune.candidates import Candidates
from repaconv.stages.tune.speed_measurements import Elsewhere, Here

HELD_BYTES = 4 * 1024**3
AT_A_TIME = 16
"""Deployments whose graphs are written before any is measured: all of an exhaustive search's fill a disk."""
PREPARED = 3
"""Times its file that a session takes: the file, and the weights packed."""


@dataclass
class Journal:
    """What was measured; a search that is broken off goes on there.

    Attributes:
        path: Where it is kept.
        begun: When, by the monotonic clock.
        deadline: After which only the last measurement begins.
        baseline: Against which all is.
        rounds: Of the last measurement.
        measuring: Measures beside the baseline.
        graphs: The deployments'.
        progress: See `Progress`.
        rows: Rounds and ratio of each.
        left: Why others were not measured.
        cut: Whether something was left because the time was over.
        alike: The first that was met which is all the same as one.
    """

    path: Path
    begun: float
    deadline: float
    baseline: Deployment
    rounds: int
    measuring: Here | Elsewhere
    graphs: Candidates
    progress: Progress
    rows: dict[str, tuple[int, Ratio]] = field(default_factory=dict)
    left: dict[Deployment, str] = field(default_factory=dict)
    cut: bool = False
    alike: dict[Deployment, Deployment] = field(default_factory=dict)
    _first: dict[str, Deployment] = field(default_factory=dict)

    def remembered(self) -> Journal:
        """It, with what stands in its file already; none, or of another version, is nothing."""
        with suppress(OSError, ValueError, TypeError):
            known = json.loads(self.path.read_text())
            self.rows = {key: (int(rounds), Ratio.model_validate(row)) for key, (rounds, row) in known.items()}
        return self

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return time.monotonic() - self.begun

    def forget(self) -> None:
        """Begin anew."""
        self.rows = {}
        self.path.unlink(missing_ok=True)

    def measure(self, deployments: Sequence[Deployment], rounds: int) -> dict[Deployment, Ratio]:
        """Ratios against the baseline; what the budget does not allow, or is wrong, is left out.

        What was measured in as many rounds or more is not measured again.
        """
        for start in range(0, len(deployments), AT_A_TIME):
            if not self._measured(deployments[start : start + AT_A_TIME], rounds):
                self.cut = True
                break
        return {each: self.rows[_key(each)][1] for each in deployments if self._known(each, rounds)}

    def _measured(self, deployments: Sequence[Deployment], rounds: int) -> bool:
        """Those of which nothing is known yet; whether there was time for all of them."""
        unknown = [each for each in deployments if not self._known(each, rounds) and each not in self.left]
        if unknown and self._over(rounds):
            return False
        same = {each: self._same(each) for each in unknown}
        self.alike |= same
        missing = [each for each in dict.fromkeys(same.values()) if not self._known(each, rounds)]
        for group in self._groups([each for each in missing if each not in (*self.left, self.baseline)]):
            if self._over(rounds):
                return False
            self.progress(f"tune: {rounds} rounds of {len(group)}", 0, 0)
            for each, found in self.measuring(group, rounds).items():
                if isinstance(found, str):
                    self.left[each] = found
                else:
                    self.rows[_key(each)] = (rounds, found)
            self._keep(same)
        self._keep(same)
        return True

    def memory(self, deployment: Deployment) -> int | None:
        """Bytes that it took to be opened and to run once, or the first that is all the same; None if none was."""
        return self.measuring.memory.get(self.alike.get(deployment, deployment))

    def time_left(self) -> bool:
        """Whether there is; if not, something is left."""
        self.cut |= (over := time.monotonic() > self.deadline)
        return not over

    def _over(self, rounds: int) -> bool:
        return time.monotonic() > self.deadline and rounds < self.rounds

    def _keep(self, same: dict[Deployment, Deployment]) -> None:
        """What is known so far, of those that are all the same, too."""
        self.left |= {each: self.left[first] for each, first in same.items() if first in self.left}
        self.rows |= {_key(each): self.rows[_key(first)] for each, first in same.items() if _key(first) in self.rows}
        plain = {key: (count, row.model_dump(mode="json")) for key, (count, row) in self.rows.items()}
        write_text(self.path, canonical_json(plain))

    def _known(self, deployment: Deployment, rounds: int) -> bool:
        return self.rows.get(_key(deployment), (0, None))[0] >= rounds

    def _same(self, deployment: Deployment) -> Deployment:
        """The first that was met which is all the same: rewrites may come to equal graphs."""
        if not self._first:
            self._first[self._told(self.baseline)] = self.baseline
        return self._first.setdefault(self._told(deployment), deployment)

    def _told(self, deployment: Deployment) -> str:
        return canonical_json({**deployment.model_dump(mode="json"), "rewrites": self.graphs.same(deployment)})

    def _groups(self, deployments: Sequence[Deployment]) -> list[list[Deployment]]:
        """As many at a time as memory holds."""
        groups: list[list[Deployment]] = []
        held = HELD_BYTES
        for each in deployments:
            size = PREPARED * each.streams * self.graphs.bytes(each)
            if held + size > HELD_BYTES:
                groups.append([])
                held = PREPARED * self.graphs.bytes(self.baseline)
            groups[-1].append(each)
            held += size
        return groups


def _key(deployment: Deployment) -> str:
    return sha256_of_bytes(canonical_json(deployment.model_dump(mode="json")).encode())[:16]

"""What a search measured, kept as it comes, and measuring itself: here, beside the default form."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.artefacts import Ratio
from repaconv.files import canonical_json, write_text
from repaconv.progress import Progress
from repaconv.proof.runners import load_onnx
from repaconv.steps.candidates import Candidates

if TYPE_CHECKING:
    from repaconv.forms.search import Form
    from repaconv.proof.data import Batch

Measurer = Callable[..., Mapping[str, Ratio]]
"""(reference, graphs by name, rounds, image_size=) to the graphs' ratios: what is above 1 is faster than it."""

HELD_BYTES = 4 * 1024**3
PREPARED = 3
"""Times its file that a session takes: the file, and the weights packed."""


@dataclass
class Journal:
    """What was measured, kept as it comes, so that a search that is broken off can go on."""

    path: Path
    begun: float
    deadline: float
    rounds: int
    measurer: Measurer
    graphs: Candidates
    progress: Progress
    rows: dict[str, Ratio] = field(default_factory=dict)
    expected: Any = None
    judged: dict[Path, bool] = field(default_factory=dict)
    cut: bool = False
    """Whether something was left because the time was over."""

    @classmethod
    def begin(
        cls,
        answer: Path,
        budget_s: float,
        rounds: int,
        measurer: Measurer,
        graphs: Candidates,
        progress: Progress,
    ) -> Journal:
        """That of an answer, with what stands in it already."""
        path, now = answer.with_suffix(".journal"), time.monotonic()
        begun = cls(path, now, now + budget_s, rounds, measurer, graphs, progress)
        with suppress(OSError, ValueError):  # none, or of another version
            begun.rows = {key: Ratio.model_validate(row) for key, row in json.loads(path.read_text()).items()}
        return begun

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return time.monotonic() - self.begun

    def forget(self) -> None:
        """Begin anew."""
        self.rows = {}
        self.path.unlink(missing_ok=True)

    def measure(self, forms: Sequence[Form], rounds: int) -> dict[Form, Ratio]:
        """Ratios against the default form; forms that the budget does not allow, or that are wrong, are left out."""
        reference = self.graphs.path(self.graphs.default)
        wanted = {form: self.graphs.path(form) for form in forms}
        missing = {path.stem: path for path in wanted.values() if self._key(path, rounds) not in self.rows}
        missing.pop(reference.stem, None)
        missing = {stem: path for stem, path in missing.items() if self._same(path, reference)}
        for group in _groups(missing):
            if time.monotonic() > self.deadline and rounds < self.rounds:
                self.cut = True
                break
            self.progress(f"tune: {rounds} rounds of {len(group)} forms", 0, 0)
            for stem, ratio in self.measurer(reference, group, rounds).items():
                self.rows[self._key(group[stem], rounds)] = ratio
            write_text(self.path, canonical_json({key: row.model_dump(mode="json") for key, row in self.rows.items()}))
        return {form: self.rows[key] for form, path in wanted.items() if (key := self._key(path, rounds)) in self.rows}

    def _same(self, path: Path, reference: Path) -> bool:
        """Whether a form computes what the default one does, on one call; a wrong one is not worth measuring."""
        from repaconv.proof.outputs import Comparison
        from repaconv.proof.policy import tolerance
        from repaconv.proof.verdicts import verdict_of

        if path not in self.judged:
            call = self.graphs.judging
            session = load_onnx(path)
            if self.expected is None:
                self.expected = load_onnx(reference).run(call.feeds(session.inputs))
            found = Comparison("form", tolerance("form"))
            found.add(session.run(call.feeds(session.inputs)), self.expected, whole=call.whole)
            links = found.links("form", "default form")
            self.judged[path] = verdict_of(links) == "passed"
        return self.judged[path]

    def _key(self, path: Path, rounds: int) -> str:
        return f"{path.stem[:16]} {rounds}"


def _groups(paths: Mapping[str, Path]) -> list[dict[str, Path]]:
    """As many at a time as memory holds."""
    groups: list[dict[str, Path]] = []
    held = HELD_BYTES
    for stem, path in paths.items():
        size = PREPARED * path.stat().st_size
        if held + size > HELD_BYTES:
            groups.append({})
            held = size  # the reference's
        groups[-1][stem] = path
        held += size
    return groups


def measured_here(
    reference: Path,
    others: Mapping[str, Path],
    rounds: int,
    *,
    engine: Any,
    threads: int,
    dims: Mapping[str, int],
    call: Batch,
    seed: int,
) -> dict[str, Ratio]:
    """Everything beside the reference, interleaved, on cores of their own."""
    from repaconv.engines.contract import OnCard, SessionSpec
    from repaconv.measure.protocol import measure, pinned
    from repaconv.measure.statistics import ratio
    from repaconv.proof.runners import call_of

    with pinned(threads) as cores:
        paths = {"": reference, **others}
        spec = SessionSpec(threads=threads, sizes=dims)
        sessions = {name: engine.open(path, spec) for name, path in paths.items()}
        calls = {name: call_of(session, call.feeds(session.inputs)) for name, session in sessions.items()}
        clocked = {name for name, session in sessions.items() if isinstance(session, OnCard)}
        samples = measure(calls, rounds=rounds, warmup_rounds=2, seed=seed, cores=cores, clocked=clocked).samples_ms
    return {name: ratio("form", samples[name], "default form", samples[""], seed) for name in others}

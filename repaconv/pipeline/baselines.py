"""Latencies as they were: a committed file by machine, and a history of every measurement."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repaconv.artefact import Baseline, Baselines, BenchArtefact, HistoryEntry, Regression
from repaconv.files import read_artefact, write_artefact
from repaconv.measure.fingerprint import machine_key


def key_of(name: str, done: BenchArtefact) -> str:
    """Under which a measurement stands in a file of baselines, for one machine."""
    return f"{name}, {done.target}, {done.threads} threads, batch {done.batch}"


def baseline_of(done: BenchArtefact) -> Baseline:
    """A measurement as a baseline keeps it; the model beside it is its yardstick."""
    subject = done.latencies[0]
    beside = done.latencies[1] if len(done.latencies) > 1 else subject
    return Baseline(
        sha256=subject.sha256,
        p50_ms=subject.p50_ms,
        subject_ms=subject.samples_ms,
        yardstick_ms=beside.samples_ms,
        machine=dict(done.machine),
    )


def keep_baseline(path: Path, name: str, done: BenchArtefact) -> None:
    """Write it as the new baseline of this machine; those of others stay."""
    known = read_artefact(path, Baselines) if path.is_file() else Baselines()
    machine = machine_key(done.machine)
    new = {**known.machines.get(machine, {}), key_of(name, done): baseline_of(done)}
    write_artefact(path, known.model_copy(update={"machines": {**known.machines, machine: new}}))


def against_baseline(path: Path, name: str, done: BenchArtefact, allowed: float) -> Regression | None:
    """How it compares with the baseline of this machine; None if there is none."""
    import numpy as np

    from repaconv.measure.statistics import regression

    known = read_artefact(path, Baselines) if path.is_file() else Baselines()
    then = known.machines.get(machine_key(done.machine), {}).get(key_of(name, done))
    if then is None:
        return None

    def pair(kept: Baseline) -> tuple[Any, Any]:
        return np.asarray(kept.subject_ms), np.asarray(kept.yardstick_ms)

    return regression(pair(baseline_of(done)), pair(then), allowed)


def remember_measurement(path: Path, done: BenchArtefact) -> None:
    """Append a line to the history of a target; a second fold leaves it."""
    subject = done.latencies[0]
    entry = HistoryEntry(
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        sha256=subject.sha256,
        p50_ms=subject.p50_ms,
        p95_ms=subject.p95_ms,
        ratio=done.ratio,
        quality=done.quality.verdict,
        machine=machine_key(done.machine),
        threads=done.threads,
        batch=done.batch,
    )
    line = json.dumps(entry.model_dump(mode="json"), sort_keys=True) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:  # one write, so that two measurements at once do not tear each other's line
        os.write(file.fileno(), line.encode())


def history_of(path: Path) -> list[HistoryEntry]:
    """All measurements that are readable, oldest first."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(HistoryEntry.model_validate_json(line))
        except ValueError:  # a line that was cut off, or is of another version
            continue
    return found

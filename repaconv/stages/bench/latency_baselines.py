"""Baselines and history of latencies: a committed file with one entry per machine, and a log of every measurement."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from repaconv.benchmark.machine_fingerprint import machine_key
from repaconv.core.files import read_artefact, require_file, write_artefact, write_error
from repaconv.results import Baseline, Baselines, BenchArtefact, HistoryEntry, Regression
from repaconv.sources.source_model import ORIGINAL, TRAINING

if TYPE_CHECKING:
    from repaconv.benchmark.latency_statistics import Timed

Verdict = Literal["passed", "failed", "inconclusive", "not verified"]


class BaselineCheck(NamedTuple):
    """The evaluation of a measurement by a baseline.

    Attributes:
        verdict: The verdict.
        compared: The comparison in words.
        hint: What to do about it.
        regression: The change in latency; None if there is nothing to compare with.
        written: Whether the measurement was written as a baseline.
        of: That the baseline belongs to another model file, in words; empty if it does not.
    """

    verdict: Verdict
    compared: str
    hint: str = ""
    regression: Regression | None = None
    written: bool = False
    of: str = ""

    @property
    def description(self) -> str:
        """The evaluation in words."""
        return "; ".join(filter(None, [self.compared, self.of]))

    def changes(self, artefact: BenchArtefact) -> dict[str, Any]:
        """Fields of the artifact that the evaluation changes: regression, verdict, quality, ratio and note."""
        description = self.description if self.regression is None else self.of
        advised = ". ".join(filter(None, [description, self.hint if description else ""]))
        changed: dict[str, Any] = {
            "regression": self.regression,
            "note": "; ".join(filter(None, [artefact.note, advised])),
        }
        if self.verdict == "failed":
            changed["verdict"] = "failed"
        if self.verdict == "inconclusive" and artefact.quality.verdict != "inconclusive":
            found = self.regression
            reason = f"the change from the baseline is known to {found.low:.3f}..{found.high:.3f} only" if found else ""
            reason = reason if found and found.same_machine else self.hint if found else self.compared
            reasons = (*artefact.quality.reasons, reason)
            changed["quality"] = artefact.quality.model_copy(update={"verdict": "inconclusive", "reasons": reasons})
            changed["ratio"] = artefact.ratio and artefact.ratio.under(changed["quality"])
        return changed


def check_baseline(
    path: Path,
    name: str,
    done: BenchArtefact,
    allowed: float,
    *,
    update: bool = False,
    accept_inconclusive: bool = False,
    require: bool = False,
) -> BaselineCheck:
    """Compare a measurement with the baseline in a file, or write it there.

    A baseline of another network is compared with nothing, which is inconclusive. A baseline of other weights of the
    same network is compared, and the difference is noted. On the machine of the baseline the result is passed or
    failed. On another machine, the latencies relative to the reference model are compared with those of every machine
    in the file; since that is rough, the result is passed or inconclusive. An inconclusive measurement never passes and
    is not written.

    Args:
        path: The baseline file; it may not exist yet.
        name: The model's name in the file; see `name_in`.
        done: The measurement.
        allowed: Largest relative increase; 0.05 allows 5%.
        update: Write the measurement instead of comparing it.
        accept_inconclusive: Write it even if it is inconclusive.
        require: Fail if there is no baseline to compare with.
    """
    doubted = done.quality.verdict == "inconclusive"
    if update and doubted and not accept_inconclusive:
        hint = "Measure again, with more rounds or on a quieter machine; --accept-inconclusive writes it all the same."
        return BaselineCheck("inconclusive", "an inconclusive measurement is not written as a baseline", hint)
    known = read_baselines(path)
    of = _other_model(known, name, done)
    if update:
        write_baseline(path, name, done)
        return BaselineCheck(
            "passed", "written as the baseline", written=True, of=of.replace(BASELINE_OF, "the one before was of")
        )
    if of.startswith(OTHER_NETWORK):
        hint = "Give the checkpoint back, or write a baseline of the new model with --update-baseline, and commit it."
        return BaselineCheck("failed" if require else "inconclusive", of, hint)
    found = _compare(known, name, done, allowed)
    if found is None:
        hint = "Run with --update-baseline here, and commit the file."
        none: Verdict = "failed" if require else "inconclusive" if doubted else "not verified"
        return BaselineCheck(none, _why_no_baseline(known, path, name, done), hint)
    hint = "More rounds, or a quieter machine."
    if not found.same_machine:
        hint = "Write a baseline of this machine with --update-baseline."
    if (doubted and found.verdict == "passed") or (not found.same_machine and (doubted or found.verdict == "failed")):
        found = found.model_copy(update={"verdict": "inconclusive"})
    return BaselineCheck(
        found.verdict, found.description, hint if found.verdict == "inconclusive" else "", found, of=of
    )


BASELINE_OF = "the baseline is of"
OTHER_NETWORK = f"{BASELINE_OF} another network"
"""Start of the message about a baseline that is not comparable."""


def _other_model(known: Baselines, name: str, done: BenchArtefact) -> str:
    """Return why the baseline belongs to another network, or to other weights; empty if it belongs to this file.

    The baseline of this machine decides. Without one, a baseline of the same network on any machine is enough.
    """
    here, key, now = machine_key(done.machine), key_of(name, done), done.network
    kept = {machine: entries[key] for machine, entries in known.machines.items() if key in entries}
    kept = {here: kept[here]} if here in kept else kept
    if now is None or not kept:
        return ""
    networks = [each.network for each in kept.values() if each.network]
    if not networks:
        return f"{BASELINE_OF} a model that it does not name, as earlier versions wrote it"
    same = [each for each in networks if not now.is_other(each)]
    if not same:
        return f"{OTHER_NETWORK}: {networks[0].text}; what was measured is {now.text}"
    if any(each.sha256 == now.sha256 for each in same):
        return ""
    return f"{BASELINE_OF} another file (sha256 {same[0].sha256[:12]}, now {now.sha256[:12]})"


def name_in(path: Path, subject: Path) -> str:
    """The model's name in a baseline file: the path of its file, run or recipe, relative to the baseline file.

    Models with the same stem in different folders have different names, and the names are the same in every checkout.
    """
    return Path(os.path.relpath(subject, path.parent)).as_posix()


def key_of(name: str, done: BenchArtefact) -> str:
    """The key of a measurement in a baseline file, within one machine."""
    size = f", {'x'.join(map(str, done.image_size))} px" if done.image_size else ""
    what = f"{name}, {done.variant or done.target} ({done.runtime.partition(' ')[0]}), {done.precision}"
    reference = _reference_name(done) or "nothing"
    beside = TRAINING if reference == ORIGINAL else reference  # as versions before 0.2 wrote it
    return f"{what}, {done.threads} threads, batch {done.batch}{size}, beside {beside}"


def _reference_name(done: BenchArtefact) -> str:
    """Name of the reference model; empty if there is none, or it is the measured model itself."""
    ran = [(row.sha256, row.engine, row.precision) for row in done.latencies]
    return done.latencies[1].name if len(ran) > 1 and ran[1] != ran[0] else ""


def baseline_of(done: BenchArtefact) -> Baseline:
    """A measurement as a baseline entry."""
    subject, *reference = done.latencies if _reference_name(done) else done.latencies[:1]
    return Baseline(
        sha256=subject.sha256,
        network=done.network,
        p50_ms=subject.p50_ms,
        subject_ms=subject.samples_ms,
        reference_sha256=reference[0].sha256 if reference else "",
        reference_ms=reference[0].samples_ms if reference else (),
        session_loads=done.session_loads,
        machine=dict(done.machine),
    )


def read_baselines(path: Path) -> Baselines:
    """Return the baselines in a file; none if there is no file yet.

    Raises:
        Refused: If it is no file of baselines.
    """
    if not os.path.lexists(path):
        return Baselines()
    hint = "Restore it, or give another path with --baseline and write that with --update-baseline."
    require_file(path, hint=hint, code="baseline.unreadable")
    return read_artefact(path, Baselines, what="file of baselines", hint=hint, code="baseline.unreadable")


def write_baseline(path: Path, name: str, done: BenchArtefact) -> None:
    """Write a measurement as this machine's new baseline; the entries of other machines stay."""
    known = read_baselines(path)
    machine = machine_key(done.machine)
    new = {**known.machines.get(machine, {}), key_of(name, done): baseline_of(done)}
    write_artefact(path, known.model_copy(update={"machines": {**known.machines, machine: new}}))


def _compare(known: Baselines, name: str, done: BenchArtefact, allowed: float) -> Regression | None:
    """Compare with this machine's baseline, else with that of the machine that gives the worst result; None if none."""
    from repaconv.benchmark.latency_statistics import regression

    here, now, reference = machine_key(done.machine), baseline_of(done), _reference_name(done)
    fitting = _comparable_baselines(known, name, done)
    machines = [here] if here in fitting else list(fitting) if reference else []
    rows = [
        regression(_timed(now), _timed(fitting[machine]), allowed).model_copy(
            update={"reference": reference, "machine": machine, "same_machine": machine == here}
        )
        for machine in machines
    ]
    return max(rows, key=lambda row: row.ratio, default=None)


def _comparable_baselines(known: Baselines, name: str, done: BenchArtefact) -> dict[str, Baseline]:
    """Comparable baselines by machine; a reference model that was given by file must be the same file."""
    key, now, named = key_of(name, done), baseline_of(done), _reference_name(done) not in ("", TRAINING, ORIGINAL)
    found = {machine: entries[key] for machine, entries in known.machines.items() if key in entries}
    other = {m for m, then in found.items() if now.network and then.network and now.network.is_other(then.network)}
    fits = {m: then for m, then in found.items() if not named or then.reference_sha256 == now.reference_sha256}
    return {machine: then for machine, then in fits.items() if machine not in other}


def _timed(kept: Baseline) -> Timed:
    """Milliseconds of the model and of its reference; a constant second if there is no reference."""
    import numpy as np

    from repaconv.benchmark.latency_statistics import Timed

    subject = np.asarray(kept.subject_ms)
    reference = np.asarray(kept.reference_ms) if kept.reference_ms else np.full_like(subject, 1000.0)
    return Timed(subject, reference, kept.session_loads)


def _why_no_baseline(known: Baselines, path: Path, name: str, done: BenchArtefact) -> str:
    """Why there is no baseline to compare with: the file, the model or the machine is missing."""
    key, here = key_of(name, done), machine_key(done.machine)
    others = [machine for machine, entries in known.machines.items() if key in entries]
    if not path.is_file():
        return f"there is no file {path} of baselines yet"
    if not others:
        return f"{path} has none for this model on any machine ({key})"
    other = (
        f"measured next to another {_reference_name(done)}"
        if _reference_name(done)
        else "with no reference model next to it"
    )
    which = "no baseline that compares" if here in others else "no baseline for this machine"
    return f"{which} ({here}); {path} has some of {', '.join(others)}, {other}"


def remember_measurement(path: Path, done: BenchArtefact) -> None:
    """Append a line to the target's history; folding again keeps the history.

    Raises:
        EnvironmentProblem: If it cannot be written.
    """
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
        image_size=done.image_size,
    )
    line = json.dumps(entry.model_dump(mode="json"), sort_keys=True) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:  # one write, so that concurrent measurements do not interleave their lines
            os.write(file.fileno(), line.encode())
    except OSError as error:
        raise write_error(str(path), error, "Make it writable, or move it away") from error


def history_of(path: Path) -> list[HistoryEntry]:
    """All readable measurements of a history, oldest first."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            found.append(HistoryEntry.model_validate_json(line))
        except ValueError:  # a truncated or damaged line, or one of another version
            continue
    return found

"""Hostile and damaged input, batch by batch; then `benchmarks/results/torture.json` and docs/hostile-input.md.

    PYTHONPATH=tests python -m torture FOLDER [--only WORD] [--batches N]

Batches that are in the folder are not run again: an interrupted run resumes. The result and its page are written once
all batches are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torture import (
    checkpoints,
    crafted_arrays_and_messages,
    damaged_artefacts,
    full_disks,
    graphs,
    killed_long_commands,
    killed_stages,
    preloaded_imports,
)
from torture.result_page import PAGE, RESULT, collated, written
from torture.sandbox import Case, outcomes

AT_ONCE = 100


def batches() -> dict[str, Callable[[], Iterable[Case]]]:
    """By name, and each the same whenever it is run."""
    found: dict[str, Callable[[], Iterable[Case]]] = {
        "hostile": checkpoints.hostile,
        "strange": checkpoints.strange,
        "graphs": graphs.hostile,
        "crafted": crafted_arrays_and_messages.hostile,
    }
    found |= {f"damaged-{n:03}": partial(checkpoints.damaged, AT_ONCE, n) for n in range(100)}
    found |= {f"weights-{n:03}": partial(checkpoints.other_weights, AT_ONCE, n) for n in range(10)}
    found |= {f"graphs-{n:03}": partial(graphs.damaged, AT_ONCE, n) for n in range(20)}
    found |= {f"texts-{n:03}": partial(damaged_artefacts.texts, AT_ONCE, n) for n in range(16)}
    found |= {f"runs-{n:03}": partial(damaged_artefacts.runs_damaged, AT_ONCE, n) for n in range(4)}
    found |= {f"messages-{n:03}": partial(crafted_arrays_and_messages.messages, AT_ONCE, n) for n in range(2)}
    found |= {f"kills-{n:03}": partial(killed_stages.killed, AT_ONCE, n) for n in range(3)}
    found |= {f"kills-{name}": partial(killed_long_commands.killed, name, 20) for name in killed_long_commands.STAGES}
    found |= {f"disks-{name}": partial(full_disks.full, name) for name in full_disks.STAGES}
    return found


def missing(folder: Path) -> dict[str, Callable[[], Iterable[Case]]]:
    """The batches whose results are not in the folder."""
    return {name: cases for name, cases in batches().items() if not (folder / f"{name}.json").is_file()}


def run(name: str, cases: list[Case], at: Path) -> None:
    """One batch, and what became of it."""
    counts: Counter[tuple[str, str]] = Counter()
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        for outcome in outcomes(cases, Path(scratch)):
            counts[outcome.kind, outcome.ended if not outcome.fault else "fault"] += 1
            if outcome.fault:
                faults.append(outcome._asdict())
                sys.stdout.write(f"{name}: {outcome.name}: {outcome.ended}: {outcome.detail[-800:]}\n")
    rows = [{"kind": kind, "ended": ended, "cases": times} for (kind, ended), times in sorted(counts.items())]
    at.write_text(json.dumps({"rows": rows, "faults": faults}, indent=1) + "\n")
    sys.stdout.write(f"{name}: {dict(Counter(row['ended'] for row in rows))} {len(faults)} faults\n")
    sys.stdout.flush()


def main() -> int:
    """Exit 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the results of batches")
    parser.add_argument("--only", metavar="WORD", default="", help="batches whose names contain this")
    parser.add_argument("--batches", type=int, default=1 << 30, help="stop after this many")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    preloaded_imports.up()
    left = missing(asked.folder)
    for name, cases in [each for each in left.items() if asked.only in each[0]][: asked.batches]:
        run(name, list(cases()), (asked.folder / f"{name}.json").absolute())
    found = collated(asked.folder)
    if left := missing(asked.folder):
        sys.stdout.write(f"{len(left)} batches are missing: the page is not written\n")
    else:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(written(found))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

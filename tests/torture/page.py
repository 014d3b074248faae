"""The result of `make torture`, and docs/torture.md, which is made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "torture.json"
PAGE = ROOT / "docs" / "torture.md"
ENDS = ("refused", "the same", "other", "sound", "fault")
HEAD = """# Torture

What `make torture` did to repaconv, and how it ended; made from `benchmarks/results/torture.json`, do not edit. Each
case is read in a process of its own making with little memory beside four times its file, 20 seconds of the processor,
and an ear on every command, connection and file that the interpreter opens. A slice of it runs with the tests, and each
fault that it found has a test there (`tests/test_torture.py`).

*Refused*: one sentence with a hint, a code and the right exit code, and nothing written. *The same*: read, and each
tensor is the one that was saved. *Other*: read, of a container that has no checksums, with other values in it: nobody
can tell. *Sound*: folded, and proved as any fold is. *Fault*: anything else: a traceback, a process that died or hung,
a command that ran, something written by what was refused, other weights out of a container with checksums. Of kills:
*sound* is killed, with nothing left that is taken for whole, and completed by the same command; *the same* was done
before. Of full disks, with each number of pages and of files that is left: *sound* is done in that room; *refused* is
one sentence, exit 3, nothing that is taken for whole, and done by the same command once there is room. A batch in which
there was a fault was run again on what was mended.

What this found was mended: a picture that was PostScript ran Ghostscript; a file that was cut while it was mapped ended
the process; an archive without an end was hashed for ever; names that no file can have, texts where arrays are
expected, indices without a row ended in a traceback; NaN was compared, bombs were unpacked, a job could name files of
the worker; quantizing on a full disk ended in a traceback; a thread that found no memory was waited for without end;
ONNX Runtime told its maker of each graph; names of a file were markup, and escapes, on a terminal; an estimate of a
graph that is not sound ended in a traceback.

| what was read | cases | refused | the same | other | sound | faults |
|---|---|---|---|---|---|---|
"""


PLANTED = ROOT / "benchmarks" / "results" / "planted.json"
MISTAKES = """
## Mistakes of our own

`make mutants` changes one thing in one function while it runs (an operator, a sign, a term, an index, a comparison, the
order of two), and folds small networks, and exports graphs, that come by that very line. No test looks at what comes of
it: only the chain of proof, as it runs for everybody.

*Caught*: a link failed. *Stopped*: a refusal, or an exception, before anything was written. *As good*: other bytes, and
`verify` by code without the change finds them sound: another way to write the same, or a fold left out. *The same*: the
same bytes; what was changed decides nothing for these networks. *Survived*: written as sound, and it is not.

| where | mistakes | caught | stopped | as good | the same | survived |
|---|---|---|---|---|---|---|
"""
FATES = ("caught", "stopped", "as good", "the same", "survived")
ROOMS = {
    "the algebra and the papers": ("affine.py", "convolution.py", "methods"),
    "graphs": ("folds", "graphs", "forms"),
}
WHY = {
    "Join.divisor": "what the scores of a trained network are divided by stands in no tensor: it is the network, not "
    "its fold, and both are built by it. A recorded output tells (`verify --inputs`, `fold --identify`).",
}
"""Of what survived, by function: why no proof of that kind can see it, and what can."""


def mistakes(rows: list[dict[str, Any]]) -> str:
    """The section of them."""
    lines = []
    for where, rooms in ROOMS.items():
        fates = [row["ended"] for row in rows if row["file"].split("/")[0] in rooms]
        lines.append(f"| {where} | {len(fates)} | {' | '.join(str(fates.count(fate)) for fate in FATES)} |")
    left = [row for row in rows if row["ended"] == "survived"]
    told = [
        f"- `{row['file']}`, `{row['function']}`: `{row['was']}` -> `{row['becomes']}`: {WHY[row['function']]}"
        for row in left
    ]
    return MISTAKES + "\n".join(lines) + "\n" + ("\nWhat survived:\n\n" + "\n".join(told) + "\n" if told else "")


def collated(folder: Path) -> dict[str, Any]:
    """All batches as one."""
    kinds: dict[str, dict[str, int]] = {}
    faults: list[Any] = []
    for path in sorted(folder.glob("*.json")):
        batch = json.loads(path.read_text())
        faults += batch["faults"]
        for row in batch["rows"]:
            ends = kinds.setdefault(row["kind"], dict.fromkeys(ENDS, 0))
            ends[row["ended"]] += row["cases"]
    return {"kinds": kinds, "faults": [[fault["kind"], fault["name"], fault["ended"]] for fault in faults]}


def written(found: dict[str, Any]) -> str:
    """The page."""
    lines = []
    for kind, ends in found["kinds"].items():
        figures = " | ".join(f"{ends[end]:,}" if ends[end] else "0" for end in ENDS)
        lines.append(f"| {kind} | {sum(ends.values()):,} | {figures} |")
    total = {end: sum(ends[end] for ends in found["kinds"].values()) for end in ENDS}
    figures = " | ".join(f"{total[end]:,}" for end in ENDS)
    lines.append(f"| **all** | {sum(total.values()):,} | {figures} |")
    planted = mistakes(json.loads(PLANTED.read_text())) if PLANTED.is_file() else ""
    return HEAD + "\n".join(lines) + "\n" + planted

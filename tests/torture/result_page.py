"""The result of `make torture` as a page: docs/hostile-input.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "torture.json"
PAGE = ROOT / "docs" / "hostile-input.md"
ENDS = ("refused", "the same", "other", "sound", "fault")
HEAD = """# Hostile and damaged input

What `make torture` did to repaconv, and the result. It writes this page from `benchmarks/results/torture.json`; do not
edit it. Each case is read in its own process, with memory for four times its file, 20 seconds of CPU time, and a hook
on every command, connection and file that the interpreter opens. A part of it runs with the tests. Each defect that was
found has a test (`tests/test_torture.py`).

| Result | Meaning |
|---|---|
| refused | one sentence with a hint, an error code and the right exit code; nothing written |
| the same | read, and every tensor is as it was saved |
| other | read from a container without checksums, with other values: this cannot be detected |
| sound | folded, and verified like any fold |
| fault | anything else: a traceback, crash or hang, a command that ran, a file of a refused case, wrong weights |

For kills, *sound* means: killed, nothing left that looks complete, and completed by the same command; *the same* means
that it was done before. Full disks are tried with every number of free pages and files; there *sound* means that the
command fits, and *refused* means one sentence, exit code 3, nothing left that looks complete, and success with the same
command once there is room. A batch with a fault was repeated after the fix.

Found and fixed: a picture that was PostScript ran Ghostscript; a file that was truncated while mapped crashed the
process; an endless archive was hashed forever; impossible file names, text in place of arrays and indices without a row
ended in a traceback; NaN was compared, decompression bombs were unpacked, a cluster job could name files of the worker;
quantizing on a full disk ended in a traceback; a thread without memory was waited for forever; ONNX Runtime reported
each graph to its maker; names from a file were interpreted as markup and escapes on a terminal; an estimate of an
invalid graph ended in a traceback.

| Input | Cases | refused | the same | other | sound | faults |
|---|---|---|---|---|---|---|
"""


PLANTED = ROOT / "benchmarks" / "results" / "fold_mutants.json"
MISTAKES = """
## Planted mistakes in the code

`make mutants` changes one thing in one function at run time (an operator, a sign, a term, an index, a comparison, the
order of two), and folds and exports small networks that execute that line. No test looks at the result; only the
verification chain does, as it runs for every user.

| Result | Meaning |
|---|---|
| caught | a link failed |
| stopped | a refusal or an exception, before anything was written |
| as good | other bytes, and `verify` by unchanged code passes: another way to write the same, or a fold left out |
| the same | the same bytes; the change decides nothing for these networks |
| survived | written as verified, and wrong |

| Where | Mistakes | caught | stopped | as good | the same | survived |
|---|---|---|---|---|---|---|
"""
FATES = ("caught", "stopped", "as good", "the same", "survived")
MODULE_GROUPS = {
    "the algebra and the papers": ("affine.py", "convolution.py", "algebra", "methods"),
    "what rewrites a graph": ("folds", "forms", "rewrites"),
    "what reads a graph (shapes, indexing, attention) and writes it": ("graphs", "graph", "onnx_export"),
}
WHY = {
    "Join.divisor": "no tensor contains the divisor of the scores: it belongs to the network, not to its fold, and "
    "both are built with it. A recorded output shows it (`verify --inputs`, `fold --identify`).",
}
"""Of what survived, by function: why no proof of that kind can see it, and what can."""


def mistakes(rows: list[dict[str, Any]]) -> str:
    """The section of them."""
    lines = []
    for where, groups in MODULE_GROUPS.items():
        fates = [row["ended"] for row in rows if row["file"].split("/")[0] in groups]
        lines.append(f"| {where} | {len(fates)} | {' | '.join(str(fates.count(fate)) for fate in FATES)} |")
    left = [row for row in rows if row["ended"] == "survived"]
    texts = [
        f"- `{row['file']}`, `{row['function']}`: `{row['was']}` -> `{row['becomes']}`: {WHY[row['function']]}"
        for row in left
    ]
    return MISTAKES + "\n".join(lines) + "\n" + ("\nSurvived:\n\n" + "\n".join(texts) + "\n" if texts else "")


CODE_MUTANTS = ROOT / "benchmarks" / "results" / "code_mutants.json"
ANOTHER = """
## Mutants of another making

`make code-mutants` applies other operators to all code that folds, rewrites, reads or exports a network, tables of
modules and defaults of arguments included: two arguments swapped, a condition negated, a number off by one, and
something dropped (a term, an element, a keyword, a statement, an early exit). {count} mutants were drawn by a seed,
about as many of each folder and operator, from all whose line one of {networks} small networks runs: arbitrary graphs,
checkpoints of all methods and live modules. Each is tried on up to four of these networks, and the worst counts. Graphs
are folded, and exported three times: as usual, with every rewrite, and in opset 14.

What was written is compared with the original network by unchanged code in another process, under ONNX Runtime and in
float64, on inputs of other sizes, means and ranges than verification takes. A number is wrong if it is off by more than
1e-5 of the largest next to it, plus 16 times the original's own FP32 rounding (live modules, in float64: 1e-9). Sound
folds reach at most {sound:.0%} of that.

| Result | Meaning |
|---|---|
| caught | a link failed: nothing was written, or the rewrite was discarded |
| stopped | a refusal, an exception or an endless loop, or a rewrite left out because of an exception |
| as good | other bytes, and the same function: another way to write the same, or something not folded |
| the same | the same bytes; the change decides nothing for these networks |
| survived | written as verified, and wrong |

| Operator | Mutants | caught | stopped | as good | the same | survived |
|---|---|---|---|---|---|---|
{operators}

| Where | Mutants | caught | stopped | as good | the same | survived |
|---|---|---|---|---|---|---|
{groups}

Most mutants stop by themselves or decide nothing: {known} ended as caught, as good or survived. No survivor in
{count} means less than {bound:.1%} of such mutants with 95% confidence. Lossy exports (INT8, FP16, BF16) are not among
the runs.{left_out}
"""


def code_mutants(found: dict[str, Any]) -> str:
    """The section of mutants of another making."""
    rows = found["mutants"]

    def table(key: str) -> str:
        lines = []
        for kind in dict.fromkeys(row[key] for row in rows):
            fates = [row["ended"] for row in rows if row[key] == kind]
            lines.append(f"| {kind} | {len(fates)} | {' | '.join(str(fates.count(fate)) for fate in FATES)} |")
        return "\n".join(lines)

    why = [f"{name} ({reason})" for name, reason in found.get("left_out", {}).items()]  # older results lack it
    left_out = f" Networks of the list that were left out: {', '.join(why)}." if why else ""
    decided = sum(row["ended"] in ("caught", "as good", "survived") for row in rows)
    section = ANOTHER.format(
        count=len(rows), networks=found["networks"], sound=found["sound"], known=decided, operators=table("operator"),
        groups=table("room"), bound=1 - 0.05 ** (1 / len(rows)), left_out=left_out,
    )  # fmt: skip
    survivors = [row for row in rows if row["ended"] == "survived"]
    left = [f"- `{row['file']}:{row['line']}`: `{row['was']}` -> `{row['becomes']}`" for row in survivors]
    return section + ("\nSurvived:\n\n" + "\n".join(left) + "\n" if left else "")


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
    others = code_mutants(json.loads(CODE_MUTANTS.read_text())) if CODE_MUTANTS.is_file() else ""
    return HEAD + "\n".join(lines) + "\n" + planted + others

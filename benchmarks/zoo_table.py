"""The page of the docs on the zoo, from its results: `python benchmarks/zoo_table.py` writes docs/zoo.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from zoo import FOLDED, MEASURED, SLOWER, rows

PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
HEAD = """# Network zoo

What `repaconv fold model.onnx` does to networks of timm, torchvision and transformers. Weights, statistics and affines
are random with a fixed seed. PyTorch exported each network in float64 at the smallest image that it accepts. `make
bench-zoo` continues where it stopped and writes this page from `benchmarks/results/zoo.jsonl`.
"""
COLUMNS = (
    "network",
    "parameters: module, graph, folded (timm's own)",
    "multiplications",
    "float64",
    "CPU time / onnxsim",
)
Speeds = dict[str, dict[str, dict[str, Any]]]
"""Rows of what was measured, by processor family and network."""


def page(folds: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]]) -> str:
    """The whole page.

    Args:
        folds: The rows of networks that were folded.
        speeds: Of those that were measured.
    """
    done = [row for row in folds if "problem" not in row]
    fast: Speeds = {}
    for row in speeds:
        if "problem" not in row:
            fast.setdefault(row["family"], {})[row["name"]] = row
    columns = [*COLUMNS, *(f"speedup, {family}" for family in fast)]
    told = [HEAD, _summed(folds, done, fast), f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"]
    told += [_line(row, [of.get(row["name"]) for of in fast.values()]) for row in done]
    if bad := [row for row in folds if "problem" in row]:
        told += ["", "Not folded:", "", *(f"- {row['name']}: {row['problem']}" for row in bad)]
    return "\n".join([*told, ""])


def _summed(folds: Sequence[dict[str, Any]], done: list[dict[str, Any]], fast: Speeds) -> str:
    """In words."""
    exact = [row["float64"] for row in done if row["float64"] is not None]
    more = [row["name"] for row in done if row["macs"] and row["macs"][1] > row["macs"][0]]
    over = [row["name"] for row in done if row["reparameterized"] and row["parameters"][1] > row["reparameterized"]]
    times = [row["fold"]["cpu_s"] / row["onnxsim"]["cpu_s"] for row in done]
    proved = sum(row["verdict"] == "passed" for row in done)
    idle = sum(not row["applied"] for row in done)
    nothing = f" In {idle} there is nothing to fold beyond what torch's exporter does." if idle else ""
    lines = [
        f"{proved} of {len(folds)} are folded and verified.{nothing} {len(exact)} were also evaluated in float64, "
        f"where the fold is off by at most {max(exact, default=0.0):.0e} of the largest output.",
        f"More multiplications than before: {', '.join(more) or 'none'}. More parameters than timm's "
        f"`reparameterize_model` leaves: {', '.join(over) or 'none'}.",
        f"The command takes {median(times):.1f} times the CPU time of `onnxsim` (median; at most "
        f"{max(times):.1f}), verification included, without measurement.",
    ]
    lines += [_measured(family, list(of.values())) for family, of in fast.items()]
    lines.append(
        "Memory layout differs between session loads, which shifts latency by a few percent. Every ratio is the mean "
        "over several loads of both in turn, with the interval of the mean. The fold's own measurement is off; a "
        f"network below {SLOWER} is folded once more with it."
    )
    return "\n\n".join(lines) + "\n"


def _measured(family: str, fast: list[dict[str, Any]]) -> str:
    """In words, on one processor family."""
    mean = exp(sum(log(row["ratio"]) for row in fast) / len(fast))
    ratios, same = [row["ratio"] for row in fast], sum(not row["openings"] for row in fast)
    again = sum("without_its_measurement" in row for row in fast)
    return (
        f"Speedup over the same graph simplified by onnxsim, interleaved, one thread, {fast[0]['cpu']} ({family}): "
        f"**{mean:.3f}x** (geometric mean of {len(fast)}), the slowest {min(ratios):.3f}x; {same} are the same graph "
        f"in both, and {again} were folded once more with the fold's own measurement."
    )


def _line(row: dict[str, Any], speeds: Sequence[dict[str, Any] | None]) -> str:
    counts = [row["module"], *row["parameters"]]
    own = f" ({row['reparameterized']:,})" if row["reparameterized"] else ""
    macs = "; ".join(f"{count / 1e6:,.1f} M" for count in dict.fromkeys(row["macs"])) if row["macs"] else ""
    exact = f"{row['float64']:.0e}" if row["float64"] is not None else ""
    times = f"{row['fold']['cpu_s'] / row['onnxsim']['cpu_s']:.1f}"
    faster = " | ".join(map(_faster, speeds))
    told = ", ".join(f"{count:,}" for count in counts) + own
    told += "" if row["applied"] else "; nothing to fold"
    return f"| {row['name']} | {told} | {macs} | {exact} | {times} | {faster} |"


def _faster(speed: dict[str, Any] | None) -> str:
    if speed is None:
        return ""
    told = f"{speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"
    return told if speed["openings"] else "the same graph"


if __name__ == "__main__":
    PAGE.write_text(page(rows(FOLDED), rows(MEASURED)))

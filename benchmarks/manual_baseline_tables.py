"""What `manual_baseline_speed.py` prints: its rows, a summary against the required speedups, and docs/benchmarks.md."""

from __future__ import annotations

from math import exp, log
from typing import Any

MANUAL_BASELINE, REPACONV = "hand-made", "repaconv"
MEAN_BAR = 1.15
"""Required geometric mean of the speedups over the methods."""

Row = dict[str, Any]


def summary_line(row: Row) -> str:
    """A row as one line of text."""
    faster, share, same = row["ratio"], row["share_of_peak"], row["agreement"]
    bar = "" if row["bar"] is None else f", bar {row['bar']}"
    return (
        f"{row['method']} {row['model']}, {_place(row['batch'], row['threads'])}: "
        f"{faster['median']:.3f} ({faster['low']:.3f} to {faster['high']:.3f})x{bar}; "
        f"{row['p50_ms'][MANUAL_BASELINE]:.2f} -> {row['p50_ms'][REPACONV]:.2f} ms, "
        f"{share[MANUAL_BASELINE]:.0%} -> {share[REPACONV]:.0%} of {row['peak_gflops']:.0f} GFLOP/s; "
        f"{same['agreeing']} of {same['images']} images the same, {same['max_rel_error']:.0e} apart at most; "
        f"{row['measurement']} {'; '.join(row['reasons'])}"
    ).rstrip()


def _place(batch: int, threads: int) -> str:
    return f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """Every required speedup, met or missed, and the geometric mean over the methods, each counted once."""
    chosen = [row for row in rows if row["bar"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in chosen))
    by_method = {
        method: round(_geometric([row["ratio"]["median"] for row in chosen if row["method"] == method]), 4)
        for method in methods
    }
    mean = round(_geometric(list(by_method.values())), 4)
    slowest = min(row["ratio"]["median"] for row in chosen)
    bars = [(f"{row['method']} {row['model']}", row["ratio"]["median"], row["bar"]) for row in chosen]
    bars += [("geometric mean over the methods", mean, MEAN_BAR), ("the least of all", slowest, 1.0)]
    return {
        "by_method": by_method,
        "geometric_mean": mean,
        "met": all(found >= bar for _, found, bar in bars),
        "told": [f"{'met   ' if found >= bar else 'MISSED'} {found:.3f} of {bar}: {what}" for what, found, bar in bars],
    }


def _geometric(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def markdown(result: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md: the first batch and threads in full, the others' ratios."""
    rows = result["rows"]
    first = (rows[0]["batch"], rows[0]["threads"])
    lines = [
        "| Method | Model | Manual baseline | repaconv | Speedup | Share of the GEMM peak |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if (row["batch"], row["threads"]) == first:
            times, share, faster = row["p50_ms"], row["share_of_peak"], row["ratio"]
            lines.append(
                f"| {row['method']} | {row['model']} | {times[MANUAL_BASELINE]:.2f} ms | {times[REPACONV]:.2f} ms "
                f"| {faster['median']:.3f} ({faster['low']:.3f} to {faster['high']:.3f}) "
                f"| {share[MANUAL_BASELINE]:.0%} -> {share[REPACONV]:.0%} |"
            )
    mean = result["summary"]["geometric_mean"]
    lines.append(f"| geometric mean over the methods | | | | **{mean:.3f}** | |")
    others = sorted({(row["batch"], row["threads"]) for row in rows} - {first})
    return "\n".join([*lines, *(["", *_others(rows, others)] if others else [])])


def _others(rows: list[Row], others: list[tuple[int, int]]) -> list[str]:
    """Speedups at the other batch sizes and thread counts, one column for each."""
    found = {(row["method"], row["model"], row["batch"], row["threads"]): row["ratio"]["median"] for row in rows}
    names = list(dict.fromkeys((row["method"], row["model"]) for row in rows))
    heads = [_place(batch, threads) for batch, threads in others]
    lines = [f"| Speedup | {' | '.join(heads)} |", "|---" * (1 + len(others)) + "|"]
    for name in names:
        cells = [f"{found[name + place]:.3f}" if name + place in found else "-" for place in others]
        lines.append(f"| {' '.join(name)} | {' | '.join(cells)} |")
    return lines

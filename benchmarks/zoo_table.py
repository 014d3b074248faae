"""Write docs/zoo.md from the results of `zoo.py`: `python benchmarks/zoo_table.py`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import task_zoo
from zoo import COSTS, FOLDED, MEASURED, SLOWER, rows

PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
HEAD = """# Network zoo

What `repaconv fold model.onnx` does to networks of timm, torchvision and transformers. Weights, statistics and affines
are random with a fixed seed. PyTorch exported each network in float64 at the smallest image that it accepts. `make
bench-zoo` continues where it stopped and writes this page from `benchmarks/results/zoo.jsonl`. Networks of
[other tasks](#networks-of-other-tasks) are below.
"""
TASKS = """## Networks of other tasks

Networks of Ultralytics, torchvision, transformers, segmentation-models-pytorch, timm, spandrel and docTR with random
weights, and trained ONNX files of PP-OCR from RapidOCR, whose sizes are dynamic. Reduced networks are labeled, such as
*narrow*. Each network was folded in up to three ways: `fold model.onnx` from PyTorch's float32 export, `--arch`, and
`repaconv.fold(module)`; an empty cell was not tried yet. The first two columns say on how many of five seeds `verify`
passed; *nothing to fold* is where PyTorch's exporter left nothing. The column *module* is the largest difference
between the module and the module that was folded in float64, over five seeds, relative to the largest output.
Parameters and nodes are those of the ONNX graph before and after the fold.

The speedups are measured at the second size: the exported graph over the original graph simplified by onnxsim, both on
ONNX Runtime; and the exported graph for OpenVINO over the original graph, both on OpenVINO; interleaved over several
session loads, one thread. `make bench-tasks` continues where it stopped and writes this section from
`benchmarks/results/task_networks.jsonl` and `benchmarks/results/task_speed.jsonl`.
"""
FILES = "RapidOCR"
"""The package whose networks are ONNX files, which have one door."""
TASK_COLUMNS = ("network", "from", "pixels", "parameters", "nodes", "`fold model.onnx`", "`--arch`", "module")
COLUMNS = (
    "network",
    "parameters: module, graph, folded (timm's own)",
    "multiplications",
    "float64",
    "CPU time / onnxsim",
)
Speeds = dict[str, dict[str, dict[str, Any]]]
"""Rows of what was measured, by processor family and network."""


def page(
    folds: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]] = ()
) -> str:
    """The whole page.

    Args:
        folds: The rows of networks that were folded.
        speeds: Of those that were measured.
        costs: Of those whose fold was measured next to onnxsim, in turn.
    """
    cost = {row["name"]: row for row in costs if "problem" not in row}
    done = [row for row in folds if "problem" not in row]
    fast: Speeds = {}
    for row in speeds:
        if "problem" not in row:
            fast.setdefault(row["family"], {})[row["name"]] = row
    columns = [*COLUMNS, *(f"speedup, {family}" for family in fast)]
    lines = [HEAD, _summed(folds, done, fast, cost), f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"]
    lines += [_line(row, [of.get(row["name"]) for of in fast.values()], cost.get(row["name"])) for row in done]
    if bad := [row for row in folds if "problem" in row]:
        lines += ["", "Not folded:", "", *(f"- {row['name']}: {row['problem']}" for row in bad)]
    return "\n".join([*lines, ""])


def _summed(
    folds: Sequence[dict[str, Any]], done: list[dict[str, Any]], fast: Speeds, cost: Mapping[str, dict[str, Any]]
) -> str:
    """In words."""
    exact = [row["float64"] for row in done if row["float64"] is not None]
    more = [row["name"] for row in done if row["macs"] and row["macs"][1] > row["macs"][0]]
    over = [row["name"] for row in done if row["reparameterized"] and row["parameters"][1] > row["reparameterized"]]
    times = [_ratio(row, "cpu_s") for row in done]
    proved = sum(row["verdict"] == "passed" for row in done)
    idle = sum(not row["applied"] for row in done)
    nothing = f" In {idle} there is nothing to fold beyond what torch's exporter does." if idle else ""
    lines = [
        f"{proved} of {len(folds)} are folded and verified.{nothing} {len(exact)} were also evaluated in float64, "
        f"where the fold is off by at most {max(exact, default=0.0):.0e} of the largest output.",
        f"More multiplications than before: {', '.join(more) or 'none'}. More parameters than timm's "
        f"`reparameterize_model` leaves: {', '.join(over) or 'none'}.",
        *_told_costs(cost),
    ]
    if len(cost) < len(done):
        lines.append(
            f"{'Older times' if cost else 'Times'} (in brackets) are of a single run of each command, on all networks: "
            f"{median(times):.1f} times the CPU time of `onnxsim` (median; at most {max(times):.1f})."
        )
    most = max(map(len, fast.values()), default=0)
    for family, of in fast.items():
        few = " Measured were those that gain least on the other CPUs, and some others." if len(of) < most / 2 else ""
        lines.append(_measured(family, list(of.values())) + few)
    lines.append(
        "Memory layout differs between session loads, which shifts latency by a few percent. Every ratio is the mean "
        "over several loads of both in turn, with the interval of the mean. The fold's own measurement is off; a "
        f"network below {SLOWER} is folded once more with it."
    )
    return "\n\n".join(lines) + "\n"


def _told_costs(cost: Mapping[str, dict[str, Any]]) -> list[str]:
    """What folding takes, in words; nothing if that was not measured."""
    if not cost:
        return []
    times = {name: _ratio(row, "cpu_s") for name, row in cost.items()}
    memory = [_ratio(row, "memory_mib") for row in cost.values()]
    dearest = sorted(times, key=lambda name: times[name])[-3:][::-1]
    one = next(iter(cost.values()))
    return [
        f"`repaconv fold` takes {median(times.values()):.2f} times the CPU time of `onnxsim` (median of {len(times)} "
        f"networks, {sum(time <= 1 for time in times.values())} of them at most as much, "
        f"{sum(time > 2 for time in times.values())} more than twice as much; the most: "
        f"{', '.join(f'{times[name]:.1f} {name}' for name in dearest)}) and {min(memory):.1f} to {max(memory):.1f} "
        f"times its memory, verification included, without measurement of speed; both in turn, {one['cpu']} "
        f"({one['family']}). ViT-L (304 M parameters, a file of 1.2 GB) takes 5.0 GiB. Most of those above twice "
        "round so badly with random weights that float64 evaluates nearly all inputs; CoaT-Tiny has 800 small layers."
    ]


def _ratio(row: dict[str, Any], of: str) -> float:
    return float(row["fold"][of] / row["onnxsim"][of])


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


def _line(row: dict[str, Any], speeds: Sequence[dict[str, Any] | None], cost: dict[str, Any] | None) -> str:
    counts = [row["module"], *row["parameters"]]
    own = f" ({row['reparameterized']:,})" if row["reparameterized"] else ""
    macs = "; ".join(f"{count / 1e6:,.1f} M" for count in dict.fromkeys(row["macs"])) if row["macs"] else ""
    exact = f"{row['float64']:.0e}" if row["float64"] is not None else ""
    times = f"{_ratio(cost, 'cpu_s'):.1f}" if cost else f"({_ratio(row, 'cpu_s'):.1f})"
    faster = " | ".join(map(_faster, speeds))
    message = ", ".join(f"{count:,}" for count in counts) + own
    message += "" if row["applied"] else "; nothing to fold"
    return f"| {row['name']} | {message} | {macs} | {exact} | {times} | {faster} |"


def _faster(speed: dict[str, Any] | None) -> str:
    if speed is None:
        return ""
    message = f"{speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"
    return message if speed["openings"] else "the same graph"


class TaskRows(NamedTuple):
    """All rows of one network: by door, and of its speed by processor family."""

    doors: dict[str, dict[str, Any]]
    speeds: dict[str, dict[str, Any]]

    @property
    def about(self) -> dict[str, Any]:
        """What the network is; every row says it."""
        found: dict[str, Any] = next(iter((*self.doors.values(), *self.speeds.values())))
        return found


def tasks(folds: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]]) -> str:
    """The section of networks of other tasks.

    Args:
        folds: The rows of `task_zoo.py`, one per network and door.
        speeds: Its rows of what was measured.
    """
    networks: dict[str, TaskRows] = {}
    for row in folds:
        door, _, name = row["name"].partition(":")
        networks.setdefault(name, TaskRows({}, {})).doors[door] = row
    for row in speeds:
        if "problem" not in row:
            networks.setdefault(row["name"], TaskRows({}, {})).speeds[row["family"]] = row
    families = list(dict.fromkeys(family for each in networks.values() for family in each.speeds))
    lines = [TASKS, _summed_tasks(networks, families)]
    columns = [*TASK_COLUMNS, *(f"{what}, {family}" for family in families for what in ("speedup", "OpenVINO"))]
    for task in dict.fromkeys(each.about["task"] for each in networks.values()):
        of_task = [each for each in networks.values() if each.about["task"] == task]
        lines += [f"### {task.capitalize()}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [*(_task_line(each, families) for each in of_task), ""]
    if left := [line for each in networks.values() for line in _not_folded(each)]:
        lines += ["### Not folded, or not on every seed", "", *left, ""]
    return "\n".join(lines)


def _summed_tasks(networks: dict[str, TaskRows], families: Sequence[str]) -> str:
    """In words."""
    doors = [row for each in networks.values() for row in each.doors.values()]
    passed = sum(_passes(row) for row in doors)
    whole = sum({*each.doors} == {"graph", "arch", "module"} for each in networks.values())
    exported = sum(row.get("export") == "passed" or "exported_nodes" in row for row in doors)
    built = sum(each.about["package"] != FILES for each in networks.values())
    message = (
        f"{len(networks)} networks, {len(doors)} folds of them: {passed} without a wrong number, "
        f"{sum('refused' in row for row in doors)} refused, {sum('problem' in row for row in doors)} ended otherwise. "
        f"{whole} of the {built} networks that are not ONNX files were folded in all three ways. "
        f"{exported} of the folds were also exported"
    )
    earlier = "; those of a graph or of `--arch` that were not are of an earlier version of this benchmark"
    lines = [message + (earlier if exported < passed else "") + "."]
    for family in families:
        fast = [each.speeds[family] for each in networks.values() if family in each.speeds]
        for key, what in (("onnxsim", "onnxsim's graph on ONNX Runtime"), ("openvino", "the original on OpenVINO")):
            ratios = [row[key]["ratio"] for row in fast]
            mean = exp(sum(map(log, ratios)) / len(ratios))
            message = (
                f"Speedup over {what}, {fast[0]['cpu']} ({family}): **{mean:.3f}x** (geometric mean of {len(ratios)}), "
                f"the slowest {min(ratios):.3f}x. The interval is above 1 for "
                f"{sum(row[key]['low'] > 1 for row in fast)} of them, and below 1 for "
                f"{sum(row[key]['high'] < 1 for row in fast)}."
            )
            slow = [f"{row['title']} ({row[key]['ratio']:.3f})" for row in fast if row[key]["ratio"] < SLOWER]
            lines.append(f"{message} Below {SLOWER}: {', '.join(slow) or 'none'}.")
    return "\n\n".join(lines) + "\n"


MODULE_ERROR = 1e-9
"""What a fold of a module in float64 may be off by, of the largest output; deep random networks amplify rounding."""


def _passes(row: dict[str, Any]) -> bool:
    """Whether the row of a door shows a fold that computes the same."""
    if "verify" in row:
        return all(each["verdict"] == "passed" for each in row["verify"].values())
    return "float64" in row and row["float64"] < MODULE_ERROR


def _task_line(network: TaskRows, families: Sequence[str]) -> str:
    about, graph = network.about, network.doors.get("graph", {})
    sizes = dict.fromkeys(
        "x".join(map(str, row["size"])) for row in (*network.doors.values(), *network.speeds.values())
    )
    cells = [about["title"], about["package"], ", ".join(sizes)]
    cells += [", ".join(f"{count:,}" for count in dict.fromkeys(graph.get(key, ()))) for key in ("parameters", "nodes")]
    cells += [_door(network.doors.get(door)) for door in ("graph", "arch", "module")]
    for family in families:
        speed = network.speeds.get(family, {})
        cells += [_faster(speed.get(key)) for key in ("onnxsim", "openvino")]
    return f"| {' | '.join(cells)} |"


def _door(row: dict[str, Any] | None) -> str:
    """What a door gave, in a few words."""
    if row is None:
        return ""
    if "verify" in row:
        seeds = [each["verdict"] == "passed" for each in row["verify"].values()]
        nothing = (
            ""
            if row.get("applied", any(row[key][0] != row[key][1] for key in ("parameters", "nodes")))
            else "nothing to fold, "
        )
        return f"{nothing}{sum(seeds)} of {len(seeds)}"
    return f"{row['float64']:.0e}" if "float64" in row else "refused" if "refused" in row else "failed"


def _not_folded(network: TaskRows) -> list[str]:
    """A line for each door that gave no network, or one that did not pass on all seeds."""
    lines = []
    for door, row in network.doors.items():
        said = row.get("refused") or row.get("problem")
        if not said and not _passes(row):
            links = [link for each in row.get("verify", {}).values() for link in each.get("links", [])]
            said = "; ".join(dict.fromkeys(links)) or f"off by {row['float64']:.0e}"
        if said:
            lines.append(f"- {network.about['title']}, {door}: {said}")
    return lines


def whole() -> str:
    """The page of both."""
    return (
        page(rows(FOLDED), rows(MEASURED), rows(COSTS)) + "\n" + tasks(rows(task_zoo.FOLDED), rows(task_zoo.MEASURED))
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(whole())

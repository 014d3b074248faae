"""Throughput of one stream per core compared with one stream, and the limit that this machine's cores set.

    PYTHONPATH=benchmarks python benchmarks/throughput.py [--nets NAME ...] [--page PAGE.md] [-o result.json]

Each network, as `export` writes it for an x86-64 runtime, runs `bench --objective throughput` with batch size 1. The
limit of the cores is measured with the same graph in a process per core against one such process alone, alternating.
What these processes lack to the number of cores, no runtime can reach.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from competing_toolchains.method_networks import METHOD_NETWORKS
from preset_speed import TARGETS, opened

import repaconv
from repaconv.benchmark.latency_statistics import ratio
from repaconv.benchmark.machine_fingerprint import machine_key
from repaconv.core.files import canonical_json
from repaconv.stages.shared.target_lookup import load_target

ROUNDS = 60
"""Of streams."""
TURNS, SECONDS = 15, 2.0
"""Of processes alone and together, and how long a turn counts."""
MARK = "<!-- figures of benchmarks/throughput.py -->"


def serve(graph: Path, runtime: str, size: int, core: int) -> None:
    """Bound to a core, count the calls of each turn: a line says when it begins, a line answers."""
    os.sched_setaffinity(0, {core})
    call = opened(graph, runtime, {}, np.random.default_rng(0).standard_normal((1, 3, size, size), np.float32))
    for _ in range(3):
        call()
    print("ready", flush=True)
    for line in sys.stdin:
        begin, calls = float(line), 0
        time.sleep(max(0.0, begin - time.time()))
        while time.time() < begin + SECONDS:
            call()
            calls += 1
        print(calls / (time.time() - begin), flush=True)


def possible(graph: Path, runtime: str, size: int) -> list[dict[str, float]]:
    """Calls a second of one process and of one on every core, turn by turn."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as ends:
        made = [[sys.executable, __file__, "--serve", str(graph), runtime, str(size), str(core)] for core in cores]
        pipes: dict[str, Any] = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        servers: list[Any] = [ends.enter_context(subprocess.Popen(each, **pipes)) for each in made]
        for each in servers:
            assert each.stdout.readline() == "ready\n", "a process did not come up"

        def turn(asked: list[Any]) -> float:
            begin = time.time() + 0.1
            for each in asked:
                each.stdin.write(f"{begin}\n")
                each.stdin.flush()
            return sum(float(each.stdout.readline()) for each in asked)

        return [{"all": turn(servers), "one": turn(servers[:1])} for _ in range(TURNS)]


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a network: one a runtime."""
    network = next(each for each in METHOD_NETWORKS if each.name == name)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.save(network.checkpoint(), checkpoint := Path(folder, "c.pth"))
        run = Path(folder, "run")
        size = repaconv.fold(checkpoint, out=run).image_size[0]
        for target in TARGETS:
            runtime = load_target(target).runtime
            graph = Path(folder, f"{runtime}.onnx")
            repaconv.export(run, onnx=graph, target=target, image_size=size, batch=1)
            found = repaconv.throughput(run, target=target, batch=1, rounds=ROUNDS)
            turns = possible(graph, runtime, size)
            rate = {key: np.array([each[key] for each in turns]) for key in ("one", "all")}
            bound = ratio("all", 1 / rate["all"], "one", 1 / rate["one"], 0)
            row: dict[str, Any] = {"net": name, "runtime": runtime, "date": datetime.date.today().isoformat()}
            row |= {"machine": found.machine, "streams": found.rows[0].streams, "verdict": found.quality.verdict}
            row |= {"images_per_second": [each.images_per_second for each in found.rows[:2]]}
            for what, of in (("streams_times", found.scaling), ("processes_times", bound)):
                row[what] = [round(value, 4) for value in (of.median, of.low, of.high)]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The result as a page has it."""
    first = rows[0]
    lines = [f"{machine_key(first['machine'])}, {first['date']}, batch size 1, one thread per stream:", ""]
    lines += ["| network | runtime | images/s, one stream | all | all / one | processes, all / one |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        every, one = row["images_per_second"]
        verdict = "" if row["verdict"] == "trusted" else f", {row['verdict']}"
        streams, processes = (
            "{:.2f} ({:.2f} to {:.2f})".format(*row[f"{what}_times"]) for what in ("streams", "processes")
        )
        lines.append(
            f"| {row['net']} | {row['runtime']} | {one:.1f} | {every:.1f} | {streams}{verdict} | {processes} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the result and the page's table."""
    if sys.argv[1:2] == ["--serve"]:
        graph, runtime, size, core = sys.argv[2:]
        return serve(Path(graph), runtime, int(size), int(core))
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [network.name for network in METHOD_NETWORKS if not network.trained and not network.large]
    options.add_argument(
        "--networks",
        "--nets",
        nargs="+",
        choices=[network.name for network in METHOD_NETWORKS if not network.trained],
        default=usual,
    )
    options.add_argument("--page", type=Path)
    options.add_argument("-o", "--out", type=Path, required=True)
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name in given.networks:
        rows += measured(name)
        given.out.write_text(canonical_json({"rows": rows}))
    if given.page:
        before, _, after = given.page.read_text().split(MARK)
        given.page.write_text(f"{before}{MARK}\n\n{table(rows)}\n\n{MARK}{after}")


if __name__ == "__main__":
    main()

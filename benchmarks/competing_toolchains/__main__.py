"""Measure rows and save each when it is complete. Rows of this CPU that are already trusted are not measured again.

PYTHONPATH=benchmarks python -m competing_toolchains [--rows NAME ...] [--batch 1] [--threads 1] [--budget 60]
    [--seconds N]
PYTHONPATH=benchmarks python -m competing_toolchains --list
PYTHONPATH=benchmarks python -m competing_toolchains --page        # only writes docs/competing-toolchains.md

PYTHONPATH=benchmarks python -m competing_toolchains --originals [--int8] [--prepare] [--rows NAME ...]
    [--batch 8 --threads 2] [--budget 60] [--session-loads-seconds 25]

The last command measures arbitrary networks: FP32, or with ``--int8`` lower precision of those whose FP32 row exists.
``--prepare`` makes what is not timed, so that the measurement itself needs less time on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from competing_toolchains import arbitrary_network_row, docs_page, method_row, repaconv_configurations
from competing_toolchains.arbitrary_networks import NETWORKS
from competing_toolchains.method_networks import METHOD_NETWORKS, MethodNetwork
from competing_toolchains.method_row import MeasurementOptions
from competing_toolchains.repaconv_configurations import RepaconvModel
from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key

ROOT = Path(__file__).resolve().parents[2]
RESULTS, WORK = ROOT / "benchmarks/results", ROOT / "build/competing_toolchains"
RESULT, ORIGINALS = RESULTS / "competing_toolchains_methods.jsonl", RESULTS / "competing_toolchains_arbitrary.jsonl"
ROUNDS = 40


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The measured rows; of rows with the same key, the last."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return list({docs_page.key(found): found for found in map(json.loads, lines)}.values())


def losses_on_trained_network(
    network: MethodNetwork, options: MeasurementOptions, known: list[dict[str, Any]]
) -> dict[str, float]:
    """Loss of each configuration of repaconv on the trained network of the method, on this CPU.

    Recorded losses are reused. Lower precision is measured only at batch size 1 on one thread: losses do not depend on
    either, and the required speedups are for these.
    """
    if network.large or (options.batch, options.threads) != (1, 1):
        return {}
    machine = machine_key(fingerprint(()))
    for found in known:
        if found["allowed"] and found["method"] == network.method and machine_key(found["machine"]) == machine:
            return dict(found["allowed"])
    trained = next(each for each in METHOD_NETWORKS if each.trained and each.method == network.method)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        ready = method_row.prepare(trained, options, scratch)
        return repaconv_configurations.losses(
            RepaconvModel(ready.for_repaconv.run, ready.for_repaconv.images, 1, 1), scratch
        )


def _options(arguments: argparse.Namespace) -> MeasurementOptions:
    """The options of every row."""
    limits = arguments.rounds, arguments.budget, arguments.session_loads_seconds
    return MeasurementOptions(arguments.batch, arguments.threads, *limits)


def measure_method_networks(arguments: argparse.Namespace) -> None:
    """Measure the selected rows of the methods' networks and append each to the result file."""
    begun, options = time.monotonic(), _options(arguments)
    wanted = [network for network in METHOD_NETWORKS if not arguments.rows or network.name in arguments.rows]
    for network in wanted:
        known, machine = read_rows(arguments.out), machine_key(fingerprint(()))
        same = [
            found for found in known if docs_page.key(found) == (machine, network.name, options.batch, options.threads)
        ]
        if any(docs_page.trusted(found) for found in same) and not arguments.rerun:
            print(f"{network.name}: already trusted", flush=True)
            continue
        if arguments.seconds is not None and time.monotonic() - begun > arguments.seconds:
            print(f"{network.name}: skipped, no time left; run the same command again to resume here", flush=True)
            continue
        work = WORK / f"{network.name}-b{options.batch}-t{options.threads}"
        found = method_row.measure_row(network, options, work, losses_on_trained_network(network, options, known))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        shutil.rmtree(work)
        torch.compiler.reset()
        print(docs_page.summary_line(found), flush=True)


def measure_arbitrary_networks(arguments: argparse.Namespace) -> None:
    """Measure rows of arbitrary networks and append each to the result file; recorded rows are not measured again."""
    begun, options = time.monotonic(), _options(arguments)
    kind, machine = "int8" if arguments.int8 else "fp32", machine_key(fingerprint(()))
    for network in [each for each in NETWORKS if not arguments.rows or each.name in arguments.rows]:
        known = {docs_page.key(found): found for found in read_rows(arguments.out)}
        places = (machine, network.name, options.batch, options.threads)
        exact = known.get((*places, "fp32"))
        late = arguments.seconds is not None and time.monotonic() - begun > arguments.seconds
        if late or ((*places, kind) in known and not arguments.rerun) or (arguments.int8 and exact is None):
            continue
        work = WORK / f"{network.name}-b{options.batch}-t{options.threads}"
        if arguments.prepare:
            if exact and arguments.int8:
                arbitrary_network_row.prepare_lower(network, options, work, exact)
            else:
                arbitrary_network_row.prepare_exact(network, options, work, compiled=arguments.compile)
            print(f"{network.name}: prepared", flush=True)
            continue
        if arguments.int8:
            found = arbitrary_network_row.measured_lower(network, options, work)
        else:
            found = arbitrary_network_row.measured_exact(network, options, work, compiled=arguments.compile)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        print(docs_page.summary_line(found), flush=True)


def main() -> None:
    """Measure the rows, and write the page unless rows go to another file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*(network.name for network in METHOD_NETWORKS), *(network.name for network in NETWORKS)],
        help="networks to measure [default: all]",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budget", type=float, default=docs_page.BUDGET_S, help="seconds of `tune` per row")
    parser.add_argument(
        "--session-loads-seconds",
        type=float,
        default=240,
        help="seconds for the session loads of one run",
    )
    parser.add_argument("--seconds", type=float, help="start no further row after that many seconds")
    parser.add_argument("--rerun", action="store_true", help="also measure rows that are already trusted")
    parser.add_argument("--list", action="store_true", help="print the names of the networks")
    parser.add_argument("--page", action="store_true", help="only write docs/competing-toolchains.md")
    parser.add_argument("--originals", action="store_true", help="measure arbitrary networks")
    parser.add_argument("--int8", action="store_true", help="measure arbitrary networks in lower precision")
    parser.add_argument("--compile", action="store_true", help="also measure arbitrary networks with torch.compile")
    parser.add_argument("--prepare", action="store_true", help="prepare arbitrary networks, measure nothing")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        help="append rows to this file and write no page [default: benchmarks/results/competing_toolchains_*.jsonl]",
    )
    arguments = parser.parse_args()
    writes_page = arguments.out is None and not arguments.prepare
    arguments.out = arguments.out or (ORIGINALS if arguments.originals else RESULT)
    if arguments.list:
        print("\n".join(network.name for network in (NETWORKS if arguments.originals else METHOD_NETWORKS)))
        return
    if not arguments.page:
        torch.set_num_threads(arguments.threads)
        (measure_arbitrary_networks if arguments.originals else measure_method_networks)(arguments)
    if writes_page:
        (ROOT / "docs/competing-toolchains.md").write_text(docs_page.written(read_rows(RESULT), read_rows(ORIGINALS)))


if __name__ == "__main__":
    main()

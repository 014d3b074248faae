"""Measure rows and save each when it is complete. Rows of this CPU that are trusted already are not measured again.

PYTHONPATH=benchmarks python -m competing_toolchains [--rows NAME ...] [--batch 1] [--threads 1] [--budget 60]
    [--seconds N]
PYTHONPATH=benchmarks python -m competing_toolchains --list
PYTHONPATH=benchmarks python -m competing_toolchains --page        # only writes docs/competing-toolchains.md

PYTHONPATH=benchmarks python -m competing_toolchains --originals [--int8] [--prepare] [--rows NAME ...]
    [--batch 8 --threads 2] [--budget 60] [--openings 25]

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
from competing_toolchains.method_networks import NETS, Net
from competing_toolchains.method_row import Place
from competing_toolchains.repaconv_configurations import Ours
from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key

ROOT = Path(__file__).resolve().parents[2]
RESULTS, WORK = ROOT / "benchmarks/results", ROOT / "build/competing_toolchains"
RESULT, ORIGINALS = RESULTS / "competing_toolchains_methods.jsonl", RESULTS / "competing_toolchains_arbitrary.jsonl"
ROUNDS = 40


def kept(path: Path) -> list[dict[str, Any]]:
    """Rows that were measured, the last of each."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return list({docs_page.key(found): found for found in map(json.loads, lines)}.values())


def allowed_for(net: Net, place: Place, known: list[dict[str, Any]]) -> dict[str, float]:
    """What each of our ways loses on the trained net of the method, on this processor; judged now unless it was.

    Lower precision is of one image on one thread: what it loses is no matter of those, and its bars are for them.
    """
    if net.large or (place.batch, place.threads) != (1, 1):
        return {}
    here = machine_key(fingerprint(()))
    for found in known:
        if found["allowed"] and found["method"] == net.method and machine_key(found["machine"]) == here:
            return dict(found["allowed"])
    trained = next(each for each in NETS if each.trained and each.method == net.method)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        ready = method_row.prepared(trained, place, scratch)
        return repaconv_configurations.losses(Ours(ready.ours.run, ready.ours.images, 1, 1), scratch)


def measured(given: argparse.Namespace) -> None:
    """Every row that was asked for, appended to the result."""
    begun, place = time.monotonic(), Place(given.batch, given.threads, given.rounds, given.budget, given.openings)
    wanted = [net for net in NETS if not given.rows or net.name in given.rows]
    for net in wanted:
        known, here = kept(given.out), machine_key(fingerprint(()))
        same = [found for found in known if docs_page.key(found) == (here, net.name, place.batch, place.threads)]
        if any(docs_page.trusted(found) for found in same) and not given.again:
            print(f"{net.name}: trusted already", flush=True)
            continue
        if given.seconds is not None and time.monotonic() - begun > given.seconds:
            print(f"{net.name}: the time is over; the same command goes on here", flush=True)
            continue
        work = WORK / f"{net.name}-b{place.batch}-t{place.threads}"
        found = method_row.measured(net, place, work, allowed_for(net, place, known))
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        shutil.rmtree(work)
        torch.compiler.reset()
        print(docs_page.told(found), flush=True)


def originals(given: argparse.Namespace) -> None:
    """Rows of arbitrary networks, each appended as it comes; those that are known are not measured again."""
    begun, place = time.monotonic(), Place(given.batch, given.threads, given.rounds, given.budget, given.openings)
    kind, here = "int8" if given.int8 else "fp32", machine_key(fingerprint(()))
    for network in [each for each in NETWORKS if not given.rows or each.name in given.rows]:
        known = {docs_page.key(found): found for found in kept(given.out)}
        places = (here, network.name, place.batch, place.threads)
        exact = known.get((*places, "fp32"))
        late = given.seconds is not None and time.monotonic() - begun > given.seconds
        if late or ((*places, kind) in known and not given.again) or (given.int8 and exact is None):
            continue
        work = WORK / f"{network.name}-b{place.batch}-t{place.threads}"
        if given.prepare:
            if exact and given.int8:
                arbitrary_network_row.prepare_lower(network, place, work, exact)
            else:
                arbitrary_network_row.prepare_exact(network, place, work, compiled=given.compile)
            print(f"{network.name}: prepared", flush=True)
            continue
        if given.int8:
            found = arbitrary_network_row.measured_lower(network, place, work)
        else:
            found = arbitrary_network_row.measured_exact(network, place, work, compiled=given.compile)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        print(docs_page.told(found), flush=True)


def main() -> None:
    """Measure, and write the page where that is asked for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--rows",
        nargs="+",
        choices=[*(net.name for net in NETS), *(net.name for net in NETWORKS)],
        help="these networks; all",
    )
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--budget", type=float, default=docs_page.BUDGET_S, help="seconds of `tune`, each row")
    options.add_argument("--openings", type=float, default=240, help="seconds in which everybody is opened anew")
    options.add_argument("--seconds", type=float, help="begin no row after that")
    options.add_argument("--again", action="store_true", help="measure what is trusted, too")
    options.add_argument("--list", action="store_true", help="say which networks there are")
    options.add_argument("--page", action="store_true", help="only write docs/competing-toolchains.md")
    options.add_argument("--originals", action="store_true", help="arbitrary networks")
    options.add_argument("--int8", action="store_true", help="of those, lower precision")
    options.add_argument("--compile", action="store_true", help="of those, with torch.compile, which takes minutes")
    options.add_argument("--prepare", action="store_true", help="of those, only what is not timed")
    options.add_argument(
        "-o",
        "--out",
        type=Path,
        help="rows go there, and no page is written [default: benchmarks/results/*_peers.jsonl]",
    )
    given = options.parse_args()
    writes_page = given.out is None and not given.prepare
    given.out = given.out or (ORIGINALS if given.originals else RESULT)
    if given.list:
        print("\n".join(net.name for net in (NETWORKS if given.originals else NETS)))
        return
    if not given.page:
        torch.set_num_threads(given.threads)
        (originals if given.originals else measured)(given)
    if writes_page:
        (ROOT / "docs/competing-toolchains.md").write_text(docs_page.written(kept(RESULT), kept(ORIGINALS)))


if __name__ == "__main__":
    main()

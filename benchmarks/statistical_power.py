"""Statistical power of `bench`: a model against its copy, next to busy processes, and against models that are slower.

    python benchmarks/statistical_power.py [--runs 200] [--quick] [--page docs/measurement.md ...] [-o result.json]

The models are small ONNX graphs of 100 matrix products, or 1%, 2% or 5% more. Each run is a whole measurement of one
thread, as `bench` makes it, shortened to about a second (`SECONDS` of session loads):

- same: a model against its copy, next to 0, 1, 2 and 4 busy processes. Intervals should contain 1 in 95% of the runs;
- planted: 101, 102 and 105 products against 100, on an otherwise quiet machine.

The table counts intervals that exclude 1, runs that report a difference (*faster* or *slower*), and inconclusive runs.
Runs of this machine that are in the result already are not repeated, so that an interrupted table resumes. --quick
makes a tenth of the runs, --busy only the rows with that many busy processes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from repaconv.benchmark.interleaved_protocol import Entrant, Measurement, Protocol, measure
from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key
from repaconv.core.files import canonical_json
from repaconv.engines.contract import SessionSpec
from repaconv.engines.onnxruntime_cpu import ENGINE

LAYERS, WIDTH, ROWS = 100, 96, 48
SECONDS, ROUNDS = 1.0, 50
"""Of session loads, and the fewest rounds, in each run."""
SAVED = 20
"""Runs between two writes of the result."""
FIRST, SECOND = "a", "b"
MARK = "<!-- figures of benchmarks/statistical_power.py -->"


class Experiment(NamedTuple):
    """A row of the table: busy processes next to the measurement, and additional products of the second model."""

    busy: int
    more: int

    @property
    def name(self) -> str:
        """In words."""
        if self.more:
            return f"a planted difference of {self.more / LAYERS:.0%}"
        return f"a model against its copy, {self.busy or 'no'} busy process{'' if self.busy == 1 else 'es'}"


EXPERIMENTS = (*(Experiment(busy, 0) for busy in (0, 1, 2, 4)), *(Experiment(0, more) for more in (1, 2, 5)))


def model(layers: int, path: Path) -> Path:
    """[1, 3, ROWS / 3, WIDTH] to the same: products with one orthogonal matrix, so that numbers stay as large."""
    random = np.random.default_rng(0)
    square = np.linalg.qr(random.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)
    nodes = []
    # A node in between, so that no runtime composes the products.
    for number in range(layers):
        nodes.append(helper.make_node("MatMul", [f"v{number}", "w"], [f"p{number}"], f"layer.{number}/MatMul"))
        nodes.append(helper.make_node("Relu", [f"p{number}"], [f"v{number + 1}"], f"layer.{number}/Relu"))
    shape = (1, 3, ROWS // 3, WIDTH)
    made = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("v0", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(f"v{layers}", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(square, "w")],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other processes that spin, and end with this."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def measured(first: Path, second: Path, seed: int, seconds: float = SECONDS) -> Measurement:
    """Both models on one core."""
    feeds = {"v0": np.random.default_rng(seed).standard_normal((1, 3, ROWS // 3, WIDTH)).astype(np.float32)}

    def loaded(path: Path) -> Any:
        return partial(ENGINE.open(path, SessionSpec()).run, feeds)

    entrants = {FIRST: Entrant(partial(loaded, first)), SECOND: Entrant(partial(loaded, second))}
    return measure(entrants, Protocol(ROUNDS, seed=seed, cores=1, more=True, seconds=seconds))


def run(first: Path, second: Path, seed: int) -> dict[str, Any]:
    """One run: the ratio, what it claims, and how long it took."""
    begin = time.perf_counter()
    found = measured(first, second, seed)
    ratio = found.ratio(FIRST, SECOND)
    return {
        "ratio": [ratio.median, ratio.low, ratio.high],
        "called": ratio.verdict,
        "verdict": found.quality(ratio).verdict,
        "session_loads": found.session_loads,
        "other_load": found.watched.others,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def rows(experiment: Experiment, runs: int, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The row of an experiment with the known runs and more and more others."""
    with tempfile.TemporaryDirectory() as name, busy(experiment.busy):
        folder = Path(name)
        first, second = model(LAYERS, folder / "a.onnx"), model(LAYERS + experiment.more, folder / "b.onnx")
        while len(known) < runs:
            known = [*known, *(run(first, second, seed) for seed in range(len(known), min(runs, len(known) + SAVED)))]
            yield {
                **experiment._asdict(),
                "experiment": experiment.name,
                "date": datetime.date.today().isoformat(),
                "machine": fingerprint(()),
                "runs": known,
            }


def counts(row: dict[str, Any]) -> dict[str, Any]:
    """What the table has of a row."""
    runs = row["runs"]
    return {
        "runs": len(runs),
        "excludes": sum(low > 1 or high < 1 for _, low, high in (each["ratio"] for each in runs)),
        "called": sum(each["called"] in ("faster", "slower") for each in runs),
        "inconclusive": sum(each["verdict"] == "inconclusive" for each in runs),
        "width": float(np.median([(high / low) ** 0.5 - 1 for _, low, high in (each["ratio"] for each in runs)])),
        "other_load": float(np.median([each["other_load"] or 0 for each in runs])),
        "seconds": float(np.median([each["seconds"] for each in runs])),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The result as a page has it."""
    lines = [f"{machine_key(rows[0]['machine'])}, {rows[0]['date']}:", ""]
    lines += ["| experiment | interval excludes 1 | called different | inconclusive | half width | other load |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        of = counts(row)
        lines.append(
            f"| {row['experiment']} | {of['excludes']} of {of['runs']} | {of['called']} | {of['inconclusive']} "
            f"| {of['width']:.1%} | {of['other_load']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print, and write the result and the pages' tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    parser.add_argument("--busy", type=int, nargs="+", help="only rows next to so many busy processes")
    parser.add_argument("--page", type=Path, nargs="*", default=[])
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    runs = chosen.runs // 10 if chosen.quick else chosen.runs
    here, found = machine_key(fingerprint(())), dict[Experiment, dict[str, Any]]()
    if chosen.out and chosen.out.is_file():
        known = json.loads(chosen.out.read_text()).get("rows", [])
        found = {Experiment(each["busy"], each["more"]): each for each in known if machine_key(each["machine"]) == here}
    for experiment in EXPERIMENTS:
        if chosen.busy is not None and experiment.busy not in chosen.busy:
            continue
        for row in rows(experiment, runs, found.get(experiment, {"runs": []})["runs"]):
            found[experiment] = row
            print(experiment.name, counts(row), flush=True)
            if chosen.out:
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                kept = [found[each] for each in EXPERIMENTS if each in found]
                chosen.out.write_text(canonical_json({"rows": kept}))
    text = table([found[each] for each in EXPERIMENTS if each in found])
    print(text)
    for page in chosen.page:
        before, _, after = page.read_text().split(MARK)
        page.write_text(f"{before}{MARK}\n\n{text}\n\n{MARK}{after}")


if __name__ == "__main__":
    main()

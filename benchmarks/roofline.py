"""How far each network is from the limit of this core, and the largest part of its time that could be removed.

    make bench-roofline [ROWS="riformer-s12"] [MODELS="a.onnx b.onnx"]
    PYTHONPATH=benchmarks python benchmarks/roofline.py [--rows NAME ...] [--models FILE ...] [--prepare] [--page]

Rows are the published sizes of `competing_toolchains/method_networks.py` with seeded weights, folded, in the default
preset of each runtime, in FP32 and in INT8; and any ONNX file. Each row is what `repaconv bench --profile` reports, on
one thread at batch size 1. A row that this CPU has already is measured again only with --rerun. --prepare only exports.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from competing_toolchains.method_networks import METHOD_NETWORKS, MethodNetwork

import repaconv
from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key
from repaconv.onnx_export.fp16_and_int8 import QUANTIZERS
from repaconv.results import Roofline
from repaconv.stages.shared.model_opening import precision_of
from repaconv.stages.shared.target_lookup import load_target

ROOT = Path(__file__).resolve().parents[1]
RESULT, PAGE, WORK = ROOT / "benchmarks/results/roofline.jsonl", ROOT / "docs/roofline.md", ROOT / "build/roofline"
ROUNDS = 25
FORMS = (
    ("x86-64", "fp32", ""),
    ("x86-64", "int8", QUANTIZERS[0]),
    ("x86-64-openvino", "fp32", ""),
    ("x86-64-openvino", "int8", QUANTIZERS[-1]),
)
"""Target, precision and quantizer of each row."""
USUAL = (
    "repavit-deit-tiny-0.75",
    "repavit-deit-base-0.75",
    "nondeep-6x2-value-sum",
    "riformer-s12",
    "pyra-vit-base-low",
)
"""A row of each method; of dwconv no published size is measured in a reasonable time."""


class Row(NamedTuple):
    """A graph to measure: the network's name, its file, and the target whose runtime it is for."""

    name: str
    path: Path
    target: str


def exported(network: MethodNetwork) -> Iterator[Row]:
    """The graphs of a network in every form, in a folder where what is there already is taken."""
    folder = WORK / network.name
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    if not (run / "fold.json").is_file():
        torch.save(network.checkpoint(), folder / "c.pth")
        repaconv.fold(folder / "c.pth", out=run, force=True)
        (folder / "c.pth").unlink()
    for target, precision, quantizer in FORMS:
        path = folder / f"{network.name}.{target}.{precision}.onnx"
        if not path.is_file():
            by = {"quantizer": quantizer} if quantizer else {}
            done = repaconv.export(run, target=target, precision=precision, batch=1, **by)
            (run / done.payload.path).replace(path)
        yield Row(network.name, path, target)


def measured(row: Row) -> dict[str, Any]:
    """One row: what `bench --profile` says."""
    done = repaconv.bench(row.path, target=row.target, threads=1, batch=1, rounds=ROUNDS, profile=True)
    assert done.profile is not None
    assert done.profile.roofline is not None
    nodes = sorted(done.profile.nodes, key=lambda node: node.limit_ms - node.mean_ms)[:8]
    return {
        "net": row.name,
        "runtime": done.runtime,
        "precision": done.precision,
        "date": datetime.date.today().isoformat(),
        "machine": done.machine,
        "p50_ms": done.profile.end_to_end_ms,
        "total_ms": done.profile.total_ms,
        "quality": done.quality.model_dump(include={"verdict", "reasons"}),
        "roofline": done.profile.roofline.model_dump(mode="json"),
        "slowest": [node.model_dump(include={"name", "operator", "mean_ms", "limit_ms"}) for node in nodes],
    }


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What a later measurement of the same replaces."""
    return (machine_key(row["machine"]), row["net"], row["runtime"].partition(" ")[0], row["precision"])


def kept() -> dict[tuple[str, ...], dict[str, Any]]:
    """The last measurement of each row."""
    lines = RESULT.read_text().splitlines() if RESULT.is_file() else []
    return {key(row): row for row in map(json.loads, lines)}


def page(rows: list[dict[str, Any]]) -> str:
    """The page of what was measured."""
    lines = [INTRODUCTION]
    for machine, several in groupby(sorted(rows, key=key), key=lambda row: key(row)[0]):
        found = list(several)
        dates = sorted(row["date"] for row in found)
        lines += [f"## {machine}\n", f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, batch 1, one thread.\n"]
        lines += [HEADER, *map(_line, found), "", "### Time by kind of layer, ms (share of the latency)\n"]
        names = sorted(
            {group["group"] for row in found for group in row["roofline"]["groups"]},
            key=lambda name: (
                -sum(group["share"] for row in found for group in row["roofline"]["groups"] if group["group"] == name)
            ),
        )
        lines += [f"| network | in | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
        for row in found:
            groups = {group["group"]: group for group in row["roofline"]["groups"]}
            cells = [f"{groups[n]['mean_ms']:.2f} ({groups[n]['share']:.0%})" if n in groups else "" for n in names]
            lines.append(f"| {row['net']} | {_form(row)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _form(row: dict[str, Any]) -> str:
    return f"{row['runtime'].partition(' ')[0]} {row['precision']}"


def _line(row: dict[str, Any]) -> str:
    found = Roofline.model_validate(row["roofline"])
    most = next((group for group in found.groups if group.group == found.largest_removable), None)
    memory = sum(group.memory_ms for group in found.groups)
    removable = f"{most.group}, {most.removable_ms:.2f} ms" if most else "at the limit"
    doubt = "" if row["quality"]["verdict"] == "trusted" else f", {row['quality']['verdict']}"
    return (
        f"| {row['net']} | {_form(row)} | {row['p50_ms']:.2f}{doubt} | {found.limit_ms:.2f} | "
        f"{found.share_of_limit:.0%} | {removable} | {memory:.2f} | {found.peaks_text} |"
    )


HEADER = """| network | in | ms | products at the limit, ms | share | largest removable part | memory, ms | peaks |
|---|---|---|---|---|---|---|---|"""
INTRODUCTION = """# Distance from the limit of a core

`repaconv bench --profile` compares the time of each layer with what the core reaches. This page has its results for
published sizes, folded and in the default preset of each runtime. `make bench-roofline` measures
again; `benchmarks/results/roofline.jsonl` has all figures. [How repaconv measures](measurement.md#limits-of-the-core)
explains them.

| Column | Meaning |
|---|---|
| ms | median latency (with AMX: while the profile was measured), with its verdict unless it is *trusted* |
| products at the limit | what matrix products and convolutions alone take at the peak, or by their bytes |
| share | that time, divided by the latency; from 90% on, the row is *at the limit* |
| largest removable part | the kind of layer with the most time beyond its limit |
| memory | time that layers take at least for their bytes. Only a graph that moves fewer bytes removes it |
| peaks | what one large product reaches, measured in turn with the network |

Times of single nodes come from the runtime's profiler and may add up to more than the latency that is measured without
it. The removable part of *products* is what their kernels lack to the peak. *Products with an activation* also compute
the function that the runtime fused into them, which takes its own time.
"""


def main() -> None:
    """Measure, each row kept as it comes, and write the page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--rows", nargs="*", choices=[network.name for network in METHOD_NETWORKS], help="these networks"
    )
    options.add_argument("--models", nargs="*", type=Path, default=[], help="ONNX files, for ONNX Runtime and OpenVINO")
    options.add_argument("--prepare", action="store_true", help="export, and measure nothing")
    options.add_argument("--rerun", action="store_true", help="measure rows again that were measured here")
    options.add_argument("--page", action="store_true", help="write the page of what was measured, no more")
    given = options.parse_args()
    names = given.rows if given.rows is not None else () if given.models else USUAL
    done = kept()
    for network in () if given.page else (network for network in METHOD_NETWORKS if network.name in names):
        for row in exported(network):
            if not given.prepare:
                _measure(row, done, given.rerun)
    for path in () if given.page or given.prepare else given.models:
        for target in ("x86-64", "x86-64-openvino"):
            _measure(Row(path.stem, path, target), done, given.rerun)
    if not given.prepare:
        PAGE.write_text(page(list(kept().values())))


def _measure(row: Row, done: dict[tuple[str, ...], dict[str, Any]], rerun: bool) -> None:
    same = (machine_key(fingerprint(())), row.name, load_target(row.target).runtime, precision_of(row.path))
    if same in done and not rerun:
        print(f"{row.name} {row.target}: measured already", flush=True)
        return
    found = measured(row)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    with RESULT.open("a") as lines:
        lines.write(json.dumps(found) + "\n")
    print(row.name, _form(found), f"{found['p50_ms']:.2f} ms", Roofline.model_validate(found["roofline"]).description)


if __name__ == "__main__":
    main()

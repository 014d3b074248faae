"""Write the speedups from which `tune` starts: measured ones, from `benchmarks/results`, by CPU ISA level.

    python benchmarks/tuning_records.py            # writes repaconv/stages/tune/recorded_speedups.json
    python benchmarks/tuning_records.py --errors   # how well each network is predicted from the others

Every speedup is over the network's default preset on the target's own runtime in FP32, which is the baseline of `tune`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from competing_toolchains import docs_page

from repaconv.core.files import canonical_json
from repaconv.stages.tune.speed_prediction import RECORDS, Observation, Predictor, shipped_records

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks/results/competing_toolchains_methods.jsonl"
DEFAULT = "ours, default form"
MMACS = {
    "repavit-digits": 3.1, "nondeep-digits": 3.0, "riformer-digits": 3.2, "dwconv-digits": 4.4, "pyra-digits": 4.0,
    "repavit-deit-tiny-0.75": 767, "repavit-deit-base-0.75": 9955, "nondeep-6x2-value-sum": 672,
    "nondeep-6x2-output-sum": 789, "riformer-s12": 1812, "pyra-vit-base-low": 8711, "dwconv-vit-large-12": 42004,
}  # fmt: skip
"""Millions of multiply-accumulates per image of the default preset (benchmarks/results/manual_baseline_speed.json)."""
FIELDS = ("runtime", "precision", "quantizer", "rewrites", "settings")


def records() -> dict[str, list[dict[str, Any]]]:
    """Networks by ISA level, each with its measured configurations; of a network's rows on one machine the last."""
    lines = PEERS.read_text().splitlines()
    rows = {docs_page.key(row): row for row in map(json.loads, lines) if (row["batch"], row["threads"]) == (1, 1)}
    found = defaultdict(list)
    for key, row in rows.items():
        machine = row["machine"]
        measured = list(_measured(row))
        found[machine["family"]].append(
            {
                "network": f"{row['net']} on {key[0]}",
                "macs": MMACS[row["net"]] * 1e6,
                "date": row["date"],
                "measured": measured,
            }
        )
    return dict(found)


def _measured(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    default = row["times_hand"][DEFAULT][0]
    for name, way in row["ways"].items():
        if name not in row["times_hand"]:  # it did not run there
            continue
        median, low, high = row["times_hand"][name]
        way = {**way, "quantizer": way.get("quantizer", way.get("quantiser", ""))}
        deployment = {field: way[field] for field in FIELDS if way[field] or field == "rewrites"}
        error = 0.0 if name == DEFAULT else round(math.log(high / low) / 3.92, 4)
        yield {"deployment": deployment, "speedup": round(median / default, 4), "error": error}


def errors() -> None:
    """Predict each network from all others of its ISA level: error and uncertainty of every configuration."""
    standard = []
    for level in records():
        known = shipped_records(level)
        for name in dict.fromkeys(each.network for each in known):
            own = [each for each in known if each.network == name]
            others = [each for each in known if each.network != name]
            base = next(each for each in own if not each.error)
            start = Observation("", base.macs, base.deployment, 0.0, 0.0)
            rest = [each for each in own if each.deployment != base.deployment]
            means, deviations = Predictor([*others, start], base.macs).of([each.deployment for each in rest])
            off = np.array([each.gain for each in rest]) - means
            print(f"{level:12} {name[:40]:40} off by {np.abs(off).mean():.3f}, uncertainty {deviations.mean():.3f}")
            for each, mean, deviation in zip(rest, means, deviations, strict=True):
                way = each.deployment
                message = f"{way.runtime} {way.precision} {way.quantizer} {' '.join(way.settings)}"
                print(f"      {message:80} {each.gain:+.2f}, predicted {mean:+.2f} +- {deviation:.2f}")
            standard += list(off / deviations)
    print(f"off by {np.std(standard):.2f} times the uncertainty, {len(standard)} configurations")


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true")
    if parser.parse_args().errors:
        errors()
        return
    source, networks = (
        "benchmarks/results/competing_toolchains_methods.jsonl, by benchmarks/tuning_records.py",
        records(),
    )
    RECORDS.write_text(canonical_json({"source": source, "networks": networks}))
    print(f"{sum(map(len, networks.values()))} networks, {RECORDS.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

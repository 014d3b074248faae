"""Write the section of docs/convert.md on the harder dataset, and its pictures, from the rows of `convert_textures.py`.

    python benchmarks/convert_textures_page.py [--of ROWS.jsonl] [--page docs/convert.md]

There is one picture per precision, next to the page: hollow marks are converted networks, filled ones are trained
afterwards. Without rows the section says that nothing was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repaconv.stages.report.tradeoff_plots import Point, curve_svg, pareto

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/convert_textures.jsonl"
MARK = "<!-- figures of benchmarks/convert_textures.py -->\n"
NONE = "Not measured yet: `make bench-convert-textures` writes this section.\n"
DROP = 0.01
"""Accuracy that may be lost where the fastest is named."""

Rows = Sequence[dict[str, Any]]


def newest(path: Path) -> list[dict[str, Any]]:
    """The rows of the network that was measured last, each way once."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    own = [row for row in rows if row["network"] == rows[-1]["network"]]
    return list({(row["name"], row["epochs"]): row for row in own}.values())


def title(row: dict[str, Any]) -> str:
    """What a row is called."""
    epochs = row["epochs"]
    return f"{row['name']}; {epochs} epoch{'s' if epochs > 1 else ''}" if epochs else str(row["name"])


def precisions(rows: Rows) -> list[str]:
    """All that were measured, the widest first."""
    return list(
        dict.fromkeys(name for row in sorted(rows, key=lambda row: -len(row["points"])) for name in row["points"])
    )


def points(rows: Rows, precision: str) -> list[Point]:
    """Those of a precision, and what all are held to."""
    lines = [
        Point(title(row), row["kind"], found["speed"][0], found["accuracy"], solid=row["epochs"] > 0)
        for row in rows
        if (found := row["points"].get(precision))
    ]
    return [Point("unconverted, exact, float32", "unconverted", 1.0, rows[0]["accuracy"]), *lines]


def section(rows: Rows, stem: str) -> str:
    """The words, the pictures' places, the table; ``stem`` is what the pictures' files begin with."""
    if not rows:
        return NONE
    kinds, machines = precisions(rows), sorted({row["machine"] for row in rows})
    doubted = sum(row["measurement"] != "trusted" for row in rows)
    lines = [
        f"Accuracy on {rows[0]['held_out']} held-out images, {rows[0]['accuracy']:.1%} before conversion, and the",
        "speedup over the exact form of the unconverted network in FP32, measured in the same rounds: batch size 1,",
        f"one thread, {', '.join(machines)}; INT8 under ONNX Runtime, BF16 under OpenVINO.",
        f"{len(rows) - doubted} of these {len(rows)} measurements are trusted.",
        "",
        *(_fastest(rows, kind) for kind in kinds),
        "",
    ]
    for kind in kinds:
        lines += [
            f"![Accuracy against speed, {kind}: hollow as converted, filled after training]({stem}.{kind}.svg)",
            "",
        ]
    lines += ["| network | " + " | ".join(f"{kind}: accuracy | speedup" for kind in kinds) + " |"]
    lines += ["|---|" + "---|---|" * len(kinds)]
    for row in rows:
        cells = [_cells(row["points"].get(kind)) for kind in kinds]
        lines.append(f"| {title(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _fastest(rows: Rows, precision: str) -> str:
    """What is fastest within the drop, in a sentence."""
    base = rows[0]["accuracy"]
    within = [each for each in points(rows, precision)[1:] if base - each.share <= DROP]
    if not within:
        return f"- {precision}: nothing keeps within {DROP:.0%} of it."
    best = pareto(within)[-1]
    return (
        f"- {precision}: within {DROP:.0%} of it, {best.title} has a speedup of {best.speed:.2f}x and {best.share:.1%}."
    )


def _cells(found: dict[str, Any] | None) -> str:
    if found is None:
        return " | "
    (speed, slow, fast), (_, low, high) = found["speed"], found["difference"]
    return f"{found['accuracy']:.1%} ({low:+.1%} to {high:+.1%}) | {speed:.2f} ({slow:.2f} to {fast:.2f})"


def main() -> None:
    """Write the section between its marks, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, default=ROOT / "docs/convert.md")
    given = parser.parse_args()
    rows, stem = newest(given.of), f"{given.page.stem}-textures"
    for kind in precisions(rows):
        picture = curve_svg(points(rows, kind), f"accuracy, {kind},")
        given.page.with_name(f"{stem}.{kind}.svg").write_text(picture)
    before, _, after = given.page.read_text().split(MARK)
    given.page.write_text(f"{before}{MARK}{section(rows, stem)}{MARK}{after}")


if __name__ == "__main__":
    main()

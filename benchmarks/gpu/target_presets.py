"""Write the presets that `tune` measured on a GPU into the TOML files of its targets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repaconv.core.toml_positions import parse_toml

TARGETS = Path(__file__).resolve().parents[2] / "repaconv/engines/targets"
START, END = "# Measured on GPUs: make gpu-results writes the lines below.", "# End of these lines."


def put_presets(result: Mapping[str, Any], source: str, folder: Path = TARGETS) -> list[Path]:
    """Write the fastest rewrites of each method, and which GPU was measured; returns the files that were changed.

    If several networks were measured for one preset, it has what their fastest ones agree about; see `_common`. A
    method whose default preset was the fastest keeps it. Presets of other methods stay, as do those of a measurement
    that was not conclusive or failed.

    Args:
        result: What `gpu.result_evaluation.evaluated` returned.
        source: Where it is kept.
        folder: Folder of the targets.
    """
    by_target: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for step in result["steps"]:
        if step["kind"] == "tune" and step["verdict"] == "passed":
            found = by_target.setdefault(step["given"]["target"], {})
            ratio = step["tuned"]["ratio"]
            if ratio and ratio["verdict"] == "faster":
                found.setdefault(step["given"]["method"], []).append(step["tuned"])
    return [
        _put(folder / f"{target}.toml", {method: _common(tuned) for method, tuned in each.items()}, result, source)
        for target, each in by_target.items()
    ]


def _common(tuned: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rewrites that the fastest presets of all networks have for which they were tried."""
    found = {name: True for each in tuned for name in each["deployment"]["rewrites"]}
    for each in tuned:
        tried = {name for row in each["candidates"] for name in row["deployment"]["rewrites"]}
        found |= dict.fromkeys(tried.intersection(found).difference(each["deployment"]["rewrites"]), False)
    return [name for name, common in found.items() if common]


def _put(path: Path, presets: Mapping[str, list[str]], result: Mapping[str, Any], source: str) -> Path:
    before, _, rest = path.read_text().partition(START)
    kept, _, after = rest.partition(END)
    known, _ = parse_toml(kept, path.name, "target")
    forms = {**known.get("forms", {}), **presets}
    measured = {**known.get("measured", {}), result["machine"]["card"]["name"]: source}
    lines = [START, "[forms]"]
    for method, rewrites in sorted(forms.items()):
        lines += [f"{method} = [", *(f"    {json.dumps(name)}," for name in rewrites), "]"]
    lines += ["", "[measured]", *(f"{json.dumps(name)} = {json.dumps(where)}" for name, where in measured.items()), END]
    path.write_text(f"{before.rstrip()}\n\n" + "\n".join(lines) + (after or "\n"))
    return path

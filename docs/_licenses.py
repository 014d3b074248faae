"""``_licenses.py INSTALLED SBOM PAGE``: of what CycloneDX found, what repaconv needs at run time (`make sbom`)."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HEAD = """# Licenses

repaconv is Apache-2.0. These are the packages that it needs at run time, as CI installs them on Linux, with the license
that their own metadata declares. `make sbom` writes this page and `build/sbom.json` (CycloneDX); do not edit it.
Packages of extras, and the CUDA libraries of other builds of PyTorch, are not included.

| package | version | license |
|---|---|---|
"""


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: frozenset[str] = frozenset(), seen: set[str] | None = None) -> set[str]:
    """What an installed package needs here, itself included."""
    seen = {plain(name)} if seen is None else seen
    for each in map(Requirement, metadata.requires(name) or ()):
        wanted = each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (extras or {""}))
        if wanted and plain(each.name) not in seen:
            seen.add(plain(each.name))
            needed(each.name, frozenset(each.extras), seen)
    return seen


def licence(component: dict[str, Any]) -> str:
    """As SPDX has it, else in the package's own words."""
    told = component.get("licenses", [])
    formal = [each.get("expression") or each["license"].get("id") for each in told]
    words = [each["license"]["name"].rpartition(" :: ")[2] for each in told if "name" in each.get("license", {})]
    own = (metadata.metadata(component["name"]).get_all("License") or [""])[0].partition("\n")[0]
    return ", ".join(filter(None, formal)) or ", ".join(words) or own or "not declared"


def main(installed: Path, sbom: Path, page: Path) -> None:
    """Write both."""
    found = json.loads(installed.read_text())
    names = needed("repaconv") - {"repaconv"}
    found["components"] = [each for each in found["components"] if plain(each["name"]) in names]
    kept = {each["bom-ref"] for each in found["components"]} | {found["metadata"]["component"]["bom-ref"]}
    found["dependencies"] = [
        each | ({"dependsOn": sorted(kept.intersection(each["dependsOn"]))} if "dependsOn" in each else {})
        for each in found["dependencies"]
        if each["ref"] in kept
    ]
    sbom.write_text(json.dumps(found, indent=1) + "\n")
    rows = sorted((plain(each["name"]), each["version"], licence(each)) for each in found["components"])
    page.write_text(HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

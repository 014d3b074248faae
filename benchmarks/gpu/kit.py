"""Make the kit: `python -m gpu.kit FOLDER [--python 3.12]`, as `make gpu-kit` does; wheels come from the package index.

Bundles: ``core`` (repaconv, its rarer dependencies, these benchmarks), which is enough to measure torch; ``onnx`` for a
machine that has torch and little else; ``onnxruntime`` and ``tensorrt-rtx``. Each is split into pieces, which gpu.sh
identifies by their hashes, so that they can be sent one by one. If two bundles have a package, the later one's is used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PIECE = 52 * 2**20
ROOT = Path(__file__).resolve().parents[2]
CORE = (
    *("annotated-doc", "annotated-types", "click", "markdown-it-py", "mdurl", "nvidia-ml-py", "onnxsim", "packaging"),
    *("pydantic", "pygments", "rich", "shellingham", "threadpoolctl", "typer", "typing-inspection"),
)
ONNX = (
    *("flatbuffers", "jinja2", "markupsafe", "ml_dtypes", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "pillow"),
    *("protobuf", "safetensors"),
)
"""What repaconv needs besides torch and NumPy, and of that what many a machine with torch has; of `constraints.txt`
where that names a version."""
BUNDLES = {
    "onnxruntime": ("onnxruntime-gpu",),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"),
}
ASSUMED = {"numpy", "torch", "typing-extensions", "sympy"}
"""What a Python with torch has, by what torch itself requires."""
SOURCES = ("tensorrt-rtx-cu13",)
"""Of the last bundle, what comes as a source that has nothing to compile."""
PLATFORMS = ("manylinux_2_35", "manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def wheels(names: Iterable[str], folder: Path, python: str) -> list[Path]:
    """Download what is not there yet.

    Raises:
        SystemExit: If the index has none for that Python.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    chosen = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    for name in names:
        if not _there(folder, name):
            subprocess.run([*pip, *chosen, "--dest", str(folder), _pinned(name)], check=True)
    return [_there(folder, name)[0] for name in names]


def _there(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name.replace('-', '_')}-*.whl"))


def _pinned(name: str) -> str:
    """With the version that the tests have; that of pydantic-core is pydantic's own."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names = {name, "onnxruntime"} if name == "onnxruntime-gpu" else {name}
    plain = [line.split(";")[0].strip() for line in lines if "<" not in line]
    found = [line.split("==")[1] for line in plain if line.split("==")[0] in names]
    return f"{name}=={found[0]}" if found else name


def built(name: str, folder: Path) -> Path:
    """A wheel of a source."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    before = set(folder.glob("*.whl"))
    subprocess.run([*pip, "--wheel-dir", str(folder), name], check=True)
    stem = Path(name).name if Path(name).is_dir() else name.split("==")[0]
    made = set(folder.glob("*.whl")) - before
    return made.pop() if made else _there(folder, "repaconv" if stem == ROOT.name else stem)[0]


def wanted_by(wheel: Path, python: str) -> list[Requirement]:
    """What a wheel requires without extras on such a machine, of its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    rows = [Requirement(line.split(":", 1)[1]) for line in lines if line.startswith("Requires-Dist:")]
    here = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return [each for each in rows if each.marker is None or each.marker.evaluate(here)]


def require_whole(carried: Iterable[Path], python: str) -> None:
    """Refuse a bundle that wants something which it does not bring and no machine with torch has.

    Raises:
        SystemExit: Naming it.
    """
    every = list(carried)
    there = {_plain(wheel.name.split("-")[0]) for wheel in every} | ASSUMED
    lacking = {each.name for wheel in every for each in wanted_by(wheel, python) if _plain(each.name) not in there}
    if lacking:
        raise SystemExit(f"the kit lacks {', '.join(sorted(lacking))}: name it in CORE")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def packed(files: Mapping[str, Path], path: Path) -> Path:
    """A tar of these files by their names in it, the same bytes for the same files."""
    with tarfile.open(path, "w") as archive:
        for name, file in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = file.stat().st_size, 0o644
            with file.open("rb") as opened:
                archive.addfile(member, opened)
    return path


def cut(bundle: str, whole: Path, folder: Path, size: int = PIECE) -> dict[str, str]:
    """Pieces of a file and their hashes, in order."""
    found = {}
    with whole.open("rb") as opened:
        while part := opened.read(size):
            name = f"{bundle}.{len(found):02d}"
            (folder / name).write_bytes(part)
            found[name] = hashlib.sha256(part).hexdigest()
    return found


def script(bundles: Mapping[str, Mapping[str, str]], python: str) -> tuple[str, dict[str, Any]]:
    """gpu.sh, and what it knows of the kit: kit.json."""
    from gpu.plan import steps

    pieces = {name: digest for parts in bundles.values() for name, digest in parts.items()}
    known: dict[str, Any] = {
        "python": python,
        "pieces": pieces,
        "bundles": {name: list(parts) for name, parts in bundles.items()},
        "plan": [step.name for step in steps()],
        "earlier": earlier(),
    }
    known["id"] = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    body = (Path(__file__).parent / "kit_installer.py").read_text()
    body = body.replace("KIT = {}", f"KIT = json.loads({json.dumps(json.dumps(known))})")
    head = '#!/bin/sh\n# See the words below. PYTHON=python3.12 names another Python.\nKIT_FOLDER=$(dirname "$0")\n'
    call = 'export KIT_FOLDER\nexec "${PYTHON:-python3}" - "$@" <<\'END_OF_KIT\'\n'
    return f"{head}{call}{body}\nEND_OF_KIT\n", known


def earlier(results: Path = ROOT / "benchmarks/results") -> dict[str, Any]:
    """What earlier results predict: speedups on CPUs, and speedups and seconds on the GPUs that were measured."""
    from gpu.plan import OFFICIAL, Step
    from gpu.step_selection import PRESET, Cell, Known, known_of

    known, seconds = [], {}
    for row in json.loads((results / "preset_speed.json").read_text())["rows"]:
        times, method = row["times_hand"], row["net"].partition("-")[0]
        for target, runtime in (("x86-64", "onnxruntime"), ("x86-64-openvino", "openvino")):
            ours, plain = times.get(f"default, {runtime}"), times[f"safest, {runtime}"]
            for over, number in ((OFFICIAL, (ours or plain)[0]), (PRESET, ours[0] / plain[0] if ours else 1.0)):
                cell = Cell(over, method, row["net"], 1, target, "fp32", row["machine"]["family"])
                known.append(Known(cell, math.log(number)))
    for path in sorted(results.glob("gpu_*.json")):
        found = json.loads(path.read_text())
        for step in found["steps"]:
            known += known_of(Step(*(step[each] for each in Step._fields)), step, found["machine"]["card"]["name"])
            seconds |= {step["name"]: step["seconds"]} if step["status"] == "done" else {}
    return {"known": known, "seconds": seconds}


def benchmarks() -> dict[str, Path]:
    """The files of this folder that a session needs."""
    here = ROOT / "benchmarks"
    files = [
        *here.glob("gpu/*.py"),
        *here.glob("manual_baselines/*.py"),
        here / "manual_baseline_models.py",
        here / "zoo_networks.py",
    ]
    return {f"benchmarks/{file.relative_to(here)}": file for file in files}


def make(folder: Path, python: str) -> dict[str, Any]:
    """Everything into the folder; what was downloaded is kept next to it."""
    store = folder.parent / f"wheels-{python}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    small = wheels(CORE, store, python)
    pydantic = next(wheel for wheel in small if wheel.name.startswith("pydantic-"))
    core = _there(store, "pydantic-core") or [None]
    if core[0] is None:
        platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        exact = next(each for each in wanted_by(pydantic, python) if each.name == "pydantic-core")
        subprocess.run([*pip, "--python-version", python, *platforms, "--dest", str(store), str(exact)], check=True)
        core = _there(store, "pydantic-core")
    for old in _there(store, "repaconv"):
        old.unlink()
    small = [*small, core[0], built(str(ROOT), store)]
    extra = wheels(ONNX, store, python)
    require_whole([*small, *extra], python)
    contents = {"onnx": {wheel.name: wheel for wheel in extra}}
    contents["core"] = {wheel.name: wheel for wheel in small} | benchmarks()
    for name, wanted in BUNDLES.items():
        contents[name] = {wheel.name: wheel for wheel in wheels(wanted, store, python)}
    for name in SOURCES:
        wheel = (_there(store, name) or [built(_pinned(name), store)])[0]
        contents["tensorrt-rtx"][wheel.name] = wheel
    bundles = {}
    for name, files in contents.items():
        whole = packed(files, folder / f"{name}.tar")
        bundles[name] = cut(name, whole, folder)
        whole.unlink()
    text, known = script(bundles, python)
    (folder / "gpu.sh").write_text(text)
    (folder / "kit.json").write_text(json.dumps(known, indent=1, sort_keys=True))
    return known


def main() -> None:
    """See the module's words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    given = parser.parse_args()
    known = make(given.folder, given.python)
    for bundle, pieces in known["bundles"].items():
        size = sum((given.folder / piece).stat().st_size for piece in pieces) / 2**20
        print(f"{bundle}: {len(pieces)} pieces, {size:.0f} MiB")
    print(f"kit {known['id']} in {given.folder}: take it there piece by piece, then `sh gpu.sh`")


if __name__ == "__main__":
    main()

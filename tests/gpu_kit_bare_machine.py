"""`make gpu-bare`: the GPU kit on a machine that has only Python, torch and NumPy, as a rented GPU machine has.

    python tests/gpu_kit_bare_machine.py FOLDER [PYTHON]

Not a test of the suite: it downloads gigabytes, and makes engines of all five methods at their published sizes.
A Python with torch and NumPy alone, no network, pieces one at a time; what needs a card is *not verified here*.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

from gpu import kit

OFFLINE = ["unshare", "-rn"]
TORCH = "torch==2.11.0"  # with CUDA 13: a usual one of such machines
VERSION = "import sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
METHODS, RTX = ("repavit", "riformer", "nondeep", "pyra", "dwconv"), ("rtx-30", "rtx-40", "rtx-50")


def bare(folder: Path, python: str) -> Path:
    """That Python with torch and NumPy, and nothing else; what lies there already stays."""
    found = folder / "bare" / "bin" / "python"
    if not found.is_file():
        subprocess.run([python, "-m", "venv", str(folder / "bare")], check=True)
        subprocess.run([str(found), "-m", "pip", "install", "--quiet", TORCH, "numpy"], check=True)
    return found


def main() -> None:
    """Make it, bring it piece by piece, run it, and hold what it says to what it may say here."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("python", nargs="?", default=sys.executable, help="that of the bare machine")
    given = options.parse_args()
    folder = given.folder.resolve()
    python = bare(folder, given.python)
    completed = subprocess.run([str(python), "-c", VERSION], check=True, capture_output=True, text=True)
    known = kit.make(folder / "kit", completed.stdout.strip())
    arrived, work, out = folder / "arrived", folder / "work", folder / "result.json"
    for place in (arrived, work):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    shutil.copyfile(folder / "kit" / "gpu.sh", arrived / "gpu.sh")
    offline = OFFLINE if subprocess.run([*OFFLINE, "true"], check=False, capture_output=True).returncode == 0 else []
    call = [*offline, "env", f"PYTHON={python}", "sh", str(arrived / "gpu.sh"), "--work", str(work)]
    assert subprocess.call(call) == 3  # nothing is here
    for piece in known["pieces"]:
        shutil.copyfile(folder / "kit" / piece, arrived / piece)
        assert subprocess.call([*call, "--take"]) == 0
        (arrived / piece).unlink()
    code = subprocess.call([*call, "--seconds", "4500", "--out", str(out)])
    result = json.loads(out.read_text())
    engines = [step for step in result["steps"] if step["kind"] == "engine"]
    ahead = [step for step in engines if step["given"]["precision"] == "fp32" and step["given"]["target"] in RTX]
    print(f"{sum('built' in step for step in ahead)} of {len(ahead)} engines ahead of time, exit code {code}")
    assert code == 3
    assert {(step["given"]["method"], step["given"]["target"]) for step in ahead} == set(product(METHODS, RTX))
    assert all(step.get("built") == "passed" for step in ahead), [step.get("why") for step in ahead]
    assert all(step["not_verified"] for step in ahead)
    others = [step for step in result["steps"] if step["kind"] in ("row", "tune", "engine") and step not in ahead]
    assert all(step["status"] == "not verified" and step["why"] for step in others)


if __name__ == "__main__":
    main()

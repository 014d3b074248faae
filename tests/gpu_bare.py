"""The kit on a machine as bare as the one that it is for: `python tests/gpu_bare.py FOLDER`, as `make gpu-bare` does.

Not a test of the suite: it downloads half a gigabyte, and makes engines of all five methods at their published sizes.
A Python with torch and NumPy alone, no network, pieces one at a time; what needs a card is *not verified here*.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from gpu import kit

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
OFFLINE = ["unshare", "-rn"]


def bare(folder: Path) -> Path:
    """A Python with torch and NumPy, of the wheels that this one has been installed from."""
    python = folder / "bare" / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "bare")], check=True)
        wanted = ["-c", str(kit.ROOT / "constraints.txt"), "torch", "numpy"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def main() -> None:
    """Make it, bring it piece by piece, run it, and hold what it says to what it may say here."""
    folder = Path(sys.argv[1]).resolve()
    known = kit.make(folder / "kit", HERE)
    arrived, work, out = folder / "arrived", folder / "work", folder / "result.json"
    for place in (arrived, work):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    shutil.copyfile(folder / "kit" / "gpu.sh", arrived / "gpu.sh")
    offline = OFFLINE if subprocess.run([*OFFLINE, "true"], check=False, capture_output=True).returncode == 0 else []
    call = [*offline, "env", f"PYTHON={bare(folder)}", "sh", str(arrived / "gpu.sh"), "--work", str(work)]
    assert subprocess.call(call) == 3  # nothing is here
    for piece in known["pieces"]:
        shutil.copyfile(folder / "kit" / piece, arrived / piece)
        assert subprocess.call([*call, "--take"]) == 0
        (arrived / piece).unlink()
    code = subprocess.call([*call, "--seconds", "3000", "--out", str(out)])
    result = json.loads(out.read_text())
    engines = [step for step in result["steps"] if step["kind"] == "engine"]
    rows = [step for step in result["steps"] if step["kind"] in ("row", "tune")]
    print(f"{sum('built' in step for step in engines)} of {len(engines)} engines, exit code {code}")
    assert code == 3
    assert len({step["given"]["method"] for step in engines}) == 5
    assert all(step.get("built") == "passed" for step in engines), [step.get("why") for step in engines]
    assert all(step["status"] == "not verified" and step["why"] for step in rows)


if __name__ == "__main__":
    main()

"""make docker-steps: the RUN lines of the x86-64 image in a folder, and the demo with what came of it.

    python tests/docker_steps.py FOLDER

What needs root, or a container, is left out: the user, and the copy between the two stages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_lines(dockerfile: Path) -> list[str]:
    """Each RUN of a Dockerfile as one line of shell."""
    found, whole = [], ""
    for line in dockerfile.read_text().splitlines():
        if line.startswith("#"):
            continue
        whole += line.removesuffix("\\") if line.endswith("\\") else line
        if not line.endswith("\\"):
            if whole.startswith("RUN "):
                found.append(" ".join(whole[4:].split()))
            whole = ""
    return found


def copied(folder: Path) -> None:
    """What .dockerignore lets into the image."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def main() -> None:
    """Run them; leave with the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "source").mkdir(parents=True)
    copied(folder / "source")
    for line in run_lines(ROOT / "docker" / "x86-64.Dockerfile"):
        if "useradd" in line:
            print(f"left out: {line}")
            continue
        here = line.replace("/opt/repaconv", str(folder / "opt"))
        print(here, flush=True)
        subprocess.run(["sh", "-ec", here], cwd=folder / "source", check=True, env={**os.environ, "PIP_ARGS": ""})
    shutil.rmtree(folder / "source")  # the second stage has what was installed alone
    demo = [str(folder / "opt" / "bin" / "repaconv"), "demo", "--arch", "s12", "-o", str(folder / "demo")]
    sys.exit(subprocess.run(demo, cwd=folder, check=False).returncode)


if __name__ == "__main__":
    main()

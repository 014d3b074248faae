"""Size and import time of each package of a repaconv installation, as a table in Markdown.

    python -m venv env && env/bin/pip install . && env/bin/python benchmarks/installation_size.py

Run it with the Python of the environment to measure, on a quiet machine. Import times are the CPU time of a process
that imports nothing else, the smallest of five.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

SMALL_MB = 5
"""Packages below it are one row."""
IMPORTS = {"pillow": "PIL.Image", "onnx-ir": "onnx_ir"}
MEASURE = "import time; a = time.process_time(); import {}; print(time.process_time() - a)"


def size_mb(package: Distribution) -> float:
    """The size of its files without compiled Python, in MB."""
    files = (Path(str(package.locate_file(file))) for file in package.files or () if file.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def import_s(module: str) -> float:
    """Processor seconds of importing a module in a new process."""
    command = [sys.executable, "-c", MEASURE.format(module)]
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5))


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sizes = {package.name.lower(): size_mb(package) for package in distributions()}
    large = sorted((name for name in sizes if sizes[name] >= SMALL_MB), key=lambda name: -sizes[name])
    print("| package | MB | import, s |\n|---|---|---|")
    for name in large:
        print(f"| {name} | {sizes[name]:.0f} | {import_s(IMPORTS.get(name, name.replace('-', '_'))):.1f} |")
    rest = [size for name, size in sizes.items() if name not in large]
    print(f"| {len(rest)} others | {sum(rest):.0f} | |\n| all | {sum(sizes.values()):.0f} | |")


if __name__ == "__main__":
    main()

"""make arm: engines for arm64, run by the real aarch64 ONNX Runtime under emulation, against the x86-64 one.

    python tests/arm64_emulation.py [FOLDER]

An opt-in job of some minutes. It needs Debian bookworm's apt and dpkg, no root: packages of the other architecture are
downloaded and unpacked into the folder, with Debian's emulator and ONNX Runtime's own wheel. The emulated processor is
a Cortex-A76, as on a Raspberry Pi 5: with SVE on, this emulator computes int8 graphs wrongly. Outputs are compared
element by element; times under emulation say nothing and are not taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from planted_faults import META, SETTINGS

import repaconv as rc
from repaconv.core import plugins
from repaconv.core.files import read_artefact
from repaconv.results import ExportArtefact, MethodFold
from repaconv.verification.comparison import link_between
from repaconv.verification.input_batches import random_inputs
from repaconv.verification.model_runners import ImageSession, load_onnx
from repaconv.verification.tolerances import tolerance

PACKAGES = [
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libgomp1",
    "zlib1g",
    "libexpat1",
    "libffi8",
    "libssl3",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "libcrypt1",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "python3.11-minimal",
]
WHEELS = ("numpy", "onnxruntime", "flatbuffers", "protobuf", "packaging")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
CPU = "cortex-a76"
# What ONNX Runtime asks the system for; without them it reads this machine's, and crashes.
FAKED = {
    "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108.00\n"
    "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: 0xd0b\nCPU revision\t: 1\n",
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
}
SCRIPT = """
import platform, sys
import numpy as np
import onnxruntime
settings = onnxruntime.SessionOptions()
settings.intra_op_num_threads = 1
settings.log_severity_level = 3
session = onnxruntime.InferenceSession(sys.argv[1], settings, providers=["CPUExecutionProvider"])
images = np.load(sys.argv[2])
np.save(sys.argv[3], session.run(None, {session.get_inputs()[0].name: images})[0])
print(platform.machine(), "onnxruntime", onnxruntime.__version__)
"""
MODELS = (("repavit", "tiny", None), ("riformer", "s12", 64))


def main() -> int:
    """Prepare, run, compare; exit 1 if an output differs by more than its precision allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".arm"))
    folder = parser.parse_args().folder.resolve()
    missing = [tool for tool in ("apt-get", "dpkg") if not shutil.which(tool)]
    if missing:
        sys.stderr.write(f"error: there is no {missing[0]}: this job needs Debian bookworm.\n")
        return 3
    root, emulator = prepare(folder)
    os.chdir(folder)
    bad = 0
    for method_name, arch, size in MODELS:
        method = plugins.load(plugins.METHODS, method_name)
        checkpoint = folder / f"{method_name}.pth"
        args = {"img_size": size} if size else {}
        torch.save(
            {"state_dict": method.example(arch, seed=1), "meta": META.get(method_name, {}), "args": args}, checkpoint
        )
        rc.fold(checkpoint, settings=SETTINGS.get(method_name, {}), force=True)
        for precision in ("fp32", "int8"):
            exported = rc.export(target="arm64", precision=precision, image_size=size)
            built = rc.build(target="arm64", precision=precision)
            engine = Path("repaconv-out") / method_name / "build" / built.payload.path
            bad += compare(root, emulator, engine, exported, f"{method_name} {arch}")
    return 1 if bad else 0


def compare(root: Path, emulator: Path, engine: Path, exported: ExportArtefact, name: str) -> int:
    """One engine under both; 1 if it does not pass."""
    folded = read_artefact(engine.parent.parent / "fold.json", MethodFold)
    size = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    images = random_inputs((3, *size), count=2, seed=0).images
    np.save("images.npy", images)
    Path("run.py").write_text(SCRIPT)
    command = [emulator, "-cpu", CPU, "-L", root, "-E", f"PYTHONHOME={root}/usr", "-E", f"PYTHONPATH={root}/site"]
    command += [f"{root}/usr/bin/python3.11", "run.py", engine, "images.npy", "arm.npy"]
    said = run(command).strip().splitlines()[-1]
    there, here = np.load("arm.npy"), ImageSession(load_onnx(engine)).run(images)
    link = "engine" if exported.precision == "fp32" else exported.precision
    found = link_between(link, ("x86-64", here), (said, there), logits=True, tolerance=tolerance(link))
    assert found.metrics is not None
    differ = int((there != here).sum())
    print(
        f"{name} {exported.precision}: {found.verdict}, {said} against x86-64: largest difference "
        f"{found.metrics.max_rel_error:.1e} of the largest output, {differ} of {here.size} numbers differ, "
        f"top-1 predictions agree {found.metrics.top1_agreement:.0%}"
    )
    return int(found.verdict != "passed")


def prepare(folder: Path) -> tuple[Path, Path]:
    """The aarch64 root and the emulator; downloaded once."""
    root, tools = folder / "root", folder / "tools"
    emulator = tools / "usr" / "bin" / "qemu-aarch64-static"
    if not (folder / "ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("debs", "own", "wheels", "root/site", "tools"):
            (folder / part).mkdir(parents=True)
        run(["apt-get", "download", "qemu-user-static"], cwd=folder / "own")
        apt = foreign_apt(folder)
        run([*apt, "update"])
        run([*apt, "download", *PACKAGES], cwd=folder / "debs")
        for package in (folder / "own").glob("*.deb"):
            run(["dpkg", "-x", package, tools])
        for package in (folder / "debs").glob("*.deb"):
            run(["dpkg", "-x", package, root])
        pins = Path(__file__).parents[1] / "constraints.txt"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-c", pins]
        pip += ["--python-version", "311", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
        pip += [word for platform in (*PLATFORMS, "any") for word in ("--platform", platform)]
        run([*pip, "-d", folder / "wheels", *WHEELS])
        for wheel in (folder / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(root / "site")
        for name, text in FAKED.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (folder / "ready").touch()
    return root, emulator


def foreign_apt(folder: Path) -> list[str]:
    """apt for arm64 with a state of its own: the machine's stays as it is."""
    state = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
    }
    return ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def run(command: Sequence[object], cwd: Path | None = None) -> str:
    """What it prints; its last words and exit 3 if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"error: {' '.join(map(str, command[:4]))} ...: exit {done.returncode}\n{done.stderr[-2000:]}")
        raise SystemExit(3)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

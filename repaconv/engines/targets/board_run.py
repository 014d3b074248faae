#!/usr/bin/env python3
"""Build, verify and measure on the board: python3 run.py. Needs Python 3.6 and TensorRT's own trtexec, nothing else.

It uses the files next to it, which bundle.json lists, and writes result.tar.gz there; `repaconv collect` reads that on
the host. Exit codes: 0 done, 1 the engine's outputs are wrong, 2 another file is where the result would be written, 3
trtexec is missing or has another TensorRT version than the bundle, 4 a file of the bundle has changed, 5 trtexec
failed.
"""

import argparse
import array
import ast
import glob
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
USUAL = "/usr/src/tensorrt/bin/trtexec"
ONCE = ["--warmUp=0", "--duration=0", "--iterations=1"]


def main():
    """Check the bundle and trtexec, and run all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trtexec", help="where it is, if neither on the PATH nor in " + USUAL)
    parser.add_argument("--any-version", action="store_true", help="go on with another TensorRT, and record it")
    parser.add_argument("-o", "--out", default="result.tar.gz", help="the result")
    chosen = parser.parse_args()
    with open(os.path.join(HERE, "bundle.json"), "rb") as file:
        content = file.read()
        bundle = json.loads(content.decode())
    for name, digest in sorted(bundle["files"].items()):
        path = os.path.join(HERE, name)
        if not os.path.isfile(path) or sha256(path) != digest:
            return leave(4, "%s is not the file that was bundled: unpack the bundle again." % name)
    trtexec = chosen.trtexec or shutil.which("trtexec") or (USUAL if os.path.isfile(USUAL) else "")
    if not trtexec:
        return leave(3, "there is no trtexec: say where it is with --trtexec.")
    said = subprocess.run([trtexec, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.decode()
    version = version_of(said)
    same = version.split(".")[:2] == bundle["runtime_version"].split(".")[:2]
    if not same and not chosen.any_version:
        words = (version or "of unknown version", bundle["runtime_version"], bundle["target"])
        return leave(3, "this trtexec is %s, the bundle is for %s (%s): bundle for this one, or --any-version." % words)
    if os.path.exists(chosen.out) and not is_result(chosen.out):
        return leave(2, "%s is there already and is no result: say another place with -o." % chosen.out)
    work = tempfile.mkdtemp(prefix="work-", dir=HERE)
    try:
        return run(bundle, content, Board(trtexec, said, version, bundle, work), chosen.out)
    finally:
        shutil.rmtree(work)  # created by this run


def run(bundle, content, board, out):
    """Build, verify and measure; write the result also if a step fails, and check the outputs."""
    work, before, problem = board.work, state(), ""
    try:
        board.build()
        board.verify()
        board.measure()
    except subprocess.CalledProcessError as error:
        problem = "trtexec failed (exit %d) at: %s" % (error.returncode, board.step)
    kinds = ("times.json", "profile.json", "layers.json", "output_*.json", "*.log")  # everything except the engine
    names = sorted(os.path.basename(path) for kind in kinds for path in glob.glob(os.path.join(work, kind)))
    result = {
        "bundle_sha256": hashlib.sha256(content).hexdigest(),
        "version": board.version,
        "commands": board.commands,
        "problem": problem,
        "board": describe(),
        "before": before,
        "after": state(),
        "engine": board.engine_facts(),
        "files": {name: sha256(os.path.join(work, name)) for name in names},
    }
    with open(os.path.join(work, "result.json"), "w", encoding="utf-8") as file:
        json.dump(result, file, indent=2, sort_keys=True)
    pack(work, names + ["result.json"], out)
    print("wrote " + out)
    if problem:
        return leave(5, problem + "; its words are in the result.")
    wrong = False
    for number, output in enumerate(bundle["outputs"]):  # integer outputs are compared on the host
        found = (output["name"], board.worst(number) if output["real"] else 0.0, bundle["rtol"])
        print("%s: largest error %.3g of an image's largest number, %.3g allowed for exact engines" % found)
        wrong = wrong or found[1] != found[1] or (bundle["exact"] and found[1] > bundle["rtol"])
    return leave(1, "the engine does not compute what it should.") if wrong else 0


class Board:
    """trtexec of one version, with the files of one bundle."""

    def __init__(self, trtexec, said, version, bundle, work):
        self.trtexec, self.said, self.bundle, self.work = trtexec, said, bundle, work
        self.version = version
        self.major = int(version.split(".")[0] or 0)
        self.commands, self.step = [], ""

    def run(self, step, options):
        """Run trtexec once, with its output in <step>.log; unsupported options are omitted and recorded."""
        self.step = step
        known = [option for option in options if option.split("=")[0] in self.said]
        command, left_out = [self.trtexec] + known, [option for option in options if option not in known]
        self.commands.append({"step": step, "command": command, "left_out": left_out})
        print("%s: %s" % (step, " ".join(command)), flush=True)
        with open(os.path.join(self.work, step + ".log"), "wb") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.work, check=True)

    def build(self):
        """Build the engine, with detailed layer information."""
        bundle = self.bundle
        options = ["--onnx=" + os.path.join(HERE, "model.onnx"), "--saveEngine=engine.plan"]
        options += ["--profilingVerbosity=detailed", "--exportLayerInfo=layers.json", "--timingCacheFile=timing.cache"]
        options += self.shapes("--minShapes=", "--optShapes=", "--maxShapes=")
        if bundle["workspace_mib"]:
            new = "--memPoolSize" in self.said
            options.append(("--memPoolSize=workspace:%d" if new else "--workspace=%d") % bundle["workspace_mib"])
        self.run("build", options + self.precision() + ONCE)

    def precision(self):
        """Return the precision options: before TensorRT 10 they are flags, from then on the graph is typed."""
        precision = self.bundle["precision"]
        if precision == "fp32":
            return ["--noTF32"]
        if self.major >= 10:
            return ["--stronglyTyped"] if self.major == 10 else []
        options = {"fp16": ["--fp16"], "int8": ["--int8", "--fp16"]}[precision]
        if self.bundle["fp32_nodes"]:
            each = ",".join(name + ":fp32" for name in self.bundle["fp32_nodes"])
            options += ["--precisionConstraints=obey", "--layerPrecisions=" + each]
        return options

    def shapes(self, *options):
        """Return these options with the shapes of inputs that have dynamic dimensions."""
        free = [port for port in self.bundle["inputs"] if port["dynamic"]]
        shapes = ",".join("%s:%s" % (quoted(port["name"]), "x".join(map(str, port["shape"]))) for port in free)
        return [option + shapes for option in options] if shapes else []

    def verify(self):
        """Run the recorded inputs through the engine."""
        for call in range(self.bundle["calls"]):
            given = []
            for number, port in enumerate(self.bundle["inputs"]):
                path = os.path.join(self.work, "input_%d_%d.bin" % (call, number))
                with open(path, "wb") as file:
                    file.write(self.taken("input_%d_%d" % (call, number)))
                given.append("%s:%s" % (quoted(port["name"]), path))
            options = ["--loadInputs=" + ",".join(given), "--exportOutput=output_%d.json" % call]
            self.run("verify_%d" % call, ["--loadEngine=engine.plan"] + options + self.shapes("--shapes=") + ONCE)

    def taken(self, name):
        """Return the bytes of an input; before TensorRT 10 integers have 32 bits."""
        kind, content = stored(name)
        return content if kind != "<i8" or self.major >= 10 else array.array("i", array.array("q", content)).tobytes()

    def measure(self):
        """Time kernels only: no transfers, spin wait, a CUDA graph; from TensorRT 11 on that is the default."""
        bundle = self.bundle
        engine = ["--loadEngine=engine.plan"] + self.shapes("--shapes=")
        options = ["--exportTimes=times.json", "--warmUp=%d" % bundle["warmup_ms"], "--iterations=100"]
        options += ["--duration=%d" % bundle["duration_s"]]
        if self.major < 11:
            options += ["--noDataTransfers", "--useSpinWait", "--useCudaGraph"]
        self.run("times", engine + options)
        self.run("profile", engine + ["--exportProfile=profile.json", "--dumpProfile"])

    def worst(self, number):
        """Return an output's largest error over all images, relative to the image's largest expected value.

        NaN if a value is missing or not finite. An image that is near zero by chance is scaled by a quarter of
        the usual largest value, as on the host.
        """
        images = []
        for call in range(self.bundle["calls"]):
            expected = array.array("f", stored("output_%d_%d" % (call, number))[1])
            with open(os.path.join(self.work, "output_%d.json" % call), encoding="utf-8") as file:
                found = {row["name"]: row["values"] for row in json.load(file)}
            values = [float(value) for value in found.get(self.bundle["outputs"][number]["name"], [])]
            if len(values) != len(expected) or any(value != value for value in values):
                return float("nan")
            count = 1 if self.bundle["whole"] else self.bundle["inputs"][0]["shape"][0]
            size = max(1, len(expected) // count)
            for start in range(0, len(expected), size):
                pairs = list(zip(values[start : start + size], expected[start : start + size]))
                images.append((max(abs(a - b) for a, b in pairs), max(abs(b) for _, b in pairs)))
        scales = [scale for _, scale in images if scale > 0]
        usual = 0.25 * statistics.median(scales) if scales else 1.0
        return max([error / (min(max(usual, scale), 1e4 * scale) or usual) for error, scale in images] or [0.0])

    def engine_facts(self):
        """Return size and hash of the engine, which stays on the board."""
        path = os.path.join(self.work, "engine.plan")
        return {"bytes": os.path.getsize(path), "sha256": sha256(path)} if os.path.isfile(path) else {}


def stored(name):
    """Return type and bytes of an array in calls.npz."""
    with zipfile.ZipFile(os.path.join(HERE, "calls.npz")) as calls, calls.open(name + ".npy") as file:
        start = file.read(8)  # magic string and header version
        length = int.from_bytes(file.read(2 if start[6] == 1 else 4), "little")
        return ast.literal_eval(file.read(length).decode("latin1"))["descr"], file.read()


def quoted(name):
    """Quote a tensor name for trtexec, which splits at colons and commas."""
    return "'%s'" % name if ":" in name or "," in name else name


def version_of(text):
    """Parse the version in trtexec's banner: 8.2.1 from [TensorRT v8201], 10.3.0 from v100300."""
    if "[TensorRT v" not in text:
        return ""
    digits = text.split("[TensorRT v")[1].split("]")[0]
    if "." in digits:
        return ".".join(digits.split(".")[:3])
    number, base = int(digits), 1000 if len(digits) < 6 else 10000
    return "%d.%d.%d" % (number // base, number % base // 100, number % 100)


def describe():
    """Describe the board: model, system, power mode."""
    return {
        "model": read("/proc/device-tree/model"),
        "l4t": read("/etc/nv_tegra_release"),
        "system": " ".join(platform.uname()),
        "python": platform.python_version(),
        "nvpmodel": ask(["nvpmodel", "-q"]),
        "jetson_clocks": ask(["jetson_clocks", "--show"]),
    }


def state():
    """Return what changes during a measurement: load, temperatures, clocks."""
    found = {"load": list(os.getloadavg())}
    for zone in sorted(glob.glob("/sys/class/thermal/*")):
        found["%s %s" % (os.path.basename(zone), read(zone + "/type"))] = read(zone + "/temp")
    for cpu in sorted(glob.glob("/sys/devices/system/cpu/cpu*")):
        found[os.path.basename(cpu) + " kHz"] = read(cpu + "/cpufreq/scaling_cur_freq")
    return {name: value for name, value in found.items() if value}


def read(path):
    """Return the text of a small file; empty if it is missing."""
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode("utf-8", "replace").strip().strip("\0")
    except OSError:
        return ""


def ask(command):
    """Return the output of a command; empty if it is missing or not permitted."""
    try:
        return (
            subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=20).decode("utf-8", "replace").strip()
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def sha256(path):
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        [digest.update(piece) for piece in iter(lambda: file.read(1 << 20), b"")]
    return digest.hexdigest()


def pack(folder, names, out):
    """Write the archive completely or not at all."""
    with tarfile.open(out + ".part", "w:gz") as tar:
        for name in names:
            tar.add(os.path.join(folder, name), arcname=name)
    os.replace(out + ".part", out)


def is_result(path):
    """Return whether a file is the result of an earlier run."""
    try:
        with tarfile.open(path) as tar:
            return "result.json" in tar.getnames()
    except (tarfile.TarError, OSError, EOFError):
        return False


def leave(code, message):
    """Print a message, and return the exit code."""
    sys.stderr.write("error: %s\n" % message)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""trtexec replayed: python3 replay.py FOLDER OPTIONS... See README.md beside it. Runs under Python 3.6."""

import array
import json
import os
import shutil
import sys

folder, given = sys.argv[1], dict((word.split("=", 1) + [""])[:2] for word in sys.argv[2:])
version = open(os.path.join(folder, "version")).read().strip()
known = open(os.path.join(folder, "options.txt")).read().split()


def banner(verdict):
    print("&&&& %s TensorRT.trtexec [%s] # trtexec %s" % (verdict, version, " ".join(sys.argv[2:])))


banner("RUNNING")
if "--help" in given:
    print("\n".join("  %s  (replayed)" % name for name in known))
    sys.exit(0)
for name in given:
    if name not in known:
        print("[E] Unknown option: %s %s" % (name, given[name]))
        banner("FAILED")
        sys.exit(1)
if os.environ.get("REPLAY_FAILS") and "--onnx" in given:
    print('[E] [TRT] ModelImporter.cpp:726: While parsing node number 12 [LayerNormalization -> "layer_norm"]:')
    banner("FAILED")
    sys.exit(1)
if "--saveEngine" in given:
    open(given["--saveEngine"], "wb").write(b"replayed")
for option, recorded in (
    ("--exportTimes", os.path.join("..", "times.json")),
    ("--exportProfile", "profile.json"),
    ("--exportLayerInfo", "layers.json"),
):
    if option in given:
        shutil.copy(os.path.join(folder, recorded), given[option])
if "--exportOutput" in given:
    images = given["--loadInputs"].split(":", 1)[1]
    with open(os.path.join(os.path.dirname(images), "bundle.json")) as file:
        bundle = json.load(file)
    values = array.array("f")
    with open(images.replace("input_", "expected_"), "rb") as file:
        values.frombytes(file.read())
    scale = float(os.environ.get("REPLAY_SCALE", "1"))
    text = ", ".join("%g" % (scale * value) for value in values)
    size = "%dx%d" % (bundle["shape"][0], len(values) // bundle["shape"][0])
    with open(given["--exportOutput"], "w") as file:
        file.write(
            '[\n  { "name" : "%s"\n  , "dimensions" : "%s"\n  , "values" : [ %s ]\n  }\n]\n'
            % (bundle["output"], size, text)
        )
print(open(os.path.join(folder, "log.txt")).read())
banner("PASSED")

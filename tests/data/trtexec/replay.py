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
    first = given["--loadInputs"].split(",")[0].split(":")[-1]
    call, home = os.path.basename(first).split("_")[1], os.path.dirname(os.path.dirname(first))
    sys.path.insert(0, home)
    import run  # the board's script: it reads what was bundled

    with open(os.path.join(home, "bundle.json")) as file:
        bundle = json.load(file)
    scale, rows = float(os.environ.get("REPLAY_SCALE", "1")), []
    for number, output in enumerate(bundle["outputs"]):
        kind, content = run.stored("output_%s_%d" % (call, number))
        values = array.array({"<f4": "f", "<i8": "q", "|b1": "b"}[kind])
        values.frombytes(content)
        numbers = ["%g" % (scale * value) if output["real"] else str(value) for value in values]
        count = 1 if bundle["whole"] else bundle["inputs"][0]["shape"][0]
        size = "%dx%d" % (count, len(values) // count)
        text = '{ "name" : "%s"\n  , "dimensions" : "%s"\n  , "values" : [ %s ]\n  }'
        rows.append(text % (output["name"], size, ", ".join(numbers)))
    with open(given["--exportOutput"], "w") as file:
        file.write("[\n  %s\n]\n" % "\n  , ".join(rows))
print(open(os.path.join(folder, "log.txt")).read())
banner("PASSED")

"""Install the pieces of the kit that arrived, and run it: the body of gpu.sh, in Python's standard library alone.

    sh gpu.sh                      read the pieces next to it, unpack them, run every step that they allow
    sh gpu.sh --take               only read pieces: others are sent later
    sh gpu.sh --make               only make the networks and graphs, while other pieces are sent
    sh gpu.sh --plan [--gpu h100]  show which steps would run, in order, and why: on this GPU, or on another one
    sh gpu.sh --seconds 1800 --out result.json [--only cuda.fp32] [--resume earlier.json] [--rehearsal]

Wheels are unpacked into a folder of their own, which comes first on Python's path: nothing is installed, and the torch
of the machine stays as it is.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

KIT = {}  # what gpu.sh has here: the pieces with their hashes


def sha256_of(path):
    """Of a file, read in parts."""
    found = hashlib.sha256()
    with path.open("rb") as opened:
        for part in iter(lambda: opened.read(2**20), b""):
            found.update(part)
    return found.hexdigest()


def take(kit, folders, store):
    """Copy every piece that is right, and say of the others what is wrong with them: {piece: reason}."""
    store.mkdir(parents=True, exist_ok=True)
    wrong = {}
    for piece, right in sorted(kit["pieces"].items()):
        kept = store / piece
        if kept.is_file() and sha256_of(kept) == right:
            continue
        wrong[piece] = "did not arrive"
        for found in (folder / piece for folder in folders):
            if not found.is_file():
                continue
            if sha256_of(found) == right:
                shutil.copyfile(str(found), str(kept))
                del wrong[piece]
                break
            wrong[piece] = "is damaged: its hash is another"
    return wrong


def unpack(kit, wrong, store, work):
    """Join and unpack every bundle whose pieces are all here: {bundle: reason} of the others."""
    missing = {}
    for bundle, pieces in kit["bundles"].items():
        lacking = [f"{piece} {wrong[piece]}" for piece in pieces if piece in wrong]
        place = work / bundle
        if lacking:
            missing[bundle] = "; ".join(lacking)
        elif not (place / ".whole").is_file():
            shutil.rmtree(str(place), ignore_errors=True)
            place.mkdir(parents=True)
            joined = work / (bundle + ".tar")
            with joined.open("wb") as out:
                for piece in pieces:
                    with (store / piece).open("rb") as part:
                        shutil.copyfileobj(part, out)
            with tarfile.open(str(joined)) as archive:
                archive.extractall(str(place))  # the hashes of its pieces are those that the kit names
            joined.unlink()
            (place / ".whole").write_text("")
    return missing


def site_of(work, bundle):
    """A folder with everything from the wheels of a bundle: two may hold the same package in two builds."""
    site = work / f"site-{bundle}"
    site.mkdir(exist_ok=True)
    for wheel in sorted((work / bundle).glob("*.whl")):
        done = site / f".{wheel.name}"
        if not done.is_file():
            with zipfile.ZipFile(str(wheel)) as archive:
                archive.extractall(str(site))
            for kind in ("purelib", "platlib"):
                for data in site.glob("*.data/" + kind):
                    shutil.copytree(str(data), str(site), dirs_exist_ok=True)
            done.write_text("")
    return str(site)


def lacks(kit):
    """Why nothing can run here; empty if it can."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != kit["python"]:
        return f"the wheels are for Python {kit['python']}, this is {here}: name another with PYTHON="
    probe = [sys.executable, "-c", "import torch, numpy; print(torch.__version__)"]
    found = subprocess.run(probe, capture_output=True, check=False)
    return "" if found.returncode == 0 else "this Python has no torch, which the kit does not carry"


def main():
    """See the module's words."""
    parser = argparse.ArgumentParser(
        "gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pieces", type=Path, action="append", help="folders of pieces; next to gpu.sh if left out")
    parser.add_argument("--work", type=Path, default=Path("/tmp/repaconv-gpu"))
    parser.add_argument("--take", action="store_true", help="take pieces, and do no more")
    parser.add_argument("-o", "--out", type=Path, default=Path("result.json"))
    parser.add_argument("--resume", type=Path)
    given, rest = parser.parse_known_args()
    given.work = given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    wrong = take(KIT, given.pieces or [Path(os.environ.get("KIT_FOLDER", "."))], given.work / "pieces")
    for piece, reason in wrong.items():
        print(f"{piece} {reason}")
    print(f"{len(KIT['pieces']) - len(wrong)} of {len(KIT['pieces'])} pieces are here")
    if given.take:
        return 0
    missing = unpack(KIT, wrong, given.work / "pieces", given.work)
    why = "the bundle core is not whole: " + missing["core"] if "core" in missing else lacks(KIT)
    if why:
        print("not verified: " + why)
        return 3
    (given.work / "kit.json").write_text(json.dumps(KIT))
    whole = [bundle for bundle in KIT["bundles"] if bundle not in missing]
    sites = [site_of(given.work, bundle) for bundle in reversed(whole)]  # of two the later one's comes first
    before = [*sites, str(given.work / "core" / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    lines = ["--work", str(given.work), "--missing", json.dumps(missing), "--out", str(given.out.resolve())]
    lines += ["--resume", str(given.resume.resolve())] if given.resume else []
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, before)))
    # from a folder of its own: what lies where it was called may have the same names
    return subprocess.call([sys.executable, "-m", "gpu.session", *lines, *rest], env=environment, cwd=str(given.work))


if __name__ == "__main__":
    sys.exit(main())

"""Damaged input other than checkpoints and graphs: artefacts, recipes, targets, arrays, images, results of boards."""

from __future__ import annotations

import atexit
import gzip
import io
import json
import os
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import file_damage
import numpy as np
import torch
from PIL import Image

import repaconv
from repaconv.core import run_folder
from repaconv.core.files import read_artefact
from repaconv.distributed.sweep import read_matrix
from repaconv.engines import trtexec_logs
from repaconv.engines.targets.schema import from_file
from repaconv.results import Baselines, Preprocessing
from repaconv.sources.named_architectures import of_folder
from repaconv.stages.recipe.recipe_file import read_recipe
from repaconv.verification.input_batches import image_inputs, npz_inputs
from torture.sandbox import Case
from torture.small_checkpoints import net

RECIPE = """checkpoint = "c.pth"
force = false
[set]
num_heads = 3
[verify]
inputs = "c.npz"
require = ["recorded"]
[export]
precisions = ["fp32", "int8"]
[bench]
baseline = "baselines.json"
max_regression = 0.05
"""
TARGET = """extends = "x86-64"
name = "mine"
about = "a machine"
opset = 17
precisions = ["fp32"]
[bench]
threads = 1
batch = 1
rounds = 10
warmup_rounds = 1
"""
MATRIX = """[[models]]
checkpoint = "c.pth"
"""
CONFIG = '{"architecture": "resnet18", "num_classes": 5, "pretrained_cfg": {"mean": [0.5], "input_size": [3, 32, 32]}}'
WORDS = ("", "x", "../../etc/passwd", "a\nb", "\x1b[2J", "NaN", "9" * 400, "x" * 100_000, "\u202e", "0", "-1", "1e400")
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1 << 70, 1e308, [], {}, [[]], [None], {"": {}}, "Infinity", *WORDS)


def edited(plain: Any, rng: random.Random) -> Any:
    """JSON with something gone, doubled, of another type, or deeper."""
    if isinstance(plain, dict) and plain and rng.random() < 0.85:
        key = rng.choice(sorted(plain))
        changed = dict(plain)
        way = rng.randrange(8)
        if way == 0:
            del changed[key]
        elif way == 1:
            changed[rng.choice(WORDS)] = changed.pop(key)
        else:
            changed[key] = edited(plain[key], rng)
        return changed
    if isinstance(plain, list) and plain and rng.random() < 0.7:
        place = rng.randrange(len(plain))
        return [edited(each, rng) if n == place else each for n, each in enumerate(plain)]
    return rng.choice(VALUES)


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Edited as JSON where it is, else, or every third time, its bytes."""
    with_json = rng.random() < 0.66
    if with_json and content[:1] == b"{":
        return json.dumps(edited(json.loads(content), rng)).encode()
    if rng.random() < 0.03:
        return rng.choice([b"", b"null", b"[]", b"7", _nested(100_000).encode(), b"\xff\xfe{}", b'{"a":' * 50_000])
    return file_damage.changed(content, rng.choice([1, 1, 2, 5]), rng)


# --- runs ---------------------------------------------------------------------------------------------------


def scratch(prefix: str) -> Path:
    """A folder that goes with this process."""
    at = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, at, ignore_errors=True)
    return at


@cache
def whole_run() -> Path:
    """A run with everything in it that the command line writes, made by a child: runtimes leave threads behind."""
    at = scratch("torture-run-")
    child = os.fork()
    if not child:
        os.chdir(at)
        network = net("riformer")
        torch.save(network.whole, at / "c.pth")
        repaconv.fold("c.pth", out="run", settings=network.settings)
        repaconv.export("run")
        repaconv.verify("run", count=1)
        repaconv.build("run", target="x86-64")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not status
    return at


def runs_damaged(count: int, seed: int) -> Iterator[Case]:
    """One file of a whole run is another; `verify` and the other stages' reading must not stumble."""
    rng, at = random.Random(seed), whole_run()
    files = sorted(
        str(path.relative_to(at)) for path in at.rglob("*.*") if path.is_file() and "latest" not in path.name
    )
    weighted = [name for name in files for _ in range(5 if name.endswith(".json") else 1)]
    for number in range(count):
        name, own = rng.choice(weighted), rng.randrange(1 << 60)
        yield Case("runs", f"{seed}.{number} {name}", partial(_run_with, at, name, own), _verified)


def _run_with(at: Path, name: str, seed: int, folder: Path) -> Path:
    shutil.copytree(at, folder, dirs_exist_ok=True)
    content = damaged((at / name).read_bytes(), random.Random(seed))
    fold = folder / "run/fold.json"
    fold.write_text(fold.read_text().replace(str(at), str(folder)))
    (folder / name).write_bytes(content if name != "run/fold.json" else content.replace(bytes(at), bytes(folder)))
    return folder / "run"


def _verified(path: Path) -> str:
    from repaconv.stages.shared.exports_of_run import exports_of

    run = run_folder.find_run(path)
    folded = run_folder.fold_of(run)
    exports_of(run, folded)
    run.later_stages()
    repaconv.verify(path, count=1, out=path.parent / "verdict.json")
    return "sound"


# --- texts, arrays, images ----------------------------------------------------------------------------------


def outcome_of_read(path: Path, read: Callable[[Path], object]) -> str:
    read(path)
    return "sound"


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, input=np.zeros((2, 3, 8, 8), np.float32), output=np.zeros((2, 5)), labels=np.array([1, 2]))
    return out.getvalue()


def _arrays(path: Path) -> None:
    given = npz_inputs(path, 3, 5)
    given.piece(0, given.shape[0])


def _baselines() -> bytes:
    kept = {"sha256": "0" * 64, "p50_ms": 1.5, "subject_ms": [1.0, 2.0], "machine": {"processor": "x"}}
    return json.dumps({"machines": {"here": {"a": kept}}}).encode()


def _picture(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def images(path: Path) -> None:
    wanted = Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3, image_size=(32, 32), source="x")
    given = image_inputs(path.parent, wanted, size=(32, 32), channels=3, classes=5)
    given.piece(0, given.shape[0])


def _result() -> bytes:
    files = {"build.log": b"[TensorRT v8201]", "times.json": b'[{"computeMs": 1.0}]'}
    result = {"bundle_sha256": "0" * 64, "files": {}, "commands": [], "engine": {}, "version": "8.2.1", "problem": ""}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in {**files, "result.json": json.dumps(result).encode()}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _collected(path: Path) -> None:
    repaconv.collect(path, whole_run() / "run")


def _logged(path: Path) -> None:
    content = path.read_bytes()
    text = content.decode("utf-8", "replace")
    trtexec_logs.version_of(text)
    trtexec_logs.median_ms(text)
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return
    for read in (
        trtexec_logs.compute_ms,
        trtexec_logs.layer_times,
        trtexec_logs.outputs,
        trtexec_logs.layer_types,
        trtexec_logs.fused_attentions,
    ):
        try:
            read(plain)
        except repaconv.core.errors.RepaconvError:
            continue


def _logs() -> dict[str, bytes]:
    at = Path(__file__).resolve().parents[1] / "data/trtexec"
    return {
        str(path.relative_to(at)): path.read_bytes()
        for path in sorted(at.rglob("*.*"))
        if path.suffix in (".json", ".log", ".gz")
    }


def _folder(path: Path) -> None:
    of_folder(path.parent)


KINDS: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], object]]] = {
    "recipes": ("r.toml", RECIPE.encode, read_recipe),
    "targets": ("t.toml", TARGET.encode, from_file),
    "matrices": ("m.toml", MATRIX.encode, read_matrix),
    "baselines": ("b.json", _baselines, partial(read_artefact, kind=Baselines)),
    "Hugging Face folders": ("config.json", CONFIG.encode, _folder),
    "arrays": ("a.npz", _npz, _arrays),
    "images, png": ("i.png", partial(_picture, "png"), images),
    "images, jpeg": ("i.jpg", partial(_picture, "jpeg"), images),
    "images, tiff": ("i.tiff", partial(_picture, "tiff"), images),
    "images, webp": ("i.webp", partial(_picture, "webp"), images),
    "boards' results": ("r.tar.gz", _result, _collected),
}


def texts(count: int, seed: int) -> Iterator[Case]:
    """Small files of every kind, damaged."""
    whole_run()
    rng = random.Random(seed)
    for number in range(count):
        kind = rng.choice(sorted(KINDS))
        name, content, read = KINDS[kind]
        make = partial(_written, name, content(), rng.randrange(1 << 60))
        yield Case(kind, f"{seed}.{number} {name}", make, partial(outcome_of_read, read=read))
    logs = _logs()
    for number in range(count // 10):
        name = rng.choice(sorted(logs))
        make = partial(_written, Path(name).name, logs[name], rng.randrange(1 << 60))
        yield Case("trtexec", f"{seed}.{number} {name}", make, partial(outcome_of_read, read=_logged))


def _written(name: str, content: bytes, seed: int, folder: Path) -> Path:
    if name == "config.json":
        (folder / "model.safetensors").write_bytes(b"x")
    rng = random.Random(seed)
    if name.endswith(".gz") and rng.random() < 0.6:
        content = gzip.compress(damaged(gzip.decompress(content), rng))
    else:
        content = damaged(content, rng)
    (folder / name).write_bytes(content)
    return folder / name

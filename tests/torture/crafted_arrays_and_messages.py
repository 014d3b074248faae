"""Hand-crafted hostile arrays, images, results of boards, and messages between machines."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from repaconv.core.files import sha256_of_bytes
from repaconv.distributed.benchmark_jobs import Job, Model, checked_result, run_job, target_definition
from repaconv.results import BenchArtefact
from repaconv.stages.bench.options import BenchOptions
from torture import damaged_artefacts, graphs
from torture.sandbox import MARKER, Case

SOUND = np.zeros((2, 3, 8, 8), np.float32)


class Runs:
    """What a pickle runs when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(MARKER),)


def _npz(**named: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **named)
    return out.getvalue()


def _zipped(entries: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return out.getvalue()


def _npy(header: str, content: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n" + content


def _whole(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def arrays() -> Iterator[tuple[str, bytes]]:
    """.npz files."""
    yield "what runs when it is unpickled", _npz(input=np.array([Runs()], dtype=object))
    yield "what runs, beside images", _npz(input=SOUND, extra=np.array([Runs()], dtype=object))
    yield "what runs, as labels", _npz(input=SOUND, labels=np.array([Runs(), Runs()], dtype=object))
    yield "a pickle in place of an array", _zipped({"input.npy": b"\x80\x04cos\nsystem\n(Vtouch it-ran\ntR."})
    for label, value in (("NaN", np.nan), ("infinity", np.inf)):
        yield f"images of {label}", _npz(input=np.full_like(SOUND, value))
        yield f"an output of {label}", _npz(input=SOUND, output=np.full((2, 5), value))
    for label in ("float16", "int8", "bool", "complex64", "U3", "S3", "M8[s]", "V4", ">f4"):
        yield f"images of {label}", _npz(input=np.zeros((2, 3, 8, 8), label))
    yield "a record of fields", _npz(input=np.zeros((2, 3, 8, 8), [("a", "f4"), ("b", "O")]))
    for shape in ((0, 3, 8, 8), (2, 3, 8), (2, 4, 8, 8), (2, 3, 8, 8, 1), (), (2, 3, 0, 8)):
        yield f"images of shape {shape}", _npz(input=np.zeros(shape, np.float32))
    for shape in ("(2, 3, 8, 1099511627776)", "(-1, 3, 8, 8)", "(2, 3, 8, 99999999999999999999)", "7", "(2.5,)"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        yield f"a claim of {shape}", _zipped({"input.npy": _npy(header, bytes(64))})
    for header in (
        "__import__('os').system('touch it-ran')",
        "{" * 200,
        "{'descr': '|O', 'fortran_order': 1, 'shape': ()}",
    ):
        yield f"a header {header[:30]!r}", _zipped({"input.npy": _npy(header)})
    for name in ("../input.npy", "/etc/input.npy", "in\nput.npy", "input", "input.npy/x.npy", "a" * 60_000 + ".npy"):
        yield f"a name {name[:20]!r}", _zipped({name: _whole(SOUND)})
    for label, labels in (
        ("beyond", [7, 0]),
        ("below", [-2, 0]),
        ("of floats", [0.5, 1.0]),
        ("too few", [0]),
        ("of texts", ["a", "b"]),
    ):
        yield f"labels {label}", _npz(input=SOUND, labels=np.array(labels))
    yield "two arrays of four dimensions", _npz(a=SOUND, b=SOUND)
    yield "no array", _zipped({})
    yield "an array alone", _whole(SOUND)
    yield "a zip of texts", _zipped({"input.npy": b"text", "readme": b"x"})
    bomb = _npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({1 << 28},)}}", bytes(1 << 28))
    yield "a bomb", _zipped({f"{name}.npy": bomb for name in ("input", "more", "still_more", "most", "yet")})


def _saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def _png(width: int, height: int, depth: int = 8, colour: int = 2, content: bytes = b"") -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def images() -> Iterator[tuple[str, bytes]]:
    """Pictures."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 4), dtype=np.uint8)
    rgb = Image.fromarray(noise[..., :3])
    for mode in ("1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"):
        for kind in ("png", "tiff", "jpeg", "webp"):
            try:
                image = Image.fromarray(noise[..., 0].astype(np.uint16)) if mode == "I;16" else rgb.convert(mode)
                content = _saved(image, kind)
            except (OSError, ValueError, KeyError):
                continue
            yield f"{mode} as {kind}", content
    exif = Image.Exif()
    for turned in (3, 6, 8, 99):
        exif[0x0112] = turned
        yield f"turned by EXIF {turned}", _saved(rgb, "jpeg", exif=exif)
    for kind in ("gif", "webp", "tiff", "png"):
        yield f"moving, {kind}", _saved(rgb, kind, save_all=True, append_images=[rgb.rotate(n) for n in (90, 180)])
    for width, height in ((60_000, 60_000), (20_000, 8_000), (1 << 31, 1), (0, 5), (1, 1 << 30)):
        yield f"a claim of {width} x {height}", _png(width, height, content=zlib.compress(bytes(1000)))
    yield "a bomb", _png(9_000, 9_000, content=zlib.compress(bytes(27_001 * 9_000)))
    for depth, colour in ((16, 2), (16, 0), (1, 0), (3, 2), (8, 9)):
        yield f"{depth} bits of kind {colour}", _png(40, 40, depth, colour, zlib.compress(bytes(40 * 250)))
    whole = _saved(rgb, "jpeg")
    for share in (0.1, 0.5, 0.9):
        yield f"cut at {share}", whole[: int(len(whole) * share)]
    yield "1 x 1", _saved(rgb.resize((1, 1)), "png")
    yield "1 x 4000", _saved(rgb.resize((1, 4000)), "png")
    yield "a picture made of letters", b"P3\n40 40\n255\n" + b"999999999999 " * 4800
    yield "a picture of another kind inside", b"P6\n99999 99999\n255\n"
    yield "a text", b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(touch it-ran) system\n"


def results() -> Iterator[tuple[str, bytes]]:
    """What claims to come from a board."""
    result = json.dumps({"bundle_sha256": "0" * 64, "files": {}, "commands": [], "version": "8.2.1", "problem": ""})
    sound = ("result.json", result.encode(), tarfile.REGTYPE, "")

    def tar(*entries: tuple[str, bytes, bytes, str], kind: str = "w:gz") -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=kind) as archive:  # type: ignore[call-overload]
            for name, content, what, link in entries:
                info = tarfile.TarInfo(name)
                info.size, info.type, info.linkname = len(content), what, link
                archive.addfile(info, io.BytesIO(content))
        return out.getvalue()

    for name in ("../out", "/tmp/out", "a/../../out", ".hidden", "a/b", "", "..", "a\nb", "\u202e", "x" * 5000):
        yield f"a file {name[:20]!r}", tar(sound, (name, b"x", tarfile.REGTYPE, ""))
    for told_as, what in (
        ("link", tarfile.SYMTYPE),
        ("hard link", tarfile.LNKTYPE),
        ("pipe", tarfile.FIFOTYPE),
        ("device", tarfile.CHRTYPE),
        ("folder", tarfile.DIRTYPE),
        ("unknown", b"9"),
    ):
        yield f"a {told_as}", tar(sound, ("build.log", b"", what, "/etc/passwd"))
    yield "a link in place of the result", tar(("result.json", b"", tarfile.SYMTYPE, "/etc/passwd"))
    yield "one name twice", tar(sound, sound)
    yield "a bomb", tar(sound, *[(f"{n}.log", bytes(1 << 26), tarfile.REGTYPE, "") for n in range(8)])
    yield "a hundred thousand files", tar(sound, *[(f"{n}", b"", tarfile.REGTYPE, "") for n in range(100_000)])
    for kind in ("w:", "w:bz2", "w:xz"):
        yield f"packed as {kind}", tar(sound, kind=kind)
    for content in (
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"\xff",
        b'{"files": {"a": 1}}',
        b'{"files": {"result.json": "x"}}',
    ):
        yield f"a result {content[:20]!r}", tar(("result.json", content, tarfile.REGTYPE, ""))


def _model() -> bytes:
    return graphs.tokens().SerializeToString()


def _asked(content: bytes) -> dict[str, Any]:
    order = BenchOptions(batch=1, threads=1, rounds=2)
    models = (Model(name="m", sha256=sha256_of_bytes(content)),)
    return Job.of(target_definition("x86-64"), models, order).model_dump(mode="json")


def _job(rng: random.Random) -> tuple[Any, dict[str, bytes]]:
    """A job, edited, or whose models are others than it says."""
    content = _model()
    own = sha256_of_bytes(content)
    plain = _asked(content)
    contents = {own: rng.choice([content, content[:-1], b"", damaged_artefacts.damaged(content, rng)])}
    return damaged_artefacts.edited(plain, rng), rng.choice([contents, {}, {"0" * 64: content}])


def _read_job(path: Path) -> str:
    seed = int(path.read_text())
    job, contents = _job(random.Random(seed))
    run_job(job, contents)
    return "sound"


@cache
def _answer() -> dict[str, Any]:
    """What a machine says to a job, measured by a child: runtimes leave threads behind."""
    result = damaged_artefacts.scratch("torture-answer-") / "answer.json"
    child = os.fork()
    if not child:
        content = _model()
        result.write_text(json.dumps(run_job(_asked(content), {sha256_of_bytes(content): content})))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not status
    return dict(json.loads(result.read_text()))


def _read_answer(path: Path) -> str:
    rng, plain = random.Random(int(path.read_text())), _answer()
    sha256s = tuple(Model(name=row["name"], sha256=row["sha256"]) for row in plain["latencies"])
    order = BenchOptions(batch=plain["batch"], threads=plain["threads"], rounds=plain["rounds"])
    found = checked_result(Job.of(target_definition("x86-64"), sha256s, order), damaged_artefacts.edited(plain, rng))
    assert isinstance(found, BenchArtefact)
    return "sound"


def _told(path: Path, *, seed: int) -> Path:
    (path / "seed").write_text(str(seed))
    return path / "seed"


def messages(count: int, seed: int) -> Iterator[Case]:
    """Between a desk and its workers: jobs with other fields or models, answers to other questions."""
    _answer()
    rng = random.Random(seed)
    for number in range(count):
        read = _read_job if number % 4 == 0 else _read_answer
        make = partial(_told, seed=rng.randrange(1 << 60))
        yield Case("farm messages", f"{seed}.{number} {read.__name__}", make, read, alone=True)


def put(name: str, content: bytes, folder: Path) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


KINDS: dict[str, tuple[str, Callable[[], Iterator[tuple[str, bytes]]]]] = {
    "arrays": ("a.npz", arrays),
    "images, png": ("i.png", images),
    "boards' results": ("r.tar.gz", results),
}


def hostile() -> Iterator[Case]:
    """All of them."""
    damaged_artefacts.whole_run()
    for kind, (name, each) in KINDS.items():
        read = damaged_artefacts.KINDS[kind][2]
        for label, content in each():
            yield Case(
                f"{kind.partition(',')[0]}, crafted",
                label,
                partial(put, name, content),
                partial(damaged_artefacts.outcome_of_read, read=read),
            )

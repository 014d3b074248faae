"""Checkpoint files of every container format with unusual structure, complete enough to be opened."""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from torture.pickles import TOUCH, call, name, state_dict_with, text


def in_zip(path: Path, content: bytes) -> Path:
    """As torch.save writes it since 1.6."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", torch.arange(12.0).numpy().tobytes())
        archive.writestr("archive/version", b"3\n")
    return path


def in_legacy(path: Path, content: bytes) -> Path:
    """As torch.save wrote it before."""
    out = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(value, out, protocol=2)
    out.write(content)
    pickle.dump(["0"], out, protocol=2)
    out.write(struct.pack("<q", 12) + torch.arange(12.0).numpy().tobytes())
    path.write_bytes(out.getvalue())
    return path


CONTAINERS: dict[str, Callable[[Path, bytes], Path]] = {"zip": in_zip, "legacy": in_legacy}


# --- zips -----------------------------------------------------------------------------------------------------

Make = Callable[[Path], Path]


def surgery(whole: bytes) -> Iterator[tuple[str, Make]]:
    """A sound zip of torch.save, opened and sewn up again; some are as sound as before."""

    def again(compression: int = zipfile.ZIP_STORED, **changed: bytes) -> Make:
        def make(folder: Path) -> Path:
            with zipfile.ZipFile(io.BytesIO(whole)) as read, zipfile.ZipFile(folder / "c.pth", "w", compression) as out:
                for info in read.infolist():
                    base = info.filename.rpartition("/")[2]
                    out.writestr(info.filename, changed.get(base, read.read(info)))
            return folder / "c.pth"

        return make

    def written(change: Callable[[bytes], bytes]) -> Make:
        def make(folder: Path) -> Path:
            (folder / "c.pth").write_bytes(change(whole))
            return folder / "c.pth"

        return make

    for label, kind in (("deflated", zipfile.ZIP_DEFLATED), ("bzip2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA)):
        yield f"packed, {label}", again(kind)
    yield "a byteorder of nonsense", again(byteorder=b"sideways")
    yield "a big-endian byteorder", again(byteorder=b"big")
    yield "an empty pickle", again(**{"data.pkl": b""})
    yield "streamed, with data descriptors", _streamed(whole)
    yield "every record in zip64", _in_zip64(whole)
    yield "something before it", written(lambda data: b"#!/bin/sh\n" + data)
    yield "something behind it", written(lambda data: data + bytes(100))
    yield "two, one behind the other", written(lambda data: data + data)
    end = whole.rindex(b"PK\5\6")
    yield "a comment", written(lambda data: data[: end + 20] + b"\x05\0hello")
    for field, at, width in (("records", 10, 2), ("size of the index", 12, 4), ("place of the index", 16, 4)):
        for value in (0, 1, (1 << (8 * width)) - 2):
            put = value.to_bytes(width, "little")
            change = lambda data, at=at, put=put: data[: end + at] + put + data[end + at + len(put) :]  # noqa: E731
            yield f"{field} {value}", written(change)
    central = [place for place in range(len(whole) - 4) if whole[place : place + 4] == b"PK\1\2"]
    for field, at, width in (
        ("flags", 8, 2), ("method", 10, 2), ("crc", 16, 4), ("packed size", 20, 4), ("size", 24, 4), ("name", 28, 2),
        ("extra", 30, 2), ("disk", 34, 2), ("attributes", 38, 4), ("place", 42, 4),
    ):  # fmt: skip
        for number in (0, len(central) // 2, -1):
            for value in (0, 1, 12, 99, (1 << (8 * width)) - 1):
                put, place = value.to_bytes(width, "little"), central[number] + at
                change = lambda data, p=place, put=put: data[:p] + put + data[p + len(put) :]  # noqa: E731
                yield f"{field} {value} of record {number}", written(change)


def _streamed(whole: bytes) -> Make:
    class Pipe(io.RawIOBase):
        """What cannot be sought, so that sizes stand behind the data."""

        def __init__(self, path: Path) -> None:
            self.file = path.open("wb")

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(io.BytesIO(whole)) as read:
            pipe = Pipe(folder / "c.pth")
            with zipfile.ZipFile(pipe, "w") as out:  # type: ignore[arg-type]
                for info in read.infolist():
                    out.writestr(info.filename, read.read(info))
            pipe.flush()
        return folder / "c.pth"

    return make


def _in_zip64(whole: bytes) -> Make:
    def make(folder: Path) -> Path:
        with zipfile.ZipFile(io.BytesIO(whole)) as read, zipfile.ZipFile(folder / "c.pth", "w") as out:
            for info in read.infolist():
                with out.open(info.filename, "w", force_zip64=True) as record:
                    record.write(read.read(info))
        return folder / "c.pth"

    return make


def crowds(whole: bytes) -> Iterator[tuple[str, Make]]:
    """Zips with records that no checkpoint has."""

    def adding(*more: tuple[str, bytes], packed: bool = False) -> Make:
        def make(folder: Path) -> Path:
            path = folder / "c.pth"
            path.write_bytes(whole)
            with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as out:
                for label, content in more:
                    out.writestr(label, content)
            return path

        return make

    with zipfile.ZipFile(io.BytesIO(whole)) as read:
        names = read.namelist()
    for label in names[:3]:
        yield f"{label} twice", adding((label, b"other"))
    yield "a path upwards", adding(("../../../../tmp/escaped", b"x"))
    yield "an absolute path", adding(("/tmp/escaped", b"x"))
    yield "a second pickle", adding(("other/data.pkl", state_dict_with(b"N")))
    yield "a script module", adding(("archive/constants.pkl", b"\x80\x02)."))
    yield "code beside it", adding(("archive/code/__torch__.py", b"import os; os.system('touch it-ran')"))
    yield "an archive in it", adding(("archive/data/99", whole))
    yield "a name of 60,000 letters", adding(("x" * 60_000, b"x"))
    yield "ten thousand records", adding(*((f"archive/more/{n}", b"") for n in range(10_000)))
    yield "a bomb", adding(("archive/more", bytes(1 << 28)), packed=True)


def tars() -> Iterator[tuple[str, Make]]:
    """torch's first format, and what a tar may hold besides."""

    def tar(*members: tuple[tarfile.TarInfo, bytes]) -> Make:
        def make(folder: Path) -> Path:
            with tarfile.open(folder / "c.pth", "w", format=tarfile.PAX_FORMAT) as out:
                for info, content in members:
                    info.size = len(content) if info.isreg() else info.size
                    out.addfile(info, io.BytesIO(content))
            return folder / "c.pth"

        return make

    def member(label: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
        info = tarfile.TarInfo(label)
        info.type, info.linkname = kind, to
        return info

    def p(value: object) -> bytes:
        return pickle.dumps(value, protocol=2)

    evil = b"\x80\x02" + call(name("os", "system"), text(TOUCH)) + b"."
    rest = [(member("tensors"), p(0)), (member("pickle"), p({}))]
    yield "nothing in it", tar((member("sys_info"), p({})))
    yield "hostile storages", tar((member("storages"), evil), *rest)
    yield "hostile tensors", tar((member("storages"), p(0)), (member("tensors"), evil), (member("pickle"), p({})))
    yield (
        "a hostile pickle",
        tar((member("storages"), p(0) + p([])), (member("tensors"), p(0)), (member("pickle"), evil)),
    )
    for count in (-1, 1 << 40, "x", None, [1]):
        yield f"{count} storages", tar((member("storages"), p(count)), *rest)
    kind = p((3, "cpu", torch.FloatStorage))
    for length in (-1, 1 << 62, 6):
        storages = p(1) + kind + struct.pack("<q", length) + bytes(24) + p([])
        yield f"a storage of {length}", tar((member("storages"), storages), *rest)
    for views in ([(1, 2, 3, 4)], [(1, 3, -5, 1 << 40)], 7, [()], [(3, 3, 0, 6)]):
        storages = p(1) + kind + struct.pack("<q", 6) + bytes(24) + p(views)
        yield f"views {views}", tar((member("storages"), storages), *rest)
    sound = p(1) + kind + struct.pack("<q", 6) + bytes(24) + p([])
    for dims in (-1, 1 << 20, (1 << 31) - 1):
        tensors = p(1) + p((7, 3, torch.FloatTensor)) + struct.pack("<ii", dims, 0) + bytes(40)
        yield f"a tensor of {dims} axes", tar((member("storages"), sound), (member("tensors"), tensors), rest[1])
    for label, info in (
        ("a link out", member("storages", tarfile.SYMTYPE, "/etc/passwd")),
        ("a hard link out", member("storages", tarfile.LNKTYPE, "/etc/passwd")),
        ("a device", member("storages", tarfile.CHRTYPE)),
        ("a pipe", member("storages", tarfile.FIFOTYPE)),
        ("a folder", member("storages", tarfile.DIRTYPE)),
        ("a path upwards", member("../../storages")),
    ):
        yield label, tar((info, b""), *rest)


def places(whole: bytes) -> Iterator[tuple[str, Make]]:
    """What stands where a file is expected, and files of strange names."""

    def making(act: Callable[[Path], object], label: str = "c.pth") -> Make:
        def make(folder: Path) -> Path:
            act(folder / label)
            return folder / label

        return make

    def bind(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)  # a whole path may be too long for one

    def link(path: Path) -> None:
        path.with_name("real.pth").write_bytes(whole)
        path.symlink_to("real.pth")

    for suffix in ("pth", "onnx", "safetensors", "txt"):
        yield f"a pipe, .{suffix}", making(os.mkfifo, f"c.{suffix}")
        yield f"a folder, .{suffix}", making(Path.mkdir, f"c.{suffix}")
        yield f"a socket, .{suffix}", making(bind, f"c.{suffix}")
        yield f"an empty file, .{suffix}", making(Path.touch, f"c.{suffix}")
        yield f"an endless device, .{suffix}", making(lambda path: path.symlink_to("/dev/zero"), f"c.{suffix}")
    yield "a link to a file", making(link)
    yield "a link to nothing", making(lambda path: path.symlink_to("nowhere"))
    yield "a link to itself", making(lambda path: path.symlink_to(path.name))
    yield "a link to a terminal", making(lambda path: path.symlink_to("/dev/tty"))
    yield "a file of the system", making(lambda path: path.symlink_to("/proc/self/maps"))
    yield "memory itself", making(lambda path: path.symlink_to("/proc/self/mem"))
    yield "a file without an end", making(lambda path: path.write_bytes(b"PK\3\4") and os.truncate(path, 1 << 40))
    for label in (
        "a\nb.pth",
        "a b'c\"d.pth",
        "-o.pth",
        "\u202egnp.pth",
        "[bold]x.pth",
        "\udcff\udcfe.pth",
        "x" * 250,
    ):
        yield f"a name: {label!a}", making(lambda path: path.write_bytes(whole), label)
    yield "a name too long", lambda folder: folder / ("x" * 300)
    yield "a name with a zero", lambda folder: folder / "a\0b.pth"
    yield "no name", lambda folder: Path()

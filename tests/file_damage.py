"""Random damage to checkpoint files. A damaged file must be refused by its name, or give the same weights.

``python tests/file_damage.py CASES [SEED]`` makes so many and prints what became of them.
"""

from __future__ import annotations

import io
import random
import signal
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import repaconv
from repaconv.checkpoints import read_checkpoint
from repaconv.core import plugins
from repaconv.core.errors import RepaconvError

SECONDS = 20


# --- sound files, small, in every container -----------------------------------------------------------


def sound(folder: Path) -> dict[str, Path]:
    """One checkpoint a container, with what trainers put beside weights."""
    method = plugins.load(plugins.METHODS, "repavit")
    weights = method.example("tiny", 1)
    whole = {"model": weights, "epoch": 3, "args": {"idle_ratio": 0.75, "input_size": 32}, "optimizer": {"state": {}}}
    paths = {name: folder / f"sound.{name}" for name in ("zip", "legacy", "safetensors", "packed", "without")}
    torch.save(whole, paths["zip"])
    torch.save(whole, paths["legacy"], _use_new_zipfile_serialization=False)
    save_file(weights, paths["safetensors"], metadata={"epoch": "3"})
    with zipfile.ZipFile(paths["zip"]) as read, zipfile.ZipFile(paths["packed"], "w", zipfile.ZIP_DEFLATED) as write:
        for info in read.infolist():
            write.writestr(info.filename, read.read(info))
    torch.serialization.set_crc32_options(False)
    torch.save(whole, paths["without"])
    torch.serialization.set_crc32_options(True)
    return paths


# --- damages --------------------------------------------------------------------------------------------

Damage = Callable[[bytearray, random.Random], bytearray]


def _spot(data: bytearray, rng: random.Random) -> tuple[int, int]:
    """A place and a length; every second near the end or the begin, where the structure is."""
    length = min(rng.choice([1, 2, 4, 8, 64, 512, 4096]), len(data))
    edge = min(2048, len(data))
    at = rng.choice([rng.randrange(len(data)), rng.randrange(edge), len(data) - 1 - rng.randrange(edge)])
    return at, length


def flip(data: bytearray, rng: random.Random) -> bytearray:
    at, _ = _spot(data, rng)
    data[at] ^= 1 << rng.randrange(8)
    return data


def zero(data: bytearray, rng: random.Random) -> bytearray:
    at, length = _spot(data, rng)
    data[at : at + length] = bytes(len(data[at : at + length]))
    return data


def noise(data: bytearray, rng: random.Random) -> bytearray:
    at, length = _spot(data, rng)
    data[at : at + length] = rng.randbytes(len(data[at : at + length]))
    return data


def cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def lose(data: bytearray, rng: random.Random) -> bytearray:
    at, length = _spot(data, rng)
    del data[at : at + length]
    return data


def double(data: bytearray, rng: random.Random) -> bytearray:
    at, length = _spot(data, rng)
    return data[: at + length] + data[at:]


def swap(data: bytearray, rng: random.Random) -> bytearray:
    (a, length), (b, _) = _spot(data, rng), _spot(data, rng)
    a, b = min(a, b), max(a, b)
    first, second = data[a : a + length], data[b : b + length]
    data[b : b + len(first)] = first
    data[a : a + len(second)] = second
    return data


def number(data: bytearray, rng: random.Random) -> bytearray:
    """A size or an offset that is absurd."""
    at, _ = _spot(data, rng)
    width = rng.choice([2, 4, 8])
    value = rng.choice([0, 1, (1 << (8 * width)) - 1, 1 << (8 * width - 1), (1 << (8 * width - 1)) - 1])
    data[at : at + width] = value.to_bytes(width, "little")
    return data


def twice(data: bytearray, _rng: random.Random) -> bytearray:
    return data + data


DAMAGES: tuple[Damage, ...] = (flip, flip, flip, zero, noise, cut, lose, double, swap, number, number, twice)


def changed(content: bytes, times: int, rng: random.Random, damage: Damage | None = None) -> bytes:
    """Damaged so many times: that way, or another each time."""
    data = bytearray(content)
    for _ in range(times):
        data = (damage or rng.choice(DAMAGES))(data, rng) if data else data
    return bytes(data)


# --- what becomes of it ------------------------------------------------------------------------------------


def same(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    return found.keys() == weights.keys() and all(
        found[name].shape == weights[name].shape and torch.equal(found[name], weights[name]) for name in weights
    )


def cases(paths: dict[str, Path], count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """(container, damage, content), the same for a seed."""
    rng = random.Random(seed)
    content = {name: path.read_bytes() for name, path in paths.items()}
    for _ in range(count):
        container, damage = rng.choice(sorted(content)), rng.choice(DAMAGES)
        yield container, damage.__name__, changed(content[container], rng.choice([1, 1, 1, 2, 5]), rng, damage)


def outcome(path: Path, weights: dict[str, torch.Tensor]) -> str:
    """refused | the same | other | crashed: ... | hung."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        found = read_checkpoint(path)
        repaconv.inspect(path)  # what is read on from it must not stumble either
        return "the same" if same(dict(found.tensors), weights) else "other"
    except RepaconvError:
        return "refused"
    except TimeoutError:
        return "hung"
    except BaseException:
        return f"crashed: {traceback.format_exc()}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tally(folder: Path, count: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often each container ended how, and what went wrong. Without checksums a file may give other weights."""
    paths = sound(folder)
    weights = dict(read_checkpoint(paths["zip"]).tensors)
    found: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    path = folder / "damaged"
    for index, (container, damage, content) in enumerate(cases(paths, count, seed)):
        path.write_bytes(content)
        ended = outcome(path, weights)
        found[container, ended.partition(":")[0]] += 1
        silent = ended == "other" and container in ("zip", "packed")
        if silent or ended.startswith(("crashed", "hung")):
            wrong.append(f"{index} {container} {damage}: {ended}")
            (folder / f"wrong-{index}").write_bytes(content)
    return found, wrong


if __name__ == "__main__":
    at = Path(tempfile.mkdtemp())
    totals, mistakes = tally(at, int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    out = io.StringIO()
    for (container, ended), times in sorted(totals.items()):
        out.write(f"{container:12} {ended:10} {times}\n")
    sys.stdout.write(out.getvalue() + "\n".join(mistakes[:20]) + f"\n{len(mistakes)} wrong, kept in {at}\n")
    sys.exit(bool(mistakes))

"""Hostile checkpoints: pickles, unusual containers, damaged bytes, and weights that no network has."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import file_damage
import torch
from safetensors.torch import save

import repaconv
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import Refused
from torture import containers, pickles
from torture.sandbox import Case
from torture.small_checkpoints import METHODS, Net, net

QUICK = ("repavit-mixer", "riformer", "dwconv", "nondeep")
"""Nets that fold in a tenth of a second."""


def both(path: Path, network: Net | None = None) -> str:
    """What `inspect` and `fold` do with it, one behind the other; both must say the same of whether it can be read."""
    settings = network.settings if network else {}
    try:
        repaconv.inspect(path, settings=settings)
    except Refused:
        inspected = False
    else:
        inspected = True
    repaconv.fold(path, out=path.parent / "run", settings=settings)
    assert inspected, "fold takes what inspect refuses"
    return "sound"


def hostile() -> Iterator[Case]:
    """Every hostile pickle in every container."""
    for label, content in pickles.corpus():
        for container, put in containers.CONTAINERS.items():
            make = partial(_put, put, content)
            yield Case("hostile pickles", f"{container}: {label}", make, both)


def _put(put: Callable[[Path, bytes], Path], content: bytes, folder: Path) -> Path:
    return put(folder / "evil.pth", content)


# --- files --------------------------------------------------------------------------------------------------


def in_container(container: str, network: Net) -> bytes:
    """A sound file."""
    out = io.BytesIO()
    if container == "safetensors":
        return save({name: value.contiguous() for name, value in network.weights.items()}, {"epoch": "3"})
    torch.serialization.set_crc32_options(container != "without")
    torch.save(network.whole, out, _use_new_zipfile_serialization=container != "legacy")
    torch.serialization.set_crc32_options(True)
    if container != "packed":
        return out.getvalue()
    packed = io.BytesIO()
    with zipfile.ZipFile(out) as read, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as write:
        for info in read.infolist():
            write.writestr(info.filename, read.read(info))
    return packed.getvalue()


def strange() -> Iterator[Case]:
    """Containers opened and sewn up again, tars, and what is no file."""
    network = net("repavit-mixer")
    whole = in_container("zip", network)
    for kind, each in (
        ("zip surgery", containers.surgery(whole)),
        ("zip surgery", containers.crowds(whole)),
        ("tars", containers.tars()),
        ("what is no file", containers.places(whole)),
    ):
        for name, make in each:
            read = both if kind == "what is no file" else partial(compared, silent=False)
            yield Case(kind, name, make, partial(read, network=network))


# --- damage --------------------------------------------------------------------------------------------------

CHECKED = ("zip", "packed")
"""Containers that have checksums: what is read of them is what was saved, or they are refused."""
CONTAINERS = ("zip", "legacy", "safetensors", "packed", "without")


def damaged(count: int, seed: int) -> Iterator[Case]:
    """Official layouts in every container, and bytes of them flipped, zeroed, cut, doubled, swapped."""
    rng = random.Random(seed)
    files = {(container, name): in_container(container, net(name)) for name in QUICK for container in CONTAINERS}
    for number in range(count):
        container, name = rng.choice(CONTAINERS), rng.choice(QUICK)
        change = rng.choice(file_damage.DAMAGES)
        times, own = rng.choice([1, 1, 1, 2, 5]), rng.randrange(1 << 60)
        make = partial(_damaged, files[container, name], change, times, own)
        read = partial(compared, network=net(name), silent=container in CHECKED)
        yield Case("damaged checkpoints", f"{seed}.{number} {name} in {container}: {change.__name__}", make, read)


def _damaged(whole: bytes, change: file_damage.Damage, times: int, seed: int, folder: Path) -> Path:
    (folder / "c.pth").write_bytes(file_damage.changed(whole, times, random.Random(seed), change))
    return folder / "c.pth"


def compared(path: Path, network: Net, silent: bool) -> str:
    """The same weights as were saved; other ones may be had only of a container that has no checksums."""
    found = dict(read_checkpoint(path).tensors)
    whole = file_damage.same(
        found, {name: value for name, value in network.weights.items() if "num_batches" not in name}
    )
    whole = whole or file_damage.same(found, _as_read(network))
    if whole:
        repaconv.inspect(path, settings=network.settings)
        return "the same"
    both(path, network)
    assert not silent, "other weights, folded without a word"
    return "other"


def _as_read(network: Net) -> dict[str, torch.Tensor]:
    """Under the names that a reader gives them."""
    from repaconv.checkpoints.checkpoint_reader import _strip_wrappers

    names, _ = _strip_wrappers(list(network.weights))
    return {short: network.weights[full] for short, full in names.items()}


# --- weights ------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], str, random.Random], None]


def _set(value: Callable[[torch.Tensor], Any]) -> Change:
    def change(weights: dict[str, Any], key: str, _rng: random.Random) -> None:
        weights[key] = value(weights[key])

    return change


def _gone(weights: dict[str, Any], key: str, _rng: random.Random) -> None:
    del weights[key]


def _renamed(how: Callable[[str], Any]) -> Change:
    def change(weights: dict[str, Any], key: str, _rng: random.Random) -> None:
        weights[how(key)] = weights.pop(key)

    return change


def _swapped(weights: dict[str, Any], key: str, rng: random.Random) -> None:
    other = rng.choice(sorted(name for name in weights if isinstance(name, str)))
    weights[key], weights[other] = weights[other], weights[key]


def _aliased(weights: dict[str, Any], key: str, rng: random.Random) -> None:
    kept = {str(name): value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    weights[key] = kept[rng.choice([name for name in sorted(kept) if kept[name].shape == weights[key].shape])]


def _holed(value: float) -> Change:
    def change(weights: dict[str, Any], key: str, rng: random.Random) -> None:
        holed = weights[key].clone().double() if weights[key].numel() else weights[key]
        if holed.numel():
            holed.view(-1)[rng.randrange(holed.numel())] = value
        weights[key] = holed.to(weights[key].dtype) if weights[key].is_floating_point() else holed

    return change


CHANGES: dict[str, Change] = {
    "gone": _gone,
    "renamed": _renamed(lambda key: f"{key}x"),
    "under a number": _renamed(len),
    "under no name": _renamed(lambda _key: ""),
    "deeper": _renamed(lambda key: f"blocks.0.{key}"),
    "at a block that is far": _renamed(lambda key: key.replace(".0.", ".1000000000000.")),
    "at a block below zero": _renamed(lambda key: key.replace(".0.", ".-1.")),
    "swapped": _swapped,
    "aliased": _aliased,
    "overlapping": _set(lambda t: t.reshape(-1)[:1].expand(t.shape) if t.numel() and t.ndim else t),
    "transposed": _set(lambda t: t.mT if t.ndim > 1 else t),
    "flat": _set(lambda t: t.reshape(-1)),
    "one axis more": _set(lambda t: t[None]),
    "one axis less": _set(lambda t: t[0] if t.ndim else t),
    "one row less": _set(lambda t: t[1:] if t.ndim else t),
    "one row more": _set(lambda t: torch.cat([t, t[:1]]) if t.ndim else t),
    "doubled": _set(lambda t: torch.cat([t, t]) if t.ndim else t),
    "empty": _set(lambda t: t[:0] if t.ndim else t),
    "empty in its last axis": _set(lambda t: t[..., :0] if t.ndim else t),
    "a single number": _set(lambda t: t.reshape(-1)[0] if t.numel() else t),
    "immense": _set(lambda t: torch.zeros(1).expand(4000, 4000)),
    "float64": _set(lambda t: t.double()),
    "float16": _set(lambda t: t.half()),
    "bfloat16": _set(lambda t: t.bfloat16()),
    "float8": _set(lambda t: t.float().to(torch.float8_e4m3fn)),
    "complex": _set(lambda t: t.to(torch.complex64)),
    "int64": _set(lambda t: t.long()),
    "uint8": _set(lambda t: t.to(torch.uint8)),
    "bool": _set(lambda t: t.bool()),
    "NaN": _holed(float("nan")),
    "infinite": _holed(float("inf")),
    "beyond float32 when folded": _holed(3e38),
    "negative": _set(lambda t: -t.abs() - 1 if t.dtype != torch.bool else t),
    "zero": _set(torch.zeros_like),
    "a text": _set(lambda _t: "weights"),
    "a list": _set(lambda t: t.tolist()),
    "nothing": _set(lambda _t: None),
    "a dict": _set(lambda t: {"weight": t}),
    "sparse": _set(lambda t: t.to_sparse() if t.is_floating_point() and t.ndim else t),
}


def other_weights(count: int, seed: int) -> Iterator[Case]:
    """Sound containers of weights that are not a network's."""
    rng = random.Random(seed)
    names, changes = sorted(set(METHODS) - {"repavit-poolformer"}), sorted(CHANGES)
    for number in range(count):
        name = rng.choice(names)
        planned = [rng.choice(changes) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        make = partial(_changed, name, tuple(planned), rng.randrange(1 << 60))
        read = partial(both, network=net(name))
        yield Case("other weights", f"{seed}.{number} {name}: {', '.join(planned)}", make, read)


def _changed(name: str, planned: tuple[str, ...], seed: int, folder: Path) -> Path:
    network, rng = net(name), random.Random(seed)
    weights: dict[str, Any] = dict(network.weights)
    for change in planned:
        tensors = [key for key, value in sorted(weights.items(), key=str) if isinstance(value, torch.Tensor)]
        CHANGES[change](weights, rng.choice([key for key in tensors if isinstance(key, str)]), rng)
    torch.save({**network.whole, "state_dict": weights}, folder / "c.pth")
    return folder / "c.pth"

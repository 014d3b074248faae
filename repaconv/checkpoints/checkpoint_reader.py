"""A checkpoint as a value: which weights were taken, under which names, and what else the file says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repaconv.checkpoints.containers import open_container
from repaconv.checkpoints.memory_mapping import Contents
from repaconv.checkpoints.restricted_unpickler import Placeholder
from repaconv.core import change_guard
from repaconv.core.errors import Refused
from repaconv.core.files import sha256_of
from repaconv.results import Origin, WeightSet

# Where trainers keep the weights that their own evaluation uses, first found first taken.
USUAL = ("state_dict", "model", "model_state_dict", "module", "net", "network", "weights", "params", ".")
# Where they keep a moving average beside them.
AVERAGES = ("ema_state_dict", "state_dict_ema", "model_ema", "ema", "ema_model", "model_ema_state_dict")
# Wrappers that put themselves into every name: DistributedDataParallel and averaging, torch.compile.
WRAPPERS = ("module", "_orig_mod")
# Holders that only prefix all names alike, as Lightning modules and trainers do.
HOLDERS = ("model", "net", "student", "ema_model")
# Counters of moving averages that stand among the weights.
COUNTERS = ("steps", "n_averaged", "num_updates", "decay")
SCALARS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
DEEPEST = 4
"""How many mappings weights may lie within."""
RECORDED = 100_000
"""Values that are kept of what a file says beside its weights."""


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights of a file, memory-mapped.

    Attributes:
        path: The file.
        origin: Its hash, container, and which weights were taken why.
        sets: All sets of weights in it.
        placeholders: Globals of the pickle that were not built.
        tensors: Weights by name, wrappers' prefixes stripped; any dtype, as stored.
        names: Those names to the names in the file.
        record: What else the file says (epoch, args, meta), as plain values: beside these weights, among them, in
            safetensors' metadata; the nearest to them counts.
        stamp: Of the file before it was read; see `require_unchanged`.
    """

    path: Path
    origin: Origin
    sets: tuple[WeightSet, ...]
    placeholders: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    record: Mapping[str, Any]
    stamp: change_guard.Stamp | None = None

    def require_unchanged(self, stamp: change_guard.Stamp | None = None) -> None:
        """Hold the file to what it was, when it was opened if no other ``stamp`` is given.

        Raises:
            Refused: If it was written to since.
        """
        if before := stamp or self.stamp:
            change_guard.require_unchanged(self.path, before)


def read_checkpoint(
    path: str | Path, weights: str | None = None, sha256: str | None = None, *, again: bool = False
) -> Checkpoint:
    """Read a checkpoint without running anything in it.

    Args:
        path: .pth, .pt, .bin (torch zip, legacy, tar) or .safetensors.
        weights: Dotted place of the set to take, e.g. ``model_ema``; by rule when None.
        sha256: The file's hash, where it is known already.
        again: The bytes of that hash were held to the file's own checksums before.

    Raises:
        Refused: If the file is unsafe, broken, damaged, holds no weights, or several sets with no rule between them.
    """
    path = Path(path)
    stamp = change_guard.stamp_of(path)
    contents = open_container(path)
    sets = dict(_weight_sets(contents.value, ".", DEEPEST, set()))
    place, reason = _choose(path, sets, weights, contents)
    tensors = _only_tensors(path, place, sets[place])
    if not again:
        contents.checksums.require(tensors)
    names, stripped = _strip_wrappers(list(tensors))
    return Checkpoint(
        path=path,
        origin=Origin(
            path=str(path.resolve()),
            sha256=sha256 or sha256_of(path),
            bytes=path.stat().st_size,
            container=contents.container,
            checksums=contents.checksums.told,
            weights=place,
            weights_reason=reason,
            stripped=stripped,
        ),
        sets=tuple(_describe(name, found) for name, found in sets.items()),
        placeholders=contents.placeholders,
        tensors={short: tensors[full] for short, full in names.items()},
        names=names,
        record=_record(contents.value, place, sets),
        stamp=stamp,
    )


def _describe(place: str, found: Mapping[str, Any]) -> WeightSet:
    tensors = [value for value in found.values() if isinstance(value, Tensor)]
    return WeightSet(path=place, tensors=len(tensors), parameters=sum(tensor.numel() for tensor in tensors))


def _weight_sets(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Mappings of names mostly to tensors, with their dotted places; an optimizer's state is not one.

    What holds them is ``seen`` once, wherever it stands: a pickle may have it a million times for a few bytes.
    """
    if not isinstance(value, Mapping) or depth == 0 or id(value) in seen:
        return
    entries = {key: entry for key, entry in value.items() if key != "__metadata__"}
    tensors = sum(isinstance(entry, Tensor) for entry in entries.values())
    if tensors and 2 * tensors >= len(entries) and all(isinstance(key, str) for key in entries):
        yield place, entries
        return
    seen.add(id(value))
    for key, entry in entries.items():
        if isinstance(key, str) and not any(word in key for word in ("optim", "sched", "scaler", "message_hub")):
            yield from _weight_sets(entry, key if place == "." else f"{place}.{key}", depth - 1, seen)


def _instead(path: Path, placeholders: Collection[str]) -> str:
    """How else the network gets here; ultralytics pickles whole modules, and exports them itself."""
    if any(name.startswith("ultralytics.") for name in placeholders):
        onnx = path.with_suffix(".onnx")
        return f"Export it with ultralytics: yolo export model={path} format=onnx; then repaconv fold {onnx}"
    return "Save the trained module's state_dict() with torch.save or safetensors."


def _choose(path: Path, sets: Mapping[str, Any], wanted: str | None, contents: Contents) -> tuple[str, str]:
    known = ", ".join(sets)
    if wanted is not None:
        if wanted not in sets:
            raise Refused(
                f"{path} has no set of weights named {wanted!r}.",
                hint=f"It has: {known or 'none'}.",
                code="checkpoint.weights",
            )
        return wanted, "asked for with --weights"
    if not sets:
        foreign = ", ".join(contents.placeholders[:3])
        whole = f"; it holds {foreign}, which need their code" if foreign else ""
        raise Refused(
            f"{path} holds no weights{whole}.",
            hint=_instead(path, contents.placeholders),
            code="checkpoint.no-weights",
        )
    for usual in USUAL:
        under = [place for place in sets if place == usual or place.startswith(f"{usual}.")]
        if len(under) > 1:
            raise _ambiguous(path, f"several sets of weights under the usual name {usual}", under)
        if under:
            return under[0], _by_rule(path, under[0], [place for place in sets if place != under[0]], contents.value)
    if len(sets) == 1:
        return known, "the only weights in the file"
    raise _ambiguous(path, "several sets of weights and none under a usual name", list(sets))


def _by_rule(path: Path, place: str, others: list[str], value: Any) -> str:
    """Why this set and none of the others; refused where a rule would only be claimed."""
    if "ema_state_dict" in others:
        if place != "state_dict" or not _by_mmengine(value):
            what = "two sets of weights and nothing of mmengine, by whose rule the first would be the moving average"
            raise _ambiguous(path, what, [place, "ema_state_dict"])
        return f"{place} is the moving average already: mmengine swaps on saving, ema_state_dict is the raw set"
    if not others:
        return "the only weights in the file" if place != "." else "the file is a bare state dict"
    average = next((other for other in others if other.partition(".")[0] in AVERAGES), None)
    beside = f"its moving average is --weights {average}" if average else f"other sets: {', '.join(others)}"
    return f"{place} by rule; {beside}"


def _by_mmengine(value: Mapping[str, Any]) -> bool:
    meta = value.get("meta")
    return "message_hub" in value or (isinstance(meta, Mapping) and ("mmengine_version" in meta or "cfg" in meta))


def _ambiguous(path: Path, what: str, places: list[str]) -> Refused:
    return Refused(
        f"{path} holds {what}: {', '.join(places)}.",
        hint=f"Select one with --weights NAME, e.g. --weights {places[0]}.",
        code="checkpoint.ambiguous",
    )


def _only_tensors(path: Path, place: str, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Drop plain scalars; refuse weights that only foreign code could build."""
    for name, value in found.items():
        if isinstance(value, (Placeholder, type)):
            what = getattr(value, "qualified_name", "") or "a class"
            raise Refused(
                f"{path}: {place}[{name!r}] is not a tensor; reading it requires {what}, which is not run.",
                hint="Save the weights as plain tensors, preferably as .safetensors.",
                code="checkpoint.global-in-weights",
            )
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and not _is_counter(name)}


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] in COUNTERS and name.count(".") <= 1


def _strip_wrappers(names: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Short name -> name in the file, and the prefixes that went."""
    stripped: list[str] = []
    shorts = []
    for name in names:
        segments = name.split(".")
        stripped += [segment for segment in segments if segment in WRAPPERS]
        shorts.append([segment for segment in segments if segment not in WRAPPERS])
    while shorts and all(len(short) > 1 and short[0] == shorts[0][0] for short in shorts) and shorts[0][0] in HOLDERS:
        stripped.append(shorts[0][0])
        shorts = [short[1:] for short in shorts]
    shorts, holder = _strip_holder(shorts)
    stripped += holder
    result = {".".join(short): name for short, name in zip(shorts, names, strict=True)}
    if len(result) < len(names):  # two names became one: the wrappers' words are this net's own
        return {name: name for name in names}, ()
    return result, tuple(dict.fromkeys(stripped))


def _strip_holder(names: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """A backbone inside a larger module: what stands before its patch embedding goes, wherever it stands."""
    stems = [
        name[:-3] for name in names if name[-3:] in (["patch_embed", "proj", "weight"], ["stem", "proj", "weight"])
    ]
    if len(stems) != 1 or not stems[0]:
        return names, []
    count = len(stems[0])
    return [name[count:] if name[:count] == stems[0] else name for name in names], [".".join(stems[0])]


def _record(value: Any, taken: str, sets: Collection[str], at: str = "") -> dict[str, Any]:
    """Everything small on the way to the taken weights and among them, the nearest last, as plain values."""
    said: dict[str, Any] = {}
    nearer: dict[str, Any] = {}
    among = taken in (".", at.removesuffix("."))
    for key, entry in _named(value) if isinstance(value, Mapping) else ():
        place = f"{at}{key}"
        within = [name for name in sets if name == place or name.startswith(f"{place}.")]
        if taken in within:
            nearer = _record(entry, taken, sets, f"{place}.")
        elif key == "__metadata__" and isinstance(entry, Mapping):
            said |= plain(entry)
        elif not within and not (among and isinstance(entry, Tensor)) and "optim" not in key:
            said[key] = plain(entry)
    return {**said, **nearer}


def _named(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Entries under a text or a number; a key may be anything else, and of any depth."""
    return ((str(key), entry) for key, entry in value.items() if isinstance(key, (str, int, float)))


def plain(value: Any, depth: int = 6, room: Iterator[int] | None = None) -> Any:
    """Numbers, strings and containers of them; an argparse.Namespace as a dict, a class as its name; None for the rest.

    A tensor of one number is that number: some trainers write their best accuracy so. ``room`` is what is left of
    `RECORDED`: values that hold each other can be more than there are atoms.
    """
    room = iter(range(RECORDED)) if room is None else room
    if next(room, None) is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in SCALARS:
        return plain(value.item(), depth)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth == 0:
        return None
    if isinstance(value, Placeholder) and value.qualified_name == "argparse.Namespace":
        return plain(value.state, depth - 1, room)
    if isinstance(value, type) and issubclass(value, Placeholder):
        return value.qualified_name
    if isinstance(value, Mapping):
        return {key: plain(entry, depth - 1, room) for key, entry in _named(value)}
    if isinstance(value, (list, tuple)):
        return [plain(entry, depth - 1, room) for entry in value]
    return None

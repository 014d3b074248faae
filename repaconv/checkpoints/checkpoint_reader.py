"""Read a checkpoint: its weights and their names, and everything else that is recorded in the file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from repaconv.checkpoints.containers import open_container, several_files_hint
from repaconv.checkpoints.memory_mapping import Contents
from repaconv.checkpoints.pickled_modules import (
    MOST_NAMES,
    PickledModule,
    attributes_of,
    is_module,
    submodules_of,
    weights_of,
)
from repaconv.checkpoints.restricted_unpickler import Placeholder
from repaconv.core import changed_input_files
from repaconv.core.errors import Refused, did_you_mean
from repaconv.core.sharded_checkpoint import (
    bytes_of_checkpoint,
    resolved_checkpoint,
    sha256_of_checkpoint,
    stamps_of_checkpoint,
)
from repaconv.results import Origin, WeightSet

# Keys under which training code stores the weights that it evaluates, in order of preference.
WEIGHT_KEYS = ("state_dict", "model", "model_state_dict", "module", "net", "network", "weights", "params", ".")
# Keys under which it stores a moving average of them.
AVERAGE_KEYS = (
    "ema_state_dict",
    "state_dict_ema",
    "model_ema",
    "ema",
    "ema_model",
    "model_ema_state_dict",
    "params_ema",
)
# Name parts inserted by wrappers: DistributedDataParallel and AveragedModel, torch.compile, FSDP, activation
# checkpointing.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Prefixes common to all names, from attributes of Lightning modules and trainers.
HOLDERS = ("model", "net", "student", "ema_model")
WITHOUT = "without:"
"""What begins the name of a set of weights that is all but the tensors with a prefix, e.g. ``without:module``.

After a prefix and a comma, it is those with that prefix but not with the longer one: ``model,without:model.ema``.
"""
# Counters of moving averages, stored among the weights.
COUNTERS = ("steps", "n_averaged", "num_updates", "decay")
# Keys of other states of the training, which hold tensors too.
OPTIMIZER = re.compile("optim(?!al)")
NO_WEIGHTS = re.compile(f"{OPTIMIZER.pattern}|sched|scaler|message_hub")
PLAIN_TENSORS = {
    "rebuild_qtensor": "tensor.dequantize(), or those before quantization",
    "rebuild_sparse": "tensor.to_dense()",
    "numpy": "torch.from_numpy(array)",
    "DTensor": "tensor.full_tensor(), or get_model_state_dict with full_state_dict=True",
    "ShardedTensor": "those that FSDP gathers with StateDictType.FULL_STATE_DICT",
    "rebuild_meta": "load the weights before saving, for this has a shape and no numbers",
}
"""How to make plain tensors of others, by a part of the name of the function that reads them."""
SCALARS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
DEEPEST_NESTING = 4
"""Maximum nesting depth of the mapping that holds the weights."""
MOST_RECORDED_VALUES = 100_000
"""Maximum number of other values that are read from a file."""


T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights of a file, memory-mapped.

    Attributes:
        path: The file; of a checkpoint in several files, the index.
        origin: Its hash and container, which weights were selected, and why.
        sets: All sets of weights in the file.
        placeholders: Globals of the pickle that were replaced by placeholders.
        tensors: Weights by name, without the prefixes of wrappers; in the stored dtype.
        names: Name in its set of weights in the file, by name without prefixes.
        record: Other contents of the file (epoch, args, meta) as plain values, also those stored among the weights and
            in safetensors' metadata. If a key occurs more than once, the occurrence nearest to the weights is used.
        modules: The modules by their names in the file, if these are the weights of a pickled ``nn.Module``; the module
            itself has the empty name.
        stamps: State of each file before it was read; see `require_unchanged`.
        prefix: The prefix of all ``names`` that --weights selected, e.g. ``model.``.
    """

    path: Path
    origin: Origin
    sets: tuple[WeightSet, ...]
    placeholders: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    record: Mapping[str, Any]
    modules: Mapping[str, PickledModule] = field(default_factory=dict)
    stamps: Mapping[Path, changed_input_files.Stamp] = field(default_factory=dict)
    prefix: str = ""

    @property
    def by_file_names(self) -> dict[str, Tensor]:
        """The weights by their names in the file, without the prefix that --weights selected."""
        return {self.names[name].removeprefix(self.prefix): tensor for name, tensor in self.tensors.items()}

    def require_unchanged(self, stamps: Mapping[Path, changed_input_files.Stamp] | None = None) -> None:
        """Check that no file has changed since ``stamps``, by default since it was opened.

        Raises:
            Refused: If one has changed.
        """
        for file, before in (stamps or self.stamps).items():
            changed_input_files.require_unchanged(file, before)


def read_checkpoint(
    path: str | Path, weights: str | None = None, sha256: str | None = None, *, again: bool = False
) -> Checkpoint:
    """Read a checkpoint without running code in it.

    Args:
        path: .pth, .pt, .bin (torch zip, legacy, tar) or .safetensors, or the index of several such files.
        weights: Dotted key of the set of weights, e.g. ``model_ema``, or a prefix of the names in one set, or
            ``without:PREFIX``, the names without it, or both as ``PREFIX,without:PREFIX``; None selects the set by
            rule.
        sha256: The checkpoint's hash, if known; see `repaconv.core.sharded_checkpoint.sha256_of_checkpoint`.
        again: Whether the file's own checksums were verified before for this hash.

    Raises:
        Refused: If a file is unsafe, truncated or damaged, if there are no weights or several sets without a rule, or
            if parts and index of a checkpoint in several files do not belong together.
    """
    path = Path(path)
    stamps = stamps_of_checkpoint(path)
    contents = open_container(path)
    every = list(_WeightSets().within(contents.value, ".", DEEPEST_NESTING))
    sets = {each.path: found for each, found, _ in every}
    modules = {each.path: module for each, _, module in every if module}
    selected = _Selected()
    if weights and (found := _find_prefix(path, sets, weights)):
        place, selected = found
        reason = f"asked for with --weights, as {selected.description}"
    else:
        place, reason = _choose(path, sets, modules, weights, contents)
    pickled = modules.get(place)
    tensors = _only_tensors(path, place, selected.of(sets[place]))
    _require_whole_parameters(path, contents.value, tensors)
    if not again:
        contents.checksums.require(tensors)
    tensors = {name: tensor.resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    names, stripped = _strip_wrappers(list(tensors))
    return Checkpoint(
        path=path,
        origin=Origin(
            path=str(resolved_checkpoint(path)),
            sha256=sha256 or sha256_of_checkpoint(path),
            bytes=bytes_of_checkpoint(path),
            container=contents.container,
            checksums=contents.checksums.description,
            weights=weights if weights and any(selected) else place,
            weights_reason=f"{reason}; a pickled {pickled.qualified_name}" if pickled else reason,
            stripped=stripped,
        ),
        sets=tuple({each.path: each for each, _, _ in every}.values()),
        placeholders=contents.placeholders,
        tensors={short: tensors[full] for short, full in names.items()},
        names={short: f"{selected.prefix}{full}" for short, full in names.items()},
        record=_record(contents.value, place, _places_around(sets)),
        modules=_modules_by(submodules_of(pickled), selected.of) if pickled else {},
        stamps=stamps,
        prefix=selected.prefix,
    )


class _Counted(NamedTuple):
    """The entries of a mapping without metadata, and its tensors: how many, of how many numbers, all of one each.

    It is a state dict if at least half of its entries are tensors, and all have names.
    """

    entries: Mapping[Any, Any]
    tensors: int
    parameters: int
    single_numbers: bool
    is_state_dict: bool

    @classmethod
    def of(cls, value: Mapping[Any, Any]) -> _Counted:
        """Count the tensors of a mapping."""
        entries = {key: entry for key, entry in value.items() if key != "__metadata__"}
        sizes = [entry.numel() for entry in entries.values() if isinstance(entry, Tensor)]
        named = all(isinstance(key, str) for key in entries)
        is_state_dict = bool(sizes) and 2 * len(sizes) >= len(entries) and named
        return cls(entries, len(sizes), sum(sizes), all(size == 1 for size in sizes), is_state_dict)

    def at(self, place: str) -> WeightSet:
        """The description of these weights at a place in the file."""
        return WeightSet(path=place, tensors=self.tensors, parameters=self.parameters)


class _WeightSets:
    """Finds the state dicts and pickled modules in the contents of one file, except optimizer states.

    A state dict that holds another set of at least as many tensors may be the training code's record around it, with
    the best accuracy as a tensor: it is yielded only if it has more than single numbers. The entries of each container
    are visited and counted once: a pickle may refer to it a million times in a few bytes.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._counted: dict[int, _Counted] = {}
        self._room = iter(range(MOST_NAMES))

    def within(
        self, value: Any, place: str, depth: int
    ) -> Iterator[tuple[WeightSet, Mapping[str, Any], Placeholder | None]]:
        """Yield those in a value, at most so many mappings deep, with their dotted keys and their modules."""
        if isinstance(value, Placeholder) and is_module(value) and depth and id(value) not in self._seen:
            self._seen.add(id(value))
            if weights := weights_of(value, self._room):
                yield _Counted.of(weights).at(place), weights, value
        if not isinstance(value, Mapping) or depth == 0:
            return
        counted = self._counted.get(id(value)) or self._counted.setdefault(id(value), _Counted.of(value))
        nested = () if id(value) in self._seen else counted.entries.items()
        self._seen.add(id(value))
        inner = [
            found
            for key, entry in nested
            if isinstance(key, str) and not NO_WEIGHTS.search(key)
            for found in self.within(entry, key if place == "." else f"{place}.{key}", depth - 1)
        ]
        is_record = any(described.tensors >= counted.tensors for described, _, _ in inner)
        if counted.is_state_dict and not (is_record and counted.single_numbers):
            yield counted.at(place), counted.entries, None
        if is_record or not counted.is_state_dict:
            yield from inner


def under_prefix(named: Mapping[str, T], prefix: str) -> dict[str, T]:
    """What has a name with this prefix, by the names without it; all if the prefix is empty."""
    return {name.removeprefix(prefix): one for name, one in named.items() if name.startswith(prefix)}


class _Selected(NamedTuple):
    """Some of the names in a set of weights.

    Attributes:
        prefix: What they begin with, ended by a dot, or empty; they are read without it.
        without: What they do not begin with, ended by a dot, or empty.
    """

    prefix: str = ""
    without: str = ""

    @property
    def description(self) -> str:
        """What they are, in words."""
        if not self.without:
            return "the prefix of names"
        return "a prefix of names without a longer one" if self.prefix else "all names without a prefix"

    def of(self, named: Mapping[str, T]) -> dict[str, T]:
        """What has such a name, by the names without the prefix."""
        left = {name: one for name, one in named.items() if not (self.without and name.startswith(self.without))}
        return under_prefix(left, self.prefix)


def modules_under_prefix(modules: Mapping[str, PickledModule], prefix: str) -> dict[str, PickledModule]:
    """The modules whose tensors have names with this prefix, e.g. ``net.``, by their names within."""
    return _modules_by(modules, lambda named: under_prefix(named, prefix))


def _modules_by(
    modules: Mapping[str, PickledModule], only: Callable[[Mapping[str, PickledModule]], dict[str, PickledModule]]
) -> dict[str, PickledModule]:
    """The modules whose tensors have such names."""
    ended = {f"{name}.": part for name, part in modules.items()}  # net itself has the prefix, too
    return {name.removesuffix("."): part for name, part in only(ended).items()}


def _find_prefix(path: Path, sets: Mapping[str, Mapping[str, Any]], wanted: str) -> tuple[str, _Selected] | None:
    """The place of the one set that has tensors under the prefixes of ``wanted``, and these; None if there is none."""
    if wanted in sets:
        return None
    prefix, _, without = wanted.partition(f",{WITHOUT}")
    if prefix.startswith(WITHOUT):
        prefix, without = "", prefix.removeprefix(WITHOUT)
    found, known = dict[str, _Selected](), dict[tuple[int, _Selected], bool]()
    for place, weights in sets.items():
        ended = (each and f"{each.removesuffix('*').removesuffix('.')}." for each in (prefix, without))
        selected = _Selected(*(each.removeprefix(f"{place}.") for each in ended))
        if (key := (id(weights), selected)) not in known:  # several places may hold the same weights
            parts = (part.of(weights) for part in (*map(_Selected, filter(None, selected)), selected))
            some = (any(isinstance(one, Tensor) for one in part.values()) for part in parts)
            known[key] = any(selected) and all(some)
        if known[key]:
            found[place] = selected
    if len(found) > 1:
        what = "several sets of weights with that prefix"
        names = [
            ",".join((f"{place}.{prefix}",) * bool(prefix) + (f"{WITHOUT}{place}.{without}",) * bool(without))
            for place in found
        ]
        raise _ambiguous(path, what, names)
    return next(iter(found.items()), None)


def _export_hint(path: Path, placeholders: Collection[str]) -> str:
    """Return a hint on how else to get the network; ultralytics can export its own."""
    if any(name.startswith("ultralytics.") for name in placeholders):
        model, onnx = (shlex.quote(str(each)) for each in (path, path.with_suffix(".onnx")))
        return f"Export it with ultralytics: yolo export model={model} format=onnx; then repaconv fold {onnx}"
    if path.suffix == ".distcp":
        return f"It is one part of {several_files_hint(path.parent) or 'a checkpoint in several files'}."
    if how := _plain_tensors(placeholders):
        return f"Save the weights as plain tensors{how}, preferably as .safetensors."
    return "Save the trained module's state_dict() with torch.save or safetensors."


def _plain_tensors(kinds: Iterable[str]) -> str:
    """How to make plain tensors of others, by the names of the functions and classes that they need; else empty."""
    return next((f": {how}" for kind, how in PLAIN_TENSORS.items() if any(kind in name for name in kinds)), "")


def _choose(
    path: Path, sets: Mapping[str, Any], modules: Collection[str], wanted: str | None, contents: Contents
) -> tuple[str, str]:
    """Return the selected set of weights and why; a state dict is preferred to a pickled module."""
    known = ", ".join(sets)
    if wanted is not None:
        if wanted not in sets:
            raise Refused(
                f"{path} has no set of weights named {wanted!r}.",
                hint="It has one set without a name: leave --weights out."
                if [*sets] == ["."]
                else f"{did_you_mean(wanted, sets)}It has: {known or 'none'}.",
                code="checkpoint.weights",
            )
        return wanted, "asked for with --weights"
    if not sets and isinstance(contents.value, (list, tuple)):
        raise _in_a_list(path, contents)
    if not sets:
        foreign = ", ".join(contents.placeholders[:3])
        whole = f"; it holds {foreign}, which need their code" if foreign else ""
        raise Refused(
            f"{path} holds no weights{whole}.",
            hint=_export_hint(path, contents.placeholders),
            code="checkpoint.no-weights",
        )
    if "ema" in sets and _by_ultralytics(contents):
        return "ema", "Ultralytics reads the moving average ema before model"
    plain = [place for place in sets if place not in modules]
    for usual, among in ((usual, among) for among in (plain, sets) for usual in WEIGHT_KEYS):
        under = [place for place in among if place == usual or place.startswith(f"{usual}.")]
        if len(under) > 1:
            raise _ambiguous(path, f"several sets of weights under the usual name {usual}", under)
        if under:
            return under[0], _by_rule(path, under[0], [place for place in sets if place != under[0]], contents.value)
    if len(sets) == 1:
        return known, "the only weights in the file"
    raise _ambiguous(path, "several sets of weights and none under a usual name", list(sets))


def _in_a_list(path: Path, contents: Contents) -> Refused:
    """The error for a list or tuple in place of a mapping, e.g. of ``torch.save([model, options])``."""
    found, kind = _WeightSets(), type(contents.value).__name__
    place, module = next(
        (
            (place, module)
            for place, entry in enumerate(contents.value)
            for _, _, module in found.within(entry, ".", DEEPEST_NESTING)
        ),
        (None, None),
    )
    if place is None:
        return Refused(
            f"{path} holds no weights by name: it is a {kind} without a state dict.",
            hint=_export_hint(path, contents.placeholders),
            code="checkpoint.no-weights",
        )
    source, target = json.dumps(str(path)), str(path.with_suffix(".weights.pth"))
    needs_code = bool(contents.placeholders)
    entry = f"torch.load({source}, map_location='cpu', weights_only={not needs_code})[{place}]"
    code = f"import torch; torch.save({entry}{'.state_dict()' * bool(module)}, {json.dumps(target)})"
    how = "If you trust the file, for this runs the code in it" if needs_code else "Save them alone"
    return Refused(
        f"{path} holds no weights by name: it is a {kind}, and entry {place} of it has them.",
        hint=f"{how}: python -c {shlex.quote(code)}; then repaconv fold {shlex.quote(target)}",
        code="checkpoint.no-weights",
    )


def _by_rule(path: Path, place: str, others: list[str], value: Any) -> str:
    """Return why this set of weights is selected and no other; refuse if the rule's conditions do not hold."""
    if "ema_state_dict" in others:
        if place != "state_dict" or not _by_mmengine(value):
            what = "two sets of weights and nothing of mmengine, by whose rule the first would be the moving average"
            raise _ambiguous(path, what, [place, "ema_state_dict"])
        return f"{place} is the moving average already: mmengine swaps on saving, ema_state_dict is the raw set"
    if not others:
        bare = "the file is one module" if isinstance(value, Placeholder) else "the file is a bare state dict"
        return "the only weights in the file" if place != "." else bare
    average = next((other for other in others if other.partition(".")[0] in AVERAGE_KEYS), None)
    choice = f"its moving average is --weights {average}" if average else f"other sets: {', '.join(others)}"
    return f"{place} by rule; {choice}"


def _by_mmengine(value: Mapping[str, Any]) -> bool:
    meta = value.get("meta")
    return "message_hub" in value or (isinstance(meta, Mapping) and ("mmengine_version" in meta or "cfg" in meta))


def _by_ultralytics(contents: Contents) -> bool:
    return any(name.startswith("ultralytics.") for name in contents.placeholders)


def _ambiguous(path: Path, what: str, places: list[str]) -> Refused:
    return Refused(
        f"{path} holds {what}: {', '.join(places)}.",
        hint=f"Select one with --weights NAME, e.g. --weights {places[0]}.",
        code="checkpoint.ambiguous",
    )


def _only_tensors(path: Path, place: str, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Drop plain scalars; refuse weights that only third-party code could build."""
    for name, value in found.items():
        if isinstance(value, (Placeholder, type)):
            what = getattr(value, "qualified_name", "") or "a class"
            where = "" if place == "." else f" of {place}"
            raise Refused(
                f"{path}: {name}{where} is not a plain tensor; reading it requires {what}, which is not run.",
                hint=f"Save the weights as plain tensors{_plain_tensors([what])}, preferably as .safetensors.",
                code="checkpoint.global-in-weights",
            )
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and not _is_counter(name, value)}


def _require_whole_parameters(path: Path, value: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse the file of a module whose parameters DeepSpeed's ZeRO stage 3 keeps elsewhere: they are empty here."""
    by_deepspeed = isinstance(value, Mapping) and not {"param_shapes", "ds_version"}.isdisjoint(value)
    empty = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.numel()]
    if by_deepspeed and empty:
        raise Refused(
            f"{empty[0]} in {path} has no values, since DeepSpeed's ZeRO stage 3 saves them in the files of its "
            "optimizer.",
            hint=f"It is one part of {several}."
            if (several := several_files_hint(path.parent))
            else "Join them with the script that DeepSpeed wrote next to them: python zero_to_fp32.py FOLDER FILE.",
            code="checkpoint.partitioned",
        )


def _is_counter(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 0 and name.rpartition(".")[2] in COUNTERS and name.count(".") <= 1


def _strip_wrappers(names: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the name in the file by name without prefixes, and the removed prefixes."""
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
    if len(result) < len(names):  # names collide, so these parts belong to the network
        return {name: name for name in names}, ()
    return result, tuple(dict.fromkeys(stripped))


def _strip_holder(names: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Remove the prefix of a backbone inside a larger module, which is found by its patch embedding."""
    stems = [
        name[:-3] for name in names if name[-3:] in (["patch_embed", "proj", "weight"], ["stem", "proj", "weight"])
    ]
    if len(stems) != 1 or not stems[0]:
        return names, []
    count = len(stems[0])
    return [name[count:] if name[:count] == stems[0] else name for name in names], [".".join(stems[0])]


def _places_around(sets: Iterable[str]) -> set[str]:
    """The places of sets of weights and of all that holds them: their dotted keys, and the beginnings of these."""
    return {place[:end] for place in sets for end in (*(dot.start() for dot in re.finditer(r"\.", place)), len(place))}


def _record(value: Any, taken: str, around: Collection[str], at: str = "") -> dict[str, Any]:
    """Collect small values on the path to the selected weights and among them; nearer ones override."""
    said: dict[str, Any] = {}
    nearer: dict[str, Any] = {}
    among = taken in (".", at.removesuffix("."))
    for key, entry in _named(attributes_of(value) if isinstance(value, Placeholder) else value):
        place = f"{at}{key}"
        if taken == place or taken.startswith(f"{place}."):
            nearer = _record(entry, taken, around, f"{place}.")
        elif key == "__metadata__" and isinstance(entry, Mapping):
            said |= plain_values(entry)
        elif place not in around and not (among and isinstance(entry, Tensor)) and not OPTIMIZER.search(key):
            said[key] = plain_values(entry)
    return {**said, **nearer}


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a mapping's entries with a text or number as key; a hostile file may have keys of any type and depth."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return ((str(key), entry) for key, entry in entries if isinstance(key, (str, int, float)))


def plain_values(value: Any, depth: int = 6, room: Iterator[int] | None = None) -> Any:
    """Convert to numbers, strings and containers of them; other values become None.

    An argparse.Namespace becomes a dict, a class its name, and a tensor of one number that number, since some
    training code stores its best accuracy so. ``room`` is the remaining part of `MOST_RECORDED_VALUES`: values that
    contain each other can expand without limit.
    """
    room = iter(range(MOST_RECORDED_VALUES)) if room is None else room
    if next(room, None) is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in SCALARS:
        return plain_values(value.item(), depth)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth == 0:
        return None
    if isinstance(value, Placeholder) and value.qualified_name == "argparse.Namespace":
        return plain_values(value.state, depth - 1, room)
    if isinstance(value, type) and issubclass(value, Placeholder):
        return value.qualified_name
    if isinstance(value, Mapping):
        return {key: plain_values(entry, depth - 1, room) for key, entry in _named(value)}
    if isinstance(value, (list, tuple)):
        return [plain_values(entry, depth - 1, room) for entry in value]
    return None

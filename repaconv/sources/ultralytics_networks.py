"""Build the networks of Ultralytics from the YAML in their checkpoints, as `yolo export` prepares them.

A checkpoint of Ultralytics is a pickled module that contains the YAML it was built from. The package looks up the
layers that a YAML names among everything that it imported, and evaluates the YAML's ``activation`` as Python. So a YAML
could run code. Here it may name layers only, with plain arguments; this is checked before the package sees it.
"""

from __future__ import annotations

import ast
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused, UsageProblem, describe_exception
from repaconv.sources.optional_packages import loading

if TYPE_CHECKING:
    from torch import Tensor, nn

    from repaconv.checkpoints import Checkpoint

PACKAGE = "ultralytics"
HEADS = {
    **dict.fromkeys(("Detect", "v10Detect"), ("DetectionModel", "detect")),
    **dict.fromkeys(("Segment", "Segment26"), ("SegmentationModel", "segment")),
    **dict.fromkeys(("Pose", "Pose26"), ("PoseModel", "pose")),
    **dict.fromkeys(("OBB", "OBB26"), ("OBBModel", "obb")),
    "Classify": ("ClassificationModel", "classify"),
    "RTDETRDecoder": ("RTDETRDetectionModel", "detect"),
}
"""The class of a network and its task, by the last layer of its YAML."""
FORMER = {"YOLOv10DetectionModel": "DetectionModel"}
"""Classes of files of earlier versions, and what they are today."""
CLASS_TENSORS = ("cv3.0.2.bias", "linear.bias", "dec_score_head.0.bias")
"""Tensors of a last layer whose length is the number of classes."""
KEYS = tuple(
    """nc scales scale backbone head activation depth_multiple width_multiple kpt_shape reg_max end2end inplace channels
    ch yaml_file""".split()  # noqa: SIM905 - a list of words reads best as words
)
"""Keys of a YAML that the package reads."""
LARGEST, MOST_REPEATS = 1 << 16, 1000
"""Largest number in a YAML, and most repetitions of a layer: anything larger is meant to exhaust memory."""
MOST_SPARE_NUMBERS = 1 << 26
"""Numbers that a network may have besides those of its checkpoint, which its heads for training have."""


# What a checkpoint says of its network


def config_of(found: Checkpoint) -> dict[str, Any] | None:
    """Return what a checkpoint of Ultralytics says of its network; None if it is no such checkpoint.

    Returns:
        ``yaml``, what the network is built from; ``class`` of the pickled module; ``version`` of Ultralytics; ``task``;
        ``imgsz`` of the training, if the file has it.
    """
    module = found.modules.get("")
    if module is None or not module.kind.startswith(f"{PACKAGE}."):
        return None
    yaml = found.record.get("yaml")
    args = {**_mapping(found.record.get("args")), **_mapping(found.record.get("train_args"))}
    config: dict[str, Any] = {"yaml": dict(_mapping(yaml)), "class": module.kind.rpartition(".")[2]}
    config |= {"version": found.record.get("version"), "task": task_of(config["yaml"]), "imgsz": args.get("imgsz")}
    config["quantized"] = bool(found.record.get("modelopt"))
    return config


def name_of(yaml: Mapping[str, Any]) -> str:
    """Return the architecture's name as ``--arch`` takes it, e.g. ``ultralytics:yolo11n.yaml``."""
    name = re.split(r"[/\\]", str(yaml.get("yaml_file") or ""))[-1]
    plain = re.fullmatch(r"[\w.+-]+", name)
    return f"{PACKAGE}:{name if plain else 'model.yaml'}"


def task_of(yaml: Mapping[str, Any]) -> str | None:
    """Return Ultralytics' task of a network, e.g. ``detect``; None if its last layer is no known head."""
    return HEADS.get(_head(yaml), (None, None))[1]


def _head(yaml: Mapping[str, Any]) -> str:
    """The name of the last layer; empty if there is none."""
    rows = yaml.get("head")
    row = rows[-1] if isinstance(rows, (list, tuple)) and rows else ()
    return str(row[2]) if isinstance(row, (list, tuple)) and len(row) > 2 else ""


def config_by_name(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what builds the network of this name for plain weights: the package's YAML of that name.

    Args:
        name: A YAML of the package or of the user, e.g. ``yolo11n.yaml``.
        tensors: The weights by name, which show the number of classes.

    Raises:
        EnvironmentProblem: Ultralytics is not installed.
        UsageProblem: There is no such YAML.
    """
    tasks = _tasks()
    try:
        with quiet():
            yaml = tasks.yaml_model_load(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    except Exception as error:  # the package raises its own errors
        raise UsageProblem(
            f"ultralytics has no architecture {name!r} ({describe_exception(error)}).",
            hint="Give one of its YAML files, e.g. --arch ultralytics:yolo11n.yaml.",
            code="arch.unknown",
        ) from error
    last = len(yaml["backbone"]) + len(yaml["head"]) - 1
    counts = (tensors.get(f"model.{last}.{suffix}") for suffix in CLASS_TENSORS)
    if (found := next((tensor for tensor in counts if tensor is not None), None)) is not None:
        yaml["nc"] = len(found)
    return {"yaml": {key: yaml[key] for key in KEYS if key in yaml}, "task": task_of(yaml)}


def problems_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return why a network cannot be built here, as far as that shows without Ultralytics."""
    yaml = config["yaml"]
    kind = HEADS.get(_head(yaml), ("", ""))[0]
    own = FORMER.get(config.get("class", kind), config.get("class", kind))
    if config.get("quantized"):
        return ("This network of ultralytics was trained for INT8 with fake quantizers, which are not built here.",)
    if not kind or own != kind:
        head = f"whose last layer is {_head(yaml)[:80]!r}" if _head(yaml) else "without a YAML"
        return (f"A {own} of ultralytics {head} is not built here.",)
    return ()


# The network


def build(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the network of a checkpoint with random weights; nothing is set for an export yet.

    Args:
        config: See `config_of`.
        tensors: The weights by the names in the file: whether BatchNorms are among them, and how many numbers they are.

    Raises:
        EnvironmentProblem: Ultralytics is not installed.
        Refused: The YAML is not one of a network that can be built.
    """
    import torch

    tasks = _tasks()
    yaml = {key: value for key, value in config["yaml"].items() if key in KEYS}
    _require_buildable(yaml, config, tasks)
    kind = getattr(tasks, HEADS[_head(yaml)][0])
    try:
        with quiet(), torch.random.fork_rng(devices=[]), _bounded(tensors):
            module: nn.Module = kind(_without_downloads(yaml), ch=channels_of(yaml), verbose=False).eval()
            if not any(".bn." in name for name in tensors) and any(".bn." in name for name in module.state_dict()):
                module = module.fuse(verbose=False)  # type: ignore[operator]
    except Refused:
        raise
    except Exception as error:  # of any layer
        raise Refused(
            f"ultralytics does not build the network from the YAML in the file: {describe_exception(error)}.",
            hint=f"The file was written by ultralytics {config.get('version') or 'of an unknown version'}; install "
            "that version, or export the model with it and fold the ONNX file.",
            code="ultralytics.yaml",
        ) from error
    return module


def prepare(module: nn.Module) -> nn.Module:
    """Set the network up as ``yolo export format=onnx`` does by default, in place."""
    tasks = _tasks()
    defaults = importlib.import_module("ultralytics.utils").DEFAULT_CFG_DICT
    # Since nms has no value by default, an exported detector leaves NMS to the program that runs it, also where it has
    # a head without NMS.
    if defaults.get("nms", False) is None and getattr(module, "end2end", False):
        module.end2end = False  # type: ignore[assignment]
    for part in module.modules():
        if hasattr(part, "export"):
            part.export, part.format = True, "onnx"  # type: ignore[assignment]
        if isinstance(part, (tasks.Detect, tasks.RTDETRDecoder)):
            part.shape = None
    return module


def channels_of(yaml: Mapping[str, Any]) -> int:
    """The number of image channels."""
    found = yaml.get("channels") or yaml.get("ch") or 3
    return found if isinstance(found, int) else 3


def _tasks() -> Any:
    """Import the package, offline and without the installation of further packages.

    Raises:
        EnvironmentProblem: It is not installed or does not load.
    """
    with loading(PACKAGE), quiet(), _offline():
        return importlib.import_module("ultralytics.nn.tasks")


@contextmanager
def _offline() -> Iterator[None]:
    """The package reads these variables when it is imported."""
    wanted = {} if PACKAGE in sys.modules else {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def quiet() -> Iterator[None]:
    """The package logs to stdout, which is for results."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _bounded(tensors: Mapping[str, Tensor]) -> Any:
    """Return a context that refuses layers far larger than the weights, before their memory is allocated."""
    import torch
    from torch.overrides import TorchFunctionMode

    most = 4 * sum(tensor.numel() for tensor in tensors.values()) + MOST_SPARE_NUMBERS
    count = 0

    class Counted(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            if function in (torch.empty, torch.zeros, torch.ones, torch.arange):
                count += function(*args, **{**(kwargs or {}), "device": "meta"}).numel()
                if count > most:
                    raise _not_a_network("its layers are far larger than the weights in the file")
            return function(*args, **(kwargs or {}))

    return Counted()


# What a YAML may contain


def _require_buildable(yaml: Mapping[str, Any], config: Mapping[str, Any], tasks: Any) -> None:
    """Check that a YAML names known layers only, with plain arguments of a sane size.

    Raises:
        Refused: Saying what else it contains.
    """
    if problems := problems_of(config):
        raise Refused(
            problems[0],
            hint="Export it with ultralytics, yolo export model=FILE.pt format=onnx, and fold the ONNX file.",
            code="ultralytics.network",
        )
    for row in (*_rows(yaml, "backbone"), *_rows(yaml, "head")):
        _require_layer(row, tasks)
    for name in ("depth_multiple", "width_multiple", "nc", "reg_max", "kpt_shape", "channels", "ch"):
        _require_plain(yaml.get(name), name)
    scales = yaml.get("scales") or {}
    if not isinstance(scales, Mapping):
        raise _not_a_network("its scales are no table")
    for name, scale in scales.items():
        _require_plain(scale, f"scales.{name}")
    depths = [yaml.get("depth_multiple"), *(scale[0] for scale in scales.values() if isinstance(scale, list) and scale)]
    deepest = max((depth for depth in depths if isinstance(depth, (int, float))), default=1)
    if max(row[1] for row in (*yaml["backbone"], *yaml["head"])) * max(deepest, 1) > MOST_REPEATS:
        raise _not_a_network(f"it repeats a layer more than {MOST_REPEATS} times")
    if (activation := yaml.get("activation")) is not None:
        _require_activation(activation)


def _rows(yaml: Mapping[str, Any], name: str) -> Sequence[Any]:
    rows = yaml.get(name)
    if not isinstance(rows, (list, tuple)) or not rows:
        raise _not_a_network(f"it has no {name}")
    return rows


def _require_layer(row: Any, tasks: Any) -> None:
    """Refuse a row that is not [from, repetitions, layer, arguments] of a known layer."""
    if not isinstance(row, (list, tuple)) or len(row) != 4 or not isinstance(row[2], str):
        raise _not_a_network("a layer is not [from, repetitions, name, arguments]")
    begins, repeats, name, arguments = row
    if not isinstance(repeats, int) or not isinstance(arguments, (list, tuple)):
        raise _not_a_network(f"{name} is not [from, repetitions, name, arguments]")
    _require_plain(begins, name)
    _require_plain(list(arguments), name)
    if not _is_layer(name, tasks):
        raise _not_a_network(f"{name[:80]!r} is no layer of ultralytics or torch")


def _is_layer(name: str, tasks: Any) -> bool:
    """Whether the package builds a layer for this name, and not something else that it imported."""
    from torch import nn

    for prefix, place in (("nn.", "torch.nn"), ("torchvision.ops.", "torchvision.ops")):
        if name.startswith(prefix):
            found = getattr(importlib.import_module(place), name.removeprefix(prefix), None)
            return isinstance(found, type) and issubclass(found, nn.Module)
    found = getattr(tasks, name, None)
    if name == "Silence":  # YOLOv9e, which the package builds as an identity
        return True
    return (
        isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith("ultralytics.nn.mod")
    )


def _require_plain(value: Any, where: str) -> None:
    """Refuse an argument that is no number of a sane size, no word, and no list of them."""
    if isinstance(value, (list, tuple)) and len(value) < LARGEST:
        for each in value:
            _require_plain(each, where)
    elif isinstance(value, str):
        if not re.fullmatch(r"[A-Za-z_][\w.]{0,80}", value):
            raise _not_a_network(f"{where} has the argument {value[:80]!r}")
    elif value is not None and not (isinstance(value, (bool, int, float)) and abs(value) <= LARGEST):
        raise _not_a_network(f"{where} has the argument {str(value)[:80]}")


def _require_activation(text: Any) -> None:
    """Refuse an activation that is no constructor of torch.nn with plain arguments: the package evaluates it."""
    from torch import nn

    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        function = ast.unparse(call.func)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(argument)
    except (AssertionError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        function = ""
    name = function.removeprefix("torch.").removeprefix("nn.")
    kind = getattr(nn, name, None) if function in (f"torch.nn.{name}", f"nn.{name}") else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise _not_a_network(f"its activation {str(text)[:80]!r} is no layer of torch.nn with plain arguments")


def _without_downloads(yaml: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the YAML; backbones of torchvision get no weights, which would be downloaded and then replaced."""
    made = deepcopy(dict(yaml))
    for row in (*made["backbone"], *made["head"]):
        if row[2] == "TorchVision" and len(row[3]) > 2:
            row[3][2] = None
    return made


def _not_a_network(what: str) -> Refused:
    return Refused(
        f"the YAML in the file is not one of a network of ultralytics: {what}; nothing was built.",
        hint="Do not use this file with any other tool unless you know where it comes from.",
        code="ultralytics.yaml",
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

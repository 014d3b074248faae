"""Build a network by the name of its architecture (timm, torchvision, ..., own code) and load its weights."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from inspect import isfunction, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core.errors import (
    EnvironmentProblem,
    Refused,
    UsageProblem,
    describe_exception,
    did_you_mean,
    first_names,
    nearest_name,
    unreadable,
)
from repaconv.core.files import parse_json
from repaconv.core.sharded_checkpoint import WEIGHTS, weights_in
from repaconv.sources import torchvision_networks, ultralytics_networks
from repaconv.sources.optional_packages import loading, package
from repaconv.sources.pickled_module_attributes import take_attributes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from repaconv.checkpoints import Checkpoint
    from repaconv.checkpoints.pickled_modules import PickledModule
    from repaconv.method_api.settings import SettingsReader


# Builders: a package's registry of architectures, or a function in the user's own file

REGISTRIES = ("timm", "torchvision")
"""Packages with a registry of architectures."""
LIBRARIES = (*REGISTRIES, "transformers", ultralytics_networks.PACKAGE)
"""Packages that build networks."""
EXAMPLES = "timm:mobileone_s1, torchvision:resnet50, or a function of your own file: ./net.py:build"
"""Values of --arch that hints give."""


def of_registry(library: Any, kind: str, name: str, config: Mapping[str, Any]) -> Callable[[int | None], nn.Module]:
    """Return a builder of a timm or torchvision network.

    Args:
        library: The imported package.
        kind: "timm" or "torchvision".
        name: Name of the architecture.
        config: A Hugging Face config with further arguments, or empty.

    Returns:
        A function from the number of classes (None for the architecture's default) to the network.

    Raises:
        UsageProblem: The package has no architecture of that name.
    """
    known = (
        set(library.list_models())
        if kind == "timm"
        else set(importlib.import_module("torchvision.models").list_models())
    )
    if name.partition(".")[0] not in known:
        raise UsageProblem(
            f"{kind} has no architecture {name!r}.",
            hint=f"{did_you_mean(name, known)}It knows {len(known)}, as {min(known)}.",
            code="arch.unknown",
        )
    more = dict(config.get("model_args") or {})
    if isinstance(config.get("global_pool"), str):
        more["global_pool"] = config["global_pool"]

    def build(classes: int | None) -> nn.Module:
        given = {**more, **({} if classes is None else {"num_classes": classes})}
        if kind == "timm":
            module: nn.Module = library.create_model(name, **given)
            return module
        return torchvision_networks.build(name, **given)

    return build


def own(path: Path, function: str) -> Callable[[], nn.Module]:
    """Load the user's Python file and return its function, which builds the network.

    The file is executed; the user requested that with --arch.

    Raises:
        UsageProblem: The function does not exist, fails, or does not return a module.
    """
    import torch

    name = f"arch of {path.stem}"  # cannot collide with an installed module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # `_require_named` checked the suffix
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
        build = getattr(module, function, None)
        made = build() if callable(build) else None
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and may end the process
        raise UsageProblem(
            f"{path}:{function} fails with {describe_exception(error)}.",
            hint="It is run as your own Python would run it; try it by itself.",
            code="arch.function",
        ) from error
    if build is None or not isinstance(made, torch.nn.Module):
        functions = [each for each, one in vars(module).items() if isfunction(one) and one.__module__ == name]
        raise UsageProblem(
            f"{path} has no function {function} that returns a torch.nn.Module.",
            hint=f"{did_you_mean(function, functions) if build is None else ''}The function takes no arguments and "
            "returns the network.",
            code="arch.function",
        )
    found: Callable[[], nn.Module] = build
    return found


# Networks with their weights

INPUTS = {"transformers": "pixel_values", ultralytics_networks.PACKAGE: "images"}
"""Names of a network's input by the package that builds it."""
ROUNDED = ("eps", "negative_slope", "alpha", "variance_epsilon")
"""Attributes of torch modules that become float32 attributes of ONNX operators."""
MOST_NAMED = 5
"""Maximum number of tensor names that an error message lists."""
CONFIG = "config.json"


class Architecture(NamedTuple):
    """An architecture by name, from which the network can be built again.

    Attributes:
        name: ``timm:mobileone_s1``, ``transformers:ViTModel``, ``ultralytics:yolo11n.yaml`` or ``net.py:build``.
        config: The config.json of a Hugging Face folder, what a file of Ultralytics says of its network, or empty.
    """

    name: str
    config: Mapping[str, Any]

    @property
    def library(self) -> str:
        """The package of the architecture; empty for the user's own code."""
        kind = self.name.partition(":")[0]
        return kind if kind in LIBRARIES else ""

    @property
    def has_default_config(self) -> bool:
        """Whether it is of transformers without a config.json, so that it is built with the library's defaults."""
        return self.library == "transformers" and not self.config

    @property
    def is_own_code(self) -> bool:
        """Whether it names a Python file of the user that exists."""
        file = Path(self.name.partition(":")[0])
        return not self.library and file.suffix == ".py" and file.is_file()


class BuiltNetwork(NamedTuple):
    """A network with its weights, in eval mode and float32.

    Attributes:
        module: The network.
        classes: Number of classes; 0 if the network has none, None if unknown.
        input_name: Name of its input.
        channels: Channels of its images.
        versions: Version of the package that built it, by name.
        taken: What was set as it is in a pickled module, e.g. ``stem.bn.eps=0.001``.
        prefix: Prefix that its weights' names have in the file, where it was found by their names; else empty.
    """

    module: nn.Module
    classes: int | None
    input_name: str
    channels: int
    versions: Mapping[str, str]
    taken: tuple[str, ...] = ()
    prefix: str = ""


def of_folder(folder: Path, asked: str | None = None) -> tuple[Architecture, Path]:
    """Return the architecture and the weights of a Hugging Face folder: their file, or the index of several.

    Args:
        folder: The folder.
        asked: The architecture that is built instead of the one that config.json names, with the same config.json.

    Raises:
        Refused: config.json cannot be read or names no architecture, or there are no weights.
    """
    config = _config_of(folder)
    weights = weights_in(folder)
    if weights is None:
        _require_no_other_weights(folder)
        raise Refused(
            f"{folder} has neither {' nor '.join(WEIGHTS)}, in one file or in several.",
            hint="Give the weights' file, with --arch if there is no config.json next to it.",
            code="folder.weights",
        )
    if asked:
        return Architecture(asked, config), weights
    wrapped = config.get("model_type") == "timm_wrapper"  # timm's network within one of transformers
    if isinstance(name := config.get("architecture"), str) and not wrapped:
        return Architecture(f"timm:{name}", config), weights
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1:
        return Architecture(f"transformers:{names[0]}", config), weights
    raise Refused(
        f"{folder}/config.json names no architecture.", hint="Say which with --arch.", code="folder.architecture"
    )


def of_file(weights: Path, asked: str) -> Architecture:
    """Return an architecture by name, for weights outside of a Hugging Face folder or in one.

    A network of transformers gets the config.json next to its weights: without it, all would be transformers' defaults,
    of which the shapes of the weights tell only a part.

    Raises:
        Refused: That config.json cannot be read.
    """
    arch = Architecture(asked, {})
    has_config = arch.library == "transformers" and (weights.parent / CONFIG).is_file()
    return Architecture(asked, _config_of(weights.parent)) if has_config else arch


def _config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises:
        Refused: It cannot be read.
    """
    from repaconv.checkpoints.containers import files_inside

    try:
        config = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no table of names")
    except PermissionError as error:
        raise unreadable(folder / CONFIG) from error
    except (OSError, ValueError) as error:
        _require_no_other_weights(folder)
        raise Refused(
            f"{folder} has no readable config.json: {getattr(error, 'strerror', None) or error}.",
            hint="It is a run folder: give the file from which it was made."
            if (folder / "fold.json").is_file()
            else f"{files_inside(folder)} Or give a Hugging Face folder, of config.json and model.safetensors.",
            code="folder.config",
        ) from error
    return config


def _require_no_other_weights(folder: Path) -> None:
    from repaconv.checkpoints.containers import several_files_hint
    from repaconv.checkpoints.other_model_formats import require_no_other_format

    require_no_other_format(folder)
    if several := several_files_hint(folder):
        raise Refused(
            f"{folder} holds weights in several files.", hint=f"It is {several}.", code="folder.several-files"
        )


def _require_named(arch: Architecture) -> None:
    """Check that the text of --arch names a package and an architecture, or a Python file and a function.

    Raises:
        UsageProblem: It does not, or there is no such file.
    """
    first, _, name = arch.name.partition(":")
    path, is_python = Path(first), first.endswith(".py")
    if not first or (arch.library and not name):
        said, hint = f"--arch {arch.name} names no architecture.", f"E.g. {EXAMPLES}."
    elif arch.library or (is_python and name and path.is_file()):
        return
    elif is_python and not path.is_file():
        said = f"--arch: there is no Python file {path}."
        hint = "Check the path. It is followed by a colon and the function that builds the network: ./net.py:build."
    elif is_python:
        said = f"--arch {path} names no function in that file."
        hint = f"E.g. --arch {path}:build, if build() returns the network."
    elif not name:
        said = f"--arch {path} names no package."
        hint = f"E.g. timm:{path} or torchvision:{path}; or a function of your own file: ./net.py:build."
    else:
        said = f"--arch {arch.name}: {path} is neither a package that it takes networks from nor a Python file."
        near = nearest_name(first.lower(), LIBRARIES)
        hint = (f"Did you mean {near}:{name}? " if near else "") + f"E.g. {EXAMPLES}."
    raise UsageProblem(said, hint=hint, code="arch.unknown")


def completed(arch: Architecture, found: Checkpoint, reader: SettingsReader) -> Architecture:
    """Add what the checkpoint and the user's settings say of its network, for a package that builds it from that.

    Raises:
        EnvironmentProblem: The package is not installed or does not load.
        SettingNeeded: The network depends on a setting that neither the file nor the user gives.
        UsageProblem: It names no architecture, the architecture does not exist, or is not the one in the file.
    """
    _require_named(arch)
    kind, _, name = arch.name.partition(":")
    if kind == "torchvision":
        of_registry(_registry(kind, name), kind, name, arch.config)  # raises for an unknown name
        more = torchvision_networks.own_arguments(name, found, reader)
        return Architecture(arch.name, {**arch.config, "model_args": more}) if more else arch
    if arch.library != ultralytics_networks.PACKAGE:
        return arch
    config = ultralytics_networks.config_of(found)
    if config is None:
        return Architecture(
            arch.name, ultralytics_networks.config_by_name(arch.name.partition(":")[2], found.by_file_names)
        )
    own = ultralytics_networks.name_of(config["yaml"])
    if own.removesuffix(".yaml") != arch.name.removesuffix(".yaml"):
        raise UsageProblem(
            f"--arch {arch.name} is not what {found.path} was built from, which is {own}.",
            hint="Leave out --arch: the file contains the configuration of its network.",
            code="arch.contradicts",
        )
    return Architecture(own, config)


def build_network(arch: Architecture, found: Checkpoint) -> BuiltNetwork:
    """Build a network and load its weights strictly.

    Args:
        arch: The architecture.
        found: The checkpoint. If it is a pickled module, the network gets its numbers, too. Names as they are in the
            file are tried where those without prefixes do not fit.

    Raises:
        EnvironmentProblem: The package is not installed or does not load.
        UsageProblem: The architecture does not exist.
        Refused: The weights are not those of the architecture, or not numbers; the message names tensors.
    """
    from repaconv.sources.library_preprocessing import own_channels

    module, prefix = _build_and_load(arch, found)
    module.eval().requires_grad_(False)
    names = {name: f"{found.prefix}{prefix}{name}" for name in module.state_dict()} if prefix else found.names
    _require_numbers(module, names)
    taken = take_attributes(module, _modules_by_name(module, found, prefix), arch.name)
    if arch.library == ultralytics_networks.PACKAGE:
        module = ultralytics_networks.prepare(module)
    for part in module.modules():  # attributes of ONNX operators and arguments of float32 kernels are float32
        for name in ROUNDED:
            if isinstance(value := getattr(part, name, None), float):
                setattr(part, name, float(np.float32(value)))
    channels = own_channels(arch.config) or _image_channels(module)
    versions = {arch.library: version(arch.library)} if arch.library else {}
    classes = 0 if getattr(module, "num_classes", None) == 0 else None
    return BuiltNetwork(module, classes, INPUTS.get(arch.library, "input"), channels, versions, taken, prefix)


def _require_numbers(module: nn.Module, names: Mapping[str, str]) -> None:
    """Refuse NaN and infinity in weights and statistics; other buffers, such as masks, may hold them."""
    from repaconv.checkpoints import require_sound

    statistics = (
        each for each in module.named_buffers() if each[0].rpartition(".")[2] in ("running_mean", "running_var")
    )
    require_sound({**dict(module.named_parameters()), **dict(statistics)}, names)


def _modules_by_name(module: nn.Module, found: Checkpoint, prefix: str) -> dict[str, PickledModule]:
    """The pickled modules by their names in the network, which may lack a prefix; empty for plain weights."""
    from repaconv.checkpoints.checkpoint_reader import modules_under_prefix

    if prefix:
        return modules_under_prefix(found.modules, prefix)
    short, full = next(iter(found.names.items()))
    prefix = full.removeprefix(found.prefix).removesuffix(short)
    names = {name for name, _ in module.named_modules()}
    if not prefix or names & found.modules.keys() != {""}:
        return dict(found.modules)
    return {f"{name}.".removeprefix(prefix).removesuffix("."): part for name, part in found.modules.items()}


def _image_channels(module: nn.Module) -> int:
    """The number of image channels: the input channels of the first convolution, or 3."""
    from torch import nn

    first = next((part.in_channels for part in module.modules() if isinstance(part, nn.Conv2d)), None)
    return first or next((p.shape[1] for p in module.parameters() if p.ndim == 4), 3)


def _build_and_load(arch: Architecture, found: Checkpoint) -> tuple[nn.Module, str]:
    """Build the network and load the checkpoint's weights, of which none may be missing.

    None may be left over either, except tensors that do not have the prefix of the network's weights.

    Returns:
        The network, and that prefix; empty if all of the file's tensors are the network's.
    """
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.tensors.items()}
    named, prefix = {found.names[name].removeprefix(found.prefix): weights[name] for name in weights}, ""
    if arch.library == "transformers":
        return _from_transformers(arch, named), ""
    if arch.library == ultralytics_networks.PACKAGE:
        module = ultralytics_networks.build(arch.config, named)
    else:
        build = _builder(arch)
        module = _default_network(build) if arch.library else build(None)
        weights, prefix = _own_weights(arch, module, weights, named, found.prefix)
        if arch.library:
            module = build(_checkpoint_classes(module, weights))
    weights, named = (_with_batch_counts(module, each) for each in (weights, named))
    weights = named if set(named) == set(module.state_dict()) else weights
    _require_same(arch, module, weights, found.names)
    module.load_state_dict(weights, strict=True, assign=True)
    return module, prefix


def _own_weights(
    arch: Architecture, module: nn.Module, weights: dict[str, Tensor], named: dict[str, Tensor], selected: str
) -> tuple[dict[str, Tensor], str]:
    """The tensors whose names are the network's, without a prefix that they have in the file, and that prefix.

    A training framework saves a network as a part of something else: Lightning's checkpoints have ``model.*`` next to
    the tensors of a loss.

    Args:
        arch: The architecture.
        module: The network, with any number of classes.
        weights: All tensors, by their names without the prefixes of known wrappers.
        named: The same by their names in the file.
        selected: The prefix that these names lack, since it was selected with --weights.

    Returns:
        All tensors and no prefix, if their names are the network's or those under no prefix are.

    Raises:
        Refused: The tensors under several prefixes are the network's, as where there is a moving average, too; one of
            them may be no prefix, or a part of another.
    """
    from repaconv.checkpoints.checkpoint_reader import WITHOUT, under_prefix

    names = _plain_names(module.state_dict())
    own = set(names)
    if not own or own in (set(_plain_names(weights)), set(_plain_names(named))):
        return weights, ""
    prefixes = [name.removesuffix(names[0]) for name in named if name == names[0] or name.endswith(f".{names[0]}")]
    parts = {prefix: under_prefix(named, prefix) for prefix in prefixes}
    whole = [prefix for prefix in prefixes if own <= parts[prefix].keys()]
    within = {prefix: [each for each in whole if each != prefix and each.startswith(prefix)] for prefix in whole}
    exact = [prefix for prefix in whole if own == set(_plain_names(parts[prefix]))]
    nested = next((f"{selected}{inner[0]}".removesuffix(".") for inner in within.values() if inner), "")
    found = whole if nested else exact or whole
    if len(found) > 1:
        places = [f"{selected}{prefix}".removesuffix(".") for prefix in sorted(found)]
        how = f"Select one with --weights, e.g. --weights {places[0]}."
        if nested:
            others = ",".join(filter(None, (selected.removesuffix("."), f"{WITHOUT}{nested}")))
            how = f"--weights {nested} reads those with that prefix, --weights {others} the others."
        raise Refused(
            f"the weights of {arch.name} are in the file {len(places)} times, under these prefixes: "
            f"{', '.join(place or 'none' for place in places)}.",
            hint=how,
            code="arch.ambiguous",
        )
    return (parts[found[0]], found[0]) if found and found[0] else (weights, "")


def _plain_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors, without the counters of BatchNorms, which old files lack."""
    return [name for name in tensors if not _is_batch_count(name)]


def _is_batch_count(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"


def _with_batch_counts(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add missing ``num_batches_tracked`` of BatchNorms, which old files lack and inference does not read."""
    import torch

    counts = filter(_is_batch_count, module.state_dict())
    return {**{name: torch.zeros((), dtype=torch.int64) for name in counts}, **weights}


def _default_network(build: Callable[[int | None], nn.Module]) -> nn.Module:
    """Build the network with its default number of classes, on the meta device if possible, to save memory."""
    import torch

    try:
        with torch.device("meta"):
            return build(None)
    except NotImplementedError:  # the initialization reads values, as in torchvision's RegNets
        return build(None)


def _builder(arch: Architecture) -> Callable[[int | None], nn.Module]:
    """Return a function from the number of classes (None for the default) to the network."""
    kind, _, name = arch.name.partition(":")
    if not arch.library:
        _require_named(arch)  # a run may be verified after its file has gone
        build = own(Path(kind), name)
        return lambda _checkpoint_classes: build()
    return of_registry(_registry(kind, name), kind, name, arch.config)


def _registry(kind: str, name: str) -> Any:
    """Import timm or torchvision.

    Raises:
        EnvironmentProblem: It is not installed or does not load; also says if no architecture has that name.
    """
    from repaconv.checkpoints.architecture_index import parameter_counts

    try:
        return package(kind)
    except EnvironmentProblem as missing:
        known = {each.partition(":")[2] for each in parameter_counts() if each.startswith(f"{kind}:")}
        plain = name.partition(".")[0]
        if plain in known:
            raise
        raise EnvironmentProblem(
            f"{missing.message.rstrip('.')}, and the index of repaconv has no {name!r} of it.",
            hint=f"{did_you_mean(plain, known)}{missing.hint}",
            code=missing.code,
        ) from missing


def _from_transformers(arch: Architecture, weights: dict[str, Tensor]) -> nn.Module:
    """Build the network with transformers' own ``from_pretrained``, which also maps tensor names of older versions."""
    library, name = package("transformers"), arch.name.partition(":")[2]
    with loading("transformers"):
        kind = getattr(library, name, None)
    if kind is None or not hasattr(kind, "config_class"):
        raise UsageProblem(
            f"transformers has no architecture {name!r}.",
            hint="Code that comes with a folder is not run; give it as your own, with --arch FILE.py:FUNCTION.",
            code="arch.unknown",
        )
    config = dict(arch.config)
    part = config.get(getattr(kind.config_class, "base_config_key", ""))  # of a network of several, as CLIP's
    if isinstance(part, dict):  # the size of the embedding that is compared with that of texts is CLIP's own
        config = part | {key: config[key] for key in ("projection_dim",) if key in config}
    settings = kind.config_class.from_dict(config)
    with _without_messages(library.utils.logging):
        module, found = kind.from_pretrained(
            None, config=settings, state_dict=weights, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if isinstance(part, dict):
        own = {name.partition(".")[0] for name in module.state_dict()}
        of_others = {name for name in found.get("unexpected_keys", ()) if name.partition(".")[0] not in own}
        found = {**found, "unexpected_keys": {*found.get("unexpected_keys", ())} - of_others}
    shapes = [f"{name} {[*stored]}, not {[*wanted]}" for name, stored, wanted in found.get("mismatched_keys", ())]
    kinds = (("missing", "missing_keys"), ("not in it", "unexpected_keys"))
    differences = [(what, sorted(found.get(key, ()))) for what, key in kinds]
    _require_none(arch, [*differences, ("of another shape", sorted(shapes))])
    loaded: nn.Module = module.float()
    return loaded


@contextmanager
def _without_messages(logging: Any) -> Iterator[None]:
    """Within it, transformers shows no progress and no table of the tensors that differ, which are refused."""
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def vision_tower(arch: Architecture, module: nn.Module) -> str:
    """The architecture of the part that takes images, of a network of images and text; empty if it is another."""
    library, _, name = arch.name.partition(":")
    takes_text = "input_ids" in signature(module.forward).parameters
    if library != "transformers" or not takes_text or not isinstance(arch.config.get("vision_config"), dict):
        return ""
    stem, known = name.removesuffix("Model"), package("transformers")
    names = (f"{stem}VisionModelWithProjection", f"{stem}VisionModel")
    return next((f"{library}:{each}" for each in names if hasattr(known, each)), "")


def _checkpoint_classes(plain: nn.Module, weights: Mapping[str, Tensor]) -> int | None:
    """The number of classes of the checkpoint if only its heads differ in size, 0 if it has no heads, else None.

    Backbones of timm have no head unless a number of classes is given, such as EVA-02 and DINOv2.
    """
    own = plain.state_dict()
    if (head := _missing_head(plain)) and (weight := weights.get(f"{head}.weight")) is not None and weight.ndim:
        return int(weight.shape[0])
    other = {name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape}
    counts = {weights[name].shape[:1] for name in other}
    if len(counts) == 1 and all(own[name].shape[1:] == weights[name].shape[1:] for name in other):
        return next(iter(counts.pop()), None)
    gone = {name.rpartition(".")[0] for name in own.keys() - weights.keys()}
    heads = {own[f"{head}.weight"].ndim for head in gone if f"{head}.weight" in own}
    return 0 if gone and not weights.keys() - own.keys() and heads == {2} else None


def _missing_head(plain: nn.Module) -> str:
    """The name of the classifier of a timm network that was built without one; empty if it has one, or several."""
    head = (getattr(plain, "pretrained_cfg", None) or {}).get("classifier")
    return head if isinstance(head, str) and f"{head}.weight" not in plain.state_dict() else ""


def _require_same(
    arch: Architecture, module: nn.Module, weights: Mapping[str, Tensor], names: Mapping[str, str]
) -> None:
    """Refuse weights of another network; the message lists missing and unexpected tensors and different shapes.

    What the network has as floating-point numbers must be such in the file, where its name is that of ``names``.
    """
    from repaconv.checkpoints.tensor_sanity_checks import require_floats

    own = module.state_dict()
    missing, more = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} {list(weights[name].shape)} for {list(own[name].shape)}"
        for name in own
        if name in weights and own[name].shape != weights[name].shape
    ]
    _require_none(arch, [("missing", missing), ("not in it", more), ("of another shape", shapes)])
    require_floats({name: tensor for name, tensor in weights.items() if own[name].is_floating_point()}, names)


def _require_none(arch: Architecture, mismatches: list[tuple[str, list[str]]]) -> None:
    """Refuse weights with such tensors, which are given by kind of mismatch."""
    if differences := [f"{what}: {first_names(names, MOST_NAMED)}" for what, names in mismatches if names]:
        hint = "Name the architecture that was trained, with --arch; --weights takes another set of the file."
        if arch.has_default_config:
            hint = f"It was built with transformers' defaults: put the model's {CONFIG} next to the weights. {hint}"
        raise Refused(
            f"these are not the weights of {arch.name}: {'; '.join(differences)}.", hint=hint, code="arch.weights"
        )

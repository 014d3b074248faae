"""Fold a network of a named architecture: build it, load its weights strictly, export it to ONNX, fold the graph."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core import run_folder
from repaconv.core.errors import GateFailed, Refused, describe_exception, first_names
from repaconv.core.file_replacement import write_payload
from repaconv.core.files import lock_folder, payload_of, require_valid_name
from repaconv.core.progress import Progress, silent
from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.graph_without_weights import write_model
from repaconv.graph.onnx_files import opset_of
from repaconv.method_api.preprocessing import Images, Sized, images_by, require_channels
from repaconv.method_api.settings import SettingsReader
from repaconv.onnx_export.float64_exporter import network_to_onnx
from repaconv.onnx_export.torch_exporter import load_exporter
from repaconv.results import ClassScores, Exporting, Fact, Known, Link, NetworkFold
from repaconv.results.link_reasons import limit_in_words
from repaconv.sources.class_score_outputs import LOGITS, asked_classes, class_scores
from repaconv.sources.fold_size_reverts import Kept
from repaconv.sources.graph_fold import Folded, folded, parts_not_folded
from repaconv.sources.graph_fold_record import measured_properties, recorded
from repaconv.sources.named_architectures import (
    CONFIG,
    Architecture,
    BuiltNetwork,
    build_network,
    completed,
    of_file,
    of_folder,
    vision_tower,
)
from repaconv.sources.source_model import TRAINING
from repaconv.sources.ultralytics_networks import PACKAGE
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.fold.rounding_reverts import compared_with_reverts, forced_fields
from repaconv.stages.fold.speed_reverts import fold_with_reverts
from repaconv.stages.shared.file_hash_check import require_pinned
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.tasks.task_of_network import task_named
from repaconv.verification.graph_with_cached_outputs import Evaluated

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import nn

    from repaconv.checkpoints import Checkpoint


# --- Run a torch network on one image to find its outputs: their names, their widths, the number of classes.

ELSE = "Fold the module in memory, repaconv.fold(module, example=...), or as ONNX: repaconv fold model.onnx."
"""Hint of refusals: other ways to fold a network that does not take images or return tensors."""


def run_on_one_image(module: nn.Module, shape: tuple[int, int, int]) -> Any:
    """Run the module on one image of zeros and return its output.

    Args:
        module: The network.
        shape: [C, H, W] of the image.

    Raises:
        Refused: The module raises an exception, which the message repeats.
    """
    import torch

    try:
        return _run_on_zeros(module, shape, next((p.dtype for p in module.parameters()), torch.float32))
    except Exception as error:  # of any network
        raise Refused(
            f"this network does not take one image of {'x'.join(map(str, shape))}: {describe_exception(error)}.",
            hint=f"Its convolutions take {kind}, not images. {ELSE}"
            if (kind := _no_images(module))
            else f"If its images are of another size: --set image_size=224x224. If it takes something else: {ELSE}",
            code="network.call",
        ) from error


def _no_images(module: nn.Module) -> str:
    """Name the data that a network's convolutions take, if it is not images; empty if it has a Conv2d or none at all.

    A network on images may contain convolutions of sequences as well, e.g. in channel attention (ECA).
    """
    from torch import nn

    parts = tuple(module.modules())
    kinds = {nn.Conv2d: "", nn.Conv3d: "videos or volumes", nn.Conv1d: "sequences, e.g. sound"}
    return next((name for kind, name in kinds.items() if any(isinstance(part, kind) for part in parts)), "")


@contextmanager
def batch_norms_run(module: nn.Module) -> Iterator[list[str]]:
    """Record the names of the BatchNorms that run within the context, one entry per call."""
    from torch.nn.modules.batchnorm import _BatchNorm

    found: list[str] = []
    every = [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    hooks = [part.register_forward_hook(lambda *_, name=name: found.append(name)) for name, part in every]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def in_float64(module: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    """Convert the module to float64, in place, and check that it runs.

    Args:
        module: The network.
        shape: [C, H, W] of its images.

    Raises:
        Refused: The module does not run in float64, e.g. since its code creates float32 tensors.
    """
    import torch

    module = module.double()
    try:
        _run_on_zeros(module, shape, torch.float64)
    except Exception as error:  # of any network that took an image before
        raise Refused(
            f"this network computes in float32 only, so it cannot be verified in float64: {describe_exception(error)}.",
            hint="Export it yourself and fold the ONNX model, which is evaluated in float64: repaconv fold model.onnx.",
            code="network.float64",
        ) from error
    return module


def _run_on_zeros(module: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype, count: int = 1) -> Any:
    """Run the module on images of zeros of this dtype."""
    import torch

    with torch.inference_mode():
        return module(torch.zeros(count, *shape, dtype=dtype))


def _require_joint_outputs(module: nn.Module, shape: tuple[int, int, int], found: Any) -> None:
    """Refuse a network that gives a list of each image's outputs, as detectors of torchvision do.

    Args:
        module: The network.
        shape: [C, H, W] of its images.
        found: What it returned for one image.

    Raises:
        Refused: For two images it gives two such outputs, so that their number is not that of the graph.
    """
    import torch

    if not (isinstance(found, (list, tuple)) and len(found) == 1 and isinstance(found[0], Mapping)):
        return
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        several = len(_run_on_zeros(module, shape, dtype, count=2)) > 1
    except Exception:  # of any network that takes one image only
        several = False
    if several:
        raise Refused(
            "this network gives a list with the outputs of each image, and not one tensor for all images.",
            hint='Export it for one image, and fold the graph: torch.onnx.export(module, images, "model.onnx"), '
            "repaconv fold model.onnx.",
            code="network.outputs",
        )


def output_names(built: BuiltNetwork, found: Any) -> tuple[str, ...]:
    """Name the outputs of a network.

    A dict of outputs keeps its own names. A network of Ultralytics gets the names that ``yolo export`` gives. Any other
    single output is called ``logits`` if the network is a classifier, ``output`` if that is unknown and the shape is
    [images, numbers], and ``features`` otherwise. Several outputs are called ``output_0``, ``output_1``, ...

    Args:
        built: The network.
        found: What it returned.

    Raises:
        Refused: The network returns something that is no tensor.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    named = _outputs_by_name(found)
    if named and all(isinstance(value, Tensor) for value in named.values()):
        return tuple(named)
    every = tree_leaves(found)
    leaves = [leaf for leaf in every if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in every if isinstance(leaf, (int, float))]  # an exporter would write them as outputs
    if numbers or not leaves:
        raise Refused(
            f"this network gives {type((numbers or every or [None])[0]).__name__}, which is no tensor.",
            hint=f"Let it return tensors, or a tuple or dict of them. {ELSE}",
            code="network.outputs",
        )
    if PACKAGE in built.versions:
        return tuple(f"output{number}" for number in range(len(leaves)))
    if len(leaves) == 1:
        unknown = "output" if built.classes is None and leaves[0].ndim == 2 else "features"
        return (LOGITS,) if built.classes else (unknown,)
    return tuple(f"output_{number}" for number in range(len(leaves)))


def output_widths(names: Sequence[str], found: Any) -> dict[str, int]:
    """The number of columns of each floating-point output of shape [images, numbers], by name."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    pairs = zip(names, leaves, strict=False)
    return {name: int(leaf.shape[1]) for name, leaf in pairs if leaf.ndim == 2 and leaf.is_floating_point()}


def _outputs_by_name(found: Any) -> dict[str, Any]:
    """The values of a returned dict by name, nested ones with a number appended; empty if it is no dict."""
    from torch.utils._pytree import tree_leaves

    several = {str(name): tree_leaves(value) for name, value in found.items()} if isinstance(found, Mapping) else {}
    return {
        f"{name}_{number}" if len(leaves) > 1 else name: leaf
        for name, leaves in several.items()
        for number, leaf in enumerate(leaves)
    }


def class_count(built: BuiltNetwork, found: Any) -> int | None:
    """The number of classes; 0 for none, None where unknown.

    An output counts as class scores if it is called ``logits`` or is the only output of a timm or torchvision network.
    """
    logits = found.get("logits") if isinstance(found, Mapping) else found
    by_name = (built.versions and built.input_name in ("input", "images")) or isinstance(found, Mapping)
    if not by_name or getattr(logits, "ndim", 0) != 2 or built.classes == 0:
        return built.classes
    return int(logits.shape[1])  # type: ignore[union-attr]


def outputs_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs on the same inputs gave different outputs."""
    return any(not np.array_equal(one[name], other[name], equal_nan=True) for name in one)


# --- Fold a network of a named architecture: build it, load its weights strictly, export it to ONNX, fold the graph.

EXPORTED_SUFFIX = ".exported.onnx"
LARGEST_GRAPH = 2**31 - 2**20
"""Most bytes of weights in one ONNX file: protobuf's limit of 2 GiB, less 1 MiB for the graph itself."""
MODULE_BYTES = 70
"""Memory that `repaconv.fold(module)` takes at least for each number of a network, measured with 158 million."""
USUAL_SIZE = (224, 224)
"""Image size (height, width) in pixels, used where neither the library nor the settings give one."""


def fold_network_by(
    options: FoldOptions,
    path: str | Path,
    *,
    known: Known | None = None,
    found: Checkpoint | None = None,
    overrule: bool | None = None,
    progress: Progress = silent,
) -> NetworkFold:
    """Fold a network of a named architecture into a run.

    Writes ``<stem>.folded.onnx``, the graph as exported, and ``fold.json``.

    Args:
        path: The weights, or a Hugging Face folder.
        options: The options. ``arch`` names what builds the network if ``path`` is not a folder; a function in the
            user's own Python file is executed.
        known: The network that was recognized by its tensors, if ``arch`` was not given by the user.
        found: The weights, if they were read already.
        overrule: See `repaconv.stages.fold.onnx_fold.fold_onnx_by`.
        progress: See `Progress`.

    Raises:
        Refused: If the weights do not belong to that architecture, do not fit into an ONNX file in float64, the network
            computes in float32 only, or torch cannot export it.
        EnvironmentProblem: If the architecture's package is not installed.
        GateFailed: If the exported or the folded graph computes something else; nothing is written then.
    """
    progress("build the network", 0, 0)
    plan = _plan(options, Path(path), found, progress)
    load_exporter(progress)
    progress("export to ONNX", 0, 0)
    names, shape = plan.outputs, (plan.built.channels, *plan.images.size)
    module = in_float64(plan.built.module, shape)
    exported, by, link = _exported(module, plan.built.input_name, shape, names)
    progress("fold", 0, 0)
    unverified, words = options.force if overrule is None else overrule, options.words()
    given, kept, links = _kept_fold(plan, exported, progress, unverified=unverified)
    taken = measured_properties(plan.found.path, given, kept.graph)
    left = (*kept.reverts.messages, *parts_not_folded(kept.graph.model))
    record = recorded(given, kept.graph, kept.changes, (link, *links), taken, left)
    record |= {"options": words, **forced_fields(kept, links, words)}
    target, data = plan.run.folder / plan.payload, plan.run.folder / plan.data
    plan.found.require_unchanged()
    with lock_folder(plan.run.folder):
        write_payload(target, partial(write_model, kept.graph.model))
        write_payload(data, partial(write_model, exported))
        record["scores"] = None if taken.whole else plan.scores
        record |= {"reverted": kept.reverts.names, "image_size": taken.image_size, "opset": opset_of(exported)}
        record["exporting"] = _exporting(plan, exported, record["parameters"][0])
        artefact = run_folder.write_fold(plan.run, _artefact(plan, known, by, record))
        run_folder.set_newest(plan.run)
    inputs = [plan.found.path, *([plan.config] if plan.config else [])]
    return with_files(artefact, inputs, [target, data, plan.run.fold_json])


def _exported(
    module: nn.Module, name: str, shape: tuple[int, int, int], names: tuple[str, ...]
) -> tuple[onnx.ModelProto, str, Link]:
    """Export the module with a dynamic batch size; with a batch size of 1 if the dynamic one is exported wrongly.

    Returns:
        The graph, the name of the exporter, and the comparison of both with the module.

    Raises:
        Refused: No exporter supports the network, or the exported graph returns another shape, also for one image.
        GateFailed: The exported graph computes something else, also for one image.
    """
    exported, by = network_to_onnx(module, shape, input_name=name, outputs=names)
    try:
        return exported, by, _exported_link(module, exported, name, shape, names)
    except (GateFailed, Refused) as error:  # other numbers, or another shape
        if exported.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value"):
            raise
        try:
            exported, by = network_to_onnx(module, shape, input_name=name, outputs=names, dynamic=False)
        except Refused:
            raise error from None
    return exported, by, _exported_link(module, exported, name, shape, names)


def _kept_fold(
    plan: _Plan, exported: onnx.ModelProto, progress: Progress, *, unverified: bool
) -> tuple[Evaluated, Kept, tuple[Link, ...]]:
    """Fold the exported graph in float64, revert what makes it larger, slower or less exact, and compare the rest.

    Returns:
        The exported graph in float32, its fold, and the comparison of both; no links if nothing was folded.
    """

    def fold(reverted: tuple[str, ...]) -> Folded:
        found = folded(plan.found.path, exported, reverted)
        return found._replace(model=retyped(found.model, {11: 1}))

    given = Evaluated(retyped(exported, {11: 1}))
    again = partial(fold_with_reverts, given, given, fold, measured=plan.options.measure, progress=progress)
    kept = again()
    if not kept.changes:
        return given, kept, ()
    return given, *compared_with_reverts(plan.found.path, kept, given, given, fold, again, unverified=unverified)


def _exporting(plan: _Plan, exported: onnx.ModelProto, parameters: int) -> Exporting:
    remain = sum(node.op_type == "BatchNormalization" for node in exported.graph.node)
    own = sum(parameter.numel() for parameter in plan.built.module.parameters())
    return Exporting(parameters=(own, parameters), batchnorms=(plan.norms, remain))


def _artefact(plan: _Plan, known: Known | None, exporter: str, record: Mapping[str, Any]) -> NetworkFold:
    folder = plan.run.folder
    return NetworkFold(
        made_by={**made_by("torch", "onnx", "onnx-ir", "onnxruntime"), **plan.built.versions},
        origin=plan.found.origin,
        settings=dict(plan.options.settings or {}),
        task=task_named(plan.options.task) if plan.options.task else None,
        preprocessing=plan.images.preprocessing,
        facts=(*plan.images.facts, *_config_facts(plan.arch), *_weight_facts(plan.built)),
        arch=plan.arch.name,
        known=known,
        config=dict(plan.arch.config),
        classes=plan.built.classes,
        exporter=exporter,
        payload=payload_of(folder / plan.payload, folder),
        data=payload_of(folder / plan.data, folder),
        **record,
    )


MOST_LISTED_ATTRIBUTES = 5
"""Maximum number of attributes that a fact lists."""


def _config_facts(arch: Architecture) -> Iterator[Fact]:
    """That a network of transformers was built with the library's default configuration, if it was."""
    if arch.has_default_config:
        why = f"there is no {CONFIG} next to the weights, so activations and epsilons may differ from those trained"
        yield Fact(name=CONFIG, value="transformers' default configuration", source=why, assumed=True)


def _weight_facts(built: BuiltNetwork) -> Iterator[Fact]:
    """Facts about the weights: the prefix of their names, and the attributes that were set from a pickled module."""
    if built.prefix:
        yield Fact(
            name="weights",
            value=f"{built.prefix}*",
            source="the only prefix under which all weights of the network are",
        )
    if built.taken:
        value = first_names(built.taken, MOST_LISTED_ATTRIBUTES)
        yield Fact(name="attributes", value=value, source="the pickled module, whose values differ from the code's")


class _Plan(NamedTuple):
    """The options resolved for one network. After this, it is refused only if its graph computes something else."""

    options: FoldOptions
    arch: Architecture
    found: Checkpoint
    built: BuiltNetwork
    images: Images
    scores: ClassScores | None
    outputs: tuple[str, ...]
    norms: int  # BatchNorms that run in one inference
    config: Path | None  # the config.json that was read
    run: run_folder.Run
    payload: str
    data: str


def _plan(options: FoldOptions, path: Path, found: Checkpoint | None, progress: Progress) -> _Plan:
    """Read the weights, build the network, and make every check that does not need the export."""
    from repaconv.checkpoints import read_checkpoint

    asked = _absolute(options.arch or "")
    arch, weights = of_folder(path, asked) if path.is_dir() else (of_file(path, asked), path)
    folder = weights.parent if path.is_dir() or arch.config else None
    found = found or read_checkpoint(weights, options.weights, require_pinned(weights, options.sha256))
    _require_one_file(found)
    reader = SettingsReader(options.settings or {})
    arch = completed(arch, found, reader)
    facts = tuple(reader.facts)
    if arch.is_own_code:
        progress(f"run {options.arch}, as --arch asks", 0, 0)
    network = build_network(arch, found)
    images, classes = _images(arch, network, folder, reader), asked_classes(reader)
    reader.done()
    images = images._replace(facts=(*facts, *images.facts))
    stem = run_folder.utf8_name(path).name if path.is_dir() else run_folder.utf8_stem(path)
    payload, data = f"{stem}{run_folder.FOLDED}", f"{stem}{EXPORTED_SUFFIX}"
    out = Path(options.out) if options.out else run_folder.default_folder(path)
    run = run_folder.prepare_run(
        weights, found.origin.sha256, out, force=options.force, payload=payload, files=[out / data]
    )
    try:
        network, gives, norms = _first_run(network, images.size)
    except Refused as refused:
        if not (tower := vision_tower(arch, network.module)):
            raise
        raise Refused(
            f"{arch.name} takes images and text, and {refused.message}",
            hint=f"Fold its vision tower: repaconv fold {shlex.quote(str(path))} --arch {tower}",
            code=refused.code,
        ) from refused
    require_channels(options.settings or {}, images.preprocessing, network.channels)
    head = class_count(network, gives)
    network = network._replace(classes=head if classes is None else classes)
    _require_joint_outputs(network.module, (network.channels, *images.size), gives)
    outputs = output_names(network, gives)
    scores = class_scores(output_widths(outputs, gives), classes, head)
    config = folder / CONFIG if folder else None
    return _Plan(options, arch, found, network, images, scores, outputs, len(norms), config, run, payload, data)


def _first_run(network: BuiltNetwork, size: tuple[int, int]) -> tuple[BuiltNetwork, Any, list[str]]:
    """Run the network on an image with the channels of its first convolution, or else with three channels, or with one.

    The first convolution has more channels than the image if the network moves blocks of pixels into channels before:
    it has 12 in YOLOX and in Real-ESRGAN x2.

    Returns:
        The network with the channels that it took, its output, and the names of the BatchNorms that ran.
    """
    refused: Refused | None = None
    for channels in dict.fromkeys((network.channels, 3, 1)):
        with batch_norms_run(network.module) as norms:
            try:
                return network._replace(channels=channels), run_on_one_image(network.module, (channels, *size)), norms
            except Refused as error:
                refused = refused or error
    assert refused is not None
    raise refused


def _require_one_file(found: Checkpoint) -> None:
    """Refuse weights that do not fit into one ONNX file in float64.

    Raises:
        Refused: If they do not fit; the message has their number.
    """
    count = sum(tensor.numel() for tensor in found.tensors.values())
    if 8 * count > LARGEST_GRAPH:
        memory = f"at least {MODULE_BYTES * count / 2**30:.0f} GiB"
        in_memory = f"Fold the module in memory, which takes {memory}: repaconv.fold(module, example=images)."
        raise Refused(
            f"{found.path} has {count:,} numbers, and in float64 one ONNX file holds {LARGEST_GRAPH // 8:,}.",
            hint=f"Export it yourself in float32, and fold the ONNX model: repaconv fold model.onnx. {in_memory}"
            if 4 * count <= LARGEST_GRAPH
            else in_memory,
            code="network.too-large",
        )


def _absolute(arch: str) -> str:
    """Make the path of the user's own Python file absolute, because it is run again from another folder.

    Raises:
        Refused: If the path cannot be a file's.
    """
    file, _, function = arch.partition(":")
    if not file.endswith(".py"):
        return arch
    require_valid_name(Path(file))
    return f"{Path(file).resolve()}:{function}"


def _images(arch: Architecture, network: BuiltNetwork, folder: Path | None, reader: SettingsReader) -> Images:
    """The image size and the preprocessing, with the source of each."""
    from repaconv.sources.library_preprocessing import own_size, pixels_of

    said = pixels_of(arch, network.module, folder)
    usual = Sized(USUAL_SIZE, "not recorded in the checkpoint", assumed=True)
    if size := said.values.get("image_size"):
        usual = Sized(size, said.where)
    if size := own_size(arch.config):
        usual = Sized(size, "config.json")
    if side := arch.config.get("model_args", {}).get("image_size"):
        usual = Sized((side, side), "the position embedding")
    return images_by(said, reader, usual)


def _exported_link(
    module: nn.Module, exported: onnx.ModelProto, name: str, shape: tuple[int, int, int], names: tuple[str, ...]
) -> Link:
    """Compare the module in float64 with its exported graph, on three random images, since it was traced with two.

    The graph is evaluated in float64, or in float32 if the evaluator does not support it.

    Raises:
        GateFailed: If they differ.
    """
    from repaconv.sources.named_architecture_source import NetworkRunner
    from repaconv.sources.onnx_graph_runner import WithInputs
    from repaconv.verification.comparison import Comparison, overall_link
    from repaconv.verification.float64_graphs import Float64
    from repaconv.verification.input_batches import random_inputs
    from repaconv.verification.model_runners import FixedBatch, load_onnx
    from repaconv.verification.onnx_model_loading import inputs_of
    from repaconv.verification.tolerances import EXPORTED_RTOL, tolerance

    feeds = {name: random_inputs(shape, count=3, seed=0).images}
    runner = NetworkRunner(module, module.state_dict(), double=True, inputs=(name,), outputs=names)
    right, ports = runner.run(feeds), inputs_of(exported)
    batch = ports[0].shape[0] if isinstance(ports[0].shape[0], int) else None
    why = {"fold": "PyTorch's exporter rounded constants to float32"}
    rounded = tolerance("fold", usual={"fold": EXPORTED_RTOL}, reasons=why)
    link, limits, text = "fold", [tolerance("fold"), rounded], "ONNX as exported, float64"
    try:
        gives = FixedBatch(WithInputs(Float64(exported), ports), batch).run(feeds)
    except Exception:  # the evaluator lacks an operator or a number of axes
        link, limits, text = "onnx", [tolerance("onnx")], "ONNX as exported, float32"
        gives = FixedBatch(load_onnx(retyped(exported, {11: 1})), batch).run(feeds)
    for allowed in limits:  # the default one first, which `verify` uses, too
        found = Comparison(text, allowed)
        found.add(gives, right)
        joint = overall_link(found.links(link, f"{TRAINING}, float64"))
        if joint.verdict != "failed":
            break
    if joint.verdict == "failed":
        raise _export_differs(joint, is_random=outputs_differ(right, runner.run(feeds)))
    return joint


def _export_differs(link: Link, *, is_random: bool) -> GateFailed:
    """Return the error for an exported graph that computes something else.

    Args:
        link: The failed comparison of the graph with the network.
        is_random: Whether the network itself gives other outputs when it runs again.
    """
    if is_random:
        return GateFailed(
            "this network does not compute the same twice: it uses random numbers, so that its outputs cannot be "
            "compared; nothing was written.",
            hint="Give the part without random numbers, as --arch ./net.py:build, or an ONNX graph of it.",
            code="network.random",
        )
    off, allowed = link.metrics.max_rel_error if link.metrics else 0.0, link.tolerance.rtol if link.tolerance else 0.0
    limit, note = limit_in_words(allowed or 0.0), f"; {link.note}" * bool(link.note)
    return GateFailed(
        f"the graph that torch's exporter wrote computes something else than this network ({link.candidate}: off by "
        f"{off:.1e} of the largest number, allowed: {limit}{note}); nothing was written.",
        hint="Export it yourself another way, and fold the graph: repaconv fold model.onnx.",
        code="export.not-equal",
    )

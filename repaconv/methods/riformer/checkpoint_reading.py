"""Read and fold RIFormer checkpoints: the official code's keys and the configuration of the training run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.activation_setting import read_activation
from repaconv.backbones.metaformer import IdentityMixerBlock, MetaFormer, MetaFormerConfig
from repaconv.backbones.shared_layers import Norm
from repaconv.backbones.tensor_names import blocks_by_stage, count_numbered, renamed_tensors, weight_of
from repaconv.checkpoints import Checkpoint, find_typed, require_sound
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.core.errors import Refused
from repaconv.method_api.contract import Detection, FoldedPart, Reading
from repaconv.method_api.fold_error import max_rel_error, relative_difference
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import SettingsReader, natural, one_of, positive, run_config, small
from repaconv.methods.riformer.paper_equations import RIFormerBlock, fold_block, fold_head
from repaconv.methods.riformer.published_models import ARCHS
from repaconv.results import Fact, FoldStep

_NORM_KEYS = {"type", "num_groups", "eps", "affine", "requires_grad"}
_BLOCK_KEY = re.compile(r"^(?P<prefix>.*?)network\.\d+\.\d+\.(?P<part>token_mixer\.affine|norm_reparam)\.weight$")


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize a RIFormer by its token mixer's affine; all other keys are also PoolFormer's."""
    parts = [match["part"] for name in checkpoint.tensors if (match := _BLOCK_KEY.match(name))]
    affine, reparam = parts.count("token_mixer.affine"), parts.count("norm_reparam")
    if affine:
        return Detection("training", f"token_mixer.affine in {affine} blocks")
    if reparam:
        return Detection("deploy", f"norm_reparam in {reparam} blocks and token_mixer.affine in none")
    return None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> RIFormerReading:
    """Read a RIFormer of the official code, as trained or deployed.

    Raises:
        Refused: If the keys are not those of one complete RIFormer, or its weights are invalid (`require_sound`).
        UsageProblem: If a setting is unknown or malformed.
    """
    detection = detect(checkpoint)
    if detection is None:
        raise Refused(
            f"{checkpoint.path} is not a RIFormer: no block has token_mixer.affine or norm_reparam.",
            hint=(
                "A PoolFormer has the same other keys, but its pooling cannot be folded. Without --method the method "
                "is recognized automatically."
            ),
            code="method.mismatch",
        )
    tensors, names, unused = _official_names(checkpoint)
    require_sound(tensors, names)
    reader = SettingsReader(settings)
    sizes = _sizes(tensors)
    run = run_config(checkpoint.record)
    config = MetaFormerConfig(**sizes, **_not_in_tensors(tensors, checkpoint.record, run, reader))
    preprocessing = preprocessing_of(checkpoint.record, run, reader)
    reader.done()
    reading = RIFormerReading(
        backbone="metaformer",
        config=config,
        tensors=tensors,
        names=names,
        facts=(*_shape_facts(sizes), *reader.facts, *unused),
        preprocessing=preprocessing,
        deployed=detection.form == "deploy",
        layer_scale=any(".layer_scale_" in name for name in tensors),
    )
    _require_one_form(reading)
    reading.require_whole()
    return reading


@dataclass(frozen=True, kw_only=True)
class RIFormerReading(Reading):
    """A RIFormer that was read from a checkpoint; ``layer_scale`` is the official code's use_layer_scale."""

    reads_tensors_alone = True

    config: MetaFormerConfig
    layer_scale: bool

    def module(self) -> nn.Module:
        """The network as trained, with affine token mixers."""
        block = partial(RIFormerBlock, layer_scale=self.layer_scale, deployed=self.deployed)
        return MetaFormer(self.config, block, final_affine=True).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """Yield the embedding convolutions unchanged, the blocks without a token mixer, and the head."""
        yield FoldedPart({name: w.double() for name, w in self.tensors.items() if ".proj." in name})
        for stage, count in enumerate(self.config.layers):
            for index in range(count):
                yield _folded_block(self, stage, f"network.{2 * stage}.{index}")
        yield _folded_head(self)


def _folded_block(reading: RIFormerReading, stage: int, name: str) -> FoldedPart:
    trained = under_prefix(reading.tensors, f"{name}.")
    folded = {
        f"{part}.{kind}": value
        for part, affine in fold_block(trained).items()
        for kind, value in (("weight", _as_conv(affine)), ("bias", affine.bias))
    }
    width = reading.config.widths[stage]
    block = RIFormerBlock(reading.config, stage, 0, layer_scale=reading.layer_scale, deployed=reading.deployed)
    error = relative_difference(
        (block, trained), (IdentityMixerBlock(reading.config, stage, 0), folded), (2, width, 7, 5)
    )
    scaled = ("layer_scale_1 -> norm1", "layer_scale_2 -> mlp.fc2") if reading.layer_scale else ()
    mixer = () if reading.deployed else ("token_mixer.affine - identity -> norm1",)
    return FoldedPart(
        {f"{name}.{key}": value for key, value in folded.items()},
        FoldStep(
            module=name,
            folded=(*mixer, *scaled, "norm2's affine -> mlp.fc1"),
            not_folded=("both norms' statistics: they depend on the input",),
            equation="eq. 4",
            max_rel_error=error,
        ),
    )


def _folded_head(reading: RIFormerReading) -> FoldedPart:
    """Fold the final norm's affine into the head; a network without a head keeps it."""
    tail = {name: w.double() for name, w in reading.tensors.items() if name.startswith(("norm.", "head."))}
    if not reading.config.classes:
        return FoldedPart(tail)
    norm = Affine.diagonal(tail["norm.weight"], tail["norm.bias"])
    head = Affine.linear(tail["head.weight"], tail["head.bias"])
    folded = fold_head(norm, head)
    x = torch.randn(2, norm.in_width, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n = Norm(reading.config.norm, norm.in_width, reading.config.eps, affine=False)(x)
    trained = head(norm(n.movedim(1, -1)).mean((1, 2)))
    return FoldedPart(
        {"head.weight": folded.weight, "head.bias": folded.bias},
        FoldStep(
            module="head",
            folded=("norm's affine -> head, through the pooling",),
            max_rel_error=max_rel_error(folded(n.mean((2, 3))), trained),
        ),
    )


def _as_conv(affine: Affine) -> Tensor:
    return affine.weight if affine.is_diagonal else affine.weight[:, :, None, None]


def _official_names(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str], tuple[Fact, ...]]:
    """Tensors by the names of the paper's listing, from those or mmpretrain's; unused norms of stages are left out."""
    prefix = next(match["prefix"] for name in checkpoint.tensors if (match := _BLOCK_KEY.match(name)))
    stages = (re.match(r"network\.(\d+)\.", name.removeprefix(prefix)) for name in checkpoint.tensors)
    last = max(int(match[1]) for match in stages if match)
    unused: list[str] = []

    def name_of(key: str) -> str | None:
        name = key.removeprefix(prefix)
        if (match := re.match(r"norm(\d+)\.", name)) and int(match[1]) < last:
            unused.append(name)
            return None
        name = re.sub(rf"^norm{last}\.", "norm.", name)
        return re.sub(r"^head\.fc\.", "head.", name)

    tensors, names = renamed_tensors(checkpoint, name_of)
    facts = [Fact(name="unused", value=sorted(unused), source="keys: norms of out_indices, the head reads the last")]
    return tensors, names, tuple(facts if unused else ())


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes that the tensors' shapes show; `Reading.require_whole` later refuses tensors that do not fit."""
    blocks = blocks_by_stage(tensors, r"network\.(\d+)\.(\d+)\.")
    stages = sorted(blocks)
    if stages != list(range(0, 2 * len(stages), 2)):
        raise Refused(
            f"the stages are network.{', network.'.join(map(str, stages))}, but a RIFormer has only every second "
            "index.",
            hint=(
                "Between neighboring stages of equal width the official code omits the downsampling and then never "
                "reaches its final norm, so such a network has no output."
            ),
            code="riformer.stages",
        )
    fc1 = [weight_of(tensors, f"network.{stage}.0.mlp.fc1.weight", 4) for stage in stages]
    return {
        "layers": tuple(count_numbered(blocks[stage], f"network.{stage}") for stage in stages),
        "widths": tuple(weight.shape[1] for weight in fc1),
        "hidden": tuple(weight.shape[0] for weight in fc1),
        "classes": weight_of(tensors, "head.weight", 2).shape[0] if any(n.startswith("head.") for n in tensors) else 0,
        "in_channels": weight_of(tensors, "patch_embed.proj.weight", 4).shape[1],
    }


def _shape_facts(sizes: Mapping[str, Any]) -> list[Fact]:
    facts = [Fact(name=name, value=value, source="shapes") for name, value in sizes.items()]
    for arch, known in ARCHS.items():
        if all(getattr(known, name) == sizes[name] for name in ("layers", "widths", "hidden")):
            facts.insert(0, Fact(name="arch", value=arch, source="shapes, as in the paper"))
    return facts


def _not_in_tensors(
    tensors: Mapping[str, Tensor], record: Mapping[str, Any], run: Mapping[str, Any], reader: SettingsReader
) -> dict[str, Any]:
    """Read norm, eps, activation, strides and paddings from --set, the run's configuration or the code's defaults."""
    model_config = find_typed(run.get("model"), "RIFormer") or {}
    where = "meta.cfg" if model_config else ""
    norm, act = model_config.get("norm_cfg", {}), model_config.get("act_cfg", {})
    integers = ("in_stride", "in_pad", "down_stride", "down_pad")
    if (
        not isinstance(norm, dict)
        or not isinstance(act, dict)
        or any(type(model_config.get(k, 0)) is not int for k in integers)
    ):
        raise Refused(
            "the configuration of the RIFormer in the checkpoint is invalid: norm_cfg and act_cfg must be dicts, "
            f"{', '.join(integers)} whole numbers.",
            hint="Save the weights without the configuration, and give its settings with --set.",
            code="riformer.config",
        )
    if norm.get("type", "GN") not in ("GN", "LN2d") or norm.get("num_groups", 1) != 1:
        raise Refused(
            f"the configuration in the checkpoint names the norm {norm}, which no RIFormer of the official code has.",
            hint="Supported are GroupNorm with one group and LN2d.",
            code="riformer.norm",
        )
    if (unsupported := sorted(set(norm) - _NORM_KEYS)) or norm.get("affine", True) is not True:
        raise Refused(
            f"the configuration in the checkpoint sets {', '.join(unsupported) or 'affine'} for its norms, which is "
            "not supported.",
            hint=f"Supported are {', '.join(sorted(_NORM_KEYS))}, with an affine.",
            code="riformer.norm",
        )
    return {
        "norm": reader.take("norm", one_of("GN", "LN2d"), "GN", norm.get("type"), where),
        "eps": reader.take("eps", small, 1e-5, norm.get("eps"), where),
        "act": read_activation(record, reader, act, where),
        "stem": (
            weight_of(tensors, "patch_embed.proj.weight", 4).shape[2],
            reader.take("stem_stride", positive, 4, model_config.get("in_stride"), where),
            reader.take("stem_padding", natural, 2, model_config.get("in_pad"), where),
        ),
        "down": (
            weight_of(tensors, "network.1.proj.weight", 4).shape[2] if "network.1.proj.weight" in tensors else 3,
            reader.take("down_stride", positive, 2, model_config.get("down_stride"), where),
            reader.take("down_padding", natural, 1, model_config.get("down_pad"), where),
        ),
    }


def _require_one_form(reading: RIFormerReading) -> None:
    """Refuse networks in which only some blocks were reparameterized."""
    trained = {name.split(".token_mixer")[0] for name in reading.tensors if ".token_mixer." in name}
    folded = {name.split(".norm_reparam")[0] for name in reading.tensors if ".norm_reparam." in name}
    if trained and folded:
        raise Refused(
            f"{min(trained)} belongs to the training-time architecture and {min(folded)} to the inference-time one.",
            hint="The file mixes the two. Give the checkpoint as trained.",
            code="riformer.mixed-forms",
        )

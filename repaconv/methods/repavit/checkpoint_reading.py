"""Read and fold RePaViT checkpoints of any of the four network families."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.backbones.activation_setting import read_activation
from repaconv.backbones.ffn_replacement_interface import Ffn, FfnReplacement
from repaconv.backbones.metaformer import read_poolformer
from repaconv.backbones.mlp_mixer import read_mixer
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.swin import read_swin
from repaconv.backbones.tensor_names import in_float64, official_names, weight_of
from repaconv.backbones.vit_ffn_replacement import read_vit
from repaconv.checkpoints import Checkpoint, require_sound
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.core.errors import Refused
from repaconv.method_api.contract import Detection, FoldedPart, Reading
from repaconv.method_api.fold_error import relative_difference
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import SettingsReader, mapping_at, small
from repaconv.methods.repavit.active_channels import Rule, active_channels, read_claim
from repaconv.methods.repavit.paper_equations import ChannelIdleMlp, ffn_weights, fold_ffn
from repaconv.results import FoldStep

# --- The four network families of RePaViT's official code, with their rules for the number of activated channels.


@dataclass(frozen=True)
class Family:
    """One network family.

    Attributes:
        backbone: Registered name of the backbone.
        ffn: Matches an FFN's prefix; its group ``block`` is the prefix of the block.
        read: Reads the network around the FFNs, with the user's settings and the trainer's args.
        rule: How A follows from the idle ratio.
        conv: Whether the FFNs are 1x1 convolutions.
    """

    backbone: str
    ffn: re.Pattern[str]
    read: Callable[[dict[str, Tensor], Sequence[Ffn], SettingsReader, Mapping[str, Any]], FfnReplacement]
    rule: Rule
    conv: bool = False

    def block_of(self, ffn: Ffn) -> str:
        """The prefix of the FFN's block."""
        return self.ffn.sub(r"\g<block>", ffn.prefix)


FAMILIES = (
    Family("vit", re.compile(r"^(?P<block>blocks\.\d+\.)mlp\."), read_vit, Rule(linear=True)),
    Family("swin", re.compile(r"^(?P<block>layers\.\d+\.blocks\.\d+\.)mlp\."), read_swin, Rule()),
    Family(
        "metaformer",
        re.compile(r"^(?P<block>network\.\d+\.\d+\.)mlp\."),
        read_poolformer,
        Rule(truncated=True),
        conv=True,
    ),
    Family("mixer", re.compile(r"^(?P<block>blocks\.\d+\.)mlp_channels\."), read_mixer, Rule(always_width=True)),
)


def ffn_of(key: str) -> re.Match[str] | None:
    """Match the prefix of an FFN in a key of any family; None if the key is not an FFN's."""
    return next((match for family in FAMILIES if (match := family.ffn.match(key))), None)


# --- Read and fold RePaViT checkpoints of any of the four network families.


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize RePaViT by an FFN with two BatchNorms, or by fc3 in its deploy form; no other method has these."""
    keys = checkpoint.tensors.keys()
    trained = sum(key.endswith("norm2.running_mean") and ffn_of(key) is not None for key in keys)
    folded = sum(key.endswith(".fc3.weight") and ffn_of(key) is not None for key in keys)
    if trained:
        return Detection("training", f"norm2.running_mean in the FFNs of {trained} blocks")
    if folded:
        return Detection("deploy", f"fc3 in the FFNs of {folded} blocks and norm1.running_mean in none")
    if _whole_matrices(checkpoint.tensors):
        return Detection("deploy", "every FFN is one square matrix fc1, as at idle ratio 1")
    args = mapping_at(checkpoint.record, "args")
    if "idle_ratio" in args and any(ffn_of(key) for key in keys):
        return Detection("training", f"args: idle_ratio {args['idle_ratio']}")
    if "blocks.0.attn.norm.weight" in keys and "blocks.0.mlp.norm.weight" in keys:
        return Detection("training", "norms inside attn and mlp", "possible")
    return None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> RePaViTReading:
    """Read a RePaViT as trained, of any family.

    Raises:
        Refused: If the keys are not those of one complete RePaViT with BatchNorm, in training form, if the weights are
            invalid (`require_sound`), or if the idle ratio contradicts their statistics or is unknown.
        UsageProblem: If a setting is unknown or malformed.
    """
    _require_training_form(checkpoint)
    tensors, names, unused = official_names(checkpoint)
    require_sound(tensors, names)
    family, ffns = read_ffns(tensors)
    reader = SettingsReader(settings)
    args = mapping_at(checkpoint.record, "args")
    ffn_replacement = family.read(tensors, ffns, reader, args)
    eps = reader.take("bn_eps", small, 1e-5)
    act = read_activation(checkpoint.record, reader)
    claim = read_claim(args, reader, rule=family.rule)
    active = active_channels(ffns, claim, family.rule, eps, act, checkpoint, reader)
    preprocessing = preprocessing_of(checkpoint.record, {}, reader, ffn_replacement.image_size)
    reader.done()
    scaled = any(".ls1." in name or ".ls2." in name or "layer_scale" in name for name in tensors)
    reading = RePaViTReading(
        backbone=family.backbone,
        config=ffn_replacement.config(active, act),
        tensors=tensors,
        names=names,
        facts=(*reader.facts, *unused),
        preprocessing=preprocessing,
        applied=("layer scale",) if scaled or any("ls" in ffn.block for ffn in ffns) else (),
        family=family,
        ffn_replacement=ffn_replacement,
        ffns=ffns,
        active=active,
        eps=eps,
        act=act,
    )
    reading.require_whole()
    return reading


@dataclass(frozen=True, kw_only=True)
class RePaViTReading(Reading):
    """A RePaViT that was read from a checkpoint.

    Attributes:
        family: Its network family.
        ffn_replacement: The network whose FFNs are replaced.
        ffns: The FFNs, in the order of the network.
        active: A of every FFN.
        eps: eps of the FFNs' BatchNorms.
        act: The FFNs' activation.
    """

    reads_tensors_alone = True

    family: Family
    ffn_replacement: FfnReplacement
    ffns: tuple[Ffn, ...]
    active: tuple[int, ...]
    eps: float
    act: ActivationKind = "GELU"

    def mlp(self, index: int) -> nn.Module:
        """Build the FFN of that block, as trained."""
        ffn = self.ffns[index]
        return ChannelIdleMlp(
            ffn.width,
            ffn.hidden,
            self.active[index],
            self.eps,
            conv=self.family.conv,
            layer_scale="ls" in ffn.block,
            act=self.act,
        )

    def module(self) -> nn.Module:
        """The family's network with `ChannelIdleMlp` in it."""
        return self.ffn_replacement.build_training(self.config, self.mlp).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """Yield the blocks, then the family's other modules."""
        for index in range(len(self.ffns)):
            yield self._block(index)
        yield from self.ffn_replacement.fold_outside_blocks(self.config, self.tensors)

    def _block(self, index: int) -> FoldedPart:
        ffn, a = self.ffns[index], self.active[index]
        prefix = self.family.block_of(ffn)
        inside = ffn.prefix.removeprefix(prefix)
        block = in_float64(under_prefix(self.tensors, prefix))
        other_parts, descriptions, scale = self.ffn_replacement.fold_other_parts(block, index)
        mlp = ffn_weights(fold_ffn(under_prefix(block, inside), a, self.eps, scale), conv=self.family.conv)
        folded = {**other_parts, **{f"{inside}{name}": weight for name, weight in mlp.items()}}
        with torch.device("meta"):
            trained, deploy, shape = self.ffn_replacement.block_pair(self.config, index, self.mlp)
        return FoldedPart(
            {f"{prefix}{name}": tensor for name, tensor in folded.items()},
            FoldStep(
                module=prefix.rstrip("."),
                folded=(
                    f"{ffn.hidden - a} idle channels of {ffn.hidden}, both BatchNorms, the shortcut",
                    *descriptions,
                ),
                not_folded=(f"{a} channels after the activation", "the attention norm's statistics"),
                equation="eqs. 3-6",
                max_rel_error=relative_difference((trained, block), (deploy, folded), shape),
            ),
        )


def _require_training_form(checkpoint: Checkpoint) -> None:
    detection = detect(checkpoint)
    keys = checkpoint.tensors.keys()
    ffn_keys = [key for key in keys if ffn_of(key)]
    statistics = any(key.endswith(("norm1.running_mean", "norm2.running_mean")) for key in ffn_keys)
    layer_norm = [key for key in ffn_keys if key.endswith((".mlp.norm.weight", "mlp_channels.norm.weight"))]
    layer_norm += [key for key in ffn_keys if key.endswith("mlp.norm1.weight")]
    if not statistics and layer_norm and not any(key.endswith("fc3.weight") for key in keys):
        raise Refused(
            f"the FFNs have a LayerNorm ({layer_norm[0]}), whose statistics depend on the input, so such an FFN "
            "cannot be folded.",
            hint="Train with --feature_norm BatchNorm; the default of main.py is LayerNorm.",
            code="repavit.layer-norm",
        )
    if detection is None or not ffn_keys:
        raise Refused(
            f"{checkpoint.path} is not a RePaViT: no FFN has the BatchNorms norm1 and norm2.",
            hint="Without --method the method is recognized automatically.",
            code="method.mismatch",
        )
    deployed = [key for key in ffn_keys if key.endswith("fc3.weight")]
    if statistics and deployed:
        raise Refused(
            f"{deployed[0]} is in the inference-time architecture, but other blocks are in the training-time one.",
            hint="The file mixes the two. Give the checkpoint as trained.",
            code="repavit.mixed-forms",
        )
    if detection.form == "deploy":
        raise Refused(
            f"{checkpoint.path} already has the inference-time architecture of repavit ({detection.reason}), so "
            "there is nothing to fold.",
            hint=(
                "Fold the checkpoint as trained. (The official reparameterization of a PoolFormer ignores its "
                "LayerScale.)"
            ),
            code="method.deployed",
        )


def _whole_matrices(tensors: Mapping[str, Tensor]) -> bool:
    """Whether every FFN is a single square fc1: RePaViT's deploy form at idle ratio 1."""
    keys = [key for key in tensors if ffn_of(key)]
    alone = all(key.endswith((".mlp.fc1.weight", ".mlp.fc1.bias")) for key in keys)
    weights = [tensors[key] for key in keys if key.endswith(".weight")]  # a file may have the biases first
    return bool(weights) and alone and all(w.ndim == 2 and len(set(w.shape)) == 1 for w in weights)


def read_ffns(tensors: Mapping[str, Tensor]) -> tuple[Family, tuple[Ffn, ...]]:
    """Read the family and its FFNs, in the order of the network.

    Raises:
        Refused: If several families are mixed, or a tensor of an FFN is missing or has a wrong shape.
    """
    found = {match[0]: family for name in tensors for family in FAMILIES if (match := family.ffn.match(name))}
    families = {family.backbone: family for family in found.values()}
    if len(families) != 1:
        raise Refused(
            "the FFNs belong to several network families.",
            hint="The file mixes two networks; save one of them.",
            code="checkpoint.ambiguous",
        )
    family = next(iter(families.values()))
    prefixes = sorted(found, key=lambda prefix: [int(part) for part in re.findall(r"\d+", prefix)])
    return family, tuple(_read_ffn(tensors, prefix, 4 if family.conv else 2) for prefix in prefixes)


def _read_ffn(tensors: Mapping[str, Tensor], prefix: str, dims: int) -> Ffn:
    """Read one FFN whose linear layers' weights have ``dims`` dimensions."""
    hidden, width = weight_of(tensors, f"{prefix}fc1.weight", dims).shape[:2]
    wanted = {"fc2.weight": (width, hidden), "fc1.bias": (hidden,), "fc2.bias": (width,)}
    wanted |= {f"norm1.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}
    wanted |= {f"norm2.{part}": (hidden,) for part in ("weight", "bias", "running_mean", "running_var")}
    for name, shape in wanted.items():
        tensor = weight_of(tensors, f"{prefix}{name}", dims if name == "fc2.weight" else 1)
        if tuple(tensor.shape[: len(shape)]) != shape:
            raise Refused(
                f"{prefix}{name} has shape {list(tensor.shape)}, but fc1 requires {list(shape)}.",
                hint="The file mixes two networks, or it was changed after training.",
                code="checkpoint.shape",
            )
    return Ffn(prefix, under_prefix(tensors, prefix), hidden, width)

"""RePaViT (arXiv 2505.21847): a vision transformer whose FFN leaves some of its channels without activation.

The training block, with h = fc1(norm1(x)) and the first A of H channels activated (eq. 2, both norms BatchNorm):

    y = x + scale fc2(norm2(concat[gelu(h[:A]), h[A:]]))

Nothing nonlinear is left between the idle part of fc1 and that of fc2, so it folds with the shortcut (eqs. 3-6):

    up = fc1 norm1,   down = scale fc2 norm2,
    y = down_act gelu(up_act x) + (I + down_idle up_idle) x + down's bias.

With A = H nothing is idle and the block stays an MLP; with A = 0 it is one matrix. Beyond the paper, all exact: the
affines of the attention's and the final norm, and the scores' divisor, go into the linear layers beside them.

A stands in no tensor. It follows from ``args`` by the official rounding, or from the *residual test*: in
training, norm1's output has the batch mean norm1.bias, so an idle channel j has exactly
running_mean2[j] = fc1.W[j] norm1.bias + fc1.b[j], and an activated one lies E[gelu(-h)] above. A claim that the
statistics contradict is refused: training and folded form would agree on the same wrong A.

Where paper, code and mathematics disagree: PoolFormer's LayerScale also scales fc2's bias (the official reparam
forgets it, and is wrong by more than the logits' range); with channel_idle=False all channels are activated, which
the official reparam ignores; eqs. 3-6 omit biases and BatchNorm's shifts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import FoldStep
from repaconv.backbones.parts import ActivationKind, activation
from repaconv.backbones.tokens import ImageBatchNorm, TokenBatchNorm
from repaconv.checkpoint import Checkpoint, require_sound
from repaconv.errors import Refused
from repaconv.methods.repavit.activity import Ffn, active_channels, linear_layer, read_claim
from repaconv.methods.repavit.families import FAMILIES, Family, Skeleton
from repaconv.methods.repavit.published import ARCHS, meta
from repaconv.skeletons.plain import block_tensors, in_float64, named, official_names, weight_of
from repaconv.trained.activations import read_activation
from repaconv.trained.certificate import relative_difference
from repaconv.trained.contract import Detection, FoldedPart, Published, Reading
from repaconv.trained.knobs import Knobs, small
from repaconv.trained.preprocessing import preprocessing_of


class ChannelIdleMlp(nn.Module):
    """The FFN as trained, without its shortcut: on tokens [B, N, C], or in 1x1 convolutions on [B, C, H, W]."""

    def __init__(
        self,
        width: int,
        hidden: int,
        active: int,
        eps: float,
        *,
        conv: bool = False,
        layer_scale: bool = False,
        act: ActivationKind = "GELU",
    ) -> None:
        super().__init__()
        self.act = activation(act)
        norm = ImageBatchNorm if conv else TokenBatchNorm
        self.active, self.axis = active, 1 if conv else -1
        self.norm1, self.norm2 = norm(width, eps), norm(hidden, eps)
        self.fc1: nn.Module = nn.Conv2d(width, hidden, 1) if conv else nn.Linear(width, hidden)
        self.fc2: nn.Module = nn.Conv2d(hidden, width, 1) if conv else nn.Linear(hidden, width)
        self.ls = nn.Parameter(torch.ones(width)) if layer_scale else None

    def forward(self, x: Tensor) -> Tensor:
        """fc2(norm2(concat[act(h[:A]), h[A:]])), the shape of x."""
        h = self.fc1(self.norm1(x))
        active, idle = h.split([self.active, h.shape[self.axis] - self.active], self.axis)
        y: Tensor = self.fc2(self.norm2(torch.cat([self.act(active), idle], self.axis)))
        return y if self.ls is None else self.ls.view(-1, *[1] * (x.ndim - 2 if self.axis == 1 else 0)) * y


def fold_ffn(block: Mapping[str, Tensor], active: int, eps: float, scale: Affine) -> dict[str, Affine]:
    """One FFN's weights by the names within it -> ``idle`` (with shortcut), ``fc1``, ``fc2``; or fc1 and fc2 alone.

    Where there is ``idle``, it has fc2's bias, and the one of ``fc2`` here is not to be used.

    Args:
        block: norm1, fc1, norm2, fc2 and perhaps ls.
        active: A, of H channels.
        eps: Of both BatchNorms.
        scale: A LayerScale around the FFN.
    """
    norm1, norm2 = _batchnorm(block, "norm1", eps), _batchnorm(block, "norm2", eps)
    if "ls" in block:
        scale = scale @ Affine.diagonal(block["ls"])
    up = linear_layer(block, "fc1") @ norm1  # eq. 3
    down = scale @ linear_layer(block, "fc2") @ norm2  # eq. 3
    if active == up.out_width:
        return {"fc1": up, "fc2": down}
    (up_act, up_idle), (down_act, down_idle) = up.split_out(active), down.split_in(active)
    idle = Affine.eye(up.in_width) + down_idle @ up_idle  # eq. 5
    return {"idle": Affine(idle.weight, idle.bias + down.bias), "fc1": up_act, "fc2": down_act}


@dataclass(frozen=True, kw_only=True)
class RePaViTReading(Reading):
    """A RePaViT as trained: its skeleton, and A and H of every FFN."""

    family: Family
    skeleton: Skeleton
    ffns: tuple[Ffn, ...]
    active: tuple[int, ...]
    eps: float
    act: ActivationKind = "GELU"

    def mlp(self, index: int) -> nn.Module:
        """The FFN of block i."""
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
        """See `Reading`."""
        return self.skeleton.training(self.config, self.mlp).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        for index, ffn in enumerate(self.ffns):
            place = self.family.ffn.match(ffn.prefix)
            assert place is not None
            block = in_float64(block_tensors(self.tensors, place["block"]))
            around, told, scale = self.skeleton.around(block, index)
            inside, a = ffn.prefix.removeprefix(place["block"]), self.active[index]
            parts = fold_ffn(block_tensors(block, inside), a, self.eps, scale)
            bare = ("fc2",) if "idle" in parts else ()
            folded = {**around, **{f"{inside}{n}": w for n, w in _named(parts, bare, conv=self.family.conv).items()}}
            with torch.device("meta"):
                trained, deploy, shape = self.skeleton.pair(self.config, index, self.mlp)
            yield FoldedPart(
                {f"{place['block']}{name}": tensor for name, tensor in folded.items()},
                FoldStep(
                    module=place["block"].rstrip("."),
                    folded=(f"{ffn.hidden - a} idle channels of {ffn.hidden}, both BatchNorms, the shortcut", *told),
                    left=(f"{a} channels behind the activation", "the attention norm's statistics"),
                    equation="eqs. 3-6",
                    max_rel_error=relative_difference((trained, block), (deploy, folded), shape),
                ),
            )
        yield from self.skeleton.rest(self.config, self.tensors)


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Two BatchNorms around an FFN are RePaViT's alone; so is fc3 in its deploy form."""
    keys = checkpoint.tensors.keys()
    trained = sum(key.endswith("norm2.running_mean") and _ffn_of(key) is not None for key in keys)
    folded = sum(key.endswith(".fc3.weight") and _ffn_of(key) is not None for key in keys)
    if trained:
        return Detection("training", f"norm2.running_mean in the FFNs of {trained} blocks")
    if folded:
        return Detection("deploy", f"fc3 in the FFNs of {folded} blocks and norm1.running_mean in none")
    if _whole_matrices(checkpoint.tensors):
        return Detection("deploy", "every FFN is one square matrix fc1, as at idle ratio 1")
    args = checkpoint.record.get("args")
    if isinstance(args, Mapping) and "idle_ratio" in args and any(_ffn_of(key) for key in keys):
        return Detection("training", f"args: idle_ratio {args['idle_ratio']}")
    if "blocks.0.attn.norm.weight" in keys and "blocks.0.mlp.norm.weight" in keys:
        return Detection("training", "norms inside attn and mlp", "possible")
    return None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> RePaViTReading:
    """See `repaconv.trained.contract.Method`.

    Raises:
        Refused: If the keys are not one whole RePaViT with BatchNorm, in training form, or the weights are not
            sound, or a claimed idle ratio contradicts their statistics, or cannot be known.
        UsageProblem: If a setting is unknown or malformed.
    """
    _require_training_form(checkpoint)
    tensors, names, unused = official_names(checkpoint)
    require_sound(tensors, names)
    family, ffns = _read_ffns(tensors)
    knobs = Knobs(settings)
    record = checkpoint.record.get("args")
    args: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    skeleton = family.read(tensors, ffns, knobs, args)
    eps = knobs.take("bn_eps", small, 1e-5)
    act = read_activation(checkpoint.record, knobs)
    claim = read_claim(args, knobs, rule=family.rule)
    active = active_channels(ffns, claim, family.rule, eps, act, checkpoint, knobs)
    preprocessing = preprocessing_of(checkpoint.record, {}, knobs, skeleton.image_size)
    knobs.done()
    scaled = any(".ls1." in name or ".ls2." in name or "layer_scale" in name for name in tensors)
    form = RePaViTReading(
        backbone=family.backbone,
        config=skeleton.config(active, act),
        tensors=tensors,
        names=names,
        facts=(*knobs.facts, *unused),
        preprocessing=preprocessing,
        applied=("layer scale",) if scaled or any("ls" in ffn.block for ffn in ffns) else (),
        family=family,
        skeleton=skeleton,
        ffns=ffns,
        active=active,
        eps=eps,
        act=act,
    )
    form.require_whole()
    return form


def _require_training_form(checkpoint: Checkpoint) -> None:
    detection = detect(checkpoint)
    keys = checkpoint.tensors.keys()
    ffn_keys = [key for key in keys if _ffn_of(key)]
    statistics = any(key.endswith(("norm1.running_mean", "norm2.running_mean")) for key in ffn_keys)
    layer_norm = [key for key in ffn_keys if key.endswith((".mlp.norm.weight", "mlp_channels.norm.weight"))]
    layer_norm += [key for key in ffn_keys if key.endswith("mlp.norm1.weight")]
    if not statistics and layer_norm and not any(key.endswith("fc3.weight") for key in keys):
        raise Refused(
            f"the FFNs have a LayerNorm ({layer_norm[0]}), whose statistics depend on the input: nothing of such "
            "an FFN folds.",
            hint="Train with --feature_norm BatchNorm; main.py's default is LayerNorm.",
            code="repavit.layer-norm",
        )
    if detection is None or not ffn_keys:
        raise Refused(
            f"{checkpoint.path} is not a RePaViT: no FFN has the BatchNorms norm1 and norm2.",
            hint="Without --method the method is detected.",
            code="method.mismatch",
        )
    deployed = [key for key in ffn_keys if key.endswith("fc3.weight")]
    if statistics and deployed:
        raise Refused(
            f"{deployed[0]} is of the deploy form, other blocks are in training form.",
            hint="The file mixes two forms; take the checkpoint as trained.",
            code="repavit.mixed-forms",
        )
    if detection.form == "deploy":
        raise Refused(
            f"{checkpoint.path} is in repavit's deploy form already ({detection.reason}): nothing is left to fold.",
            hint="Fold the checkpoint as trained. The official reparam of a PoolFormer is wrong by its LayerScale.",
            code="method.deployed",
        )


def published(arch: str) -> Published:
    """See `repaconv.trained.contract.Method`."""
    sizes = ARCHS[arch]
    weights = dict(meta(sizes))
    tensors = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    family, ffns = _read_ffns(tensors)
    given = {"num_heads": str(sizes.heads[0])} if sizes.family == "plain" else {}
    given |= {"pool_size": str(sizes.extra)} if sizes.family == "poolformer" else {}
    skeleton = family.read(tensors, ffns, Knobs(given), {"input_size": sizes.image_size})
    active = tuple(sizes.active(sizes.widths.index(ffn.width)) if sizes.idle_ratio < 1 else 0 for ffn in ffns)
    form = RePaViTReading(
        backbone=family.backbone,
        config=skeleton.config(active),
        tensors=tensors,
        family=family,
        skeleton=skeleton,
        ffns=ffns,
        active=active,
        eps=1e-5,
    )
    return Published(
        training=form.module,
        deploy=lambda: skeleton.deploy(form.config),
        input_shape=(3, sizes.image_size, sizes.image_size),
    )


def _ffn_of(key: str) -> re.Match[str] | None:
    return next((match for family in FAMILIES if (match := family.ffn.match(key))), None)


def _whole_matrices(tensors: Mapping[str, Tensor]) -> bool:
    """Whether every FFN is a lone square fc1, which only idle ratio 1 leaves."""
    keys = [key for key in tensors if _ffn_of(key)]
    alone = all(key.endswith((".mlp.fc1.weight", ".mlp.fc1.bias")) for key in keys)
    return bool(keys) and alone and all(tensors[k].ndim == 2 and len(set(tensors[k].shape)) == 1 for k in keys[::2])


def _read_ffns(tensors: Mapping[str, Tensor]) -> tuple[Family, tuple[Ffn, ...]]:
    """The family, and its FFNs in the order of the network.

    Raises:
        Refused: If several families are mixed, or an FFN lacks a part or is misshaped.
    """
    found: dict[str, Family] = {}
    for name in tensors:
        for family in FAMILIES:
            if (match := family.ffn.match(name)) and family.conv == name.startswith("network."):
                found[match[0]] = family
    families = {type(family) for family in found.values()}
    if len(families) != 1:
        raise Refused(
            "the FFNs are those of several network families.",
            hint="The file mixes two nets; save one of them.",
            code="checkpoint.ambiguous",
        )
    family = next(iter(found.values()))
    ffns = []
    for prefix in sorted(found, key=lambda prefix: [int(part) for part in re.findall(r"\d+", prefix)]):
        dims = 4 if family.conv else 2
        fc1 = weight_of(tensors, f"{prefix}fc1.weight", dims)
        hidden, width = fc1.shape[:2]
        wanted = {"fc2.weight": (width, hidden), "fc1.bias": (hidden,), "fc2.bias": (width,)}
        wanted |= {f"norm1.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}
        wanted |= {f"norm2.{part}": (hidden,) for part in ("weight", "bias", "running_mean", "running_var")}
        for name, shape in wanted.items():
            tensor = weight_of(tensors, f"{prefix}{name}", dims if name == "fc2.weight" else 1)
            if tuple(tensor.shape[: len(shape)]) != shape:
                raise Refused(
                    f"{prefix}{name} has shape {list(tensor.shape)} where fc1 needs {list(shape)}.",
                    hint="The file mixes two nets, or it was changed after training.",
                    code="checkpoint.shape",
                )
        ffns.append(Ffn(prefix, block_tensors(tensors, prefix), hidden, width))
    return family, tuple(ffns)


def _named(parts: Mapping[str, Affine], without_bias: tuple[str, ...], *, conv: bool) -> dict[str, Tensor]:
    tensors = named(parts, without_bias=without_bias)
    return {
        name: w[:, :, None, None] if conv and w.ndim == 2 else w
        for name, w in tensors.items()
        if w.numel() or "idle" not in parts
    }


def _batchnorm(block: Mapping[str, Tensor], name: str, eps: float) -> Affine:
    weight, bias, mean, variance = (
        block[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
    )
    return Affine.batchnorm(weight, bias, mean, variance, eps)

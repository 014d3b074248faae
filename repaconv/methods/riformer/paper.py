"""RIFormer (CVPR 2023, arXiv 2304.05659): a MetaFormer trained with an affine in place of the token mixer.

The training block, with n1 = LN(x), an affine A(z) = s z + t per channel, and LayerScale l1, l2:

    x += l1 (A(n1) - n1)                  eq. 1: s M + t - M
    x += l2 fc2(act(fc1(LN(x))))

The deploy block has no mixer: the paper's eq. 4 puts the affine into the norm before it,

    gamma' = gamma (s - 1),   beta' = beta (s - 1) + t.

Beyond the paper, all exact: l1 goes into the same norm, l2 into fc2, the second norm's affine into fc1,
and the final norm's affine through the pooling, which is linear, into the head. The norms' statistics
stay: they depend on the input.

Where paper and code disagree: eq. 2 subtracts the block's input, code and eqs. 1 and 4 the normalised
input. Only the latter folds, and it is what was trained. LN is GroupNorm with one group unless the run's
configuration says LN2d (per pixel); the two have the same keys and shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, FoldStep
from repaconv.backbones.metaformer import IdentityMixerBlock, MetaFormer, MetaFormerConfig
from repaconv.backbones.parts import ConvMlp, Norm
from repaconv.checkpoint import Checkpoint, find_typed, require_sound
from repaconv.errors import Refused
from repaconv.trained.activations import read_activation
from repaconv.trained.certificate import max_rel_error, relative_difference
from repaconv.trained.contract import Detection, FoldedPart, Published, Reading
from repaconv.trained.knobs import Knobs, natural, one_of, positive, run_config, small
from repaconv.trained.preprocessing import preprocessing_of

_WIDTHS = {"s": (64, 128, 320, 512), "m": (96, 192, 384, 768)}
ARCHS = {
    f"{size}{depth}": MetaFormerConfig(
        layers=(depth // 6, depth // 6, depth // 2, depth // 6),
        widths=_WIDTHS[size],
        hidden=tuple(4 * width for width in _WIDTHS[size]),
        classes=1000,
    )
    for size, depth in (("s", 12), ("s", 24), ("s", 36), ("m", 36), ("m", 48))
}

_NORM_KEYS = {"type", "num_groups", "eps", "affine", "requires_grad"}
_BLOCK_KEY = re.compile(r"^(?P<prefix>.*?)network\.\d+\.\d+\.(?P<part>token_mixer\.affine|norm_reparam)\.weight$")


class AffineMixer(nn.Module):
    """eq. 1: A(z) - z, with the affine as a depthwise 1x1 convolution, as the official code has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine = nn.Conv2d(channels, channels, 1, groups=channels)

    def forward(self, z: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        out: Tensor = self.affine(z) - z
        return out


class RIFormerBlock(nn.Module):
    """The block as trained, or (``deployed``) as the official switch_to_deploy leaves it."""

    def __init__(self, config: MetaFormerConfig, stage: int, index: int, *, layer_scale: bool, deployed: bool) -> None:
        super().__init__()
        width = config.widths[stage]
        norm = partial(Norm, config.norm, width, config.eps, affine=True)
        self.layer_scale_1 = nn.Parameter(torch.ones(width)) if layer_scale else None
        self.layer_scale_2 = nn.Parameter(torch.ones(width)) if layer_scale else None
        if deployed:
            self.norm_reparam = norm()
        else:
            self.norm1 = norm()
            self.token_mixer = AffineMixer(width)
        self.deployed = deployed
        self.norm2 = norm()
        self.mlp = ConvMlp(width, config.hidden[stage], config.act)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        mixed = self.norm_reparam(x) if self.deployed else self.token_mixer(self.norm1(x))
        x = x + self._scaled(self.layer_scale_1, mixed)
        return x + self._scaled(self.layer_scale_2, self.mlp(self.norm2(x)))

    @staticmethod
    def _scaled(layer_scale: Tensor | None, branch: Tensor) -> Tensor:
        return branch if layer_scale is None else layer_scale[:, None, None] * branch


def fold_block(block: Mapping[str, Tensor]) -> dict[str, Affine]:
    """One block's weights by the names within it -> norm1, fc1, fc2 of the deploy block."""
    norm2 = Affine.diagonal(block["norm2.weight"], block["norm2.bias"])
    fc1 = Affine.conv1x1(block["mlp.fc1.weight"], block["mlp.fc1.bias"])
    fc2 = Affine.conv1x1(block["mlp.fc2.weight"], block["mlp.fc2.bias"])
    identity = Affine.eye(norm2.out_width)
    scale1 = Affine.diagonal(block["layer_scale_1"]) if "layer_scale_1" in block else identity
    scale2 = Affine.diagonal(block["layer_scale_2"]) if "layer_scale_2" in block else identity
    if "norm_reparam.weight" in block:
        mixed = Affine.diagonal(block["norm_reparam.weight"], block["norm_reparam.bias"])
    else:
        norm1 = Affine.diagonal(block["norm1.weight"], block["norm1.bias"])
        affine = Affine.depthwise1x1(block["token_mixer.affine.weight"], block["token_mixer.affine.bias"])
        mixed = (affine - identity) @ norm1  # eq. 4
    return {"norm1": scale1 @ mixed, "mlp.fc1": fc1 @ norm2, "mlp.fc2": scale2 @ fc2}


def fold_head(norm: Affine, head: Affine) -> Affine:
    """head(mean(norm(n))) = (head @ norm)(mean(n)): pooling is linear and acts on no channel."""
    return head @ norm


@dataclass(frozen=True, kw_only=True)
class RIFormerReading(Reading):
    """A RIFormer as trained; without LayerScale it was built with use_layer_scale=False."""

    config: MetaFormerConfig
    layer_scale: bool

    def module(self) -> nn.Module:
        """See `Reading`."""
        block = partial(RIFormerBlock, layer_scale=self.layer_scale, deployed=self.deployed)
        return MetaFormer(self.config, block, final_affine=True).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        config = self.config
        yield FoldedPart({name: w.double() for name, w in self.tensors.items() if ".proj." in name})
        for stage, count in enumerate(config.layers):
            for index in range(count):
                yield _folded_block(self, stage, f"network.{2 * stage}.{index}")
        yield _folded_head(self)


def detect(checkpoint: Checkpoint) -> Detection | None:
    """A mixer's affine tells RIFormer from PoolFormer, whose other keys are the same."""
    parts = [match["part"] for name in checkpoint.tensors if (match := _BLOCK_KEY.match(name))]
    affine, reparam = parts.count("token_mixer.affine"), parts.count("norm_reparam")
    if affine:
        return Detection("training", f"token_mixer.affine in {affine} blocks")
    if reparam:
        return Detection("deploy", f"norm_reparam in {reparam} blocks and token_mixer.affine in none")
    return None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> RIFormerReading:
    """See `repaconv.trained.contract.Method`.

    Raises:
        Refused: If the keys are not one whole RIFormer, or its weights are not sound.
        UsageProblem: If a setting is unknown or malformed.
    """
    detection = detect(checkpoint)
    if detection is None:
        raise Refused(
            f"{checkpoint.path} is not a RIFormer: no block has token_mixer.affine or norm_reparam.",
            hint="A PoolFormer has the same other keys, but its pooling cannot be folded away. Without "
            "--method the method is detected.",
            code="method.mismatch",
        )
    tensors, names, unused = _official_names(checkpoint)
    require_sound(tensors, names)
    knobs = Knobs(settings)
    sizes = _sizes(tensors)
    run = run_config(checkpoint.record)
    config = MetaFormerConfig(**sizes, **_not_in_tensors(tensors, checkpoint.record, run, knobs))
    preprocessing = preprocessing_of(checkpoint.record, run, knobs)
    knobs.done()
    form = RIFormerReading(
        backbone="metaformer",
        config=config,
        tensors=tensors,
        names=names,
        facts=(*_shape_facts(sizes), *knobs.facts, *unused),
        preprocessing=preprocessing,
        deployed=detection.form == "deploy",
        layer_scale=any(".layer_scale_" in name for name in tensors),
    )
    _require_one_form(form)
    form.require_whole()
    return form


def published(arch: str) -> Published:
    """See `repaconv.trained.contract.Method`."""
    name, _, size = arch.partition("@")
    config, side = ARCHS[name], int(size or 224)
    block = partial(RIFormerBlock, layer_scale=True, deployed=False)
    return Published(
        training=lambda: MetaFormer(config, block, final_affine=True),
        deploy=lambda: MetaFormer(config, final_affine=False),
        input_shape=(3, side, side),
    )


def example(arch: str | MetaFormerConfig, seed: int) -> dict[str, Tensor]:
    """mmpretrain's key names; affines, LayerScales and biases far from the identity."""
    config = ARCHS[arch] if isinstance(arch, str) else arch
    random = torch.Generator().manual_seed(seed)
    block = partial(RIFormerBlock, layer_scale=True, deployed=False)
    with torch.device("meta"):
        shapes = MetaFormer(config, block, final_affine=True).state_dict()
    last = 2 * len(config.layers) - 2
    return {
        _mmpretrain_name(name, last): _example_tensor(name, tuple(meta.shape), random) for name, meta in shapes.items()
    }


# --- reading --------------------------------------------------------------------------------------


def _official_names(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str], tuple[Fact, ...]]:
    """mmpretrain's and the paper listing's names to the listing's; norms that no classifier reads go."""
    prefix = next(match["prefix"] for name in checkpoint.tensors if (match := _BLOCK_KEY.match(name)))
    last = max(int(name.split("network.")[1].split(".")[0]) for name in checkpoint.tensors if "network." in name)
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    unused: list[str] = []
    for name, tensor in checkpoint.tensors.items():
        short = name.removeprefix(prefix)
        if match := re.match(r"norm(\d+)\.", short):
            if int(match[1]) < last:
                unused.append(short)
                continue
            short = short.replace(match[0], "norm.") if int(match[1]) == last else short
        if short.startswith("head.fc."):
            short = short.replace("head.fc.", "head.")
        if short in tensors:
            raise Refused(
                f"{names[short]} and {checkpoint.names[name]} are both {short}.",
                hint="The file mixes two nets; save one of them.",
                code="checkpoint.ambiguous",
            )
        tensors[short], names[short] = tensor, checkpoint.names[name]
    facts = [Fact(name="unused", value=sorted(unused), source="keys: norms of out_indices, the head reads the last")]
    return tensors, names, tuple(facts if unused else ())


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the shapes say; the exact comparison afterwards finds what does not fit them."""
    blocks: dict[int, int] = {}
    for name in tensors:
        if match := re.match(r"network\.(\d+)\.(\d+)\.", name):
            blocks[int(match[1])] = max(int(match[2]) + 1, blocks.get(int(match[1]), 0))
    stages = sorted(blocks)
    if stages != list(range(0, 2 * len(stages), 2)):
        raise Refused(
            f"the stages are network.{', network.'.join(map(str, stages))} where a RIFormer has every second one.",
            hint="Between neighbouring stages of one width the official code leaves the downsampling out and "
            "then never reaches its final norm: such a net has no output to keep.",
            code="riformer.stages",
        )
    fc1 = [_weight(tensors, f"network.{stage}.0.mlp.fc1.weight", 4) for stage in stages]
    has_head = any(name.startswith("head.") for name in tensors)
    return {
        "layers": tuple(blocks[stage] for stage in stages),
        "widths": tuple(weight.shape[1] for weight in fc1),
        "hidden": tuple(weight.shape[0] for weight in fc1),
        "classes": _weight(tensors, "head.weight", 2).shape[0] if has_head else 0,
        "in_channels": _weight(tensors, "patch_embed.proj.weight", 4).shape[1],
    }


def _shape_facts(sizes: Mapping[str, Any]) -> list[Fact]:
    facts = [Fact(name=name, value=value, source="shapes") for name, value in sizes.items()]
    for arch, known in ARCHS.items():
        if all(getattr(known, name) == sizes[name] for name in ("layers", "widths", "hidden")):
            facts.insert(0, Fact(name="arch", value=arch, source="shapes, as in the paper"))
    return facts


def _not_in_tensors(
    tensors: Mapping[str, Tensor], record: Mapping[str, Any], run: Mapping[str, Any], knobs: Knobs
) -> dict[str, Any]:
    """Norm, eps, activation, strides and paddings: from --set, the run's configuration or the code's default."""
    said = find_typed(run.get("model"), "RIFormer") or {}
    where = "meta.cfg" if said else ""
    norm, act = said.get("norm_cfg", {}), said.get("act_cfg", {})
    whole = ("in_stride", "in_pad", "down_stride", "down_pad")
    if not isinstance(norm, dict) or not isinstance(act, dict) or any(type(said.get(k, 0)) is not int for k in whole):
        raise Refused(
            "the run's configuration of its RIFormer is not understood: norm_cfg and act_cfg should be dicts, "
            f"{', '.join(whole)} whole numbers.",
            hint="Save the weights without the configuration and give what it says with --set.",
            code="riformer.config",
        )
    if norm.get("type", "GN") not in ("GN", "LN2d") or norm.get("num_groups", 1) != 1:
        raise Refused(
            f"the run's configuration asks for the norm {norm}, which no RIFormer of the official code has.",
            hint="Known are GroupNorm with one group and LN2d.",
            code="riformer.norm",
        )
    if (strange := sorted(set(norm) - _NORM_KEYS)) or norm.get("affine", True) is not True:
        raise Refused(
            f"the run's configuration says {', '.join(strange) or 'affine'} of its norms, which is not known here.",
            hint=f"Known are {', '.join(sorted(_NORM_KEYS))}, with an affine.",
            code="riformer.norm",
        )
    return {
        "norm": knobs.take("norm", one_of("GN", "LN2d"), "GN", norm.get("type"), where),
        "eps": knobs.take("eps", small, 1e-5, norm.get("eps"), where),
        "act": read_activation(record, knobs, act, where),
        "stem": (
            _weight(tensors, "patch_embed.proj.weight", 4).shape[2],
            knobs.take("stem_stride", positive, 4, said.get("in_stride"), where),
            knobs.take("stem_padding", natural, 2, said.get("in_pad"), where),
        ),
        "down": (
            tensors["network.1.proj.weight"].shape[2] if "network.1.proj.weight" in tensors else 3,
            knobs.take("down_stride", positive, 2, said.get("down_stride"), where),
            knobs.take("down_padding", natural, 1, said.get("down_pad"), where),
        ),
    }


def _weight(tensors: Mapping[str, Tensor], name: str, dims: int) -> Tensor:
    if name not in tensors:
        raise Refused(
            f"the checkpoint lacks {name}.", hint="The file is only part of a net.", code="checkpoint.missing-keys"
        )
    if tensors[name].ndim != dims:
        raise Refused(
            f"{name} has shape {list(tensors[name].shape)} where {dims} dimensions are needed.",
            hint="RIFormer's linear layers are 1x1 convolutions; its head is linear.",
            code="checkpoint.shape",
        )
    return tensors[name]


def _require_one_form(form: RIFormerReading) -> None:
    """Refuse nets of which some blocks were reparameterised and others not."""
    trained = {name.split(".token_mixer")[0] for name in form.tensors if ".token_mixer." in name}
    folded = {name.split(".norm_reparam")[0] for name in form.tensors if ".norm_reparam." in name}
    if trained and folded:
        raise Refused(
            f"{min(trained)} is in training form and {min(folded)} in deploy form.",
            hint="The file mixes two forms; take the checkpoint as trained.",
            code="riformer.mixed-forms",
        )


# --- folding, with its certificate ----------------------------------------------------------------


def _folded_block(form: RIFormerReading, stage: int, name: str) -> FoldedPart:
    trained = {key.removeprefix(f"{name}."): w for key, w in form.tensors.items() if key.startswith(f"{name}.")}
    folded = {
        f"{part}.{kind}": value
        for part, affine in fold_block(trained).items()
        for kind, value in (("weight", _as_conv(affine)), ("bias", affine.bias))
    }
    width = form.config.widths[stage]
    block = RIFormerBlock(form.config, stage, 0, layer_scale=form.layer_scale, deployed=form.deployed)
    error = relative_difference((block, trained), (IdentityMixerBlock(form.config, stage, 0), folded), (2, width, 7, 5))
    scaled = ("layer_scale_1 -> norm1", "layer_scale_2 -> mlp.fc2") if form.layer_scale else ()
    mixer = () if form.deployed else ("token_mixer.affine - identity -> norm1",)
    return FoldedPart(
        {f"{name}.{key}": value for key, value in folded.items()},
        FoldStep(
            module=name,
            folded=(*mixer, *scaled, "norm2's affine -> mlp.fc1"),
            left=("both norms' statistics: they depend on the input",),
            equation="eq. 4",
            max_rel_error=error,
        ),
    )


def _folded_head(form: RIFormerReading) -> FoldedPart:
    """The final norm's affine into the head, or left in place where the net gives features."""
    tail = {name: w.double() for name, w in form.tensors.items() if name.startswith(("norm.", "head."))}
    if not form.config.classes:
        return FoldedPart(tail)
    norm = Affine.diagonal(tail["norm.weight"], tail["norm.bias"])
    head = Affine.linear(tail["head.weight"], tail["head.bias"])
    folded = fold_head(norm, head)
    x = torch.randn(2, norm.in_width, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n = Norm(form.config.norm, norm.in_width, form.config.eps, affine=False)(x)
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


# --- an example -----------------------------------------------------------------------------------


def _mmpretrain_name(name: str, last: int) -> str:
    if name.startswith("head."):
        return name.replace("head.", "head.fc.")
    return f"backbone.{name.replace('norm.', f'norm{last}.') if name.startswith('norm.') else name}"


def _example_tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Weights keep the signal's size; scales and shifts are far enough from 1 and 0 that no fold is trivial."""
    noise = torch.randn(shape, generator=random)
    if "layer_scale" in name:
        return 0.3 + 0.1 * noise
    if name.endswith("token_mixer.affine.weight"):
        return 1 + 0.5 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if len(shape) > 1:
        return noise / math.sqrt(math.prod(shape[1:]))
    return 1 + 0.2 * noise

"""repavit: FFNs of a plain ViT with BatchNorm in place of LayerNorm, and most of their channels without activation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.backbones.ffn_replacement_interface import Ffn
from repaconv.backbones.vit_training_blocks import PlainBlock
from repaconv.checkpoints import Checkpoint
from repaconv.conversion.finetuning.nondeep_branches import require_plain_mlp
from repaconv.conversion.finetuning.trainable_batchnorm import with_trainable_batchnorm
from repaconv.conversion.finetuning.training_plan import TrainingPlan, UntrainedNetwork, metadata_of
from repaconv.conversion.least_squares import NormalEquations
from repaconv.conversion.plain_vit import PlainViT, after_attention, after_ffn, attention_output, batches, map_batches
from repaconv.core.errors import UsageProblem
from repaconv.methods.repavit.active_channels import ClaimedIdleRatio
from repaconv.methods.repavit.checkpoint_reading import read
from repaconv.methods.repavit.paper_equations import ChannelIdleMlp
from repaconv.verification.model_runners import with_weights

LEARNING_RATE, EPS = 5e-5, 1e-5


@torch.no_grad()
def initialize(plain: PlainViT, ratio: float, images: Tensor, record: Mapping[str, Any]) -> UntrainedNetwork:
    """Convert the FFNs one by one with least squares, each for the output of the network converted so far.

    The first BatchNorm approximates LayerNorm per channel. The activation is removed from the channels that lose least
    by it; these are idle. The second BatchNorm replaces it by its best linear approximation. fc2 is refitted to the
    original's residual stream.

    Args:
        plain: The network.
        ratio: The fraction of idle channels.
        images: [N, C, H, W] to fit to.
        record: The other contents of its checkpoint.

    Raises:
        UsageProblem: If the ratio is not between 0 and 1.
        Refused: If an FFN is gated.
    """
    if not 0 <= ratio <= 1:
        raise UsageProblem(
            f"--idle-ratio {ratio:g} is not between 0 and 1.", hint="E.g. 0.75.", code="convert.idle-ratio"
        )
    require_plain_mlp(plain.reading.blocks)
    tensors = {name: tensor.float().clone() for name, tensor in plain.reading.tensors.items()}
    net = with_weights(plain.reading.module(), {n: t.clone() for n, t in tensors.items()}, torch.float32)
    teacher = student = map_batches(plain.net.embed, images)
    for index, block in enumerate(plain.blocks):
        middle = map_batches(lambda x, b=block: after_attention(b, x, attention_output(b, x, plain.heads)), student)
        of_teacher = map_batches(lambda x, b=block: after_attention(b, x, attention_output(b, x, plain.heads)), teacher)
        teacher = map_batches(lambda x, b=block: after_ffn(b, x), of_teacher)
        ffn = Ffn(f"blocks.{index}.mlp.", {}, block.mlp.fc1.out_features, block.mlp.fc1.in_features)
        active = ClaimedIdleRatio(ratio).active(ffn, index, len(plain.blocks), truncated=False)
        mlp = _converted_ffn(block, plain.reading.blocks[index].act, active, middle, teacher)
        built = net.get_submodule(f"blocks.{index}")
        assert isinstance(built, PlainBlock)
        built.norm2, built.mlp = nn.Identity(), mlp
        student = map_batches(lambda x, b=built: after_ffn(b, x), middle)
        tensors = {n: t for n, t in tensors.items() if not n.startswith((f"blocks.{index}.norm2.", ffn.prefix))}
        tensors |= {f"{ffn.prefix}{n}": t.clone() for n, t in mlp.state_dict().items()}
    return UntrainedNetwork(
        net=net.eval(),
        tensors=tensors,
        metadata={"args": json.dumps(_args(plain, ratio, record), sort_keys=True, default=str)},
        settings=_settings(plain),
        description=f"LayerNorms before FFNs -> BatchNorms, {ratio:.0%} of the channels without activation, fc2 fitted",
    )


def _converted_ffn(block: Any, act: Any, active: int, middle: Tensor, wanted: Tensor) -> Any:
    """Return one converted FFN, fitted to map the residual stream before it, [N, T, d], to the wanted one after it."""
    hidden, width = block.mlp.fc1.weight.shape
    mlp: Any = ChannelIdleMlp(width, hidden, active, EPS, act=act).eval()
    _fit_norm(mlp.norm1, *_pairs(middle, map_batches(block.norm2, middle)))
    before = map_batches(lambda x: block.mlp.fc1(mlp.norm1(x)), middle).flatten(0, 1).double()
    after = map_batches(mlp.act, before)
    scale = getattr(block.ls2, "gamma", torch.ones(width))[:, None]
    order = _error_without_activation(before, after, scale * block.mlp.fc2.weight).argsort(descending=True)
    mlp.fc1.weight.copy_(block.mlp.fc1.weight[order])
    mlp.fc1.bias.copy_(block.mlp.fc1.bias[order])
    before, after = before[:, order], after[:, order]
    given = torch.cat([after[:, :active], before[:, active:]], 1)
    _fit_norm(mlp.norm2, given, after)
    prior = torch.cat([block.mlp.fc2.weight[:, order].T, block.mlp.fc2.bias[None]])
    normal = NormalEquations()
    rows = given.float().view(*middle.shape[:2], hidden)
    for x, features, right in batches(middle, rows, wanted):
        normal.add(mlp.norm2(features).flatten(0, 1), ((right - x) / scale[:, 0]).flatten(0, 1))
    fc2 = normal.solve(prior).weights.float()
    mlp.fc2.weight.copy_(fc2[:-1].T)
    mlp.fc2.bias.copy_(fc2[-1])
    return mlp


def _pairs(given: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    return given.flatten(0, 1).double(), wanted.flatten(0, 1).double()


def _fit_norm(norm: Any, given: Tensor, wanted: Tensor) -> None:
    """Set a BatchNorm to the statistics of ``given`` [rows, c], and its affine to the best fit of ``wanted`` per
    channel."""
    mean, variance = given.mean(0), given.var(0, correction=0)
    slope = ((given - mean) * (wanted - wanted.mean(0))).mean(0) / variance.clamp_min(1e-12)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    norm.weight.copy_(slope * (variance + norm.eps).sqrt())
    norm.bias.copy_(wanted.mean(0))


def _error_without_activation(before: Tensor, after: Tensor, fc2: Tensor) -> Tensor:
    """Return the error that each channel [c] would cause after fc2 if its activation were replaced by a line."""
    x, y = before - before.mean(0), after - after.mean(0)
    unexplained = (y**2).mean(0) - (x * y).mean(0) ** 2 / (x**2).mean(0).clamp_min(1e-12)
    return unexplained * (fc2.double() ** 2).sum(0)


def _args(plain: PlainViT, ratio: float, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the official main.py stores them, in addition to those of the checkpoint."""
    own = record["args"] if isinstance(record.get("args"), Mapping) else {}
    said = {"idle_ratio": ratio, "heuristic": "static", "feature_norm": "BatchNorm", "channel_idle": True}
    return {**own, **said, "num_heads": plain.heads, "act": plain.reading.blocks[0].act}


def _settings(plain: PlainViT) -> dict[str, str]:
    """Return the settings of a ViT that the official checkpoint layout does not contain."""
    config, eps = plain.config, f"{plain.reading.blocks[0].traits.norm1.eps:g}"
    size = "x".join(map(str, config.image_size))
    return {"norm_eps": f"{config.norm_eps:g}", "attn_eps": eps, "trained_size": size, "pool": config.pool}


def training_plan(checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan: BatchNorms update their statistics, blocks imitate the original's."""
    reading = read(checkpoint, settings)
    net = with_weights(reading.module(), reading.tensors, torch.float32)
    return TrainingPlan(
        net=with_trainable_batchnorm(net),
        rate=LEARNING_RATE,
        moving=False,
        imitated=tuple((f"blocks.{n}", f"blocks.{n}") for n in range(len(reading.ffns))),
        metadata=metadata_of(checkpoint),
        reading=reading,
    )

"""Identify the settings missing from a checkpoint's metadata, by comparing each variant with a recorded output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from repaconv.backbones.tensor_names import weight_of
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused
from repaconv.method_api.fold_error import loaded, max_rel_error
from repaconv.method_api.settings import mapping_at
from repaconv.methods.nondeep.checkpoint_reading import JOIN_SETTINGS, read_at_any_lambda


def identify(checkpoint: Checkpoint, settings: Mapping[str, str], images: Tensor, recorded: Tensor) -> dict[str, str]:
    """Find the missing settings: run the network with every combination of values, and take the one that fits.

    Args:
        checkpoint: A checkpoint for `read`.
        settings: The settings that the user gives; no other values are tried for them.
        images: Inputs [N, C, H, W].
        recorded: The official code's output for these images.

    Returns:
        The settings to add.

    Raises:
        Refused: If no variant reproduces the output, or several do.
    """
    known = {
        **mapping_at(checkpoint.record, "meta", "arch"),
        **mapping_at(checkpoint.record, "meta", "join"),
        **settings,
    }
    variants = list(_variants(checkpoint, known))
    tried = [(_error(checkpoint, {**settings, **variant}, images, recorded), variant) for variant in variants]
    tried.sort(key=lambda row: row[0])
    best, next_best = tried[0], tried[1] if len(tried) > 1 else (math.inf, {})
    if best[0] > 1e-5 or next_best[0] < 100 * max(best[0], 1e-15):
        differing = [name for name in best[1] if best[1][name] != next_best[1].get(name)]
        raise Refused(
            f"the recorded output does not determine {', '.join(differing or best[1])}: the best variant differs "
            f"from it by {best[0]:.1e}, the next best by {next_best[0]:.1e}.",
            hint="Record the pair in float64, or give the settings with --set.",
            code="nondeep.identify",
        )
    return best[1]


def _variants(checkpoint: Checkpoint, known: Mapping[str, object]) -> Iterator[dict[str, str]]:
    """Yield every combination of values of the missing settings."""
    width = weight_of(checkpoint.tensors, "patch_embed.proj.weight", 4).shape[0]
    values = {
        **JOIN_SETTINGS,
        "num_heads": tuple(str(heads) for heads in range(1, width + 1) if width % heads == 0),
        "norm_eps": ("1e-06", "1e-05", "1e-12"),
    }
    unknown = {name: choices for name, choices in values.items() if name not in known}
    for chosen in product(*unknown.values()):
        yield dict(zip(unknown, chosen, strict=True))


def _error(checkpoint: Checkpoint, settings: Mapping[str, str], images: Tensor, recorded: Tensor) -> float:
    """The relative difference between the network's output with these settings and the recorded output."""
    net = read_at_any_lambda(checkpoint, settings)
    with torch.no_grad():
        output = loaded(net.module(), net.tensors)(images.double())
    if output.shape != recorded.shape:
        raise Refused(
            f"the recorded output has shape {list(recorded.shape)}, but the network's output has {list(output.shape)}.",
            hint="Give the input and output of this checkpoint.",
            code="inputs.shape",
        )
    return max_rel_error(output, recorded.double())

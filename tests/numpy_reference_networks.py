"""Training-time networks in plain NumPy, written from the papers alone. They use nothing of repaconv."""

from __future__ import annotations

from math import erf

import numpy as np


def conv(x, weight, bias, stride, padding, groups=1):
    if groups > 1:
        parts = zip(*(np.split(each, groups, axis) for each, axis in ((x, 1), (weight, 0), (bias, 0))), strict=True)
        return np.concatenate([conv(*part, stride, padding) for part in parts], 1)
    kernel = weight.shape[2]
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("bchwij,ocij->bohw", windows, weight) + bias[:, None, None]


def norm(x, gamma, beta, per_pixel, eps):
    axes = 1 if per_pixel else (1, 2, 3)
    x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)
    return x * gamma[:, None, None] + beta[:, None, None]


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2)))


def riformer(weights, images, *, per_pixel=False, eps=1e-5):
    """mmpretrain's keys, float64 throughout."""
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    w = {name.removeprefix("backbone."): value for name, value in w.items()}
    x = conv(images.astype(np.float64), w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], 4, 2)
    stage = 0
    while f"network.{stage}.0.norm2.weight" in w:
        block = 0
        while f"network.{stage}.{block}.norm2.weight" in w:
            b = {k.removeprefix(p): v for k, v in w.items() if k.startswith(p := f"network.{stage}.{block}.")}
            one = np.ones(x.shape[1])
            n = norm(x, b["norm1.weight"], b["norm1.bias"], per_pixel, eps)
            s, t = b["token_mixer.affine.weight"].reshape(-1, 1, 1), b["token_mixer.affine.bias"].reshape(-1, 1, 1)
            x = x + b.get("layer_scale_1", one)[:, None, None] * (s * n + t - n)
            n = norm(x, b["norm2.weight"], b["norm2.bias"], per_pixel, eps)
            h = gelu(conv(n, b["mlp.fc1.weight"], b["mlp.fc1.bias"], 1, 0))
            x = x + b.get("layer_scale_2", one)[:, None, None] * conv(h, b["mlp.fc2.weight"], b["mlp.fc2.bias"], 1, 0)
            block += 1
        if f"network.{stage + 1}.proj.weight" in w:
            x = conv(x, w[f"network.{stage + 1}.proj.weight"], w[f"network.{stage + 1}.proj.bias"], 2, 1)
        stage += 2
    x = norm(x, w[f"norm{stage - 2}.weight"], w[f"norm{stage - 2}.bias"], per_pixel, eps)
    return x.mean((2, 3)) @ w["head.fc.weight"].T + w["head.fc.bias"]


def repconv(weights, images, *, eps=1e-5, squeezed_last=False):
    """RepVGG's and MobileOne's official keys, float64 throughout; logits, or pooled features without a head.

    A block with ``bn`` is QARepVGG's. ``squeezed_last``: squeeze-and-excitation follows the ReLU, as in RepVGGplus.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    names = {name[: name.index(".rbr_")] for name in w if ".rbr_" in name}
    x = images.astype(np.float64)
    for name in sorted(names, key=lambda name: [int(n) for n in name.removeprefix("stage").split(".")]):
        b = {k.removeprefix(f"{name}."): v for k, v in w.items() if k.startswith(f"{name}.")}
        skip = "rbr_identity." if "rbr_identity.weight" in b else "rbr_skip."
        stride = 2 if (name[-2:] == ".0" or name == "stage0") and f"{skip}weight" not in b else 1
        total = 0.0
        for key in b:
            if key.endswith(".conv.weight"):
                kernel, groups = b[key], x.shape[1] // b[key].shape[1]
                y = conv(x, kernel, np.zeros(len(kernel)), stride, kernel.shape[2] // 2, groups)
                total = total + batchnorm(y, b, key.replace("conv.weight", "bn."), eps)
        if f"{skip}weight" in b:
            total = total + batchnorm(x, b, skip, eps)
        if "bn.weight" in b:
            single = b["rbr_1x1.weight"]
            total = total + conv(x, single, np.zeros(len(single)), stride, 0, x.shape[1] // single.shape[1])
            total = total + x if stride == 1 and x.shape[1] == len(single) else total
            total = batchnorm(total, b, "bn.", eps)
        total = np.maximum(total, 0) if squeezed_last else total
        if any(key.startswith("se.") for key in b):
            first, last = ("se.down.", "se.up.") if "se.down.weight" in b else ("se.reduce.", "se.expand.")
            s = total.mean((2, 3))
            s = np.maximum(s @ b[f"{first}weight"][:, :, 0, 0].T + b[f"{first}bias"], 0)
            s = s @ b[f"{last}weight"][:, :, 0, 0].T + b[f"{last}bias"]
            total = total / (1 + np.exp(-s))[:, :, None, None]
        x = np.maximum(total, 0)
    x = x.mean((2, 3))
    return x @ w["linear.weight"].T + w["linear.bias"] if "linear.weight" in w else x


def batchnorm(x, b, at, eps):
    gamma, beta, mean, variance = (
        b[f"{at}{of}"][:, None, None] for of in ("weight", "bias", "running_mean", "running_var")
    )
    return gamma * (x - mean) / np.sqrt(variance + eps) + beta

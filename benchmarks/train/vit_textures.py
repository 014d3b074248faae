"""A vision transformer of 2.7 million parameters for the images of textures.py: harder to convert than one for digits.

    python benchmarks/train/vit_textures.py -o DIR [--epochs 10] [--count 20000] [--threads 2]
    # -> DIR/vit_textures.pth, its training settings, and its accuracy on 2,000 held-out images

91.3% of 2,000 held-out images are correct after 10 epochs: 58 minutes on two cores of an EPYC without AVX-512 that had
other work, too (a step of 32 images takes 0.4 s there on an idle machine). An interrupted training resumes after the
last whole epoch. `--epochs 1 --count 352` is a short run. It has six blocks of width 192 with 6 heads, a class token
and patches of 8 x 8; the loop is that of the networks for digits. Read it with `--set num_heads=6`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import textures
import torch
from digits import Digits
from torch import nn
from training_loop import accuracy, fit

from repaconv.backbones.vit import BlockSpec, ViT, ViTConfig
from repaconv.backbones.vit_layers import AttentionSpec, LayerNormSpec, MlpSpec
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainAttention, PlainBlock
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.core.files import canonical_json

DEPTH, WIDTH, HEADS, PATCH, RATE, EPOCHS = 6, 192, 6, 8, 1e-3, 10


def build() -> ViT:
    """The net, DeiT's beginning."""
    norm, spec = NormTraits("layer", 1e-6), LayerNormSpec(1e-6)
    block = BlockSpec(AttentionSpec(HEADS, WIDTH // HEADS, WIDTH // HEADS), MlpSpec(4 * WIDTH), spec, spec)
    side = (textures.SIDE, textures.SIDE)
    config = ViTConfig(side, PATCH, WIDTH, textures.CLASSES, (block,) * DEPTH)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)

    def trained(sizes: ViTConfig, _index: int) -> nn.Module:
        return PlainBlock(sizes, PlainAttention(WIDTH, HEADS), MlpSpec(4 * WIDTH).build(WIDTH), traits)

    net = ViT(config, trained)
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1:
            few = name.endswith(("token", "pos_embed"))
            nn.init.trunc_normal_(parameter, std=0.02 if few else parameter[0].numel() ** -0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return net


def main() -> None:
    """Make the images, train, save, say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    data, held = (
        Digits(*(torch.from_numpy(each) for each in textures.made(count, given.seed + n)))
        for n, count in enumerate((given.count, min(textures.HELD_OUT, given.count)))
    )
    net, begun = build(), time.monotonic()

    def print_progress(share: float) -> None:
        print(f"{time.monotonic() - begun:7.0f} s, {share:.0%} of the epochs", flush=True)

    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / f"vit_textures.{given.epochs}.{given.count}.{given.seed}.kept"  # none of another training
    fit(net, data, epochs=given.epochs, seed=given.seed, rate=RATE, before=print_progress, kept=kept)
    found = {"accuracy": accuracy(net, held), "epochs": given.epochs, "images": given.count, "seed": given.seed}
    found |= {"parameters": sum(each.numel() for each in net.parameters()), "torch": torch.__version__}
    torch.save({"model": net.state_dict(), "args": {"num_heads": HEADS}}, given.out / "vit_textures.pth")
    (given.out / "vit_textures.json").write_text(canonical_json(found))
    kept.unlink()
    print(found)


if __name__ == "__main__":
    main()

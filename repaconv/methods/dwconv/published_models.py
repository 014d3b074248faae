"""The paper's models and blocks, and synthetic checkpoints of the same sizes."""

from __future__ import annotations

from torch import Tensor

from repaconv.backbones.blockwise_vit import deploy_config, example_weights, published_net
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.method_api.contract import Published
from repaconv.methods.dwconv.paper_equations import ConvBlock
from repaconv.methods.dwconv.token_mixer_reading import Mixer
from repaconv.methods.dwconv.training_mixers import DropIn

ARCHS = ("vit-large/12", "vit-base/6", "tiny")
_HEADS_16 = (True,) * 16
_TABLE_1 = {
    "mhsa": Mixer("attention", (False,) * 16, 3072, True),
    "conv": Mixer("full", _HEADS_16, 0, False, 3),
    "dw": Mixer("depthwise", _HEADS_16, 0, True, 3, 1024),
    "ens+dw": Mixer("ensembled", _HEADS_16, 0, True, 3, 64),
}
_SIZES = {"vit-large": (1024, 16, 24, 14, 336), "vit-base": (768, 12, 12, 14, 336), "tiny": (24, 3, 2, 4, 16)}


def published(arch: str) -> Published:
    """Build a block of Table 1 by its name (16 heads, d 1024, 24 x 24 patches, kernel 3), or a model.

    ``vit-large/12`` has depthwise convolutions in 12 blocks, every second one from the first.
    """
    if (mixer := _TABLE_1.get(arch)) is not None:
        trained, deploy = mixer, mixer.spec(1024)
        return Published(lambda: DropIn(1024, (24, 24), trained), lambda: deploy.build(1024, (24, 24)), (24 * 24, 1024))
    name, _, replaced = arch.partition("/")
    width, heads, depth, patch, side = _SIZES[name]
    count = int(replaced or depth // 2)
    norm = NormTraits("layer", 1e-6)
    traits = BlockTraits(norm, norm, scale1=True, scale2=True)
    conv = Mixer("depthwise", (True,) * heads, 0, True, 3, width, True)
    attention = Mixer("attention", (False,) * heads, 3 * width, True)
    blocks = tuple(
        ConvBlock(conv if index % 2 == 0 and index // 2 < count else attention, traits, 4 * width, swiglu=False)
        for index in range(depth)
    )
    sizes = {
        "image_size": (side, side),
        "patch": patch,
        "width": width,
        "classes": 5 if name == "tiny" else 1000,
        "tokens": (),
        "prefix_positions": False,
        "pool": "avg",
    }
    return published_net(deploy_config(sizes, blocks), blocks)


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Make a synthetic checkpoint with seeded, non-trivial weights and the convolutions of `published`."""
    return example_weights(published(arch), seed, {"bias": 0.3, "pos_embed": 0.3, "gamma": 0.4})

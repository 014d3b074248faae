"""Latency of exactly equal graphs of RIFormer on ONNX Runtime's CPU provider.

    python benchmarks/riformer_equivalent_graphs.py [--arch s12] [--rounds 60] [-o result.json]

All graphs run interleaved in one process, on one core, at 224 pixels and batch size 1, from the same seeded weights:

- training: the training-time network;
- official: after the official switch_to_deploy (mixer in the norm; LayerScales and affines remain);
- affine-in-norm: all of repaconv's folds, the norm's affine inside GroupNorm (exported as Mul and Add);
- repaconv: all folds, the affine as one BatchNormalization (what `repaconv export` writes).
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from torch import nn

from repaconv.backbones.metaformer import IdentityMixerBlock, MetaFormer
from repaconv.backbones.shared_layers import Norm
from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure, pinned_to_cores
from repaconv.checkpoints import read_checkpoint
from repaconv.core.files import canonical_json
from repaconv.methods.riformer import METHOD
from repaconv.methods.riformer.paper_equations import RIFormerBlock
from repaconv.methods.riformer.published_models import ARCHS
from repaconv.onnx_export.torch_exporter import to_onnx
from repaconv.verification.input_batches import random_inputs
from repaconv.verification.model_runners import ImageSession, load_onnx


class AffineInNorm(IdentityMixerBlock):
    """The deploy block with the affine inside the norm."""

    def __init__(self, config, stage, index):
        super().__init__(config, stage, index)
        self.norm1 = Norm(config.norm, config.widths[stage], config.eps, affine=True)


def official(trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """switch_to_deploy: eq. 4 and nothing else."""
    kept = {k: v for k, v in trained.items() if ".norm1." not in k and ".token_mixer." not in k}
    for key in [k for k in trained if k.endswith("token_mixer.affine.weight")]:
        block = key.removesuffix("token_mixer.affine.weight")
        s, t = trained[key].flatten() - 1, trained[f"{block}token_mixer.affine.bias"]
        kept[f"{block}norm_reparam.weight"] = trained[f"{block}norm1.weight"] * s
        kept[f"{block}norm_reparam.bias"] = trained[f"{block}norm1.bias"] * s + t
    return kept


def forms(arch: str) -> dict[str, nn.Module]:
    """Every form with its weights."""
    config = ARCHS[arch]
    last = 2 * len(config.layers) - 2
    trained = {
        name.removeprefix("backbone.").replace(f"norm{last}.", "norm.").replace("head.fc.", "head."): value
        for name, value in METHOD.example(arch, 0).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"state_dict": trained}, checkpoint := Path(folder) / "trained.pth")
        form = METHOD.read(read_checkpoint(checkpoint), {})
    folded = {name: value.float() for part in form.parts() for name, value in part.tensors.items()}
    block = partial(RIFormerBlock, layer_scale=True)
    built = {
        "training": (MetaFormer(config, partial(block, deployed=False), final_affine=True), trained),
        "official": (MetaFormer(config, partial(block, deployed=True), final_affine=True), official(trained)),
        "affine-in-norm": (MetaFormer(config, AffineInNorm, final_affine=False), folded),
        "repaconv": (MetaFormer(config, final_affine=False), folded),
    }
    for module, weights in built.values():
        module.load_state_dict(weights, strict=True)
    return {name: module.eval() for name, (module, _) in built.items()}


def opened(graph: bytes) -> ImageSession:
    """A new session of a serialized graph [B, 3, 224, 224] -> [B, classes]."""
    return ImageSession(load_onnx(graph))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--arch", default="s12", choices=ARCHS)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    import onnxsim

    images = random_inputs((3, 224, 224), count=1, seed=0).images
    with pinned_to_cores(1):
        load = {}
        for name, module in forms(given.arch).items():
            graph = to_onnx(module, (3, 224, 224), output="logits", opset=20, batch=1, dynamic_size=False)
            load[name] = partial(opened, onnxsim.simplify(graph)[0].SerializeToString())
        reference = load["training"]().run(images)
        for name, each in load.items():
            assert abs(each().run(images) - reference).max() <= 1e-5 * abs(reference).max(), name
    entrants = {name: Entrant(each, lambda session, _: partial(session.run, images)) for name, each in load.items()}
    measured = measure(entrants, Protocol(given.rounds, cores=1))
    result = {
        "arch": given.arch,
        "rounds": given.rounds,
        "machine": measured.machine,
        "onnxruntime": onnxruntime.__version__,
        "against_official": {
            name: measured.ratio(name, "official").model_dump() for name in entrants if name != "official"
        },
    }
    for name, found in result["against_official"].items():
        interval = f"{found['low']:.3f} to {found['high']:.3f}"
        print(f"{name:15} speedup {found['median']:.3f} ({interval}): {found['verdict']}")
    if given.out:
        given.out.write_text(canonical_json(result))


if __name__ == "__main__":
    main()

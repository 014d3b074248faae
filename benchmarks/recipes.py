"""Run the recipes that are installed with repaconv, as far as their weights can be made here.

    python benchmarks/recipes.py [RECIPE ...]      # repavit/digits is recipes/repavit/digits.toml

Trained networks are used as they are. The smallest network of each paper gets seeded weights, and so do a network of
timm and a folder of transformers where these are installed. Of those, the run verifies the fold, not an accuracy.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import repaconv
from repaconv import models
from repaconv.testing import write_example

ROOT = Path(__file__).resolve().parents[1]
RECIPES, WEIGHTS = ROOT / "recipes", ROOT / "weights"
SEEDED = {
    "repavit/deit-tiny-0.50": "deit-tiny/0.50",
    "nondeep/6x2": "6x2",
    "riformer/s12": "s12",
    "repconv/mobileone-s0": "mobileone-s0",
}
"""The smallest of each, and what it is called in its method."""


def seeded() -> list[str]:
    """Write weights that are not there yet; the recipes that have theirs."""
    for name, arch in SEEDED.items():
        path = WEIGHTS / f"{name}.pth"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            _with_metadata(arch, path) if name.startswith("nondeep") else write_example(
                name.split("/")[0], arch, path, 0
            )
    return [*SEEDED, *_timm(), *_transformers()]


def _with_metadata(arch: str, path: Path) -> None:
    """Of a network whose metadata says which it is."""
    import torch

    from repaconv.methods.nondeep.published_models import example, example_meta

    meta = example_meta(img_size=224, num_heads=12, num_branches=int(arch.partition("x")[2]))
    torch.save({"state_dict": example(arch, 0), "meta": meta}, path)


def _timm() -> list[str]:
    if find_spec("timm") is None:
        return []
    import timm
    import torch

    path = WEIGHTS / "mobileone_s1.pth"
    if not path.is_file():
        torch.manual_seed(0)
        torch.save(timm.create_model("mobileone_s1").state_dict(), path)
    return ["networks/timm"]


def _transformers() -> list[str]:
    if find_spec("transformers") is None:
        return []
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    if not (WEIGHTS / "vit-tiny").is_dir():
        torch.manual_seed(0)
        sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
        ViTForImageClassification(ViTConfig(**sizes)).save_pretrained(WEIGHTS / "vit-tiny")
    return ["networks/hugging-face-folder"]


def main() -> int:
    """Run them; the worst exit code, where an inconclusive measurement is none."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("recipes", nargs="*", help="all for which there are weights, if left out")
    names = options.parse_args().recipes or [*(f"{method}/digits" for method in models.METHODS), *seeded()]
    worst = 0
    for name in names:
        done = repaconv.run(RECIPES / f"{name}.toml", progress=lambda what, *_: print(f"  {what}", file=sys.stderr))
        did = ", ".join(f"{step.name} {step.did}" for step in done.steps)
        print(f"{name}: exit {done.exit_code}: {did}")
        for check in done.checks:
            if check.verdict in ("failed", "error", "inconclusive"):
                print(f"  {check.stage} {check.name}: {check.verdict}: {check.message}")
        worst = max(worst, 0 if done.exit_code == 5 else done.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main())

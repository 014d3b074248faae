"""Rethinking ViT Depth (arXiv 2511.19718): blocks of parallel branches that join into one."""

from pathlib import Path

from repaconv.methods.nondeep import paper
from repaconv.trained.contract import Method

METHOD = Method(
    name="nondeep",
    paper="Rethinking Vision Transformer Depth via Structural Reparameterization, arXiv 2511.19718",
    figures=Path(__file__).with_name("figures.toml"),
    archs=("6x2", "4x3", "3x4", "tiny"),
    detect=paper.detect,
    read=paper.read,
    published=paper.published,
    example=paper.example,
    identify=paper.identify,
    official_rewrites=("scores-as-matrix",),
)
paper.METHOD = METHOD  # type: ignore[attr-defined]  # for installations from before the entry point was the folder

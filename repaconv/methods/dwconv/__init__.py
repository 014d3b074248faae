"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: attention heads that are convolutions."""

from pathlib import Path

from repaconv.methods.dwconv import paper
from repaconv.trained.contract import Method

METHOD = Method(
    name="dwconv",
    paper="Accelerating Vision Transformers with Drop-in Depthwise Convolution",
    figures=Path(__file__).with_name("figures.toml"),
    archs=("vit-large/12", "vit-base/6", "tiny"),
    detect=paper.detect,
    read=paper.read,
    published=paper.published,
    example=paper.example,
)
paper.METHOD = METHOD  # type: ignore[attr-defined]  # for installations from before the entry point was the folder

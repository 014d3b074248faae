"""PYRA (ECCV 2024, arXiv 2403.09192): token merging, modulated by what was learnt with LoRA."""

from pathlib import Path

from repaconv.methods.pyra import paper
from repaconv.trained.contract import Method

METHOD = Method(
    name="pyra",
    paper="PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task Adaptation, arXiv 2403.09192",
    figures=Path(__file__).with_name("figures.toml"),
    archs=(*(f"{size}{rate}" for size in paper.PAPERS for rate in ("", "/low", "/high")), "tiny"),
    detect=paper.detect,
    read=paper.read,
    published=paper.published,
    example=paper.example,
)
paper.METHOD = METHOD  # type: ignore[attr-defined]  # for installations from before the entry point was the folder

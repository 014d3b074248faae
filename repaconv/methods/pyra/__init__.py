"""PYRA (ECCV 2024, arXiv 2403.09192): token merging with a learned modulation of the merged tokens, and LoRA."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.pyra import published, reading

METHOD = Method(
    name="pyra",
    paper="PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task Adaptation, arXiv 2403.09192",
    figures=Path(__file__).with_name("figures.toml"),
    archs=published.ARCHS,
    detect=reading.detect,
    read=reading.read,
    published=published.published,
    example=published.example,
)

"""PYRA (ECCV 2024, arXiv 2403.09192): token merging with a learned modulation of the merged tokens, and LoRA."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.pyra import checkpoint_reading, published_models

METHOD = Method(
    name="pyra",
    paper="PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task Adaptation, arXiv 2403.09192",
    figures=Path(__file__).with_name("figures.toml"),
    archs=published_models.ARCHS,
    detect=checkpoint_reading.detect,
    read=checkpoint_reading.read,
    published=published_models.published,
    example=published_models.example,
)

"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: convolutions replace attention heads."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.dwconv import checkpoint_reading, published_models

METHOD = Method(
    name="dwconv",
    paper="Accelerating Vision Transformers with Drop-in Depthwise Convolution",
    figures=Path(__file__).with_name("figures.toml"),
    archs=published_models.ARCHS,
    detect=checkpoint_reading.detect,
    read=checkpoint_reading.read,
    published=published_models.published,
    example=published_models.example,
)

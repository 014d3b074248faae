"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: attention heads that are convolutions."""

from pathlib import Path

from repaconv.methods.dwconv import published, reading
from repaconv.trained.contract import Method

METHOD = Method(
    name="dwconv",
    paper="Accelerating Vision Transformers with Drop-in Depthwise Convolution",
    figures=Path(__file__).with_name("figures.toml"),
    archs=published.ARCHS,
    detect=reading.detect,
    read=reading.read,
    published=published.published,
    example=published.example,
)

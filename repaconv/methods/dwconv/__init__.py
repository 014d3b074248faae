"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: convolutions replace attention heads."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.dwconv import published, reading

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

"""RIFormer (CVPR 2023, arXiv 2304.05659): a MetaFormer trained with an affine transformation as its token mixer."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.riformer import published, reading

METHOD = Method(
    name="riformer",
    paper="RIFormer: Keep Your Vision Backbone Effective But Removing Token Mixer, arXiv 2304.05659",
    figures=Path(__file__).with_name("figures.toml"),
    archs=tuple(published.ARCHS),
    detect=reading.detect,
    read=reading.read,
    published=published.published,
    example=published.example,
)

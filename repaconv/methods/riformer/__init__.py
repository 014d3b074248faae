"""RIFormer (CVPR 2023, arXiv 2304.05659): a MetaFormer trained with an affine transformation as its token mixer."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.riformer import checkpoint_reading, published_models

METHOD = Method(
    name="riformer",
    paper="RIFormer: Keep Your Vision Backbone Effective But Removing Token Mixer, arXiv 2304.05659",
    figures=Path(__file__).with_name("figures.toml"),
    archs=tuple(published_models.ARCHS),
    detect=checkpoint_reading.detect,
    read=checkpoint_reading.read,
    published=published_models.published,
    example=published_models.example,
)

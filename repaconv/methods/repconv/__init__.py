"""RepVGG (CVPR 2021, arXiv 2101.03697) and MobileOne (CVPR 2023, arXiv 2206.04040): branches become one convolution."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.repconv import checkpoint_reading, published_models

METHOD = Method(
    name="repconv",
    paper="RepVGG: Making VGG-style ConvNets Great Again, arXiv 2101.03697; "
    "MobileOne: An Improved One millisecond Mobile Backbone, arXiv 2206.04040",
    figures=Path(__file__).with_name("figures.toml"),
    archs=tuple(published_models.ARCHS),
    detect=checkpoint_reading.detect,
    read=checkpoint_reading.read,
    published=published_models.published,
    example=published_models.example,
)

"""RePaViT (arXiv 2505.21847): a vision transformer whose FFNs leave some channels idle, i.e. without activation."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.repavit import checkpoint_reading, published_models

METHOD = Method(
    name="repavit",
    paper="Scaling Vision Transformers via Channel Idle (RePaViT), arXiv 2505.21847",
    figures=Path(__file__).with_name("figures.toml"),
    archs=tuple(published_models.ARCHS),
    detect=checkpoint_reading.detect,
    read=checkpoint_reading.read,
    published=published_models.published,
    example=published_models.example,
)

"""RePaViT (arXiv 2505.21847): a vision transformer whose FFNs leave some channels idle, i.e. without activation."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.repavit import published, reading

METHOD = Method(
    name="repavit",
    paper="Scaling Vision Transformers via Channel Idle (RePaViT), arXiv 2505.21847",
    figures=Path(__file__).with_name("figures.toml"),
    archs=tuple(published.ARCHS),
    detect=reading.detect,
    read=reading.read,
    published=published.published,
    example=published.example,
)

"""Rethinking ViT Depth (arXiv 2511.19718): the parallel branches of each transformer block are merged into one."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.nondeep import identification, published, reading

METHOD = Method(
    name="nondeep",
    paper="Rethinking Vision Transformer Depth via Structural Reparameterization, arXiv 2511.19718",
    figures=Path(__file__).with_name("figures.toml"),
    archs=published.ARCHS,
    detect=reading.detect,
    read=reading.read,
    published=published.published,
    example=published.example,
    identify=identification.identify,
    official_rewrites=("scores-as-matrix",),
)

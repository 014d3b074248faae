"""Rethinking ViT Depth (arXiv 2511.19718): the parallel branches of each transformer block are merged into one."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv.methods.nondeep import checkpoint_reading, published_models, settings_from_recorded_outputs

METHOD = Method(
    name="nondeep",
    paper="Rethinking Vision Transformer Depth via Structural Reparameterization, arXiv 2511.19718",
    figures=Path(__file__).with_name("figures.toml"),
    archs=published_models.ARCHS,
    detect=checkpoint_reading.detect,
    read=checkpoint_reading.read,
    published=published_models.published,
    example=published_models.example,
    identify=settings_from_recorded_outputs.identify,
    official_rewrites=("scores-as-matrix",),
)

"""DiracNets (arXiv 1706.00388) as a method of repaconv: two objects, which pyproject.toml registers."""

from pathlib import Path

from repaconv.method_api.contract import Method
from repaconv_dirac import checkpoint
from repaconv_dirac.network import DiracBackbone

METHOD = Method(
    name="dirac",
    paper="DiracNets: Training Very Deep Neural Networks Without Skip-Connections, arXiv 1706.00388",
    figures=Path(__file__).with_name("figures.toml"),  # for `repaconv table dirac`; it need not exist
    archs=tuple(checkpoint.ARCHS),
    detect=checkpoint.detect,
    read=checkpoint.read,
    published=checkpoint.published,
    example=checkpoint.example,
)
BACKBONE = DiracBackbone()

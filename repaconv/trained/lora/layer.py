"""One linear layer with its adapter, apart as trained and as one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repaconv.artefacts import FoldStep
from repaconv.errors import Refused
from repaconv.trained.certificate import relative_difference
from repaconv.trained.contract import FoldedPart


@dataclass(frozen=True)
class Adapter:
    """One adapter: A [r, in], B [out, r], their scale, and the weight that they are for, by the reader's name."""

    weight: str
    a: Tensor
    b: Tensor
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """W + s B A in float64."""
        return weight.double() + self.scale * (self.b.double() @ self.a.double())


class LoraLinear(nn.Linear):
    """A linear layer with its adapter beside it, as trained; ``lora_a`` [r, in], ``lora_b`` [out, r]."""

    def __init__(self, features_in: int, features_out: int, rank: int, scale: float, *, bias: bool) -> None:
        super().__init__(features_in, features_out, bias=bias)
        self.scale = scale
        self.lora_a = nn.Parameter(torch.zeros(rank, features_in))
        self.lora_b = nn.Parameter(torch.zeros(features_out, rank))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        low = nn.functional.linear(input, self.lora_a)
        return super().forward(input) + self.scale * nn.functional.linear(low, self.lora_b)


def put_beside(module: nn.Module, path: str, adapter: Adapter) -> None:
    """Give the linear layer at ``path`` its adapter, in place.

    Raises:
        Refused: If it is no linear layer.
    """
    layer = module.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise Refused(
            f"{path} has an adapter but is not a linear layer.",
            hint="LoRA on other layers is not supported.",
            code="lora.layer",
        )
    parent, _, last = path.rpartition(".")
    bias = layer.bias is not None
    adapted = LoraLinear(layer.in_features, layer.out_features, len(adapter.a), adapter.scale, bias=bias)
    setattr(module.get_submodule(parent), last, adapted)


def proved(path: str, adapter: Adapter, weight: Tensor, merged: Tensor) -> FoldedPart:
    """The certificate's row that ``merged`` [out, in] is ``weight`` and the adapter; both without bias."""
    out, features = weight.shape
    with torch.device("meta"):
        apart = LoraLinear(features, out, len(adapter.a), adapter.scale, bias=False)
        one = nn.Linear(features, out, bias=False)
    weights = {"weight": weight, "lora_a": adapter.a, "lora_b": adapter.b}
    error = relative_difference((apart, weights), (one, {"weight": merged}), (5, features))
    what = (f"lora (rank {len(adapter.a)}, scale {adapter.scale:g}) -> weight",)
    return FoldedPart({}, FoldStep(module=path, folded=what, max_rel_error=error))

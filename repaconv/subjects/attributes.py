"""A module in float64 with the numbers that ONNX's operators hold as attributes: those are float32 in any graph.

So are they in torch's float32 kernels. All other numbers of a module's code are constants of its graph, and exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.proof.runners import TorchRunner

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from repaconv.engines.contract import Array, Feeds

ATTRIBUTES = {
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha", "scale"),
    "hardtanh": ("min_val", "max_val"),
    "softplus": ("beta", "threshold"),
    "addcmul": ("value",),
    "addcdiv": ("value",),
    "addmm": ("beta", "alpha"),
    "native_layer_norm": ("eps",),
    "native_group_norm": ("eps",),
}
"""Arguments of torch's operators that its exporter writes as attributes. A BatchNorm's eps is none: it is folded, in
float64, into what stands before."""


class NetworkRunner(TorchRunner):
    """See `TorchRunner`."""

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Inputs to outputs, floating ones in the precision asked for."""
        with _as_attributes():
            return super().run(feeds)


def _as_attributes() -> AbstractContextManager[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Single(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            with self:  # what is made of several has their numbers
                parts = operator.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            held = ATTRIBUTES.get(operator._schema.name.partition("::")[2].rstrip("_"), ())
            names = [argument.name for argument in operator._schema.arguments]

            def single(name: str, value: Any) -> Any:
                return float(np.float32(value)) if name in held and isinstance(value, float) else value

            given = [single(name, value) for name, value in zip(names, args, strict=False)]
            return operator(*given, **{name: single(name, value) for name, value in kwargs.items()})

    return Single()  # type: ignore[no-untyped-call]

"""A form of the network as a proved ONNX graph: exported, checked, simplified, compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.artefact import Link, write_bytes
from repaconv.pipeline.common import Progress, run_onnx

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray
    from torch import Tensor, nn


class Graph(NamedTuple):
    """An ONNX model, the links from the torch module to it, and who simplified it."""

    model: onnx.ModelProto
    links: tuple[Link, ...]
    simplifier: str
    simplified: bool

    @property
    def sound(self) -> bool:
        """Whether the graph computes what the module does."""
        return all(link.verdict != "failed" for link in self.links)


def proved_graph(
    what: str,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int, int],
    *,
    output: str,
    opset: int,
    batch: int | None,
    free_size: bool,
    tolerances: Mapping[str, float],
    progress: Progress,
) -> Graph:
    """Export a module with these weights and follow it, graph by graph, under ONNX Runtime.

    Where batch or size are free, the links are measured on two of each, the second an odd one.
    """
    import torch

    from repaconv.exporters.simplify import simplify
    from repaconv.exporters.to_onnx import check, to_onnx
    from repaconv.proof.data import random_inputs
    from repaconv.proof.parity import judge
    from repaconv.proof.runners import run_module

    channels, height, width = shape
    sizes = [(height, width), (height + 1, width + 6)] if free_size else [(height, width)]
    counts = [2, 3] if batch is None else [batch, batch]
    probes = [
        random_inputs((channels, *size), count=count, seed=seed).images
        for seed, (size, count) in enumerate(zip(sizes, counts, strict=False))
    ]
    logits = output == "logits"

    progress(f"{what}: torch", 0, 0)
    expected = _joined([run_module(module, tensors, probe, double=False) for probe in probes])
    weights = {n: value.to(torch.float32) if value.is_floating_point() else value for n, value in tensors.items()}
    module.load_state_dict(weights, assign=True)
    progress(f"{what}: to ONNX", 0, 0)
    exported = to_onnx(module, shape, output=output, opset=opset, batch=batch, free_size=free_size)
    check(exported)
    progress(f"{what}: ONNX Runtime", 0, 0)
    before = _run(exported, probes)
    link = judge(
        "onnx",
        (f"{what} in torch, float32", expected),
        ("ONNX as exported", before),
        logits=logits,
        tolerance=tolerances["onnx"],
    )
    progress(f"{what}: simplify", 0, 0)
    result = simplify(
        exported,
        lambda smaller: judge(
            "simplified",
            ("ONNX as exported", before),
            ("ONNX simplified", _run(smaller, probes)),
            logits=logits,
            tolerance=tolerances["simplified"],
        ),
    )
    check(result.model)
    return Graph(result.model, (link, result.link), result.simplifier, result.accepted)


def write_graph(model: onnx.ModelProto, path: Path) -> None:
    """Atomically write the file; equal graphs are equal bytes."""
    write_bytes(path, model.SerializeToString(deterministic=True))


def _run(model: onnx.ModelProto, probes: list[NDArray[np.float32]]) -> NDArray[np.floating]:
    content = model.SerializeToString()
    return _joined([run_onnx(content, probe) for probe in probes])


def _joined(outputs: list[NDArray[np.floating]]) -> NDArray[np.floating]:
    import numpy as np

    joined: NDArray[np.floating] = np.concatenate(outputs)
    return joined

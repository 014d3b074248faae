"""For tests: parity of two forms, checkpoints of our own making, and what a plug-in's method must hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from repaconv import registry
from repaconv.artefact import Metrics
from repaconv.errors import Refused, UsageProblem
from repaconv.files import write_with

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from repaconv.methods.contract import Method


Runs = Union["nn.Module", Path]
"""Something with images in and output out."""


def write_example(method: str, arch: str, path: Path, seed: int) -> None:
    """Write a training-form checkpoint with seeded weights, contained as mmengine publishes its own.

    Raises:
        UsageProblem: If the method has no such architecture.
    """
    known: Method = registry.load(registry.METHODS, method)
    if arch not in known.archs:
        raise UsageProblem(
            f"{method} has no architecture {arch!r}.", hint=f"Known: {', '.join(known.archs)}.", code="demo.arch"
        )
    _write(known.example(arch, seed), path)


def check_method(
    name: str,
    arch: str,
    folder: Path,
    *,
    settings: Mapping[str, str] | None = None,
    meta: Mapping[str, object] | None = None,
) -> None:
    """The conformance kit: hold a registered method to its contract, on its own example of that architecture.

    It is detected and understood; it folds exactly, the whole net and every row of its certificate; the folded model
    is as stored and as ONNX what was trained; equal input gives equal bytes; a key too many or too few and a NaN are
    refused.

    Args:
        name: As registered.
        arch: One of the method's ``archs``; a small one.
        folder: For what is written.
        settings: What the example does not tell.
        meta: What stands in the file beside the weights, if the method needs it.

    Raises:
        AssertionError: Saying what does not hold.
    """
    import torch

    from repaconv.pipeline import export, fold, inspect, verify

    method: Method = registry.load(registry.METHODS, name)
    weights = method.example(arch, seed=1)
    path, run, given = folder / "example.pth", folder / "run", dict(settings or {})
    _write(weights, path, meta)

    seen = inspect(path, settings=given)
    assert seen.method == name, f"its own example is detected as {seen.method}: {seen.reason}"
    assert not seen.problems, f"its own example is not understood: {seen.problems}"
    folded = fold(path, method=name, settings=given, out=run, force=True)
    assert folded.certificate, "the certificate has no row"
    export(run)
    verified = verify(run)
    failed = [link for link in verified.links if link.verdict != "passed"]
    assert not failed, f"not proved: {failed}"
    before = (run / "model.safetensors").read_bytes()
    fold(path, method=name, settings=given, out=run, force=True)
    assert (run / "model.safetensors").read_bytes() == before, "the same checkpoint gives other bytes"

    # an index or a counter may be left unread, a floating point weight may not
    read = [key for key, tensor in sorted(weights.items()) if tensor.is_floating_point() and tensor.ndim > 1]
    broken: dict[str, dict[str, Tensor]] = {
        "a key too many": {**weights, "left.over.weight": torch.ones(2, 2)},
        "a key too few": {key: tensor for key, tensor in weights.items() if key != read[-1]},
        "a NaN": {**weights, read[0]: torch.full_like(weights[read[0]], torch.nan)},
    }
    for what, changed in broken.items():
        _write(changed, path, meta)
        try:
            fold(path, method=name, settings=given, out=folder / "broken")
        except Refused:
            pass
        else:
            raise AssertionError(f"{what} is not refused")
        assert not (folder / "broken").exists(), f"something was written in spite of {what}"


def assert_parity(
    candidate: Runs,
    reference: Runs,
    images: NDArray[np.float32] | tuple[int, ...],
    *,
    rtol: float = 1e-5,
    atol: float | None = None,
    lossy: str | None = None,
) -> Metrics:
    """Fail unless two forms compute the same, and say where they part; for pytest, or any other test.

    Args:
        candidate: A ``torch.nn.Module`` in eval mode, or an .onnx file.
        reference: The same; the one that is right.
        images: [n, C, H, W], or such a shape for seeded random ones.
        rtol: Largest allowed max|a - b| / max|b|.
        atol: Largest allowed max|a - b|; either suffices.
        lossy: ``fp16``, ``bf16`` or ``int8``: judge by cosine and agreement as the policy has it, not by rtol.

    Returns:
        What was measured.

    Raises:
        AssertionError: With the figures, and the module at which the two part.
    """
    import numpy as np

    from repaconv.artefact import Tolerance
    from repaconv.proof.data import random_inputs
    from repaconv.proof.locate import locate
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance

    if isinstance(images, tuple):
        images = random_inputs((images[1], images[2], images[3]), count=images[0], seed=0).images
    sides = [_side(each) for each in (candidate, reference)]
    outputs = [np.asarray(side.run(images)) for side in sides]
    logits = outputs[0].ndim == 2
    usual = Tolerance(kind="exact", rtol=rtol, atol=atol, noise=2 * rtol)
    meter = Meter(tolerance(lossy, logits=logits) if lossy else usual, logits=logits)
    meter.add(outputs[0], outputs[1])
    link = meter.link("parity", "reference", "candidate")
    if link.verdict != "passed":
        graphs = [isinstance(each, Path) for each in (candidate, reference)]
        traces = [side.trace(by_module=not all(graphs)) for side in sides]
        where = locate(traces[1], traces[0], images, allowed=None if lossy else rtol)
        found = f"max rel {meter.metrics().max_rel_error:.1e}, max abs {meter.metrics().max_abs_error:.1e}"
        raise AssertionError(f"{found}; parts at {where.module or 'no module that can be named'}: {where.reason}")
    return meter.metrics()


class _Side:
    """One side of `assert_parity`: what runs, and its values on the way."""

    def __init__(self, run: Any, trace: Any) -> None:
        self.run, self.trace = run, trace


def _side(given: Runs) -> _Side:
    from repaconv.pipeline.common import load_onnx
    from repaconv.proof.runners import TorchRunner
    from repaconv.proof.traces import OnnxTrace, TorchTrace

    if isinstance(given, Path):
        import onnx

        model = onnx.load(given)
        return _Side(load_onnx(given).run, lambda *, by_module: OnnxTrace(model, load_onnx, by_module=by_module))
    first = next(iter(given.state_dict().values()), None)
    double = first is not None and str(first.dtype) == "torch.float64"
    runner = TorchRunner(copy.deepcopy(given), given.state_dict(), double=double)
    return _Side(runner.run, lambda *, by_module: TorchTrace(runner))


def _write(weights: Mapping[str, Tensor], path: Path, meta: Mapping[str, object] | None = None) -> None:
    import torch

    content = {"meta": dict(meta or {"epoch": 0, "made_by": "repaconv"}), "state_dict": dict(weights)}
    write_with(path, lambda temporary: torch.save(content, temporary))

"""Example checkpoints, and the conformance test that a plug-in's method must pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.core.files import write_with
from repaconv.sources.method_detection import load_method

if TYPE_CHECKING:
    from torch import Tensor


def write_example(method: str, arch: str, path: Path, seed: int) -> None:
    """Write a training-time checkpoint with seeded random weights, in mmengine's layout.

    Args:
        method: Name of the method.
        arch: One of the method's ``archs``.
        path: The file to write.
        seed: Seed of the weights.

    Raises:
        UsageProblem: If the method has no such architecture.
    """
    known = load_method(method)
    if arch not in known.archs:
        raise UsageProblem(
            f"{method} has no architecture {arch!r}.",
            hint=f"{did_you_mean(arch, known.archs)}Known: {', '.join(known.archs)}.",
            code="demo.arch",
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
    """Test that a registered method meets the requirements for methods, on its own example checkpoint.

    The example is recognized and read. The whole network and every row of its certificate fold exactly. The folded
    model as stored and as ONNX is verified against the trained one. Folding the same checkpoint twice writes the same
    bytes. A checkpoint with a tensor too many, one too few, or a NaN is refused.

    Args:
        name: The registered name.
        arch: One of the method's ``archs``; take a small network.
        folder: Folder for the files that are written.
        settings: Model settings missing from the example.
        meta: Metadata of the checkpoint file, if the method reads it.

    Raises:
        AssertionError: With the requirement that is not met.
    """
    path, given = folder / "example.pth", dict(settings or {})
    weights = load_method(name).example(arch, 1)
    _write(weights, path, meta)
    _require_recognized(name, path, given)
    _require_verified(name, path, folder / "run", given)
    for what, changed in _altered_checkpoints(weights).items():
        _write(changed, path, meta)
        _require_refused(name, path, folder / "broken", given, what)


def _require_recognized(name: str, path: Path, settings: Mapping[str, str]) -> None:
    from repaconv.stages.inspect.stage import inspect

    seen = inspect(path, settings=settings)
    assert seen.method == name, f"its own example is detected as {seen.method}: {seen.reason}"
    assert not seen.problems, f"its own example is not understood: {seen.problems}"


def _require_verified(name: str, path: Path, run: Path, settings: Mapping[str, str]) -> None:
    from repaconv.results.fold import MethodFold
    from repaconv.stages.export.stage import export
    from repaconv.stages.fold.stage import fold
    from repaconv.stages.verify.stage import verify

    folded = fold(path, method=name, settings=settings, out=run, force=True)
    assert isinstance(folded, MethodFold), f"it is folded as a {folded.kind}, not by the method"
    assert folded.certificate, "the certificate has no row"
    export(run)
    failed = [link for link in verify(run).links if link.verdict != "passed"]
    assert not failed, f"not verified: {failed}"
    before = (run / "model.safetensors").read_bytes()
    fold(path, method=name, settings=settings, out=run, force=True)
    assert (run / "model.safetensors").read_bytes() == before, "the same checkpoint gives other bytes"


def _altered_checkpoints(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return altered checkpoints that must be refused, by what is wrong with them."""
    import torch

    # the method may ignore an index or a counter, but not a floating-point weight
    read = [key for key, tensor in sorted(weights.items()) if tensor.is_floating_point() and tensor.ndim > 1]
    return {
        "a key too many": {**weights, "left.over.weight": torch.ones(2, 2)},
        "a key too few": {key: tensor for key, tensor in weights.items() if key != read[-1]},
        "a NaN": {**weights, read[0]: torch.full_like(weights[read[0]], torch.nan)},
    }


def _require_refused(name: str, path: Path, run: Path, settings: Mapping[str, str], what: str) -> None:
    from repaconv.stages.fold.stage import fold

    try:
        fold(path, method=name, settings=settings, out=run)
    except Refused:
        assert not run.exists(), f"something was written in spite of {what}"
    else:
        raise AssertionError(f"{what} is not refused")


def _write(weights: Mapping[str, Tensor], path: Path, meta: Mapping[str, object] | None = None) -> None:
    import torch

    content = {"meta": dict(meta or {"epoch": 0, "made_by": "repaconv"}), "state_dict": dict(weights)}
    write_with(path, lambda temporary: torch.save(content, temporary))

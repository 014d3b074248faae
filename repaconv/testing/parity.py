"""`assert_parity`: compare the outputs of two models (torch modules or .onnx files) in any test."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from repaconv.core.errors import Refused, UsageProblem
from repaconv.results import Link, Metrics, Tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    Array = NDArray[Any]


Runs = Union["nn.Module", str, Path]
"""A model: a module, or the path of an .onnx file."""

Given = Union["NDArray[Any]", tuple[int, ...]]
"""An input, or its shape for a seeded random one."""


def assert_parity(
    candidate: Runs,
    reference: Runs,
    images: Given | Sequence[Given] | Mapping[str, Given],
    *,
    rtol: float = 1e-5,
    atol: float | None = None,
    lossy: str | None = None,
) -> Metrics:
    """Fail unless two models give the same outputs, and name the first module that differs; for pytest or other tests.

    Args:
        candidate: A ``torch.nn.Module``, or the path of an .onnx file. Of a module, a copy in eval mode runs in the
            module's own float type (a float16 module may overflow).
        reference: The same; the model that is taken as correct.
        images: [n, C, H, W] or any other input, or its shape for seeded random ones; several in the order of the
            inputs, or by their names.
        rtol: Largest allowed max|a - b| / max|b| of every image in every output.
        atol: Largest allowed max|a - b|; meeting either is enough.
        lossy: ``fp16``, ``bf16`` or ``int8``: use the limits of lossy links (cosine similarity, error, changed top-1
            predictions) instead of ``rtol``.

    Returns:
        The measured differences; with several outputs, those of the output that differs most.

    Raises:
        AssertionError: With the differences, and the first module that differs.
        UsageProblem: If a file does not exist, or the inputs do not match those of a graph.
        Refused: If a model does not run on the inputs, or their outputs cannot be compared.
    """
    feeds, own, right = _inputs_by_name(images), _runner(candidate), _runner(reference)
    usual = Tolerance(kind="exact", rtol=rtol, atol=atol, noise=2 * rtol)
    links = _links(_paired_outputs(own.run(feeds), right.run(feeds)), usual, lossy)
    worst = max(links, key=lambda link: (link.verdict == "failed", link.verdict == "passed", _error(link)))
    if worst.verdict == "not verified":
        raise AssertionError(f"not verified: {worst.note}")
    assert worst.metrics is not None, worst.note
    if worst.verdict == "failed":
        description = f"max rel {worst.metrics.max_rel_error:.1e}, max abs {worst.metrics.max_abs_error:.1e}"
        if len(feeds) > 1 or len(links) > 1:
            raise AssertionError(f"{worst.name}: {description}" if len(links) > 1 else description)
        raise AssertionError(
            f"{description}; {_first_difference(own, right, next(iter(feeds.values())), None if lossy else rtol)}"
        )
    return worst.metrics


def _links(pairs: Mapping[str, tuple[Array, Array]], usual: Tolerance, lossy: str | None) -> list[Link]:
    """Return one comparison per output, named as the reference's outputs."""
    from repaconv.verification.comparison import link_between
    from repaconv.verification.tolerances import tolerance

    links = []
    for name, (found, expected) in pairs.items():
        logits = expected.ndim == 2 and expected.dtype.kind == "f"
        allowed = tolerance(lossy, logits=logits) if lossy else usual
        ends = ("reference", expected.astype(np.float64)), ("candidate", found.astype(np.float64))
        links.append(link_between(f"output {name}", *ends, logits=logits, tolerance=allowed))
    return links


def _first_difference(
    candidate: _OnnxModel | _Module, reference: _OnnxModel | _Module, x: Array, allowed: float | None
) -> str:
    """Describe the first module where two models differ on their only input."""
    from repaconv.verification.divergence_location import locate

    by_module = isinstance(candidate, _Module) or isinstance(reference, _Module)
    right, wrong = (end.trace(by_module=by_module) for end in (reference, candidate))
    where = locate(right, wrong, [{"input": x}], allowed=allowed)
    return f"first different at {where.module or 'no module that can be named'}: {where.reason}"


def _error(link: Link) -> float:
    """Return the largest relative error of a comparison; NaN counts as infinite."""
    error = link.metrics.max_rel_error if link.metrics else 0.0
    return error if error == error else float("inf")


def _inputs_by_name(given: Given | Sequence[Given] | Mapping[str, Given]) -> dict[int | str, Array]:
    """Return the inputs by name, or by position if they have no names.

    Raises:
        UsageProblem: If an input is neither an array nor a shape, or is empty.
    """
    if isinstance(given, Mapping):
        return {name: _array(name, each) for name, each in given.items()}
    several = isinstance(given, (tuple, list)) and not all(isinstance(size, int) for size in given)
    return {place: _array(place, each) for place, each in enumerate(given if several else [given])}


def _array(name: int | str, given: Any) -> Array:
    from repaconv.verification.input_batches import random_inputs

    if isinstance(given, (tuple, list)) and given and all(isinstance(size, int) and size > 0 for size in given):
        return random_inputs(tuple(given[1:]), count=given[0], seed=0).images
    if isinstance(given, np.ndarray) and given.size and given.dtype.kind in "fiub":
        return given
    description = (
        f"an array {list(given.shape)} of {given.dtype}" if isinstance(given, np.ndarray) else repr(given)[:60]
    )
    raise UsageProblem(
        f"input {name} is {description}.",
        hint="Give a non-empty NumPy array of numbers, or its shape with the batch dimension first.",
        code="parity.inputs",
    )


def _paired_outputs(found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Pair the outputs of both models: by name if both have the same names, otherwise in their order.

    Raises:
        Refused: If the numbers of outputs differ, or two outputs differ in shape or kind of number.
    """
    if len(found) != len(expected) or not expected:
        raise Refused(
            f"the candidate has {len(found)} outputs, the reference {len(expected)}.",
            hint="Compare models with the same outputs.",
            code="parity.outputs",
        )
    names = list(expected) if set(found) == set(expected) else list(found)
    pairs = {name: (found[own], expected[name]) for own, name in zip(names, expected, strict=True)}
    for name, (a, b) in pairs.items():
        kinds = {_kind(each) for each in (a, b)}
        if len(kinds) > 1 or not kinds <= {"float", "i", "b"} or a.shape != b.shape or not a.size:
            raise Refused(
                f"output {name} of the candidate is {_described(a)}, that of the reference {_described(b)}.",
                hint="Compare models with the same outputs, which must be non-empty tensors of numbers.",
                code="parity.outputs",
            )
    return pairs


def _kind(output: Any) -> str:
    """The kind of the numbers of an output; empty if it is a sequence or a map."""
    kind = output.dtype.kind if isinstance(output, np.ndarray) else ""
    return "float" if kind == "f" else kind.replace("u", "i")


def _described(output: Any) -> str:
    if isinstance(output, np.ndarray):
        return f"{list(output.shape)} of {output.dtype}"
    return "a sequence" if isinstance(output, list) else f"a {type(output).__name__}"


class _OnnxModel:
    """An .onnx file as one side of `assert_parity`."""

    def __init__(self, path: Path) -> None:
        from repaconv.verification.model_runners import load_onnx

        if not path.is_file():
            raise UsageProblem(
                f"there is no file {path}.", hint="Give the path of an .onnx file.", code="parity.missing"
            )
        self.path, self._load = path, load_onnx
        self.session = load_onnx(path)

    def run(self, feeds: Mapping[int | str, Array]) -> dict[str, Array]:
        """Run it and return all outputs by name."""
        kinds = {port.name: port.dtype for port in self.session.inputs}
        order = list(kinds)
        named = {
            order[name] if isinstance(name, int) and name < len(order) else str(name): array
            for name, array in feeds.items()
        }
        if set(named) != set(kinds):
            raise UsageProblem(
                f"{self.path} has the inputs {', '.join(order)}, but {', '.join(named)} were given.",
                hint="Give one array for each, in that order or by name.",
                code="parity.inputs",
            )
        for name, array in named.items():
            if str(array.dtype) != kinds[name]:
                raise UsageProblem(
                    f"input {name} of {self.path} is {kinds[name]}, and {array.dtype} was given.",
                    hint=f"Give array.astype({kinds[name]!r}).",
                    code="parity.inputs",
                )
        try:
            return self.session.run(named)
        except Exception as error:  # ONNX Runtime raises many classes
            raise _does_not_run(str(self.path), named, error) from error

    def trace(self, *, by_module: bool) -> Any:
        """See `repaconv.verification.model_runners`."""
        import onnx

        from repaconv.verification.model_runners import OnnxValues

        return OnnxValues(onnx.load(self.path), self._load, by_module=by_module)


class _Module:
    """A torch module as one side of `assert_parity`: a copy in eval mode, on the CPU, in its own float types."""

    def __init__(self, module: nn.Module) -> None:
        from repaconv.verification.model_runners import TorchRunner

        self.name = type(module).__name__
        own = copy.deepcopy(module).cpu().eval()
        self.runner = TorchRunner(own, own.state_dict(), double=None)

    def run(self, feeds: Mapping[int | str, Array]) -> dict[str, Array]:
        """Run it and return all tensors of its output, by their positions in it."""
        import torch

        from repaconv.method_api.fold_error import tensors_in
        from repaconv.verification.model_runners import array_of

        tensors = {name: torch.from_numpy(np.asarray(array, order="C")) for name, array in feeds.items()}
        cast = {n: t.to(self.runner.dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        by_place = [tensor for name, tensor in cast.items() if isinstance(name, int)]
        by_name = {name: tensor for name, tensor in cast.items() if isinstance(name, str)}
        try:
            with torch.inference_mode():
                output = self.runner.module(*by_place, **by_name)
            return {place or "0": array_of(tensor) for place, tensor in tensors_in(output)}
        except Exception as error:  # the user's code may raise anything
            raise _does_not_run(self.name, feeds, error) from error

    def trace(self, *, by_module: bool) -> Any:
        """See `repaconv.verification.model_runners`."""
        from repaconv.verification.model_runners import TorchValues

        return TorchValues(self.runner)


def _runner(given: Runs) -> _OnnxModel | _Module:
    """Return the runner of a module or a path.

    Raises:
        UsageProblem: If it is neither, or the file does not exist.
    """
    if isinstance(given, (str, Path)):
        return _OnnxModel(Path(given))
    if hasattr(given, "state_dict") and callable(given):
        return _Module(given)
    raise UsageProblem(
        f"{given!r:.60} is neither a torch module nor a path.",
        hint="Give a torch.nn.Module or the path of an .onnx file.",
        code="parity.inputs",
    )


def _does_not_run(what: str, feeds: Mapping[Any, Array], error: Exception) -> Refused:
    shapes = ", ".join(f"{list(array.shape)} of {array.dtype}" for array in feeds.values())
    lines = str(error).strip().splitlines()
    return Refused(
        f"{what} does not run on {shapes}: {lines[0] if lines else type(error).__name__}",
        hint="Give inputs that it accepts.",
        code="parity.inputs",
    )

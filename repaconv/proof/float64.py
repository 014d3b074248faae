"""A graph of any origin evaluated in float64, so that there is a truth to hold float32 against.

ONNX Runtime evaluates a float64 copy where it has all kernels, as written: of what it fuses it keeps scales in float32.
It has none for convolutions, most pools and erf. Else onnx's reference implementation does, whose erf rounds to
float32, whose BatchNormalization is wrong in older opsets, whose Pad does not crop, and whose convolutions and pools
take minutes: those are torch's or here, where they say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Array, Feeds
from repaconv.proof.resizing import before_places, resized
from repaconv.proof.runners import load_onnx

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

RUNTIME = "a float64 copy under ONNX Runtime"
REFERENCE = "onnx's reference implementation in float64, convolutions and pools by torch"
LACKED = ("Conv", "ConvTranspose")
"""For which it has no kernel, so that nobody need ask it with all the weights."""
FLOATS = (1, 10, 16)
"""ONNX's numbers of float32, float16 and bfloat16."""


class Float64:
    """A graph in float64; of its weights it holds one copy at most.

    Attributes:
        told: What evaluates it.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Widen it, and open it where ONNX Runtime lacks no kernel."""
        self._run: Callable[[Feeds], Mapping[str, Any]]
        session = None
        with suppress(Exception):  # the runtime's own, of many classes
            if not any(node.op_type in LACKED for node in model.graph.node):
                session = load_onnx(widened(model), as_written=True)
        self._run, self.told = (_evaluated(model), REFERENCE) if session is None else (session.run, RUNTIME)

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Inputs to outputs, floating ones in float64."""
        return dict(self._run({name: _wide(array) for name, array in feeds.items()}))


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in float64 throughout, its inputs and outputs included."""
    from repaconv.graphs.retyping import retyped

    return retyped(model, dict.fromkeys(FLOATS, 11))


def _evaluated(model: onnx.ModelProto) -> Callable[[Feeds], Mapping[str, Any]]:
    """It in float64 by onnx's reference implementation; of weights and values only what a node reads is there."""
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    from repaconv.graphs.bare import outline
    from repaconv.graphs.retyping import kept_single

    weights, kept = {weight.name: weight for weight in model.graph.initializer}, kept_single(model.graph.node)
    evaluator = ReferenceEvaluator(widened(outline(model, ())), new_ops=_by_torch())
    names = [output.name for output in model.graph.output]
    steps = list(zip(evaluator.rt_nodes_, _read_last(evaluator.rt_nodes_, names), strict=True))

    def weight(name: str) -> Any:
        array = numpy_helper.to_array(weights[name])
        return array if name in kept or weights[name].data_type not in FLOATS else array.astype(np.float64)

    @np.errstate(all="ignore")  # what is not finite is told by those who compare
    def run(feeds: Feeds) -> dict[str, Any]:
        held: dict[str, Any] = {"": None, **evaluator.rt_inits_, **feeds}
        for node, done in steps:
            if node.need_context():  # control flow, which reads what it does not name
                held.update((name, weight(name)) for name in weights if name not in held)
            given = [held[name] if name in held else weight(name) for name in node.input]
            found = node.run(*given, **({"context": held} if node.need_context() else {}))
            held.update((name, value) for name, value in zip(node.output, found, strict=False) if name)
            for name in done:
                held.pop(name, None)
        return {name: held[name] if name in held else weight(name) for name in names}

    return run


def _read_last(nodes: Sequence[Any], wanted: Sequence[str]) -> list[list[str]]:
    """What no node reads behind each; nothing where control flow may read anything."""
    if any(node.need_context() for node in nodes):
        return [[] for _ in nodes]
    seen, found = {"", *wanted}, list[list[str]]()
    made = {name for node in nodes for name in node.output}
    for node in reversed(nodes):
        last = [name for name in dict.fromkeys((*node.input, *node.output)) if name in made and name not in seen]
        seen.update(last)
        found.append(last)
    return found[::-1]


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _by_torch() -> list[Any]:
    """Operators that torch evaluates, each where it says what ONNX does; else onnx's own implementation."""
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops import op_col2im, op_conv, op_conv_transpose, op_resize
    from torch.nn import functional

    class Conv(op_conv.Conv):  # type: ignore[misc]
        def _run(self, *given: Any, **how: Any) -> Any:
            way = _Way(given[0].ndim - 2, how)
            if way.odd or way.rank > 3:
                return super()._run(*given, **how)
            x, weight, bias = _weighted(*given)
            conv = (functional.conv1d, functional.conv2d, functional.conv3d)[way.rank - 1]
            x, groups = functional.pad(x, way.around()), how.get("group") or 1
            done = conv(x, weight, bias, way.of("strides"), 0, way.of("dilations"), groups)
            return (done.numpy(),)

    class ConvTranspose(op_conv_transpose.ConvTranspose):  # type: ignore[misc]
        def _run(self, *given: Any, **how: Any) -> Any:
            way = _Way(given[0].ndim - 2, how)
            if way.odd or way.rank != 2 or not way.even or how.get("output_shape") is not None:
                return super()._run(*given, **how)
            x, weight, bias = _weighted(*given)
            further, groups = list(how.get("output_padding") or [0, 0])[:2], how.get("group") or 1
            shape = way.of("strides"), way.begins, further, groups, way.of("dilations")
            return (functional.conv_transpose2d(x, weight, bias, *shape).numpy(),)

    class Resize(op_resize.Resize):  # type: ignore[misc]
        def _run(self, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **how: Any) -> Any:
            if len(self.onnx_node.input) == 2:  # of opset 10
                return _upsampled(x, roi, how)
            done = resized(x, scales, sizes, how)
            return super()._run(x, roi, scales, sizes, **how) if done is None else (done,)

    class Upsample(OpRun):  # type: ignore[misc]
        def _run(self, x: Any, given: Any = None, scales: Any = None, **how: Any) -> Any:
            return _upsampled(x, scales if given is None else given, how)

    class Col2Im(op_col2im.Col2Im):  # type: ignore[misc]
        def _run(self, x: Any, size: Any, block: Any, **how: Any) -> Any:
            way = _Way(len(block), how)
            if way.rank != 2 or not way.even:
                return super()._run(x, size, block, **how)
            shape = [way.of("dilations"), way.begins, way.of("strides")]
            done = functional.fold(_tensor(x), *(tuple(map(int, each)) for each in (size, block, *shape)))
            return (done.numpy(),)

    return [Conv, ConvTranspose, Resize, Upsample, Col2Im, _pad(), _gather_nd(), *_pointwise(), *_pools()]


def _pad() -> Any:
    from onnx.reference.op_run import OpRun

    class Pad(OpRun):  # type: ignore[misc]
        """Onnx's own knows nothing below zero, which crops."""

        def _run(self, x: Any, pads: Any = None, value: Any = None, axes: Any = None, mode: Any = None) -> Any:
            places = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
            around = np.zeros((x.ndim, 2), np.int64)
            around[list(places)] = np.reshape(pads, (2, -1)).T
            ends = np.array(x.shape) + np.minimum(around[:, 1], 0)
            x = x[tuple(slice(max(0, -begin), end) for begin, end in zip(around[:, 0], ends, strict=True))]
            fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
            return (np.pad(x, np.maximum(around, 0), mode, **fill).astype(x.dtype),)

    return Pad


def _gather_nd() -> Any:
    from onnx.reference.op_run import OpRun

    class GatherND(OpRun):  # type: ignore[misc]
        """Onnx's own takes one number after the other."""

        def _run(self, x: Any, indices: Any, batch_dims: int = 0) -> Any:
            ones = (1,) * (indices.ndim - 1 - batch_dims)
            batch = [axis.reshape(*axis.shape, *ones) for axis in np.indices(x.shape[:batch_dims])]
            places = (*batch, *np.moveaxis(indices, -1, 0))
            return (x[places],)

    return GatherND


def _pointwise() -> list[Any]:
    import torch
    from onnx.reference.op_run import OpRun
    from torch.nn import functional

    class Erf(OpRun):  # type: ignore[misc]
        def _run(self, x: Any) -> Any:
            return (torch.erf(_tensor(x)).numpy(),)

    class Gelu(OpRun):  # type: ignore[misc]
        def _run(self, x: Any, approximate: str = "none") -> Any:
            return (functional.gelu(_tensor(x), approximate=approximate or "none").numpy(),)

    class BatchNormalization(OpRun):  # type: ignore[misc]
        """Onnx's own takes a batch's statistics in opsets 9 to 13, whatever the graph says."""

        def _run(self, x: Any, *given: Any, epsilon: Any = None, training_mode: Any = None, **_how: Any) -> Any:
            if training_mode:
                raise NotImplementedError("a BatchNormalization in training mode")
            scale, bias, mean, variance = map(_tensor, given)
            eps = 1e-5 if epsilon is None else epsilon
            return (functional.batch_norm(_tensor(x), mean, variance, scale, bias, False, 0.0, eps).numpy(),)

    return [Erf, Gelu, BatchNormalization]


def _pools() -> list[Any]:
    import torch
    from onnx.reference.ops import op_average_pool, op_max_pool
    from torch.nn import functional

    class MaxPool(op_max_pool.MaxPool):  # type: ignore[misc]
        def _run(self, x: Any, **how: Any) -> Any:
            way, shape = _Way(x.ndim - 2, how), how["kernel_shape"]
            if way.odd or way.rank != 2 or len(self.onnx_node.output) > 1:
                return super()._run(x, **how)
            given, begins, ceil = _tensor(x), way.begins, bool(how.get("ceil_mode"))
            if not way.within(shape):
                if ceil:
                    return super()._run(x, **how)
                given, begins = functional.pad(given, way.around(), value=-torch.inf), [0, 0]
            return (functional.max_pool2d(given, shape, way.of("strides"), begins, way.of("dilations"), ceil).numpy(),)

    class AveragePool(op_average_pool.AveragePool_19):  # type: ignore[misc]
        def _run(self, x: Any, **how: Any) -> Any:
            way, shape = _Way(x.ndim - 2, how), how["kernel_shape"]
            ceil, counted = bool(how.get("ceil_mode")), bool(how.get("count_include_pad"))
            counted = counted and any(way.pads)
            if way.odd or way.rank != 2 or (ceil and counted) or max(way.of("dilations")) > 1 or not way.within(shape):
                return super()._run(x, **how)
            return (functional.avg_pool2d(_tensor(x), shape, way.of("strides"), way.begins, ceil, counted).numpy(),)

    return [MaxPool, AveragePool]


def _upsampled(x: NDArray[Any], scales: Any, how: Mapping[str, Any]) -> tuple[NDArray[Any]]:
    done = before_places(x, scales, how.get("mode"))
    if done is None:
        raise NotImplementedError("an image that is resized to a part of a pixel")
    return (done,)


class _Way:
    """How a window goes over ``rank`` axes; ``odd`` where its padding is not written down."""

    def __init__(self, rank: int, how: Mapping[str, Any]) -> None:
        self.rank, self.how = rank, how
        self.odd = how.get("auto_pad") not in (None, "NOTSET")
        self.pads = [0] * (2 * rank) if how.get("pads") is None else [int(pad) for pad in how["pads"]]
        self.begins = self.pads[:rank]
        self.even = self.begins == self.pads[rank:]

    def within(self, shape: Sequence[int]) -> bool:
        """Whether a window of that shape is padded as torch does by itself: alike at both ends, by half at most."""
        return self.even and all(2 * pad <= size for pad, size in zip(self.begins, shape, strict=True))

    def of(self, name: str) -> list[int]:
        """Strides or dilations."""
        return list(self.how.get(name) or [1] * self.rank)

    def around(self) -> list[int]:
        """ONNX's begins and ends as torch has them: the last axis first."""
        return [self.pads[axis + side * self.rank] for axis in reversed(range(self.rank)) for side in (0, 1)]


def _weighted(x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None) -> tuple[Any, Any, Any]:
    return _tensor(x), _tensor(weight), None if bias is None else _tensor(bias)


def _tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(np.array(array))

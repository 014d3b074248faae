"""ONNX operators evaluated in float64 by NumPy, one by torch, for onnx's reference implementation.

They replace onnx's own since its convolutions, pools and samplers take minutes, its erf and its cubic Resize round to
float32, its BatchNormalization is wrong in older opsets, its Pad does not crop, and its MaxPool does not pad at the
end. Some fall back to onnx's own for attributes that are not supported here.

torch is imported when a GridSample runs: importing it takes as long as evaluating a small network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import erf, pi, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.algebra.image_resizing import OLD_COORDINATES, before_places, resized
from repaconv.graph.onnx_files import names_read, subgraphs_of
from repaconv.graph.operator_facts import EPSILON, RANDOM

# The error function, which NumPy lacks; importing torch for it takes as long as folding a small network.

ERF_GRID, ERF_END = 4096, 6
"""Values of erf that are kept per unit, and where it is 1 in float64."""
AT_ONCE = 1 << 14
"""Numbers for which functions are evaluated at a time, so that they stay in the cache."""


def error_function(x: NDArray[Any]) -> NDArray[np.float64]:
    """Evaluate erf in float64 for numbers of any shape, within two units in the last place.

    It is the Taylor polynomial of degree 4 around the nearest kept value, at most 2**-13 away: the next term is less
    than 2**-55 of the result.
    """
    return in_parts(_error_function, np.asarray(x, np.float64))


def _error_function(x: NDArray[Any]) -> NDArray[Any]:
    """Evaluate erf(n + h) = erf(n) + erf'(n) (h - n h**2 + (2n**2 - 1)/3 h**3 + (n/2 - n**3/3) h**4).

    The kept value n is the nearest multiple of 1 / `ERF_GRID`. Powers of it take less time than further tables.
    """
    kept, slopes = _error_function_values()
    apart = np.clip(x, -ERF_END, ERF_END)
    nearest = apart * ERF_GRID
    np.rint(nearest, out=nearest)
    with np.errstate(invalid="ignore"):  # NaN, which stays one
        at = nearest.astype(np.intp)
    at += ERF_END * ERF_GRID
    nearest *= 1 / ERF_GRID
    nearest += 0.0  # -0.0 becomes 0.0, whose difference from -0.0 is -0.0
    apart -= nearest
    square = nearest * nearest
    total = square * (-1 / 3)
    total += 0.5
    total *= nearest
    total *= apart
    square *= 2 / 3
    square -= 1 / 3
    total += square
    total *= apart
    total -= nearest
    total *= apart
    total += 1
    total *= apart
    total *= slopes.take(at, mode="clip")
    total += kept.take(at, mode="clip")
    return np.asarray(total)


def in_parts(function: Callable[[NDArray[Any]], NDArray[Any]], x: NDArray[Any]) -> NDArray[Any]:
    """Apply a function of single numbers to some at a time, so that intermediate arrays stay in the cache."""
    found = np.empty(x.shape, x.dtype)
    given, into = x.reshape(-1), found.reshape(-1)
    for begin in range(0, x.size, AT_ONCE):
        into[begin : begin + AT_ONCE] = function(given[begin : begin + AT_ONCE])
    return found


@cache
def _error_function_values() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """erf and its derivative at the kept values, from -`ERF_END` to `ERF_END`."""
    x = np.arange(-ERF_END * ERF_GRID, ERF_END * ERF_GRID + 1) / ERF_GRID
    kept = np.array([erf(place) for place in x])
    kept[ERF_END * ERF_GRID] = -0.0  # which a sum with -0.0 stays
    return kept, 2 / sqrt(pi) * np.exp(-(x**2))


# The operators


def own_operators() -> list[Any]:
    """Return the operator classes, to be passed to onnx's `ReferenceEvaluator` as `new_ops`."""
    return [
        *_product_operators(),
        *_resize_operators(),
        _pad_operator(),
        *_index_operators(),
        _loop_operator(),
        _grid_sample_operator(),
        *_pointwise_operators(),
        *_pool_operators(),
        *_softmax_operators(),
        _suppression_operator(),
        _roi_align_operator(),
    ]


def _product_operators() -> list[Any]:
    from onnx.reference.ops import op_col2im, op_conv, op_conv_transpose, op_matmul

    class MatMul(op_matmul.MatMul):  # type: ignore[misc]
        def _run(self, a: Any, b: Any) -> Any:
            if a.ndim < 3 or b.ndim != 2:
                return super()._run(a, b)
            rows = a.reshape(prod(a.shape[:-1]), a.shape[-1])  # one product: NumPy makes one for each matrix of a
            return ((rows @ b).reshape(*a.shape[:-1], b.shape[-1]),)

    class Conv(op_conv.Conv):  # type: ignore[misc]
        def _run(self, *given: Any, **how: Any) -> Any:
            window = _Window(given[0].ndim - 2, how, given[0].shape[2:], given[1].shape[2:])
            if window.no_pads:
                return super()._run(*given, **how)
            return (convolution(*given, window=window, groups=how.get("group") or 1),)

    class ConvTranspose(op_conv_transpose.ConvTranspose):  # type: ignore[misc]
        def _run(self, *given: Any, **how: Any) -> Any:
            if how.get("auto_pad") == "VALID":  # no pads; onnx's own adds the bias of the first group to all
                how = {**how, "auto_pad": "NOTSET", "pads": [0] * 2 * (given[0].ndim - 2)}
            window = _Window(given[0].ndim - 2, how)
            if window.no_pads or min(window.pads, default=0) < 0 or how.get("output_shape") is not None:
                return super()._run(*given, **how)
            further = list(how.get("output_padding") or [0] * window.rank)
            return (_transposed_convolution(*given, window=window, further=further, groups=how.get("group") or 1),)

    class Col2Im(op_col2im.Col2Im):  # type: ignore[misc]
        def _run(self, x: Any, size: Any, block: Any, **how: Any) -> Any:
            window, kernel = _Window(len(block), how), [int(length) for length in block]
            sizes = [int(length) for length in size]
            places = x.reshape(len(x), x.shape[1] // prod(kernel), prod(kernel), *window.sizes(sizes, kernel))
            return (window.summed(np.moveaxis(places, 2, 0), kernel, sizes),)

    return [MatMul, Conv, ConvTranspose, Col2Im]


def _resize_operators() -> list[Any]:
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops import op_resize

    class Resize(op_resize.Resize):  # type: ignore[misc]
        def _run(self, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **how: Any) -> Any:
            if len(self.onnx_node.input) == 2:  # of opset 10
                return _upsampled(x, roi, how)
            done = resized(x, scales, sizes, how)
            if done is None and not _resized_alike(x, scales, sizes, how):
                raise NotImplementedError("a Resize that ONNX Runtime and onnx define differently")
            return super()._run(x, roi, scales, sizes, **how) if done is None else (done,)

    class Upsample(OpRun):  # type: ignore[misc]
        def _run(self, x: Any, given: Any = None, scales: Any = None, **how: Any) -> Any:
            return _upsampled(x, scales if given is None else given, how)

    return [Resize, Upsample]


def _pad_operator() -> Any:
    from onnx.reference.op_run import OpRun

    class Pad(OpRun):  # type: ignore[misc]
        """Pad with negative pads, which crop and which onnx's own does not support."""

        def _run(self, x: Any, pads: Any = None, value: Any = None, axes: Any = None, mode: Any = None) -> Any:
            places = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
            torch_pads = np.zeros((x.ndim, 2), np.int64)
            torch_pads[list(places)] = np.reshape(pads, (2, -1)).T
            ends = np.array(x.shape) + np.minimum(torch_pads[:, 1], 0)
            x = x[tuple(slice(max(0, -begin), end) for begin, end in zip(torch_pads[:, 0], ends, strict=True))]
            fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
            return (np.pad(x, np.maximum(torch_pads, 0), mode, **fill).astype(x.dtype),)

    return Pad


SCATTERED_BY = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
"""What joins a value and one that is scattered to its place, by ONNX's name."""


def _index_operators() -> list[Any]:
    from onnx.reference.op_run import OpRun

    class GatherND(OpRun):  # type: ignore[misc]
        """GatherND, vectorized; onnx's own loops over single elements."""

        def _run(self, x: Any, indices: Any, batch_dims: int = 0) -> Any:
            ones = (1,) * (indices.ndim - 1 - batch_dims)
            batch = [axis.reshape(*axis.shape, *ones) for axis in np.indices(x.shape[:batch_dims])]
            places = (*batch, *np.moveaxis(indices, -1, 0))
            return (x[places],)

    class GatherElements(OpRun):  # type: ignore[misc]
        """GatherElements for axes of any length; onnx's own supports at most 64."""

        def _run(self, x: Any, indices: Any, axis: int = 0) -> Any:
            fits_torch = tuple(slice(size) for size in indices.shape)
            others = (*fits_torch[: axis % x.ndim], slice(None), *fits_torch[axis % x.ndim + 1 :])
            places = np.where(indices < 0, indices + x.shape[axis], indices)
            return (np.take_along_axis(x[others], places, axis),)

    class ScatterElements(OpRun):  # type: ignore[misc]
        """ScatterElements, vectorized; onnx's own loops over single elements."""

        def _run(self, x: Any, indices: Any, updates: Any, axis: Any = None, reduction: Any = None) -> Any:
            found, places = x.copy(), [*np.indices(indices.shape, sparse=True)]
            places[axis or 0] = indices
            if (reduction or "none") == "none":
                found[tuple(places)] = updates
            else:
                SCATTERED_BY[reduction].at(found, tuple(places), updates)
            return (found,)

    class ScatterND(OpRun):  # type: ignore[misc]
        """ScatterND, vectorized; onnx's own loops over single indices."""

        def _run(self, x: Any, indices: Any, updates: Any, reduction: Any = None) -> Any:
            found, places = x.copy(), tuple(np.moveaxis(indices, -1, 0))
            if (reduction or "none") == "none":
                found[places] = updates
            else:
                SCATTERED_BY[reduction].at(found, places, updates)
            return (found,)

    class Scatter(ScatterElements):
        """ScatterElements, by its name in opsets 9 and 10, which onnx's own lacks."""

    class OneHot(OpRun):  # type: ignore[misc]
        """OneHot; onnx's own does not support a depth of shape [1]."""

        def _run(self, indices: Any, depth: Any, values: Any, axis: int = -1) -> Any:
            places = np.arange(np.reshape(depth, -1)[0])
            hot = np.where(indices < 0, indices + len(places), indices)[..., None] == places
            return (np.moveaxis(np.where(hot, values[1], values[0]), -1, axis),)

    return [GatherND, GatherElements, ScatterElements, ScatterND, Scatter, OneHot]


def _loop_operator() -> Any:
    from onnx.reference.ops import op_loop

    class Loop(op_loop.Loop):  # type: ignore[misc]
        """Loop; onnx's own takes a missing condition for a false one, and joins the values of steps along an axis.

        What reads nothing that changes from step to step is computed in the first one only.
        """

        def __init__(self, node: Any, how: Any) -> None:
            super().__init__(node, how)
            inner_names = (names_read(inner) for body in subgraphs_of(node) for inner in body.node)
            self.read = {*self.body.output_names}.union(*inner_names)
            changing = set(self.body.input_names)
            self.once, self.in_each_step = list[Any](), list[Any]()
            for inner in self.body.rt_nodes_:
                changes = inner.op_type in RANDOM or inner.need_context()  # random operators may be in its graphs, too
                changes = changes or not changing.isdisjoint(names_read(inner.onnx_node))
                (self.in_each_step if changes else self.once).append(inner)
                changing.update(inner.output if changes else ())

        def _run(self, most: Any, go: Any, *state: Any, context: Any = None, body: Any = None, **how: Any) -> Any:
            counter, condition, *names = self.body.input_names
            known = {"": None, **self.body.rt_inits_, **{name: context[name] for name in self.read & context.keys()}}
            stacks = [list[Any]() for _ in range(self.K)]
            step, on = 0, True if go is None else go
            while on and (most is None or step < most):
                if not step:
                    _run_in_order(self.once, known, **how)
                values = {**known, counter: np.array(step), condition: np.array(on)}
                values |= zip(names, state, strict=True)
                _run_in_order(self.in_each_step, values, **how)
                on, *found = (values[name] for name in self.body.output_names)
                state = tuple(found[: self.N])
                for stack, value in zip(stacks, found[self.N :], strict=True):
                    stack.append(value)
                step += 1
            if stacks and not step:
                raise NotImplementedError("a Loop without steps, whose stacked outputs have no shape")
            return (*state, *map(np.stack, stacks))

    return Loop


def _run_in_order(nodes: Iterable[Any], values: dict[str, Any], *, attributes: Any = None, **how: Any) -> None:
    """Run nodes of an inner graph on values by name, to which their outputs are added.

    Args:
        nodes: onnx's operators, in order.
        values: All values that they read.
        attributes: Those of the function that the graph is in, if any.
        how: What else nodes with inner graphs are run with.
    """
    for node in nodes:
        further = {"linked_attributes": attributes} if node.has_linked_attribute and attributes else {}
        further |= {"context": values, **how} if node.need_context() else {}
        found = node.run(*(values[name] for name in node.input), **further)
        values |= {name: value for name, value in zip(node.output, found, strict=False) if name}


def _grid_sample_operator() -> Any:
    from onnx.reference.ops import op_grid_sample

    modes = {
        "linear": "bilinear",
        "bilinear": "bilinear",
        "nearest": "nearest",
        "cubic": "bicubic",
        "bicubic": "bicubic",
    }

    class GridSample(op_grid_sample.GridSample):  # type: ignore[misc]
        """GridSample by torch; onnx's own loops over single elements, partly in float32.

        With a border it clips the sampled coordinate, while ONNX Runtime and torch clip that of each pixel.
        """

        def _run(self, x: Any, grid: Any, **how: Any) -> Any:
            mode, border = modes.get(how.get("mode") or "linear"), how.get("padding_mode") or "zeros"
            if mode is None or x.ndim not in (4, 5):
                return super()._run(x, grid, **how)
            from torch.nn import functional

            corners = bool(how.get("align_corners"))
            return (functional.grid_sample(_tensor(x), _tensor(grid), mode, border, corners).numpy(),)

    return GridSample


def _gelu(x: NDArray[Any]) -> NDArray[Any]:
    found = _error_function(x * sqrt(0.5))
    found += 1
    found *= x
    found *= 0.5
    return found


def _gelu_by_tanh(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x))))


def _sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    found = np.exp(-x)  # infinite where the result is 0
    found += 1
    return np.asarray(np.reciprocal(found, out=found))


def _pointwise_operators() -> list[Any]:
    from onnx.reference.op_run import OpRun

    class Erf(OpRun):  # type: ignore[misc]
        def _run(self, x: Any) -> Any:
            return (error_function(x).astype(x.dtype, copy=False),)

    class Gelu(OpRun):  # type: ignore[misc]
        def _run(self, x: Any, approximate: str | None = None) -> Any:
            found = in_parts(_gelu_by_tanh if approximate == "tanh" else _gelu, x.astype(np.float64, copy=False))
            return (found.astype(x.dtype, copy=False),)

    class Sigmoid(OpRun):  # type: ignore[misc]
        def _run(self, x: Any) -> Any:
            return (in_parts(_sigmoid, x),)

    class Expand(OpRun):  # type: ignore[misc]
        def _run(self, x: Any, shape: Any) -> Any:
            return (np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(map(int, shape)))),)

    class HardSigmoid(OpRun):  # type: ignore[misc]
        """HardSigmoid; an alpha of float32(1/6) is taken as exactly 1/6, as torch and HardSwish define it."""

        def _run(self, x: Any, alpha: Any = None, beta: Any = None) -> Any:
            alpha, beta = 0.2 if alpha is None else alpha, 0.5 if beta is None else beta
            alpha = 1 / 6 if np.float32(alpha) == np.float32(1 / 6) else alpha
            return (np.clip(x * alpha + beta, 0, 1).astype(x.dtype),)

    class HardSwish(OpRun):  # type: ignore[misc]
        def _run(self, x: Any) -> Any:
            return (x * np.clip(x + 3, 0, 6) / 6,)

    class BatchNormalization(OpRun):  # type: ignore[misc]
        """BatchNormalization with the stored statistics; onnx's own uses those of the batch in opsets 9 to 13."""

        def _run(self, x: Any, *given: Any, epsilon: Any = None, training_mode: Any = None, **_how: Any) -> Any:
            if training_mode:
                raise NotImplementedError("a BatchNormalization in training mode")
            scale, bias, mean, variance = (each.reshape(-1, *[1] * (x.ndim - 2)) for each in given)
            factor = scale / np.sqrt(variance + (EPSILON if epsilon is None else epsilon))
            return (x * factor + (bias - mean * factor),)

    class LRN(OpRun):  # type: ignore[misc]
        """LRN; onnx's own counts channels up to the size of the batch, and supports images only."""

        def _run(self, x: Any, alpha: Any = None, beta: Any = None, bias: Any = None, size: Any = None) -> Any:
            alpha, beta, bias = (
                float(usual if given is None else given)  # float32 numbers would make the quotient float32
                for given, usual in ((alpha, np.float32(1e-4)), (beta, 0.75), (bias, 1.0))
            )
            ends = [((size - 1) // 2, size // 2) if axis == 1 else (0, 0) for axis in range(x.ndim)]
            squares = np.pad(x**2, ends)
            total = sum(squares[:, step : step + x.shape[1]] for step in range(size))
            return ((x / (bias + alpha / size * total) ** beta).astype(x.dtype),)

    class MeanVarianceNormalization(OpRun):  # type: ignore[misc]
        """MeanVarianceNormalization; onnx's own adds a float32 number, which it then refuses."""

        def _run(self, x: Any, axes: Any = None) -> Any:
            axes = (0, 2, 3) if axes is None else tuple(axes)
            apart = x - x.mean(axes, keepdims=True)
            return (apart / (np.sqrt((apart**2).mean(axes, keepdims=True)) + 1e-9),)

    return [Erf, Gelu, Sigmoid, Expand, HardSigmoid, HardSwish, BatchNormalization, LRN, MeanVarianceNormalization]


def _pool_operators() -> list[Any]:
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops import op_average_pool, op_max_pool

    class MaxPool(op_max_pool.MaxPool):  # type: ignore[misc]
        def _run(self, x: Any, **how: Any) -> Any:
            shape = how["kernel_shape"]
            window = _Window(x.ndim - 2, how, x.shape[2:], shape)
            if window.no_pads or len(self.onnx_node.output) > 1 or (how.get("ceil_mode") and not window.usual(shape)):
                return super()._run(x, **how)
            least = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
            return (window.pooled(x, shape, np.maximum, least, ceil=bool(how.get("ceil_mode"))),)

    class AveragePool(op_average_pool.AveragePool_19):  # type: ignore[misc]
        def _run(self, x: Any, **how: Any) -> Any:
            shape, ceil = how["kernel_shape"], bool(how.get("ceil_mode"))
            window = _Window(x.ndim - 2, how, x.shape[2:], shape)
            if window.no_pads or (ceil and not window.usual(shape)):
                return super()._run(x, **how)
            count = window.counts(x.shape[2:], shape, ceil=ceil, padding=bool(how.get("count_include_pad")))
            return (window.pooled(x, shape, np.add, 0, ceil=ceil) / count.astype(x.dtype),)

    class GlobalMaxPool(OpRun):  # type: ignore[misc]
        """onnx's own takes images of two axes only."""

        def _run(self, x: Any, **_how: Any) -> Any:
            return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)

    return [MaxPool, AveragePool, GlobalMaxPool]


def _softmax_operators() -> list[Any]:
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops import op_hardmax

    class Softmax(OpRun):  # type: ignore[misc]
        """Softmax; before opset 13 over this and all following axes together, which onnx's own does not do."""

        def _run(self, x: Any, axis: Any = None) -> Any:
            old = self.run_params["opsets"].get("", 13) < 13
            if all(given.name != "axis" for given in self.onnx_node.attribute):  # else onnx gives the default of today
                axis = 1 if old else -1
            rows = x.reshape(*x.shape[: axis % x.ndim], -1) if old else x
            return (self.of_rows(rows, -1 if old else axis).reshape(x.shape),)

        def of_rows(self, x: Any, axis: int) -> Any:
            powers = np.asarray(x - x.max(axis, keepdims=True, initial=-np.inf))
            np.exp(powers, out=powers)
            powers /= powers.sum(axis, keepdims=True)
            return powers

    class LogSoftmax(Softmax):
        def of_rows(self, x: Any, axis: int) -> Any:
            less = x - x.max(axis, keepdims=True, initial=-np.inf)
            return less - np.log(np.exp(less).sum(axis, keepdims=True))

    class Hardmax(Softmax):
        def of_rows(self, x: Any, axis: int) -> Any:
            return op_hardmax.Hardmax._run(self, x, axis=axis)[0]

    return [Softmax, LogSoftmax, Hardmax]


def _suppression_operator() -> Any:
    from onnx.reference.op_run import OpRun

    class NonMaxSuppression(OpRun):  # type: ignore[misc]
        """NonMaxSuppression, vectorized; onnx's own loops over pairs of boxes and does not support scalar inputs."""

        def _run(
            self, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None, **how: Any
        ) -> Any:
            most, overlap = (0 if given is None else np.reshape(given, -1)[0] for given in (most, overlap))
            found = []
            for batch, corners in enumerate(map(_corners, boxes, [how.get("center_point_box")] * len(boxes))):
                for kind, score in enumerate(scores[batch]):
                    above = np.arange(len(score)) if least is None else np.flatnonzero(score > np.reshape(least, -1)[0])
                    order = above[np.argsort(-score[above], kind="stable")]
                    found += [(batch, kind, best) for best in _not_suppressed(corners, order, overlap, most)]
            return (np.array(found, np.int64).reshape(-1, 3),)

    return NonMaxSuppression


def _corners(boxes: NDArray[Any], by_center: Any) -> NDArray[Any]:
    """Convert boxes [n, 4] to (smallest corner, largest corner)."""
    if by_center:
        return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1)


def _not_suppressed(corners: NDArray[Any], order: NDArray[Any], overlap: float, most: int) -> list[int]:
    """Select boxes that overlap no selected, better box by more than ``overlap``, the best first.

    Only boxes that share part of the horizontal axis overlap. Each is therefore compared with a range of the boxes,
    sorted by their left sides: detectors of torchvision set the boxes of different classes apart, 27,000 in all.

    Args:
        corners: Boxes as (smallest corner, largest corner), [n, 4].
        order: Indices of the candidates, the best first, [m].
        overlap: Intersection over union above which the worse box is left out.
        most: How many are selected at most.
    """
    by_left = order[np.argsort(corners[order, 0], kind="stable")]
    place = np.empty(len(corners), np.int64)
    place[by_left] = np.arange(len(by_left))
    sides = np.ascontiguousarray(corners[by_left].T)
    reach = np.maximum.accumulate(np.fmax(sides[2], -np.inf))  # of all boxes up to this one, to the right
    left, selected = np.ones(len(by_left), bool), list[int]()
    for best in order:
        if len(selected) >= most:
            break
        if left[place[best]]:
            selected.append(best)
            one = corners[best]
            near = slice(reach.searchsorted(one[0], "right"), sides[0].searchsorted(one[2]))
            near = slice(None) if overlap < 0 else near
            left[near] &= ~(_overlaps(one, sides[:, near]) > overlap)
    return selected


def _overlaps(one: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Intersection over union of a box [4] with others [4, n]; 0 for boxes without area."""
    width, height = np.minimum(one[2:, None], others[2:]) - np.maximum(one[:2, None], others[:2])
    common = np.where((width > 0) & (height > 0), width * height, 0)
    areas, own = (others[2] - others[0]) * (others[3] - others[1]), (one[2] - one[0]) * (one[3] - one[1])
    some = (common > 0) & (areas > 0) & (own > 0)
    return np.where(some, common / np.where(some, areas + own - common, 1), 0)


def _roi_align_operator() -> Any:
    from onnx.reference.ops import op_roi_align

    class RoiAlign(op_roi_align.RoiAlign):  # type: ignore[misc]
        """RoiAlign that averages, one box at a time; onnx's own loops over single numbers, for minutes.

        The mean over the samples of a cell is a product of three matrices, since their weights are products of a
        vertical and a horizontal weight. Pixels outside of the box have no weight, and are not read.
        """

        def _run(self, x: Any, rois: Any, batches: Any, **how: Any) -> Any:
            if (how.get("mode") or "avg") != "avg" or not np.isfinite(x).all():
                return super()._run(x, rois, batches, **how)
            mode = how.get("coordinate_transformation_mode") or "half_pixel"
            half = mode == "half_pixel" and self.run_params["opsets"].get("", 16) >= 16
            cells = [how.get(name) or 1 for name in ("output_height", "output_width")]
            boxes = rois * (1.0 if how.get("spatial_scale") is None else how["spatial_scale"]) - 0.5 * half
            found = np.empty((len(rois), x.shape[1], *cells), x.dtype)
            for number, (left, top, right, bottom) in enumerate(boxes):
                sides = [(top, bottom - top), (left, right - left)]
                rows, columns = (
                    _means_of_samples(start, length if half else max(length, 1.0), count, size, how["sampling_ratio"])
                    for (start, length), count, size in zip(sides, cells, x.shape[2:], strict=True)
                )
                (vertical, rows), (horizontal, columns) = map(_read_pixels, (rows, columns))
                found[number] = rows @ x[batches[number]][:, vertical, horizontal] @ columns.T
            return (found,)

    return RoiAlign


def _means_of_samples(start: float, length: float, cells: int, size: int, samples: int | None) -> NDArray[Any]:
    """Return what each pixel of an axis contributes to each cell of a box, [cells, size].

    Args:
        start: Where the box begins, in pixels.
        length: Its length in pixels.
        cells: Number of cells that it is divided into.
        size: Number of pixels of the axis.
        samples: Number of samples in a cell; None or 0: one for each pixel that a cell covers, rounded up.
    """
    weights = np.zeros((cells, size))
    count = samples or int(np.ceil(length / cells))
    if count < 1:
        return weights
    cell = np.repeat(np.arange(cells), count)
    at = start + cell * (length / cells) + (np.tile(np.arange(count), cells) + 0.5) * (length / cells) / count
    inside = (at >= -1) & (at <= size)
    cell, at = cell[inside], np.clip(at[inside], 0, size - 1)
    low = at.astype(np.int64)
    np.add.at(weights, (cell, low), (1 - (at - low)) / count)
    np.add.at(weights, (cell, np.minimum(low + 1, size - 1)), (at - low) / count)
    return weights


def _read_pixels(weights: NDArray[Any]) -> tuple[slice, NDArray[Any]]:
    """Return the range of the pixels that have a weight, and the weights [cells, pixels] of these."""
    places = np.flatnonzero(weights.any(0))
    read = slice(places[0], places[-1] + 1) if places.size else slice(0)
    return read, weights[:, read]


def _resized_alike(x: NDArray[Any], scales: Any, sizes: Any, how: Mapping[str, Any]) -> bool:
    """Whether onnx's own Resize is ONNX Runtime's: most coordinates differ for fractional sizes or single pixels."""
    by = how.get("coordinate_transformation_mode") or "half_pixel"
    if (how.get("mode") or "nearest") == "nearest":  # rounded in float32
        return False
    if by in (OLD_COORDINATES, "half_pixel"):
        return True
    if scales is not None and len(scales):
        olds = [x.shape[axis] for axis in how.get("axes") or range(x.ndim)]
        ends = [(old, old * float(scale)) for old, scale in zip(olds, scales, strict=True)]
        whole = by == "pytorch_half_pixel" or all(new == int(new) for _, new in ends)
        return whole and all(new == old or new >= 2 for old, new in ends)
    return how.get("keep_aspect_ratio_policy") in (None, "stretch") and all(size > 1 for size in sizes)


def _upsampled(x: NDArray[Any], scales: Any, how: Mapping[str, Any]) -> tuple[NDArray[Any]]:
    done = before_places(x, scales, how.get("mode"))
    if done is None:
        raise NotImplementedError("an image that is resized to a part of a pixel")
    return (done,)


class _Window:
    """Strides, dilations and padding of a convolution or pool over ``rank`` axes.

    Attributes:
        no_pads: Whether the padding is unknown: automatic, and ``sizes`` were not given.
        pads: ONNX pads: those at the begin of all axes, then those at the end.
        begins: Pads at the begin of each axis.
        even: Whether the pads at begin and end are equal.
    """

    def __init__(
        self, rank: int, how: Mapping[str, Any], sizes: Sequence[int] = (), kernel: Sequence[int] = ()
    ) -> None:
        self.rank, self.how = rank, how
        auto = how.get("auto_pad") or "NOTSET"
        self.no_pads = auto != "NOTSET" and not sizes
        self.pads = [0] * (2 * rank) if how.get("pads") is None else [int(pad) for pad in how["pads"]]
        if auto.startswith("SAME"):
            axes = zip(sizes, kernel, self.of("strides"), self.of("dilations"), strict=False)
            left = [max((-(-n // step) - 1) * step + (k - 1) * apart + 1 - n, 0) for n, k, step, apart in axes]
            less = [pad // 2 for pad in left]
            more = [pad - half for pad, half in zip(left, less, strict=True)]
            self.pads = [*less, *more] if auto == "SAME_UPPER" else [*more, *less]
        self.begins = self.pads[:rank]
        self.even = self.begins == self.pads[rank:]

    def usual(self, kernel: Sequence[int]) -> bool:
        """Whether all runtimes round sizes up alike: pads are equal at both ends and at most half of the kernel.

        With strides of 1 there is nothing to round.
        """
        even = self.even and all(2 * pad <= size for pad, size in zip(self.begins, kernel, strict=True))
        return even or max(self.of("strides")) == 1

    def of(self, name: str) -> list[int]:
        """Return the strides or dilations, 1 by default."""
        return list(self.how.get(name) or [1] * self.rank)

    def sizes(self, given: Sequence[int], kernel: Sequence[int], *, ceil: bool = False) -> list[int]:
        """Return the sizes of the output; ``ceil`` counts a last window that begins within image or padding.

        A kernel larger than image and padding has one window, as in ONNX Runtime, if it is so by less than a stride.
        """
        found = []
        steps = zip(given, kernel, self.of("strides"), self.of("dilations"), strict=True)
        for axis, (size, k, step, apart) in enumerate(steps):
            rest = size + self.begins[axis] + self.pads[self.rank + axis] - apart * (k - 1) - 1
            count = -(-rest // step) if ceil else int(rest / step)
            found.append(count + (count * step < size + self.begins[axis] or not ceil))
        return found

    def pooled(
        self, x: NDArray[Any], kernel: Sequence[int], join: np.ufunc, start: float, *, ceil: bool
    ) -> NDArray[Any]:
        """Join the pixels of each window by ``join``, beginning with ``start``: [N, C, *output].

        One axis is pooled after another. Padding is not read: kernels may be much larger than images.
        """
        sizes = self.sizes(x.shape[2:], kernel, ceil=ceil)
        axes = zip(sizes, kernel, self.of("strides"), self.of("dilations"), self.begins, strict=True)
        for axis, (count, k, step, apart, begin) in enumerate(axes, 2):
            found = np.full((*x.shape[:axis], count, *x.shape[axis + 1 :]), start, x.dtype)
            read, joined = np.moveaxis(x, axis, 0), np.moveaxis(found, axis, 0)
            for place in range(-begin, k * apart - begin, apart):  # of the first window
                first, end = max(0, -(place // step)), min(count, -((place - x.shape[axis]) // step))
                if first < end:  # windows that read the image at this place
                    pixels = read[place + first * step : place + (end - 1) * step + 1 : step]
                    join(joined[first:end], pixels, out=joined[first:end])
            x = found
        return x

    def counts(self, given: Sequence[int], kernel: Sequence[int], *, ceil: bool, padding: bool) -> NDArray[Any]:
        """Return how many pixels each window reads, at least 1: [*output].

        Args:
            given: Sizes of the images.
            kernel: Sizes of the kernel.
            ceil: See `sizes`.
            padding: Whether pixels of the padding count; those beyond it do not.
        """
        counts = np.ones((), np.int64)
        sizes = self.sizes(given, kernel, ceil=ceil)
        axes = zip(sizes, given, kernel, self.of("strides"), self.of("dilations"), strict=True)
        for axis, (count, size, k, step, apart) in enumerate(axes):
            begin, end = self.begins[axis], self.pads[self.rank + axis]
            first, last = (0, begin + size + end) if padding else (begin, begin + size)
            starts = np.arange(count) * step
            places = np.minimum(k, -((starts - last) // apart)) - np.maximum(0, -((starts - first) // apart))
            counts = np.multiply.outer(counts, places)
        return np.maximum(counts, 1)

    def pieces(self, x: NDArray[Any], kernel: Sequence[int]) -> Iterator[NDArray[Any]]:
        """Yield for each place of the kernel what it reads of images padded with zeros, [N, C, *output]."""
        sizes = self.sizes(x.shape[2:], kernel)
        x = self.padded(x, sizes, kernel)
        for place in self.places(sizes, kernel):
            yield x[place]

    def padded(self, x: NDArray[Any], sizes: Sequence[int], kernel: Sequence[int]) -> NDArray[Any]:
        """Return images with the zeros that so many windows read, and at the end of each axis no more than that."""
        reach = self.reach(sizes, kernel)
        ends = [max(end - begin - old, 0) for end, begin, old in zip(reach, self.begins, x.shape[2:], strict=True)]
        if not any(self.begins) and not any(ends):
            return x
        return np.pad(x, [(0, 0), (0, 0), *zip(self.begins, ends, strict=True)])

    def summed(self, pieces: Iterable[NDArray[Any]], kernel: Sequence[int], sizes: Sequence[int]) -> NDArray[Any]:
        """Return images [N, C, *sizes] to which ``pieces`` are added that were read from them: `pieces` transposed."""
        found: NDArray[Any] | None = None
        ends = self.pads[self.rank :]
        padded = [begin + size + end for begin, size, end in zip(self.begins, sizes, ends, strict=True)]
        for number, piece in enumerate(pieces):
            if found is None:
                found = np.zeros((*piece.shape[:2], *padded), piece.dtype)
                places = [*self.places(piece.shape[2:], kernel)]
            found[places[number]] += piece
        assert found is not None  # a kernel has at least one place
        own: Any = (..., *(slice(begin, begin + size) for begin, size in zip(self.begins, sizes, strict=True)))
        return np.asarray(found[own])

    def reach(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Return how many pixels of each axis, padding included, are read by windows of these numbers, ``sizes``."""
        axes = zip(sizes, self.of("strides"), kernel, self.of("dilations"), strict=True)
        return [(size - 1) * step + (k - 1) * apart + 1 for size, step, k, apart in axes]

    def places(self, sizes: Sequence[int], kernel: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Yield for each place of the kernel the index of what ``sizes`` windows read there in padded images."""
        for place in np.ndindex(*kernel):
            axes = zip(place, self.of("dilations"), self.of("strides"), sizes, strict=True)
            yield (..., *(slice(k * apart, k * apart + (n - 1) * step + 1, step) for k, apart, step, n in axes))


def convolution(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None, *, window: _Window, groups: int = 1
) -> NDArray[Any]:
    """Convolve images [N, C, *sizes] with a kernel [O, C / groups, *kernel], as products of matrices image by image."""
    kernel, outputs, per_group = weight.shape[2:], len(weight), weight.shape[1]
    sizes = window.sizes(x.shape[2:], kernel)
    found = np.empty((len(x), outputs, *sizes), x.dtype)
    by_group = found.reshape(len(x), groups, outputs // groups, *sizes)
    short = window.rank == 2 and kernel[1] > 1 and window.reach(sizes, kernel)[1] < LINE * kernel[1]
    if per_group == 1 and short and sizes[0] >= LEAST_LINES and np.isfinite(x).all():  # infinity times zero is NaN
        _by_lines(weight.reshape(groups, outputs // groups, *kernel), x, window, by_group)
    else:
        matrices = weight.reshape(groups, outputs // groups, -1)
        for image, into in zip(x[:, None], by_group, strict=True):
            read = [piece[0].reshape(groups, per_group, *sizes) for piece in window.pieces(image, kernel)]
            (_by_channels if per_group == 1 else _by_rows)(matrices, read, into)
    if bias is not None:
        found += bias.reshape(-1, *[1] * len(kernel))
    return found


def _transposed_convolution(
    x: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any] | None = None,
    *,
    window: _Window,
    further: Sequence[int],
    groups: int = 1,
) -> NDArray[Any]:
    """Convolve images [N, C, *sizes] with a transposed kernel [C, O / groups, *kernel], place by place of the kernel.

    ``further`` has the pixels that each axis of the output gets at its end.
    """
    sizes, kernel, per_group = x.shape[2:], weight.shape[2:], weight.shape[1]
    rows = x.reshape(len(x), groups, len(weight) // groups, prod(sizes))
    matrices = weight.reshape(groups, len(weight) // groups, per_group, prod(kernel)).transpose(3, 0, 2, 1)
    pieces = ((matrix @ rows).reshape(len(x), groups * per_group, *sizes) for matrix in matrices)
    ends = zip(window.reach(sizes, kernel), further, window.begins, window.pads[window.rank :], strict=True)
    found = window.summed(pieces, kernel, [reach + more - begin - end for reach, more, begin, end in ends])
    return found if bias is None else found + bias.reshape(-1, *[1] * len(kernel))


NUMBERS_IN_CACHE = 2**17
"""How many float64 numbers stay in a core's cache (1 MiB); arrays of more are written to memory and read again."""


LINE, LEAST_LINES = 7, 7
"""Lines shorter than so many times the kernel's width, and at least so many of them, are convolved faster by products
with band matrices (measured)."""


def _by_lines(weight: NDArray[Any], x: NDArray[Any], window: _Window, into: NDArray[Any]) -> None:
    """Convolve images [N, groups, H, W] depthwise by products of their lines: ``into`` [N, groups, O / groups, H, W].

    Each row of the kernel is a matrix from all pixels of a line to those of the output, with its numbers next to the
    diagonal. That has more products than the convolution, but each takes a fraction of the time.

    ``weight`` is [groups, O / groups, height, width].
    """
    kernel, sizes = weight.shape[2:], into.shape[3:]
    x = window.padded(x, sizes, kernel)
    (down, step), (apart_down, apart), to = window.of("strides"), window.of("dilations"), np.arange(sizes[1])
    at_once = max(1, NUMBERS_IN_CACHE // max(1, weight.shape[1] * x.shape[3] * sizes[1]))
    for begin in range(0, len(weight), at_once):
        channels = slice(begin, begin + at_once)
        total = into[:, channels]
        matrices = np.zeros((*total.shape[1:3], x.shape[3], sizes[1]), total.dtype)
        total[:] = 0
        for row in range(kernel[0]):
            for column in range(kernel[1]):
                matrices[:, :, to * step + column * apart, to] = weight[channels, :, row, column, None]
            first = row * apart_down
            total += x[:, channels, None, first : first + (sizes[0] - 1) * down + 1 : down] @ matrices


def _by_channels(matrices: NDArray[Any], read: Sequence[NDArray[Any]], into: NDArray[Any]) -> None:
    """Convolve one image depthwise, one place of the kernel after the other: ``into`` [groups, O / groups, *sizes].

    ``read`` has an array [groups, C / groups, *sizes] for each place of the kernel.
    """
    at_once = max(1, NUMBERS_IN_CACHE // max(1, into[0].size))
    weights = matrices.reshape(*matrices.shape, *[1] * (into.ndim - 2))
    for begin in range(0, len(into), at_once):
        channels = slice(begin, begin + at_once)
        total = into[channels]
        np.multiply(weights[channels, :, 0], read[0][channels], out=total)
        product = np.empty_like(total)
        for at, piece in enumerate(read[1:], 1):
            np.multiply(weights[channels, :, at], piece[channels], out=product)
            total += product


def _by_rows(matrices: NDArray[Any], read: Sequence[NDArray[Any]], into: NDArray[Any]) -> None:
    """Convolve one image by products with what the kernel reads as columns (im2col); see `_by_channels`.

    A kernel that reads several places convolves some rows at a time.
    """
    groups, channels, rows, *others = read[0].shape
    if not into.size:
        return
    if len(read) == 1:
        np.matmul(matrices, read[0].reshape(groups, channels, -1), out=into.reshape(*into.shape[:2], -1))
        return
    at_once = max(1, NUMBERS_IN_CACHE // max(1, len(read) * channels * prod(others)))
    for begin in range(0, rows, at_once):
        pieces = [piece[:, :, begin : begin + at_once] for piece in read]
        columns = np.stack(pieces, 2).reshape(groups, channels * len(read), -1)
        into[:, :, begin : begin + at_once] = (matrices @ columns).reshape(*into.shape[:2], -1, *others)


def _tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(np.array(array))

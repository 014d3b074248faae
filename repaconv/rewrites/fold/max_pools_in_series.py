"""pools-in-series: of several MaxPools of one value, let each read one with a smaller window.

    max over [i - a, i + b]  =  max over [-(a - a'), b - b'] of the maxima over [i - a', i + b']

Spatial pyramid pooling takes maxima over 5x5, 9x9 and 13x13 pixels of one image (YOLOv3-SPP to YOLOX). In series, each
compares 25 numbers per pixel, not 25, 81 and 169. At the borders both leave out what is outside.

Source: He et al. 2014, "Spatial Pyramid Pooling in Deep Convolutional Networks"; in series: Ultralytics' SPPF.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.nodes_and_constants import Writer, attribute, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


class _Window(NamedTuple):
    """How far the window of a MaxPool of stride 1 reaches before and after each pixel, along each axis."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(before + after + 1 for before, after in zip(self.before, self.after, strict=True))

    @property
    def numbers(self) -> int:
        """How many numbers are compared for each pixel."""
        return math.prod(self.size)

    def without(self, inner: _Window) -> _Window | None:
        """The window that makes this one of an inner one; None if the inner one reaches farther, or as far."""
        before = tuple(mine - its for mine, its in zip(self.before, inner.before, strict=True))
        after = tuple(mine - its for mine, its in zip(self.after, inner.after, strict=True))
        return _Window(before, after) if min(*before, *after) >= 0 and (any(before) or any(after)) else None


def apply(model: ir.Model) -> Iterator[Change]:
    """Let each MaxPool read the one of the same value that leaves it the smallest window; in place."""
    pools: dict[ir.Value, list[tuple[_Window, ir.Node]]] = defaultdict(list)
    for node in nodes_of(model, "MaxPool"):
        window = _window_of(node)
        if window is not None and node.inputs[0] is not None:
            pools[node.inputs[0]].append((window, node))
    for found in pools.values():
        smaller: list[tuple[_Window, ir.Value]] = []
        for window, node in sorted(found, key=lambda pool: pool[0].numbers):
            maxima = node.outputs[0]
            insides = ((window.without(inner), value) for inner, value in smaller)
            ways = [(left, value) for left, value in insides if left is not None]
            if ways:
                left, value = min(ways, key=lambda way: way[0].numbers)
                write = Writer(model, node)
                maxima = write("MaxPool", value, kernel_shape=left.size, pads=(*left.before, *left.after))
                set_shape(maxima, sizes(node.outputs[0]), node.outputs[0])
                write.replace(node.outputs[0], maxima)
                sides = " by ".join("x".join(map(str, each.size)) for each in (window, left))
                yield Change(rewrite="pools-in-series", place=node.name or "", description=sides)
            smaller.append((window, maxima))


def _window_of(node: ir.Node) -> _Window | None:
    """The window of a MaxPool whose output is as large as its input, and which has pads; None for others."""
    kernel = tuple(int(side) for side in attribute(node, "kernel_shape", ()))
    ones, pads = (1,) * len(kernel), tuple(int(pad) for pad in attribute(node, "pads", ()))
    if any(tuple(attribute(node, name, ones)) != ones for name in ("strides", "dilations")) or len(node.outputs) > 1:
        return None
    if not any(pads) or attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return None
    window = _Window(pads[: len(kernel)], pads[len(kernel) :])
    return window if window.size == kernel else None


POOLS_IN_SERIES = Rewrite(
    "pools-in-series", "MaxPools of stride 1 of one value, with growing windows", apply, keeps=True
)

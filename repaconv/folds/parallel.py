"""Convolutions beside each other: kernels of one value that are summed are one, where that multiplies no more.

    W * x + V * x + P(x) + x = (W + V + P + I) * x

of any sizes, at the border too: the smaller kernels stand among zeros where they stood, and outside the image are
zeros. An average that does not count its padding is no convolution there, and is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.artefacts import Change
from repaconv.folds.kernels import Kernel, eye, fits, kernel_of, scale_of, size_of, summed
from repaconv.folds.sequences import line_of, reduced
from repaconv.graphs.nodes import Writer, is_constant, made_by
from repaconv.graphs.shapes import set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


class Term(NamedTuple):
    """A term of a sum: +- the kernel of a source, or of itself where it is none."""

    value: ir.Value
    sign: float
    source: ir.Value
    kernel: Kernel
    operator: str  # that it was; none of a value itself


Terms = tuple[Term, ...]


def joined(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Join them, in place."""
    for node in reversed(tuple(model.graph)):
        if node.graph is model.graph and _is_sum(node) and not _is_inner(node.outputs[0]):
            yield from _join(model, node, rewrite)


def _is_sum(node: ir.Node | None) -> bool:
    if node is None or node.domain or node.op_type not in ("Add", "Sub", "Sum"):
        return False
    shape = sizes(node.outputs[0])
    whole = all(value is not None and not is_constant(value) and sizes(value) == shape for value in node.inputs)
    return shape is not None and len(shape) > 2 and isinstance(shape[1], int) and whole


def _only_here(value: ir.Value) -> bool:
    return len(list(value.uses())) == 1 and not value.is_graph_output()


def _is_inner(value: ir.Value) -> bool:
    return _only_here(value) and _is_sum(next(iter(value.uses())).node)


def _terms(value: ir.Value, sign: float) -> Iterator[Term]:
    node = value.producer()
    assert node is not None
    for place, term in enumerate(node.inputs):
        assert term is not None
        own = -sign if place and node.op_type == "Sub" else sign
        if _is_sum(term.producer()) and _only_here(term):
            yield from _terms(term, own)
        else:
            yield _term(term, own)


def _term(value: ir.Value, sign: float) -> Term:
    """What a value is, seen through a BatchNormalization behind a kernel that nothing else reads."""
    node, shape = made_by(value, "Conv", "AveragePool", "BatchNormalization"), sizes(value)
    if node is not None and node.inputs[0] is not None and _only_here(value):
        kernel = kernel_of(node) or scale_of(node)
        if kernel is not None:
            return Term(value, sign, node.inputs[0], kernel, node.op_type)
    assert shape is not None
    width = shape[1]
    assert isinstance(width, int)
    return Term(value, sign, value, eye(width, len(shape)), "")


def _join(model: ir.Model, top: ir.Node, rewrite: str) -> Iterator[Change]:
    terms = _met(tuple(_terms(top.outputs[0], 1.0)))
    found = [
        some for source in {term.source: None for term in terms} for some in _chosen(terms, source, top.outputs[0])
    ]
    if not found:
        return
    write, total = Writer(model, top), None
    for some in found:
        total = _added(write, total, _written(write, some, top.outputs[0]), 1.0)
        place = next(term.value.producer() for term in some if term.operator == "Conv")
        told = " + ".join(term.operator or "x" for term in some)
        yield Change(
            rewrite=rewrite, place=(place.name if place is not None else "") or "", description=f"{told} -> Conv"
        )
    for term in terms:
        if all(term not in some for some in found):
            total = _added(write, total, term.value, term.sign)
    assert total is not None
    write.replace(top.outputs[0], total)


def _met(terms: Terms) -> Terms:
    """Terms as kernels of what others are kernels of, where they come from that through more than one."""
    places, lines = range(len(terms)), [set(line_of(term.source)) for term in terms]
    deep = list(terms)
    for place in places:
        if any(lines[place] & lines[other] for other in places if other != place):
            kernel, x = reduced(terms[place].kernel, terms[place].source)
            deep[place] = terms[place]._replace(kernel=kernel, source=x)

    def others(mine: int) -> set[ir.Value]:
        return {one.source for place in places if place != mine for one in (terms[place], deep[place])}

    return tuple(deep[place] if deep[place].source in others(place) else terms[place] for place in places)


def _added(write: Writer, total: ir.Value | None, value: ir.Value, sign: float) -> ir.Value:
    if total is None:
        return value
    new = write("Add" if sign > 0 else "Sub", total, value)
    set_shape(new, sizes(value), value)
    return new


def _written(write: Writer, terms: Terms, out: ir.Value) -> ir.Value:
    """Their sum as a Conv."""
    kernel = summed([term.kernel.then(np.full(len(term.kernel.weight), term.sign), None) for term in terms])
    parts = [write.constant(part) for part in (kernel.weight, kernel.bias) if part is not None]
    new = write("Conv", terms[0].source, *parts, **kernel.attributes)
    set_shape(new, sizes(out), out)
    return new


def _chosen(terms: Terms, source: ir.Value, out: ir.Value) -> list[Terms]:
    """Which of the terms of a source are one convolution: two by two, first those that save most."""
    sets: list[Terms] = [(term,) for term in terms if term.source is source]
    fixed = all(isinstance(size, int) for value in (source, out) for size in (sizes(value) or ("",))[2:])
    while len(sets) > 1:
        first, second = max(combinations(sets, 2), key=lambda pair: _gain(*pair, fixed=fixed))
        if _gain(first, second, fixed=fixed) < 0:
            break
        sets = [*(some for some in sets if some not in (first, second)), first + second]
    return [some for some in sets if len(some) > 1]


def _gain(a: Terms, b: Terms, *, fixed: bool) -> int:
    """How many multiplications a place are saved where both are one; less than none where that cannot be."""
    kernels = [term.kernel for term in a + b]
    if all(term.operator != "Conv" for term in a + b) or not all(fits(kernels[0], one, fixed=fixed) for one in kernels):
        return -1
    before = sum(size_of([term.kernel for term in some]) if len(some) > 1 else some[0].kernel.learnt for some in (a, b))
    return before - size_of(kernels)

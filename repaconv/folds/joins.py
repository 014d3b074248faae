"""join: several products of heads that are added, or that share their softmax, are one product.

With queries Q_b, keys K_b and factors c_b of n branches, head by head along the width,

    sum_b c_b Q_b K_b^T = [c_1 Q_1 .. c_n Q_n] [K_1 .. K_n]^T,    S V_b = (S [V_1 .. V_n])_b

Which form the one product then takes is `repaconv.folds.cheapest`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefacts import Change
from repaconv.graphs.attention import Heads, heads_of, joined
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import clean
from repaconv.graphs.heads import shown_as_heads, shown_as_tokens
from repaconv.graphs.nodes import Writer, made_by, scalar
from repaconv.graphs.normal import normalise
from repaconv.graphs.shapes import as_numbers, rank_of, set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

JOINED = "repaconv.joined"
"""Marks a softmax whose product was put together here, so that its form is chosen here too."""


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    normalise(model)
    for node in tuple(model.graph):
        if node.op_type == "Softmax" and not node.domain:
            yield from _join_scores(model, node)
            yield from _join_values(model, node)
    clean(model)


# --- scores -------------------------------------------------------------------------------------------


def _terms(value: ir.Value | None, factor: float) -> list[tuple[float, ir.Node]] | None:
    """The products that a value is a sum of, with a factor each."""
    node = made_by(value, "MatMul", "Add", "Sub", "Mul", "Div")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return None
    if node.op_type == "MatMul":
        return [(factor, node)]
    if node.op_type in ("Mul", "Div"):
        for mine, other in ((0, 1), (1, 0)):
            number = scalar(node.inputs[other])
            if number is not None and not (node.op_type == "Div" and mine):
                return _terms(node.inputs[mine], factor * number if node.op_type == "Mul" else factor / number)
        return None
    left = _terms(node.inputs[0], factor)
    right = _terms(node.inputs[1], factor if node.op_type == "Add" else -factor)
    return None if left is None or right is None else left + right


def _join_scores(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    terms = _terms(softmax.inputs[0], 1.0)
    if terms is None or len(terms) < 2:
        return
    queries = [_all_of(node.inputs[0]) for _, node in terms]
    keys = [_all_of(node.inputs[1], transposed=True) for _, node in terms]
    found = _alike(queries), _alike(keys)
    if found[0] is None or found[1] is None or found[0][0].count != found[1][0].count:
        return
    count = found[0][0].count
    write = Writer(model, softmax)
    scaled = []
    for (factor, _), one in zip(terms, found[0], strict=True):
        new = write("Mul", one.source, write.constant(factor)) if factor != 1 else one.source
        set_shape(new, sizes(one.source), one.source)
        scaled.append(new)
    q = shown_as_heads(write, _interleaved(write, scaled, count), count)
    k = shown_as_heads(write, _interleaved(write, [one.source for one in found[1]], count), count, transposed=True)
    scores = write("MatMul", q, k)
    set_shape(scores, sizes(softmax.inputs[0]), q)
    softmax.replace_input_with(0, scores)
    softmax.meta[JOINED] = True
    told = f"{len(terms)} sums of scores -> one product, heads {sum(one.width for one in found[0])} wide"
    yield Change(rewrite=JOIN.name, place=softmax.name or "", description=told)


def _alike(parts: list[Heads | None]) -> list[Heads] | None:
    """All of them, if they are heads of the same number over the same tokens' places."""
    found = [one for one in parts if one is not None]
    same = len(found) == len(parts) and len({(one.count, (sizes(one.source) or ())[:2]) for one in found}) == 1
    return found if same else None


def _interleaved(write: Writer, parts: list[ir.Value], count: int) -> ir.Value:
    """Tokens [B, N, H d_b] beside each other head by head, [B, N, H sum d_b]."""
    shapes = [sizes(value) for value in parts]
    widths = as_numbers(shape[2] for shape in shapes if shape is not None)
    joined = write("Concat", *parts, axis=2)
    first = shapes[0]
    assert first is not None
    assert widths is not None
    whole = (*first[:2], sum(widths))
    set_shape(joined, whole, parts[0])
    starts = np.cumsum([0, *widths[:-1]])
    order = [
        start + h * (w // count) + j
        for h in range(count)
        for start, w in zip(starts, widths, strict=True)
        for j in range(w // count)
    ]
    new = write("Gather", joined, write.constant([int(i) for i in order]), axis=2)
    set_shape(new, whole, parts[0])
    return new


# --- values -------------------------------------------------------------------------------------------


def _join_values(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    readers = list(softmax.outputs[0].uses())
    products: list[ir.Node] = [node for node, place in readers if place == 0 and node.op_type == "MatMul"]
    if len(products) < 2 or len(products) != len(readers):
        return
    values = _alike([_all_of(node.inputs[1]) for node in products])
    ends = [_tokens_of(node.outputs[0]) for node in products]
    if values is None or any(end is None for end in ends):
        return
    order = {node: place for place, node in enumerate(model.graph)}
    if any(_made_of(one.source, products, order) for one in values):
        return
    count = values[0].count
    last = max(products, key=lambda node: order[node])
    write = Writer(model, last)
    v = shown_as_heads(write, _interleaved(write, [one.source for one in values], count), count)
    mixed = write("MatMul", softmax.outputs[0], v)
    shape = sizes(products[0].outputs[0])
    assert shape is not None
    set_shape(mixed, (*shape[:3], sum(one.width for one in values)), v)
    tokens = shown_as_tokens(write, mixed)
    width, start = sum(one.width for one in values), 0
    for one, end in zip(values, ends, strict=True):
        assert end is not None
        places = [h * width + start + j for h in range(count) for j in range(one.width)]
        start += one.width
        part = write("Gather", tokens, write.constant(places), axis=2)
        set_shape(part, sizes(end), tokens)
        write.replace(end, part)
    softmax.meta[JOINED] = True
    yield Change(
        rewrite=JOIN.name, place=last.name or "", description=f"{len(values)} sets of values -> one, heads {width} wide"
    )


def _made_of(value: ir.Value, nodes: list[ir.Node], order: dict[ir.Node, int]) -> bool:
    """Whether a value is computed from what some nodes write."""
    first, seen, todo = min(order[node] for node in nodes), set(), [value]
    while todo:
        node = todo.pop().producer()
        if node is None or node in seen or order.get(node, first) < first:
            continue
        if node in nodes:
            return True
        seen.add(node)
        todo += [entry for entry in node.inputs if entry is not None]
    return False


def _all_of(value: ir.Value | None, *, transposed: bool = False) -> Heads | None:
    """The heads that a value shows, if they are all of their tokens, head by head."""
    found = heads_of(value, transposed=transposed)
    return found if found is not None and found.whole and found.factor == 1 else None


def _tokens_of(value: ir.Value) -> ir.Value | None:
    """The tokens [B, N, H d] that heads [B, H, N, d] are shown as, if nothing else reads those."""
    end = joined(value)
    return end if end is not None and rank_of(end) == 3 and not end.is_graph_output() else None


JOIN = Rewrite("join", "for heads of one number over the same tokens, added up or behind one softmax", apply)

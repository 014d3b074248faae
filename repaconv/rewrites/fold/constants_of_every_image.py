"""repeated: what is computed of constants and the batch size alone, the same for every image, becomes a constant.

A graph with a dynamic batch computes position embeddings, masks and queries of detectors (DETR and its successors,
Mask2Former, SAM 2) for every image again, since they begin with ones or zeros of as many images as there are. So does
the first layer of a decoder, whose attention between queries reads nothing of an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, is_constant, made_by
from repaconv.graph.repeated_constants import Repeated, repeated_constants
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.shape_folding import ALWAYS_WRITTEN, fold_shapes, read_past_expand
from repaconv.graph.sizes_from_input_shapes import SizeWriter
from repaconv.graph.symbolic_shapes import is_dynamic, set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write repeated constants as an Expand each, where the graph then holds no more numbers; in place."""
    clean(model)
    before = len(model.graph)
    writer = SizeWriter(model)
    found = [(value.name or "", value, one) for value, one in _read_ones(repeated_constants(model))]
    made = [name for name, value, one in found if _write(model, writer, value, one)]
    if not made:
        return
    fold_shapes(model)
    saved = before - len(model.graph)
    description = f"{saved} nodes removed: what they compute is the same for every image"
    yield Change(rewrite=REPEATED.name, place=made[0], description=description)


def _read_ones(found: dict[ir.Value, Repeated]) -> list[tuple[ir.Value, Repeated]]:
    """The values to write as constants: what reads them is not written itself. In the order of the graph."""
    covered: set[ir.Value] = set()
    written: set[ir.Value] = set()
    for value, one in reversed(found.items()):
        readers = [reader for reader in value.consumers() if reader.op_type != "Shape"]
        needed = value.is_graph_output() or not all(covered.issuperset(reader.outputs) for reader in readers)
        if needed and not _is_writable(value, one):
            continue
        covered.add(value)
        if needed and not _is_simple(value):
            written.add(value)
    return [(value, one) for value, one in found.items() if value in written]


def _is_writable(value: ir.Value, one: Repeated) -> bool:
    """Whether a value has dynamic sizes, and a constant no larger than those that it is computed from.

    See `repaconv.graph.shape_folding` for the second rule.
    """
    small = one.numbers.size <= max(sum(one.sources.values()), ALWAYS_WRITTEN)
    return small and any(map(is_dynamic, sizes(value) or ()))


def _is_simple(value: ir.Value) -> bool:
    """Whether a value is already written as a constant that is repeated."""
    repetition = made_by(value, "Expand")
    return made_by(value, "ConstantOfShape") is not None or (
        repetition is not None and is_constant(repetition.inputs[0])
    )


def _write(model: ir.Model, writer: SizeWriter, value: ir.Value, one: Repeated) -> bool:
    """Write a value as an Expand of a constant; False if a size does not follow from those of the graph's inputs."""
    node, shape = value.producer(), sizes(value)
    target = writer.written_before(node, [*shape]) if node is not None and shape is not None else None
    if node is None or target is None:
        return False
    write = Writer(model, node)
    new = write("Expand", write.exactly(one.numbers), target)
    set_shape(new, shape, value)
    write.replace(value, new)
    repetition = new.producer()
    assert repetition is not None
    read_past_expand(repetition)
    return True


REPEATED = Rewrite(
    "repeated", "what is computed of constants and dynamic sizes alone, and is the same along each dynamic axis", apply
)

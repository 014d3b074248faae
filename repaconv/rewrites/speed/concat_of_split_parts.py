"""concat-parts: let a Concat read the parts of a Split instead of the whole value that the Split reads.

concat(x, ...) = concat(x_1, x_2, ..., ...),    x_1, x_2, ... = split(x)

OpenVINO splits without copying if only the parts of a value are read, and concatenates parts where they lie. A reader
of the whole value makes it copy every part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer, attribute, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _read_parts(model: ir.Model) -> Iterator[Change]:
    for split in nodes_of(model, "Split"):
        whole, rank = split.inputs[0], rank_of(split.inputs[0])
        parts = [part for part in split.outputs if part.name]
        if whole is None or not rank or len(parts) < len(split.outputs):
            continue
        axis = attribute(split, "axis", 0) % rank
        for reader in dict.fromkeys(whole.consumers()):
            if reader.op_type != "Concat" or reader.domain or reader.graph is not split.graph:
                continue
            if attribute(reader, "axis", 0) % rank != axis:
                continue
            inputs = [part for given in reader.inputs for part in (parts if given is whole else [given])]
            write, out = Writer(model, reader), reader.outputs[0]
            joined = write("Concat", *inputs, axis=attribute(reader, "axis", 0))
            joined.shape = out.shape
            write.replace(out, joined)
            yield Change(
                rewrite="concat-parts", place=reader.name or "", description=f"{len(parts)} parts of {whole.name}"
            )


CONCAT_PARTS = Rewrite(
    "concat-parts",
    "a Concat of a value that a Split along the same axis splits as well",
    _read_parts,
    order=99,
    keeps=True,
)
"""Last: after it, `conv-each` would find a Split that a Concat reads as well."""

"""Handle graphs apart from their large weights.

ONNX's tools copy a graph several times, but need only the shapes of weights: they run on copies without them. Protobuf
takes three times a graph's size to serialize it: files are written weight by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused
from repaconv.graph.onnx_files import all_graphs, dims_of, names_read, opset_of
from repaconv.graph.operator_schemas import output_types

if TYPE_CHECKING:
    import onnx

EXTERNAL_LOCATION = "given apart"
"""Location of a weight that is marked as external."""
MOST_KEPT_ENTRIES = 1024
"""Maximum number of entries of a weight that stays; small ones may be shapes."""
ONE_FILE_BYTES = 2 * 1024**3
"""More bytes than one ONNX file can have."""
PAGE_BYTES = 4096
"""Bytes of a page of memory: where a weight begins in a file, so that it can be mapped alone."""


def infer_shapes(model: onnx.ModelProto) -> None:
    """Run ONNX's shape inference and record the shapes of all values, in place."""
    import onnx

    found = onnx.shape_inference.infer_shapes(weights_as_inputs(model)).graph
    for mine, theirs in zip(model.graph.output, found.output, strict=True):
        mine.CopyFrom(theirs)
    del model.graph.value_info[:], model.graph.node[:]  # nodes too: their subgraphs have inferred shapes
    model.graph.value_info.extend(found.value_info)
    model.graph.node.extend(found.node)


def correct_shapes(model: onnx.ModelProto) -> None:
    """Replace declared shapes of values and outputs that contradict those that follow from the inputs, in place.

    If the batch size of a graph's input was edited, the declared shapes of all other values may still have the old
    one. Runtimes ignore these shapes.
    """
    bare = _without_declared_shapes(model)
    inferred = {value.name: value.type.tensor_type for value in _inferred(bare)}
    dynamic = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim} - {""}
    for value in (*model.graph.value_info, *model.graph.output):
        right = inferred.get(value.name)
        if right is not None and _contradicts(value.type.tensor_type, right, dynamic):
            value.type.tensor_type.shape.CopyFrom(right.shape)
    _clear_wrong_inner_shapes(model, bare)


def shapes_from_inputs(model: onnx.ModelProto) -> dict[str, tuple[int | str | None, ...]]:
    """Return the shapes of all values that follow from those of inputs and weights, whatever the file declares.

    A dynamic dimension has the name that it has in an input; one that ONNX makes up a name for has none.
    """
    bare = _without_declared_shapes(model)
    named = {dim for value in bare.graph.input for dim in dims_of(value)}
    inferred = (value for value in (*bare.graph.input, *_inferred(bare)) if value.type.tensor_type.HasField("shape"))
    return {weight.name: tuple(weight.dims) for weight in bare.graph.initializer} | {
        value.name: tuple(dim if isinstance(dim, int) or dim in named else None for dim in dims_of(value))
        for value in inferred
    }


def inferred_element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element types of inputs and weights, and of the values whose types follow from them.

    ONNX infers none of some operators that it defines by others, such as GroupNormalization: those are of the schema.
    """
    bare, opset = weights_as_inputs(model), opset_of(model)
    found = {weight.name: weight.data_type for weight in bare.graph.initializer}
    values = ((value.name, value.type.tensor_type.elem_type) for value in (*bare.graph.input, *_inferred(bare)))
    found |= {name: kind for name, kind in values if kind}
    for node in bare.graph.node:
        for name, kind in output_types(node, found, opset).items():
            found.setdefault(name, kind)
    return found


def _without_declared_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph as `weights_as_inputs` copies it, without the shapes that it declares of values and outputs."""
    bare = weights_as_inputs(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return bare


def _inferred(bare: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Values and outputs of a graph with the types and shapes that ONNX infers of them."""
    import onnx

    found = onnx.shape_inference.infer_shapes(bare).graph
    yield from (*found.value_info, *found.output)


def _clear_wrong_inner_shapes(model: onnx.ModelProto, bare: onnx.ModelProto) -> None:
    """Clear the shapes that branches and loop bodies declare, in place, if with them ONNX finds a contradiction.

    Converters declare numbers as rows of one number and the other way round; runtimes ignore that, too.
    """
    import onnx

    *inner, _whole = all_graphs(model.graph)
    if not inner:
        return
    try:
        onnx.shape_inference.infer_shapes(bare, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        for value in (value for graph in inner for value in (*graph.value_info, *graph.output)):
            value.type.tensor_type.ClearField("shape")


def _contradicts(declared: onnx.TypeProto.Tensor, inferred: onnx.TypeProto.Tensor, dynamic: Collection[str]) -> bool:
    """Whether a declared shape is of another rank than the inferred one, or has another size, or any size where that
    has a dynamic dimension of an input. Other names are those of sizes that ONNX does not know."""
    if not (declared.HasField("shape") and inferred.HasField("shape")):
        return False
    one, other = declared.shape.dim, inferred.shape.dim
    return len(one) != len(other) or any(
        a.HasField("dim_value") and (b.dim_param in dynamic or (b.HasField("dim_value") and b.dim_value != a.dim_value))
        for a, b in zip(one, other, strict=True)
    )


def embed_sparse_weights(model: onnx.ModelProto) -> None:
    """Write sparse weights as dense ones, in place: ONNX's own shape inference does not know them."""
    import numpy as np
    from onnx import numpy_helper

    for sparse in model.graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        places = tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dense.shape)
        dense[places] = values
        model.graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    del model.graph.sparse_initializer[:]


def check(model: onnx.ModelProto, *, full: bool = False) -> None:
    """Run ONNX's checker on a graph and all its weights; ``full`` adds strict shape inference.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: If it is not valid.
    """
    import onnx

    for weight in model.graph.initializer:
        if _is_large(weight):
            onnx.checker.check_tensor(weight)
    bare = weights_as_inputs(model)
    shaped = [
        value for value in bare.graph.output if value.type.WhichOneof("value") != "tensor_type" or _has_rank(value)
    ]
    del bare.graph.output[:]
    bare.graph.output.extend(shaped)  # the checker wants a rank, which an output may have at run time only
    for node in bare.graph.node:
        if node.op_type == "MeanVarianceNormalization" and not node.attribute:  # ONNX infers nothing with the default
            node.attribute.append(onnx.helper.make_attribute("axes", [0, 2, 3]))
    onnx.checker.check_model(bare, full_check=full)


def _has_rank(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


Numbers = Mapping[str, Callable[[], NDArray[Any]]]
"""Large weights by name: functions that return their numbers, so that the numbers of one weight are held at a time."""


def split_off_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Numbers]:
    """Split a graph into one without its large weights of plain types, and these weights."""
    from onnx import numpy_helper

    bare, large = mark_as_external(model)
    return bare, {name: partial(numpy_helper.to_array, weight) for name, weight in large.items()}


def bytes_of(bare: onnx.ModelProto, weights: Numbers) -> int:
    """Return how many bytes the weights of a graph take that are marked as external."""
    import onnx

    types = {
        weight.name: (weight.data_type, weight.dims) for weight in bare.graph.initializer if weight.name in weights
    }
    return sum(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize * prod(dims) for kind, dims in types.values())


def mark_as_external(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Copy a graph with its large weights of plain types marked as external, and return these as the graph holds them.

    Weights that nothing reads stay, since ONNX Runtime drops them before it looks for them.
    """
    read = set(_names_read(model.graph))
    weights_read = (weight for weight in model.graph.initializer if weight.name in read)
    large = {weight.name: weight for weight in weights_read if _is_large(weight) and _is_plain(weight)}
    weights = (_as_external(weight) if weight.name in large else weight for weight in model.graph.initializer)
    return with_initializers(model, weights), large


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Names that the nodes of a graph and of its subgraphs read, and those of its outputs."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from names_read(node)


def _is_plain(weight: onnx.TensorProto) -> bool:
    """Return whether a weight is embedded in the graph and has a NumPy type."""
    import onnx

    kinds = onnx.TensorProto
    return weight.data_location != kinds.EXTERNAL and weight.data_type in (kinds.FLOAT, kinds.DOUBLE, kinds.INT64)


def _as_external(weight: onnx.TensorProto) -> onnx.TensorProto:
    """Return a weight that is marked as external, without its numbers."""
    return _marked(weight.name, weight.dims, weight.data_type)


def external_weight(name: str, numbers: NDArray[Any]) -> onnx.TensorProto:
    """Return a weight of these numbers that is marked as external, without them."""
    import onnx

    return _marked(name, numbers.shape, onnx.helper.np_dtype_to_tensor_dtype(numbers.dtype))


def _marked(name: str, dims: Sequence[int], kind: int) -> onnx.TensorProto:
    import onnx

    found = onnx.TensorProto(name=name, dims=dims, data_type=kind, data_location=onnx.TensorProto.EXTERNAL)
    found.external_data.add(key="location", value=EXTERNAL_LOCATION)
    return found


def refer_to_file(bare: onnx.ModelProto, weights: Numbers, path: Path) -> onnx.ModelProto:
    """Write the weights of a graph that are marked as external to a file; return the graph with their places in it."""
    found = with_initializers(bare, bare.graph.initializer)
    with path.open("wb") as file:
        for weight in found.graph.initializer:
            if weight.name not in weights:
                continue
            array = np.ascontiguousarray(weights[weight.name]())
            if array.nbytes:
                file.seek(-(-file.tell() // PAGE_BYTES) * PAGE_BYTES)
            del weight.external_data[:]
            for key, place in (("location", path.name), ("offset", file.tell()), ("length", array.nbytes)):
                weight.external_data.add(key=key, value=str(place))
            file.write(array.data)
    return found


def with_initializers(model: onnx.ModelProto, weights: Iterable[onnx.TensorProto]) -> onnx.ModelProto:
    """Copy a model, with these weights in place of its own."""
    import onnx

    found = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _set(found, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _set(found.graph, field.name, value)
    found.graph.initializer.extend(weights)
    return found


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph to a file, the same bytes as ``SerializeToString(deterministic=True)``, one weight at a time.

    Raises:
        Refused: If it is larger than one ONNX file may be.
    """
    sizes = [weight.ByteSize() for weight in model.graph.initializer]
    if sum(sizes) >= ONE_FILE_BYTES:
        raise too_large(f"the graph for {path.name}")
    with path.open("wb") as file:
        for field, value in model.ListFields():
            if field.name != "graph":
                file.write(_serialized(model, field.name, value))
                continue
            parts = {
                part.name: b"" if part.name == "initializer" else _serialized(value, part.name, content)
                for part, content in value.ListFields()
            }
            starts = [_start_of(_INITIALIZER, size) for size in sizes]
            file.write(_start_of(_GRAPH, sum(map(len, (*parts.values(), *starts))) + sum(sizes)))
            for name, content in parts.items():
                file.write(content)
                for start, weight in zip(starts, value.initializer, strict=True) if name == "initializer" else ():
                    file.write(start)
                    file.write(weight.SerializeToString(deterministic=True))


def too_large(graph: str) -> Refused:
    """The refusal of a graph that one ONNX file cannot hold."""
    return Refused(
        f"{graph} holds more than 2 GiB, which is more than one ONNX file can.",
        hint="Fold its checkpoint, if there is one: repaconv fold ckpt.pth, then export.",
        code="onnx.too-large",
    )


_GRAPH, _INITIALIZER = 7, 5
"""Numbers of the fields in onnx.proto: a model's graph, and a graph's weights."""


def _start_of(field: int, size: int) -> bytes:
    """The bytes before a message of a size in a protobuf file: the field's number and type, and the size."""
    found = bytearray([field << 3 | 2])
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes([*found, size])


def _serialized(message: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> bytes:
    """One field of a message, serialized."""
    alone = type(message)()
    _set(alone, name, value)
    return bytes(alone.SerializeToString(deterministic=True))


def _set(message: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    held = getattr(message, name)
    if hasattr(held, "MergeFrom"):
        held.MergeFrom(value)
    else:
        setattr(message, name, value)


def weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a graph with its large weights turned into inputs, which have their shapes but no numbers."""
    import onnx

    found = with_initializers(model, (weight for weight in model.graph.initializer if not _is_large(weight)))
    given = {value.name for value in model.graph.input}
    found.graph.input.extend(
        onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in model.graph.initializer
        if _is_large(weight) and weight.name not in given
    )
    return found


def _is_large(weight: onnx.TensorProto) -> bool:
    return bool(prod(weight.dims) > MOST_KEPT_ENTRIES)

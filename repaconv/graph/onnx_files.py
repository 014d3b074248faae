"""Read ONNX files without running them: metadata, external weights, node names, and FLOPs of a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused, first_line, unreadable
from repaconv.core.files import once_per_content
from repaconv.graph.operator_facts import DEFAULT_DOMAIN, FLOATS, QUANTIZING, RECURRENT_GATES

if TYPE_CHECKING:
    import onnx

BELOW_ONE_BYTE = (21, 22, 23, 25, 26)
"""ONNX's element types of 4 and 2 bits, several of which share a byte."""


def is_graph(path: Path) -> bool:
    """Return whether a file is an ONNX graph, by its suffix or by its first bytes (IR version, producer name)."""
    if path.suffix == ".onnx":
        return True
    try:
        if not path.is_file():  # opening a pipe waits for a writer
            return False
        with path.open("rb") as file:
            head = file.read(3)
    except (OSError, ValueError):
        return False
    return len(head) == 3 and head[0] == 0x08 and 3 <= head[1] <= 20 and head[2] == 0x12


def read_graph(path: Path) -> onnx.ModelProto:
    """Read a graph without external weights.

    Raises:
        Refused: If it is not an ONNX file.
    """
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {error.strerror}.",
            hint="Check its path.",
            code="onnx.unreadable",
        ) from error
    except Exception as error:  # protobuf's exception class depends on its implementation
        raise _unreadable(path, first_line(error)) from error
    if (not model.graph.node and not model.opset_import) or not _names_are_text(model):
        raise _unreadable(path)
    clear_dynamic_sizes(model)
    sort_nodes(model)
    shorten_default_domain(model)
    name_graphs(model)
    return model


def _unreadable(path: Path, why: str = "") -> Refused:
    """The error for a file that is no ONNX, with the reason if it is known, and what to do by its first bytes."""
    with path.open("rb") as file:
        head = file.read(2)
    if head in (b"PK", b"\x80\x02"):
        return Refused(
            f"{path} is not an ONNX file: it is a zip archive or a pickle, as torch.save writes them.",
            hint="If it is a checkpoint, rename it to .pt and fold that.",
            code="onnx.unreadable",
        )
    why = why if head else "it is empty"
    return Refused(
        f"{path} is not an ONNX file{': ' if why else ''}{why}.",
        hint="It is damaged or incomplete, or no exporter wrote it: copy or export it again.",
        code="onnx.unreadable",
    )


def clear_dynamic_sizes(model: onnx.ModelProto) -> None:
    """Clear what some exporters write for a dynamic dimension, in place: a negative number or a question mark."""
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0 or dim.dim_param in ("?", "-1"):
                dim.Clear()


def shorten_default_domain(model: onnx.ModelProto) -> None:
    """Write the domain of ONNX's own operators as an empty string wherever a file writes it out, in place.

    Runtimes take both; ONNX's checker and its schemas know the empty string only.
    """
    for whole in (model, *model.functions):
        for entry in whole.opset_import:
            entry.domain = "" if entry.domain in DEFAULT_DOMAIN else entry.domain
    for whole in (model.graph, *model.functions):
        for part in all_graphs(whole):
            for node in part.node:
                if node.domain in DEFAULT_DOMAIN:
                    node.ClearField("domain")


def name_graphs(model: onnx.ModelProto) -> None:
    """Name graphs and subgraphs without a name, in place: runtimes take them, but ONNX's checker does not."""
    for part in all_graphs(model.graph):
        part.name = part.name or "graph"


def sort_nodes(model: onnx.ModelProto) -> None:
    """Move each node after those whose outputs it reads, in place, as ONNX requires; sorted graphs are not changed.

    ONNX Runtime loads graphs in any order, so that tools write them. Where nodes read each other in a circle, the order
    remains.
    """
    for part in all_graphs(model.graph):
        made_by = {name: place for place, node in enumerate(part.node) for name in node.output if name}
        after = {
            place: {made_by[name] for name in names_read(node) if name in made_by}
            for place, node in enumerate(part.node)
        }
        if all(place > first for place, before in after.items() for first in before):
            continue
        with suppress(CycleError):
            nodes = [part.node[place] for place in TopologicalSorter(after).static_order()]
            del part.node[:]
            part.node.extend(nodes)


def spell_out_erfc(model: onnx.ModelProto) -> None:
    """Write erfc(x) as 1 - erf(x), in place.

    tf2onnx keeps TensorFlow's Erfc, of which Keras makes GELU, as a node of ONNX's own domain. ONNX has no such
    operator, and no runtime loads it. A value whose type is missing from the file is taken to have that of the weights.
    """
    from onnx import TensorProto, helper

    graphs = list(all_graphs(model.graph))
    if all(node.op_type != "Erfc" for part in graphs for node in part.node):
        return
    names = NewNames(model.graph)
    values = [value for part in graphs for value in (*part.input, *part.value_info)]
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    stored = [weight.data_type for weight in tensors_of(model.graph)]
    usual = next((kind for kind in (*stored, *kinds.values()) if kind in FLOATS), TensorProto.FLOAT)
    for part in graphs:
        nodes = list(part.node)
        del part.node[:]
        for node in nodes:
            if node.op_type != "Erfc" or node.domain or len(node.input) != 1:
                part.node.append(node)
                continue
            erf, one = (names.value(f"{node.output[0]}/{name}") for name in ("erf", "one"))
            part.initializer.append(helper.make_tensor(one, kinds.get(node.input[0]) or usual, [], [1.0]))
            part.node.append(helper.make_node("Erf", node.input, [erf], name=names.node(f"{node.name}/Erf")))
            part.node.append(helper.make_node("Sub", [one, erf], node.output, name=node.name))


def _names_are_text(model: onnx.ModelProto) -> bool:
    """Return whether all names are valid text; protobuf returns invalid text as bytes."""
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    names = [text for node in graph.node for text in (node.op_type, node.domain, node.name, *node.input, *node.output)]
    names += [*(value.name for value in values), *(entry.domain for entry in model.opset_import)]
    names += [entry.name for node in graph.node for entry in node.attribute]
    sized = (value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output, *graph.value_info))
    names += [dim.dim_param for dims in sized for dim in dims]
    names += [text for entry in model.metadata_props for text in (entry.key, entry.value)]
    return all(isinstance(name, str) for name in (*names, model.producer_name, model.producer_version, graph.name))


@once_per_content
def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a graph.

    Raises:
        Refused: If it is not an ONNX file.
    """
    return {entry.key: entry.value for entry in read_graph(path).metadata_props}


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset of ONNX's default domain; 0 if the graph does not import it."""
    return next((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAIN), 0)


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return a graph's initializers and the tensors of its Constant nodes, by name."""
    found = {weight.name: weight for weight in graph.initializer}
    held = (node for node in graph.node if node.op_type == "Constant" and node.attribute)
    return found | {node.output[0]: node.attribute[0].t for node in held if node.attribute[0].HasField("t")}


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...]:
    """Return the dimensions of a tensor: numbers, or names of dynamic ones; None for one without a name."""
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims)


def split_evenly(length: int, count: int) -> list[int] | None:
    """Return the lengths of a Split's parts by ``num_outputs``: ceil(length / count), with a smaller last one.

    None if the last part would be empty, which no runtime accepts.
    """
    each = -(-length // count)
    last = length - (count - 1) * each
    return [each] * (count - 1) + [last] if last > 0 else None


def tensors_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """Yield the weights and constants of a graph or function, including those of its subgraphs."""
    yield from getattr(graph, "initializer", ())
    for sparse in getattr(graph, "sparse_initializer", ()):
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for entry in node.attribute:
            yield from (*([entry.t] if entry.HasField("t") else []), *entry.tensors)
        for inner in subgraphs_of(node):
            yield from tensors_of(inner)


def bytes_of(tensor: onnx.TensorProto) -> int | None:
    """Return how many bytes its shape and type take; None if the type is unknown, or smaller than a byte."""
    from onnx import helper

    if tensor.data_type not in helper.get_all_tensor_dtypes() or tensor.data_type in BELOW_ONE_BYTE:
        return None
    return int(prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def external_files(model: onnx.ModelProto) -> dict[str, int]:
    """Return the external weight files, and how many bytes each needs, including those of subgraphs and functions."""
    needed: dict[str, int] = {}
    for tensor in (tensor for whole in (model.graph, *model.functions) for tensor in tensors_of(whole)):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in entries:
            begin, length = (_count(entries.get(key, "")) for key in ("offset", "length"))
            end = (begin or 0) + ((bytes_of(tensor) or 0) if length is None else length)
            needed[entries["location"]] = max(needed.get(entries["location"], 0), end)
    return dict(sorted(needed.items()))


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


@once_per_content
def external_files_of(path: Path) -> dict[str, int]:
    """Return `external_files` of a graph's file.

    Raises:
        Refused: If it is not an ONNX file.
    """
    return external_files(read_graph(path))


def files_outside(names: Iterable[str], folder: Path) -> list[str]:
    """Return the external files that lie outside the graph's folder; symbolic links are followed."""
    home = folder.resolve()

    def inside(name: str) -> bool:
        try:
            (home / name).is_file()
            return (home / name).resolve().is_relative_to(home)
        except (ValueError, OSError):  # not a valid file name
            return False

    return [name for name in names if not inside(name)]


def require_inside(path: Path) -> None:
    """Refuse a graph with external weights outside its folder.

    Raises:
        Refused: If a file lies outside the folder (the first is named), or if it is not an ONNX file.
    """
    outside = files_outside(external_files_of(path), path.parent)
    if outside:
        raise Refused(
            f"{path} refers to weights in {outside[0]!r}, which is outside its folder.",
            hint="Put the weights in the folder of the graph. `repaconv inspect` shows what it refers to.",
            code="onnx.external",
        )


def require_external_files(path: Path) -> None:
    """Refuse a graph with external weights outside its folder, as `require_inside` does, in a missing or a short file.

    Raises:
        Refused: If there is one (the first is named), or if it is not an ONNX file.
    """
    require_inside(path)
    gone = [name for name in external_files_of(path) if not (path.parent / name).is_file()]
    if gone and not gone[0]:
        raise Refused(
            f"{path} has weights in another file, but their location does not say in which.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.external",
        )
    if gone:
        raise Refused(
            f"{path} refers to weights in {gone[0]}, which is not there.",
            hint="Put it back next to the graph.",
            code="onnx.external",
        )
    for name, needed in external_files_of(path).items():
        if (size := (path.parent / name).stat().st_size) < needed:
            raise Refused(
                f"{path} refers to weights in {name}, which has {size:,} bytes of the {needed:,} that they take.",
                hint=f"It is incomplete, or of another export: copy {name} again, or export both again.",
                code="onnx.invalid",
            )


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of a graph, the innermost first, and the graph itself."""
    for node in graph.node:
        for inner in subgraphs_of(node):
            yield from all_graphs(inner)
    yield graph


def subgraphs_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the branches or the body of a node."""
    return [inner for entry in node.attribute for inner in (*([entry.g] if entry.HasField("g") else []), *entry.graphs)]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the values of a node's attributes, by name."""
    import onnx

    return {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the values that a node reads, those of its subgraphs included."""
    yield from node.input
    for inner in subgraphs_of(node):
        yield from (value.name for value in inner.output)
        for each in inner.node:
            yield from names_read(each)


def value_names(whole: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of all values of a graph and its subgraphs."""
    for graph in all_graphs(whole):
        yield from (value.name for value in (*graph.input, *graph.initializer))
        yield from (name for node in graph.node for name in node.output)


class NewNames:
    """Names for new values and nodes that a graph and its subgraphs do not have yet."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._values = set(value_names(graph))
        self._nodes = {node.name for part in all_graphs(graph) for node in part.node}

    def value(self, name: str) -> str:
        """Return this name, or a longer one where a value has it already."""
        return _new(name, self._values)

    def node(self, name: str) -> str:
        """Return this name, or a longer one where a node has it already."""
        return _new(name, self._nodes)


def _new(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def with_node_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose nodes have names, by which layers are kept in FP32; the graph itself if all have one."""
    import onnx

    if all(node.name for node in model.graph.node):
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    names = NewNames(named.graph)
    for number, node in enumerate(named.graph.node):
        node.name = node.name or names.node(f"{node.op_type}_{number}")
    return named


def restore_names(model: onnx.ModelProto, exported: onnx.ModelProto) -> None:
    """Rename nodes that a simplifier or runtime made after the modules whose weights or inputs they compute, in place.

    All nodes are renumbered, so that names are unique. The DequantizeLinear of a weight is of the module that reads its
    output. Scales and zero points decide only for nodes without other weights.
    """
    made_in = {name: _scope(node) for node in exported.graph.node for name in node.output}
    used_in: dict[str, str] = {}
    for node in reversed(exported.graph.node):
        passes = node.op_type in QUANTIZING and any(name in used_in for name in node.output)
        reader = _scope(node) or (used_in[node.output[0]] if passes else "")
        for name in node.input if reader else ():
            used_in.setdefault(name, reader)
    weights = {weight.name: prod(weight.dims) for weight in exported.graph.initializer}
    feeds: dict[str, str] = {}
    for number, node in reversed(list(enumerate(model.graph.node))):
        same = [made_in[name] for name in node.output if name in made_in]
        own = [name for name in node.input if name in weights and name in used_in]
        own.sort(key=lambda name: weights[name] <= 1)
        known = [used_in[name] for name in own]
        following = [feeds[name] for name in node.output if name in feeds]
        module = next(iter(same or known or following), "")
        node.name = f"{module}/{node.op_type}_{number}".lstrip("/")
        feeds |= dict.fromkeys(node.input, module)


def _scope(node: onnx.NodeProto) -> str:
    return str(node.name.rpartition("/")[0])


def flops_of(operator: str, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> int:
    """Return two FLOPs per multiply-accumulate of a node's matrix products and convolutions; 0 for other operators.

    Attention has two products, of queries and keys and of weights and values; its inputs are [B, N, H e] or [B, H,
    N, e]. A recurrent layer multiplies its input [T, B, c] and its state by one matrix per gate and direction; its
    outputs are [T, D, B, h] and [D, B, h]. Scales and zero points of quantized operators are not matrices. Channels of
    a convolution's images may be first, last or in blocks.
    """
    if outputs and operator in RECURRENT_GATES and len(inputs[0]) == 3 and len(outputs[0]) in (3, 4):
        directions, width = outputs[0][-3], outputs[0][-1]
        return 2 * prod(inputs[0][:2]) * directions * RECURRENT_GATES[operator] * width * (inputs[0][-1] + width)
    matrices = [shape for shape in inputs if len(shape) >= 2]
    if outputs and len(matrices) > 1 and "Conv" in operator:
        images = inputs[0] if "Transpose" in operator else outputs[0]
        return 2 * prod(images) * prod(matrices[1][1:])
    if outputs and operator == "Attention" and len(inputs) > 1 and len(inputs[1]) in (3, 4):
        return 2 * inputs[1][-2] * (prod(inputs[0]) + prod(outputs[0]))
    if outputs and matrices and any(name in operator for name in ("MatMul", "Gemm", "FullyConnected")):
        return 2 * prod(outputs[0]) * matrices[0][-1]
    return 0

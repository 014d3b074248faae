"""Load an arbitrary ONNX model and check that it can be run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core.changed_input_files import require_unchanged, stamp_of
from repaconv.core.errors import Refused, first_line, first_names
from repaconv.core.files import require_file
from repaconv.graph.graph_without_weights import ONE_FILE_BYTES, too_large
from repaconv.graph.input_sizes_from_weights import fix_sizes_from_weights
from repaconv.graph.invalid_graphs import uncomputed_input
from repaconv.graph.onnx_files import (
    all_graphs,
    attributes_of,
    bytes_of,
    clear_dynamic_sizes,
    constants_of,
    dims_of,
    external_files_of,
    name_graphs,
    require_external_files,
    shorten_default_domain,
    sort_nodes,
    spell_out_erfc,
    tensors_of,
)
from repaconv.graph.operator_facts import (
    ARITHMETIC,
    EPSILON,
    FLOATS,
    HALVES,
)
from repaconv.graph.random_operators import random_operators

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Port

MOST_ITERATIONS = 1_000_000
"""Maximum number of iterations of a loop in a graph that is run."""
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "InstanceNormalization",
            "LayerNormalization", "GroupNormalization", "PRelu")  # fmt: skip
"""Operators whose constants are weights; those of `ARITHMETIC` are if they are several numbers, and infinity may be a
mask there. Others may read infinity on purpose: a mask, a limit."""
BIAS_INPUT = 2
"""The input of a convolution or Gemm that a mask may have been added to: minus infinity hides a channel."""
VARIANCE_INPUT = 4
"""The input of a BatchNormalization that is the variance."""
MIXED_TYPES = ("has inconsistent type", "elem type differs")
"""What ONNX's strict check says of values of two types where an operator takes one."""
UNKNOWN_OPERATOR = "No Op registered"
"""What ONNX's check says of a node of its own domain that it does not have in the opset."""
NEWER_FORMAT = "is higher than the checker's"
"""What ONNX's check says of a file of a newer IR version."""
UNSORTED_NODES = "topologically sorted"
"""What ONNX's check says of a graph with a node that reads what is not computed before it."""
WINDOWED = ("Conv", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool", "LpPool")
"""Operators of windows, which have padding and may have dilations."""


def loaded(path: Path) -> onnx.ModelProto:
    """Load an ONNX file with its weights.

    Raises:
        Refused: The file is not valid ONNX, cannot be run, refers to files outside its folder, or exceeds 2 GiB.
    """
    from onnx.inliner import inline_local_functions

    from repaconv.graph.graph_without_weights import check, correct_shapes, embed_sparse_weights, infer_shapes

    if path.is_dir():
        raise Refused(f"{path} is a folder.", hint="Give the path of the .onnx file in it.", code="onnx.missing")
    require_file(path, hint="Check the path to the graph.", code="onnx.missing")
    require_external_files(path)
    weights = [path.parent / name for name in external_files_of(path)]
    if sum(file.stat().st_size for file in (path, *weights)) >= ONE_FILE_BYTES:
        raise too_large(str(path))
    before = {file: stamp_of(file) for file in (path, *weights)}
    try:
        model = _with_weights(path)
    except Exception as error:  # the graph itself was read before
        raise Refused(
            f"the weights of {path} cannot be read: {first_line(error)}.",
            hint=f"They are damaged or incomplete: copy {', '.join(file.name for file in weights or [path])} again.",
            code="onnx.invalid",
        ) from error
    require_input_shapes(path, model)
    try:
        shorten_default_domain(model)
        sort_nodes(model)
        name_graphs(model)
        if model.functions:  # a call counts as one node, whatever it computes
            model = inline_local_functions(model)
        spell_out_erfc(model)
        clear_dynamic_sizes(model)
        embed_sparse_weights(model)
        fix_sizes_from_weights(model)
        correct_shapes(model)
        infer_shapes(model)  # outputs may lack declared shapes
        check(model)
        _require_no_bytes_left(model)
    except Exception as error:
        missing = uncomputed_input(model) if UNSORTED_NODES in str(error) else ""
        why, hint = missing or first_line(error), "Export it again; `repaconv inspect` shows what it holds."
        if missing.startswith("Clip,") and model.producer_name == "pytorch":
            hint = (
                "The optimizer of PyTorch's exporter loses the bounds of some Clips: export it again with "
                "torch.onnx.export(..., optimize=False)."
            )
        if UNKNOWN_OPERATOR in why:
            hint = (
                "This opset of ONNX has no such operator, and no runtime loads the file. If the exporter left it as "
                "its framework has it, write it with others in the network; otherwise export for a newer opset."
            )
        if NEWER_FORMAT in why:
            hint = "Its file format is newer than this onnx: update that, or write a lower model.ir_version."
        raise Refused(f"{path} is not valid ONNX: {why}.", hint=hint, code="onnx.invalid") from error
    for file, stamp in before.items():
        require_unchanged(file, stamp)
    _require_runnable(path, model)
    return model


def require_input_shapes(path: Path, model: onnx.ModelProto) -> None:
    """Refuse a graph with an input without a shape, which ONNX requires: not even its number of axes is known.

    Raises:
        Refused: ``onnx.no-shape``.
    """
    weights = {weight.name for weight in model.graph.initializer}
    for value in model.graph.input:
        kind = value.type.tensor_type
        if value.name not in weights and value.type.HasField("tensor_type") and not kind.HasField("shape"):
            raise Refused(
                f"{path} is not valid ONNX: its input {value.name} has no shape, not even a number of axes.",
                hint="Export it again with a shape for each input; sizes that vary may be names, e.g. [batch, 3, 224, "
                "224].",
                code="onnx.no-shape",
            )


def _with_weights(path: Path) -> onnx.ModelProto:
    """Load a graph with its external weights. Without a length, one ends where its shape does, as for ONNX Runtime."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_model

    model = onnx.load(path, load_external_data=False)
    for whole in (model.graph, *model.functions):
        for tensor in tensors_of(whole):
            stored, takes = {entry.key for entry in tensor.external_data}, bytes_of(tensor)
            if stored and "length" not in stored and takes is not None:
                tensor.external_data.add(key="length", value=str(takes))
    load_external_data_for_model(model, str(path.parent))
    return model


def _require_no_bytes_left(model: onnx.ModelProto) -> None:
    """Refuse a weight with more bytes than its shape takes, which ONNX's checker accepts and no runtime does.

    Raises:
        ValueError: If there is one.
    """
    for tensor in tensors_of(model.graph):
        takes = bytes_of(tensor)
        if takes is not None and len(tensor.raw_data) > takes:
            raise ValueError(f"{tensor.name} has {len(tensor.raw_data)} bytes, but its shape and type take {takes}")


def _require_runnable(path: Path, model: onnx.ModelProto) -> None:
    """Refuse a valid graph that cannot be run for a comparison.

    Raises:
        Refused: The graph has no inputs or no outputs, an input of unknown type, an output that is a map, values of
            half precision where an operator takes another type, windows with dilations that pad themselves, a loop with
            too many iterations, random numbers in its outputs, a weight with NaN or infinity, or a negative variance.
    """
    if not inputs_of(model) or not model.graph.output:
        raise Refused(
            f"{path} takes nothing, or gives nothing: there is nothing to compare by.",
            hint="Export it again, with its inputs and outputs.",
            code="onnx.invalid",
        )
    if strange := [value.name for value in model.graph.input if not _has_known_type(value)]:
        raise Refused(
            f"{path} takes {strange[0]}, which is of a type that ONNX does not know.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        )
    if maps := [value.name for value in model.graph.output if _has_map(value.type)]:
        raise Refused(
            f"{path} gives {maps[0]}, a map from classes to numbers, which is no tensor and cannot be rewritten.",
            hint="Export it with tensors only; for skl2onnx: to_onnx(model, x, options={'zipmap': False}).",
            code="onnx.map",
        )
    _require_matching_types(path, model)
    _require_specified_padding(path, model)
    _require_finite_loops(path, model)
    _require_repeatable(path, model)
    _require_finite_weights(path, model)


def _require_matching_types(path: Path, model: onnx.ModelProto) -> None:
    """Refuse a graph that mixes half precision with other types without a Cast, and so is not valid ONNX.

    Converted to float32 by `in_single`, it would be a valid graph, and another one. Operators that ONNX Runtime has no
    kernel for, or that take no half precision in the opset of the graph, are no reason to refuse it.
    """
    why = checker_error_if_unloadable(model) if _has_half_precision(model) else ""
    if any(phrase in why for phrase in MIXED_TYPES):
        raise Refused(
            f"{path} is not valid ONNX: {why}; ONNX Runtime does not load it either.",
            hint="Export it again in one precision, or with a Cast where two of them meet.",
            code="onnx.invalid",
        )


def _require_specified_padding(path: Path, model: onnx.ModelProto) -> None:
    """Refuse windows with dilations that pad themselves: ONNX Runtime pads pools as if without, and runs no Conv.

    The images that it gives are smaller than those that ONNX specifies, and that every other part of a graph expects.
    """
    for node in (node for part in all_graphs(model.graph) for node in part.node if node.op_type in WINDOWED):
        how = {} if node.domain else attributes_of(node)
        auto, steps = how.get("auto_pad", b"").decode(), how.get("dilations", ())
        if auto.startswith("SAME") and any(step != 1 for step in steps):
            raise Refused(
                f"{path} has a {node.op_type} with auto_pad={auto} and dilations, {node.output[0]}, which ONNX Runtime "
                "does not compute as ONNX specifies.",
                hint="Export it with explicit padding, which is written as pads in place of auto_pad.",
                code="onnx.auto-pad",
            )


def _require_finite_weights(path: Path, model: onnx.ModelProto) -> None:
    """Refuse weights with NaN or infinity: NaN is equal to NaN, so that a comparison would show nothing about them."""
    import numpy as np
    from onnx import numpy_helper

    weights = constants_of(model.graph)
    for node in model.graph.node:
        if node.op_type not in (*WEIGHTED, *ARITHMETIC) or node.domain:
            continue
        _require_positive_variance(path, node, weights)
        for place, name in enumerate(node.input):
            weight = weights.pop(name, None)
            if weight is None or weight.data_type not in FLOATS:  # a Constant may have no tensor, but one number
                continue
            numbers = numpy_helper.to_array(weight)
            numbers = numbers.astype(np.float32) if numbers.dtype.kind == "V" else numbers  # bfloat16
            with np.errstate(all="ignore"):
                if np.isfinite(numbers.sum(dtype=np.float64)):
                    continue  # a sum of finite float64 numbers may overflow
            hidden = np.isinf(numbers) if node.op_type in ARITHMETIC else np.isneginf(numbers) & (place == BIAS_INPUT)
            wrong = int((~np.isfinite(numbers) & ~hidden).sum())
            if wrong and (numbers.size > 1 or node.op_type not in ARITHMETIC):
                raise Refused(
                    f"{name}, a weight of {path}, has NaN or infinite values: {wrong} of {numbers.size}.",
                    hint="The training diverged or the file is damaged. Export an earlier checkpoint.",
                    code="onnx.not-finite",
                )


def _require_positive_variance(path: Path, node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Refuse a BatchNormalization whose variance is negative: its outputs are NaN, which a comparison leaves out.

    Raises:
        Refused: ``onnx.negative-variance``.
    """
    from onnx import numpy_helper

    weight = weights.get(node.input[VARIANCE_INPUT]) if node.op_type == "BatchNormalization" else None
    if weight is None or weight.data_type not in FLOATS:
        return
    epsilon = attributes_of(node).get("epsilon", EPSILON)
    if (numpy_helper.to_array(weight).astype("float64") + epsilon < 0).any():
        raise Refused(
            f"{weight.name}, a variance of {path}, has negative values.",
            hint="The file is damaged, or the inputs of its BatchNormalization are in another order: export it again.",
            code="onnx.negative-variance",
        )


def _has_map(kind: onnx.TypeProto) -> bool:
    return kind.HasField("map_type") or (kind.HasField("sequence_type") and _has_map(kind.sequence_type.elem_type))


def _require_finite_loops(path: Path, model: onnx.ModelProto) -> None:
    """Refuse loops with a constant number of iterations above `MOST_ITERATIONS`."""
    from onnx import numpy_helper

    counts = {weight.name: weight for weight in model.graph.initializer}
    for node in model.graph.node:
        count = counts.get(node.input[0]) if node.op_type == "Loop" and node.input else None
        if count is not None and (turns := int(numpy_helper.to_array(count).reshape(-1)[0])) > MOST_ITERATIONS:
            raise Refused(
                f"{path} has a loop of {turns:,} turns, and what it computes is found by running it.",
                hint="Give its loops an end that is reached.",
                code="onnx.endless",
            )


def _require_repeatable(path: Path, model: onnx.ModelProto) -> None:
    """Refuse graphs that compute something else each time they run."""
    if found := random_operators(model):
        raise Refused(
            f"{path} computes something else in every inference, because of {first_names(found, 1)}: two runs of it "
            "cannot be compared.",
            hint="Export the network in inference mode, net.eval(). If its random numbers are wanted, let it take them "
            "as an input.",
            code="onnx.random",
        )


def in_single(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a graph with half-precision values (float16, bfloat16) to float32; return any other graph itself."""
    from repaconv.graph.element_type_conversion import retyped

    return retyped(model, dict.fromkeys(HALVES, 1)) if _has_half_precision(model) else model


def _has_half_precision(model: onnx.ModelProto) -> bool:
    from repaconv.graph.element_type_conversion import element_types

    return not set(HALVES).isdisjoint(element_types(model.graph))


def checker_error(model: onnx.ModelProto) -> str:
    """Return the error of ONNX's strict check; empty if the graph passes."""
    from repaconv.graph.graph_without_weights import check

    try:
        check(model, full=True)
    except Exception as error:  # the checker raises several classes
        return first_line(error)
    return ""


def checker_error_if_unloadable(model: onnx.ModelProto) -> str:
    """The checker's error for a graph that both ONNX's checker and ONNX Runtime reject; else empty."""
    from repaconv.verification.model_runners import load_onnx

    if why := checker_error(model):
        try:
            load_onnx(model)
        except Refused:
            return why
    return ""


def inputs_of(model: onnx.ModelProto) -> tuple[Port, ...]:
    """Return the graph's inputs without weights; a dynamic dimension is given by its name, or None without a name."""
    stored = {weight.name for weight in model.graph.initializer}
    return tuple(_port(value) for value in model.graph.input if value.name not in stored)


def _has_known_type(value: onnx.ValueInfoProto) -> bool:
    import onnx

    return value.type.tensor_type.elem_type in onnx.TensorProto.DataType.values()


def _port(value: onnx.ValueInfoProto) -> Port:
    import onnx

    from repaconv.engines.contract import Port

    kind = value.type.tensor_type
    known = kind.elem_type and _has_known_type(value)
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)) if known else ""
    return Port(value.name, dims_of(value), dtype)

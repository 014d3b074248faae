"""Export torch modules to ONNX: one graph with named input and output, identical on every run and machine."""

from __future__ import annotations

import ast
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused
from repaconv.core.progress import Progress, only_errors
from repaconv.graph.graph_without_weights import ONE_FILE_BYTES
from repaconv.graph.onnx_files import opset_of
from repaconv.onnx_export.opset_lowering import lower

if TYPE_CHECKING:
    import onnx
    from torch import nn


# Exact translations of torch operators that its exporter does not support.


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the exporter's ``custom_translation_table``."""
    import torch

    return {torch.ops.aten.sort.stable: _sort_stable}


def _sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Translate a stable sort to a TopK of all entries, which keeps equal values in the order of their indices.

    torch's exporter translates the unstable sort so, and has no entry for the stable one. Source: ONNX's
    specification, TopK: "Given two equivalent values, this operator uses the indices along the axis as a
    tiebreaker. That is, the element with the lower index will appear first."
    """
    from onnxscript import opset18 as op

    if not self.shape:
        return op.Identity(self), op.Constant(value_int=0)
    count = op.Reshape(op.Gather(op.Shape(self), dim, axis=0), op.Constant(value_ints=[1]))
    return op.TopK(self, count, axis=dim, largest=descending, sorted=True)


# Export.


def load_exporter(progress: Progress, name: str = "") -> None:
    """Import the modules that torch's exporter imports at its first use, with a progress step: it takes seconds.

    Args:
        progress: See `Progress`.
        name: Goes in front of the step, e.g. ``deploy form: ``.
    """
    if not {"onnxscript", "torch._dynamo"} <= sys.modules.keys():
        progress(f"{name}load PyTorch's ONNX exporter", 0, 0)
        import onnxscript  # noqa: F401
        import torch._dynamo  # noqa: F401


# Above protobuf's limit for one message, weights are stored in an external file, except smaller ones than this.
INLINE_BYTES = 2**20
DATA = "weights.data"
# The oldest opset of the dynamo exporter; for an older one it may return a newer graph without an error.
OLDEST_EXPORTED = 18


def to_onnx(
    module: nn.Module,
    shape: tuple[int, int, int],
    *,
    output: str,
    opset: int,
    unsupported_ops: Collection[str] = (),
    batch: int | None,
    dynamic_size: bool,
    scratch: Path | None = None,
) -> onnx.ModelProto:
    """Export a module that maps [B, C, H, W] to [B, K], with torch's dynamo exporter.

    Args:
        module: A module in eval mode and float32.
        shape: One image, [C, H, W]. With ``dynamic_size``, H and W are only an example.
        output: Name of the output; the input is called ``input``.
        opset: Opset of the graph. The exporter writes 18 and newer, `lower` converts to older ones.
        unsupported_ops: Operators to expand.
        batch: A fixed batch size, or None for a dynamic dimension named ``batch``.
        dynamic_size: Whether ``height`` and ``width`` are dynamic.
        scratch: A folder for the weights of a network above 2 GiB: the graph refers to ``weights.data`` in it.

    Raises:
        Refused: If the weights do not fit into one ONNX file (2 GiB) and there is no ``scratch``, or if torch's
            exporter does not support an operator.
    """
    large = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) >= ONE_FILE_BYTES
    if large and scratch is None:
        raise Refused(
            "the weights take more than 2 GiB, which one ONNX file cannot hold.",
            hint="Export it as a run: repaconv export writes such weights to a file of their own.",
            code="export.too-large",
        )
    free = ({0: "batch"} if batch is None else {}) | ({2: "height", 3: "width"} if dynamic_size else {})
    # The exporter would take a dynamic dimension of size 1 for a constant.
    program = _traced(module, (2 if batch is None else batch, *shape), output, max(opset, OLDEST_EXPORTED), free)
    model = _named_by_module(
        _with_external_weights(program.model, scratch) if large and scratch else program.model_proto
    )
    return lower(model, opset, unsupported_ops) if opset_of(model) != opset or unsupported_ops else model


def _traced(module: nn.Module, shape: tuple[int, ...], output: str, opset: int, free: Mapping[int, str]) -> Any:
    """Run the exporter with one input of this shape; ``free`` names its dynamic axes."""
    import torch

    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                (torch.zeros(shape),),
                dynamo=True,
                opset_version=opset,
                input_names=["input"],
                output_names=[output],
                dynamic_shapes=(dict(free),) if free else None,
                custom_translation_table=translations(),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        last = [line for line in str(error).splitlines() if line.startswith("<class")]
        why = last[0].partition(">: ")[2] if last else str(error).splitlines()[0]
        raise Refused(
            f"torch does not write this form as ONNX: {why.rstrip('.')}.",
            hint="The deploy form can be written; a form of your own needs operators that torch's exporter knows.",
            code="export.operator",
        ) from error
    assert program is not None
    return program


def _with_external_weights(model: Any, folder: Path) -> onnx.ModelProto:
    """Write large weights to one external file in the folder, and refer to it."""
    import onnx
    import onnx_ir

    path = folder / "graph.onnx"
    onnx_ir.save(model, path, external_data=DATA, size_threshold_bytes=INLINE_BYTES)
    graph = onnx.load(path, load_external_data=False)
    path.unlink()
    return graph


def refer_to(model: onnx.ModelProto, data: str) -> None:
    """Set the file name of a graph's external weights, in place."""
    for weight in model.graph.initializer:
        for entry in weight.external_data:
            if entry.key == "location":
                entry.value = data


def add_metadata(model: onnx.ModelProto, entries: Mapping[str, str]) -> None:
    """Write string pairs to the file's ``metadata_props``, in place, sorted."""
    import onnx

    onnx.helper.set_model_props(model, dict(sorted(entries.items())))


def _named_by_module(model: onnx.ModelProto) -> onnx.ModelProto:
    """Name nodes after their modules, and remove stack traces, which contain paths and differ by machine."""
    for number, node in enumerate(model.graph.node):
        node.name = f"{_module_of(node)}/{node.op_type}_{number}".lstrip("/")
        del node.metadata_props[:]
        node.ClearField("doc_string")
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    model.ClearField("doc_string")
    return model


def _module_of(node: onnx.NodeProto) -> str:
    """Return the innermost module of the exporter's scopes, e.g. ``network.0.0.norm1``; the last scope is the call."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key.endswith("name_scopes")), "[]")
    return str((ast.literal_eval(scopes)[:-1] or [""])[-1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings of missing packages, and the graphs that it prints after a failure.

    Nor are graphs that it could not finish, which torch prints before another way is tried.
    """
    import torch.export._trace
    import torch.fx.graph_module

    printing = [vars(module) for module in (torch.export._trace, torch.fx.graph_module)]
    for names in printing:
        names["print"] = lambda *_, **__: None
    try:
        with only_errors("torch.onnx"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for names in printing:
            names.pop("print", None)


def operators_of(model: onnx.ModelProto) -> dict[str, int]:
    """Count the nodes of a graph by operator."""
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def check(model: onnx.ModelProto, folder: Path | None = None) -> None:
    """Check a graph against the ONNX specification, including shapes.

    Args:
        model: The graph.
        folder: The folder of its external weights, if it has any.

    Raises:
        Refused: If it is not valid, with the first line of the checker's message.
    """
    import onnx

    from repaconv.graph import graph_without_weights

    try:
        if folder is None:
            graph_without_weights.check(model, full=True)
            return
        path = folder / "checked.onnx"  # external weights are found only from a file
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(path), full_check=True)
        path.unlink()
    except Exception as error:
        raise Refused(
            f"the exported graph is not valid ONNX: {str(error).splitlines()[0]}.",
            hint="This is a defect of repaconv or of the exporter; please report it with the network's config.",
            code="export.invalid",
        ) from error

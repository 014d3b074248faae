"""Export any torch module to ONNX in float64, so that the exporter's constant folding does not round.

torch's dynamo exporter is tried first, then the TorchScript-based one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused, first_line, root_cause
from repaconv.core.temporary_folders import scratch_folder
from repaconv.onnx_export.torch_exporter import _named_by_module, _quiet, translations

if TYPE_CHECKING:
    import onnx
    from torch import nn

NEW_EXPORTER, OLD_EXPORTER = "torch's exporter", "torch's old exporter"
OPSET, OLD_OPSET = 20, 17


def network_to_onnx(
    module: nn.Module, shape: tuple[int, int, int], *, input_name: str, outputs: Sequence[str], dynamic: bool = True
) -> tuple[onnx.ModelProto, str]:
    """Export a module of images [B, C, H, W] with the first exporter that succeeds, with a dynamic batch if possible.

    A dynamic batch may be wrong: ``int(windows.shape[0] / 16)`` in a forward, as in SwinIR, becomes the 2 of the
    example. The caller has to compare at another batch size, and to export again with ``dynamic=False``.

    Args:
        module: A module in eval mode and float64.
        shape: Shape [C, H, W] of one image.
        input_name: Name of the input.
        outputs: Names of the outputs, in order.
        dynamic: Whether to try a dynamic batch; else the batch is one image.

    Returns:
        The graph in float64, and the name of the exporter.

    Raises:
        Refused: If all fail, with their messages.
    """
    failures = []
    moved = _reassigned_weight(module, shape)
    if moved:
        failures.append(f"{NEW_EXPORTER}: it would crash, because the network's forward assigns {moved}.data")
    for name, export, free, attention in (
        (NEW_EXPORTER, _new, True, nullcontext),
        (NEW_EXPORTER, _new, False, nullcontext),
        (OLD_EXPORTER, _old, True, nullcontext),
        (NEW_EXPORTER, _new, True, _decomposed_attention),
        (OLD_EXPORTER, _old, False, nullcontext),
    ):
        if (moved and name == NEW_EXPORTER) or (free and not dynamic):
            continue
        try:
            with _quiet(), attention(), _float64_numbers(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return export(module, shape, input_name, outputs, free), name
        except Exception as error:  # the exporters raise errors of many classes
            failures.append(f"{name}: {first_line(root_cause(error))}")
    raise Refused(
        f"torch does not write this network as ONNX ({'; '.join(dict.fromkeys(failures))}).",
        hint="Export it yourself, and fold the graph: repaconv fold model.onnx.",
        code="export.operator",
    )


def _reassigned_weight(module: nn.Module, shape: tuple[int, int, int]) -> str:
    """Return the first weight whose ``data`` the forward assigns, or an empty text. SPAN reparameterizes itself so.

    torch's dynamo exporter runs the forward on tensors without memory. Assigning such a tensor to a real weight
    ends the process with a segmentation fault (torch 2.13). The TorchScript-based exporter uses real tensors.
    """
    import torch

    before = {name: weight.data_ptr() for name, weight in module.named_parameters()}
    with suppress(Exception), torch.no_grad():  # the exporters report other errors
        module(_example(shape, free=True))
    return next((name for name, weight in module.named_parameters() if weight.data_ptr() != before.get(name)), "")


@contextmanager
def _decomposed_attention() -> Iterator[None]:
    """Replace scaled_dot_product_attention by products and a softmax, since the exporter accepts 4D inputs only."""
    import torch
    from torch.nn import functional

    own = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *given: Any, **how: Any) -> Any:
        if given or any(value for name, value in how.items() if name != "scale"):
            return own(query, key, value, attn_mask, *given, **how)
        scale = query.shape[-1] ** -0.5 if how.get("scale") is None else how["scale"]
        scores = query @ key.transpose(-2, -1) * scale
        if attn_mask is not None:
            masks = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if masks else scores + attn_mask
        return scores.softmax(-1) @ value

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


@contextmanager
def _float64_numbers() -> Iterator[None]:
    """Export Python numbers of a module (``x * 32**-0.5``) in float64.

    The exporter writes each as float32 whatever it multiplies, and an error of 2e-8 in one number may be any share
    of an output.
    """
    from onnxscript import ir
    from torch.onnx._internal.exporter import _building

    inside = vars(_building)
    own = inside["_determine_input_dtype"]

    def determined(param: Any, arg: Any, bound: Any) -> Any:
        found, kind = own(param, arg, bound), param.type_constraint
        guessed = kind not in bound and len(kind.allowed_types) > 1  # the type follows from the number alone
        numbers = arg if isinstance(arg, (list, tuple)) else [arg]
        double = guessed and found == ir.DataType.FLOAT and any(isinstance(number, float) for number in numbers)
        return ir.DataType.DOUBLE if double else found

    inside["_determine_input_dtype"] = determined
    try:
        yield
    finally:
        inside["_determine_input_dtype"] = own


def _example(shape: tuple[int, int, int], free: bool) -> Any:
    import torch

    return torch.zeros((2 if free else 1, *shape), dtype=torch.float64)


def _new(
    module: nn.Module, shape: tuple[int, int, int], input_name: str, outputs: Sequence[str], free: bool
) -> onnx.ModelProto:
    import torch

    for optimized in (True, False):
        program = torch.onnx.export(
            module,
            (_example(shape, free),),
            dynamo=True,
            opset_version=OPSET,
            input_names=[input_name],
            output_names=list(outputs),
            dynamic_shapes=({0: "batch"},) if free else None,
            optimize=optimized,
            custom_translation_table=translations(),
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
        if _has_all_inputs(model):
            break
    return _named_by_module(model)


def _has_all_inputs(model: onnx.ModelProto) -> bool:
    """Return whether all node inputs exist. The exporter's optimizer merges two Clips into one and loses its bounds."""
    graph = model.graph
    there = {"", *(port.name for port in graph.input), *(weight.name for weight in graph.initializer)}
    there |= {name for node in graph.node for name in node.output}
    return there.issuperset(name for node in graph.node for name in node.input)


def _old(
    module: nn.Module, shape: tuple[int, int, int], input_name: str, outputs: Sequence[str], free: bool
) -> onnx.ModelProto:
    import onnx
    import torch

    with scratch_folder() as folder:
        path = folder / "network.onnx"
        torch.onnx.export(
            module,
            (_example(shape, free),),
            str(path),
            dynamo=False,
            opset_version=OLD_OPSET,
            input_names=[input_name],
            output_names=list(outputs),
            dynamic_axes={name: {0: "batch"} for name in (input_name, *outputs)} if free else None,
        )
        model = onnx.shape_inference.infer_shapes(onnx.load(path))
    for number, node in enumerate(model.graph.node):  # /layer1/layer1.0/conv1/Conv: the module is second to last
        scopes = [part for part in node.name.split("/") if part]
        node.name = f"{scopes[-2] if len(scopes) > 1 else ''}/{node.op_type}_{number}".lstrip("/")
    return model

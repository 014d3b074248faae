"""Count the parameters and multiply-accumulates (MACs) of a network, from its shapes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from repaconv.results import Cost, FoldedLayer

# Operators that multiply by weights. nn.Linear becomes addmm or mm; bmm and attention multiply two activations.
_OF_LAYERS = ("addmm", "mm", "convolution", "_convolution")
# Not counted and of the same shape as their input; on the meta device they would take most of the time.
_SKIPPED = frozenset({F.batch_norm, F.gelu, F.group_norm, F.instance_norm, F.layer_norm, F.relu})


class _Skipping(TorchFunctionMode):
    """Skips operators that are not counted: norms and activations return their input, linear layers omit the bias."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        if given and function in _SKIPPED:
            return given[0]
        if function is F.linear and not named:
            return function(*given[:2])
        return function(*given, **(named or {}))


def cost_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Cost:
    """Count the parameters and MACs of a network for one input, e.g. an image [C, H, W], on the meta device.

    MACs are those of convolutions and matrix products, as torch's FlopCounterMode counts them (2 FLOPs each). Norms,
    activations and sums are not counted. ``layer_macs`` are those with weights, without products of two activations
    such as attention's scores.
    """
    module, products = _run(build, input_shape)
    return _counted(products, module, "")


class NormModules(NamedTuple):
    """The modules of a network that normalize by statistics of their input, and those that scale or shift after it."""

    names: tuple[str, ...]
    affine: tuple[str, ...]


_OF_THE_INPUT = frozenset({F.group_norm, F.instance_norm, F.layer_norm, F.rms_norm})


class _Watching(_Skipping):
    """Notes in which module a norm is called, and whether with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.names: dict[str, None] = {}
        self.affine: dict[str, None] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        parameters = any(isinstance(each, nn.Parameter) for each in (*given, *(named or {}).values()))
        if function in _OF_THE_INPUT:
            self.names[self.inside[-1]] = None
        if function in (*_OF_THE_INPUT, F.batch_norm) and parameters:
            self.affine[self.inside[-1]] = None
        return super().__torch_function__(function, types, given, named)


def norms_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> NormModules:
    """The norms that run for one input, by the names of their modules, on the meta device."""
    watching = _Watching()
    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, name=name: watching.inside.append(name))
            part.register_forward_hook(lambda *_: watching.inside.pop() and None)
        with _Shaping(), watching:  # type: ignore[no-untyped-call]
            module(torch.empty(1, *input_shape))
    return NormModules(tuple(watching.names), tuple(watching.affine))


def costs_by_block(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> dict[str, Cost]:
    """Count the parameters and MACs of every block, by name, and of the whole network, whose name is empty.

    Blocks are numbered modules with a feed-forward network (``mlp``), and modules with the attribute ``counted``.
    """
    module, products = _run(build, input_shape)
    return {
        name: _counted(products, part, name)
        for name, part in module.named_modules()
        if not name or getattr(part, "counted", False) or (name.rpartition(".")[2].isdigit() and _holds_mlp(part))
    }


def layers_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> dict[str, FoldedLayer]:
    """List every layer that has parameters, by name, with its parameters and its MACs for one input.

    Parameters of a module that contains other modules are listed as layers of their own. The MACs of a layer are None
    if it is never called because another module reads its weights.
    """
    module, products = _run(build, input_shape)
    found = {}
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        if own and any(True for _ in part.children()):
            for key, parameter in own.items():
                at = f"{name}.{key}" if name else key
                found[at] = FoldedLayer(name=at, kind=FoldedLayer.PARAMETER, parameters=parameter.numel())
        elif own:
            macs = _counted(products, part, name).macs if name in products else None
            count = sum(parameter.numel() for parameter in own.values())
            found[name] = FoldedLayer(name=name, kind=type(part).__name__, parameters=count, macs=macs)
    return found


Products = dict[str, dict[Any, int]]
"""FLOPs by operator, for each module that ran, by name; the network's own name is empty."""


def _run(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> tuple[nn.Module, Products]:
    """Run the module on one input; return it with the FLOPs of its products."""
    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with _Counting(module) as counting, _Skipping():
            module(torch.empty(1, *input_shape))
    return module, counting.products


class _Shaping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes shapes on the meta device by `_RESULTS`, since torch's own functions import its compiler (1.3 s)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not import the compiler to be left out of what it compiles."""
        return False

    def __torch_dispatch__(
        self, function: Any, _types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        shaped = _RESULTS[function](*given) if function in _RESULTS and not named else None
        if shaped is not None:
            return shaped
        with self:  # a composite operator has parts
            parts = function.decompose(*given, **(named or {}))
        return function(*given, **(named or {})) if parts is NotImplemented else parts


class _Counting(_Shaping):
    """Counts FLOPs by torch's own formulas, as its FlopCounterMode does."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Products = {}
        self.running: dict[str, None] = {}
        for name, part in network.named_modules():
            part.register_forward_pre_hook(lambda *_, name=name: self._begin(name))
            part.register_forward_hook(lambda *_, name=name: self.running.pop(name, None))

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        found = super().__torch_dispatch__(function, types, given, named)
        formula = flop_registry.get(function.overloadpacket)
        if formula is None:
            return found
        flops = formula(*given, **(named or {}), out_val=found)
        for name in self.running:
            of_module = self.products[name]
            of_module[function.overloadpacket] = of_module.get(function.overloadpacket, 0) + flops
        return found

    def _begin(self, name: str) -> None:
        self.running[name] = None
        self.products.setdefault(name, {})


# torch computes the shapes of these on the meta device in Python, which takes more time than all else and imports its
# compiler. Each function returns a tensor of the shape, type and strides of the result, or None where that is not easy.


def _plain(*tensors: Any) -> bool:
    return all(isinstance(each, torch.Tensor) and each.is_floating_point() and each.is_contiguous() for each in tensors)


def _unary(first: torch.Tensor, *_: Any) -> torch.Tensor | None:
    return first if _plain(first) else None


def _elementwise(first: Any, *second: Any) -> torch.Tensor:
    return _broadcast((first, *second), torch.result_type(first, *(second or (first,))))


def _of_floats(first: Any, *second: Any) -> torch.Tensor | None:
    found = _elementwise(first, *second)
    return found if found.is_floating_point() else None


def _compared(first: Any, second: Any) -> torch.Tensor:
    return _broadcast((first, second), torch.bool)


def _broadcast(operands: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor like the result of an operator that computes element by element."""
    given = [each for each in operands if isinstance(each, torch.Tensor)]
    tensors: Sequence[torch.Tensor] = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
    shape = tensors[0].shape
    axes = _axes_by_strides(shape, [each.stride() for each in tensors])
    found = tensors[0].new_empty([shape[axis] for axis in axes], dtype=dtype)
    return found.permute([axes.index(axis) for axis in range(len(axes))])


def _axes_by_strides(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the axes of an elementwise result, the one with the largest stride first, as torch's TensorIterator does.

    Two axes are ordered by the first operand in which neither is broadcast.
    """
    axes = list(range(len(shape)))[::-1]
    for end in range(1, len(axes)):
        at = end
        for before in reversed(range(end)):
            inner, outer = axes[before], axes[at]
            pairs = ((each[inner], each[outer]) for each in strides if each[inner] and each[outer])
            longer = max(shape[inner] - shape[outer], 0)
            difference = next((order for a, b in pairs if (order := a - b or longer)), 0)
            if difference > 0:
                axes[before], axes[at], at = outer, inner, before
            elif difference < 0:
                break
    return axes[::-1]


def _reduced(first: torch.Tensor, dims: Any, keep: bool = False) -> torch.Tensor | None:
    if not first.is_floating_point() or not dims:
        return None
    gone = {dim % first.dim() for dim in dims}
    sizes = [1 if dim in gone else size for dim, size in enumerate(first.shape) if keep or dim not in gone]
    return first.new_empty(sizes)


def _vector_norm(first: torch.Tensor, _order: Any = 2, dims: Any = None, keep: bool = False) -> torch.Tensor | None:
    return _reduced(first, dims, keep)


def _joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    rank = parts[0].dim()
    if any((each.dim(), each.dtype) != (rank, parts[0].dtype) for each in parts):
        return None
    if rank > 3 and any(not each.is_contiguous() and each.stride(1) == min(each.stride()) for each in parts):
        return None  # the result may have the channels last, as its parts
    sizes, dim = list(parts[0].shape), dim % rank
    if any([*each.shape[:dim], *each.shape[dim + 1 :]] != [*sizes[:dim], *sizes[dim + 1 :]] for each in parts):
        return None
    sizes[dim] = sum(each.shape[dim] for each in parts)
    return parts[0].new_empty(sizes)


def _stacked(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    return _joined([each.unsqueeze(dim) for each in parts], dim)


def _multiplied(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    if first.shape[-1] != second.shape[-2] or first.shape[:-2] != second.shape[:-2] or first.dtype != second.dtype:
        return None
    return first.new_empty([*first.shape[:-1], second.shape[-1]])


def _convolved(x: torch.Tensor, weight: torch.Tensor, _bias: Any, *how: Any) -> torch.Tensor | None:
    stride, padding, dilation, transposed, _, groups = how
    if transposed or not _plain(x, weight) or x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        return None
    along = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = [(size + 2 * pad - step * (kernel - 1) - 1) // every + 1 for size, kernel, every, pad, step in along]
    return x.new_empty([x.shape[0], weight.shape[0], *sizes]) if min(sizes) > 0 else None


_ATEN = torch.ops.aten
_RESULTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    **dict.fromkeys((_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.mul.Scalar), _elementwise),
    **dict.fromkeys((_ATEN.div.Tensor, _ATEN.sigmoid.default, _ATEN.tanh.default, _ATEN.sqrt.default), _of_floats),
    **dict.fromkeys((_ATEN.log.default, _ATEN.neg.default), _of_floats),
    **dict.fromkeys((_ATEN._softmax.default, _ATEN._safe_softmax.default), _unary),
    _ATEN.eq.Tensor: _compared,
    _ATEN.mean.dim: _reduced,
    _ATEN.linalg_vector_norm.default: _vector_norm,
    _ATEN.cat.default: _joined,
    _ATEN.stack.default: _stacked,
    _ATEN.roll.default: lambda first, *_: _joined([first]),
    _ATEN.mm.default: _multiplied,
    _ATEN.bmm.default: _multiplied,
    _ATEN.convolution.default: _convolved,
}


def _holds_mlp(part: nn.Module) -> bool:
    return any(child.startswith("mlp") for child, _ in part.named_children())


def _counted(products: Products, module: nn.Module, name: str) -> Cost:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    by_operator = products.get(name, {})
    layers = sum(flops for operator, flops in by_operator.items() if operator.__name__ in _OF_LAYERS)
    return Cost(parameters=parameters, macs=sum(by_operator.values()) // 2, layer_macs=layers // 2)

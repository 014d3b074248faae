"""Find and replace submodules by their dotted names, and detect sharing and hooks that forbid it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

New = Mapping[str, nn.Module]
"""New children of a submodule by name; an empty name replaces the submodule itself."""


def child_at(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule with that dotted name; None if there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def shared(module: nn.Module) -> set[str]:
    """Names of modules, parameters and buffers that have another name as well, or overlap others in memory.

    A module without tensors (`holds_nothing`), such as one activation used in a whole network, does not count as
    shared: its result depends on its input only, and no fold changes it. Tensors of a memory-mapped file lie next to
    each other in one storage without overlapping, so they do not count as shared either.
    """
    places: dict[int, list[str]] = defaultdict(list)
    for name, part in module.named_modules(remove_duplicate=False):
        if not holds_nothing(part):
            places[id(part)].append(name)
    found = {name for names in places.values() if len(names) > 1 for name in names}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    end, last = 0, ""
    for start, stop, name in sorted((*_bytes(tensor), name) for name, tensor in tensors if tensor.numel()):
        found |= {last, name} if start < end else set()
        end, last = max((end, last), (stop, name))
    return found


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The memory addresses of a tensor's first number and of the end of its last number."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def holds_nothing(part: nn.Module) -> bool:
    """Whether a module and its submodules have no parameter, buffer or other tensor."""
    inner = list(part.modules())
    if any(tensor is not None for one in inner for held in (one._parameters, one._buffers) for tensor in held.values()):
        return False
    return not any(isinstance(leaf, Tensor) for one in inner for leaf in tree_leaves(_attributes(one)))


def _attributes(part: nn.Module) -> list[object]:
    """The attributes of a module other than those that torch registers."""
    return [value for name, value in vars(part).items() if name not in ("_parameters", "_buffers", "_modules")]


def is_hooked(part: nn.Module) -> bool:
    """Whether a module has hooks, a parametrization or its own forward, which a replacement would not have."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(part, kind, None) for kind in kinds) or "forward" in vars(part) or is_parametrized(part)


def dotted_name(name: str, at: str) -> str:
    """Join two dotted names; either may be empty."""
    return ".".join(filter(None, (name, at)))


def replaced(root: nn.Module, name: str, new: New) -> nn.Module:
    """Replace children of a submodule in place; returns the root, or its replacement."""
    for at, part in new.items():
        root = put(root, dotted_name(name, at), part)
    return root


def put(root: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """Replace a submodule in place; returns the root, or the new module if the name is empty."""
    if not name:
        return part
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, part)
    return root


def too_large(tensors: Iterable[Tensor], dtype: torch.dtype) -> str:
    """Why these new numbers cannot be cast to a dtype; empty if they can be."""
    limit = torch.finfo(dtype).max
    if any(bool((tensor.abs() > limit).any()) for tensor in tensors):
        return f"its new numbers would exceed {limit:g}, the largest one of the module's dtype"
    return ""


def dtype_at(module: nn.Module, place: str) -> torch.dtype:
    """The floating-point dtype of what replaces a submodule or parameter of that name."""
    parent, _, last = place.rpartition(".")
    old = getattr(child_at(module, parent), last, None)
    if isinstance(old, Tensor) and old.is_floating_point():
        return old.dtype
    return next((weight.dtype for weight in _weights_at(module, place)), torch.float64)


def like(new: nn.Module, module: nn.Module, place: str) -> nn.Module:
    """Move a new submodule to the dtype and device of the one it replaces, or of the nearest parent with weights."""
    weights = _weights_at(module, place)
    if weights:
        new = new.to(device=weights[0].device, dtype=weights[0].dtype)
        new.requires_grad_(any(weight.requires_grad for weight in weights))
    return new.eval()


def _weights_at(module: nn.Module, place: str) -> list[nn.Parameter]:
    """The floating-point parameters of a submodule, or of the nearest parent that has some."""
    old = child_at(module, place)
    weights = [weight for weight in old.parameters() if weight.is_floating_point()] if old is not None else []
    return weights if weights or not place else _weights_at(module, place.rpartition(".")[0])

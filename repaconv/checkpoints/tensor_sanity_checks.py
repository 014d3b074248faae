"""Check tensors for values, names, shapes and types that no healthy checkpoint has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile

import torch
from torch import Tensor

from repaconv.core.errors import Refused, first_names

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of trained weights. Narrower floats are quantized and need the scales stored with them."""

TRAINED = ("weight", "bias", "running_mean", "running_var")
"""Last parts of names that torch's layers give to floating-point numbers only."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def require_sound(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Refuse weights with unusable types or values.

    Args:
        tensors: The weights by name, of any shapes.
        names: Those names to the names in the file; a name that is missing here is the file's own.

    Raises:
        Refused: ``checkpoint.dtype`` for complex numbers, floats other than `FLOATS`, and weights that are integers;
            ``checkpoint.not-finite`` for NaN or infinity; ``checkpoint.negative-variance`` for a BatchNorm variance
            below zero. All name the tensor as the file does.
    """
    for name, tensor in tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in FLOATS:
            raise _dtype(names.get(name, name), tensor, "not float16, bfloat16, float32 or float64")
        if name.rpartition(".")[2] in TRAINED:
            require_floats({name: tensor}, names)
        if tensor.is_floating_point() and not are_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise Refused(
                f"{names.get(name, name)} has NaN or infinite values: {bad} of {tensor.numel()}.",
                hint="The training diverged or the file is damaged. Use an earlier checkpoint.",
                code="checkpoint.not-finite",
            )
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise Refused(
                f"{names.get(name, name)} is a variance and has negative values.",
                hint="The file is damaged. Use an earlier checkpoint.",
                code="checkpoint.negative-variance",
            )


def are_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; if one is not, neither is their sum, which is found much sooner."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def require_floats(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Refuse tensors that are not floating-point numbers, e.g. quantized weights without their scales.

    Args:
        tensors: The tensors by name.
        names: Those names to the names in the file; a name that is missing here is the file's own.

    Raises:
        Refused: ``checkpoint.dtype``.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise _dtype(names.get(name, name), tensor, "not floating point numbers")


def require_exact(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Check that the weights are exactly those of a module's state dict: no missing, extra or misshaped ones.

    Args:
        expected: The state dict, which may be on the meta device.
        tensors: The weights by the same names.
        names: Those names to the names in the file, for messages.

    Raises:
        Refused: ``checkpoint.missing-keys``, ``.unexpected-keys``, ``.shape`` or ``.dtype``.
    """
    _none_of("checkpoint.missing-keys", "lacks", expected.keys() - tensors.keys(), "The file is only part of a net.")
    more = [names.get(name, name) for name in tensors.keys() - expected.keys()]
    every = {names.get(name, name) for name in tensors}
    _none_of(
        "checkpoint.unexpected-keys",
        "has keys that no part of this net takes:",
        more,
        second_set_hint(every)
        or _lost_weight_hint(more, every)
        or "Folding only a part would be wrong. If they are not its weights: "
        + _selection({names.get(name, name) for name in expected}, more)
        + ".",
    )
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape:
            raise Refused(
                f"{names.get(name, name)} has shape {list(found.shape)}, but the other weights require "
                f"{list(wanted.shape)}.",
                hint="The file mixes two networks, or it was changed after training.",
                code="checkpoint.shape",
            )
        if wanted.is_floating_point():
            require_floats({name: found}, names)
        if wanted.dtype == torch.int64 and found.dtype not in INTEGERS and not name.endswith("num_batches_tracked"):
            raise _dtype(names.get(name, name), found, "not whole numbers")


def second_set_hint(names: Collection[str]) -> str:
    """How to select one of two sets of weights, if the file has the names of one network twice; else empty.

    Once they may have no prefix, or one that is a part of the other, such as ``model.`` and ``model.module.``. A moving
    average may lack buffers. Fewer than a third of the names are no second network, but e.g. a head that has two names.

    Args:
        names: The names in the file.
    """
    counts = Counter(name[: dot.end()] for name in names for dot in re.finditer(r"\.", name))
    for prefix in sorted(counts, key=len):
        if not 0 < len(names) - counts[prefix] <= counts[prefix]:
            continue
        others = [name for name in names if not name.startswith(prefix)]
        within = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        common = [""] + [others[0][: dot.end()] for dot in re.finditer(r"\.", others[0])]
        for other in filter(lambda each: all(name.startswith(each) for name in others), common):
            rest = {name.removeprefix(other) for name in others}
            if rest <= within and any("." in name for name in rest):
                this = prefix.removesuffix(".")
                if 3 * len(rest) < len(within):
                    return f"Under {prefix} are the names of the other tensors again: --weights {this} reads these."
                within_other = f"{other.removesuffix('.')},without:{this}" if other else f"without:{this}"
                that = within_other if prefix.startswith(other) else other.removesuffix(".")
                return (
                    f"Under {prefix} are the names of the other tensors again, so that the file holds two sets of "
                    f"weights: --weights {this} reads these, --weights {that} the others."
                )
    return ""


def _lost_weight_hint(more: Collection[str], names: Collection[str]) -> str:
    """What to do if a name too many is the bias of a layer whose weight the file lacks; else empty."""
    weights = (name.removesuffix("bias") + "weight" for name in more if name.endswith(".bias"))
    lost = next((name for name in weights if name not in names), "")
    return f"The file lacks {lost}, so it is only part of a net. Save the whole state_dict()." if lost else ""


def _selection(own: Collection[str], more: Collection[str]) -> str:
    """How to read the network's tensors alone: by the shortest prefix that they have and some of the others have not.

    A prefix that is longer could leave out a part of the network, such as the head next to ``backbone.``.
    """
    parts = zip(*(name.split(".")[:-1] for name in own), strict=False)
    common = [each[0] for each in takewhile(lambda each: len({*each}) == 1, parts)]
    for count in range(1, len(common) + 1):
        prefix = ".".join(common[:count])
        if not all(name.startswith(f"{prefix}.") for name in more):
            return f"--weights {prefix} reads those with that prefix alone"
    return "select those by prefix, with --weights"


def _dtype(name: str, tensor: Tensor, wanted: str) -> Refused:
    return Refused(
        f"{name} holds {tensor.dtype}, {wanted}.",
        hint="Fold the floating-point checkpoint, and quantize it afterwards.",
        code="checkpoint.dtype",
    )


def _none_of(code: str, verb: str, keys: Iterable[str], hint: str) -> None:
    if listed := sorted(keys):
        raise Refused(f"the checkpoint {verb} {first_names(listed, 3)}.", hint=hint, code=code)

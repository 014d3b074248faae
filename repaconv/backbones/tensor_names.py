"""A checkpoint's tensors by the names of the code that they are read as."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused
from repaconv.results import Fact


def renamed(checkpoint: Checkpoint, name_of: Callable[[str], str | None]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by other names, and those names to the names in the file; what has no other name is left out.

    Raises:
        Refused: If two keys are one name.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for key, tensor in checkpoint.tensors.items():
        if (name := name_of(key)) is None:
            continue
        if name in tensors:
            raise Refused(
                f"{names[name]} and {checkpoint.names[key]} are both {name}.",
                hint="The file mixes two networks; save one of them.",
                code="checkpoint.ambiguous",
            )
        tensors[name], names[name] = tensor, checkpoint.names[key]
    return tensors, names


_SPELLINGS = (
    (re.compile(r"^blocks\.\d+\.(\d+)\."), r"blocks.\1."),  # DINOv2's chunks: the second index is absolute
    (re.compile(r"\.gamma_([12])$"), r".ls\1.gamma"),  # BEiT's and DeiT-III's LayerScale
    (re.compile(r"\.ls([12])$"), r".ls\1.gamma"),
)
_UNUSED = ("mask_token",)


def official_names(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str], tuple[Fact, ...]]:
    """Tensors by timm's, DeiT's and DINOv2's names, those names to the names in the file, and what no forward uses.

    Raises:
        Refused: If two keys are one name.
    """

    def name_of(name: str) -> str | None:
        for pattern, replacement in _SPELLINGS:
            name = pattern.sub(replacement, name)
        return None if name in _UNUSED or name.endswith("num_batches_tracked") else name

    unused = [key for key in checkpoint.tensors if key in _UNUSED]  # a BatchNorm's counter is nobody's surprise
    facts = [Fact(name="unused", value=unused, source="keys: training alone reads them")] if unused else []
    return *renamed(checkpoint, name_of), tuple(facts)


def weight_of(tensors: Mapping[str, Tensor], name: str, dims: int) -> Tensor:
    """A weight that must be there, with that many dimensions.

    Raises:
        Refused: ``checkpoint.missing-keys`` or ``checkpoint.shape``.
    """
    if name not in tensors:
        raise Refused(
            f"the checkpoint lacks {name}.",
            hint="The file contains only a part of the network.",
            code="checkpoint.missing-keys",
        )
    if tensors[name].ndim != dims or not all(tensors[name].shape):
        raise Refused(
            f"{name} has shape {list(tensors[name].shape)}; expected {dims} dimensions, none of them empty.",
            hint="The file belongs to another network, or it was changed after training.",
            code="checkpoint.shape",
        )
    return tensors[name]


def block_tensors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What lies under ``prefix``, by the names within it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating point tensors in float64, converted once; others (an index) as they are."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def depth_of(tensors: Mapping[str, Tensor]) -> int:
    """Number of blocks.

    Raises:
        Refused: If the numbering has gaps.
    """
    return counted({int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}, "blocks")


def counted(numbers: Collection[int], what: str) -> int:
    """How many there are: a name may have any number in it, and only those without a gap count something.

    Raises:
        Refused: If there are none, or some are left out.
    """
    found = sorted(set(numbers))
    if found != list(range(len(found))) or not found:
        raise Refused(
            f"the {what} are numbered {', '.join(map(str, found)) or 'not at all'}.",
            hint=f"A complete network has {what}.0, {what}.1 and so on.",
            code="checkpoint.missing-keys",
        )
    return len(found)


def classes_of(tensors: Mapping[str, Tensor]) -> int:
    """Rows of the linear ``head``; 0 where there is none."""
    return weight_of(tensors, "head.weight", 2).shape[0] if "head.weight" in tensors else 0

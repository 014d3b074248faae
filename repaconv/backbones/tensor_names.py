"""Convert the names of a checkpoint's tensors to official names, and look up tensors by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused
from repaconv.results import Fact


def renamed_tensors(
    checkpoint: Checkpoint, name_of: Callable[[str], str | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename a checkpoint's tensors; also return a map from the new names to the names in the file.

    Args:
        checkpoint: The checkpoint.
        name_of: Gives the new name of a key, or None to leave the tensor out.

    Raises:
        Refused: If two keys get the same name.
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
    (re.compile(r"^blocks\.\d+\.(\d+)\."), r"blocks.\1."),  # DINOv2's chunks: the second index counts through all
    (re.compile(r"\.gamma_([12])$"), r".ls\1.gamma"),  # BEiT's and DeiT-III's LayerScale
    (re.compile(r"\.ls([12])$"), r".ls\1.gamma"),
)
_UNUSED = ("mask_token",)


def official_names(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str], tuple[Fact, ...]]:
    """Rename a vision transformer's tensors to the common names of timm, DeiT and DINOv2.

    Returns:
        The tensors by these names, a map from these names to the names in the file, and a fact about unused tensors.

    Raises:
        Refused: If two keys get the same name.
    """

    def name_of(name: str) -> str | None:
        for pattern, replacement in _SPELLINGS:
            name = pattern.sub(replacement, name)
        return None if name in _UNUSED or name.endswith("num_batches_tracked") else name

    unused = [key for key in checkpoint.tensors if key in _UNUSED]  # BatchNorm counters are not worth a fact
    facts = [Fact(name="unused", value=unused, source="keys: training alone reads them")] if unused else []
    return *renamed_tensors(checkpoint, name_of), tuple(facts)


def weight_of(tensors: Mapping[str, Tensor], name: str, dims: int) -> Tensor:
    """Get a weight that must exist and have that many dimensions.

    Raises:
        Refused: ``checkpoint.missing-keys`` or ``checkpoint.shape`` otherwise.
    """
    if name not in tensors:
        raise Refused(
            f"the checkpoint lacks {name}.",
            hint="The file contains only a part of the network, or another network.",
            code="checkpoint.missing-keys",
        )
    if tensors[name].ndim != dims or not all(tensors[name].shape):
        raise Refused(
            f"{name} has shape {list(tensors[name].shape)}; expected {dims} dimensions, none of them empty.",
            hint="The file belongs to another network, or it was changed after training.",
            code="checkpoint.shape",
        )
    return tensors[name]


def in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert floating-point tensors to float64; others, such as an index, are unchanged."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def depth_of(tensors: Mapping[str, Tensor]) -> int:
    """The number of blocks, ``blocks.<i>``.

    Raises:
        Refused: If there are none, or their numbering has gaps.
    """
    return count_numbered(
        {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}, "blocks"
    )


def blocks_by_stage(names: Iterable[str], pattern: str) -> dict[int, set[int]]:
    """The numbers of the blocks in each stage, by the names that a pattern of two numbers matches."""
    found: dict[int, set[int]] = {}
    for name in names:
        if match := re.match(pattern, name):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def count_numbered(numbers: Collection[int], what: str) -> int:
    """Count modules by the numbers in their names; ``what`` is their name in an error.

    Raises:
        Refused: If there are none, or the numbering has gaps.
    """
    found = sorted(set(numbers))
    if found != list(range(len(found))) or not found:
        raise Refused(
            f"tensors of {what} are numbered {', '.join(map(str, found))}, and some are missing."
            if found
            else f"the checkpoint has no tensors of {what}.0.",
            hint=f"A complete network has {what}.0, {what}.1 and so on.",
            code="checkpoint.missing-keys",
        )
    return len(found)


def classes_of(tensors: Mapping[str, Tensor]) -> int:
    """The number of classes: the rows of ``head.weight``, 0 without a head."""
    return weight_of(tensors, "head.weight", 2).shape[0] if "head.weight" in tensors else 0

"""Recognize the published architecture of a checkpoint that no method matches."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from repaconv.core.errors import Refused
from repaconv.results import Known
from repaconv.sources.named_architectures import REGISTRIES

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint


def known_networks(found: Checkpoint) -> tuple[Known, ...]:
    """Return the published architectures whose tensors match the checkpoint, exactly or nearly."""
    from repaconv.checkpoints.architecture_index import matches

    near = matches({name: tuple(tensor.shape) for name, tensor in found.tensors.items()})
    return tuple(Known(name=one.name, also=one.also, exact=one.exact, differs=one.differences) for one in near)


def recognised(found: Checkpoint, unknown: Refused) -> Known:
    """Return the one architecture that matches these weights (the number of classes may differ).

    Args:
        found: The checkpoint.
        unknown: The refusal to raise if there is none: why no method folds the checkpoint.

    Raises:
        Refused: No architecture or several match; the hint lists them.
    """
    from repaconv.checkpoints.tensor_sanity_checks import second_set_hint

    near = known_networks(found)
    buildable = [one for one in near if one.exact and one.name.partition(":")[0] in REGISTRIES]
    if len(buildable) == 1:
        return buildable[0]
    twice = second_set_hint({*found.names.values()})
    raise Refused(unknown.message, hint=twice or _hint(found, near, len(buildable)), code=unknown.code) from unknown


def _hint(found: Checkpoint, near: tuple[Known, ...], buildable: int) -> str:
    """Tell the user what to do when several architectures match, when config.json is needed, or when none matches."""
    path = shlex.quote(str(found.path))
    names = ", ".join(one.name for one in near)
    if buildable > 1:
        return f"Its tensors are those of {names}, which compute different things: say which with --arch."
    if near and near[0].exact:
        return f"Its tensors are those of {names}: fold its folder, where config.json is next to the weights."
    if near:
        return f"It is near to {near[0].name}, but for {near[0].differs}: --arch ./net.py:build takes your own code."
    if found.modules:
        return (
            f"It is a whole module, whose code is not run. Say what builds it: repaconv fold {path} --arch timm:NAME, "
            "torchvision:NAME or ./net.py:build. Or export it to ONNX and fold that: torch.onnx.export(module, inputs, "
            '"model.onnx").'
        )
    return f"Say what builds it: repaconv fold {path} --arch timm:NAME, torchvision:NAME or ./net.py:build."

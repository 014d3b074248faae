"""The certificate of a fold: every part of it is judged, and what no row proves is the training form's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from repaconv.core import plugins
from repaconv.core.errors import GateFailed
from repaconv.core.progress import Progress
from repaconv.results import FoldStep, ImageSize

if TYPE_CHECKING:
    from repaconv.method_api.contract import FoldedPart, Reading


def certified(trained: Reading, size: ImageSize, steps: list[FoldStep], progress: Progress) -> Iterator[FoldedPart]:
    """The parts of a fold, each when it is proved; its row of the certificate goes into ``steps``.

    Raises:
        GateFailed: If a part is not exact, or holds what no row proves.
    """
    from repaconv.checkpoints import drop_pages
    from repaconv.verification.tolerances import exact_rtols

    usual = exact_rtols()["fold"]
    for part in trained.parts():
        if part.step:
            allowed = usual if part.step.allowed is None else part.step.allowed
            if not part.step.max_rel_error <= allowed:
                raise _not_exact(part.step, allowed, _parting(trained, size, trained.tolerances.get("fold", usual)))
            steps.append(part.step.model_copy(update={"allowed": allowed}))
            progress("fold", len(steps), 0)
        _require_proved(part, trained)
        yield part
        drop_pages(trained.tensors.values())


def _require_proved(part: FoldedPart, trained: Reading) -> None:
    """A tensor of no module that the part's row of the certificate proves is the training form's own, to the bit.

    Raises:
        GateFailed: If it is not.
    """
    for name, value in part.tensors.items():
        if part.step and name.startswith(f"{part.step.module}."):
            continue
        own = trained.tensors.get(name)
        if own is None or own.shape != value.shape or not bool((own.double() == value.double()).all()):
            raise GateFailed(
                f"the folded tensor {name} differs from the trained one, and no row of the certificate covers it; "
                "nothing was written.",
                hint="This is a defect of the method; please report it with the output of `repaconv inspect`.",
                code="fold.not-proved",
                module=name.rpartition(".")[0],
            )


def blocks(modules: Sequence[str]) -> int:
    """How many numbered modules the certificate's rows are of: rows within another's module are of that block."""
    outermost = [name for name in modules if not any(name.startswith(f"{other}.") for other in modules)]
    numbered = {match[0] for name in outermost if (match := re.match(r".*\.\d+", name))}
    return sum(not any(other.startswith(f"{name}.") for other in numbered) for name in numbered)


def _not_exact(step: FoldStep, tolerance: float, inside: str) -> GateFailed:
    where = f" The forms part at {inside}." if inside else ""
    return GateFailed(
        f"folding {step.module} changes it by {step.max_rel_error:.1e} in float64, more than {tolerance:.0e}; "
        f"nothing was written.{where}",
        hint="This is a defect of the method; please report it with the output of `repaconv inspect`.",
        code="fold.not-exact",
        module=inside or step.module,
    )


def _parting(form: Reading, size: ImageSize, tolerance: float) -> str:
    """Which part of a block the training form and this fold do not share; empty if it cannot be said."""
    from repaconv.verification.divergence_location import locate_between_seams
    from repaconv.verification.input_batches import random_inputs
    from repaconv.verification.model_runners import TorchRunner

    backbone = plugins.load(plugins.BACKBONES, form.backbone)
    try:
        folded = {name: value for part in form.parts() for name, value in part.tensors.items()}
        training = TorchRunner(form.module(), form.tensors, double=True)
        deploy = TorchRunner(backbone.deploy(form.config), folded, double=True)
        images = random_inputs((form.config.in_channels, *size), count=1, seed=0).images
        return locate_between_seams(training, deploy, {"input": images}, allowed=tolerance).module
    except (RuntimeError, ValueError, KeyError):  # a fold that is wrong may be so in its shapes, too
        return ""

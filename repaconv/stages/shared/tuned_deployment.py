"""A deployment ready to run, and what an order becomes that is given what `tune` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from repaconv.core import plugins
from repaconv.core.errors import UsageProblem
from repaconv.options.option_definitions import AnyOrder
from repaconv.options.stage_options import ExportOrder
from repaconv.results import Deployment, FoldArtefact
from repaconv.rewrites.presets import NAMED
from repaconv.stages.shared.common_checks import load_target
from repaconv.stages.shared.engine_files import lowers, takes_networks
from repaconv.stages.shared.preset_choice import deployed

if TYPE_CHECKING:
    from repaconv.engines.contract import Network, Session, SessionSpec
    from repaconv.engines.targets import Target


@dataclass(frozen=True)
class Given(Generic[AnyOrder]):
    """An order with the target and the precision of a deployment, and that; None where it brings none.

    ``form`` is what the exports that it takes were written in; None leaves that to what else is known.
    """

    order: AnyOrder
    way: Deployment | None = None
    form: str | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Of the runtime."""
        return self.way.settings if self.way else ()

    def threads(self, device: Target) -> int:
        """Of one inference; the target's where nothing else is known."""
        return self.way.threads if self.way else device.bench.threads

    def session(self, device: Target, precision: str) -> SessionSpec:
        """How an engine is opened that was built so."""
        from repaconv.engines.contract import SessionSpec

        return SessionSpec(threads=self.threads(device), precision=precision, settings=self.settings)


def given_form(order: AnyOrder, folded: FoldArtefact) -> Given[AnyOrder]:
    """What an order with ``form``, ``target`` and ``precision`` comes to for a network.

    Of the target that was tuned it becomes the deployment's own target and precision. Where another target or another
    lower precision is asked for, that stands, and the form alone is taken.
    """
    asked: Any = order
    tuned = deployed(asked.preset, folded)
    if tuned is None:
        return Given(order, None, None if asked.preset is None else str(asked.preset))
    form, best = asked.preset if asked.preset in NAMED else Path(asked.preset).name, tuned.deployment
    if asked.target not in (tuned.target, best.target) or asked.precision not in (None, "fp32", best.precision):
        return Given(order, None, form)
    return Given(replace(asked, target=best.target, precision=best.precision), best, form)


def export_given(order: ExportOrder, folded: FoldArtefact) -> ExportOrder:
    """An order whose form may be what `tune` found: with the target and the precision of its graph.

    Raises:
        UsageProblem: If that runs no graph, or its ranges would be of other images than those that it was judged with.
    """
    given = given_form(order, folded)
    if given.way is None:
        return order
    device = load_target(given.order.target)
    if takes_networks(device):
        raise UsageProblem(
            f"{given.way.runtime} runs the run's PyTorch module directly, so there is nothing to export.",
            hint=f"Measure it: repaconv bench --preset {order.preset}.",
            code="export.nothing",
        )
    typed = "fp32" if lowers(device, given.way.precision) else given.way.precision
    if typed in ("fp16", "int8") and not (order.inputs or order.images):
        raise UsageProblem(
            f"{order.preset} uses {typed}, and no images for its value ranges were given.",
            hint="Give the images that it was tuned with: --images DIR, or --inputs FILE.npz.",
            code="form.images",
        )
    return replace(given.order, precision=typed)


def session_of(
    deployment: Deployment, deployable: Path | Network, sizes: Mapping[str, int], *, threads: int | None = None
) -> Session:
    """It, opened by its runtime with its settings.

    Args:
        deployment: What is opened.
        deployable: Its graph, or the network where its runtime takes that.
        sizes: Of free dimensions, by name.
        threads: In place of its own, where no time is measured.

    Raises:
        EnvironmentProblem: If its runtime is not here, or does not compute in that precision.
        Refused: If the runtime does not take the graph.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.engines.session_loading import load_session

    engine: Any = plugins.load(plugins.ENGINES, load_target(deployment.target).runtime)
    spec = SessionSpec(
        threads=threads or deployment.threads,
        precision=deployment.precision,
        sizes=sizes,
        streams=deployment.streams if threads is None else 1,
        settings=deployment.settings,
    )
    return load_session(engine, deployable, spec)

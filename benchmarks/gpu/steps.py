"""One step in a process of its own: `python -m gpu.steps NAME WORK OUT [--rehearsal]` writes its result."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu.plan import OFFICIAL, OURS, TRAINING, VANILLA, Step, steps
from repaconv.core.errors import EnvironmentProblem

SECONDS, ROUNDS, FEWEST = 15.0, 100, 20
"""A row's measured rounds: as many as fit, within these counts."""


def measured(step: Step, folder: Path) -> dict[str, Any]:
    """A row, on half as many images as long as the GPU does not hold them."""
    batch, notes = int(step.given["batch"]), []
    while True:
        try:
            return {**_row(step, folder, batch), "notes": notes}
        except EnvironmentProblem as problem:
            if problem.code != "gpu.memory" or batch == 1:
                raise
            notes.append(problem.message)
        batch //= 2
        _freed()  # what the row held goes with its error


def _freed() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _row(step: Step, folder: Path, batch: int) -> dict[str, Any]:
    """Every form interleaved, each held to float64 on the very images that it is measured on."""
    import numpy as np

    from gpu.models import decides, truth
    from repaconv.benchmark.machine_fingerprint import fingerprint

    images, right, undecided = truth(folder)
    places = np.arange(max(batch, len(images))) % len(images)
    precision = step.given["precision"]
    sessions = dict(_sessions(step, folder, batch))
    wanted = (images[places], right[places], undecided[places], batch, precision, decides(folder))
    links = {name: link_of(name, session, *wanted) for name, session in sessions.items() if name != VANILLA}
    links[OURS] = located(links[OURS], step, folder, images[:1])
    taken, on_gpu = images[places][:batch], sessions[OURS].on_gpu
    return {
        **timed(sessions, taken),
        "links": {name: link.model_dump(mode="json") for name, link in links.items()},
        **(_fallen(sessions[OURS].session, taken) if on_gpu else {}),
        "options": sessions[OURS].options,
        "engine": runtime_of(step).name,
        "version": runtime_of(step).version(),
        "machine": fingerprint((), gpu=on_gpu),
    }


def timed(sessions: Mapping[str, Any], images: Any) -> dict[str, Any]:
    """All forms interleaved on images [B, C, H, W], and what speaks against their times."""
    import numpy as np

    from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure

    calls = {name: session.call(images) for name, session in sessions.items()}
    once = sum(_milliseconds(call) for call in calls.values())
    rounds = int(np.clip(1e3 * SECONDS / max(once, 1e-3), FEWEST, ROUNDS))
    entrants = {name: Entrant(lambda call=call: call) for name, call in calls.items()}
    found = measure(entrants, Protocol(rounds, session_loads=1))
    best = found.ratio(OURS, OFFICIAL) if OFFICIAL in entrants else None
    return {
        "batch": len(images),
        "rounds": rounds,
        "samples_ms": {name: np.round(values, 5).tolist() for name, values in found.samples_ms.items()},
        "quality": found.quality(best).model_dump(mode="json"),
    }


def _fallen(session: Any, images: Any) -> dict[str, Any]:
    """Nodes on the processor; where that cannot be read, as for want of memory, the row stands without."""
    try:
        return {"fallen": list(session.nodes_on_cpu({session.inputs[0].name: images}))}
    except Exception as error:
        return {"fallen": [], "placement": f"not read: {type(error).__name__}"}


def _milliseconds(call: Callable[[], Any]) -> float:
    for _ in range(2):
        begin = time.perf_counter_ns()
        call()
    return (time.perf_counter_ns() - begin) / 1e6


def runtime_of(step: Step) -> Any:
    from repaconv.core import plugins
    from repaconv.stages.shared.target_lookup import load_target

    return plugins.load(plugins.ENGINES, load_target(step.given["target"]).runtime)


def _sessions(step: Step, folder: Path, batch: int) -> Iterator[tuple[str, Any]]:
    """Every form opened by the row's runtime."""
    from gpu.models import networks, truth
    from repaconv.engines.contract import SessionSpec
    from repaconv.verification.model_runners import ImageSession

    engine, precision = runtime_of(step), step.given["precision"]
    height, width = truth(folder)[0].shape[2:]
    sizes = {"batch": batch, "height": height, "width": width}
    spec = SessionSpec(threads=1, precision=precision, sizes=sizes)
    if "networks" in engine.can:
        given: dict[str, Any] = dict(networks(folder))
    else:
        typed = "fp32" if precision == "tf32" else precision
        listed = folder / f"graphs.{typed}.json"
        if not listed.is_file():
            raise EnvironmentProblem(f"the graphs of {step.model} were not written; see their step.", code="step.needs")
        given = {name: Path(path) for name, path in json.loads(listed.read_text()).items()}
    for name in (VANILLA, TRAINING, OFFICIAL, OURS):
        if name in given:
            yield name, ImageSession(engine.open(given[name], spec))


def link_of(
    name: str, session: Any, images: Any, right: Any, undecided: Any, batch: int, precision: str, decides: bool
) -> Any:
    """The link ``engine`` of one form."""
    from repaconv.verification.comparison import Comparison
    from repaconv.verification.tolerances import tolerance

    compared = Comparison(name, tolerance("engine", precision=precision, decides=decides))
    for start in range(0, len(images) - batch + 1, batch):
        piece = slice(start, start + batch)
        left_out = undecided[piece] if precision == "fp32" and decides else None
        compared.add({"logits": session.run(images[piece])}, {"logits": right[piece]}, undecided=left_out)
    return compared.links("engine", "training form, float64")[0]


def located(link: Any, step: Step, folder: Path, images: Any) -> Any:
    """A link that failed, with the first module that differs on images [n, C, H, W]: eager, or of the graph."""
    from gpu.models import subject
    from repaconv.core import plugins
    from repaconv.engines.contract import SessionSpec
    from repaconv.sources.source_model import DEPLOY
    from repaconv.stages.shared.exports_of_run import export_for
    from repaconv.stages.shared.target_lookup import load_target
    from repaconv.stages.verify.layer_divergence import within_engine
    from repaconv.verification.divergence_location import locate
    from repaconv.verification.model_runners import TorchValues

    if link.verdict != "failed":
        return link
    target, precision, right, feeds = step.given["target"], step.given["precision"], subject(folder), {"input": images}
    plain = target.partition("@")[0]
    eager = plugins.load(plugins.ENGINES, load_target(plain).runtime)
    if "networks" in eager.can:
        allowed = link.tolerance.rtol if link.tolerance.kind == "exact" else None
        trace = TorchValues(eager.open(right.network(DEPLOY), SessionSpec(precision=precision)))
        found = locate(right.exact.trace(), trace, [feeds], allowed=allowed, decides=right.decides)
    else:
        taken = export_for(right.run, right.folded, plain, "fp32" if precision == "tf32" else precision)
        found = within_engine(right, taken, target, precision, feeds, link.tolerance)
    return link.model_copy(update={"location": found})


def tuned(step: Step, folder: Path) -> dict[str, Any]:
    """The fastest form of the run's graph here, with the evidence."""
    import repaconv

    found = repaconv.tune(
        folder / "run",
        target=step.given["target"],
        batch=step.given["batch"],
        budget_s=step.given["budget_s"],
        rerun=True,
    )
    return {"tuned": found.model_dump(mode="json")}


def done(step: Step, work: Path) -> dict[str, Any]:
    """What came of a step, however it ended."""
    from gpu import engines, models

    folder = work / "models" / step.model
    do: dict[str, Callable[[], dict[str, Any]]] = {
        "prepare": lambda: models.prepare(step.model, folder),
        "graphs": lambda: models.graphs(folder, step.given["target"], step.given["precision"]),
        "row": lambda: measured(step, folder),
        "engine": lambda: engines.engine(step, folder),
        "tune": lambda: tuned(step, folder),
    }
    try:
        if step.kind != "prepare" and not (folder / "truth.npz").is_file():
            raise EnvironmentProblem(f"{step.model} was not made; see its step.", code="step.needs")
        found = do[step.kind]()
        return {"status": "not verified" if "not_verified" in found else "done", "why": "", **found}
    except EnvironmentProblem as problem:
        return {"status": "not verified", "why": f"{problem.message} {problem.hint}".strip()}
    except Exception as error:  # whatever a runtime raises costs its own row
        tail = traceback.format_exc().splitlines()[-12:]
        first = (str(error).splitlines() or [""])[0][:300]
        return {"status": "failed", "why": f"{type(error).__name__}: {first}", "trace": tail}


def main() -> None:
    """See the module's words."""
    name, work, out, *rest = sys.argv[1:]
    step = next(each for each in steps(rehearsal="--rehearsal" in rest) if each.name == name)
    begin = time.monotonic()
    found = done(step, Path(work))
    Path(out).write_text(json.dumps({**found, "seconds": round(time.monotonic() - begin, 1)}))


if __name__ == "__main__":
    main()

"""The tuner against an exhaustive search of the same space: the speed that it reaches in ten minutes.

    python benchmarks/tuner_vs_exhaustive_search.py [--net repavit-deit-base-0.75] [--budget 600] [--slice 3600]
        [-o result.json]

Both choose among the same combinations of the same rewrites, on the same runtimes with the same settings: FP32, batch
size 1, one thread. Each call continues the exhaustive search for ``--slice`` seconds. When all is measured, its fastest
configuration and the tuner's run in one interleaved run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from competing_toolchains import repaconv_configurations
from competing_toolchains.method_networks import METHOD_NETWORKS

import repaconv
from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins, run_folder
from repaconv.core.files import canonical_json
from repaconv.core.progress import silent
from repaconv.results import Deployment, TuneArtefact
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.preset_choice import open_deployment
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.verification.model_runners import ImageSession

ROOT = Path(__file__).resolve().parents[1]
REWRITES = (
    "read-tokens", "scores-as-matrix", "patch-gemm", "attention-op", "linear-each", "rms-norm", "concat-linear",
    "linear-as-gemm",
)  # fmt: skip
"""Eight: of each runtime all 256 compositions, each with every setting, can be measured in a night."""


def folded(net: str, work: Path) -> Path:
    """Its run, made unless it is there."""
    run = work / "run"
    if not (run / "fold.json").is_file():
        work.mkdir(parents=True, exist_ok=True)
        torch.save(next(each for each in METHOD_NETWORKS if each.name == net).checkpoint(), work / "c.pth")
        repaconv.fold(work / "c.pth", out=run, force=True)
        (work / "c.pth").unlink()
    return run


def tuned(run: Path, asked: dict[str, Any], budget_s: float) -> TuneArtefact:
    """What the tuner finds in its time, searched once."""
    return repaconv.tune(run, budget_s=budget_s, out=run.parent / "tuned.json", **asked)


def side_by_side(run: Path, winner: Deployment, best: Deployment, rounds: int) -> dict[str, Any]:
    """How many times as fast the winner is as the best, and whether that can be believed."""
    with tempfile.TemporaryDirectory(dir=run.parent) as name:
        graphs = Candidates(source_model_of(run_folder.Run(run)), REWRITES, None, Path(name), silent)
        images = graphs.source_model.random_inputs(1, 0).piece(0, 1).given["input"].astype(np.float32)

        def loaded(way: Deployment) -> Callable[[], Any]:
            return partial(ImageSession(open_deployment(way, graphs.deployable(way), graphs.sizes(1))).run, images)

        entrants = {"winner": Entrant(partial(loaded, winner)), "best": Entrant(partial(loaded, best))}
        timed = measure(entrants, Protocol(rounds, cores=1))
    found = timed.ratio("winner", "best")
    believed = timed.quality(found)
    return {"winner_over_best": found.model_dump(), "measurement": believed.verdict, "reasons": list(believed.reasons)}


def described(way: Deployment) -> str:
    """A deployment in words."""
    return " ".join([way.runtime, " + ".join(way.rewrites) or "no rewrites", *way.settings])


def compared(given: argparse.Namespace, work: Path) -> dict[str, Any] | None:
    """The row of a network; None while the exhaustive search has not measured everything."""
    run = folded(given.net, work)
    names = [name for name in given.rewrites if name in plugins.registered(plugins.REWRITES)]
    asked = {"rounds": given.rounds, "rewrites": names, "runtimes": given.runtimes}
    quick = tuned(run, asked, given.budget)
    patient = repaconv.tune(run, exhaustive=True, budget_s=given.slice, out=work / "every.json", **asked)
    measured = [row for row in patient.candidates if row.ratio is not None]
    print(f"the tuner: {described(quick.deployment)} in {quick.seconds:.0f} s", flush=True)
    print(f"of all, {len(measured)} were measured; the best: {described(patient.deployment)}", flush=True)
    if not patient.complete:
        print("there is more to measure: the same command goes on")
        return None
    both = [quick.deployment, repaconv_configurations.fastest(patient, lambda _: True) or patient.baseline]
    return {
        "model": given.net,
        "compositions": len(measured),
        "winner": described(both[0]),
        "best": described(both[1]),
        "budget_s": given.budget,
        "seconds": quick.seconds,
        **side_by_side(run, both[0], both[1], given.rounds),
        "machine": fingerprint(()),
    }


def main() -> None:
    """Compare, print, write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=[net.name for net in METHOD_NETWORKS], default="repavit-deit-base-0.75")
    parser.add_argument("--budget", type=float, default=600, help="seconds of the tuner")
    parser.add_argument("--slice", type=float, default=3600, help="seconds of the exhaustive search, each call")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rewrites", nargs="+", default=list(REWRITES), help="the space: compositions of these")
    parser.add_argument("--runtimes", nargs="+", default=["auto"])
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = ROOT / "build/tuner" / given.net
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    row = compared(given, work)
    if row is None:
        return
    print(row, flush=True)
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.is_file() else {"models": []}
        others = [each for each in known["models"] if each["model"] != row["model"]]
        given.out.write_text(canonical_json({**known, "models": [*others, row]}))


if __name__ == "__main__":
    main()

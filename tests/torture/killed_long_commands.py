"""`run`, `tune` and `sweep` killed at random moments; `torture.killed_stages` kills single stages."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import repaconv
from repaconv.distributed.sweep import sweep
from torture import damaged_artefacts, killed_stages
from torture.sandbox import Case
from torture.small_checkpoints import net

SETTINGS = "\n".join(f"{name} = {value!r}" for name, value in net("riformer").settings.items())
RECIPE = f"""checkpoint = "c.pth"
out = "run"
[set]
{SETTINGS}
[verify]
count = 1
[export]
target = "x86-64"
[build]
[bench]
rounds = 10
[report]
"""
MATRIX = f"""rounds = 10
batches = [1, 2]
[[models]]
checkpoint = "c.pth"
[models.set]
{SETTINGS}
"""


def _bare(at: Path) -> None:
    torch.save(net("riformer").whole, at / "c.pth")
    (at / "r.toml").write_text(RECIPE)
    (at / "m.toml").write_text(MATRIX)


def _run(at: Path) -> object:
    done = repaconv.run(at / "r.toml")
    assert done.exit_code in (0, 5), done.checks  # ten rounds say little
    return done


def _tune(at: Path) -> object:
    os.environ["XDG_CACHE_HOME"] = str(at / "run" / "known")
    return repaconv.tune(at / "run", target="x86-64", rounds=2, budget_s=3)


def _sweep(at: Path) -> object:
    done = sweep(at / "m.toml", out=at / "run")
    assert done.verdict == "passed", done.rows
    return done


STAGES: dict[str, tuple[killed_stages.Stage, Callable[[Path], None], float]] = {
    "run": (_run, _bare, 9.0),
    "tune": (_tune, killed_stages.with_a_run, 5.0),
    "sweep": (_sweep, _bare, 5.0),
}
"""By name: the stage, what is there before, and seconds that it takes on a quiet machine."""


def killed(name: str, count: int) -> Iterator[Case]:
    """One of them, at so many moments."""
    damaged_artefacts.whole_run()
    rng, (stage, prepare, seconds) = random.Random(name), STAGES[name]
    for number in range(count):
        yield killed_stages.case(name, f"{number}", (stage, prepare), rng.random() * seconds)

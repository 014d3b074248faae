"""Killed stages. What a killed stage leaves is never taken as complete, and the same command then completes.

A stage is killed at random moments, and before each step that changes files of its folder.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import repaconv
from repaconv.core import run_folder
from repaconv.core.errors import Refused, RepaconvError
from repaconv.core.files import stage_of
from torture import damaged_artefacts, graphs
from torture.sandbox import Case
from torture.small_checkpoints import HEADS, net, plain

Stage = Callable[[Path], object]
Prepare = Callable[[Path], None]


def _fold(at: Path) -> object:
    return repaconv.fold(at / "c.pth", out=at / "run", settings=net("riformer").settings)


def _export(at: Path) -> object:
    return repaconv.export(at / "run", onnx=at / "out" / "m.onnx")


def _fold_graph(at: Path) -> object:
    return repaconv.fold(at / "c.onnx", out=at / "run")


def _build(at: Path) -> object:
    return repaconv.build(at / "run", target="x86-64")


def _verify(at: Path) -> object:
    return repaconv.verify(at / "run", count=1)


def _convert(at: Path) -> object:
    return repaconv.convert(at / "v.pth", inputs=at / "x.npz", blocks="1", settings=HEADS, out=at / "run")


def _plain(at: Path) -> None:
    torch.save(plain(), at / "v.pth")
    images = np.random.default_rng(1).standard_normal((80, 3, 8, 8), dtype=np.float32)
    np.savez(at / "x.npz", input=images, labels=np.arange(80) % 5)


def _bare(at: Path) -> None:
    torch.save(net("riformer").whole, at / "c.pth")
    (at / "c.onnx").write_bytes(graphs.convolution().SerializeToString())


def with_a_run(at: Path) -> None:
    """A run with an export, a verification and an engine."""
    shutil.copytree(damaged_artefacts.whole_run(), at, dirs_exist_ok=True)
    fold = at / "run/fold.json"
    fold.write_text(fold.read_text().replace(str(damaged_artefacts.whole_run()), str(at)))


def _without(*names: str) -> Prepare:
    def prepare(at: Path) -> None:
        with_a_run(at)
        for name in names:
            (at / name).unlink()

    return prepare


def _of_other_weights(at: Path) -> None:
    """A run of what the checkpoint was before it was trained on."""
    with_a_run(at)
    weights = {
        name: 2 * value if value.is_floating_point() else value for name, value in net("riformer").weights.items()
    }
    torch.save({**net("riformer").whole, "state_dict": weights}, at / "c.pth")


def _with_an_export_elsewhere(at: Path) -> None:
    """Of which the fold removes the artefact, and leaves the file for the export to replace."""
    _of_other_weights(at)
    (at / "out").mkdir()
    (at / "run/model.onnx").rename(at / "out/m.onnx")
    export = at / "run/export.json"
    export.write_text(export.read_text().replace('"model.onnx"', '"../out/m.onnx"'))


def _fold_and_export(at: Path) -> object:
    _fold(at)
    return _export(at)


STAGES: dict[str, tuple[Stage, Prepare, float, int]] = {
    "fold": (_fold, _bare, 0.3, 6),
    "fold, again": (_fold, with_a_run, 0.3, 3),
    "fold, of other weights": (_fold, _of_other_weights, 0.3, 4),
    "fold of a graph": (_fold_graph, _bare, 0.4, 4),
    "build": (_build, _without("run/build/x86-64.json", "run/build/x86-64.onnx"), 0.3, 4),
    "build, again": (_build, with_a_run, 0.3, 2),
    "verify": (_verify, _without("run/verify.json"), 0.7, 3),
    "convert": (_convert, _plain, 0.6, 4),
    "export": (_export, _without("run/export.json", "run/model.onnx"), 6.0, 1),
}
"""By name: the stage, what is there before, seconds that it takes on a quiet machine, and how often it is drawn."""


STEPS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
BY_STEPS: dict[str, tuple[Stage, Prepare]] = {
    **{name: (stage, prepare) for name, (stage, prepare, _, _) in STAGES.items()},
    "export, of another fold": (_fold_and_export, _with_an_export_elsewhere),
}
"""Stages that are killed before each of their steps."""


def before_each_step(name: str, folder: Path) -> int:
    """Kill a stage before its first step, its second and so on to the last; returns how many there are."""
    stage, prepare = BY_STEPS[name]
    for step in range(1000):
        at = _prepared(prepare, folder / str(step))
        if not _ended(_in_a_child(partial(_until, step, stage), at), at, f"step {step}"):
            return step
        require_whole(at)
        assert not _ended(_in_a_child(partial(_until, 1000, stage), at), at, f"killed before step {step}, and again")
        require_whole(at)
        shutil.rmtree(at)
    raise AssertionError("a stage without an end")


def told_by(stage: Stage, at: Path) -> str:
    """What a stage that a child runs there refuses, its code first; empty if it refuses nothing.

    Raises:
        AssertionError: If it ends otherwise.
    """
    child = _in_a_child(stage, at)
    _, status = os.waitpid(child, 0)
    said = _said(at).read_text() if _said(at).is_file() else ""
    _said(at).unlink(missing_ok=True)
    assert os.waitstatus_to_exitcode(status) == (9 if said else 0), said or status
    return said


def _ended(child: int, at: Path, message: str) -> bool:
    """Whether it was killed.

    Raises:
        AssertionError: If it ended otherwise than killed or well.
    """
    _, status = os.waitpid(child, 0)
    said = _said(at)
    assert os.WIFSIGNALED(status) or not status, f"{message}: {said.read_text() if said.is_file() else status}"
    return os.WIFSIGNALED(status)


def _until(last: int, stage: Stage, at: Path) -> object:
    """The stage, in a process that dies before that step."""
    steps = iter(range(last, -1, -1))

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event in STEPS and Path(str(arguments[0])).absolute().is_relative_to(at) and not next(steps):
            os.kill(os.getpid(), signal.SIGKILL)

    os.chdir(at)
    sys.addaudithook(hear)
    return stage(at)


def killed(count: int, seed: int) -> Iterator[Case]:
    damaged_artefacts.whole_run()
    rng = random.Random(seed)
    names = [name for name, (_, _, _, often) in STAGES.items() for _ in range(often)]
    for number in range(count):
        name = rng.choice(names)
        stage, prepare, seconds, _ = STAGES[name]
        yield case(name, f"{seed}.{number}", (stage, prepare), rng.random() * seconds)


def case(name: str, number: str, killed: tuple[Stage, Prepare], after: float) -> Case:
    """A stage, with what is there before, killed after so many seconds of a quiet machine."""
    stage, prepare = killed
    read = partial(_killed, stage=stage, after=after * _load())
    return Case(f"kills: {name}", number, partial(_prepared, prepare), read, alone=True)


@cache
def _load() -> float:
    """How much longer than on a quiet machine things take now."""
    stage, prepare, seconds, _ = STAGES["fold"]
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        began = time.monotonic()
        told_by(stage, Path(scratch))
    return max((time.monotonic() - began) / seconds, 1.0)


def _prepared(prepare: Prepare, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    prepare(folder)
    return folder


def _in_a_child(stage: Stage, at: Path) -> int:
    child = os.fork()
    if not child:
        try:
            stage(at)
            os._exit(0)
        except RepaconvError as error:
            _said(at).write_text(f"{error.code}: {error.message}")
            os._exit(9)
        except BaseException as error:
            _said(at).write_text(repr(error))
        finally:
            os._exit(8)
    return child


def _said(at: Path) -> Path:
    """Beside the folder, whose disk may be full."""
    return at.with_name(f"{at.name}.said")


def _killed(at: Path, stage: Stage, after: float) -> str:
    child = _in_a_child(stage, at)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    require_whole(at)
    _, again = os.waitpid(_in_a_child(stage, at), 0)
    if again:
        said = _said(at).read_text() if _said(at).is_file() else f"status {again}"
        raise AssertionError(f"killed after {after:.3f} s, and again: {said}")
    require_whole(at)
    left = [path.name for path in (at / "run").rglob(".*") if path.is_file()]
    assert not left or os.WIFSIGNALED(status), f"left behind: {left}"
    return "sound" if os.WIFSIGNALED(status) else "the same"


def require_whole(at: Path) -> None:
    """Every artefact that is there is whole, and what it names is there as it was written, or refused as such."""
    for path in sorted((at / "run").rglob("*.json")):
        assert stage_of(path), f"{path} is half an artefact"
    for path in (at / "run").rglob("fold.json"):
        run = run_folder.Run(path.parent)
        folded = run_folder.fold_of(run)
        with suppress(Refused):  # it is gone or another, and is told to be
            run.payload(folded.payload)

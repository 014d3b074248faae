"""Failures around a stage: it is killed, the disk is full, another process writes to its folder, its file changes."""

from __future__ import annotations

import contextvars
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
from errno import EACCES
from functools import partial
from importlib import resources
from pathlib import Path
from threading import Thread, get_ident

import numpy as np
import onnx
import pytest
import torch
from conftest import quick_where
from onnx import helper
from torture import checkpoints, full_disks, graphs, killed_long_commands, killed_stages, preloaded_imports

import repaconv as rc
from repaconv.checkpoints import read_checkpoint
from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.core.files import lock_folder, write_text
from repaconv.core.thread_pool import thread_pool
from repaconv.engines.contract import SessionSpec
from repaconv.engines.onnxruntime_cpu import OrtSession
from repaconv.sources.method_detection import understood


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """What each child would import for itself."""
    preloaded_imports.up()


@pytest.mark.parametrize("name", quick_where({"fold"}.__contains__, killed_stages.BY_STEPS, ids=str))
def test_a_stage_that_is_killed_before_any_of_its_steps_completes_by_the_same_command(tmp_path, name):
    assert killed_stages.before_each_step(name, tmp_path) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", killed_long_commands.STAGES)
def test_a_command_of_many_stages_that_is_killed_at_any_moment_completes_when_it_is_given_again(tmp_path, name):
    stage, prepare, _ = killed_long_commands.STAGES[name]
    cases = [killed_stages.case(name, str(number), (stage, prepare), after) for number, after in enumerate((0.1, 0.7))]
    ends = [case.read(case.make(tmp_path / case.name)) for case in cases]
    assert ends[0] == "sound"


def inside(at):
    """All files of a folder."""
    return {path: path.read_bytes() for path in at.rglob("*") if path.is_file()}


def within(size, stage, at):
    """The stage, where no file may be larger."""
    os.chdir(at)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        return stage(at)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("name", quick_where({"fold"}.__contains__, ["fold", "export", "build"], ids=str))
def test_where_no_file_may_be_large_a_stage_refuses_and_completes_with_room(tmp_path, name):
    stage, prepare = killed_stages.BY_STEPS[name]
    prepare(tmp_path)
    before = inside(tmp_path)
    for size in (0, 100, 3000, 6000, 10_000):
        assert killed_stages.told_by(partial(within, size, stage), tmp_path).startswith("write.failed: ")
        assert before == inside(tmp_path)
    assert not killed_stages.told_by(stage, tmp_path)
    killed_stages.require_whole(tmp_path)


@pytest.mark.parametrize("name", quick_where({"fold"}.__contains__, full_disks.STAGES, ids=str))
def test_on_a_full_disk_a_stage_refuses_and_completes_with_room(tmp_path, name):
    stage, prepare, rooms = full_disks.STAGES[name]
    pages, files = rooms.values()
    ends = set()
    for room in (*(full_disks.Room(pages=pages[n]) for n in (0, 3, -1)), full_disks.Room(files=files[1])):
        try:
            with full_disks.disk(tmp_path / "disk") as at:
                ends.add(full_disks.ended_with(room, stage, prepare, at))
        except PermissionError:
            pytest.skip("mounting a disk needs root's rights")
    assert ends == {"refused", "sound"}


def command(at, *words, **environment):
    """A command's exit code and what it says, in a process of its own."""
    given = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-m", "repaconv", *words], cwd=at, env=given, capture_output=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


ASCII_ALONE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "XDG_CACHE_HOME": "/dev/null"}
LOCALE = re.compile(r"\.read_text\(\)|\.write_text\([^,()]*\)|\bopen\(\"[wa]\"\)")
SET = [f"--set={name}={value}" for name, value in killed_stages.net("riformer").settings.items()]


def test_a_name_that_is_no_text_is_folded(tmp_path):
    killed_stages.STAGES["fold"][1](tmp_path)
    name = (tmp_path / "c.pth").rename(tmp_path / os.fsdecode(b"a\xff\n b.pth")).name
    settings = killed_stages.net("riformer").settings
    assert not killed_stages.told_by(lambda at: rc.fold(at / name, out=at / "run", settings=settings), tmp_path)
    assert run_folder.fold_of(run_folder.Run(tmp_path / "run")).origin.path == str(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"a\xff\n b.pth", "\u00fc.pth".encode()], ids=["bytes", "letters"])
def test_names_may_be_of_any_bytes_whatever_the_language(tmp_path, name):
    killed_stages.STAGES["fold"][1](tmp_path)
    (tmp_path / "c.pth").rename(tmp_path / os.fsdecode(name))
    code, said = command(tmp_path, "fold", os.fsdecode(name), "-o", "run", *SET, **ASCII_ALONE)
    assert (code, b"Traceback" in said) == (0, False), said
    killed_stages.require_whole(tmp_path)
    assert command(tmp_path, "verify", "run", "--count", "1", **ASCII_ALONE)[0] == 0


def names(at):
    return {path.name for path in at.iterdir()}


LONG = "a" * 300
AT_THE_LIMIT = "b" * 250 + ".onnx"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", LONG],
        ["fold", "net.onnx", "-o", f"new/{LONG}"],
        ["fold", AT_THE_LIMIT],  # its folded model would have a longer name
        ["new-recipe", "net.onnx", "-o", LONG],
        ["bench", "net.onnx", "-o", f"{LONG}.json"],
        ["tune", "net.onnx", "-o", f"{LONG}/x"],
        ["sweep", LONG],
        ["compare", "net.onnx", LONG],
        ["report", LONG],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_is_too_long_is_said_to_be(tmp_path, repaconv, words):
    for name in ("net.onnx", AT_THE_LIMIT):
        (tmp_path / name).write_bytes(graphs.convolution().SerializeToString())
    code, _, said = repaconv(*words)
    assert (code, "a file or folder may have 255." in said) == (4, True), said
    assert names(tmp_path) == {"net.onnx", AT_THE_LIMIT}


def test_of_the_longest_names_files_are_written(tmp_path):
    path = tmp_path / ("\u00fc" * 125 + ".json")
    for text in ("once", "again"):
        write_text(path, text)
    assert path.read_text() == "again"
    assert names(tmp_path) == {path.name}


def test_what_is_made_of_a_name_that_is_no_text_has_a_name_that_is(tmp_path, repaconv):
    name = os.fsdecode(b"n\xffet.onnx")
    (tmp_path / name).write_bytes(graphs.convolution().SerializeToString())
    code, _, said = repaconv("new-recipe", name)
    assert (code, "a recipe is UTF-8" in said) == (4, True)
    assert names(tmp_path) == {name}
    rc.fold(tmp_path / name, out="run")
    assert (tmp_path / "run" / r"n\xffet.folded.onnx").is_file()
    (tmp_path / "net.onnx").write_bytes(graphs.convolution().SerializeToString())
    matrix = tmp_path / os.fsdecode(b"m\xff.toml")
    matrix.write_text('targets = ["none"]\nmodels = [{checkpoint = "net.onnx"}]\nprecisions = ["fp32"]\nbatches = [1]')
    assert repaconv("sweep", matrix)[0] == 1
    assert names(Path("repaconv-out")) == {"latest", r"sweep-m\xff"}


@pytest.mark.slow
def test_texts_are_utf8_whatever_the_language(tmp_path):
    """All but file names, whose letters are those of the locale."""
    (tmp_path / "net.onnx").write_bytes(graphs.convolution().SerializeToString())
    recipe = 'checkpoint = "net.onnx"\n[reference]\nsource = "Gr\u00f6\u00dfe"\n[export]\ntarget = "own.toml"\n'
    (tmp_path / "recipe.toml").write_text(recipe, encoding="utf-8")
    target = resources.files("repaconv.engines.targets").joinpath("x86-64.toml").read_text("utf-8")
    (tmp_path / "own.toml").write_text(f"# \u00fc\n{target}", encoding="utf-8")
    matrix = (
        "# \u00fc\ntargets: [own.toml]\nmodels: [{checkpoint: net.onnx}]\nprecisions: [fp32]\nbatches: [1]\nrounds: 2"
    )
    (tmp_path / "matrix.yaml").write_text(matrix, encoding="utf-8")
    for words in (["run", "recipe.toml"], ["sweep", "matrix.yaml"], ["report", "repaconv-out/recipe"]):
        code, said = command(tmp_path, *words, **ASCII_ALONE | {"XDG_CACHE_HOME": ".cache"})
        assert code in (0, 5), said  # two rounds say nothing
    (tmp_path / "other.toml").write_text('checkpoint = "\u00fc.onnx"', encoding="utf-8")
    code, said = command(tmp_path, "run", "other.toml", **ASCII_ALONE)
    assert (code, b"PYTHONUTF8=1" in said, b"Traceback" in said) == (4, True, False), said


def test_no_text_is_read_or_written_in_the_encoding_of_the_locale():
    package = Path(rc.__file__).parent
    found = [path for path in package.rglob("*.py") if LOCALE.search(path.read_text("utf-8"))]
    assert not found, "say encoding='utf-8'"


def test_a_runtime_sends_no_telemetry_about_the_models_it_opens(tmp_path):
    """ONNX Runtime's own telemetry leaves a queue for its maker in the user's cache, and in TMPDIR."""
    (tmp_path / "c.onnx").write_bytes(graphs.convolution().SerializeToString())
    program = "from repaconv.engines import ort, contract; from pathlib import Path"
    program += "; ort.OrtSession(Path('c.onnx'), contract.SessionSpec(threads=1))"
    at = tmp_path / "own"
    at.mkdir()
    given = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    given |= {"HOME": str(at), "XDG_CACHE_HOME": str(at), "TMPDIR": str(at)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=given, check=True)
    assert not list(at.iterdir())


def test_where_the_address_space_is_limited_no_thread_is_waited_for():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 44, resource.RLIM_INFINITY))
    try:
        with thread_pool(2) as pool:
            assert pool.submit(get_ident).result() == get_ident()
            with pytest.raises(ZeroDivisionError):
                pool.submit(divmod, 1, 0).result()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with thread_pool(2) as pool:
        assert pool.submit(get_ident).result() != get_ident()


def test_what_the_machine_does_not_do_is_a_sentence(capsys, monkeypatch):
    from repaconv.cli import main

    for problem, code in (
        (MemoryError(), "environment.memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "environment.memory"),
        (OSError(5, "Input/output error", "x.pth"), "environment.system"),
    ):

        def fails(*_given, problem=problem, **_named):
            raise problem

        monkeypatch.setattr(main.app, "only", lambda _given, command=fails: command)
        with pytest.raises(SystemExit) as ended:
            main.main(["fold", "x.pth"])
        assert (ended.value.code, code in capsys.readouterr().err) == (3, True)


@pytest.mark.parametrize(
    ("command", "streams", "code"),
    [
        ("targets", ">&-", 0),
        ("targets --format json", ">&- 2>&-", 0),
        ("inspect nofile", "2>&-", 4),
        ("inspect nofile --format json", ">&-", 4),
        ("targets", ">/dev/full", 3),
        ("targets --format json", ">/dev/full", 3),
        ("inspect nofile --format json", ">/dev/full", 4),
        ("inspect nofile", "2>/dev/full", 4),
    ],
)
def test_a_stream_that_is_closed_or_full_changes_no_exit_code(tmp_path, command, streams, code):
    line = f"exec {sys.executable} -m repaconv {command} {streams}"
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False, env=usual)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    if ">/dev/full" in streams and "2>" not in streams:
        assert ended.stderr.startswith("error: ")


def test_a_network_larger_than_memory_is_reported_as_such(tmp_path):
    """torch's message, as the method's reader of tensors raises it."""
    network = killed_stages.net("riformer")
    torch.save(network.whole, tmp_path / "c.pth")

    class NoMemory:
        name = "riformer"

        def read(self, *_given):
            return torch.empty(1 << 50)

    with pytest.raises(EnvironmentProblem, match="not enough memory"):
        understood(NoMemory(), read_checkpoint(tmp_path / "c.pth"), {})


@pytest.mark.parametrize("name", quick_where({"fold"}.__contains__, ["fold", "export", "build"], ids=str))
def test_of_two_commands_in_a_folder_the_second_reports_the_first(tmp_path, name):
    stage, prepare = killed_stages.BY_STEPS[name]
    prepare(tmp_path)
    with lock_folder(tmp_path / "run"):
        assert killed_stages.told_by(partial(_elsewhere, stage), tmp_path).startswith("run.busy: ")
    assert name != "fold" or not (tmp_path / "run").exists()
    assert not killed_stages.told_by(stage, tmp_path)


def test_of_two_sweeps_in_a_folder_the_second_reports_the_first(tmp_path):
    stage, prepare, _ = killed_long_commands.STAGES["sweep"]
    prepare(tmp_path)
    with lock_folder(tmp_path / "run"):
        assert killed_stages.told_by(partial(_elsewhere, stage), tmp_path).startswith("run.busy: ")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_written_to_while_it_is_folded_is_refused(tmp_path):
    killed_stages.STAGES["fold"][1](tmp_path)
    path, settings = tmp_path / "c.pth", killed_stages.net("riformer").settings

    def touch(*_told):
        os.utime(path, ns=(1, 1))

    with pytest.raises(Refused) as refused:
        rc.fold(path, out=tmp_path / "run", settings=settings, progress=touch)
    assert refused.value.code == "file.changed"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("container", ["zip", "safetensors", "legacy"])
def test_a_checkpoint_that_is_cut_while_it_is_mapped_is_refused_and_no_end_of_the_process(tmp_path, container):
    network = killed_stages.net("riformer")
    (tmp_path / "c.pth").write_bytes(checkpoints.in_container(container, network))

    def cut(*_told):
        os.truncate(tmp_path / "c.pth", 1)

    def stage(at):
        return rc.fold(at / "c.pth", out=at / "run", settings=network.settings, progress=cut)

    assert killed_stages.told_by(stage, tmp_path).startswith("file.changed: ")
    assert not (tmp_path / "run").exists()


def test_external_weights_that_are_cut_while_they_are_mapped_are_reported(tmp_path):
    wide = graphs.model([helper.make_node("Add", ["input", "w"], ["y"])], [graphs.weight("w", 3, 200, 200)])
    wide.graph.input[0].CopyFrom(graphs.value("input", 3, 200, 200))
    onnx.save(wide, tmp_path / "c.onnx", save_as_external_data=True, location="c.data", convert_attribute=True)

    def stage(at):
        session = OrtSession(at / "c.onnx", SessionSpec(threads=1))
        os.truncate(at / "c.data", 0)
        session.run({"input": np.ones((3, 200, 200), np.float32)})
        write_text(at / "sum", "of what is gone")

    assert killed_stages.told_by(stage, tmp_path).startswith(f"file.changed: {tmp_path / 'c.data'} changed while")
    assert not (tmp_path / "sum").exists()


def test_a_graph_that_is_written_to_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "c.onnx"
    path.write_bytes(graphs.convolution().SerializeToString())
    read = onnx.load
    monkeypatch.setattr(onnx, "load", lambda *a, **k: (read(*a, **k), os.utime(path, ns=(1, 1)))[0])
    with pytest.raises(Refused) as refused:
        rc.fold(path, out=tmp_path / "run")
    assert refused.value.code == "file.changed"
    assert not (tmp_path / "run").exists()


WRITING = {
    "verify": partial(rc.verify, count=1),
    "report": rc.report,
    "bench": partial(rc.bench, target="x86-64", rounds=2),
    "collect": lambda run: rc.collect(run / "fold.json", run),
    "bundle": partial(rc.bundle, target="orin-nano"),
    "tune": partial(rc.tune, target="x86-64", rounds=2),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_stage_does_not_wait_for_another_that_writes_in_its_run_but_reports_it(tmp_path, name):
    stage, prepare = killed_stages.BY_STEPS["fold"]
    prepare(tmp_path)
    stage(tmp_path)
    before = inside(tmp_path)
    with lock_folder(tmp_path / "run"):
        assert killed_stages.told_by(lambda at: _elsewhere(WRITING[name], at / "run"), tmp_path).startswith(
            "run.busy: "
        )
    assert inside(tmp_path) == before


def _elsewhere(stage, at):
    """As another command would run it, which holds nothing."""
    contextvars.Context().run(stage, at)


def test_a_stage_may_hold_the_folder_that_its_caller_holds(tmp_path):
    with lock_folder(tmp_path), lock_folder(tmp_path / "." / ""):
        pass
    with lock_folder(tmp_path):
        held = Thread(target=partial(contextvars.Context().run, _taken, tmp_path))
        held.start()
        held.join()


def _taken(folder):
    with pytest.raises(EnvironmentProblem, match="another command is writing"), lock_folder(folder):
        raise AssertionError


def test_what_a_killed_command_left_half_written_goes_with_the_next_one(tmp_path):
    stage, prepare = killed_stages.BY_STEPS["fold"]
    prepare(tmp_path)
    stage(tmp_path)
    run = tmp_path / "run"
    (run / "build").mkdir()
    left = [run / ".verify.json.abc.repaconv-part", run / "build" / ".x86-64.onnx.abc.repaconv-part"]
    for path in left:
        path.write_text("half")
    (run / ".repaconv-work-abc").mkdir()
    (run / ".repaconv-work-abc" / "model.onnx").write_text("half")
    (run / "mine.repaconv-parts").write_text("somebody's own")
    out = tmp_path / "there" / "[r].json"
    out.parent.mkdir()
    (out.parent / ".[r].json.abc.repaconv-part").write_text("half")
    with (out.parent / ".[r].json.abd.repaconv-part").open("w") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        rc.report(run, format="json", paper=False, out=out)
    assert sorted(path.name for path in out.parent.iterdir()) == [".[r].json.abd.repaconv-part", "[r].json"]
    assert not any(path.exists() for path in (*left, run / ".repaconv-work-abc"))
    assert (run / "mine.repaconv-parts").read_text() == "somebody's own"


def test_a_file_that_may_not_be_read_is_an_input_that_is_refused(tiny, repaconv, monkeypatch):
    assert repaconv("fold", tiny)[0] == 0
    allowed, opened = os.access, Path.open
    locked = {"tiny.pth", "fold.json"}  # the tests may run as root, who may read everything

    def denied(path, mode="r", *words, **named):
        if Path(path).name in locked and "r" in mode:
            raise PermissionError(EACCES, os.strerror(EACCES), str(path))
        return opened(path, mode, *words, **named)

    monkeypatch.setattr(os, "access", lambda path, *mode: Path(path).name not in locked and allowed(path, *mode))
    monkeypatch.setattr(Path, "open", denied)
    for words, file in ((("fold", tiny), "tiny.pth"), (("export",), "repaconv-out/tiny/fold.json")):
        code, _, err = repaconv(*words)
        assert (code, f"{file} cannot be read: Permission denied. (file.unreadable)" in err) == (4, True), err
        assert "hint: Check its permissions, and those of the folders" in err
    locked.clear()
    locked.add("model.safetensors")  # of the run: only its hash is read before the network is
    code, _, err = repaconv("verify")
    assert (code, "model.safetensors cannot be read: Permission denied. (file.unreadable)" in err) == (4, True), err


def test_a_file_in_a_folder_that_may_not_be_searched_is_refused_as_a_locked_file_is(repaconv, monkeypatch):
    """It was an error of the machine, with exit code 3."""
    Path("locked").mkdir()
    found = Path.stat

    def denied(path, **named):
        if path.parent.name == "locked":
            raise PermissionError(EACCES, os.strerror(EACCES), str(path))
        return found(path, **named)

    monkeypatch.setattr(Path, "stat", denied)
    for words in (("fold", "locked/net.pth"), ("fold", "locked/net.onnx"), ("inspect", "locked/net.pth")):
        code, _, err = repaconv(*words)
        assert (code, "cannot be read: Permission denied. (file.unreadable)" in err) == (4, True), err

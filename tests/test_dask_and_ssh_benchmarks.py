"""Distributed benchmarks with real processes: a Dask scheduler and workers on loopback, one of them killed during a
job; a real sshd; real TLS.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from debian_packages import install
from onnx import TensorProto, external_data_helper
from planted_faults import META, SETTINGS
from small_graphs import saved, two_outputs
from test_bundle_and_collect import trtexec_of

import repaconv as rc
from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.files import sha256_of_bytes
from repaconv.core.progress import silent
from repaconv.distributed.benchmark_jobs import Job, Model, checked_result, run_job, target_definition
from repaconv.distributed.dask_cluster import _no_answer
from repaconv.distributed.options import ClusterOptions
from repaconv.distributed.remote_bench import _folder_on, _on_the_board, bench_by_ssh, bench_on_worker
from repaconv.distributed.sweep import read_matrix, sweep
from repaconv.distributed.tune_measurements_on_cluster import measurer_on_workers
from repaconv.results import Ratio
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.tune.options import TuneOptions

ORIN = BenchOptions(target="orin-nano", precision="fp16")
PRECISIONS, BATCHES = ("fp32", "int8"), (1, 2)
CELLS = len(PRECISIONS) * len(BATCHES)
PATIENCE_S = 120


def at(scheduler, **more):
    return ClusterOptions(scheduler=scheduler, **more)


class Farm:
    """A scheduler and its workers, each a process of its own."""

    def __init__(self, *options: str, protocol: str = "tcp") -> None:
        self.file = Path("scheduler.json").resolve()
        command = [
            sys.executable,
            "-m",
            "distributed.cli.dask_scheduler",
            "--host",
            f"{protocol}://127.0.0.1",
            "--port",
            "0",
        ]
        command += ["--no-dashboard", "--scheduler-file", str(self.file), *options]
        self.processes = {"scheduler": start(command)}
        try:
            self.address = wait_for(self._address)
        except BaseException:
            self.kill("scheduler")
            raise

    def _address(self) -> str | None:
        """The scheduler's; its file is there before what it says is."""
        try:
            return json.loads(self.file.read_text())["address"]
        except (OSError, ValueError):
            return None

    def worker(self, name: str, *options: str, target: str = "x86-64") -> None:
        command = [sys.executable, "-m", "repaconv", "worker", "--target", target, "--scheduler", self.address]
        self.processes[name] = start([*command, "--name", name, *options])

    def wait_for_workers(self, count: int) -> None:
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:
            client.wait_for_workers(count, timeout=PATIENCE_S)

    def kill(self, name: str) -> None:
        """The nanny and its worker, at once, as when a board loses its power."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(command: list[str]) -> subprocess.Popen[bytes]:
    # a worker that finds its models in a cache of its own has fetched them
    cache = {"XDG_CACHE_HOME": str(Path("cache").resolve())}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, env={**os.environ, **cache}, **silent)


def wait_for(what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return found


@contextmanager
def farm(*options: str, protocol: str = "tcp"):
    made = Farm(*options, protocol=protocol)
    try:
        yield made
    finally:
        for name in list(made.processes):
            made.kill(name)


def checkpoints() -> None:
    weights = plugins.load(plugins.METHODS, "repavit").example("tiny", seed=1)
    torch.save({"state_dict": weights, "meta": META.get("repavit", {})}, "repavit.pth")


def write_matrix(rounds: int) -> Path:
    lines = ["models:", "- checkpoint: repavit.pth", f"  set: {json.dumps(SETTINGS['repavit'])}", "targets: [x86-64]"]
    lines += [f"precisions: [{', '.join(PRECISIONS)}]", f"rounds: {rounds}", f"batches: {[*BATCHES]}"]
    Path("matrix.yaml").write_text("\n".join(lines))
    return Path("matrix.yaml")


@pytest.mark.usefixtures("dask")
def test_a_sweep_with_a_worker_killed_in_the_middle_loses_and_doubles_nothing(repaconv, monkeypatch):
    checkpoints()
    matrix = write_matrix(rounds=300)
    with farm() as cluster:
        for name in "ab":
            cluster.worker(name)
        cluster.wait_for_workers(2)  # so that each has its share when the first result lands
        killed = []

        def watch(what: str, done: int, _total: int) -> None:
            if what == "benchmark jobs" and done == 1 and not killed:
                killed.append("b")
                cluster.kill("b")

        found = sweep(matrix, scheduler=cluster.address, wait_s=PATIENCE_S, progress=watch)
        assert killed == ["b"]
        assert found.verdict == "passed", [row.problem for row in found.rows]
        assert len({(row.batch, row.precision) for row in found.rows}) == len(found.rows) == CELLS
        assert "a" in {row.worker for row in found.rows} <= {"a", "b"}
        assert all(row.attempts >= 1 and row.p50_ms for row in found.rows)
        results = list(Path("repaconv-out/sweep-matrix/results").iterdir())
        assert len(results) == CELLS
        for path in results:  # as on a quiet machine: what is inconclusive would be measured again
            path.write_text(path.read_text().replace('"verdict": "inconclusive"', '"verdict": "noisy"'))
        again = sweep(matrix, scheduler=cluster.address, wait_s=0)
        assert again.resumed == CELLS
        results[0].unlink()
        once = sweep(matrix, scheduler=cluster.address, wait_s=0)
        assert (once.resumed, len(once.rows)) == (CELLS - 1, CELLS)

        # a run of its own, its training form beside it
        rc.fold("repavit.pth", settings=SETTINGS["repavit"])
        rc.export()
        done = bench_on_worker(at(cluster.address, wait_s=PATIENCE_S), BenchOptions(rounds=30))
        assert [row.name for row in done.latencies] == ["deploy form", "training form"]
        assert done.ratio.subject == "deploy form"
        assert done.agreement.verdict == "passed"
        assert "on the worker" in done.note
        assert Path("repaconv-out/repavit/bench/x86-64.json").is_file()
        rc.export(target="arm64")
        with pytest.raises(
            EnvironmentProblem, match=r"no worker for arm64 connected within 0 s; .* workers for x86-64"
        ):
            bench_on_worker(at(cluster.address, wait_s=0), BenchOptions(target="arm64"))
    monkeypatch.setattr("repaconv.distributed.dask_cluster.ANSWER_TIMEOUT_S", 1)
    with pytest.raises(EnvironmentProblem, match="no answer from"):
        bench_on_worker(at("tcp://127.0.0.1:9"), BenchOptions())
    assert repaconv("bench", "--scheduler", "tcp://127.0.0.1:9")[0] == 3


@pytest.fixture
def dask():
    pytest.importorskip("distributed", reason="Dask is absent")


@pytest.mark.usefixtures("dask")
@pytest.mark.parametrize(
    ("scheduler", "why"), [("tcp://127.0.0.1:9", "Connection refused"), ("desk", "missing port number")]
)
def test_a_worker_without_a_scheduler_reports_it(scheduler, why):
    command = [sys.executable, "-m", "repaconv", "worker", "--target", "x86-64", "--scheduler", scheduler]
    patience = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **patience})
    assert done.returncode == 3
    assert f"no answer from the scheduler {scheduler}" in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("dask")
def test_the_reason_why_no_scheduler_answers_is_reported_where_dask_only_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert "no Dask scheduler spoke in time" in _no_answer(taken, TimeoutError()).message
    assert "Connection refused" in _no_answer(taken, TimeoutError()).message
    assert "TimeoutError" in _no_answer("inproc://here", TimeoutError()).message


@pytest.mark.usefixtures("dask")
def test_tls_from_end_to_end(tiny):
    if not shutil.which("openssl"):
        pytest.skip("openssl is absent")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"openssl req -x509 {new} -keyout ca.key -out ca.pem -days 2 -subj /CN=farm",
        f"openssl req {new} -keyout key.pem -out request.pem -subj /CN=machine",
        "openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    files = [Path(name).resolve() for name in ("ca.pem", "cert.pem", "key.pem")]
    theirs = ["--tls-ca-file", str(files[0]), "--tls-cert", str(files[1]), "--tls-key", str(files[2])]
    ours = ["--tls-ca", str(files[0]), "--tls-cert", str(files[1]), "--tls-key", str(files[2])]
    rc.fold(tiny)
    rc.export()
    with farm(*theirs, protocol="tls") as cluster:
        assert cluster.address.startswith("tls://")
        cluster.worker("safe", *ours)
        safe = at(
            cluster.address, wait_s=PATIENCE_S, **dict(zip(("tls_ca", "tls_cert", "tls_key"), files, strict=True))
        )
        done = bench_on_worker(safe, BenchOptions(rounds=3))
        assert "on the worker safe" in done.note
        there = measurer_on_workers(safe, TuneOptions())
        tuned = rc.tune(measurer=there, rounds=3, rewrites=["norm-in-place", "mean-as-pool"])
        assert any(row.ratio is not None for row in tuned.candidates)
        with pytest.raises(EnvironmentProblem, match="requires TLS"):
            bench_on_worker(at(cluster.address), BenchOptions())
        plain = cluster.address.replace("tls://", "tcp://")
        with pytest.raises(EnvironmentProblem, match="no answer from"):
            bench_on_worker(at(plain), BenchOptions())
    with pytest.raises(EnvironmentProblem, match="TLS needs three files"):
        bench_on_worker(at("tls://127.0.0.1:9", tls_ca=files[0]), BenchOptions())


@pytest.mark.usefixtures("dask")
def test_a_model_that_does_not_run_on_a_worker_fails_alone_unless_it_is_the_default_preset(tiny):
    rc.fold(tiny)
    good, bad, other = Path(rc.export(batch=2).output_files[0]), Path("bad.onnx"), Path("other.onnx")
    model = onnx.load(good)
    model.doc_string = "another file of the same graph"
    onnx.save(model, other)
    model.graph.node[0].op_type, model.graph.node[0].domain = "Unheard", "of.nobody"
    model.opset_import.append(onnx.helper.make_opsetid("of.nobody", 1))
    onnx.save(model, bad)
    with farm() as cluster:
        cluster.worker("a")
        there = measurer_on_workers(at(cluster.address, wait_s=PATIENCE_S), TuneOptions())
        for others in ({"other": other, "bad": bad}, {"bad": bad}):
            found = there(good, others, 2, image_size=None)
            assert found.keys() == others.keys()
            assert found["bad"].startswith("it does not run on a: ")
            assert isinstance(found.get("other"), Ratio) == ("other" in others)
        with pytest.raises(Refused, match="failed on a"):
            there(bad, {"good": good}, 2, image_size=None)
        for _ in range(2):  # the second is no further attempt of the first
            done = bench_on_worker(at(cluster.address), BenchOptions(rounds=2))
            assert (done.batch, done.note.rpartition("; ")[2]) == (2, "on the worker a")


@pytest.mark.slow
def test_an_interrupted_sweep_resumes():
    """Here, without a cluster; Ctrl-C as the shell sends it."""
    checkpoints()
    write_matrix(rounds=2000)
    command = [sys.executable, "-m", "repaconv", "sweep", "matrix.yaml", "--quiet"]

    def hear() -> None:  # what runs the tests may have been told to ignore it, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear)
    results = Path("repaconv-out/sweep-matrix/results")
    wait_for(lambda: results.is_dir() and len(list(results.glob("*.json"))) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    before = {path.name: path.read_bytes() for path in results.glob("*.json")}
    assert 2 <= len(before) < CELLS
    kept = {name: text for name, text in before.items() if b'"verdict": "inconclusive"' not in text}
    found = sweep("matrix.yaml")
    assert found.resumed == len(kept)
    assert found.verdict == "passed"
    assert all((results / name).read_bytes() == content for name, content in kept.items())


def test_an_error_in_a_matrix_is_reported_and_a_bad_cell_fails_alone(tiny, repaconv):
    Path("m.toml").write_text('targets = ["x86-64"]\n')
    with pytest.raises(UsageProblem, match=r"m\.toml.*models"):
        read_matrix(Path("m.toml"))
    Path("m.toml").write_text('precisions = ["fp64"]\n[[models]]\ncheckpoint = "tiny.pth"\n')
    with pytest.raises(UsageProblem, match=r"m\.toml:1:1: precisions"):
        read_matrix(Path("m.toml"))
    for line in ("batches = [0]", "batches = []", "targets = []", "threads = 0", "rounds = 1", "seed = -1"):
        Path("m.toml").write_text(f'{line}\n[[models]]\ncheckpoint = "tiny.pth"\n')
        with pytest.raises(UsageProblem, match=rf"m\.toml.*{line.split()[0]}"):
            read_matrix(Path("m.toml"))
    Path("m.yaml").write_text("- just\n- a list\n")
    with pytest.raises(UsageProblem, match="does not contain a matrix"):
        read_matrix(Path("m.yaml"))
    Path("m.yaml").write_text("models: {a: b.pth}\n")
    with pytest.raises(UsageProblem, match=r"m\.yaml: models: input should be a valid list\."):
        read_matrix(Path("m.yaml"))
    Path("m.yaml").write_text("models: [\n")
    with pytest.raises(UsageProblem, match="not YAML"):
        read_matrix(Path("m.yaml"))
    Path("m.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageProblem, match="it is not text"):
        read_matrix(Path("m.yaml"))
    shutil.copy(tiny, "good.pth")
    Path("m.toml").write_text('rounds = 25\n[[models]]\ncheckpoint = "good.pth"\n[[models]]\ncheckpoint = "gone.pth"\n')
    found = sweep("m.toml")
    assert found.verdict == "failed"
    assert [bool(row.problem) for row in found.rows] == [False, True]
    code, out, _ = repaconv("sweep", "m.toml")
    assert code == 1
    assert "1 of 2 measured" in out


def test_a_sweep_measures_again_if_the_external_weights_of_a_graph_have_changed():
    weights = {"w": np.ones((4, 3, 3, 3), dtype=np.float32), "b": np.ones(4, dtype=np.float32)}
    ends = {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}, {"y": (TensorProto.FLOAT, ["n", 4, 6, 6])}
    model = onnx.load(saved("net.onnx", [("Conv", "x w b", "y", {})], weights, *ends))
    for tensor in model.graph.initializer:  # in files of one name
        Path(tensor.name).mkdir()
        external_data_helper.set_external_data(tensor, f"{tensor.name}/net.data")
    onnx.save(model, "net.onnx")
    Path("m.toml").write_text('rounds = 2\ntargets = ["x86-64"]\n[[models]]\ncheckpoint = "net.onnx"\n')
    assert sweep("m.toml").verdict == "passed"
    for count, name in enumerate(weights, 2):
        Path(name, "net.data").write_bytes((2 * weights[name]).tobytes())
        assert sweep("m.toml").verdict == "passed"
        assert len(list(Path("repaconv-out/sweep-m/models").iterdir())) == count


def test_a_sweep_keeps_answers_to_its_own_questions_that_say_something(tiny, monkeypatch, repaconv):
    """The machine measures really; what it thinks of that is set here, since another day it thinks otherwise."""
    Path("desk").mkdir()
    shutil.copy(tiny, "desk/tiny.pth")
    same = files("repaconv.engines.targets").joinpath("x86-64.toml").read_text()
    Path("desk/mine.toml").write_text(same)
    Path("mine.toml").write_text("not the one beside the matrix")
    head = 'rounds = 2\ntargets = ["x86-64", "mine.toml"]\n'
    Path("desk/m.toml").write_text(f'{head}[[models]]\ncheckpoint = "tiny.pth"\n')
    changed, asked = {"quality": {"verdict": "inconclusive"}}, []

    def measured(job, contents):
        asked.append(job["id"])
        result = run_job(job, contents)
        return {**result, **{key: {**result[key], **value} for key, value in changed.items()}}

    def swept() -> tuple[int, int, list[str]]:
        code, out, _ = repaconv("sweep", "desk/m.toml", "--format", "json")
        done = json.loads(out)["data"]
        return code, done["resumed"], [row["problem"] for row in done["rows"]]

    monkeypatch.setattr("repaconv.distributed.sweep.run_job", measured)
    assert swept() == (5, 0, ["", ""])
    assert len(asked) == 1  # two names of one target are one job
    changed["quality"]["verdict"] = "trusted"
    assert swept() == (0, 0, ["", ""])
    assert swept() == (0, 2, ["", ""])
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("repaconv.distributed.sweep.machine_key", lambda _: "another processor")
        assert swept() == (0, 0, ["", ""])
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("repaconv.engines.onnxruntime_cpu.OnnxRuntime.version", lambda _: "99.0")
        assert swept() == (0, 0, ["", ""])
    assert swept()[1] == 0
    for path in Path("repaconv-out/sweep-m/results").iterdir():
        path.unlink()
    for name, value in (("batch", 2), ("threads", 64), ("image_size", (33, 33)), ("target", "t4"), ("latencies", ())):
        monkeypatch.setattr("repaconv.distributed.sweep.run_job", lambda *job, n=name, v=value: {**run_job(*job), n: v})
        code, _, problems = swept()
        assert code == 1
        assert all("another request" in problem for problem in problems)
    monkeypatch.setattr("repaconv.distributed.sweep.run_job", lambda *_: {"stage": "bench"})
    assert "not a measurement that this version understands" in swept()[2][0]
    assert not list(Path("repaconv-out/sweep-m/results").iterdir())


def test_a_model_that_is_not_what_its_hash_says_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = (Model(name="m", sha256="0" * 64),)
    target = target_definition("x86-64")
    job = Job.of(target, models, BenchOptions())
    with pytest.raises(Refused, match="changed in transit"):
        run_job(job.model_dump(mode="json"), {"0" * 64: b"something"})
    assert job.id == Job.of(target, models, BenchOptions(baseline="the desk's.json", out="o.json")).id
    assert job.id != Job.of(target, models, BenchOptions(rounds=3)).id


def test_short_inferences_may_get_more_rounds_than_the_target_has_but_not_than_were_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = two_outputs("m.onnx", "ab").read_bytes()
    model, target = Model(name="m", sha256=sha256_of_bytes(content)), target_definition("x86-64")
    asked, free = (Job.of(target, (model,), BenchOptions(rounds=rounds, threads=1)) for rounds in (2, None))
    result, usual = run_job(asked.model_dump(mode="json"), {model.sha256: content}), target["bench"]["rounds"]
    for rounds in (usual, 4 * usual):
        assert checked_result(free, {**result, "rounds": rounds}).rounds == rounds
    for job, rounds in ((free, usual - 1), (asked, 3)):
        with pytest.raises(Refused, match=f"its rounds is {rounds}"):
            checked_result(job, {**result, "rounds": rounds})


def test_a_folder_of_a_matrix_may_have_file_names_that_are_not_utf_8(tiny):
    Path("net").mkdir()
    shutil.copy(tiny, Path("net", os.fsdecode(b"\xff.pth")))
    Path("m.toml").write_text('rounds = 2\n[[models]]\ncheckpoint = "net"\n')
    (row,) = sweep("m.toml").rows
    assert row.problem


# --- ssh --------------------------------------------------------------------------------------------------


def sshd() -> Path | None:
    """The machine's own; on a CI machine, which is thrown away, Debian's package is installed. None where it is not."""
    place = Path("/usr/sbin/sshd")
    if not place.is_file():
        install("openssh-server", "openssh-client")
    return place if place.is_file() else None


def test_an_error_message_of_ssh_need_not_be_utf_8(monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho folder\nprintf 'inconnu\\351\\n' >&2\ncase \"$*\" in *rm*) exit 255; esac\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with _folder_on("board", "name") as folder:  # the board is gone when the folder is removed
        assert folder == "folder"


@pytest.fixture
def board(monkeypatch):
    """A real sshd on loopback whose PATH has a replayed trtexec, and an ssh that knows it as ``board``."""
    import socket

    server = sshd()
    if server is None or not shutil.which("ssh") or os.geteuid() != 0:
        pytest.skip("there is no sshd here, or it cannot be started")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{name}.key"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tools = Path("board-tools").resolve()
    tools.mkdir()
    trtexec_of("10.3").rename(tools / "trtexec")
    here = Path.cwd()
    options = {
        "ListenAddress": "127.0.0.1",
        "HostKey": here / "host.key",
        "AuthorizedKeysFile": here / "user.key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "SetEnv": f"PATH={tools}:{os.environ['PATH']}",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    process = subprocess.Popen(
        [server, "-D", "-e", "-f", "/dev/null", "-p", str(port), *words], stderr=subprocess.DEVNULL
    )
    Path("config").write_text(
        f"Host board\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {here}/user.key\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    wrapped = Path("bin").resolve()
    wrapped.mkdir()
    (wrapped / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {here}/config "$@"\n')
    (wrapped / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapped}:{os.environ['PATH']}")
    wait_for(lambda: subprocess.run(["ssh", "board", "true"], capture_output=True, check=False).returncode == 0)
    yield "board"
    process.terminate()
    process.wait()


def test_a_lone_board_by_ssh(board, tiny, repaconv):
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # where sshd puts us, whatever HOME says
    rc.fold(tiny)
    rc.export(target="orin-nano", precision="fp16", image_size=32)
    found = bench_by_ssh(board, ORIN, count=2)
    assert (found.verdict, found.runtime, found.links[0].verdict) == ("passed", "tensorrt 10.3.0", "passed")
    assert not list(home.glob("repaconv-*"))
    (home / "repaconv.lock").unlink(missing_ok=True)
    code, out, _ = repaconv("bench", "--target", "orin-nano", "--precision", "fp16", "--host", board)
    assert code == 0
    assert "measured on the board" in out
    (home / "repaconv.lock").unlink(missing_ok=True)
    rc.export(target="orin-nano@jp5.1", precision="fp16", image_size=32)
    with pytest.raises(EnvironmentProblem, match=r"is 10\.3\.0, the bundle is for 8\.5\.2"):
        bench_by_ssh(board, replace(ORIN, target="orin-nano@jp5.1"), count=2)
    assert not list(home.glob("repaconv-*"))
    (home / "repaconv.lock").unlink(missing_ok=True)


def test_two_calls_for_one_bundle_have_folders_of_their_own_on_the_board(monkeypatch):
    """What is sent to the board's shell, sent to the one here."""
    Path("bin").mkdir()
    Path("bin/ssh").write_text('#!/bin/sh\nshift 3\nexec sh -c "$*"\n')
    Path("bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:{os.environ['PATH']}")
    with _folder_on("board", "repaconv-0123") as one, _folder_on("board", "repaconv-0123") as other:
        assert one != other
        assert all(Path(folder).is_dir() and folder.startswith("repaconv-0123.") for folder in (one, other))
        with pytest.raises(EnvironmentProblem, match="no reason at all"), _folder_on("board", "repaconv-0123"):
            raise EnvironmentProblem("no reason at all", hint="", code="none")
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith("repaconv-")) == []


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ("exit 124", "it was stopped after 60 minutes"),
        ("echo error: Killed. >&2; exit 137", "Killed"),
        ("echo OSError: no space left >&2; exit 1", "OSError: no space left"),
        ("exit 0", "no reason"),
    ],
)
def test_a_bundle_without_a_result_is_no_failure_of_ssh(ends, message, monkeypatch):
    """The board's shell is the one here, and its timeout one that ends at once."""
    Path("bin").mkdir()
    Path("bin/ssh").write_text('#!/bin/sh\nshift 3\nexec sh -c "$*"\n')
    Path("bin/timeout").write_text(f"#!/bin/sh\n{ends}\n")
    for name in ("ssh", "timeout"):
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:{os.environ['PATH']}")
    Path("inside").mkdir()
    subprocess.run(["tar", "czf", "bundle.tar.gz", "inside"], check=True)
    with pytest.raises(EnvironmentProblem, match=f"gave no result on board .*: {message}"):
        _on_the_board("board", Path("bundle.tar.gz"), "0" * 64, Path("result.tar.gz"), silent)
    assert not Path("result.tar.gz").exists()


def test_a_board_that_is_not_reached_is_reported(tiny):
    if not shutil.which("ssh"):
        pytest.skip("ssh is absent")
    rc.fold(tiny)
    rc.export(target="orin-nano", image_size=32)
    with pytest.raises(EnvironmentProblem, match=r"ssh to nobody@127\.0\.0\.1 failed"):
        bench_by_ssh("nobody@127.0.0.1", BenchOptions(target="orin-nano"), count=1)
    with pytest.raises(UsageProblem, match="is not a host name"):
        bench_by_ssh("-oProxyCommand=touch x", BenchOptions(target="orin-nano"), count=1)
    assert not Path("x").exists()

"""The command contract as a shell sees it: exit codes, streams, the JSON envelope."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import OFFICIAL
from test_fold_onnx import graph

import repaconv as rc
from repaconv.cli import command_options
from repaconv.cli import main as cli_main
from repaconv.core import plugins
from repaconv.core.errors import UsageProblem
from repaconv.onnx_export.torch_exporter import to_onnx
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.recipe import recipe_file  # noqa: F401  its sections are options, too
from repaconv.stages.shared.option_dataclasses import Options, options_of

ROOT = Path(__file__).resolve().parents[1]


def walk(repaconv, checkpoint):
    for command in (
        ["inspect", checkpoint],
        ["fold", checkpoint, "--method", "riformer"],
        ["verify"],
        ["export", "--onnx"],
        ["bench", "--target", "x86-64"],
    ):
        code, out, _ = repaconv(*command)
        # on a machine that runs tests beside it, a measurement may be inconclusive
        assert code in ((0, 5) if command[0] == "bench" else (0,)), command
        assert out
    return Path("repaconv-out") / checkpoint.stem


def test_the_five_commands_in_a_row(repaconv, tiny):
    run = walk(repaconv, tiny)
    assert Path("repaconv-out/latest").read_text() == "tiny\n"
    assert {p.name for p in run.iterdir()} == {
        "model.safetensors",
        "fold.json",
        "verify.json",
        "model.onnx",
        "export.json",
        "bench",
        "history-x86-64.jsonl",
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", OFFICIAL, ids=lambda path: path.stem)
def test_the_five_commands_on_official_checkpoints(repaconv, path):
    walk(repaconv, path)


def test_json_everywhere(repaconv, tiny):
    for command in (
        ["inspect", tiny],
        ["fold", tiny],
        ["verify"],
        ["export", "--onnx"],
        ["bench", "--rounds", 2],
        ["targets"],
        ["doctor"],
    ):
        code, out, _ = repaconv(*command, "--format", "json")
        envelope = json.loads(out)
        assert set(envelope) == {"schema_version", "command", "status", "exit_code", "data", "errors"}
        # two rounds are too few for bench to say anything, and it says so
        expected = (5, 5, "inconclusive") if command[0] == "bench" else (0, 0, "ok")
        assert (code, envelope["exit_code"], envelope["status"]) == expected
        assert envelope["command"] == command[0]


def test_failures_are_envelopes_too(repaconv, tiny):
    code, out, _ = repaconv("fold", "none.pth", "--format", "json")
    envelope = json.loads(out)
    assert (code, envelope["exit_code"], envelope["errors"][0]["code"]) == (4, 4, "checkpoint.missing")
    for usage in (["fold"], ["fold", tiny, "--nonsense"], ["nonsense"], ["verify"], ["verify", "--rtol", "x"]):
        code, out, _ = repaconv(*usage, "--format=json")
        assert (code, json.loads(out)["exit_code"]) == (2, 2), usage
    repaconv("fold", tiny)
    code, out, _ = repaconv("verify", "--rtol", "stored:1e-12", "--format", "json")
    assert (code, json.loads(out)["status"], json.loads(out)["data"]["verdict"]) == (1, "failed", "failed")
    code, out, _ = repaconv("export", "--onnx", "--format", "json")
    assert (code, json.loads(out)["errors"][0]["code"]) == (1, "verify.failed")


def test_exit_codes_and_streams(repaconv, tiny):
    for code, command in (
        (2, ["export"]),
        (2, ["export", "--onnx", "m.onnx"]),
        (4, ["inspect", "none.onnx"]),
        (4, ["bench", "none.onnx"]),
        (4, ["collect", "none.tar.gz"]),
        (2, ["bench", "--target", "toaster"]),
        (2, ["fold", tiny, "--method", "toaster"]),
        (2, ["fold", tiny, "--set", "eps"]),
        (2, ["fold", tiny, "--set", "eps=x"]),
        (4, ["fold", "none.pth"]),
        (4, ["inspect", "."]),
        (2, ["fold", ""]),
        (2, ["fold", tiny, "--arch", ""]),
        (2, ["fold", tiny, "--arch="]),
        (2, ["fold", tiny, "--set", "eps=1", "--set", "eps=2"]),
    ):
        found, out, err = repaconv(*command)
        assert (found, out) == (code, ""), command
        assert "error:" in err
        assert "hint:" in err
    assert not Path("repaconv-out").exists()
    repaconv("fold", tiny)
    code, out, err = repaconv("export", "--onnx", "-o", "sub/m.onnx")
    assert code == 0
    assert Path("sub/m.onnx").is_file()
    assert "sub/m.onnx" in err
    assert repaconv("bench", "--rounds", 2, "--quiet")[2].splitlines() == ["newest run: repaconv-out/tiny"]
    assert repaconv("bench", "repaconv-out/tiny", "--rounds", 2, "--quiet")[2] == ""
    assert repaconv("export", "repaconv-out/tiny")[0] == 0
    assert repaconv("export", "--onnx", "repaconv-out/tiny", "--batch", "0")[0] == 2


def test_a_folder_that_cannot_be_written(repaconv, tiny):
    Path("file").write_text("")
    assert repaconv("fold", tiny, "-o", "file")[0] == 4
    assert repaconv("fold", tiny, "-o", "/proc/none/x")[0] == 3


def test_a_broken_plug_in_is_a_row(repaconv, monkeypatch):
    from importlib.metadata import EntryPoint

    from repaconv.core import plugins

    right = plugins.registered
    broken = {"bad": EntryPoint("bad", "nowhere.at:all", plugins.METHODS)}
    monkeypatch.setattr(
        plugins, "registered", lambda group: right(group) | (broken if group == plugins.METHODS else {})
    )
    code, out, _ = repaconv("doctor")
    assert code == 3
    assert "nowhere" in out


def test_no_command_is_the_help_and_no_error(repaconv):
    code, out, err = repaconv()
    assert (code, err) == (2, "")
    assert out == repaconv("--help")[1]


def test_every_help_has_an_example(repaconv):
    for command in ("inspect", "fold", "verify", "export", "bench", "targets", "doctor", "demo"):
        code, out, _ = repaconv(command, "--help")
        assert code == 0
        assert f"Example: repaconv {command}" in out


def test_a_help_begins_with_what_its_command_is_about_and_says_it_in_few_columns(repaconv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in [each.name for each in command_options.app.registered_commands]:
        code, out, _ = repaconv(command, "--help")
        assert code == 0
        titles = re.findall("╭─ (.*?) ─", out)
        assert titles[-1] == "General", command  # --format, --quiet, --help
        assert "Output" not in titles or "Input" not in titles or titles.index("Input") < titles.index("Output")
        typed = re.search(r"<(int|float|str|bool|path|list)|\[\[|\{[A-Z]| range", out)  # as Typer writes types
        assert not typed, command
        assert max(map(len, out.splitlines())) <= 80


def test_a_file_whose_name_begins_with_a_dash_is_told_how_to_give_it(repaconv):
    Path("-net.onnx").touch()
    code, _, err = repaconv("fold", "-net.onnx")
    assert code == 2
    assert "hint: If you mean the file, write ./-net.onnx. See `repaconv fold --help`." in err
    assert "If you mean" not in repaconv("fold", "-other.onnx")[2]


def test_a_newcomer_who_types_what_another_tool_would_take_is_told_what_to_type_here(repaconv):
    assert "Here that is repaconv bench --profile." in repaconv("profile", "a.onnx")[2]
    for command in cli_main.OTHER_WORDS.values():
        assert repaconv(command.split()[0], "--help")[0] == 0
    model = Path("net.onnx")
    onnx.save(graph([("Relu", "x", "y")], {}, {"x": [1, 3, 8, 8]}, kind=1), model)
    for command in ("verify", "export", "report"):
        code, _, err = repaconv(command, model)
        assert (code, f"Fold it first: repaconv fold {model}" in err) == (2, True), command
    repaconv("fold", model, "-o", "run")
    for command in ("build", "bundle"):
        assert f"fold it first: repaconv fold {model}" in repaconv(command, model)[2], command


def test_the_demo_refuses_a_folder_that_it_cannot_write_before_any_work(repaconv):
    Path("own").mkdir()
    Path("own/index.html").write_text("mine")
    for words, ends_with, message in (
        (("-o", "own"), 2, "own/index.html already exists"),
        (("-o", "/proc/x"), 3, "cannot write /proc/x/index.html"),
        (("-o", "/proc/x", "--arch", "s12"), 3, "cannot write /proc/x/riformer_s12.pth"),
    ):
        code, out, err = repaconv("demo", *words)
        assert (code, out, message in err, " s  " in err) == (ends_with, "", True, False), err
    assert [path.name for path in Path("own").iterdir()] == ["index.html"]


@pytest.mark.slow
def test_the_demo_walks_the_whole_way(repaconv):
    code, out, _ = repaconv("demo", "--arch", "s12", "--rounds", "2")
    assert code == 0
    assert re.search(r"fold +\S+ of 1e-12 allowed: passed", out), out
    assert "speedup" in out
    assert Path("demo-out").is_dir()


def test_nothing_is_lost_when_the_reader_of_a_file_is_other_weights(repaconv, tiny, tmp_path):
    average = {k: v * 2 for k, v in torch.load(tiny)["state_dict"].items()}
    torch.save({"model": torch.load(tiny)["state_dict"], "model_ema": average}, "both.pth")
    assert repaconv("fold", "both.pth", "--weights", "model_ema")[0] == 0
    assert repaconv("verify")[0] == 0
    assert json.loads(Path("repaconv-out/both/fold.json").read_text())["origin"]["weights"] == "model_ema"


@pytest.mark.parametrize(
    ("typed", "idle"),
    [
        ("inspect a.onnx --set a=b", "--set"),
        ("verify --inputs x.npz --count 3", "--count"),
        ("verify --images d --seed 1", "--seed"),
        ("verify --classes c.txt", "--classes"),
        ("export --precision int8 --classes c.txt", "--classes"),
        ("tune --classes c.txt", "--classes"),
        ("bundle --inputs x.npz --count 3", "--count"),
        ("export --onnx --no-simplify --simplifier onnxsim", "--simplifier"),
        ("export --onnx --images d", "--images"),
        ("build --target x86-64 --replay", "--replay"),
        ("bench --host h --rounds 30", "--rounds"),
        ("bench --scheduler tcp://h:1 --baseline b.json", "--baseline"),
        ("bench --tls-ca c", "--tls-ca"),
        ("bench --max-regression 5%", "--max-regression"),
        ("bench --baseline b.json --update-baseline --max-regression 5%", "--max-regression"),
        ("bench --baseline b.json --accept-inconclusive", "--accept-inconclusive"),
        ("gate r.toml --accept-inconclusive", "--accept-inconclusive"),
        ("bench here.onnx --precision int8", "--precision"),
        ("tune c.pth --labels x.json", "--labels"),
        ("tune . --set a=b", "--set"),
        ("sweep m.toml --wait 3", "--wait"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(typed, idle, repaconv):
    Path("here.onnx").write_bytes(b"")
    code, out, err = repaconv(*typed.split())
    assert (code, out) == (2, "")
    assert f"{idle} has no effect here" in err
    assert {path.name for path in Path().iterdir()} == {"here.onnx"}


def test_an_argument_is_one_where_python_hides_it_in_an_optional():
    """As get_type_hints does before 3.11 with what has None for its default: RUN was no argument there."""
    from typing import Annotated, Optional

    import typer

    from repaconv.cli.command_options import _as_written

    written = Annotated[Path | None, typer.Argument(metavar="[RUN]")]
    for hint in (written, Optional[written]):  # noqa: UP045
        assert _as_written(hint) == written
    assert _as_written(Path | None) == Path | None


def test_every_row_of_idle_options_is_of_a_command_that_has_them():
    from typer.main import get_command

    from repaconv.cli.command_options import IDLE
    from repaconv.cli.main import app

    commands = get_command(app).commands
    for rule in IDLE:
        for command in rule.commands:
            assert set(rule.options) <= {option.name for option in commands[command].params}, (command, rule.options)


def all_options(of: type = Options) -> list[type]:
    return [of, *(found for each in of.__subclasses__() for found in all_options(each))]


@pytest.mark.parametrize("options", all_options(), ids=lambda options: options.__name__)
def test_every_rule_of_options_names_fields_and_can_be_asked(options):
    required = {each.name: "x" for each in options_of(options) if each.default is inspect.Parameter.empty}
    for rule in options.NO_EFFECT:
        assert set(rule.options) <= {each.name for each in options_of(options)}
        rule.where(options(**required))  # raised KeyError for a field of a former name


def test_an_option_without_effect_is_refused_in_python_commands_and_recipes(repaconv, tiny, tmp_path):
    with pytest.raises(UsageProblem, match="keep_fp32 has no effect here: float32 keeps every layer"):
        rc.export(tmp_path, keep_fp32=("head",))
    code, _, err = repaconv("export", "--keep-fp32", "head")
    assert (code, "--keep-fp32 has no effect here: float32 keeps every layer" in err) == (2, True), err
    Path("recipe.toml").write_text(f'checkpoint = "{tiny}"\n[export]\nkeep_fp32 = ["head"]\n')
    code, out, _ = repaconv("run", "recipe.toml")
    assert (code, "export.keep_fp32 would do nothing here: it is for a lower precision" in out) == (2, True), out


def as_a_shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = words.replace("repaconv", f"{sys.executable} -m repaconv")
    shell = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(shell, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_a_reader_that_has_seen_enough_fails_nothing(tiny):
    done = as_a_shell(f"repaconv inspect {tiny} | head -1")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["--help", "inspect {tiny} --format json", "inspect {tiny} -v"])
def test_a_pipe_that_is_closed_before_anything_is_written_fails_nothing(tiny, command):
    """The exit code was 1, which says that a check failed."""
    done = as_a_shell(f"repaconv {command.format(tiny=tiny)} | true")
    assert (done.returncode, "Traceback" in done.stderr, "Exception ignored" in done.stderr) == (0, False, False)


def test_the_work_is_done_although_its_progress_is_not_read(tiny, tmp_path, monkeypatch):
    """The fold ended at its first line, and the exit code was 0; a closed stderr discarded stdout, too."""
    monkeypatch.chdir(tmp_path)
    assert as_a_shell(f"repaconv fold {tiny} -o run 2>&1 | true").returncode == 0
    assert (tmp_path / "run/fold.json").is_file()
    done = as_a_shell(f"repaconv fold {tiny} -o run 2>&1 >result | true; cat result")
    assert "passed: every fold" in done.stdout


def test_a_failure_has_its_exit_code_although_the_output_is_not_read(tiny):
    Path("recipe.toml").write_text(f'checkpoint = "{tiny}"\nsha256 = "{"0" * 64}"\n')
    done = as_a_shell("repaconv gate recipe.toml | true")
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("repaconv fold c.pth --method rep", {"repavit", "repconv"}),
        ("repaconv bench --target orin", {"orin-agx", "orin-nano"}),
        ("repaconv verify ", {"repaconv-out/tiny"}),
        ("repaconv export --precision f", {"fp16", "fp32"}),
        ("repaconv gate ", {"recipes/one.toml"}),
        ("repaconv ta", {"table", "targets"}),
        ("repaconv fold --met", {"--method"}),
        ("repaconv fold c.pt", set()),
        ("repaconv --ver", {"--version"}),
    ],
)
def test_tab_completes_names_and_imports_nothing_heavy(typed, offered, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for path in ("repaconv-out/tiny/fold.json", "recipes/one.toml", "pyproject.toml"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    line = {"COMP_WORDS": typed, "COMP_CWORD": str(len(f"{typed}|".split()) - 1)}
    heavy = {"torch", "numpy", "onnx", "pydantic", "repaconv.results"}
    tab = (
        "import atexit, sys; from repaconv.cli.main import main; "
        f"atexit.register(lambda: sys.stderr.write(' '.join({heavy} & {{*sys.modules}}))); main()"
    )
    environment = {**os.environ, **line, "_REPACONV_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", tab], capture_output=True, text=True, check=True, env=environment)
    assert (set(done.stdout.split()), done.stderr) == (offered, "")


def test_a_graph_is_folded_without_sympy_which_is_imported_when_it_is_used(tmp_path):
    net = graph([("Conv", "x w", "y")], {"w": np.ones((4, 3, 1, 1), np.float32)}, {"x": ("n", 3, 8, 8)}, kind=1)
    onnx.save(net, tmp_path / "net.onnx")
    program = (
        "import sys; from repaconv.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: print(done.code)\n"
        "print('sympy.core' in sys.modules)\n"
        "import onnx_ir; print((onnx_ir.SymbolicDim('n') + 1).value.replace(' ', ''), 'sympy.core' in sys.modules)\n"
        "import sympy.printing.str; print(sympy.printing.str.StrPrinter().doprint(sympy.Symbol('m')))"
    )
    given = ["fold", "net.onnx", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split()[-5:] == ["0", "False", "n+1", "True", "m"]


def test_a_graph_is_folded_and_exported_without_torch_which_can_be_imported_afterwards(tmp_path):
    """onnxsim imports it for nothing, which took twice as long as exporting a small network."""
    weight = np.ones((4, 3, 1, 1), np.float32)
    net = graph([("Conv", "x w", "y")], {"w": weight}, {"x": (1, 3, 8, 8)}, kind=onnx.TensorProto.FLOAT)
    onnx.save(net, tmp_path / "net.onnx")
    program = (
        "import sys, repaconv; "
        "repaconv.fold('net.onnx', out='run'); "
        "tool = repaconv.export('run').simplifier.split()[0]; "
        "print(tool, 'torch' in sys.modules); "
        "import torch; "
        "print(torch.zeros(1).item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["onnxsim", "False", "0.0"]


def test_ctrl_c_is_a_sentence(repaconv, tiny, monkeypatch):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("repaconv.stages.inspect.stage.inspect", stopped)
    code, _, err = repaconv("inspect", tiny)
    assert (code, "interrupted: " in err) == (130, True)
    assert json.loads(repaconv("inspect", tiny, "--format", "json")[1])["exit_code"] == 130


SIGNALED = """
import os, signal, sys
from repaconv.cli.main import main

name, write_through = sys.argv.pop(), os.fsync

def signaled(file):
    write_through(file)
    os.kill(os.getpid(), getattr(signal, name))

os.fsync = signaled
main()
"""
"""The command line, which gets a signal when it has written a file, and before the file has its name."""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_while_a_file_is_written_leaves_nothing_of_it(tiny, name, code):
    """As CI ends a job: the file that was there is whole, no part of the new one is left, and no traceback is shown."""
    heard = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)\n"  # ignored where nohup runs the tests
    given = [sys.executable, "-c", heard + SIGNALED, "fold", str(tiny), "-o", "run", name]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert (done.returncode, "interrupted" in done.stderr, "Traceback" in done.stderr) == (code, True, False)
    assert (f"by {name}:" in done.stderr) == (name != "SIGINT")
    assert not list(Path().glob("run*"))
    assert rc.fold(tiny, out="run").output_files


IN_SERIALIZER = """
import os, signal, sys
from repaconv.cli.main import main

def tick(frame, event, _):
    if frame.f_code.co_name == "_without_absent_task" and event == "call":
        sys.setprofile(None)
        os.kill(os.getpid(), name)

name = signal.Signals[sys.argv.pop()]
sys.setprofile(tick)
main()
"""
"""The command line, which gets a signal in a function that pydantic calls, of whose exception it makes its own."""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_whose_exception_becomes_another_one(tiny, name, code):
    heard = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)\n"
    given = [sys.executable, "-c", heard + IN_SERIALIZER, "fold", str(tiny), "-o", "run", name]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert (done.returncode, "interrupted" in done.stderr, "Traceback" in done.stderr) == (code, True, False)


def test_a_signal_that_is_ignored_from_the_start_remains_ignored(tiny):
    """nohup ignores SIGHUP."""
    given = ["bash", "-c", f"trap '' HUP; exec {sys.executable} -c \"$0\" fold {tiny} -o run SIGHUP", SIGNALED]
    assert subprocess.run(given, capture_output=True, check=False).returncode == 0


def test_the_command_runs_in_a_thread_that_may_set_no_signals():
    program = (
        "import sys, threading\n"
        "from repaconv.__main__ import main\n"
        "sys.argv = ['repaconv', '--version']\n"
        "threading.Thread(target=main).start()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout[:9], done.stderr) == ("repaconv ", "")


def test_ctrl_c_during_the_imports_shows_no_traceback():
    program = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a script runs the tests with &
        "class Stop:\n"
        "    def find_spec(name, *_): os.kill(os.getpid(), signal.SIGINT) if name == 'typer' else None\n"
        "sys.meta_path.insert(0, Stop)\n"
        "runpy.run_module('repaconv', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_ctrl_c_while_the_process_exits_shows_no_traceback():
    program = (
        "import atexit, os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['repaconv', '--version']\n"
        "runpy.run_module('repaconv', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout[:9], done.stderr) == (-signal.SIGINT, b"repaconv ", b"")


def test_python_names_the_argument_that_it_does_not_have_and_takes_no_arrays_for_files(tiny):
    rc.fold(tiny)
    with pytest.raises(TypeError, match=r"^export\(\) has no argument 'precisions_'. Did you mean precision\?$"):
        rc.export(precisions_="int8")
    for array in (np.zeros((1, 3, 32, 32), np.float32), torch.zeros(1, 3, 32, 32)):
        with pytest.raises(rc.UsageProblem, match=r"^inputs is an array in memory; it must be a path\.") as caught:
            rc.verify(inputs=array)
        assert "numpy.savez('inputs.npz', input=array)" in caught.value.hint
    assert issubclass(rc.UsageProblem, rc.RepaconvError)


def test_the_package_shows_its_stages_and_results_are_short(tiny, repaconv):
    import repaconv as package

    def printed_by(*command):
        return "\n".join(line.rstrip() for line in repaconv(*command)[1].splitlines()).strip("\n")

    assert dir(package) == sorted([*package.__all__, *package.ERRORS])
    assert issubclass(package.GateFailed, package.RepaconvError)
    offered = inspect.signature(package.fold).parameters  # what completion offers
    assert {each.name for each in options_of(FoldOptions)} | {"example", "progress"} < set(offered)
    assert "    arch: How to build the network" in package.fold.__doc__
    done = package.fold(tiny)
    assert repr(done) == "<MethodFold passed repaconv-out/tiny/fold.json>"
    assert str(done) == printed_by("fold", tiny)
    assert "\npassed: every fold within 1e-12" in str(done)
    assert {"verdict", "facts", "model_dump"} < set(dir(done))
    assert not {"construct", "model_config", "parse_obj", "schema_json", "FORMER", "SHOWN"} & set(dir(done))
    assert dict(done.__rich_repr__())["method"] == "riformer"
    inspected = package.inspect(tiny)
    assert repr(inspected) == "<Inspection method='riformer' form='training'>"
    assert str(inspected) == printed_by("inspect", tiny)
    package.export()
    measured = package.bench(rounds=2)  # too few to conclude anything from
    assert repr(measured) == "<BenchArtefact passed inconclusive repaconv-out/tiny/bench/x86-64.json>"
    assert repr(package.new_recipe(tiny)) == "<NewRecipe recipe='tiny.toml' method='riformer'>"


def test_what_a_newcomer_types(repaconv, tiny, monkeypatch):
    assert repaconv("fold", "-h")[1] == repaconv("fold", "--help")[1]
    code, _, err = repaconv("fold", tiny)
    assert code == 0
    assert re.search(r"^ +\d+\.\d s  ", err, flags=re.M)  # where nobody has a terminal, steps are lines
    assert "next repaconv export" in " ".join(err.split())
    code, out, _ = repaconv("targets")
    assert " 23 " in next(line for line in out.splitlines() if line.split()[:1] == ["x86-64"])
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, repaconv("targets")[1].splitlines())) <= 60
    monkeypatch.setenv("COLUMNS", "wide")
    assert repaconv("targets")[:2] == (0, out)
    code, _, err = repaconv("fold", tiny, "--set", "imagesize=32")
    assert (code, "Did you mean" in err) == (2, True)


@pytest.mark.parametrize(
    ("command", "near"),
    [
        ("fold net.onnx --preset officil", "official"),
        ("bench --objective throughputt", "throughput"),
        ("bench net.onnx --protocol repavitt", "repavit"),
        ("export --precision fp23", "fp32"),
        ("export --simplifier onxsim", "onnxsim"),
        ("report --format htm", "html"),
        ("verify --rtol onxx:1e-3", "onnx"),
        ("tune --objective latancy", "latency"),
        ("gate r.toml --report junitt:a.xml", "junit"),
        ("fold c.pth --weights modelx", "model"),
        ("convert c.pth --method dwcon", "dwconv"),
        ("export --target cuda@compild", "compiled"),
    ],
)
def test_the_message_for_a_misspelled_name_has_the_nearest_one(repaconv, tiny, command, near):
    weight = np.ones((4, 3, 1, 1), np.float32)
    onnx.save(graph([("Conv", "x w", "y")], {"w": weight}, {"x": (1, 3, 8, 8)}), "net.onnx")
    weights = torch.load(tiny)["state_dict"]
    torch.save({"model": weights, "model_ema": weights}, "c.pth")
    Path("r.toml").write_text('checkpoint = "tiny.pth"')
    if command.startswith(("report", "verify", "export", "tune")):
        rc.fold(tiny)
    code, _, said = repaconv(*command.split())
    assert code in (2, 4)
    assert f"hint: Did you mean {near}? " in said


def test_the_message_for_a_gate_report_without_a_file_says_how_to_name_one(repaconv):
    Path("r.toml").write_text('checkpoint = "tiny.pth"')
    code, _, said = repaconv("gate", "r.toml", "--report", "junit")
    assert (code, "hint: E.g. --report junit:gate.xml." in said) == (2, True)


def test_inspect_shows_the_hash_to_pin_and_each_fact_once(repaconv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    weights = plugins.load(plugins.METHODS, "repavit").example("tiny", 0)
    torch.save({"model": weights, "args": {"num_heads": 2}}, "ckpt.pth")
    onnx.save(graph([("Relu", "x", "y")], {}, {"x": [1, 3, 8, 8]}), "m.onnx")
    for name in ("ckpt.pth", "m.onnx"):
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        code, out, err = repaconv("inspect", name)
        assert f"next repaconv fold {name}" in err
        assert (code, f"SHA-256 {digest}" in out.splitlines()) == (0, True)
        rows = [line.split()[0] for line in out.splitlines() if line.split()]
        assert rows.count("image_size") == (name == "ckpt.pth"), out


def test_what_the_file_does_not_tell_is_in_the_next_command_and_in_the_recipe(repaconv):
    weights = plugins.load(plugins.METHODS, "repavit").example("tiny", 0)
    torch.save({"model": weights}, "heads.pth")
    code, out, err = repaconv("inspect", "heads.pth")
    assert (code, "cannot be folded" in out) == (0, True)
    assert "next repaconv fold heads.pth --set num_heads=N" in " ".join(err.split())
    example = repaconv("fold", "heads.pth", "--set", "heads=4")[2].partition("e.g. ")[2]
    assert "in place of --set heads" in example
    assert repaconv("new-recipe", "heads.pth")[0] == 0
    recipe = Path("heads.toml").read_text().replace("# num_heads", "num_heads").split("[verify]")[0]
    assert "mended: no tensor tells" in recipe
    Path("heads.toml").write_text(recipe)
    assert repaconv("run", "heads.toml", "--dry-run")[0] == 0
    assert "Its tensors are named as those of repavit." in " ".join(
        repaconv("fold", "heads.pth", "--method", "riformer")[2].split()
    )


def test_no_color_is_no_bold_either(monkeypatch):
    from repaconv.core import terminal

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # no terminal called dumb has colors to leave out
    for no_color, codes in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        with (console := terminal.stdout()).capture() as seen:
            console.print("[bold]x[/]")
        assert ("\x1b[" in seen.get()) is codes


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_no_number_of_a_table_is_cut_or_wrapped(width, monkeypatch):
    """In 40 columns `verify` printed a relative error of 1.4e-15 as 1.4, and in 60 it left the notes out."""
    from repaconv.core import terminal

    monkeypatch.setenv("COLUMNS", str(width))
    rows = terminal.table("verdict", "link", "candidate", "max rel", "images/s", "")
    rows.add_row("passed", "onnx", "ONNX under ONNX Runtime\nonly random images", "1.4e-15", "1,234,567.8", "-0.1 (2)")
    rows.add_row("failed", "a/long/path/of/a/file.onnx", "[bold]int8[/]", "", "9.0", "")
    with (console := terminal.stdout()).capture() as printed:
        console.print(rows)
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)  # a file that it is written to has no trailing spaces
    for cell in ("verdict", "max rel", "1.4e-15", "1,234,567.8", "-0.1 (2)", "9.0", "random"):
        assert any(cell in line for line in lines), (cell, lines)
    assert ("1.4e-15" in next(line for line in lines if "passed" in line)) is (width >= 80)  # a table, else lines


def test_tables_are_for_80_columns_with_the_verdict_first_and_v_shows_all(repaconv, tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    torch.save({"state_dict": plugins.load(plugins.METHODS, "repconv").example("tiny-mobileone", 0)}, "many.pth")
    code, out, _ = repaconv("fold", "many.pth", "--set", "image_size=32")
    assert code == 0
    folds = json.loads(Path("repaconv-out/many/fold.json").read_text())["certificate"]
    assert f"{len(folds) - 10} more folds" in out
    assert "more folds" not in repaconv("fold", "many.pth", "--set", "image_size=32", "-v")[1]
    assert repaconv("fold", tiny)[0] == 0
    code, out, _ = repaconv("verify")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if "link" in line).split()[:2] == ["verdict", "link"]
    assert sum(line.split()[:1] == ["passed"] for line in lines) >= 2
    assert re.search(r"\b\d\.\de-\d\d\b +1e-12 relative", out)
    assert "cosine" in repaconv("verify", "-v")[1]


def test_markdown_of_a_report_is_printed(repaconv, tiny):
    repaconv("fold", tiny)
    code, out, _ = repaconv("report", "--format", "markdown", "--no-paper")
    assert code == 0
    assert out == Path("repaconv-out/tiny/report.md").read_text()


def _next(err: str) -> str:
    """The step that a command names as the next one; empty where it names none."""
    return "".join(line.split("next ", 1)[1].strip() for line in err.splitlines() if line.startswith(" next "))


def test_a_path_with_spaces_is_quoted_in_the_next_step(repaconv, tiny):
    shutil.copy(tiny, "my model.pth")
    assert _next(repaconv("inspect", "my model.pth")[2]) == "repaconv fold 'my model.pth'"
    assert "repaconv export -o 'my model.onnx'" in repaconv("export", "my model.onnx")[2]


def test_the_next_step_is_of_the_same_run_and_can_be_taken_here(repaconv, tiny):
    run, other = "repaconv-out/tiny", "repaconv-out/other"
    assert _next(repaconv("fold", tiny)[2]) == "repaconv export"
    assert _next(repaconv("verify")[2]) == "repaconv export"
    assert _next(repaconv("fold", tiny, "-o", other)[2]) == "repaconv export"  # the newest run is the one just folded
    assert _next(repaconv("verify", run)[2]) == f"repaconv export {run}"
    assert _next(repaconv("export", run)[2]) == f"repaconv verify {run}"
    assert _next(repaconv("export", other)[2]) == "repaconv verify"
    assert _next(repaconv("verify", run)[2]) == f"repaconv bench {run} --target x86-64"
    code, _, err = repaconv("bench", run, "--rounds", "4")
    assert _next(err) == f"repaconv report {run}" if code == 0 else _next(err).startswith("stop other processes")
    assert repaconv("export", run, "--target", "orin-nano", "--precision", "fp16")[0] == 0
    taken = _next(repaconv("verify", run)[2])  # the newest export
    assert taken == f"repaconv bundle {run} --target orin-nano --precision fp16"
    assert repaconv(*taken.split()[1:])[0] == 0
    assert repaconv("export", "--target", "arm64")[0] == 0
    taken = _next(repaconv("verify")[2])
    assert taken == "repaconv bench --target arm64 --estimate"


def test_a_command_without_its_argument_says_what_the_argument_is(repaconv):
    code, _, err = repaconv("fold")
    assert (code, "Missing argument 'FILE'." in err) == (2, True)
    assert "hint: FILE: Checkpoint (.pth," in err
    assert "Hugging Face folder. See `repaconv fold --help`." in " ".join(err.split())
    assert "--scheduler: Address of the Dask scheduler." in repaconv("worker", "--target", "x86-64")[2]


def test_a_failed_check_names_what_to_do_about_it(repaconv, tiny):
    repaconv("fold", tiny)
    repaconv("export")
    code, _, err = repaconv("verify", "--rtol", "onnx:1e-12")
    assert (code, _next(err)) == (1, "repaconv verify --drift shows how the error grows from layer to layer")
    assert repaconv(*_next(err).partition(" shows")[0].split()[1:])[0] == 0
    code, _, err = repaconv("verify", "--rtol", "onnx:1e-12", "--drift")
    assert (code, _next(err)) == (1, "")
    assert _next(repaconv("verify", "--rtol", "onnx:1e-12", "--quiet")[2]) == ""


def test_outputs_that_cannot_be_compared_ask_for_images_and_blame_no_rewrite(repaconv):
    """The output is the same for all inputs, as of an untrained network whose statistics hide its input."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1)).eval()
    torch.nn.init.normal_(net[0].weight, std=1e-12)
    torch.nn.init.ones_(net[0].bias)
    ways = {"output": "output", "opset": 20, "batch": None, "dynamic_size": False}
    Path("net.onnx").write_bytes(to_onnx(net, (3, 16, 16), **ways).SerializeToString())
    repaconv("fold", "net.onnx", "--no-measure")
    code, out, err = repaconv("export", "--format", "json")
    links = json.loads(out)["data"]["links"]
    assert code == 5, err
    assert {link["verdict"] for link in links} == {"not verified"}
    assert "was left out" not in str(links)
    assert _next(repaconv("export")[2]).startswith("repaconv verify --inputs FILE.npz, with images")


def test_a_link_of_which_one_row_failed_is_not_called_passed_as_well(repaconv):
    """The scores of a segmenter pass in INT8, its pixels do not: the classes are close together."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 64, 1)).eval()
    ways = {"output": "output", "opset": 20, "batch": None, "dynamic_size": False}
    Path("net.onnx").write_bytes(to_onnx(net, (3, 32, 32), **ways).SerializeToString())
    np.savez("images.npz", input=np.random.default_rng(0).standard_normal((16, 3, 32, 32)).astype(np.float32))
    repaconv("fold", "net.onnx", "--task", "segment", "--no-measure")
    repaconv("export", "--precision", "int8", "--inputs", "images.npz")
    code, out, _ = repaconv("verify", "--inputs", "images.npz")
    rows = [line.split()[:2] for line in out.splitlines()]
    assert (code, ["passed", "int8"] in rows, ["failed", "int8"] in rows) == (1, True, True)
    message = "fold, stored passed on images.npz (16 images); int8 failed on images.npz (16 images)"
    assert out.splitlines()[-1] == f"failed: {message}"

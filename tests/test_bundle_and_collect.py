"""`bundle`, the run on the board, and `collect`, with replays of recorded trtexec output (tests/data/trtexec) under the
Python versions of the boards.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import small_graphs

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.files import write_artefact
from repaconv.engines import trtexec_logs
from repaconv.engines.targets import board_run
from repaconv.stages.bundle.text import board_commands
from repaconv.verification.model_runners import ImageSession, load_onnx

RECORDED = Path(__file__).parent / "data" / "trtexec"
RUN = Path("repaconv-out/tiny")
BOARDS = {
    "8.2": ("jetson-nano", "8.2.1", "not verified"),
    "8.5": ("orin-nano@jp5.1", "8.5.2", "passed"),
    "10.3": ("orin-nano", "10.3.0", "not verified"),
    "11.1": ("mine.toml", "11.1.0", "passed"),
}


def python_of_a_board() -> str:
    """3.6 as on JetPack 4, or 3.8 as on JetPack 5, where this machine has one; else this one."""
    for name in ("3.6", "3.8"):
        shim = shutil.which(f"python{name}")
        folder = Path(shim).parents[1] / "versions" if shim else Path()  # of pyenv, if that is what it is
        for path in sorted(folder.glob(f"{name}.*/bin/python3")) if shim else []:
            return str(path)
        if found := shutil.which(f"python{name}"):
            works = subprocess.run([found, "--version"], capture_output=True, check=False)
            if works.returncode == 0:
                return found
    return sys.executable


def trtexec_of(version: str) -> Path:
    path = Path(f"trtexec-{version}")
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {RECORDED}/replay.py {RECORDED}/{version} "$@"\n')
    path.chmod(0o755)
    return path.resolve()


def unpacked(bundle: Path) -> Path:
    """The one folder that it holds."""
    with tarfile.open(bundle) as tar:
        (folder,) = {Path(name).parts[0] for name in tar.getnames()}
        tar.extractall(**({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from Python 3.11.4 on
    return Path(folder)


def on_the_board(bundle: Path, version: str, *, python: str = sys.executable, **environment: str):
    """Unpack and run, as somebody at the board would."""
    shutil.rmtree("board", ignore_errors=True)
    unpacked(bundle).rename("board")
    command = [python, "run.py", "--trtexec", str(trtexec_of(version))]
    done = subprocess.run(
        command, cwd="board", capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    return done, Path("board/result.tar.gz")


@pytest.fixture
def bundled(tiny):
    """Bundle for the board that has this trtexec."""
    rc.fold(tiny)
    text = RECORDED.joinpath("../../../repaconv/engines/targets/orin-nano.toml").resolve().read_text()
    plain = text.partition("[variants")[0] + "[bench]" + text.partition("[bench]")[2]
    Path("mine.toml").write_text(plain.replace('"10.3.0"', '"11.1.0"').replace('name = "orin-nano"', 'name = "mine"'))

    def make(version: str, precision: str = "fp16", **settings: object):
        target = BOARDS[version][0]
        rc.export(target=target, precision=precision, image_size=32)
        return rc.bundle(target=target, precision=precision, count=3, batch=2, **settings)

    return make


@pytest.mark.parametrize("version", BOARDS)
def test_bundle_replayed_board_and_collect(bundled, version, repaconv, record_property):
    target, runtime, proof = BOARDS[version]
    made = bundled(version)
    assert made.images == 3
    python = python_of_a_board()
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    record_property(f"replayed board, trtexec {version}", f"run.py under {said}")
    done, result = on_the_board(RUN / "build" / made.payload.path, version, python=python)
    assert done.returncode == 0, done.stderr
    found = rc.collect(result)
    assert (found.verdict, found.links[0].verdict) == ("passed", "passed")
    assert found.links[0].metrics.images == 3
    assert (found.target, found.runtime) == (made.target, f"tensorrt {runtime}")
    assert found.precision_proof == proof
    assert found.latency.p50_ms == 0.844288
    assert len(found.profile) > 3
    assert found.machine["board"]["system"]
    assert found.fused_attentions == (1 if version == "11.1" else 0)
    assert made.target == target.replace(".toml", "")
    code, out, _ = repaconv("collect", result)
    assert code == 0
    assert "measured on the board" in out


def test_what_the_versions_are_asked_for(bundled):
    """Precision by flags before 10, by the graph from 10 on; how is measured is the same for all."""
    asked = {}
    for version in BOARDS:
        _, result = on_the_board(RUN / "build" / bundled(version, workspace_mib=512).payload.path, version)
        with tarfile.open(result) as tar:
            content = json.loads(tar.extractfile("result.json").read())
        asked[version] = {entry["step"]: entry for entry in content["commands"]}
    build = {version: set(steps["build"]["command"]) for version, steps in asked.items()}
    assert "--fp16" in build["8.2"]
    assert "--workspace=512" in build["8.2"]
    assert "--fp16" in build["8.5"]
    assert {"--memPoolSize=workspace:512", "--stronglyTyped"} <= build["10.3"]
    assert not {"--fp16", "--stronglyTyped"} & build["11.1"] - {"--stronglyTyped"}
    assert "--exportLayerInfo=layers.json" in asked["8.2"]["build"]["left_out"]
    assert asked["10.3"]["build"]["left_out"] == []
    for version in ("8.2", "8.5", "10.3"):
        assert {"--noDataTransfers", "--useSpinWait", "--useCudaGraph"} <= set(asked[version]["times"]["command"])
    assert not {"--noDataTransfers", "--useCudaGraph"} & set(asked["11.1"]["times"]["command"])


def test_float32_asks_for_no_tf32_and_int8_is_symmetric(bundled):
    _, result = on_the_board(RUN / "build" / bundled("10.3", "fp32").payload.path, "10.3")
    with tarfile.open(result) as tar:
        content = json.loads(tar.extractfile("result.json").read())
    assert "--noTF32" in content["commands"][0]["command"]
    assert rc.collect(result).links[0].tolerance.kind == "exact"
    done, result = on_the_board(RUN / "build" / bundled("10.3", "int8").payload.path, "10.3")
    assert done.returncode == 0
    assert rc.collect(result).links[0].tolerance.kind == "lossy"


def test_an_engine_that_computes_something_else_fails_on_the_board_and_on_the_desk(bundled, repaconv):
    made = bundled("10.3", "fp32")
    done, result = on_the_board(RUN / "build" / made.payload.path, "10.3", REPLAY_SCALE="1.01")
    assert done.returncode == 1
    assert "does not compute what it should" in done.stderr
    code, out, _ = repaconv("collect", result)
    assert code == 1
    assert "failed" in out
    assert json.loads((RUN / "build/orin-nano.32x32.collected.json").read_text())["verdict"] == "failed"


def test_a_board_on_which_the_build_fails_says_why(bundled):
    made = bundled("8.5")
    done, result = on_the_board(RUN / "build" / made.payload.path, "8.5", REPLAY_FAILS="1")
    assert done.returncode == 5
    with pytest.raises(Refused, match="LayerNormalization") as raised:
        rc.collect(result)
    assert raised.value.code == "collect.problem"


def test_another_tensorrt_than_the_bundles_is_refused_or_recorded(bundled):
    made = bundled("8.5")
    done, _ = on_the_board(RUN / "build" / made.payload.path, "10.3")
    assert done.returncode == 3
    assert "is 10.3.0, the bundle is for 8.5.2" in done.stderr
    command = [sys.executable, "run.py", "--any-version", "--trtexec", str(trtexec_of("10.3"))]
    assert subprocess.run(command, cwd="board", capture_output=True, check=False).returncode == 0
    found = rc.collect("board/result.tar.gz")
    assert found.verdict == "failed"
    assert "is not orin-nano@jp5.1's" in found.note


def test_a_bundle_is_the_same_bytes_twice_and_a_changed_one_does_not_run(bundled):
    made = bundled("10.3")
    first = (RUN / "build" / made.payload.path).read_bytes()
    assert rc.bundle(target="orin-nano", precision="fp16", count=3, batch=2).payload.sha256 == made.payload.sha256
    assert (RUN / "build" / made.payload.path).read_bytes() == first
    on_the_board(RUN / "build" / made.payload.path, "10.3")
    with Path("board/calls.npz").open("r+b") as file:
        file.write(b"1234")
    done = subprocess.run([sys.executable, "run.py"], cwd="board", capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "calls.npz is not the file" in done.stderr


def test_the_boards_script_leaves_alone_what_is_not_its_own(bundled):
    made = bundled("10.3", "fp32")
    on_the_board(RUN / "build" / made.payload.path, "10.3")
    Path("board/work").mkdir()
    Path("board/work/thesis.txt").write_text("mine")
    command = [sys.executable, "run.py", "--trtexec", str(trtexec_of("10.3"))]
    again = subprocess.run(command, cwd="board", capture_output=True, check=False)
    assert again.returncode == 0
    assert Path("board/work/thesis.txt").read_text() == "mine"
    Path("board/result.tar.gz").write_text("mine")
    assert subprocess.run(command, cwd="board", capture_output=True, check=False).returncode == 2
    assert Path("board/result.tar.gz").read_text() == "mine"


def test_a_damaged_result_is_refused_and_nothing_is_written(bundled, tmp_path):
    made = bundled("10.3")
    _, result = on_the_board(RUN / "build" / made.payload.path, "10.3")
    with tarfile.open(result) as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}

    def refused(match: str, change: dict[str, bytes | None], link: str = "") -> None:
        path = tmp_path / "changed.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, value in {**content, **change}.items():
                if value is not None:
                    info = tarfile.TarInfo(name)
                    info.size = len(value)
                    tar.addfile(info, io.BytesIO(value))
            if link:
                info = tarfile.TarInfo("leads.log")
                info.type, info.linkname = tarfile.SYMTYPE, link
                tar.addfile(info)
        with pytest.raises(Refused, match=match) as record:
            rc.collect(path)
        assert record.value.exit_code == 4

    record = json.loads(content["result.json"])
    refused("times.json is gone or not what the board wrote", {"times.json": content["times.json"] + b" "})
    refused("output_0.json is gone", {"output_0.json": None})
    refused("result.json is not in it", {"result.json": None})
    refused("not JSON", {"result.json": content["result.json"][:40]})
    for broken in ({"commands": None}, {"commands": [{"command": []}]}, {"engine": "x"}):
        refused("does not say what the board ran", {"result.json": json.dumps({**record, **broken}).encode()})
    refused("nothing vouches for more.log", {"more.log": b"x"})
    refused("'../escaped.log'", {"../escaped.log": b"x"})
    refused("'/etc/escaped'", {"/etc/escaped": b"x"})
    refused("leads.log", {}, link="/etc/passwd")
    refused(
        "does not belong to any bundle", {"result.json": json.dumps({**record, "bundle_sha256": "0" * 64}).encode()}
    )
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(result.read_bytes()[:-200])
    with pytest.raises(Refused, match="not the result of a board"):
        rc.collect(cut)
    assert not list(tmp_path.rglob("escaped*"))
    assert not (RUN / "build/orin-nano.fp16.32x32.collected.json").exists()


def test_a_call_that_is_filled_up_expects_what_its_pixels_give(tiny):
    rc.fold(tiny)
    rc.export(target="orin-nano", with_preprocessing=True)
    made = rc.bundle(target="orin-nano", count=3, batch=2)
    folder = unpacked(RUN / "build" / made.payload.path)
    session, calls = ImageSession(load_onnx(folder / "model.onnx")), np.load(folder / "calls.npz")
    assert calls["input_0_0"].dtype == np.uint8
    for call in range(2):
        expected = calls[f"output_{call}_0"].reshape(2, -1)
        assert np.abs(session.run(calls[f"input_{call}_0"]) - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_commands_for_the_board_quote_the_name_of_the_run(tiny):
    rc.fold(tiny, out="my run")
    rc.export(target="orin-nano")
    made = rc.bundle(target="orin-nano", count=1)
    assert "python3 'my run-orin-nano/run.py'" in board_commands(made)
    with tarfile.open(Path("my run/build") / made.payload.path) as bundle:
        readme = bundle.extractfile("my run-orin-nano/README.txt").read().decode()
    assert "python3 'my run-orin-nano/run.py' -o" in readme


def test_normalized_images_are_refused_for_a_graph_that_takes_pixels(tiny, repaconv):
    rc.fold(tiny)
    rc.export(target="orin-nano", with_preprocessing=True)
    np.savez("images.npz", input=np.zeros((2, 3, 32, 32), np.float32))
    code, _, err = repaconv("bundle", "--target", "orin-nano", "--inputs", "images.npz")
    assert (code, "takes pixels as its input image" in err, "Traceback" in err) == (2, True, False)
    assert "--images" in err
    assert not (RUN / "build").exists()
    pixels = RUN / "model.orin-nano.pixels.onnx"
    assert repaconv("compare", RUN, pixels, "--inputs", "images.npz")[0] == 2


def test_every_input_and_output_goes_by_its_name():
    """Names that trtexec would split, whole numbers, and calls that are judged whole."""
    rc.fold(small_graphs.tokens("ids:0"))
    rc.export(target="orin-nano")
    made = rc.bundle(target="orin-nano", count=2)
    assert (made.images, made.batch) == (2, 1)
    done, result = on_the_board(Path("repaconv-out/tokens/build") / made.payload.path, "10.3")
    assert done.returncode == 0, done.stderr
    assert "tokens: largest error" in done.stdout
    with tarfile.open(result) as tar:
        content = json.loads(tar.extractfile("result.json").read())
    build, first = (entry["command"] for entry in content["commands"][:2])
    assert re.search(r"--minShapes='ids:0':1x\d+,mask:1x\d+ ", " ".join(build))
    assert any(word.startswith("--loadInputs='ids:0':") and ",mask:" in word for word in first)
    found = rc.collect(result)
    assert {link.candidate.partition("output ")[2]: link.verdict for link in found.links} == {
        "tokens": "passed", "scores": "passed", "class": "passed"
    }  # fmt: skip
    off, result = on_the_board(Path("repaconv-out/tokens/build") / made.payload.path, "10.3", REPLAY_SCALE="1.01")
    assert off.returncode == 1
    assert [link.verdict for link in rc.collect(result).links] == ["failed", "failed", "passed"]


def test_whole_numbers_have_32_bits_before_tensorrt_10(tmp_path, monkeypatch):
    np.savez(tmp_path / "calls.npz", input_0_0=np.array([[3, -4]]))
    monkeypatch.setattr(board_run, "HERE", str(tmp_path))
    for version, dtype in (("8.5.2", np.int32), ("10.3.0", np.int64)):
        board = board_run.Board("", "", version, {}, "")
        assert np.frombuffer(board.taken("input_0_0"), dtype).tolist() == [3, -4]


@pytest.mark.slow
def test_what_tune_found_for_a_board_is_the_model_that_goes_to_it(tiny, repaconv):
    rc.fold(tiny)
    for precision in ("fp32", "fp16"):
        rc.export(target="orin-nano", precision=precision)
    found = rc.tune(target="orin-nano", rewrites=["bias-forward"], rounds=2, measurer=lambda *_, **__: {})
    way = found.deployment.model_copy(update={"precision": "fp16"})
    write_artefact(Path("tuned.json"), found.model_copy(update={"deployment": way}))
    code, _, err = repaconv("bundle", "--preset", "tuned.json")
    assert (code, "no fp16 ONNX model for orin-nano" in err, "--preset tuned.json" in err) == (2, True, True)
    np.savez("x.npz", input=np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32))
    assert repaconv("export", "--target", "orin-nano", "--preset", "tuned.json", "--inputs", "x.npz")[0] == 0
    made = rc.bundle(target="orin-nano", preset="tuned.json", count=2)
    assert (made.precision, made.variant) == ("fp16", "orin-nano.form-tuned.fp16")


def test_what_cannot_be_bundled_is_reported(tiny, repaconv):
    rc.fold(tiny)
    with pytest.raises(UsageProblem, match="bundles are for boards with TensorRT"):
        rc.bundle(target="x86-64")
    with pytest.raises(UsageProblem, match="no fp32 ONNX model for orin-nano yet"):
        rc.bundle(target="orin-nano")
    rc.export(target="x86-64")
    rc.fold(tiny, out="other")  # is the newest run now, so that the hint has to name this one
    with pytest.raises(UsageProblem, match="yet; it has x86-64") as refused:
        rc.bundle("repaconv-out/tiny", target="orin-nano")
    assert refused.value.hint.startswith("repaconv export repaconv-out/tiny --target orin-nano")
    assert repaconv("bundle", "--target", "orin-nano")[0] == 2
    assert repaconv("collect", "nothing.tar.gz")[0] == 4


# --- formats ----------------------------------------------------------------------------------------------


def test_the_boards_script_is_python_3_6_of_the_standard_library():
    source = Path(board_run.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= set(sys.stdlib_module_names)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "capture_output" not in source  # 3.7


@pytest.mark.parametrize(
    ("text", "version"),
    [("v8201", "8.2.1"), ("v8502", "8.5.2"), ("v100300", "10.3.0"), ("v101602", "10.16.2"), ("v110100", "11.1.0")],
)
def test_versions_in_banners(text, version):
    line = f"&&&& RUNNING TensorRT.trtexec [TensorRT {text}] [b106] # trtexec --help"
    assert trtexec_logs.version_of(line) == board_run.version_of(line) == version
    assert trtexec_logs.version_of("[TensorRT") == board_run.version_of("nothing") == ""
    dotted = "&&&& RUNNING TensorRT.trtexec [TensorRT v11.1.0.106] [b48]"
    assert trtexec_logs.version_of(dotted) == board_run.version_of(dotted) == "11.1.0"


def test_recorded_files_are_read_as_they_are():
    def read(name):
        return json.loads((RECORDED / name).read_text())

    assert np.median(trtexec_logs.compute_ms(read("times.json"))) == pytest.approx(0.844288)
    assert trtexec_logs.median_ms((RECORDED / "8.2/log.txt").read_text()) == 13.6698
    assert trtexec_logs.median_ms((RECORDED / "10.3/log.txt").read_text()) == 3.14062
    assert trtexec_logs.median_ms((RECORDED / "11.1/log.txt").read_text()) is None
    assert trtexec_logs.layer_types(read("8.5/layers.json")) == {"CaskConvolution.HALF": 2}
    assert trtexec_logs.described_layers(read("10.3/layers.json")) == (5, 0)
    assert trtexec_logs.layer_types(read("10.3/layers.json")) == {}
    assert trtexec_logs.layer_types(read("11.1/layers.json")) == {"gemm.HALF": 1, "kgen.HALF": 1}
    assert trtexec_logs.fused_attentions(read("11.1/layers.json")) == 1
    assert trtexec_logs.layer_times(read("10.3/profile.json"))[1].mean_ms == 4.19536
    # a published --exportOutput
    sample = [{"name": "probs", "dimensions": "1x5", "values": [0.0435101, 0.0340782, 0.0555826, 0.195444, 0.671385]}]
    assert trtexec_logs.outputs(sample)["probs"].shape == (1, 5)


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (trtexec_logs.compute_ms, [{"latencyMs": 1.0}]),
        (trtexec_logs.compute_ms, []),
        (trtexec_logs.compute_ms, [{"computeMs": -1.0}]),
        (trtexec_logs.compute_ms, 3),
        (trtexec_logs.layer_times, [{"name": "x"}]),
        (trtexec_logs.outputs, [{"name": "x", "dimensions": "1x2", "values": [1.0]}]),
        (trtexec_logs.layer_types, []),
        (trtexec_logs.described_layers, {"Bindings": []}),
    ],
)
def test_what_trtexec_does_not_write_is_refused(read, wrong):
    with pytest.raises(Refused, match="these are not the"):
        read(wrong)

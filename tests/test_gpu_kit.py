"""The kit that measures on a GPU elsewhere: missing pieces, and the evaluation of its results. `make gpu-bare` runs it.

`data/gpu/rehearsal.json` has the results of small networks on a CPU, in the format of a GPU's result.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from gpu import kit, kit_installer, models
from gpu.plan import ANY, BATCHES, CASES, MADE, NETWORKS, OURS, TRAINING, steps
from gpu.result_evaluation import evaluated, joined, place_of, read
from gpu.session import canonical
from gpu.steps import done as outcome_of
from gpu.steps import measured
from gpu.tables import END, START, markdown, put
from packaging.requirements import Requirement

from repaconv.core.errors import Refused
from repaconv.engines.nvidia_gpu import within_memory
from repaconv.sources.verified_onnx_export import runnable
from repaconv.verification.model_runners import load_onnx

RECORDED = json.loads((Path(__file__).parent / "data/gpu/rehearsal.json").read_text())
KIT = {"id": RECORDED["kit"], "plan": [step["name"] for step in RECORDED["steps"]]}
ROW, ENGINE = "repavit-tiny.b4.cpu-torch.fp32", "repavit-tiny.x86-64.fp32"


def test_the_kit_brings_what_repaconv_requires():
    every = map(Requirement, requires("repaconv") or ())
    required = [
        each for each in every if each.marker is None or each.marker.evaluate({"python_version": "3.12", "extra": ""})
    ]
    assert len(required) > 10
    assert {each.name for each in required} <= {*kit.CORE, *kit.ONNX, *kit.ASSUMED}


def test_every_method_has_its_rows_and_what_a_step_needs_comes_before_it():
    plan = steps()
    assert len({step.name for step in plan}) == len(plan)
    methods = {each.method for each in CASES}
    assert methods == {"repavit", "riformer", "nondeep", "pyra", "dwconv"}
    for kind in ("row", "engine", "tune"):
        assert {step.given["method"] for step in plan if step.kind == kind} - {ANY} == methods
    of_graphs = [step for step in plan if step.given.get("method") == ANY]
    assert {(step.kind, step.given["target"]) for step in of_graphs} == {("row", "cuda-ort"), ("tune", "cuda-ort")}
    assert {step.given["size"] for step in of_graphs if step.kind == "row"} == {each.size for each in NETWORKS}
    for step in plan:
        before = plan[: plan.index(step)]
        assert step.kind == "prepare" or any(each.kind == "prepare" and each.model == step.model for each in before)


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_its_networks_are_left_out_with_the_reason(tmp_path):
    step = next(each for each in steps() if each.kind == "prepare" and each.model == f"{ANY}-{NETWORKS[0].size}")
    found = outcome_of(step, tmp_path)
    assert (found["status"], found["why"]) == ("not verified", "timm is not installed, which has the network.")


# --- pieces -------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """A kit of two bundles, of which the second is in three pieces; its core says what it is asked."""
    session = tmp_path / "session.py"
    session.write_text("import json, sys, there\nprint(json.loads(sys.argv[sys.argv.index('--missing') + 1]))\n")
    with zipfile.ZipFile(tmp_path / "there-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("there.py", "")
    (tmp_path / "large.bin").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty.py").write_text("")
    folder = tmp_path / "kit"
    folder.mkdir()
    contents = {
        "core": {
            "benchmarks/gpu/__init__.py": tmp_path / "empty.py",
            "benchmarks/gpu/session.py": session,
            "there-1.0-py3-none-any.whl": tmp_path / "there-1.0-py3-none-any.whl",
        },
        "large": {"large.bin": tmp_path / "large.bin"},
    }
    bundles = {}
    for name, files in contents.items():
        whole = kit.packed(files, tmp_path / f"{name}.tar")
        bundles[name] = kit.cut(name, whole, folder, 16384 if name == "core" else 4096)
    text, known = kit.script(bundles, f"{sys.version_info[0]}.{sys.version_info[1]}")
    (folder / "gpu.sh").write_text(text)
    return folder, known


def run(folder, work, *options):
    command = ["sh", str(folder / "gpu.sh"), "--work", str(work), *options]
    (work.parent / "gpu.py").write_text("raise SystemExit('what lies where it is called is not the kit')")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHON": sys.executable}, cwd=work.parent
    )
    return done.returncode, done.stdout + done.stderr


def test_pieces_arrive_alone_and_the_kit_says_what_it_lacks(made, tmp_path):
    folder, known = made
    arrived, work = tmp_path / "arrived", tmp_path / "work"
    arrived.mkdir()
    (arrived / "gpu.sh").write_text((folder / "gpu.sh").read_text())
    assert known["bundles"]["large"] == ["large.00", "large.01", "large.02"]
    code, message = run(arrived, work)
    assert code == 3
    assert "not verified: the bundle core is not whole: core.00 did not arrive" in message
    for piece in ("core.00", "large.01"):  # one at a time, each gone again before the next
        (arrived / piece).write_bytes((folder / piece).read_bytes())
        assert run(arrived, work, "--take")[0] == 0
        (arrived / piece).unlink()
    (arrived / "large.00").write_bytes((folder / "large.00").read_bytes()[:-1])
    code, message = run(arrived, work)
    assert code == 0, message
    assert "2 of 4 pieces are here" in message
    assert "{'large': 'large.00 is damaged: its hash is another; large.02 did not arrive'}" in message
    code, message = run(arrived, work, "--pieces", str(folder))
    assert (code, "{}" in message) == (0, True)
    assert (work / "large" / "large.bin").read_bytes() == (tmp_path / "large.bin").read_bytes()


def test_another_python_and_one_without_torch_are_reported(monkeypatch):
    assert "for Python 2.7, this is 3." in kit_installer.lacks({"python": "2.7"})
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setattr(kit_installer.sys, "executable", "/bin/false")
    assert "has no torch" in kit_installer.lacks({"python": here})


# --- results ------------------------------------------------------------------------------------------


def written(result, path):
    """As the kit writes it."""
    bare = {key: value for key, value in result.items() if key != "sha256"}
    path.write_text(canonical({**bare, "sha256": hashlib.sha256(canonical(bare).encode()).hexdigest()}))
    return path


def changed(name=ROW, **fields):
    """The recorded result with another first row, or another step."""
    rows = [{**step, **fields} if step["name"] == name else step for step in RECORDED["steps"]]
    return {**RECORDED, "steps": rows}


def found(result, name=ROW):
    return next(step for step in evaluated(result, KIT)["steps"] if step["name"] == name)


def test_a_complete_result_is_evaluated_again(tmp_path):
    done = evaluated(read(written(RECORDED, tmp_path / "r.json"), KIT), KIT)
    assert done["verdict"] == "passed"
    assert done["partial"] == []
    row = found(RECORDED)
    assert (row["verdict"], row["faults"]) == ("passed", [])
    assert set(row["p50_ms"]) == {"vanilla", "training form", "official", OURS}
    assert row["ratios"]["official"]["low"] <= row["ratios"]["official"]["median"]
    engines = {step["name"]: step for step in done["steps"] if step["kind"] == "engine" and "built" in step}
    assert {step["built"] for step in engines.values()} == {"passed"}
    assert engines["repavit-tiny.rtx-40.fp32"]["verdict"] == "not verified"
    assert engines[ENGINE]["verdict"] == "passed"
    assert [row["batch"] for row in engines[ENGINE]["batches"]] == list(BATCHES)
    text = markdown(done)
    assert "there is none here" in text
    assert "2 steps (repavit-tiny.rtx-40.fp16 first)" in text  # not built: they are made on their card alone
    assert text.count("| x86-64 | fp32 | ") >= len(BATCHES)
    assert "no preset was measured, so the targets of this GPU have none by default" in text
    assert "1.30 (Table 4, an A6000)" in text


def test_what_was_changed_cut_or_is_another_kits_is_refused(tmp_path):
    path = written(RECORDED, tmp_path / "r.json")
    whole = path.read_text()
    path.write_text(whole.replace('"precision":"bf16"', '"precision":"fp32"', 1))
    with pytest.raises(Refused, match="changed or cut"):
        read(path, KIT)
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(Refused, match="no result of the kit"):
        read(path, KIT)
    with pytest.raises(Refused, match="is of the kit"):
        read(written(RECORDED, path), {**KIT, "id": "another"})
    with pytest.raises(Refused, match="has the format"):
        read(written({**RECORDED, "format": "trtexec"}, path), KIT)


def test_what_was_cut_off_or_lacked_pieces_is_partial():
    rows = [{"status": "not run", **{k: v for k, v in step.items() if k in ("name", "kind", "model", "given")}}
            if step["name"] != ROW else step for step in RECORDED["steps"]]  # fmt: skip
    done = evaluated({**RECORDED, "steps": rows, "missing": {"onnxruntime": "onnxruntime.03 did not arrive"}}, KIT)
    assert done["verdict"] == "passed"
    measuring = sum(step["kind"] not in MADE for step in rows)
    assert done["partial"][0] == f"{measuring - 1} of {measuring} steps were not run"
    assert done["partial"][1] == "without onnxruntime: onnxruntime.03 did not arrive"
    assert "*Partial*" in markdown(done)
    nothing = evaluated({**RECORDED, "steps": rows[1:]}, {**KIT, "plan": KIT["plan"]})
    assert nothing["verdict"] == "passed" if any(step["status"] == "done" for step in rows[1:]) else "not verified"


def link(**fields):
    links = next(step for step in RECORDED["steps"] if step["name"] == ROW)["links"]
    return {**links, OURS: {**links[OURS], **fields}}


def given(precision):
    return {**next(step for step in RECORDED["steps"] if step["name"] == ROW)["given"], "precision": precision}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"links": link(verdict="failed", location={"module": "blocks.1.attn", "reason": "off by 1.0e+00"})},
            "repaconv computes something else than the training form in float64 at blocks.1.attn",
        ),
        ({"given": given("fp16")}, "fp16 was not honoured: repaconv is"),
        ({"fallen": ["blocks.0.merge/TopK_3"]}, "1 nodes fell back to the processor: blocks.0.merge/TopK_3"),
        ({"samples_ms": {OURS: [0.0], "official": [1.0]}}, "its samples are not"),
        (
            {"status": "failed", "why": "no kernel for blocks.3.dw"},
            "no kernel for blocks.3.dw",
        ),
        ({"status": "failed", "why": "took longer than 150 s"}, "took longer than 150 s"),
    ],
)
def test_what_fails_is_named(fields, message):
    row = found(changed(**fields))
    assert row["verdict"] == "failed"
    assert message in "; ".join(row["faults"])
    done = evaluated(changed(**fields), KIT)
    assert done["verdict"] == "failed"
    assert f"**failed** {ROW}" in markdown(done)


def of_engine(**fields):
    """What the kit recorded of an opened engine, with something wrong."""
    recorded = next(step for step in RECORDED["steps"] if step["name"] == ENGINE)
    changes = {key: change(recorded[key]) if callable(change) else change for key, change in fields.items()}
    return changed(ENGINE, **changes)


def worse(links):
    where = {"module": "blocks.1.attn", "reason": "off by 1.0e+00"}
    return {OURS: {**links[OURS], "verdict": "failed", "location": where}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"links": worse}, "repaconv computes something else than the training form in float64 at blocks.1.attn"),
        (
            {"engine_types": {"gemm.FLOAT": 24, "mha.HALF": 2}},
            "the opened engine computes in 24 gemm.FLOAT, 2 mha.HALF",
        ),
        (
            {"given": lambda given: {**given, "precision": "fp16"}, "engine_types": {"gemm.FLOAT": 26}},
            "fp16 was not honoured: the opened engine computes in 26 gemm.FLOAT",
        ),
        ({"built": "failed", "note": "TopK is not built"}, "the engine's build failed: TopK is not built"),
        ({"batches": lambda rows: [{**rows[0], "samples_ms": {OURS: [0.0]}}, *rows[1:]]}, "its samples are not"),
    ],
)
def test_what_fails_of_an_engine_is_named(fields, message):
    done = evaluated(of_engine(**fields), KIT)
    assert done["verdict"] == "failed"
    assert message in "; ".join(found(of_engine(**fields), ENGINE)["faults"])
    assert f"**failed** {ENGINE}" in markdown(done)


@pytest.mark.parametrize(
    ("ours", "training", "precision", "verdict"),
    [
        (0.4, ("failed", 0.5), "fp16", "not verified"),
        (0.4, ("failed", 0.5), "fp32", "failed"),  # in which nothing is excused
        (1.2, ("failed", 0.5), "fp16", "failed"),
        (float("inf"), ("failed", 0.5), "fp16", "failed"),
        (0.4, ("not verified", 0.5), "fp16", "failed"),
        (0.4, ("passed", 0.5), "fp16", "failed"),
    ],
)
def test_a_precision_in_which_the_training_form_is_as_far_off_tells_nothing(ours, training, precision, verdict):
    step = next(each for each in RECORDED["steps"] if each["name"] == ROW)
    links = dict(step["links"])
    for name, (said, error) in ((OURS, ("failed", ours)), (TRAINING, training)):
        metrics = {**links[OURS]["metrics"], "max_rel_error": error}
        links[name] = {**links[OURS], "candidate": name, "verdict": said, "metrics": metrics}
    result = changed(links=links, given={**step["given"], "precision": precision})
    row = found(result)
    assert (row["verdict"], bool(row["faults"])) == (verdict, verdict == "failed")
    earlier = evaluated({**RECORDED, "kit": "old"}, KIT)
    both = joined(evaluated(result, KIT), earlier, KIT)
    again = next(each for each in both["steps"] if each["name"] == ROW)
    assert (again["verdict"], again.get("kit")) == (verdict, None)  # it ran, so no earlier result stands for it


def test_what_an_engine_does_not_hold_or_tell_is_said_and_no_fault():
    message = "the card's memory does not hold 64 images at once."
    result = of_engine(
        batches=lambda rows: [*rows[:2], {"batch": 64, "why": message}], without={"official": "no kernel for TopK"}
    )
    assert found(result, ENGINE)["verdict"] == "passed"
    lines = markdown(evaluated(result, KIT)).splitlines()
    said = lines[lines.index(f"- {ENGINE}:") + 1 :]
    assert f"    - batch 64: {message}" in said
    assert "    - official is not beside it: no kernel for TopK" in said
    assert "    - the opened engine tells no types of its layers" in said
    layers = of_engine(engine_types={"gemm.HALF": 24, "conv.FLOAT": 1}, given=lambda has: {**has, "precision": "fp16"})
    assert not any("types" in fault or "opened" in fault for fault in found(layers, ENGINE)["faults"])


def test_a_preset_that_was_chosen_on_the_gpu_is_shown():
    way = {"target": "cuda-ort", "runtime": "onnxruntime-cuda", "rewrites": ["no-key-bias", "linear-each"]}
    ratio = {"median": 1.07, "low": 1.06, "high": 1.08}
    tuned = {"deployment": way, "ratio": ratio, "complete": False, "budget_s": 120.0}
    given = {"target": "cuda-ort", "batch": 128}
    step = {"name": "m.tune", "kind": "tune", "model": "m", "given": given, "status": "done", "tuned": tuned}
    text = markdown(evaluated({**RECORDED, "steps": [*RECORDED["steps"], step]}, KIT))
    shown = "| m | 128 | cuda-ort | no-key-bias, linear-each | 1.070 (1.060 to 1.080) | what 120 s allowed |"
    assert shown in text


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_manual_baseline_graphs_have_no_operator_in_a_type_that_onnx_does_not_allow(tmp_path, precision):
    folder = tmp_path / "repavit-tiny"
    models.prepare("repavit-tiny", folder)
    images, right, _ = models.truth(folder)
    for path in models.manual_baseline(folder, precision).values():
        graph = onnx.load(path)
        onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
        session = load_onnx(runnable(graph, precision).SerializeToString())
        if path.stem.startswith("official"):
            (found,) = session.run({session.inputs[0].name: images}).values()
            assert 0 < np.abs(found - right).max() / np.abs(right).max() < 0.05


def test_a_smaller_batch_is_said():
    message = "the card's memory does not hold 4 images at once."
    assert f"{ROW}: {message} It was measured on 2." in markdown(evaluated(changed(notes=[message], batch=2), KIT))


def test_a_row_halves_its_batch_size_as_long_as_it_does_not_fit_the_gpu(monkeypatch):
    def row(_step, _folder, batch):
        with within_memory(batch):
            if batch > 32:
                raise RuntimeError("CUDA out of memory")
        return {"batch": batch}

    monkeypatch.setattr("gpu.steps._row", row)
    step = next(each for each in steps() if each.kind == "row" and each.given["batch"] == 128)
    found = measured(step, Path())
    assert found["batch"] == 32
    assert [note.split(" images")[0].split()[-1] for note in found["notes"]] == ["128", "64"]


def test_only_a_result_of_a_gpu_is_kept_and_its_tables_replace_those_of_the_same_gpu(tmp_path):
    with pytest.raises(Refused, match="of no card"):
        place_of(evaluated(RECORDED, KIT))
    of_card = {**RECORDED, "rehearsal": False, "machine": {**RECORDED["machine"], "card": {"name": "NVIDIA H100 80GB"}}}
    assert place_of(of_card, tmp_path).name == "gpu_nvidia_h100_80gb.json"
    page, done = tmp_path / "gpu.md", evaluated(of_card, KIT)
    page.write_text(f"# Cards\n\n{START}\n\n*Not verified here*: no card has been measured yet.\n\n{END}\n\nthe end\n")
    put(done, page)
    once = page.read_text()
    other = {**done, "machine": {**done["machine"], "card": {"name": "NVIDIA L4"}}}
    put(other, page)
    put(done, page)
    assert page.read_text().count("### NVIDIA H100 80GB") == once.count("### NVIDIA H100 80GB") == 1
    assert page.read_text().count("### NVIDIA L4") == 1
    assert "no card has been measured" not in page.read_text()
    assert page.read_text().endswith("\n\nthe end\n")

"""A run folder: several exports, what a failed verdict stops, and files that repaconv did not write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY
from test_run_folder_export_and_bench import RUN, tree

import repaconv as rc
from repaconv.core import run_folder
from repaconv.core.errors import GateFailed, Refused, UsageProblem
from repaconv.core.export_variants import Variant
from repaconv.core.files import write_artefact
from repaconv.distributed import sweep as sweeping
from repaconv.engines.targets.schema import parse
from repaconv.methods.riformer import METHOD
from repaconv.stages.shared.exports_of_run import export_for, target_sha256
from repaconv.stages.shared.target_lookup import load_target

# --- exports beside each other ----------------------------------------------------------------------------


def test_a_variants_name_says_what_is_unusual_and_no_two_share_one():
    result = {
        "": Variant(),
        "int8": Variant(precision="int8"),
        "jetson-nano": Variant(target="jetson-nano"),
        "jetson-nano.fp16.b1.224x192.pixels": Variant(
            target="jetson-nano", precision="fp16", batch=1, image_size=(224, 192), preprocessing=True
        ),
        "form-official": Variant(form="official"),
        "orin-nano@jp5.1.fp16": Variant(target="orin-nano@jp5.1", precision="fp16"),
    }
    assert {name: variant.name for name, variant in result.items()} == {name: name for name in result}
    assert result["int8"].full == "x86-64.int8"
    assert len({variant.full for variant in result.values()}) == len(result)
    text = Path(rc.__file__).with_name("engines").joinpath("targets", "x86-64.toml").read_text()
    for name in ("a/b", "../a", "a.fp16", ""):
        with pytest.raises(UsageProblem, match="name"):
            parse(text.replace('name = "x86-64"', f'name = "{name}"'), "mine.toml")


def test_a_run_has_several_exports_and_a_stage_takes_its_own(tiny):
    rc.fold(tiny)
    plain, board = rc.export(), rc.export(target="jetson-nano")
    assert (plain.payload.path, board.payload.path) == ("model.onnx", "model.jetson-nano.onnx")
    assert (plain.opset, board.opset) == (20, 13)
    assert rc.build(target="x86-64").onnx_sha256 == plain.payload.sha256
    with pytest.raises(UsageProblem, match="for arm64 yet; it has x86-64, jetson-nano") as raised:
        rc.estimate(target="arm64")
    assert raised.value.hint == "repaconv export --target arm64"
    fixed = rc.export(batch=1)
    built = {rc.build(given, target="x86-64").payload.path for given in (RUN, RUN / fixed.payload.path)}
    assert built == {"x86-64.onnx", "x86-64.b1.onnx"}
    assert rc.bench(rounds=2).latencies[0].model == "model.onnx"
    assert rc.bench(rounds=2, batch=1).latencies[0].model == "model.b1.onnx"
    assert {path.name for path in (RUN / "bench").iterdir()} == {
        f"{kind}{variant}"
        for kind, variant in (
            *(("x86-64", suffix) for suffix in (".json", ".b1.json")),
            *(("training", f"{own}.{suffix}") for own in ("", ".b1") for suffix in ("onnx", "json")),
        )
    }
    assert [link.variant for link in rc.verify().links if link.name == "onnx"] == ["", "b1", "jetson-nano"]


def test_of_several_exports_that_fit_none_is_guessed_nor_one_for_another_device_of_that_name(tiny):
    folded, run = rc.fold(tiny), run_folder.Run(RUN)
    plain = rc.export()

    def write(batch: int, said: str) -> None:
        changed = {"target": "arm64", "batch": batch, "variant": f"arm64.b{batch}", "target_sha256": said}
        write_artefact(run.export_json(f"arm64.b{batch}"), plain.model_copy(update=changed))

    for batch in (2, 3):
        write(batch, target_sha256(load_target("arm64")))
    with pytest.raises(UsageProblem, match="several fp32 ONNX models for arm64") as raised:
        export_for(run, folded, "arm64")
    assert raised.value.exit_code == 2
    assert export_for(run, folded, "arm64", batch=3).artefact.batch == 3
    write(2, "another opset")
    assert export_for(run, folded, "arm64").artefact.batch == 3
    write(3, "another opset")
    with pytest.raises(UsageProblem, match="yet but for what the target said before"):
        export_for(run, folded, "arm64")


# --- files that are none of ours --------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_a_life_of_its_own_is_left_alone(tiny, tmp_path, force):
    for name in ("build/makefile", "bench/figures.csv", "model_v2.onnx", "export_notes.json", "verify.json"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(Refused, match="is not a run folder"):
        rc.fold(tiny, out="project", force=force)
    with pytest.raises(Refused, match="is not a run folder"):
        rc.fold(tiny, out=".", force=force)
    assert tree(tmp_path) == before
    shutil.copy(tiny, "latest.pth")
    with pytest.raises(Refused, match="newest run"):
        rc.fold("latest.pth", force=force)
    (tmp_path / "empty").mkdir()
    assert rc.fold(tiny, out="empty").verdict == "passed"


def test_a_stage_removes_and_replaces_what_it_wrote_and_nothing_else(tiny, tmp_path):
    rc.fold(tiny)
    rc.export(onnx="deployed.onnx")
    exported = rc.export(batch=1)
    rc.verify(drift=True)
    assert (RUN / "drift-onnx.b1.svg").is_file()
    mine = {"model_v2.onnx": "mine", "export_notes.json": "{}", "build/x": "mine", "bench/before.json": "{}"}
    kept = json.dumps({**exported.model_dump(mode="json"), "stage": "bench"})  # a copy of a measurement, under a name
    for name, text in {**mine, "bench/before.json": kept}.items():
        (RUN / name).parent.mkdir(exist_ok=True)
        (RUN / name).write_text(text)
    (RUN / "model.b1.onnx").write_bytes(b"edited by hand")
    torch.save({"state_dict": METHOD.example(TINY, seed=9), "args": {"img_size": 32}}, tmp_path / "other.pth")
    rc.fold("other.pth", out=RUN, force=True)
    assert set(tree(RUN)) == {"fold.json", "model.safetensors", *mine, "model.b1.onnx"}
    for given in ({"batch": 1}, {"onnx": "tiny.pth"}, {"onnx": RUN / "model_v2.onnx"}):
        before = tree(tmp_path)
        with pytest.raises(UsageProblem, match=r"already exists|is not of the form NAME\.onnx"):
            rc.export(**given)
        assert tree(tmp_path) == before
    rc.export(onnx="deployed.onnx")  # an earlier fold's, unchanged
    rc.export()
    assert rc.export(onnx="deployed.onnx").payload.path.endswith("deployed.onnx")
    assert not (RUN / "model.onnx").exists()  # nothing would name it any longer


def test_results_go_nowhere_where_something_else_is(tiny, tmp_path, repaconv):
    rc.fold(tiny)
    rc.export()
    Path("notes.json").write_text('{"stage": "bench"}')
    Path("page.html").write_text("<p>mine</p>")
    for write in (
        lambda: rc.verify(out="notes.json"),
        lambda: rc.bench(out="notes.json", rounds=2),
        lambda: rc.tune(out="notes.json"),
        lambda: rc.report(out="page.html", paper=False),
        lambda: rc.report(out="notes.json", format="json", paper=False),
    ):
        with pytest.raises(UsageProblem, match="already exists"):
            write()
    assert repaconv("inspect", tiny, "-o", "notes.json")[0] == 2
    assert (Path("notes.json").read_text(), Path("page.html").read_text()) == ('{"stage": "bench"}', "<p>mine</p>")
    for _ in range(2):
        rc.verify(out="own.json", drift=True)
        assert repaconv("inspect", tiny, "-o", "seen.json")[0] == 0
        assert rc.report(paper=False).output_files == (str(RUN / "report.html"),)
    assert Path("own.drift-onnx.svg").is_file()
    rc.verify(out="own.json")
    assert not Path("own.drift-onnx.svg").exists()
    page = RUN / "report.html"
    page.write_text(page.read_text().replace("<body", "<body id='mine'"))
    with pytest.raises(UsageProblem, match="already exists"):
        rc.report(paper=False)


def test_the_demo_keeps_a_checkpoint_that_is_there(tmp_path, repaconv):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "riformer_s12.pth").write_bytes(b"mine")
    assert repaconv("demo", "--arch", "s12", "-o", "d")[0] == 4
    assert (tmp_path / "d" / "riformer_s12.pth").read_bytes() == b"mine"


# --- what a failed verdict stops --------------------------------------------------------------------------


def test_a_failed_verdict_stops_every_later_stage_but_not_what_corrects_it(tiny):
    rc.fold(tiny)
    rc.export()
    rc.export(target="jetson-nano")
    assert rc.verify(require=["engine"]).verdict == "failed"
    stages = (
        lambda **go: rc.build(target="x86-64", **go),
        lambda **go: rc.bench(rounds=2, **go),
        lambda **go: rc.bundle(target="jetson-nano", count=1, **go),
    )
    for stage in stages:
        with pytest.raises(GateFailed, match="failed: engine") as raised:
            stage()
        assert raised.value.code == "verify.failed"
        assert "Fix it and run `repaconv verify` again" in raised.value.hint
        assert "--allow-unverified" in raised.value.hint
    for stage in stages[:2]:
        assert stage(allow_unverified=True).unverified == ("verify failed",)
    # What corrects an export reads the fold only, whose links passed.
    assert rc.export().unverified == rc.tune(rounds=2, rewrites=[]).unverified == ()
    with pytest.raises(GateFailed, match="failed: engine"):
        rc.bench(rounds=2)
    rc.verify()
    assert rc.build(target="x86-64").unverified == ()


def test_a_failed_export_stops_no_stage_that_uses_another(tiny):
    rc.fold(tiny)
    rc.export()
    rc.export(precision="fp16")
    verified = rc.verify()
    links = [link.model_copy(update={"verdict": "failed"}) if link.name == "fp16" else link for link in verified.links]
    run = run_folder.Run(RUN)
    write_artefact(run.verify_json, verified.model_copy(update={"links": tuple(links), "verdict": "failed"}))
    assert rc.bench(rounds=2).unverified == ()
    with pytest.raises(GateFailed, match="failed: fp16"):
        rc.bench(rounds=2, precision="fp16")


def test_a_failed_build_stops_its_measurement(tiny):
    rc.fold(tiny)
    rc.export(precision="fp16")
    built = rc.build(target="x86-64", precision="fp16")
    assert built.verdict == "failed"
    engine = RUN / "build" / built.payload.path
    with pytest.raises(GateFailed):
        rc.bench(engine, rounds=2, image_size=32)
    assert rc.bench(engine, rounds=2, image_size=32, allow_unverified=True).unverified == ("build failed",)


# --- a sweep ----------------------------------------------------------------------------------------------


def test_a_sweep_measures_every_entry_for_itself_and_folds_it_once(tiny, monkeypatch):
    folds = []
    monkeypatch.setattr(sweeping, "fold", lambda *given, **more: folds.append(more) or rc.fold(*given, **more))
    entry = f'[[models]]\ncheckpoint = "{tiny.name}"\n'
    Path("mine.toml").write_text('extends = "x86-64"\nname = "mine"\n')
    matrix = f'rounds = 2\ntargets = ["x86-64", "mine.toml"]\n{entry}{entry}set = {{ image_size = 16 }}\n'
    Path("m.toml").write_text(matrix)
    done = sweeping.sweep("m.toml")
    assert done.verdict == "passed"
    assert len(folds) == 2
    kept = list(Path("repaconv-out/sweep-m/results").iterdir())
    results = [json.loads(path.read_text()) for path in kept]
    sizes = {(each["cell"]["model"], each["cell"]["target"]): each["result"]["image_size"] for each in results}
    assert sizes == {
        (name, target): size
        for name, size in (("tiny", [32, 32]), ("tiny image_size=16", [16, 16]))
        for target in ("x86-64", "mine.toml")
    }
    for path in kept:  # as on a quiet machine: what is inconclusive would be measured again
        path.write_text(path.read_text().replace('"verdict": "inconclusive"', '"verdict": "noisy"'))
    assert sweeping.sweep("m.toml").resumed == 4
    shutil.copy("repaconv-out/sweep-m/sweep.json", "kept.json")
    Path("repaconv-out/sweep-m/sweep.json").write_text("mine")
    with pytest.raises(UsageProblem, match="already exists"):
        sweeping.sweep("m.toml")


def test_a_sweep_calibrates_on_the_images_of_its_entry_and_does_not_become_the_newest_run(tiny):
    np.savez("images.npz", input=np.random.default_rng(0).standard_normal((16, 3, 32, 32)).astype(np.float32))
    entry = f'[[models]]\ncheckpoint = "{tiny.name}"\n'
    Path("m.toml").write_text(f'rounds = 2\nprecisions = ["fp32", "int8"]\n{entry}inputs = "images.npz"\n')
    assert sweeping.sweep("m.toml").verdict == "passed"
    (export,) = Path("repaconv-out/sweep-m/models").glob("*/export.int8.json")
    assert json.loads(export.read_text())["images"]["path"] == str(Path("images.npz").resolve())
    with pytest.raises(UsageProblem, match="there is no run"):
        rc.export()
    rc.fold(tiny)
    np.savez("images.npz", input=np.random.default_rng(1).standard_normal((16, 3, 32, 32)).astype(np.float32))
    sweeping.sweep("m.toml")
    assert len(list(Path("repaconv-out/sweep-m/models").glob("*/export.int8.json"))) == 2
    assert rc.export().output_files == ("repaconv-out/tiny/model.onnx", "repaconv-out/tiny/export.json")


def test_a_sweep_has_no_figure_of_an_export_that_failed(tiny, monkeypatch):
    from repaconv.onnx_export import target_operator_rules

    monkeypatch.setattr(target_operator_rules, "violations", lambda *_: ["operator Conv"])
    Path("m.toml").write_text(f'rounds = 2\n[[models]]\ncheckpoint = "{tiny.name}"\n')
    done = sweeping.sweep("m.toml")
    assert done.verdict == "failed"
    assert "the check failed" in done.rows[0].problem


def test_a_folder_inside_a_file_is_refused_before_anything_is_folded(tiny):
    Path("file").write_text("mine")
    for out in ("file/run", "file/a/run"):
        with pytest.raises(Refused, match=f"{out} cannot be a folder, since file is a file") as refused:
            rc.fold(tiny, out=out)
        assert refused.value.code == "run.not-a-folder"
    assert Path("file").read_text() == "mine"

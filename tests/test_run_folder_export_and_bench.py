"""The run folder, export and bench: hashes, atomic writes, equal bytes, and fair comparisons."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import rmtree

import numpy as np
import onnx
import pytest
import torch
from conftest import TINY

import repaconv as rc
from repaconv import models
from repaconv.backbones import blockwise_vit
from repaconv.cli.text_and_json_output import print_json
from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, GateFailed, Refused, UsageProblem
from repaconv.core.files import read_artefact, write_artefact, write_text
from repaconv.core.run_folder import find_run
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.method_api.contract import FoldedPart
from repaconv.methods.dwconv import METHOD as DWCONV
from repaconv.methods.riformer import METHOD
from repaconv.results import Link, MethodFold
from repaconv.rewrites.presets import chosen
from repaconv.sources import checkpoint_source
from repaconv.sources.source_model import DEPLOY
from repaconv.verification.comparison import link_between
from repaconv.verification.tolerances import tolerance

RUN = Path("repaconv-out/tiny")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.usefixtures("exported_afresh")
def test_the_same_input_gives_the_same_bytes(tiny):
    def walk():
        rmtree(RUN, ignore_errors=True)
        rc.fold(tiny)
        rc.verify()
        rc.export(batch=1)
        return tree(RUN)

    first = walk()
    assert walk() == first
    assert set(first) == {"fold.json", "model.safetensors", "verify.json", "model.b1.onnx", "export.b1.json"}
    assert b"site-packages" not in first["model.b1.onnx"]


def test_the_newest_run_is_named_even_if_a_fold_failed(tiny, repaconv):
    rc.fold(tiny)
    Path("bad.pth").write_bytes(b"no checkpoint")
    assert repaconv("fold", "bad.pth", "-q")[0] == 4
    assert repaconv("verify", "-q")[2].strip() == f"newest run: {RUN}"
    assert "newest run" not in repaconv("verify", RUN, "-q")[2]


def test_a_fold_of_the_same_file_removes_nothing(tiny, repaconv):
    rc.fold(tiny)
    rc.verify()
    rc.export(batch=1)
    rc.export("", onnx="elsewhere.onnx")
    before = tree(Path())
    assert repaconv("fold", tiny)[0] == 0
    assert tree(Path()) == before
    rc.verify()  # the exports are of this fold


def test_a_fold_of_the_same_graph_removes_nothing(tmp_path):
    graph = tmp_path / "small.onnx"
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y)'
    onnx.save(onnx.parser.parse_model(text + " { t = Neg(x) u = Neg(t) y = Relu(u) }"), graph)
    run = Path("repaconv-out/small")
    rc.fold(graph, measure=False)
    rc.verify()
    rc.export()
    before = tree(run)
    rc.fold(graph, measure=False)
    assert tree(run) == before


def test_another_fold_names_what_it_removes_and_removes_nothing_else(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    rc.export(onnx="elsewhere.onnx", batch=1)
    (RUN / "notes.txt").write_text("mine")
    torch.save(METHOD.example(TINY, seed=4), tiny)
    code, _, message = repaconv("fold", tiny, "-q")
    assert code == 0
    assert {p.name for p in RUN.iterdir()} == {"fold.json", "model.safetensors", "notes.txt"}
    removed = ("export.b1.json", "export.json", "model.onnx")
    assert message.strip() == f"removed: {', '.join(str(RUN / name) for name in removed)}, made from the previous fold"
    assert Path("elsewhere.onnx").is_file()


def test_a_graph_next_to_a_checkpoint_of_its_name_has_a_run_folder_of_its_own(tiny):
    graph = tiny.with_suffix(".onnx")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }'
    )
    onnx.save(model, graph)
    rc.fold(tiny)
    before = tree(RUN)
    rc.fold(graph)
    assert tree(RUN) == before
    assert (RUN.parent / "latest").read_text().strip() == "tiny-onnx"
    rc.fold(graph)
    rc.fold(tiny)  # each goes to its own again
    assert {folder.name for folder in RUN.parent.iterdir() if folder.is_dir()} == {"tiny", "tiny-onnx"}


def test_another_checkpoint_of_the_same_name_is_not_overwritten(tiny, tmp_path):
    rc.fold(tiny)
    before = tree(RUN)
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "tiny.pth"
    torch.save(METHOD.example(TINY, seed=77), other)
    with pytest.raises(Refused) as caught:
        rc.fold(other)
    assert caught.value.code == "run.other-checkpoint"
    assert tree(RUN) == before
    assert rc.fold(other, force=True).origin.path == str(other)
    other.write_bytes(tiny.read_bytes())  # the same weights from elsewhere are the same checkpoint
    rc.fold(tiny, force=True)
    rc.fold(other)


def test_a_changed_file_stops_the_next_stage(tiny):
    rc.fold(tiny)
    weights = RUN / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for stage in (rc.verify, rc.export):
        with pytest.raises(Refused) as caught:
            stage()
        assert caught.value.code == "artefact.hash"
    weights.write_bytes(content)
    rc.export()
    (RUN / "model.onnx").write_bytes(b"other")
    for stage in (rc.verify, rc.bench):
        with pytest.raises(Refused):
            stage()
    torch.save(METHOD.example(TINY, seed=78), tiny)
    with pytest.raises(Refused, match="its hash is another"):
        rc.verify()


def test_a_failed_verdict_stops_and_is_recorded_when_overridden(tiny):
    rc.fold(tiny)
    assert rc.verify(rtol={"stored": 1e-12}).verdict == "failed"
    with pytest.raises(GateFailed):
        rc.export()
    assert rc.export(allow_unverified=True).unverified == ("verify failed",)
    with pytest.raises(GateFailed):
        rc.bench(rounds=2)
    assert rc.bench(rounds=2, allow_unverified=True).unverified == ("verify failed",)


def test_none_at_all_is_not_the_usual_number(tiny):
    rc.fold(tiny)
    for stage, name in ((rc.verify, "count"), (rc.export, "batch"), (rc.bench, "threads"), (rc.bench, "rounds")):
        with pytest.raises(UsageProblem, match=f"{name}=0: must be at least 1|rounds=0: must be at least 2"):
            stage(**{name: 0})
    with pytest.raises(UsageProblem, match="count=-1: must be at least 1"):
        rc.verify(images=".", count=-1)


def test_a_wrong_fold_writes_nothing(tiny, monkeypatch):
    from repaconv.methods.riformer import checkpoint_reading as riformer

    right = riformer.fold_block
    monkeypatch.setattr(riformer, "fold_block", lambda block: {**right(block), "norm1": -right(block)["norm1"]})
    with pytest.raises(GateFailed, match=r"network\.0\.0"):
        rc.fold(tiny)
    assert not RUN.exists()


def test_what_no_row_of_the_certificate_proves_is_as_trained(monkeypatch):
    weights = DWCONV.example("tiny", 1)
    torch.save({"state_dict": weights}, "c.pth")
    honest_stem, honest_tail = blockwise_vit.fold_stem, blockwise_vit.fold_tail

    def reversed_stem(tensors):
        part = honest_stem(tensors)
        return FoldedPart({**part.tensors, "pos_embed": part.tensors["pos_embed"].flip(1)})

    def stem_in_the_tail(config, tensors):
        tail = honest_tail(config, tensors)
        stem = {name: 2 * value for name, value in honest_stem(tensors).tensors.items()}
        return FoldedPart({**tail.tensors, **stem}, tail.step)

    for wrong in {"fold_stem": reversed_stem}, {"fold_stem": lambda _: FoldedPart({}), "fold_tail": stem_in_the_tail}:
        with monkeypatch.context() as patch:
            for name, function in wrong.items():
                patch.setattr(blockwise_vit, name, function)
            with pytest.raises(GateFailed) as caught:
                rc.fold("c.pth", num_heads=3)
        assert (caught.value.code, Path("repaconv-out").exists()) == ("fold.not-verified", False)
    assert rc.fold("c.pth", num_heads=3).verdict == "passed"


def test_what_float32_cannot_hold_is_not_written(tiny_weights):
    name = "backbone.network.0.0.mlp.fc1.weight"
    torch.save({**tiny_weights, name: tiny_weights[name].double() * 1e39}, "huge.pth")
    with pytest.raises(Refused, match="float32 cannot represent") as caught:
        rc.fold("huge.pth")
    assert (caught.value.code, Path("repaconv-out").exists()) == ("fold.float32", False)


def test_the_policys_depth_is_that_of_the_blocks():
    from repaconv.stages.fold.checkpoint_fold import count_blocks

    every = [f"blocks.{n}" for n in range(48)]
    inside = [f"{block}.attn.branches.1.qkv" for block in every]
    assert (
        count_blocks([*inside, *every, "head"])
        == count_blocks([f"{block}.{part}" for block in every for part in "ab"])
        == 48
    )
    swin = [f"layers.{stage}.blocks.{n}" for stage in range(4) for n in range(2)]
    assert count_blocks([*swin, "layers.0.downsample", "head"]) == 8
    assert count_blocks(["one"]) == 0


def test_wrong_stored_weights_fail_the_stored_link_alone(tiny):
    from safetensors.torch import load_file, save_file

    from repaconv.core.files import payload_of, write_artefact

    rc.fold(tiny)
    tensors = load_file(RUN / "model.safetensors")
    tensors["network.0.0.mlp.fc1.weight"][0] *= 1.01
    save_file(tensors, RUN / "model.safetensors")
    folded = read_artefact(RUN / "fold.json", MethodFold)
    changed = folded.model_copy(update={"payload": payload_of(RUN / "model.safetensors", RUN)})
    write_artefact(RUN / "fold.json", changed)
    verified = rc.verify()
    assert {link.name: link.verdict for link in verified.links} == {"fold": "passed", "stored": "failed"}


def test_writing_is_atomic(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def broken(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    from repaconv.core.files import write_with

    with pytest.raises(EnvironmentProblem, match="No space left"):
        write_with(path, broken)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_is_no_number_is_json_all_the_same_and_reads_back(tmp_path, capfd):
    broken = np.array([[1.0, np.nan], [np.inf, 0.0]])
    link = link_between("onnx", ("a", np.ones((2, 2))), ("b", broken), logits=True, tolerance=tolerance("onnx"))
    write_artefact(path := tmp_path / "link.json", link)
    print_json("verify", 1, link.model_dump(mode="json"))

    def bare(name):
        raise AssertionError(f"{name} is no JSON")

    for text in (path.read_text(), capfd.readouterr().out):
        json.loads(text, parse_constant=bare)
    assert np.isnan(read_artefact(path, Link).metrics.max_abs_error)


def test_a_run_reached_by_a_symbolic_link_finds_what_it_wrote_outside(tiny, tmp_path):
    (tmp_path / "disk" / "deep" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "deep" / "run")
    rc.fold(tiny, out="run")
    rc.export("run", onnx="beside.onnx")
    assert {link.verdict for link in rc.verify("run").links} == {"passed"}
    assert rc.verify(tmp_path / "disk" / "deep" / "run").verdict == "passed"


def test_an_unreadable_artefact_is_refused(tiny):
    rc.fold(tiny)
    for text in ("{", "[]", json.dumps({"schema_version": 99}), json.dumps({"schema_version": 1})):
        (RUN / "fold.json").write_text(text)
        with pytest.raises(Refused):
            rc.verify()


def test_the_graph_has_the_names_and_the_freedom_that_it_should(tiny):
    rc.fold(tiny)
    exported = rc.export()
    model = onnx.load(RUN / "model.onnx")
    assert [i.name for i in model.graph.input] == ["input"]
    assert [o.name for o in model.graph.output] == ["logits"]
    dims = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch", 3, "height", "width"]
    props = {p.key: p.value for p in model.metadata_props}
    assert props["repaconv.method"] == "riformer"
    assert json.loads(props["repaconv.preprocessing"])["image_size"] == [32, 32]
    assert exported.operators["BatchNormalization"] == sum(TINY.layers)
    assert any(node.name.startswith("network.2.1.mlp.fc1/Conv") for node in model.graph.node)
    fixed = rc.export(batch=2, image_size=48)
    assert fixed.nodes < exported.nodes
    dims = [d.dim_value for d in onnx.load(RUN / "model.b2.48x48.onnx").graph.input[0].type.tensor_type.shape.dim]
    assert dims == [2, 3, 48, 48]
    links = {link.variant: link.verdict for link in rc.verify().links if link.name == "onnx"}
    assert links == {"": "passed", "b2.48x48": "passed"}  # on random images of 48x48
    np.savez("usual.npz", input=np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32))
    links = {link.variant: link.verdict for link in rc.verify(inputs="usual.npz").links if link.name == "onnx"}
    assert links == {"": "passed", "b2.48x48": "not verified"}
    assert rc.bench(rounds=2, batch=2, image_size=48).variant == "x86-64.b2.48x48"


def test_a_simplifier_that_breaks_the_graph_is_not_trusted(tiny, monkeypatch):
    import onnxsim

    right = onnxsim.simplify

    def wrong(model, **_):
        smaller, ok = right(model)
        bias = next(t for t in smaller.graph.initializer if t.name == "head.bias")
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.1, bias.name))
        return smaller, ok

    def crash(model, **_):
        raise RuntimeError("segmentation of thought")

    rc.fold(tiny)
    for broken, verdict in ((wrong, "failed"), (crash, "not verified")):
        monkeypatch.setattr(onnxsim, "simplify", broken)
        exported = rc.export(simplifier="onnxsim")
        assert exported.verdict == "passed"
        assert not exported.simplified
        assert exported.links[-1].verdict == verdict
        if broken is wrong:
            assert exported.links[-1].location.module == "head"
        assert rc.verify().verdict == "passed"


def test_where_the_first_simplifier_fails_the_second_is_tried(tiny, monkeypatch):
    import onnxsim

    pytest.importorskip("onnxslim", reason="onnxslim is absent")
    rc.fold(tiny)
    slim = rc.export(simplifier="onnxslim")
    assert (slim.verdict, slim.simplified, slim.links[-1].verdict) == ("passed", True, "passed")
    assert slim.simplifier.startswith("onnxslim ")
    names = [node.name for node in onnx.load(RUN / "model.onnx").graph.node]
    assert any(name.startswith("network.2.1.mlp.fc1/Conv") for name in names)
    assert len(set(names)) == len(names)

    def crash(model, **_):
        raise RuntimeError("segmentation of thought")

    monkeypatch.setattr(onnxsim, "simplify", crash)
    found = rc.export()
    assert found.simplifier.startswith("onnxslim ")
    assert "onnxsim failed: segmentation of thought" in found.links[-1].note
    assert rc.verify().verdict == "passed"
    with pytest.raises(UsageProblem, match="no simplifier"):
        rc.export(simplifier="onnxfast")


def test_bench_compares_what_computes_the_same(tiny, monkeypatch):
    rc.fold(tiny)
    with pytest.raises(UsageProblem, match="no fp32 ONNX model for x86-64 yet"):
        rc.bench()
    rc.export()
    measured = rc.bench(rounds=5, batch=2)
    assert [row.name for row in measured.latencies] == ["deploy form", "training form"]
    assert all(len(row.samples_ms) == 5 for row in measured.latencies)
    assert measured.ratio.low <= measured.ratio.median <= measured.ratio.high
    assert measured.agreement.verdict == "passed"
    assert measured.batch == 2
    assert measured.session["free_dimension_override.batch"] == "2"
    stamp = (RUN / "bench" / "training.onnx").stat().st_mtime_ns
    rc.bench(rounds=2)
    assert (RUN / "bench" / "training.onnx").stat().st_mtime_ns == stamp
    bare = rc.bench(RUN / "model.onnx", against=RUN / "bench" / "training.onnx", rounds=2)
    assert bare.agreement.verdict == "passed"
    assert (bare.image_size, bare.note) == ((32, 32), "on images of 32 x 32, which the graph says are usual")
    # two files of one name, one of them here: each is measured, and so is one beside itself
    Path("model.onnx").write_bytes((RUN / "bench" / "training.onnx").read_bytes())
    for here, there in (("model.onnx", RUN / "model.onnx"), ("model.onnx", "model.onnx")):
        first, second = rc.bench(here, against=there, rounds=3, image_size=40).latencies
        assert first.name != second.name
        assert first.samples_ms != second.samples_ms
    silent = onnx.load("model.onnx")
    del silent.metadata_props[:]
    onnx.save(silent, "silent.onnx")
    with pytest.raises(UsageProblem, match="any size"):
        rc.bench("silent.onnx", rounds=2)
    # a training form whose graph is wrong is no yardstick, and no slower model's excuse
    (RUN / "bench" / "training.onnx").unlink()
    whole = checkpoint_source.exported_graph
    failed = {"links": (bare.agreement.model_copy(update={"verdict": "failed"}),)}
    monkeypatch.setattr(checkpoint_source, "exported_graph", lambda *a, **k: whole(*a, **k)._replace(**failed))
    unsound = rc.bench(rounds=2)
    assert (unsound.ratio, (RUN / "bench" / "training.onnx").exists()) == (None, False)
    assert "gives other outputs than the network itself" in unsound.note
    tiny.unlink()
    alone = rc.bench(rounds=2)
    assert alone.ratio is None
    assert "without the training form" in alone.note


def test_bench_goes_without_a_training_form_that_the_runtime_does_not_take(tiny, monkeypatch):
    """As OpenVINO refuses that of PYRA; what was refused is the note."""
    from repaconv.engines.onnxruntime_cpu import OnnxRuntime

    rc.fold(tiny, out="run")
    rc.export("run")
    takes = OnnxRuntime.open

    def opens(self, deployable, spec):
        if not spec.lean and "training" in str(deployable):
            raise Refused(f"it cannot load {deployable}.", code="engine.unloadable")
        return takes(self, deployable, spec)

    monkeypatch.setattr(OnnxRuntime, "open", opens)
    done = rc.bench("run", rounds=3)
    assert [each.name for each in done.latencies] == [DEPLOY]
    assert done.ratio is None
    assert "without the training form: it cannot load" in done.note
    monkeypatch.setattr(run_folder, "failed_of_others", lambda *_: "verify failed for another export")
    assert rc.bench("run", rounds=3).note.endswith("; verify failed for another export")
    with pytest.raises(Refused, match="cannot load"):  # asked for, it is not left out
        rc.bench("run", against="run/bench/training.onnx", rounds=3)


def test_ratios_and_their_intervals():
    from repaconv.benchmark.latency_statistics import ratio

    random = np.random.default_rng(0)
    noise = 1 + 0.02 * random.standard_normal((2, 60))
    weather = 1 + random.random(60)  # slow moments hit both
    faster = ratio("a", 10 * weather * noise[0], "b", 12 * weather * noise[1], seed=0)
    assert faster.low < 1.2 < faster.high
    assert faster.verdict == "faster"
    assert ratio("b", 12 * weather, "a", 10 * weather, seed=0).verdict == "slower"
    assert ratio("a", weather * noise[0], "b", weather * noise[1], seed=0).verdict == "no difference shown"


def test_a_checkpoint_whose_name_is_not_utf_8_has_a_run_that_is_found_again(tiny):
    """Its folder is named in UTF-8, since safetensors opens no other; a page names the file as messages do."""
    given = tiny.rename(tiny.with_name(os.fsdecode(b"a\xff.pth")))
    rc.fold(given)
    assert find_run(None).folder == Path("repaconv-out", r"a\xff")
    assert rc.verify().verdict == "passed"
    for _again in range(2):
        rc.report()
    assert r"a\udcff.pth" in Path("repaconv-out", r"a\xff", "report.html").read_text()
    with pytest.raises(Refused, match="not UTF-8"):
        rc.fold(given, out=os.fsdecode(b"b\xff"))


def test_interleaving_runs_everything_once_a_round():
    from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure, pinned_to_cores

    calls = []
    subjects = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    entrants = {name: Entrant(lambda call=call: call) for name, call in subjects.items()}
    found = measure(entrants, Protocol(30, warmup_rounds=3, session_loads=1))
    assert {len(v) for v in found.samples_ms.values()} == {30}
    rounds = [tuple(calls[i : i + 2]) for i in range(0, 66, 2)]
    assert set(rounds) == {("a", "b"), ("b", "a")}
    before = os.sched_getaffinity(0)
    with pinned_to_cores(1) as cores:
        assert os.sched_getaffinity(0) == set(cores)
    assert os.sched_getaffinity(0) == before


def test_inputs_that_do_not_fit_are_refused(tiny, tmp_path):
    rc.fold(tiny)
    np.savez(tmp_path / "grey.npz", input=np.zeros((1, 1, 32, 32)))
    np.savez(tmp_path / "other.npz", input=np.zeros((1, 3, 32, 32)), output=np.zeros((1, 99)))
    (tmp_path / "no.npz").write_bytes(b"PK no")
    for name in ("grey.npz", "other.npz", "no.npz", "none.npz"):
        with pytest.raises(Refused):
            rc.verify(inputs=tmp_path / name)
    assert not (RUN / "verify.json").exists()


def test_no_simplifier_undoes_what_the_form_has_written(tmp_path):
    """onnxsim makes one layer of those that read one input: queries, keys and values are each their own here."""
    rc.fold(models.checkpoint("pyra"), out=tmp_path / "run")
    done = rc.export(tmp_path / "run")
    assert {change.rewrite for change in done.changes} >= {"attention-op", "linear-each"}
    names = {change.rewrite for change in done.changes}
    known = [rewrite for rewrite in chosen(names, 23).rewrites if rewrite.name in names]
    assert not rewritten(onnx.load(tmp_path / "run" / "model.onnx"), known)[1]

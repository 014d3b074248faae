"""Forms and the tuner: what is searched, what is kept, what is written, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import TINY
from forms_page import PAGE, page
from onnx import numpy_helper

import repaconv as package
from repaconv import registry
from repaconv.artefacts import Change, ExportArtefact, Ratio, TuneArtefact
from repaconv.backbones.metaformer import MetaFormer
from repaconv.errors import Refused, UsageProblem
from repaconv.files import read_artefact
from repaconv.forms.search import COMPOSITIONS, FINALISTS, MIDDLE, SCREENING, every, search
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Writer
from repaconv.methods.nondeep.published import example_meta
from repaconv.methods.repavit.published import Example
from repaconv.methods.riformer import METHOD
from repaconv.orders.stages import TuneOrder
from repaconv.pipeline import tuning
from repaconv.runs import Run
from repaconv.steps import lowering
from repaconv.steps.common import load_target
from repaconv.subjects.proved import Proving, exported_graph
from repaconv.subjects.subject import GraphSpec, subject_of

NAMES = tuple("abcdef")
SET = {"num_heads": "3"}
HEADS = ("--set", "num_heads=3")
THREE = ("read-tokens", "attention-op", "linear-each")


def ratio_of(value: float, spread: float = 0.005) -> Ratio:
    low, high = value * (1 - spread), value * (1 + spread)
    return Ratio(
        subject="form",
        other="default form",
        median=value,
        low=low,
        high=high,
        confidence=0.95,
        p10=low,
        p90=high,
        verdict="no difference shown",
    )


class Machine:
    """Where every rewrite has an effect of its own, pairs a little more, and every measurement some noise."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.effects = dict(zip(NAMES, self.random.normal(0, 0.05, len(NAMES)), strict=True))
        self.pairs = {a + b: self.random.normal(0, 0.005) for a in NAMES for b in NAMES if a < b}
        self.rounds = 0

    def gain(self, form: tuple[str, ...]) -> float:
        together = [value for pair, value in self.pairs.items() if set(pair) <= set(form)]
        return math.exp(sum(self.effects[name] for name in form) + sum(together))

    def measure(self, forms, rounds):
        self.rounds += rounds * len(forms)
        base = self.gain(("a", "b"))
        return {
            form: ratio_of(self.gain(form) / base * math.exp(self.random.normal(0, 0.02 / math.sqrt(rounds))))
            for form in forms
        }


@pytest.mark.parametrize("seed", range(30))
def test_the_winner_is_within_three_percent_of_the_best_of_all_in_a_quarter_of_the_rounds(seed):
    tuner, patient = Machine(seed), Machine(seed)
    won = search(("a", "b"), NAMES, lambda _form: 100, tuner.measure, 40)[0]
    best = max((row.rewrites for row in every(("a", "b"), NAMES, patient.measure, 40)), key=patient.gain)
    assert tuner.gain(won.rewrites) >= 0.97 * patient.gain(best)
    assert tuner.rounds <= patient.rounds / 4
    assert tuner.rounds <= len(NAMES) * SCREENING + COMPOSITIONS * MIDDLE + FINALISTS * 40


def test_where_nothing_is_faster_the_default_form_wins_and_the_hopeless_is_not_measured():
    seen = []

    def measure(forms, rounds):
        seen.extend(forms)
        return {form: ratio_of(0.999) for form in forms}

    rows = search(("a",), ("a", "b", "c"), lambda form: 200 if "b" in form else 100, measure, 40)
    assert rows[0].rewrites == ("a",)
    assert rows[0].ratio is None
    assert ("a", "b") not in seen
    assert any(row.told.startswith("hopeless: 2.00") for row in rows)


def saved(name: str, seed: int) -> Path:
    method = registry.load(registry.METHODS, "repavit")
    sizes = Example("plain", (1,), (24,), (3,), image_size=32, patch=8, classes=5)
    told = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=32)
    torch.save({"model": method.example(sizes, seed=seed), "args": told}, path := Path(name))
    return path


def all_equal(_reference, others, _rounds, **_):
    return {name: ratio_of(1.0) for name in others}


def test_tune_folds_searches_writes_and_is_taken_by_export(repaconv):
    ckpt = saved("first.pth", 1)
    code, out, _ = repaconv("tune", ckpt, *HEADS, "--rounds", "4", "--format", "json")
    assert code == 0
    data = json.loads(out)["data"]
    tuned = Path("repaconv-out/first/tuned/x86-64.json")
    assert read_artefact(tuned, TuneArtefact).rewrites == tuple(data["rewrites"])
    assert {"read-tokens", "attention-op", "linear-each"} <= {
        name for row in data["candidates"] for name in row["rewrites"]
    }
    assert any(row["ratio"] for row in data["candidates"])
    code, out, _ = repaconv("export", "--onnx", "--form", tuned)
    assert code == 0
    exported = read_artefact(Path("repaconv-out/first/export.form-x86-64.json"), ExportArtefact)
    assert exported.form == "x86-64.json"
    assert set(exported.rewrites) <= set(data["rewrites"])
    form = next(link for link in exported.links if link.name == "form")
    assert form.verdict == "passed"
    assert repaconv("verify")[0] == 0
    recipe = f'checkpoint = "first.pth"\nout = "gated"\nform = "{tuned}"\n[set]\nnum_heads = 3\n'
    Path("recipe.toml").write_text(recipe)
    assert package.gate(["recipe.toml"]).exit_code == 0
    assert read_artefact(Path("gated/export.form-x86-64.json"), ExportArtefact).form == "x86-64.json"


def test_a_second_checkpoint_of_the_same_shapes_costs_nothing(monkeypatch):
    def never(*_, **__):
        raise AssertionError("measured again")

    asked = {"settings": SET, "rewrites": THREE}
    monkeypatch.setattr(tuning, "measured_here", lambda *given, **_: all_equal(*given))
    package.tune(saved("first.pth", 1), **asked)
    monkeypatch.setattr(tuning, "measured_here", never)
    again = package.tune(saved("second.pth", 2), **asked)
    assert again.note
    assert package.fold("second.pth", num_heads=3, form="fastest-known", force=True).rewrites == again.rewrites
    with pytest.raises(AssertionError, match="measured again"):
        package.tune("first.pth", again=True, **asked)


def test_of_equal_searches_the_fastest_is_known_and_a_finished_one_before(tiny, monkeypatch):
    from repaconv.files import cache_folder, write_artefact
    from repaconv.steps.forms import _known

    package.fold(tiny)
    monkeypatch.setattr(tuning, "measured_here", lambda *given, **_: all_equal(*given))
    done = package.tune(rewrites=["bias-forward"])
    of = {"0000": (1.01, True), "8888": (9.0, False), "ffff": (3.0, True)}
    for name, (value, complete) in of.items():
        found = done.model_copy(update={"ratio": ratio_of(value), "complete": complete})
        write_artefact(cache_folder("tuned") / f"{done.shapes_sha256[:16]}-{name}.json", found)
    assert _known(done.shapes_sha256).ratio.median == 3.0


def test_tune_takes_no_other_fold_for_the_checkpoints_and_removes_none(tiny):
    package.fold(tiny, image_size=64)
    package.verify()
    before = sorted(Path("repaconv-out/tiny").iterdir())
    for settings in (None, {"image_size": "96"}):
        with pytest.raises(Refused, match="another fold than that was asked for: not of the same image_size"):
            package.tune(tiny, settings=settings, measurer=all_equal)
    assert sorted(Path("repaconv-out/tiny").iterdir()) == before


def test_what_another_machine_measured_is_not_known_of_this_one():
    done = package.tune(saved("first.pth", 1), settings=SET, measurer=all_equal, rewrites=THREE)
    assert done.machine == {"cpu": "a worker of x86-64"}
    with pytest.raises(UsageProblem, match="nothing is known"):
        package.fold("first.pth", num_heads=3, form="fastest-known")


def test_a_search_that_is_broken_off_goes_on_where_it_was():
    ckpt, seen = saved("first.pth", 1), []

    def breaks(reference, others, rounds, **_):
        if seen:
            raise KeyboardInterrupt
        return counts(reference, others, rounds)

    def counts(reference, others, rounds, **_):
        seen.append((rounds, sorted(others)))
        return all_equal(reference, others, rounds)

    with pytest.raises(KeyboardInterrupt):
        package.tune(ckpt, settings=SET, measurer=breaks, where="there", rewrites=THREE)
    package.tune(ckpt, settings=SET, measurer=counts, where="there", rewrites=THREE)
    assert [rounds for rounds, _ in seen] == [SCREENING, MIDDLE, 50]


def test_a_search_that_was_broken_off_is_no_form():
    def breaks(*_, **__):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return all_equal(*_)

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        package.tune(saved("first.pth", 1), settings=SET, measurer=breaks, rewrites=THREE)
    with pytest.raises(UsageProblem, match="nothing is known"):
        package.fold("first.pth", num_heads=3, form="fastest-known")


def test_an_answer_is_of_its_question(monkeypatch):
    """Of the time that it had, of this repaconv; with lower precision of the weights, the images and the budget."""
    from repaconv.steps import common

    calls: list[set[str]] = []

    def measurer(_reference, others, _rounds, **_):
        calls.append(set(others))
        return {name: ratio_of(1.5 if name in ("fp16", "int8") else 1.0) for name in others}

    def asked(name="first.pth", where="there", **more):
        calls.clear()
        told = {"settings": SET, "measurer": measurer, "where": where, "rewrites": THREE}
        return package.tune(Path(name), **told, **more), list(calls)

    saved("first.pth", 1)
    saved("second.pth", 2)
    short, measured = asked(budget_s=0)
    assert (short.complete, measured) == (False, [])
    assert asked(budget_s=0)[0].note  # no more time than it had
    long, measured = asked()
    assert (long.complete, long.note) == (True, "")
    assert measured
    assert asked(budget_s=5)[0].note
    assert asked(where="another cluster")[1]
    assert asked(where="")[1]  # who does not say where has not been there before
    assert asked(where="")[1]
    size = long.image_size
    for name in ("a", "b"):
        images = np.random.default_rng(ord(name)).standard_normal((16, 3, *size)).astype(np.float32)
        np.savez(f"{name}.npz", input=images)
    low = {"max_disagreement": 1.0, "inputs": "a.npz"}
    first, measured = asked(**low)
    assert (first.note, measured) == ("", [{"fp16", "int8"}])  # the forms are known, what is lossy is not
    assert first.lowered[0].link.tolerance.kind == "lossy"
    assert asked(**low)[0].lowered == first.lowered
    assert asked(**low)[1] == []
    for other in ({**low, "inputs": "b.npz"}, {**low, "max_disagreement": 0.5}, {**low, "name": "second.pth"}):
        found, measured = asked(**other)
        assert (found.note, measured) == ("", [{"fp16", "int8"}]), other
    assert asked(name="second.pth")[0].note
    with pytest.raises(Refused, match=r"gone\.npz"):
        asked(**{**low, "inputs": "gone.npz"})
    monkeypatch.setattr(common, "version", lambda _package: "9")
    assert asked()[1]


def test_what_the_budget_does_not_allow_is_left():
    done = package.tune(saved("first.pth", 1), settings=SET, measurer=all_equal, rewrites=THREE, budget_s=0)
    assert done.rewrites == done.default
    assert not any(row.ratio for row in done.candidates)


def test_lower_precision_is_lossy_judged_on_images_and_kept_within_what_is_allowed(repaconv):
    ckpt = saved("first.pth", 1)
    code, _, err = repaconv("tune", ckpt, *HEADS, "--max-disagreement", "0.5%")
    assert code == 2
    assert "--inputs" in err
    weights = torch.load(ckpt, weights_only=False)
    headless = {name: value for name, value in weights["model"].items() if not name.startswith("head.")}
    torch.save({**weights, "model": headless}, "headless.pth")
    with pytest.raises(UsageProblem, match="features"):
        package.tune("headless.pth", settings=SET, max_disagreement=0.1, inputs="images.npz", rewrites=THREE)
    folded = package.fold(ckpt, num_heads=3)
    images = np.random.default_rng(0).standard_normal((64, 3, *folded.image_size)).astype(np.float32)
    np.savez("images.npz", input=images)

    def doubled(_reference, others, _rounds, **_):
        return {name: ratio_of(2.0 if name in ("fp16", "int8") else 1.0) for name in others}

    loose = package.tune(
        ckpt, settings=SET, max_disagreement=1.0, inputs="images.npz", measurer=doubled, rewrites=THREE
    )
    assert loose.precision in ("fp16", "int8")
    assert {row.precision for row in loose.lowered} == {"fp16", "int8"}
    assert all(row.disagreement is not None and row.images == 32 for row in loose.lowered)
    for least, told in ((0.02, "cannot tell"), (-1.0, "is -1"), (math.inf, "is inf")):
        with pytest.raises(UsageProblem, match=told):
            package.tune(ckpt, settings=SET, max_disagreement=least, inputs="images.npz", rewrites=THREE)


@pytest.mark.parametrize("classes", [1, 5])
def test_a_lower_precision_is_judged_as_a_link_on_images_that_did_not_calibrate_it(classes, tmp_path, monkeypatch):
    """With one class the first one agrees whatever comes out, NaN too."""
    tiny = METHOD.example(dataclasses.replace(TINY, classes=classes), seed=3)
    torch.save({"state_dict": tiny, "args": {"img_size": 32}}, "tiny.pth")
    package.fold("tiny.pth")
    package.export()
    model, device = onnx.load("repaconv-out/tiny/model.onnx"), load_target("x86-64")
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)
    np.savez("x.npz", input=images)
    calibrated, judged = [], []
    sound, outputs = lowering.in_precision, lowering._outputs

    def nothing(graph, precision, pieces, **settings):
        calibrated.extend(np.concatenate([piece["input"] for piece in pieces]))
        typed, kept = sound(graph, precision, pieces, **settings)
        for weight in typed.graph.initializer:
            if classes == 1 and weight.data_type == onnx.TensorProto.FLOAT:
                weight.CopyFrom(numpy_helper.from_array(np.nan * numpy_helper.to_array(weight), weight.name))
        return typed, kept

    monkeypatch.setattr(lowering, "in_precision", nothing)
    monkeypatch.setattr(
        lowering, "_outputs", lambda m, pieces: (judged.extend(p["input"] for p in pieces), outputs(m, pieces))[1]
    )
    rows = lowering.lowered(
        TuneOrder(max_disagreement=0.5, inputs="x.npz"),
        subject_of(Run(Path("repaconv-out/tiny"))),
        lambda *_: model,
        ["int8"],
        device,
        measure=lambda *_: {},
        scratch=tmp_path,
        progress=lambda *_: None,
    ).rows
    assert rows[0].told == ("failed as a link" if classes == 1 else "allowed")
    seen = {image.tobytes() for image in calibrated}, {image.tobytes() for image in np.concatenate(judged)}
    assert (len(seen[0]), len(seen[1]), seen[0] & seen[1]) == (4, 4, set())


def test_forms_by_name_and_what_is_no_form(repaconv, tiny):
    ckpt = saved("first.pth", 1)
    assert package.fold(ckpt, num_heads=3, form="official").rewrites == ()
    assert package.fold(ckpt, num_heads=3).rewrites is None
    branches = registry.load(registry.METHODS, "nondeep").example("tiny", seed=1)
    torch.save({"state_dict": branches, "meta": example_meta()}, "branches.pth")
    assert package.fold("branches.pth", form="official").rewrites == ("scores-as-matrix",)
    for form, told in (("quickest", "no form and no file"), ("fastest-known", "nothing is known")):
        code, _, err = repaconv("fold", ckpt, *HEADS, "--form", form)
        assert code == 2
        assert told in err
        assert f"repaconv export --onnx --form {form}" in err  # where it moves
        with pytest.raises(UsageProblem, match=told):
            package.export("repaconv-out/branches", form=form)
    usual, official = package.export("repaconv-out/branches"), package.export("repaconv-out/branches", form="default")
    assert (usual.form, usual.variant, official.form) == ("official", "form-official", "default")
    with pytest.raises(UsageProblem, match="no file and no folder"):
        package.tune("gone.pth")
    done = package.tune(ckpt, settings=SET, measurer=all_equal, rewrites=THREE)
    with pytest.raises(Refused, match="other shapes"):
        package.fold(tiny, form=done.wrote[0])
    with pytest.raises(UsageProblem, match="no rewrite"):
        package.tune(ckpt, settings=SET, measurer=all_equal, rewrites=["faster"])


def test_a_rewrite_that_breaks_leaves_the_exported_graph(monkeypatch):
    from repaconv.forms import attention

    def broken(_model):
        raise ValueError("not this graph")
        yield

    rewrite = attention.ATTENTION_OP
    monkeypatch.setattr(attention, "ATTENTION_OP", type(rewrite)(rewrite.name, rewrite.valid, broken, rewrite.opset))
    package.fold(saved("first.pth", 1), num_heads=3)
    done = package.export()
    assert done.verdict == "passed"
    assert done.rewrites == ()
    assert "not this graph" in next(link.note for link in done.links if link.name == "form")


def test_a_rewrite_that_is_right_at_the_exporters_batch_alone_is_thrown_away(tmp_path):
    def shifted(model):
        node = model.graph.outputs[0].producer()
        write = Writer(model, node)
        count = write("Shape", model.graph.inputs[0], start=0, end=1)
        count.dtype = ir.DataType.INT64
        off = write("Sub", write("Cast", count, to=1), write.exactly(np.array([2.0], np.float32)))
        node.replace_input_with(0, write("Add", node.inputs[0], off))
        yield Change(rewrite="shifted", place="head", told="adds the batch minus 2")

    torch.manual_seed(0)
    net = MetaFormer(TINY, final_affine=False).eval()
    spec = GraphSpec((32, 32), opset=18, rewrites=(Rewrite("shifted", "never", shifted),), simplifiers=())
    ways = Proving("net", spec, {}, tmp_path, lambda *_: None)
    made = exported_graph(ways, net, net.state_dict(), (3, 32, 32), output="logits")
    assert {link.name: link.verdict for link in made.links[:2]} == {"exported": "passed", "form": "failed"}
    assert made.changes == ()


def test_the_page_of_forms_is_of_the_rewrites_that_there_are():
    assert PAGE.read_text() == page(), "run python tests/forms_page.py"

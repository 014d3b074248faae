"""What a stage is asked for: read from words, told in the same words, and the same by name in Python."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import repaconv as rc
from repaconv.core.errors import UsageProblem
from repaconv.options import stage_options
from repaconv.options.option_definitions import by_name, knobs
from repaconv.options.stage_options import ThroughputOrder
from repaconv.stages.shared.common_checks import as_image_size, load_target


@pytest.mark.parametrize(
    ("order", "name", "text", "value"),
    [
        (stage_options.ExportOrder, "image_size", "140x126", (140, 126)),
        (stage_options.ExportOrder, "image_size", "224", (224, 224)),
        (stage_options.ExportOrder, "batch", "8", 8),
        (stage_options.ExportOrder, "batch", "dynamic", None),
        (stage_options.BenchOrder, "max_regression", "5%", 0.05),
        (stage_options.BenchOrder, "max_regression", "0.05", 0.05),
        (stage_options.TuneOrder, "max_disagreement", "0.5%", 0.005),
        (stage_options.TuneOrder, "rewrites", "one-linear,no-moves", ("one-linear", "no-moves")),
        (stage_options.VerifyOrder, "rtol", ["onnx:1e-6", "fp16:0.1"], {"onnx": 1e-6, "fp16": 0.1}),
        (stage_options.VerifyOrder, "require", ["engine"], ("engine",)),
        (stage_options.FoldOrder, "settings", ["mean=1,2,3"], {"mean": "1,2,3"}),
    ],
)
def test_what_is_read_is_told_in_words_that_are_read_the_same(order, name, text, value):
    (asked,) = [each for each in knobs(order) if each.name == name]
    assert asked.read(text) == value
    if value is not None:
        words = asked.words(value)
        assert set(words[::2]) == {asked.option}
        assert asked.read(words[1::2] if isinstance(text, list) else words[1]) == value


def test_words_leave_out_what_is_usual_and_what_an_artefact_does_not_repeat():
    assert stage_options.ExportOrder().words() == ()
    assert stage_options.BenchOrder(target=load_target("arm64")).words() == ("--target", "arm64")
    asked = stage_options.ExportOrder(
        precision="int8", batch=2, image_size=(32, 48), simplify=False, inputs=Path("here/x.npz")
    )
    words = "--precision int8 --batch 2 --image-size 32x48 --no-simplify --inputs here/x.npz"
    assert asked.words() == tuple(words.split())
    assert stage_options.BenchOrder(baseline="b.json", out="o.json", seed=0).words() == ()
    assert stage_options.BuildOrder(target="x86-64", workspace_mib=9).words() == (
        "--target",
        "x86-64",
        "--workspace",
        "9",
    )
    assert stage_options.FoldOrder(settings={"eps": "1"}, weights="ema").words() == (
        "--set",
        "eps=1",
        "--weights",
        "ema",
    )
    assert stage_options.VerifyOrder(rtol={"onnx": 1e-6}, require=("a", "b")).words() == (
        *("--rtol", "onnx:1e-06"),
        *("--require", "a", "--require", "b"),
    )


def test_an_image_size_is_a_number_a_pair_or_how_it_is_typed():
    assert [as_image_size(size) for size in (None, 224, (140, 126), "140x126", "224")] == [
        None, (224, 224), (140, 126), (140, 126), (224, 224)]  # fmt: skip
    with pytest.raises(UsageProblem, match="image_size large"):
        as_image_size("large")


def test_what_is_no_value_is_refused_with_its_option():
    (asked,) = [each for each in knobs(stage_options.BenchOrder) if each.name == "max_regression"]
    for text in ("x", "-5%", "nan"):
        with pytest.raises(UsageProblem, match="--max-regression"):
            asked.read(text)


@pytest.mark.parametrize(
    ("name", "order", "given", "found"),
    [
        ("require", stage_options.VerifyOrder, "engine", ("engine",)),
        ("keep_fp32", stage_options.ExportOrder, "head", ("head",)),
        ("runtimes", stage_options.TuneOrder, "auto", ("auto",)),
        ("rewrites", stage_options.TuneOrder, "gemm,bias-forward", ("gemm", "bias-forward")),
        ("require", stage_options.VerifyOrder, ["onnx", "engine"], ["onnx", "engine"]),
    ],
)
def test_a_single_name_is_taken_where_there_may_be_several(name, order, given, found):
    """Letter by letter, "engine" was six links that there are not."""

    def stage_by(order: object) -> object:
        return getattr(order, name)

    assert by_name(stage_by, order)(**{name: given}) == found


def test_a_single_path_is_no_list_of_letters():
    Path("run").mkdir()
    Path("run/fold.json").write_text("{}")
    with pytest.raises(UsageProblem, match="at least two runs"):
        rc.compare_runs("run")
    (recipe,) = rc.gate("missing.toml").recipes
    assert "missing.toml" in recipe.recipe


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (rc.verify, stage_options.VerifyOrder),
        (rc.export, stage_options.ExportOrder),
        (rc.build, stage_options.BuildOrder),
        (rc.bundle, stage_options.BundleOrder),
        (rc.bench, stage_options.BenchOrder),
        (rc.throughput, ThroughputOrder),
        (rc.tune, stage_options.TuneOrder),
        (rc.gate, stage_options.GateOrder),
    ],
)
def test_in_python_a_stage_has_its_orders_fields_by_name(stage, order):
    parameters = inspect.signature(stage).parameters
    assert {each.name for each in fields(order)} < set(parameters)
    for each in knobs(order):
        assert parameters[each.name].default == each.default
        assert f"    {each.name}: {each.knob.help}" in inspect.getdoc(stage)
    needed = {each.name: "x" for each in knobs(order) if each.default is inspect.Parameter.empty}
    with pytest.raises(TypeError, match="nonsense"):
        stage("none", nonsense=1, **needed)

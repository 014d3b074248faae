"""Options of stages: parsed from words, printed in the same words, and given by name in Python."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import repaconv as rc
from repaconv.core.errors import UsageProblem
from repaconv.stages.bench.options import BenchOptions, ThroughputOptions
from repaconv.stages.build.options import BuildOptions
from repaconv.stages.bundle.options import BundleOptions
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.recipe.options import GateOptions
from repaconv.stages.shared.option_dataclasses import as_image_size, by_name, options_of, validated
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.tune.options import TuneOptions
from repaconv.stages.verify.options import VerifyOptions


@pytest.mark.parametrize(
    ("order", "name", "text", "value"),
    [
        (ExportOptions, "image_size", "140x126", (140, 126)),
        (ExportOptions, "image_size", "224", (224, 224)),
        (ExportOptions, "batch", "8", 8),
        (ExportOptions, "batch", "dynamic", None),
        (BenchOptions, "max_regression", "5%", 0.05),
        (BenchOptions, "max_regression", "0.05", 0.05),
        (TuneOptions, "max_disagreement", "0.5%", 0.005),
        (TuneOptions, "rewrites", "rms-norm,patch-gemm", ("rms-norm", "patch-gemm")),
        (VerifyOptions, "rtol", ["onnx:1e-6", "fp16:0.1"], {"onnx": 1e-6, "fp16": 0.1}),
        (VerifyOptions, "require", ["engine"], ("engine",)),
        (FoldOptions, "settings", ["mean=1,2,3"], {"mean": "1,2,3"}),
    ],
)
def test_parsed_options_are_printed_in_words_that_parse_to_the_same(order, name, text, value):
    (asked,) = [each for each in options_of(order) if each.name == name]
    assert asked.read(text) == value
    if value is not None:
        words = asked.words(value)
        assert set(words[::2]) == {asked.option}
        assert asked.read(words[1::2] if isinstance(text, list) else words[1]) == value


def test_words_leave_out_what_is_usual_and_what_an_artefact_does_not_repeat():
    assert ExportOptions().words() == ()
    assert BenchOptions(target=load_target("arm64")).words() == ("--target", "arm64")
    asked = ExportOptions(precision="int8", batch=2, image_size=(32, 48), simplify=False, inputs=Path("here/x.npz"))
    words = "--precision int8 --batch 2 --image-size 32x48 --no-simplify --inputs here/x.npz"
    assert asked.words() == tuple(words.split())
    assert BenchOptions(baseline="b.json", out="o.json", seed=0).words() == ()
    assert BuildOptions(target="x86-64", workspace_mib=9).words() == (
        "--target",
        "x86-64",
        "--workspace",
        "9",
    )
    assert FoldOptions(settings={"eps": "1"}, weights="ema").words() == (
        "--set",
        "eps=1",
        "--weights",
        "ema",
    )
    assert VerifyOptions(rtol={"onnx": 1e-6}, require=("a", "b")).words() == (
        *("--rtol", "onnx:1e-06"),
        *("--require", "a", "--require", "b"),
    )


def test_an_image_size_is_a_number_a_pair_or_how_it_is_typed():
    assert [as_image_size(size) for size in (None, 224, (140, 126), "140x126", "224")] == [
        None, (224, 224), (140, 126), (140, 126), (224, 224)]  # fmt: skip
    with pytest.raises(UsageProblem, match="image_size large"):
        as_image_size("large")


def test_what_is_no_value_is_refused_with_its_option():
    (asked,) = [each for each in options_of(BenchOptions) if each.name == "max_regression"]
    for text in ("x", "-5%", "nan"):
        with pytest.raises(UsageProblem, match="--max-regression"):
            asked.read(text)
    assert asked.read("500%") == 5.0
    with pytest.raises(UsageProblem, match="more than the whole") as refused:  # 5 may be meant as 5%
        asked.read("5")
    assert "--max-regression 5%" in refused.value.hint
    (asked,) = [each for each in options_of(ExportOptions) if each.name == "batch"]
    for text in ("²", "0", "9" * 5000):  # ² is a digit, but int does not read it
        with pytest.raises(UsageProblem, match="neither dynamic nor a whole number above zero"):
            asked.read(text)
    (asked,) = [each for each in options_of(FoldOptions) if each.name == "settings"]
    with pytest.raises(UsageProblem, match="--set gives eps twice"):
        asked.read(["eps=1", "mean=2", "eps=3"])


@pytest.mark.parametrize(
    ("name", "order", "given", "found"),
    [
        ("require", VerifyOptions, "engine", ("engine",)),
        ("keep_fp32", ExportOptions, "head", ("head",)),
        ("runtimes", TuneOptions, "auto", ("auto",)),
        ("rewrites", TuneOptions, "gemm,bias-forward", ("gemm", "bias-forward")),
        ("require", VerifyOptions, ["onnx", "engine"], ["onnx", "engine"]),
    ],
)
def test_a_single_name_is_taken_where_there_may_be_several(name, order, given, found):
    """Letter by letter, "engine" was six links that there are not."""

    def stage_by(order: object) -> object:
        return getattr(order, name)

    lower = {"precision": "int8"} if name == "keep_fp32" else {}  # of float32 there is nothing to keep
    assert by_name(stage_by, order)(**{name: given}, **lower) == found


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
        (rc.verify, VerifyOptions),
        (rc.export, ExportOptions),
        (rc.build, BuildOptions),
        (rc.bundle, BundleOptions),
        (rc.bench, BenchOptions),
        (rc.throughput, ThroughputOptions),
        (rc.tune, TuneOptions),
        (rc.gate, GateOptions),
    ],
)
def test_in_python_a_stage_has_its_orders_fields_by_name(stage, order):
    parameters = inspect.signature(stage).parameters
    assert {each.name for each in fields(order)} < set(parameters)
    for each in options_of(order):
        assert parameters[each.name].default == each.default
        text = each.definition.help.removesuffix(".").removesuffix("; repeatable")  # in Python it is a dict or a list
        assert f"    {each.name}: {text}" in inspect.getdoc(stage)
    needed = {each.name: "x" for each in options_of(order) if each.default is inspect.Parameter.empty}
    with pytest.raises(TypeError, match="nonsense"):
        stage("none", nonsense=1, **needed)


@pytest.mark.parametrize(
    ("stage", "given", "message"),
    [
        (rc.deploy, {"target": "x86-64", "rounds": 2}, "rounds=2: must be at least 10."),
        (rc.bench, {"rounds": "many"}, "rounds='many': input should be a valid integer"),
        (rc.fold, {"out": 3}, "out=3: input should be a valid string."),
        (rc.fold, {"measure": "perhaps"}, "measure='perhaps': input should be a valid boolean"),
        (rc.verify, {"rtol": {"onnx": "much"}}, "rtol={'onnx': 'much'}: input should be a valid number"),
        (rc.export, {"keep_fp32": 3}, "keep_fp32=3: input should be a valid "),
        (rc.tune, {"threads": 0}, "threads=0: must be at least 1."),
    ],
)
def test_a_wrong_argument_in_python_is_refused_in_one_sentence(stage, given, message):
    with pytest.raises(UsageProblem) as refused:
        stage("net.pth", **given)
    assert refused.value.message.startswith(message)
    assert refused.value.hint.startswith(f"{message.partition('=')[0]}: ")


def test_arguments_in_python_may_also_be_text_paths_and_targets(tmp_path):
    device = load_target("arm64")
    assert validated(BenchOptions, {"target": device}).target is device
    assert validated(BenchOptions, {"target": tmp_path / "own.toml"}).target == str(tmp_path / "own.toml")
    assert validated(BenchOptions, {"image_size": "140x126"}).image_size == (140, 126)
    assert validated(ExportOptions, {"batch": "dynamic"}).batch is None
    assert validated(FoldOptions, {"preset": tmp_path / "tuned.json"}).preset == str(tmp_path / "tuned.json")
    assert validated(FoldOptions, {"settings": "num_heads=3"}).settings == {"num_heads": "3"}
    with pytest.raises(UsageProblem, match="settings many is not NAME=VALUE"):
        rc.fold("net.pth", settings="many")


def test_settings_in_python_may_be_numbers():
    given = validated(FoldOptions, {"settings": {"num_heads": 3, "mean": (0.5, 1)}})
    assert given.settings == {"num_heads": "3", "mean": "0.5,1"}

"""`repaconv gate` as CI runs it: exit codes of a real shell, report formats, baselines, recipes and their lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import torch
import xmlschema
import yaml
from conftest import SHARED, one_net_a_method
from planted_faults import wrong_initializer

import repaconv as rc
from repaconv import models
from repaconv.benchmark.latency_statistics import Timed, regression
from repaconv.core import plugins
from repaconv.core.errors import UsageProblem
from repaconv.core.toml_positions import key_lines
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.results import Accuracy, Check, GatedRecipe, GateReport, Link
from repaconv.stages.recipe import gate_report_formats, run
from repaconv.stages.recipe.gate_checks import RecipeChecks
from repaconv.stages.recipe.options import GateOptions
from repaconv.stages.recipe.recipe_file import Recipe, read_recipe

HERE = Path(__file__).parent
SCHEMA = HERE / "data" / "junit.xsd"
SOUND = [
    ("repavit", "tiny", {"num_heads": "3"}),
    ("repavit", "tiny-swin", {}),
    ("repavit", "tiny-mixer", {}),
    ("repavit", "tiny-poolformer", {"pool_size": "3"}),
    ("nondeep", "tiny", {}),
    ("dwconv", "tiny", {"num_heads": "3"}),
    ("pyra", "tiny", {"num_heads": "3"}),
    ("repconv", "tiny-mobileone", {"image_size": "32"}),
]


def recipe(folder: Path, text: str = "", *, name="r", method="repavit", arch="tiny", seed=1, settings=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = plugins.load(plugins.METHODS, method).example(arch, seed)
    meta = example_meta() if method == "nondeep" else {}
    torch.save({"state_dict": weights, "meta": meta}, folder / f"{name}.pth")
    table = "".join(
        f'{key} = "{value}"\n' for key, value in ({"num_heads": "3"} if settings is None else settings).items()
    )
    path = folder / f"{name}.toml"
    path.write_text(f'checkpoint = "{name}.pth"\nout = "{name}-run"\n[set]\n{table}{text}')
    return path


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "repaconv", *map(str, arguments)], capture_output=True, text=True, check=False
    )


# --- exit codes ---------------------------------------------------------------------------------------


def test_exit_codes_as_a_shell_sees_them(tmp_path, repaconv):
    export = "[export]\nsimplify = false\nbatch = 1\n"
    sound = recipe(tmp_path / "recipes", export)
    failing = recipe(tmp_path, f"{export}[verify.rtol]\nstored = 1e-30\n", name="failing")
    refused = recipe(tmp_path, name="refused", settings={"num_heads": "5"})
    usage = recipe(tmp_path, "[verify]\nimage = 'x'\n", name="usage")
    done = shell("gate", refused)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    missing = recipe(tmp_path, f"{export}[verify]\nrequire = ['engine']\n", name="missing")
    for paths, code in (([usage], 2), ([tmp_path / "none.toml"], 2), ([missing], 1), ([], 2)):
        assert repaconv("gate", *paths)[0] == code, paths
    code, out, _ = repaconv("gate", usage, sound, failing, "--format", "json")  # the worst counts, and all are run
    found = json.loads(out)
    assert [entry["exit_code"] for entry in found["data"]["recipes"]] == [2, 0, 1]
    assert (code, found["status"], found["exit_code"]) == (1, "failed", 1)
    assert (tmp_path / "recipes" / "r-run" / "verify.json").is_file()


def test_what_the_recipe_asks_for_and_is_not_there_is_an_environment_problem(tmp_path):
    (tmp_path / "t.toml").write_text(
        'name = "board"\nabout = "a"\nruntime = "tensorrt"\nopset = 20\nprecisions = ["fp32"]\n'
        "[bench]\nthreads = 1\nbatch = 1\nrounds = 10\nwarmup_rounds = 1\n"
    )
    path = recipe(tmp_path, "[export]\ntarget = 't.toml'\n[bench]\n")
    report = rc.gate([path])
    assert report.exit_code == 3
    assert report.recipes[0].checks[-1].code == "runtime.missing"


def test_a_checkpoint_that_is_not_the_one_that_the_recipe_pins_is_refused(tmp_path, repaconv):
    path = recipe(tmp_path)
    path.write_text(f'sha256 = "{"0" * 64}"\n{path.read_text()}')
    report = rc.gate([path])
    assert report.exit_code == 4
    assert report.recipes[0].checks[0].code == "file.sha256"
    code, out, _ = repaconv("gate", path)
    assert code == 4
    assert "input refused (exit code 4): 1 recipe\n" in out
    assert re.search(r"r\.toml: fold: \S*r\.pth has the SHA-256", out)


def test_a_failure_of_one_recipe_is_reported_and_does_not_affect_others(tmp_path, monkeypatch):
    """A verdict without a failed link, an exception that nobody foresaw, and folders that are somebody else's."""
    usual = (Path(rc.__file__).parent / "engines" / "targets" / "x86-64.toml").read_text()
    (tmp_path / "mine.toml").write_text(usual.replace('name = "x86-64"', 'name = "mine"\nforbids = ["dynamic-batch"]'))
    of = {}
    for name, more in (
        ("a/net", "[export]\ntarget = '../mine.toml'\n"),
        ("b/net", ""),
        ("c/users", "out = '../users'\n"),
        ("d/shared", "out = '../b/repaconv-out/net'\n"),
    ):
        of[name] = recipe(tmp_path / Path(name).parent, name=Path(name).stem, seed=len(of), settings={})
        of[name].write_text(f'checkpoint = "{Path(name).name}.pth"\n{more}[set]\nnum_heads = 3\n')
    rc.fold(recipe(tmp_path / "own", seed=9).with_suffix(".pth"), num_heads=3, out="users")
    before = Path("users/fold.json").read_text()

    def unforeseen(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(run, "verify_by", unforeseen)
    report = rc.gate(list(of.values()))
    assert report.exit_code == 1
    a, b, c, d = report.recipes
    assert [check.message for check in a.checks if check.verdict == "failed"] == [
        "mine does not take the graph: a dynamic batch in input"
    ]
    assert (b.checks[-1].verdict, b.checks[-1].message) == ("error", "ZeroDivisionError: it does not say why.")
    assert a.run != b.run
    assert (c.exit_code, c.checks[0].code) == (4, "run.other-checkpoint")
    assert Path("users/fold.json").read_text() == before
    assert (d.exit_code, d.checks[0].code) == (2, "gate.same-run")
    xmlschema.XMLSchema(SCHEMA).validate(gate_report_formats.junit(report))


def test_a_recipe_that_was_corrected_is_not_stopped_by_the_verification_that_failed_before(tmp_path):
    """The fold is up to date, an export is new: the failed verification belongs to this recipe and runs again."""
    text = "batch = 1\nsimplify = false\n[verify]\nrtol = { stored = 1e-12 }\n"
    path = recipe(tmp_path, f'[export]\nprecisions = ["fp16"]\n{text}')

    def failed():
        (done,) = rc.gate([path]).recipes
        return {check.name: check.message for check in done.checks if check.verdict in ("failed", "error")}

    (message,) = failed().values()
    assert "the limit is 1e-12" in message
    path.write_text(path.read_text().replace('["fp16"]', '["fp32", "fp16"]').replace("1e-12", "1e-5"))
    assert failed() == {}


@pytest.mark.parametrize(("method", "arch", "settings"), one_net_a_method(SOUND, later=("pyra", "repconv")))
def test_sound_models_raise_no_alarm(method, arch, settings, tmp_path):
    text = "" if method == "repavit" else "[export]\nbatch = 1\n"  # a free one takes twice as long to trace
    report = rc.gate([recipe(tmp_path, text, method=method, arch=arch, settings=settings)])
    assert report.exit_code == 0, [
        check for each in report.recipes for check in each.checks if check.verdict != "passed"
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason="official checkpoints are absent")
@pytest.mark.slow  # each method's own tests take its official checkpoints as far as a graph
@pytest.mark.parametrize("whole", [False, True], ids=["one a method", "all"])
def test_the_whole_chain_on_official_checkpoints(whole, tmp_path):
    known = {"num_heads": {"pyra": 4, "repavit_plain_idle050": 4, "repavit_plain_idle075": 3}, "pool_size": 7}
    recipes, seen = [], set()
    for weights in sorted(SHARED.glob("*/*.pth")):
        if not weights.with_suffix(".npz").is_file() or weights.stem in ("digits_vit", "dinov2_plain"):
            continue
        if weights.parent in seen and not whole:
            continue
        seen.add(weights.parent)
        heads = known["num_heads"].get(weights.stem) or known["num_heads"].get(weights.parent.name)
        settings = {"num_heads": heads} if heads else {"pool_size": 7} if "poolformer" in weights.stem else {}
        path = tmp_path / f"{weights.stem}.toml"
        lines = [f'checkpoint = "{weights}"', f'out = "{weights.stem}"', "[set]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        lines += [] if whole else ["[export]", "batch = 1"]  # a free one takes three times as long to trace
        lines += ["[verify]", f'inputs = "{weights.with_suffix(".npz")}"', 'require = ["recorded", "onnx"]']
        path.write_text("\n".join(lines))
        recipes.append(path)
    assert len(recipes) >= (12 if whole else 5)
    report = rc.gate(recipes)
    assert report.exit_code == 0, [
        check for each in report.recipes for check in each.checks if check.verdict != "passed"
    ]


# --- formats ------------------------------------------------------------------------------------------


@pytest.fixture
def report():
    checks = [
        Check(stage="fold", name="certificate", verdict="passed", message="fine", line=1),
        Check(stage="verify", name="stored", verdict="failed", message="off by 50%,\nreally", line=7, module="a.b"),
        Check(stage="verify", name="engine", verdict="not verified", message="no GPU <here> & now", line=5),
        Check(stage="bench", name="latency", verdict="inconclusive", message="noisy | loud", line=9, hint="Wait."),
        Check(stage="export", name="fp16", verdict="error", message="gone", line=3, code="x.y", hint="Look."),
    ]
    gated = GatedRecipe(recipe="ci/my,recipe:1.toml", run="out", exit_code=1, checks=tuple(checks))
    return GateReport(exit_code=1, recipes=(gated, gated.model_copy(update={"checks": ()})))


def test_junit_passes_the_schema_and_says_what_happened(report):
    text = gate_report_formats.junit(report)
    schema = xmlschema.XMLSchema(SCHEMA)
    schema.validate(text)
    with pytest.raises(xmlschema.XMLSchemaException):
        schema.validate(
            text.replace('tests="5" failures="1" errors="1"', 'tests="5"', 1).replace("<testcase", "<case", 1)
        )
    suite = schema.to_dict(text)["testsuite"][0]
    assert (suite["@tests"], suite["@failures"], suite["@errors"], suite["@skipped"]) == (5, 1, 1, 2)
    cases = {case["@name"]: case for case in suite["testcase"]}
    assert "The outputs first differ at a.b" in cases["verify: stored"]["failure"][0]["@message"]
    assert "ci/my,recipe:1.toml:7" in cases["verify: stored"]["failure"][0]["$"]
    assert "no GPU <here> & now" in cases["verify: engine"]["skipped"][0]["@message"]


def test_junit_is_xml_whatever_characters_a_message_has(report):
    check = report.recipes[0].checks[0].model_copy(update={"verdict": "failed", "message": "node \x1b[31mx\0\udcff"})
    gated = report.recipes[0].model_copy(update={"checks": (check,)})
    text = gate_report_formats.junit(GateReport(exit_code=1, recipes=(gated,)))
    (found,) = ElementTree.fromstring(text).iter("failure")
    assert found.get("message").startswith("node \\x1b[31mx\\x00\\udcff")


def test_annotations_stand_at_the_recipes_line(report):
    lines = gate_report_formats.github(report).splitlines()
    assert len(lines) == 5
    assert lines[1] == (
        "::error file=ci/my%2Crecipe%3A1.toml,line=7,title=stored%3A failed::off by 50%25,%0Areally. "
        "The outputs first differ at a.b."
    )
    assert [line.split(" ")[0] for line in lines] == ["::notice", "::error", "::warning", "::warning", "::error"]


def test_markdown_is_one_table_a_recipe(report):
    text = gate_report_formats.markdown(report)
    assert text.count("| | check | verdict | result |") == 2
    rows = [line for line in text.splitlines() if line.startswith("| ") and "verdict" not in line]
    assert len(rows) == 5
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    assert "Not verified: engine." in text
    assert "&lt;here>" in text


def test_formats_from_the_command_line(tmp_path, repaconv):
    path = recipe(tmp_path, "\n[verify.rtol]\n# too much\nstored = 1e-30\n")
    line = path.read_text().splitlines().index("stored = 1e-30") + 1
    code, out, _ = repaconv("gate", path, "--format", "github")
    assert code == 1
    assert f"line={line},title=stored%3A failed" in out
    code, out, _ = repaconv("gate", path, "--format", "junit")
    assert code == 1
    xmlschema.XMLSchema(SCHEMA).validate(out)
    assert repaconv("gate", path, "--format", "markdown")[1].startswith("## repaconv gate: failed\n")
    assert (
        repaconv("gate", path, "--report", f"junit:{tmp_path}/g.xml", "--report", f"markdown:{tmp_path}/g.md")[0] == 1
    )
    xmlschema.XMLSchema(SCHEMA).validate(tmp_path / "g.xml")
    assert (tmp_path / "g.md").read_text().startswith("## repaconv gate")
    assert repaconv("gate", path, "--report", "html:x")[0] == 2
    code, out, _ = repaconv("gate", path)
    assert code == 1
    assert "stored" in out


# --- recipes ------------------------------------------------------------------------------------------


def test_a_wrong_recipe_is_reported_with_its_line(tmp_path):
    path = tmp_path / "r.toml"
    for text, message in (
        ("checkpoint = 3\n", r"r\.toml:1:1: checkpoint: input should be a valid string"),
        ("# none\n", r"r\.toml:1:1: checkpoint: field required"),
        ('checkpoint = "c"\n[verify]\n\ncount = 0\n', r"r\.toml:4:1: verify\.count: must be at least 1"),
        ('checkpoint = "c"\n[verify]\ncheckpoints = 1\n', r"r\.toml:3:1: verify\.checkpoints: unknown key"),
        ('checkpoint = "c"\n[bench]\nrounds = 10\nmax_regression = "5%"\n', r"r\.toml:4:1: bench\.max_regression"),
        ('checkpoint = "c\n', r"r\.toml:1:\d+: this is not TOML"),
        (f"a = {'[' * 5000}{']' * 5000}", r"r\.toml:1:1: this is not TOML: arrays or tables are nested too deep"),
        ('checkpoint = "c"\n[verify]\ninputs = "x.npz"\ncount = 4\n', r"r\.toml:4:1: verify\.count would do nothing"),
        ('checkpoint = "c"\n[bench]\nrequire = true\n', r"r\.toml:3:1: bench\.require would do nothing"),
    ):
        path.write_text(text)
        with pytest.raises(UsageProblem, match=message):
            read_recipe(path)
    path.write_text('checkpoint = "c"\n[verify]\ncheckpoints = 1\n')
    with pytest.raises(UsageProblem) as problem:
        read_recipe(path)
    assert "inputs, images" in problem.value.hint


def test_all_errors_of_a_recipe_are_reported_at_once_with_their_lines(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('checkpont = "c"\n[verify]\ncount = 0\nimage = "x"\n[bench]\nround = 9\n')
    checks = rc.gate([path]).recipes[0].checks
    assert [check.line for check in checks] == [1, 1, 3, 4, 6]
    assert [check.hint.split("?")[0] for check in checks if check.hint.startswith("Did")] == [
        "Did you mean checkpoint", "Did you mean images", "Did you mean rounds"
    ]  # fmt: skip
    text = '[verify]\nimages = "gone"\n[export]\ntarget = "orin-nono"\n[bench]\ntarget = "mine.toml"\n'
    path.write_text(f'checkpoint = "c.pth"\narch = "gone.py:build"\n{text}')
    checks = rc.gate([path]).recipes[0].checks
    assert [(check.line, check.code) for check in checks] == [
        (1, "checkpoint.missing"), (2, "recipe.missing"), (4, "recipe.missing"), (6, "target.unknown"),
        (8, "target.unreadable"),
    ]  # fmt: skip
    assert "Did you mean orin-nano?" in checks[3].hint


def test_a_missing_setting_is_reported_in_the_words_of_a_recipe(tmp_path):
    wrong = recipe(tmp_path, settings={"pool_size": 3, "heads": 3})
    (check,) = rc.gate([wrong]).recipes[0].checks
    assert "[set] num_heads" in check.hint
    (check,) = rc.gate([recipe(tmp_path, settings={"num_heads": 3, "act_layer": 3})]).recipes[0].checks
    assert (check.code, check.line) == ("setting.unknown", 5)


def test_lines_of_keys():
    text = "a = 1\n\"b c\" = 2\nd.e = 3\n\n[f]  # table\ng = 4\n[f.h]\n'i' = 5\n[[j]]\nk = 6\n"
    assert key_lines(text) == {
        ("a",): (1, 1, ""), ("b c",): (2, 1, ""), ("d", "e"): (3, 1, ""), ("f",): (5, 2, ""), ("f", "g"): (6, 1, ""),
        ("f", "h"): (7, 2, ""), ("f", "h", "i"): (8, 1, ""), ("j",): (9, 3, ""), ("j", "k"): (10, 1, ""),
    }  # fmt: skip


def test_settings_are_what_the_command_line_would_give():
    given = Recipe.model_validate({"checkpoint": "c", "set": {"a": [16, 0], "b": 3, "c": "x", "d": 1e-6}})
    assert given.settings == {"a": "16,0", "b": "3", "c": "x", "d": "1e-06"}


# --- accuracy -----------------------------------------------------------------------------------------


def digits(folder: Path, text: str, *, ruined: bool = False) -> Path:
    """A recipe of a network that was trained on digits; ruined, its head names other classes."""
    given = torch.load(models.checkpoint("repavit"), weights_only=False)
    if ruined:
        head = (given.get("model") or given)["head.weight"]
        head[:7] = head[:7].roll(1, 0)
    torch.save(given, folder / "d.pth")
    path = folder / "d.toml"
    path.write_text(
        f'checkpoint = "d.pth"\n[export]\nsimplify = false\nbatch = 1\n[verify]\ninputs = "{models.HELD_OUT}"\n{text}'
    )
    return path


def test_a_ruined_model_fails_by_its_accuracy(tmp_path):
    """All links compare it with itself and pass; what fails it is the accuracy that the recipe expects."""
    reference = '[reference]\nsource = "the training"\ntop1 = 99.4\n'
    checks = accuracies(rc.gate([digits(tmp_path, f"min_top1 = 99.0\n{reference}")]), 0)
    assert [check.verdict for check in checks] == ["passed", "passed"]
    assert "top-1 accuracy 99.40% on 500 images, the lowest of 3 versions" in checks[0].message
    ruined = digits(tmp_path, reference, ruined=True)
    line = ruined.read_text().splitlines().index("top1 = 99.4") + 1
    (check,) = accuracies(rc.gate([ruined]), 1)
    assert (check.verdict, check.line) == ("failed", line)
    assert "[reference] top1 = 99.4 less max_drop = 1: 98.40% at least" in check.message
    (check,) = accuracies(rc.gate([digits(tmp_path, "min_top1 = 75.0\n", ruined=True)]), 1)
    assert (check.verdict, check.line) == ("failed", line - 2)


def accuracies(report: GateReport, code: int) -> list[Check]:
    others = [check for check in report.recipes[0].checks if check.name != "accuracy"]
    assert report.exit_code == code
    assert not [check for check in others if check.verdict == "failed"]
    return [check for check in report.recipes[0].checks if check.name == "accuracy"]


def accuracy_checks(links: list[Link], text: str) -> list[tuple[str, str]]:
    """What a recipe makes of a verification of these links."""
    from repaconv.core.toml_positions import parse_toml
    from repaconv.results import VerifyArtefact
    from repaconv.stages.recipe.recipe_file import Recipe

    plain, lines = parse_toml(text, "r.toml", "recipe")
    judge = RecipeChecks(Path("r.toml"), GateOptions())
    judge.lines = lines
    done = VerifyArtefact(
        made_by={}, verdict="passed", policy="", inputs="four random images", input_shape=(4, 1, 8, 8),
        model_sha256="", links=tuple(links), for_scale={},
    )  # fmt: skip
    judge.verify(done, Recipe.model_validate(plain))
    return [(check.verdict, check.message) for check in judge.checks if check.name == "accuracy"]


def right(images: int, of: int, candidate: str = "ONNX", name: str = "onnx") -> Link:
    share = images / of
    counts = Accuracy(
        images=of, reference=1.0, candidate=share, only_reference=of - images, only_candidate=0,
        difference=share - 1, low=share - 1, high=share - 1, p_value=1.0,
    )  # fmt: skip
    return Link(
        name=name, reference="training form", candidate=candidate, tolerance=None, metrics=None, verdict="passed",
        accuracy=counts,
    )  # fmt: skip


def test_accuracy_below_a_limit_fails_unless_too_few_images_show_it():
    head = 'checkpoint = "c"\n[verify]\nimages = "val"\n'
    top1 = '[reference]\nsource = "a paper"\ntop1 = 90.0\n'
    reference = head + top1
    assert accuracy_checks([right(890, 1000)], reference)[0][0] == "passed"  # to the point
    assert accuracy_checks([right(889, 1000)], reference)[0][0] == "inconclusive"  # 8 in 10 luck
    assert accuracy_checks([right(820, 1000)], reference)[0][0] == "failed"
    assert accuracy_checks([right(7, 10)], reference)[0][0] == "inconclusive"
    assert accuracy_checks([right(889, 1000)], f"{head}min_top1 = 89.0\n")[0][0] == "failed"  # the user's own images
    (check,) = accuracy_checks([right(95, 100), right(30, 100, "int8")], reference)  # the lowest of all counts
    assert check[0] == "failed"
    assert check[1].startswith("int8: top-1 accuracy 30.00% on 100 images, the lowest of 2 versions")
    recorded = right(0, 100, "official output", "recorded")
    assert accuracy_checks([right(95, 100), recorded], reference)[0][0] == "passed"  # that is not a version of ours


def test_a_limit_without_labels_is_not_passed():
    head = 'checkpoint = "c"\n[verify]\nimages = "val"\n'
    top1 = '[reference]\nsource = "a paper"\ntop1 = 90.0\n'
    unlabelled = [right(1, 1).model_copy(update={"accuracy": None})]
    assert [verdict for verdict, _ in accuracy_checks(unlabelled, head + top1)] == ["not verified"]
    assert [verdict for verdict, _ in accuracy_checks(unlabelled, f"{head}max_drop = 2.0\n{top1}")] == ["failed"]
    ((verdict, message),) = accuracy_checks(unlabelled, f"{head}min_top1 = 75.0\n")
    assert verdict == "failed"
    assert "no accuracy was measured on four random images" in message
    convert = f"{head}{top1}[convert]\ninputs = 'x.npz'\n"
    assert accuracy_checks([right(10, 100)], convert)[0][0] == "not verified"  # a conversion has its own budget
    assert (
        accuracy_checks([right(10, 100)], convert.replace("[reference]", "max_drop = 3.0\n[reference]"))[0][0]
        == "failed"
    )


# --- baselines ----------------------------------------------------------------------------------------


def test_a_regression_is_called_only_when_the_interval_lies_beyond():
    random = np.random.default_rng(0)

    def samples(factor, noise, rounds=60):
        weather = 1 + random.random(rounds)  # a slow machine slows the yardstick, too
        subject = factor * weather * (1 + noise * random.standard_normal(rounds))
        return Timed(subject, 2 * weather * (1 + noise * random.standard_normal(rounds)))

    calm = samples(1.0, 0.005)
    assert regression(samples(1.2, 0.005), calm, 0.05).verdict == "failed"
    assert regression(samples(1.0, 0.005), calm, 0.05).verdict == "passed"
    assert regression(samples(0.5, 0.005), calm, 0.05).verdict == "passed"
    found = regression(samples(1.06, 0.2), calm, 0.05)
    assert found.verdict == "inconclusive"
    assert found.low <= 1.05 < found.high


def test_the_gate_takes_benchs_verdict_and_baselines_by_machine(tmp_path, repaconv):
    """Ten rounds are too few to be believed on any machine."""
    text = "[export]\nsimplify = false\nbatch = 1\n[bench]\nrounds = 10\n"
    path = recipe(tmp_path, text)
    report = rc.gate([path])
    assert report.exit_code == 5
    agreement, latency = report.recipes[0].checks[-2:]
    assert (agreement.name, agreement.verdict, latency.verdict) == ("agreement", "passed", "inconclusive")
    with pytest.raises(UsageProblem, match="no recipe names a file of baselines"):
        rc.gate([path], update_baseline=True)

    path = recipe(tmp_path, text + "baseline = 'b.json'\nrequire = true\nmax_regression = 1.0\n")
    report = rc.gate([path])
    assert report.exit_code == 1
    assert "no file" in report.recipes[0].checks[-1].message
    assert report.recipes[0].checks[-1].line == path.read_text().splitlines().index("baseline = 'b.json'") + 1
    assert repaconv("gate", path, "--update-baseline")[0] == 5
    assert not (tmp_path / "b.json").exists()
    assert repaconv("gate", path, "--update-baseline", "--accept-inconclusive")[0] == 0
    written = json.loads((tmp_path / "b.json").read_text())
    ((machine, entries),) = written["machines"].items()
    (entry,) = entries.values()
    entry["subject_ms"] = [
        value / 1000 for value in entry["subject_ms"]
    ]  # as if it had been that fast: no noise explains it
    (tmp_path / "b.json").write_text(json.dumps(written))
    code, out, _ = repaconv("gate", path, "--format", "json")
    assert code == 1
    check = json.loads(out)["data"]["recipes"][0]["checks"][-1]
    assert check["verdict"] == "failed"
    assert "2.000 is allowed" in check["message"]
    other = {"machines": {"another board": entries}, "schema_version": 2}
    (tmp_path / "b.json").write_text(json.dumps(other))
    check = rc.gate([path]).recipes[0].checks[-1]
    assert check.verdict == "inconclusive"  # another machine's figures fail nothing
    assert "another machine (another board)" in check.message
    rc.gate([path], update_baseline=True, accept_inconclusive=True)
    assert set(json.loads((tmp_path / "b.json").read_text())["machines"]) == {"another board", machine}


def test_a_training_form_that_computes_something_else_fails_the_gate(tmp_path, monkeypatch):
    from repaconv.stages.bench import benchmark_subjects

    right = benchmark_subjects.training_onnx

    def wrong(*given):
        made = right(*given)
        onnx.save(wrong_initializer("head", onnx.load(made)), planted := tmp_path / "wrong.onnx")
        return planted

    monkeypatch.setattr(benchmark_subjects, "training_onnx", wrong)
    report = rc.gate([recipe(tmp_path, "[export]\nsimplify = false\nbatch = 1\n[bench]\nrounds = 10\n")])
    assert report.exit_code == 1
    assert [check.name for check in report.recipes[0].checks if check.verdict == "failed"] == ["agreement"]


def test_a_lossy_link_says_what_its_pass_means_at_its_line(tmp_path):
    path = recipe(tmp_path, "[export]\ntarget = 'rtx-40'\nprecisions = ['fp32', 'bf16']\nsimplify = false\n")
    checks = [check for check in rc.gate([path]).recipes[0].checks if check.name == "bf16"]
    assert [check.stage for check in checks] == ["export", "verify"]
    line = path.read_text().splitlines().index("[export]") + 1
    assert [check.verdict for check in checks] == ["not verified"] * 2  # as neither was given images
    assert all("only random images" in check.message for check in checks)
    for check in checks:
        assert check.line == line
        assert check.message.count("with a lead above 5%") == 1  # each figure once
        assert "accuracy was not measured" in check.message


ACTION = HERE.parent / ".github" / "actions" / "gate" / "action.yml"


def act(folder: Path, **inputs: str) -> tuple[int, dict[str, str], str, list[str]]:
    """The action's steps as its platform runs them, by a runner of our own: no platform is here.

    Returns:
        The exit code of the step that failed, or 0; what the steps gave out; the summary; what of others was not run.
    """
    action = yaml.safe_load(ACTION.read_text())
    given = {name: each.get("default", "") for name, each in action["inputs"].items()} | inputs
    outputs, summary, others, code = folder / "outputs", folder / "summary", [], 0
    places = {"GITHUB_OUTPUT": outputs, "GITHUB_STEP_SUMMARY": summary, "GITHUB_ACTION_PATH": ACTION.parent}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for step in action["runs"]["steps"]:
        condition = step.get("if", "")
        if wanted := re.fullmatch(r"inputs\.(\w+) != '(\w*)'", condition):
            condition = "" if given[wanted[1]] != wanted[2] else "never"
        if condition not in ("", "always()") or (code and condition != "always()"):
            continue
        if "uses" in step:
            others.append(step["uses"])
            continue
        result = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
            for name, text in step.get("env", {}).items()
        }
        environment = {**os.environ, **{name: str(place) for name, place in places.items()}, **result, "PATH": path}
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        code = subprocess.run(shell, cwd=folder, env=environment, check=False).returncode or code
    given_out = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    return code, given_out, summary.read_text(), others


def test_the_steps_of_the_action_run_and_leave_what_they_say(tmp_path, capfd):
    recipe(tmp_path / "recipes", "[verify]\nimage = 'x'\n", name="wrong")
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" > installed\n')
    (tmp_path / "python").chmod(0o755)
    code, given_out, summary, others = act(tmp_path, recipes="recipes/*.toml")
    assert (code, given_out) == (2, {"exit-code": "2"})
    assert "::error file=recipes/wrong.toml,line=" in capfd.readouterr().out
    assert "wrong.toml" in summary
    assert (tmp_path / "repaconv-gate.xml").is_file()
    assert (tmp_path / "installed").read_text() == f"-m pip install {ACTION.parent}/../../..\n"
    assert [name.partition("@")[0] for name in others] == ["actions/setup-python", "actions/upload-artifact"]


@pytest.mark.slow
def test_the_steps_of_the_action_pass_what_is_sound(tmp_path):
    recipe(tmp_path / "recipes", "[export]\nsimplify = false\n", name="sound")
    code, given_out, summary, _ = act(tmp_path, recipes="recipes/*.toml", install="none", python="")
    assert (code, given_out, "sound.toml" in summary) == (0, {"exit-code": "0"}, True)


def test_a_job_of_gitlab_keeps_what_its_gate_writes(repaconv):
    """The command of each page's job on a recipe in recipes/, and the paths of its artifacts and its cache."""
    sound = recipe(Path("recipes"), "[export]\nsimplify = false\nbatch = 1\n", name="sound")
    sound.write_text(sound.read_text().replace('out = "sound-run"\n', ""))
    for page in ("docs/how-to/ci.md", "docs/tutorials/ci-gate.md"):
        (text,) = re.findall(r"```yaml\n(gate:\n.*?)```", (HERE.parent / page).read_text(), re.S)
        job = yaml.safe_load(text)["gate"]
        _, gate = job["script"]
        program, *words = gate.replace("recipes/*.toml", str(sound)).split()
        assert program == "repaconv"
        code, out, _ = repaconv(*words)
        assert code == 0, out
        artifacts = job["artifacts"]
        kept = [
            *artifacts.get("reports", {}).values(),
            *artifacts.get("paths", ()),
            *job.get("cache", {}).get("paths", ()),
        ]
        assert kept
        assert all((at := Path(place)).is_file() or (at / "sound" / "fold.json").is_file() for place in kept), kept


def test_the_hook_gates_the_recipes_that_a_commit_changes(tmp_path, monkeypatch):
    """What pre-commit does with it: the entry, split as a shell would, and the files that the pattern finds."""
    (hook,) = yaml.safe_load((HERE.parent / ".pre-commit-hooks.yaml").read_text())
    wrong = recipe(tmp_path / "recipes", "[verify]\nimage = 'x'\n", name="wrong")
    staged = ["recipes/wrong.toml", "recipes/wrong.pth", "pyproject.toml"]
    files = [name for name in staged if re.search(hook["files"], name)]
    assert files == ["recipes/wrong.toml"]
    program, *words = hook["entry"].split()
    assert (program, hook["language"]) == ("repaconv", "system")
    monkeypatch.chdir(tmp_path)
    done = shell(*words, *files)
    assert done.returncode == 2
    assert wrong.name in done.stdout


def test_the_action_calls_the_gate_with_options_that_it_has(repaconv):
    action = ACTION.read_text()
    assert "repaconv gate" in action
    options = set(re.findall(r"(--[a-z][a-z-]+)", action)) - {"--upgrade"}
    completed = repaconv("gate", "--help")[1]
    assert options
    assert all(option in completed for option in options), options


def test_a_path_in_a_sentence_keeps_its_way_up():
    check = Check(stage="fold", name="file", verdict="error", message="there is no file ../../weights/x.pth.", line=1)
    assert gate_report_formats.sentence(check) == "there is no file ../../weights/x.pth."

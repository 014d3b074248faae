"""The plan of a recipe: a step runs only if it must, and an output that is up to date equals that of a fresh run."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch
from conftest import save_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from test_score_and_convert_commands import images, plain_weights

from repaconv.core.files import canonical_json, sha256_of_bytes
from repaconv.results import RecipeRun
from repaconv.stages.recipe import plan
from repaconv.stages.recipe import plan as walking
from repaconv.stages.recipe import run as running
from repaconv.stages.recipe.gate import gate
from repaconv.stages.recipe.plan import GONE, Digests, Journal, RecipeStep, StepOutputs, execute_steps, preview
from repaconv.stages.recipe.recipe_file import Recipe
from repaconv.stages.recipe.run import run

# a -> b, c -> d, and e beside them; each reads a file of its own
AFTER = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ()}
VALUES = st.integers(0, 2)
EDITS = st.one_of(
    st.tuples(st.just("asked"), st.sampled_from("abcde"), VALUES),
    st.tuples(st.just("file"), st.sampled_from("abcde"), VALUES),
    st.tuples(st.just("version"), st.sampled_from(["torch", "onnx"]), VALUES),
    st.tuples(st.just("touch the result"), st.sampled_from("abcde"), VALUES),
    st.tuples(st.just("lose the result"), st.sampled_from("abcde"), VALUES),
    st.tuples(st.just("drop"), st.sampled_from("de"), VALUES),
    st.tuples(st.just("take again"), st.sampled_from("de"), VALUES),
    st.tuples(st.just("break off"), st.sampled_from("abcde"), VALUES),
    st.tuples(st.just("fail"), st.sampled_from("abcde"), VALUES),
)
USES = {"a": ("torch",), "b": ("torch",), "c": ("onnx",), "d": (), "e": ("onnx",)}


class World:
    """Steps of which each writes what it was made of, rounded: so some edits change nothing further down."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.asked, self.versions = dict.fromkeys("abcde", 0), {"torch": 0, "onnx": 0}
        self.dropped: set[str] = set()
        for name in "abcde":
            (folder / name).write_text("0")

    def steps(self) -> list[RecipeStep]:
        names = [name for name in AFTER if name not in self.dropped]
        return [
            RecipeStep(
                name,
                {"n": self.asked[name]},
                lambda name=name: {f"{name}'s file": self.folder / name},
                {package: str(self.versions[package]) for package in USES[name]},
                after=AFTER[name],
                needs=AFTER[name],
            )
            for name in names
        ]

    def true(self, name: str) -> str:
        """What a step leaves, from scratch. The last of its own numbers counts by half."""
        own = [self.asked[name], int((self.folder / name).read_text()) // 2]
        own += [self.versions[package] for package in USES[name]]
        return sha256_of_bytes(canonical_json({"own": own, "of": [self.true(n) for n in AFTER[name]]}).encode())

    def ingredients(self, name: str) -> tuple:
        own = [self.asked[name], (self.folder / name).read_text(), *(self.versions[p] for p in USES[name])]
        return (*own, *(self.true(n) for n in AFTER[name]))

    def walk(self, stop: str = "", fail: str = "") -> list[str]:
        """The steps that ran."""
        ran: list[str] = []

        def do(turn) -> StepOutputs:
            name = turn.step.name
            if not turn.why:
                return StepOutputs([], True)
            if name == stop:
                raise KeyboardInterrupt
            ran.append(name)
            if name == fail:
                return None
            left = [(self.out / n).read_text() for n in AFTER[name]]
            own = [self.asked[name], int((self.folder / name).read_text()) // 2]
            own += [self.versions[package] for package in USES[name]]
            text = sha256_of_bytes(canonical_json({"own": own, "of": left}).encode())
            self.out.mkdir(exist_ok=True)
            (self.out / name).write_text(text)
            return StepOutputs([self.out / name], True)

        steps, journal = self.steps(), Journal(self.out, "r.toml")
        would = {each.name for each in preview(steps, journal) if each.did == "would run"}
        with contextlib.suppress(KeyboardInterrupt):
            execute_steps(steps, journal, do)
        assert set(ran) <= would  # what is foretold may turn out to stand, what is not foretold never runs
        return ran


@settings(max_examples=30)
@given(st.lists(EDITS, min_size=1, max_size=8))
def test_nothing_runs_without_need_and_everything_with_need(edits):
    # a power cut is not what this is about
    with tempfile.TemporaryDirectory() as name, patch("os.fsync", lambda _: None):
        world = World(Path(name))
        made: dict[str, tuple] = {}
        for kind, at, value in [("", "", 0), *edits]:
            stop = fail = ""
            if kind == "asked":
                world.asked[at] = value
            elif kind == "file":
                (world.folder / at).write_text(str(value))
            elif kind == "version":
                world.versions[at] = value
            elif kind == "touch the result" and (world.out / at).exists():
                (world.out / at).write_text("touched")
            elif kind == "lose the result":
                (world.out / at).unlink(missing_ok=True)
            elif kind == "drop":
                world.dropped |= {at}
            elif kind == "take again":
                world.dropped -= {at}
            elif kind in ("break off", "fail"):
                world.asked[at] = value
                stop, fail = (at, "") if kind == "break off" else ("", at)
            planned = [n for n in AFTER if n not in world.dropped]
            there = {n: (world.out / n).read_text() if (world.out / n).exists() else "" for n in planned}
            need = {n for n in planned if made.get(n) != world.ingredients(n) or there[n] != world.true(n)}
            ran = world.walk(stop, fail)
            assert set(ran) <= need
            for n in world.dropped:  # and what is asked for no longer is gone
                assert not (world.out / n).exists() or (world.out / n).read_text() == "touched"
                made.pop(n, None)
            if not stop and not fail:
                assert set(ran) == need
                assert {n: (world.out / n).read_text() for n in planned} == {n: world.true(n) for n in planned}
            made |= {n: world.ingredients(n) for n in ran if n != fail}


def test_the_preview_follows_only_from_what_steps_took_before(tmp_path, monkeypatch):
    """A step that never ran here may take any time; how fast the machine is now counts, too."""
    clock, message = [0.0], {}
    monkeypatch.setattr(walking.time, "monotonic", lambda: clock[0])

    def left(names: str, seconds: float) -> list[float | None]:
        def do(turn) -> StepOutputs:
            clock[0] += seconds
            message[turn.step.name] = turn.left_s, running._headline(turn)
            (tmp_path / turn.step.name).write_text(turn.step.name)
            return StepOutputs([tmp_path / turn.step.name], True)

        message.clear()
        execute_steps([RecipeStep(name) for name in names], Journal(tmp_path, "r.toml"), do, again=True, others="abc")
        return [each[0] for each in message.values()]

    assert left("ab", 10) == [None, None]
    assert message["a"][1] == "1 of 2: a runs (it has not run yet)"
    assert left("ab", 30) == [20, 30]  # the first took three times as long as before
    assert message["b"][1] == "2 of 2: b runs (rerun requested); about 30 s left, going by the last run"
    assert left("abc", 30) == [None, None, None]
    assert left("abc", 30) == [90, 60, 30]


def test_digests_are_of_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "TIME_STEP_NS", -(10**18))  # as if all had been written long ago
    folder = tmp_path / "f"
    (folder / "inside" / "__pycache__").mkdir(parents=True)
    (folder / "inside" / "a").write_text("1")
    known = Digests({})
    first = known.of(folder)
    (folder / "inside" / "__pycache__" / "x.pyc").write_text("compiled")
    assert Digests(dict(known.seen)).of(folder) == first
    for change in (
        lambda: (folder / "inside" / "a").write_text("2"),
        lambda: (folder / "inside" / "a").rename(folder / "inside" / "b"),
        lambda: (folder / "inside").rename(folder / "inner"),
        lambda: (folder / "c").write_text(""),
    ):
        change()
        now = Digests(dict(known.seen)).of(folder)
        assert now not in (first, GONE)
        first, known = now, Digests(dict(known.seen))
    assert Digests({}).of(tmp_path / "none") == GONE


def test_what_was_just_written_is_read_again(tmp_path):
    """Two writings within a tick of the clock leave the same stamp."""
    path = tmp_path / "a"
    path.write_text("1")
    known = Digests({})
    known.of(path)
    assert known.seen == {}


def test_a_step_reads_files_next_to_the_named_ones(tmp_path):
    """Weights of a graph, an adapter's configuration, the code that a network's own file may import."""
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [256], np.zeros(256, np.float32).tobytes(), raw=True)
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [256])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [value], [tensor])
    onnx.save(helper.make_model(graph), "g.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    for name in ("adapter_config.json", "net.py", "other.py"):
        Path(name).write_text("")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")

    def read(text: str) -> set[str]:
        Path("r.toml").write_text(text)
        return {path.name for path in running.read_placed(Path("r.toml")).sources().values()}

    assert read('checkpoint = "g.onnx"') == {"g.onnx", "w.bin", "adapter_config.json"}
    assert read('checkpoint = "c.pth"\narch = "net.py:build"') == {"c.pth", "net.py", "other.py", "package"}


@pytest.fixture
def recipe(tmp_path) -> Path:
    save_tiny(tmp_path)
    path = tmp_path / "r.toml"
    path.write_text(
        'checkpoint = "tiny.pth"\n[export]\nbatch = 1\nsimplify = false\n[report]\npaper = false\n[verify]\ncount = 2\n'
    )
    return path


def did(done: RecipeRun) -> dict[str, str]:
    assert done.exit_code == 0, done.checks
    return {each.name: each.did for each in done.steps}


def test_a_recipe_is_up_to_date_until_something_of_it_changes(recipe, monkeypatch):
    ran = dict.fromkeys(("fold", "export fp32", "verify", "report"), "ran")
    current = dict.fromkeys(ran, "up to date")
    assert set(did(run(recipe, dry_run=True)).values()) == {"would run"}
    assert not Path("repaconv-out").exists()
    assert did(run(recipe)) == ran
    page = Path(run(recipe).page)
    assert page.is_file()
    assert did(run(recipe)) == current
    assert gate([recipe]).exit_code == 0
    assert did(run(recipe)) == current  # the gate is the same walk
    text = recipe.read_text()
    recipe.write_text(f"# a word\n\n{text}")
    assert did(run(recipe)) == current
    recipe.write_text(text.replace("count = 2", "count = 3"))
    assert did(run(recipe, dry_run=True)) == current | {"verify": "would run", "report": "would run"}
    assert did(run(recipe)) == current | {"verify": "ran", "report": "ran"}
    page.unlink()
    assert did(run(recipe)) == current | {"report": "ran"}
    # another version of what only export uses; the same graph comes of it, and so verify is up to date
    right = running.LocatedRecipe.versions
    monkeypatch.setattr(
        running.LocatedRecipe, "versions", lambda *a: right(*a) | ({"onnxscript": "9"} if a[1] == "export" else {})
    )
    assert did(run(recipe)) == current | {"export fp32": "ran"}
    journal = json.loads(Path(recipe.parent, "repaconv-out/r/plan.json").read_text())
    assert journal["owner"] == "../../r.toml"
    assert journal["steps"]["export fp32"]["inputs"]["onnxscript's version"] == "9"


@pytest.mark.slow
def test_what_a_recipe_no_longer_asks_for_goes_and_another_checkpoint_takes_its_place(recipe):
    folder = recipe.parent / "repaconv-out" / "r"
    text = recipe.read_text()
    recipe.write_text(text.replace("[export]", '[export]\nprecisions = ["fp32", "bf16"]\ntarget = "rtx-40"'))
    assert did(run(recipe))["export bf16"] == "ran"
    assert (folder / "model.rtx-40.bf16.b1.onnx").is_file()
    recipe.write_text(text.replace("[export]", '[export]\ntarget = "rtx-40"'))
    found = did(run(recipe))
    assert (found["export bf16"], found["export fp32"], found["verify"]) == ("removed", "up to date", "ran")
    assert not list(folder.glob("*bf16*"))
    shutil.copy("tiny.pth", "other.pth")
    recipe.write_text(recipe.read_text().replace("tiny.pth", "other.pth"))
    assert did(run(recipe))["fold"] == "ran"


def test_what_is_interrupted_resumes_where_it_was(recipe, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(running, "verify_by", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    found = did(run(recipe))
    assert (found["fold"], found["export fp32"], found["verify"]) == ("up to date", "up to date", "ran")


def test_what_failed_runs_again_and_what_needs_what_was_stopped_is_skipped(recipe):
    text = recipe.read_text()
    recipe.write_text(f"{text}rtol = {{ stored = 1e-30 }}\n")
    assert run(recipe).exit_code == 1
    done = run(recipe)
    assert [(each.did, each.why) for each in done.steps if each.name == "verify"] == [
        ("ran", "it did not pass last time")
    ]
    recipe.write_text(
        f"{text}[bench]\nrounds = 10\n".replace("[export]", '[export]\ntarget = "orin-nano"\nprecisions = ["tf32"]')
    )
    assert run(recipe).exit_code == 2
    recipe.write_text(text.replace('"tiny.pth"', '"none.pth"'))
    done = run(recipe)
    assert done.exit_code == 4
    assert [each.did for each in done.steps] == ["stopped", *["skipped"] * 3]


def test_a_second_run_imports_no_torch(recipe):
    run(recipe)
    code = (
        "import sys; from repaconv.cli.main import main\n"
        f"try: main(['run', {str(recipe)!r}])\n"
        "except SystemExit as left: code = left.code\n"
        "print(code, sorted({'torch', 'onnx', 'onnxruntime', 'onnx_ir', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "4 of 4: report is up to date" in done.stderr


def test_the_command_says_what_it_does_and_why(recipe, repaconv):
    code, out, _ = repaconv("run", recipe, "--dry-run")
    assert code == 0
    assert "it has not run yet" in out
    recipe.write_text("checkpoint = 3\n")
    code, out, _ = repaconv("run", recipe, "--format", "json")
    found = json.loads(out)
    assert (code, found["data"]["checks"][0]["line"]) == (2, 1)


@pytest.mark.slow  # converting takes seconds
def test_a_conversion_is_a_step_like_others(tmp_path):
    torch.save(plain_weights(tokens=False), tmp_path / "vit.pth")
    np.savez(tmp_path / "calibration.npz", input=images())
    path = tmp_path / "r.toml"
    path.write_text(
        'checkpoint = "vit.pth"\n[set]\nnum_heads = 3\n[convert]\ninputs = "calibration.npz"\nblocks = "1"\n'
        "[verify]\ncount = 2\n[export]\nbatch = 1\nsimplify = false\n"
    )
    done = run(path)
    assert done.exit_code == 0, done.checks
    assert [each.name for each in done.steps] == ["convert", "export fp32", "verify", "report"]
    assert {each.did for each in done.steps} == {"ran"}
    assert {each.did for each in run(path).steps} == {"up to date"}
    np.savez(tmp_path / "calibration.npz", input=images() * 0.5)
    assert run(path, dry_run=True).steps[0].why == "changed: calibration.npz"
    assert run(path).steps[0].did == "ran"
    path.write_text('checkpoint = "vit.pth"\nmethod = "dwconv"\n[convert]\ninputs = "calibration.npz"\n')
    assert [check.code for check in run(path).checks] == ["recipe.idle"]


def test_the_machine_of_a_measurement_is_that_of_its_own_target(tmp_path, monkeypatch):
    monkeypatch.setattr(walking, "_machine", lambda target: target)
    result = {"checkpoint": "c.pth", "export": {"target": "x86-64"}, "build": {}, "bench": {"target": "gpu.toml"}}
    placed = walking.LocatedRecipe(Recipe.model_validate(result), tmp_path / "recipe.toml", {})
    steps = {each.stage: each.step.versions for each in walking.planned(placed, Journal(tmp_path, "recipe"))}
    assert (steps["build"]["machine"], steps["bench"]["machine"]) == ("x86-64", str(tmp_path / "gpu.toml"))
    assert "machine" not in steps["export"]

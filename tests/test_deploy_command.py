"""`repaconv deploy`: everything that a target needs in one folder, made by the steps of `run`."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

import repaconv as rc
from repaconv.cli.text_and_json_output import print_result
from repaconv.core.errors import UsageProblem
from repaconv.results import Check, RecipeRun
from repaconv.stages.recipe.recipe_file import RecipeProblem


def did(done) -> dict[str, str]:
    return {each.name: each.did for each in done.steps}


def test_what_there_is_to_do_follows_from_the_target(tiny):
    for target, precision, steps in (
        ("x86-64", "int8", ["fold", "export fp32", "export int8", "verify", "build", "bench", "report"]),
        ("orin-nano", "fp32", ["fold", "export fp32", "verify", "bundle", "report"]),
        ("cpu-torch", "fp32", ["fold", "export fp32", "verify", "bench", "report"]),
    ):
        done = rc.deploy(tiny, target=target, precision=precision, dry_run=True)
        assert did(done) == dict.fromkeys(steps, "would run")
    assert not Path("repaconv-out").exists()


@pytest.mark.slow  # a graph of its own is traced
def test_a_target_that_is_not_here_gets_a_bundle(tiny, repaconv, capfd):
    done = rc.deploy(tiny, target="orin-nano", precision="fp16", count=2)
    assert done.exit_code == 0, done.checks
    assert did(done) == dict.fromkeys(("fold", "export fp32", "export fp16", "verify", "bundle", "report"), "ran")
    folder = Path("repaconv-out/tiny.orin-nano")
    assert (folder / "build" / "orin-nano.fp16.tar.gz").is_file()
    assert Path(done.page).parent == folder
    assert done.checks[-1].verdict == "not verified"
    assert "is not this machine" in done.checks[-1].message
    assert set(did(rc.deploy(tiny, target="orin-nano", precision="fp16", count=2)).values()) == {"up to date"}
    code, out, _ = repaconv("deploy", tiny, "--target", "orin-nano", "--precision", "fp16", "--count", 3, "--dry-run")
    assert code == 0
    assert "changed: bundle.count" in out
    print_result(done)
    message = " ".join(capfd.readouterr().out.split())
    assert "repaconv-out/tiny.orin-nano/build/orin-nano.fp16.tar.gz: 2 images" in message
    with tarfile.open(folder / "build" / "orin-nano.fp16.tar.gz") as bundle:
        (folder_name,) = {name.partition("/")[0] for name in bundle.getnames()}
    assert f"on the board: tar xzf orin-nano.fp16.tar.gz && python3 {folder_name}/run.py; then here:" in message


@pytest.mark.slow  # the same with an engine, which is built and measured
def test_a_target_that_is_here_gets_an_engine_and_a_latency(tiny):
    done = rc.deploy(tiny, target="x86-64", precision="int8", rounds=10)
    assert done.exit_code in (0, 5), done.checks  # ten rounds are too few to be believed
    assert list(did(done)) == ["fold", "export fp32", "export int8", "verify", "build", "bench", "report"]
    assert list(Path("repaconv-out/tiny.x86-64/build").glob("*int8*"))


@pytest.mark.slow  # all steps run
def test_a_checkpoint_whose_name_is_not_utf_8_is_deployed_to_a_folder_in_utf_8(tiny):
    given = tiny.rename(os.fsdecode(b"a\xff.pth"))
    done = rc.deploy(given, target="cpu-torch", rounds=10, count=2)
    assert did(done)["fold"] == "ran"
    assert Path(done.page).parent == Path("repaconv-out", r"a\xff.cpu-torch")


def test_what_cannot_be_deployed_is_refused_before_any_work(tiny):
    with pytest.raises(UsageProblem, match="deploy does not support 'int8'"):
        rc.deploy(tiny, target="jetson-nano", precision="int8")
    with pytest.raises(RecipeProblem, match=r"there is no none\.npz"):
        rc.deploy(tiny, target="x86-64", inputs="none.npz")
    with pytest.raises(UsageProblem, match="unknown target"):
        rc.deploy(tiny, target="toaster")
    assert not Path("repaconv-out").exists()


def test_what_did_not_pass_is_named_with_why(capfd):
    def check(name, verdict, message="."):
        return Check(stage="bench", name=name, verdict=verdict, message=message, line=1)

    checks = (check("agreement", "passed"), check("latency", "not verified", "orin-nano is not this machine"))
    done = RecipeRun(recipe="r", run="", exit_code=0, checks=checks)
    print_result(done)
    out = " ".join(capfd.readouterr().out.split())
    assert "1 of 2 checks passed; bench: latency not verified (orin-nano is not this machine)" in out
    print_result(done.model_copy(update={"checks": (*checks, check("stored", "failed")), "exit_code": 1}))
    assert "1 of 3 checks passed; " in (out := " ".join(capfd.readouterr().out.split()))
    assert "; bench: stored failed" in out

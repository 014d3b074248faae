"""`repaconv fetch`: a file that was fetched once is then used by its address, offline, as long as its hashes match."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import fsspec
import pytest

import repaconv as rc
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.stages.fetch import stage
from repaconv.stages.shared.fetched_files import address_of, local_path, local_weights


def test_what_is_an_address():
    assert address_of("hf://owner/name@main") == "hf://owner/name@main"
    assert address_of(Path("hf://owner/name@main")) == "hf://owner/name@main"  # a Path loses a slash
    assert address_of("file:///a/b.pth") == address_of(Path("file:///a/b.pth")) == "file:///a/b.pth"
    for path in ("ckpt.pth", "a/b:c.pth", "C:/a.pth", "./hf://x", ""):
        assert address_of(path) is None


def test_nothing_is_brought_unless_it_is_asked_for(repaconv, tiny):
    address = f"file://{tiny.resolve()}"
    for command in ("fold", "inspect", "convert", "deploy", "new-recipe"):
        code, out, err = repaconv(command, address)
        assert (code, out) == (3, ""), err
        assert f"repaconv fetch {address}" in " ".join(err.split())
    code, out, err = repaconv("fetch", address)
    assert code == 0
    assert f"next repaconv fold {address}" in " ".join(err.split())
    original, moved = rc.inspect(tiny).origin, tiny.rename("gone.pth")
    assert repaconv("fold", address)[0] == 0
    folded = json.loads(Path("repaconv-out/tiny/fold.json").read_text())
    assert folded["origin"]["sha256"] == original.sha256
    assert rc.verify().verdict == "passed"
    assert rc.inspect(address).origin.sha256 == original.sha256
    assert repaconv("fetch", address)[0] == 3  # it is no longer there, and what was fetched still is
    assert repaconv("inspect", address)[0] == 0
    assert repaconv("new-recipe", address, "-o", "there/tiny.toml")[0] == 0
    Path("tiny.toml").write_text('extends = "there/tiny.toml"\n')
    assert f'checkpoint = "{address}"' in Path("there/tiny.toml").read_text()
    for typed in (("run", "tiny.toml", "--dry-run"), ("deploy", address, "--dry-run")):
        code, out, err = repaconv(*typed)
        assert (code, "would run" in out) == (0, True), err
    local_path(address).write_bytes(moved.read_bytes() + b"x")
    with pytest.raises(Refused, match="was changed after it was fetched"):
        rc.fold(address)


def test_what_is_fetched_again_takes_the_place_of_what_was_and_of_nothing_else(tiny):
    memory = fsspec.filesystem("memory")
    memory.pipe({"/there/model.safetensors": b"one", "/there/config.json": b"{}", "/there/modeling.py": b"import os"})
    first = rc.fetch("memory://there")
    assert [Path(each.path).name for each in first.files] == ["config.json", "model.safetensors"]  # and no code
    assert local_weights("memory://there").read_bytes() == b"one"
    assert local_path("memory://there").is_dir()
    memory.rm("/there/config.json")
    memory.pipe("/there/model.safetensors", b"two")
    again = rc.fetch("memory://there")
    assert [path.name for path in local_path("memory://there").iterdir()] == ["model.safetensors"]
    assert again.files[0].sha256 != first.files[0].sha256
    local_weights("memory://there").write_bytes(b"mine")
    with pytest.raises(UsageProblem, match="is not an unchanged output of this run"):
        rc.fetch("memory://there")
    memory.rm("/there", recursive=True)
    with pytest.raises(EnvironmentProblem, match="cannot be downloaded"):
        rc.fetch("memory://there")


def test_an_address_without_weights_and_an_unknown_scheme(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    with pytest.raises(Refused, match="contains neither"):
        rc.fetch(f"file://{tmp_path}/folder")
    with pytest.raises(EnvironmentProblem, match="cannot be downloaded"):
        rc.fetch("nobody://knows/it")
    assert not list(Path("repaconv-out/fetched").glob("**/*.json"))


def test_a_branch_becomes_the_commit_to_which_it_points(monkeypatch, tiny):
    """Of the hub itself only what it answers is here: a branch's commit, and the files of that commit."""
    commit, asked = "0123abc" * 5, []

    class Hub:
        class HfApi:
            def model_info(self, name, revision):
                asked.append((name, revision))
                return type("Info", (), {"sha": commit})

    right = stage.require_module
    modules = {"huggingface_hub": Hub}
    monkeypatch.setattr(stage, "require_module", lambda name, *rest: modules.get(name) or right(name, *rest))
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/owner/name@{commit}/model.safetensors", b"weights")
    to = fsspec.core.url_to_fs
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda address: to(address.replace("hf://", "memory://")))
    fetched = rc.fetch("hf://owner/name@main")
    assert asked == [("owner/name", "main")]
    assert fetched.revision == commit
    assert local_path("hf://owner/name@main").name == f"name@{commit}"


def test_a_protocol_that_wants_a_package_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in [name for name in sys.modules if name.startswith("fsspec.implementations.http")]:
        monkeypatch.delitem(sys.modules, name)
    registry = importlib.import_module("fsspec.registry")._registry
    for protocol in {"http", "https"} & registry.keys():
        monkeypatch.delitem(registry, protocol)
    with pytest.raises(EnvironmentProblem, match='requires "requests" and "aiohttp" to be installed') as caught:
        rc.fetch("http://127.0.0.1:9/x.pth")
    assert caught.value.code == "address.package"

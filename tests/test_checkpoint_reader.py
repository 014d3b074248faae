"""The checkpoint reader: every container gives the same weights, no code runs, and each error is one sentence."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import types
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import repaconv as rc
from repaconv.checkpoints import read_checkpoint, read_mmconfig
from repaconv.checkpoints.checkpoint_reader import _find_prefix, _WeightSets
from repaconv.checkpoints.containers import several_files_hint
from repaconv.checkpoints.tensor_sanity_checks import require_sound
from repaconv.core.errors import Refused
from repaconv.methods.riformer import METHOD


def refused(path, code, **kwargs):
    with pytest.raises(Refused) as caught:
        METHOD.read(read_checkpoint(path, **kwargs), {})
    assert caught.value.code == code
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def test_every_container_gives_the_same_weights(tmp_path, tiny_weights):
    weights = {"a": torch.randn(3, 4).half(), "b": torch.arange(6).reshape(2, 3).T, "c": torch.randn(0, 2).bfloat16()}
    weights["view"] = tiny_weights["head.fc.weight"][1:3, ::2]
    torch.save(weights, tmp_path / "zip.pth")
    torch.save(weights, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "s.safetensors")
    with (
        zipfile.ZipFile(tmp_path / "zip.pth") as stored,
        zipfile.ZipFile(tmp_path / "deflated.pth", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    for name, container in (
        ("zip.pth", "torch zip"),
        ("legacy.pth", "torch legacy"),
        ("s.safetensors", "safetensors"),
        ("deflated.pth", "torch zip"),
    ):
        found = read_checkpoint(tmp_path / name)
        assert found.origin.container == container
        assert {k: v.dtype for k, v in found.tensors.items()} == {k: v.dtype for k, v in weights.items()}
        assert all(torch.equal(found.tensors[k], v) for k, v in weights.items()), name


def test_the_tar_of_the_first_torch_versions(tmp_path):
    import io
    import struct
    import tarfile

    values = torch.arange(6, dtype=torch.float32)

    class Named(pickle.Pickler):
        def persistent_id(self, value):
            return "7" if isinstance(value, torch.Tensor) else None

    def member(archive, name, content):
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))

    def p(value):
        return pickle.dumps(value, protocol=2)

    storages = p(1) + p((3, "cpu", torch.FloatStorage)) + struct.pack("<q", 6) + values.numpy().tobytes() + p([])
    tensors = p(1) + p((7, 3, torch.FloatTensor)) + struct.pack("<ii", 2, 0) + struct.pack("<5q", 2, 3, 3, 1, 0)
    named = io.BytesIO()
    Named(named, 2).dump({"w": values})
    with tarfile.open(tmp_path / "old.pth", "w", format=tarfile.PAX_FORMAT) as archive:
        member(archive, "sys_info", p({}))
        member(archive, "pickle", named.getvalue())
        member(archive, "tensors", tensors)
        member(archive, "storages", storages)
    found = read_checkpoint(tmp_path / "old.pth")
    assert found.origin.container == "torch legacy tar"
    assert torch.equal(found.tensors["w"], values.reshape(2, 3))
    oracle = torch.load(tmp_path / "old.pth", weights_only=False)
    assert torch.equal(oracle["w"], found.tensors["w"])


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", ["weights", "beside"])
def test_a_pickle_that_would_run_a_command_does_not(tmp_path, repaconv, tiny_weights, legacy, place):
    marker = tmp_path / "it-ran"
    content = {"state_dict": dict(tiny_weights), "meta": {}}
    content["state_dict" if place == "weights" else "meta"]["x"] = Touch(marker)
    torch.save(content, tmp_path / "evil.pth", _use_new_zipfile_serialization=not legacy)
    for command in ("inspect", "fold"):
        code, out, err = repaconv(command, tmp_path / "evil.pth")
        assert code == 4
        assert "system" in err
        assert out == ""
    assert not marker.exists()
    assert not Path("repaconv-out").exists()
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert marker.exists(), "the pickle was harmless, so the test proved nothing"


@pytest.mark.parametrize(
    "function", [eval, exec, __import__, compile, open, subprocess.Popen, pickle.loads, breakpoint]
)
def test_names_that_run_code_refuse_the_file(tmp_path, function):
    class Evil:
        def __reduce__(self):
            return function, ("x",)

    torch.save({"state_dict": {"w": torch.ones(1)}, "meta": Evil()}, tmp_path / "evil.pth")
    refused(tmp_path / "evil.pth", "checkpoint.unsafe-global")


def test_other_globals_stay_inert_and_are_listed(tmp_path, tiny_weights):
    class Odd:
        pass

    Odd.__module__, Odd.__qualname__ = "somebody.trainer", "Odd"
    module = type(sys)("somebody.trainer")
    module.Odd = Odd
    sys.modules["somebody"], sys.modules["somebody.trainer"] = type(sys)("somebody"), module
    odd = Odd()
    odd.values = [1, 2]
    args = argparse.Namespace(img_size=48)
    try:
        torch.save({"state_dict": tiny_weights, "log": odd, "args": args, "f": getattr}, tmp_path / "run.pth")
        torch.save({"state_dict": {**tiny_weights, "odd": odd}}, tmp_path / "inside.pth")
    finally:
        del sys.modules["somebody"], sys.modules["somebody.trainer"]
    found = read_checkpoint(tmp_path / "run.pth")
    assert set(found.placeholders) == {"somebody.trainer.Odd", "argparse.Namespace", "builtins.getattr"}
    assert found.record["args"] == {"img_size": 48}
    assert METHOD.read(found, {}).preprocessing.image_size == (48, 48)
    assert "somebody.trainer.Odd" in refused(tmp_path / "inside.pth", "checkpoint.global-in-weights")


def test_a_pickle_cannot_alter_the_reader(tmp_path):
    from repaconv.checkpoints import restricted_unpickler

    evil = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x06\x00\x00\x00_builds\x85\x86b."
    path = tmp_path / "p"
    path.write_bytes(evil)
    with path.open("rb") as stream, pytest.raises(Refused):
        restricted_unpickler.unpickle(stream)


def test_sets_prefixes_and_averages(tmp_path, tiny_weights):
    average = {name: value + 1 for name, value in tiny_weights.items()}
    wrapped = OrderedDict((f"module._orig_mod.{name}", value) for name, value in tiny_weights.items())
    ema = {**{f"module.{name}": value for name, value in average.items()}, "steps": torch.tensor(7)}
    said = {"optimizer": {"state": {0: torch.ones(2)}}, "message_hub": {}}
    torch.save({"state_dict": wrapped, "ema_state_dict": ema, **said}, "a.pth")
    found = read_checkpoint("a.pth")
    assert found.origin.weights == "state_dict"
    assert "moving average already" in found.origin.weights_reason
    assert found.origin.stripped == ("module", "_orig_mod", "backbone")
    assert found.tensors.keys() == {name.removeprefix("backbone.") for name in tiny_weights}
    assert {s.path for s in found.sets} == {"state_dict", "ema_state_dict"}
    other = read_checkpoint("a.pth", "ema_state_dict")
    assert other.tensors.keys() == found.tensors.keys()
    assert torch.equal(other.tensors["head.fc.bias"], average["head.fc.bias"])
    refused("a.pth", "checkpoint.weights", weights="model")
    torch.save(tiny_weights, "bare.pth")
    with pytest.raises(Refused) as bare:
        read_checkpoint("bare.pth", "model")
    assert bare.value.hint == "It has one set without a name: leave --weights out."
    torch.save({"first": tiny_weights, "second": average}, "b.pth")
    assert "first, second" in refused("b.pth", "checkpoint.ambiguous")
    for order in ("student", "teacher"), ("teacher", "student"):  # a dict's order is no rule
        torch.save({"model": dict(zip(order, (tiny_weights, average), strict=True)), "epoch": 3}, "c.pth")
        assert ", ".join(f"model.{name}" for name in order) in refused("c.pth", "checkpoint.ambiguous")
    assert torch.equal(read_checkpoint("c.pth", "model.student").tensors["head.fc.bias"], average["head.fc.bias"])
    torch.save({"state_dict": wrapped, "ema_state_dict": ema}, "d.pth")  # mmengine's rule is mmengine's files'
    assert "state_dict, ema_state_dict" in refused("d.pth", "checkpoint.ambiguous")
    torch.save({"state_dict": tiny_weights, "net": average}, "e.pth")
    assert read_checkpoint("e.pth").origin.weights_reason == "state_dict by rule; other sets: net"


def test_settings_of_the_file_are_read_wherever_they_are(tiny_weights):
    cfg = 'model = dict(backbone=dict(type="RIFormer", norm_cfg=dict(type="LN2d"), act_cfg=dict(type="ReLU")))'
    meta = {"cfg": cfg}
    torch.save({"state_dict": tiny_weights, "meta": meta}, "beside.pth")
    torch.save({**tiny_weights, "meta": meta}, "flat.pth")
    torch.save({"state_dict": {**tiny_weights, "meta": meta}}, "among.pth")
    torch.save({"model": {"net": tiny_weights, "meta": meta}, "meta": {}, "top1": torch.tensor(99.0)}, "nearer.pth")
    save_file(tiny_weights, "said.safetensors", metadata={"meta": json.dumps(meta), "epoch": "3"})
    for path in ("beside.pth", "flat.pth", "among.pth", "nearer.pth", "said.safetensors"):
        found = read_checkpoint(path)
        assert found.record["meta"] == meta, path
        facts = {fact.name: (fact.value, fact.source) for fact in METHOD.read(found, {}).facts}
        assert (facts["norm"], facts["act"]) == (("LN2d", "meta.cfg"), ("ReLU", "meta.cfg")), path
    assert found.record["epoch"] == 3
    assert read_checkpoint("nearer.pth").record["top1"] == 99
    assert read_checkpoint("among.pth").record.keys() == {"meta"}


def test_what_is_no_checkpoint_says_what_it_is(tmp_path, tiny):
    whole = tiny.read_bytes()
    for name, content, code, words in (
        ("empty", b"", "checkpoint.empty", "empty"),
        ("half", whole[: len(whole) // 2], "checkpoint.truncated", "truncated"),
        ("page", b"<!doctype html><html>", "checkpoint.type", "web page"),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\n", "checkpoint.type", "git lfs pull"),
        ("text", b"hello", "checkpoint.type", "not a checkpoint"),
        ("c.pth.gz", gzip.compress(whole), "checkpoint.type", "compressed by gzip, so decompress it first"),
        ("pickle", pickle.dumps({"a": 1}), "checkpoint.type", "torch.save"),
        ("s.safetensors", b'\x40\0\0\0\0\0\0\0{"a":', "checkpoint.truncated", "truncated"),
    ):
        (tmp_path / name).write_bytes(content)
        assert words in refused(tmp_path / name, code)
    (tmp_path / "net.onnx").write_bytes(b"\x08\x09\x3a\x01")
    assert "looks like an ONNX model" in refused(tmp_path / "net.onnx", "checkpoint.type")
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as file:
        file.writestr("net/models/model.json", "{}")
    assert "program of torch.export" in refused(tmp_path / "net.pt2", "checkpoint.type")
    refused(tmp_path, "checkpoint.directory")
    refused(tmp_path / "none.pth", "checkpoint.missing")
    torch.save({"epoch": 3}, tmp_path / "no.pth")
    refused(tmp_path / "no.pth", "checkpoint.no-weights")


@pytest.mark.parametrize(
    ("name", "content", "what", "hint"),
    [
        ("net.tflite", b"\x1c\0\0\0TFL3", "a TensorFlow Lite model", "--tflite net.tflite --output net.onnx"),
        ("saved", None, "a SavedModel of TensorFlow", "--saved-model saved --output saved.onnx"),
        ("net.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes", "model.export('saved_model')"),
        ("nets/net.keras", b"zip", "a model of Keras", "model.export('nets/saved_model')"),
        ("net.pdparams", pickle.dumps({"w": [1.0]}), "a model of PaddlePaddle", "paddle.onnx.export"),
        (
            "net.xml",
            b'<?xml version="1.0"?><net name="net">',
            "a model of OpenVINO",
            "from which it was made",
        ),
        ("net.bin", b"ftrt\0\0\0\0", "a TensorRT engine", "from which it was made"),
        ("net.rknn", b"RKNN\0\0\0\0", "a model for Rockchip's NPU", "from which it was made"),
    ],
)
def test_a_model_of_another_format_is_named(name, content, what, hint):
    Path(name).parent.mkdir(exist_ok=True)
    if content is None:
        Path(name).mkdir()
        Path(name, "saved_model.pb").write_bytes(b"\x08\x01")
    elif content == b"zip":
        with zipfile.ZipFile(name, "w") as file:
            file.writestr("model.weights.h5", b"")
    else:
        Path(name).write_bytes(content)
    with pytest.raises(Refused, match=f"{name} is {what}, not a checkpoint") as caught:
        rc.fold(name)
    assert hint in caught.value.hint
    assert caught.value.code == "checkpoint.type"


def test_arrays_in_a_pickle_are_folded_by_what_the_hint_says(tiny_weights, monkeypatch):
    arrays = {name: weight.numpy() for name, weight in tiny_weights.items()}
    Path("R-50.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "MSRA", "matching_heuristics": True}))
    with pytest.raises(Refused, match=r"a pickle that torch\.save did not write") as caught:
        rc.fold("R-50.pkl")
    assert "you trust it" in caught.value.hint
    _joined_by(caught.value.hint.partition("trust it, ")[2], monkeypatch)
    assert rc.fold("R-50.pth").verdict == "passed"


def test_a_truncated_legacy_file(tmp_path, tiny_weights):
    torch.save(tiny_weights, tmp_path / "l.pth", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "l.pth").read_bytes()
    (tmp_path / "l.pth").write_bytes(whole[:-100])
    refused(tmp_path / "l.pth", "checkpoint.truncated")


def test_two_sets_in_one_state_dict_are_distinguished_by_their_prefix(tmp_path, tiny_weights, repaconv):
    again = {f"module.{name}": weight.double().float() for name, weight in tiny_weights.items()}
    torch.save({**tiny_weights, **again}, tmp_path / "both.pth")
    code, _, err = repaconv("fold", "both.pth")
    said = " ".join(err.split())
    assert (code, "Under module. are the names of the other tensors again" in said) == (4, True), err
    assert "--weights module reads these, --weights without:module the others" in said
    assert repaconv("fold", "both.pth", "--weights", "module")[0] == 0
    torch.save({**tiny_weights, "module.extra": torch.ones(1)}, tmp_path / "more.pth")
    assert "two sets" not in repaconv("fold", "more.pth")[2]
    torch.save({**tiny_weights, **again, "module.extra": torch.ones(1)}, tmp_path / "more.pth")
    assert "two sets" in " ".join(repaconv("fold", "more.pth")[2].split())  # a buffer that a method does not keep
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    weights = module.state_dict()
    torch.save({**weights, **{f"module.{name}": weight for name, weight in weights.items()}}, tmp_path / "own.pth")
    (tmp_path / "net.py").write_text(TWO_LAYERS)
    code, _, err = repaconv("fold", "own.pth", "--arch", "./net.py:build")
    assert (code, "in the file 2 times, under these prefixes: none, module" in " ".join(err.split())) == (4, True), err
    assert repaconv("fold", "own.pth", "--arch", "./net.py:build", "--weights", "module")[0] == 0


def test_a_head_that_has_two_names_is_no_second_set(tiny_weights, repaconv):
    again = {name: weight for name, weight in tiny_weights.items() if name.startswith("head.")}
    torch.save({**again, **{f"model.{name}": weight for name, weight in tiny_weights.items()}}, "head.pth")
    said = " ".join(repaconv("fold", "head.pth")[2].split())
    assert again
    assert "two sets" not in said, said
    assert "the other tensors again: --weights model reads these." in said
    assert repaconv("fold", "head.pth", "--weights", "model")[0] == 0


TWO_LAYERS = "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))\n"


@pytest.mark.parametrize(("outer", "inner"), [("", "module."), ("model.", "model.module."), ("net.", "net.ema.")])
def test_either_set_of_a_file_that_holds_one_network_twice_can_be_selected(tmp_path, repaconv, outer, inner):
    """Without a prefix, and of two prefixes of which one is a part of the other, the shorter one could not be."""
    (tmp_path / "net.py").write_text(TWO_LAYERS)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    weights = module.state_dict()
    average = {name: weight + 1 for name, weight in weights.items()}
    under = {
        prefix: {f"{prefix}{name}": one for name, one in each.items()}
        for prefix, each in ((outer, weights), (inner, average))
    }
    torch.save({**under[outer], **under[inner]}, tmp_path / "two.pth")
    arch, name = ("--arch", "./net.py:build"), inner.removesuffix(".")
    code, _, err = repaconv("fold", "two.pth", *arch)
    said = " ".join(err.split())
    assert code == 4
    assert f"in the file 2 times, under these prefixes: {outer.removesuffix('.') or 'none'}, {name}" in said
    assert f"--weights {name} reads those with that prefix, --weights without:{name} the others" in said
    code, _, err = repaconv("fold", "two.pth")
    within = f"{outer.removesuffix('.')},without:{name}".removeprefix(",")
    assert f"--weights {name} reads these, --weights {within} the others" in " ".join(err.split())
    for chosen, expected in ((name, average), (f"without:{name}", weights), (within, weights)):
        torch.save(expected, tmp_path / "two-alone.pth")
        assert repaconv("fold", "two-alone.pth", *arch, "-o", "alone", "--force")[0] == 0
        assert repaconv("fold", "two.pth", *arch, "--weights", chosen, "-o", "run", "--force")[0] == 0
        alone, one = (Path(run).read_bytes() for run in ("alone/two-alone.exported.onnx", "run/two.exported.onnx"))
        assert one == alone
        assert repaconv("verify", "run")[0] == 0
    if outer:  # a name that the user gave is a part of those that the hint gives
        code, _, err = repaconv("fold", "two.pth", *arch, "--weights", outer.removesuffix("."))
        assert f"--weights {name} reads those with that prefix, --weights {within} " in " ".join(err.split())
        code, _, err = repaconv("fold", "two.pth", "--weights", outer.removesuffix("."))
        assert f"--weights {name} reads these, --weights {within} the others" in " ".join(err.split())
    code, _, err = repaconv("fold", "two.pth", *arch, "--weights", "without:other")
    assert (code, "no set of weights named 'without:other'" in " ".join(err.split())) == (4, True)


@pytest.mark.parametrize("place", [".", "state_dict"])
@pytest.mark.parametrize("prefixes", [("", "model.", "model.module."), ("a.", "a.b.", "a.b.c.")])
def test_each_of_three_sets_of_weights_of_which_one_lies_in_another_can_be_selected(tmp_path, prefixes, place):
    (tmp_path / "net.py").write_text(TWO_LAYERS)
    weights = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).state_dict()
    saved = {f"{each}{name}": one + number for number, each in enumerate(prefixes) for name, one in weights.items()}
    torch.save(saved if place == "." else {place: saved}, "three.pth")

    def fold(weights: str | None) -> rc.NetworkFold:
        options = {"arch": "./net.py:build", "image_size": 8, "measure": False, "out": "run", "force": True}
        return rc.fold("three.pth", weights=weights, **options)

    chosen, selected = [], None
    for _ in range(2):  # what a hint says reads one of the sets, and all further in, of which the next hint tells
        with pytest.raises(Refused, match=r"in the file [23] times") as caught:
            fold(selected)
        selected, others = re.findall(r"--weights (\S+)", caught.value.hint)
        chosen.append(others)
    for number, each in enumerate([*chosen, selected]):
        assert fold(each).origin.weights == each
        read = read_checkpoint("three.pth", each)
        stored = {name: read.tensors[short] for short, name in read.names.items()}
        assert {*stored} == {f"{prefixes[number]}{name}" for name in weights}
        assert torch.equal(stored[f"{prefixes[number]}0.bias"], weights["0.bias"] + number)
        assert rc.verify("run").verdict == "passed"


def test_unsound_weights_are_named(tmp_path, tiny_weights):
    def with_(**changes):
        torch.save({**tiny_weights, **{k.replace("__", "."): v for k, v in changes.items()}}, tmp_path / "c.pth")
        return tmp_path / "c.pth"

    bad = tiny_weights["head.fc.bias"].clone()
    bad[2] = float("nan")
    assert "head.fc.bias has NaN or infinite values: 1 of " in refused(
        with_(head__fc__bias=bad), "checkpoint.not-finite"
    )
    path = with_(bn__running_var=torch.tensor([-1.0]))
    assert "bn.running_var" in refused(path, "checkpoint.negative-variance")
    assert "extra.weight" in refused(with_(extra__weight=torch.ones(1)), "checkpoint.unexpected-keys")
    assert "head.fc.bias has shape [9]" in refused(with_(head__fc__bias=torch.ones(9)), "checkpoint.shape")
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64):
        assert str(dtype) in refused(with_(head__fc__bias=torch.ones(5).to(dtype)), "checkpoint.dtype")
    assert "complex64" in refused(with_(bn__running_var=torch.ones(1).to(torch.complex64)), "checkpoint.dtype")
    every = {name.replace(".", "__"): weight.to(torch.int8) for name, weight in tiny_weights.items()}
    assert "holds torch.int8, not floating point numbers" in refused(with_(**every), "checkpoint.dtype")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is giving them up; their files stay
        quantised = torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)
    assert "_rebuild_qtensor" in refused(with_(head__fc__bias=quantised), "checkpoint.global-in-weights")
    for other, how in ((torch.ones(5).to_sparse(), "to_dense()"), (torch.ones(5, device="meta"), "no numbers")):
        with pytest.raises(Refused, match=r"c\.pth: head\.fc\.bias is not a plain tensor") as found:
            read_checkpoint(with_(head__fc__bias=other))
        assert how in found.value.hint
    del tiny_weights["backbone.network.2.1.mlp.fc2.bias"]
    assert "network.2.1.mlp.fc2.bias" in refused(with_(), "checkpoint.missing-keys")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see private memory")
def test_reading_maps_the_file(tmp_path):
    size = 64 * 2**20
    torch.save({f"w{i}": torch.ones(size // 16) for i in range(4)}, tmp_path / "big.pth")
    script = (
        "import sys; from repaconv.checkpoints import read_checkpoint\n"
        "def anon(): return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0]) * 1024\n"
        "before = anon(); c = read_checkpoint(sys.argv[1]); total = sum(float(t.sum()) for t in c.tensors.values())\n"
        "print(anon() - before, total)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "big.pth")], capture_output=True, text=True, check=True
    )
    grown, total = done.stdout.split()
    assert float(total) == size / 4
    assert int(grown) < size / 4


def test_mm_configuration_is_read_and_not_run():
    text = "a = dict(b=[1, -2.5, (None,)], type='X')\nimport os\nc = os.system('false')\nd = dict({'k': True}, e='f')"
    assert read_mmconfig(text) == {
        "a": {"b": [1, -2.5, [None]], "type": "X"},
        "c": None,
        "d": {"k": True, "e": "f"},
    }
    assert read_mmconfig("not python (") == {}


def test_a_backbone_inside_a_larger_module_is_found(tmp_path):
    from repaconv.methods.repavit import METHOD as REPAVIT

    weights = REPAVIT.example("tiny", seed=1)
    wrapped = {name if name.startswith("head") else f"model.encoder.{name}": w for name, w in weights.items()}
    torch.save({"state_dict": wrapped}, tmp_path / "wrapped.pth")
    found = read_checkpoint(tmp_path / "wrapped.pth")
    assert set(found.tensors) == set(weights)
    assert found.origin.stripped == ("model.encoder",)
    two = {f"{net}.{name}": w for net in ("teacher", "pupil") for name, w in weights.items()}
    torch.save({"state_dict": two}, tmp_path / "two.pth")
    assert set(read_checkpoint(tmp_path / "two.pth").tensors) == set(two)


def test_hints_for_other_peoples_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused) as refused:
        read_checkpoint(Path("owner/name"))
    assert "repaconv fetch hf://owner/name" in refused.value.hint
    with pytest.raises(Refused) as refused:
        read_checkpoint(Path("owner/name.pth"))
    assert refused.value.hint == "Check the path to the checkpoint."
    whole = b"\x80\x02}q\x00X\x05\x00\x00\x00modelcultralytics.nn.tasks\nDetectionModel\n)Rs."
    with zipfile.ZipFile("yolo.pt", "w") as file:
        file.writestr("yolo/data.pkl", whole)
    with pytest.raises(Refused) as refused:
        read_checkpoint(Path("yolo.pt"))
    assert "yolo export model=yolo.pt format=onnx; then repaconv fold yolo.onnx" in refused.value.hint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Buffer(torch.ones(2))


def test_tensors_with_bits_attributes_or_a_class_of_their_own(tmp_path):
    numbers = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    weights = {"negative": numbers.conj().imag, "conjugate": numbers.clone().conj(), "other": torch.ones(2)}
    assert weights["negative"].is_neg()
    assert weights["conjugate"].is_conj()
    for zipped in (True, False):
        torch.save(weights, tmp_path / "bits.pth", _use_new_zipfile_serialization=zipped)
        found = read_checkpoint(tmp_path / "bits.pth").tensors
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert found["negative"].numpy().tolist() == [-3, -4]  # which torch refuses while the bit is set
    named = torch.ones(2)
    named.note = "mine"
    torch.save({"w": named, "b": torch.zeros(2)}, tmp_path / "note.pth")
    assert torch.equal(read_checkpoint(tmp_path / "note.pth").tensors["w"], torch.ones(2))
    torch.save(Net(), tmp_path / "buffer.pth")
    assert read_checkpoint(tmp_path / "buffer.pth").tensors.keys() == {"fc.weight", "fc.bias", "scale"}
    torch.save({"w": torch.ones(2).as_subclass(Own), "b": torch.zeros(2)}, tmp_path / "own.pth")
    assert "Own, which is not run" in refused(tmp_path / "own.pth", "checkpoint.global-in-weights")


class Own(torch.Tensor):
    pass


def test_every_pickle_protocol_of_the_legacy_format(tmp_path, tiny_weights):
    for protocol in (2, 3, 4, 5):
        path = tmp_path / f"{protocol}.pth"
        torch.save(tiny_weights, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        found = read_checkpoint(path)
        assert found.origin.container == "torch legacy"
        assert torch.equal(found.tensors["head.fc.bias"], tiny_weights["head.fc.bias"])


def test_a_package_of_the_users_may_have_the_name_of_one_of_pythons_modules(tmp_path, monkeypatch):
    def module(name):
        found = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found)
        monkeypatch.setattr(Net, "__module__", name)
        found.Net = Net
        torch.save(Net(), tmp_path / f"{name}.pth")
        return tmp_path / f"{name}.pth"

    assert "fc.weight" in read_checkpoint(module("trace.models")).tensors
    for name in ("trace", "os.models", "importlib.models"):
        assert f"{name}.Net" in refused(module(name), "checkpoint.unsafe-global")


def test_a_tensor_among_the_records_makes_no_state_dict_of_them(tmp_path, tiny_weights):
    best = {"best_acc1": torch.tensor(0.9)}
    torch.save({"model": tiny_weights, **best}, "a.pth")
    torch.save({"net_g": tiny_weights, **best, "loss": torch.tensor(1.0), "epoch": 3}, "b.pth")
    torch.save({"model": tiny_weights, "confusion": torch.ones(3, 3)}, "c.pth")
    for path, place in (("a.pth", "model"), ("b.pth", "net_g"), ("c.pth", "model")):
        found = read_checkpoint(path)
        assert found.origin.weights == place, path
        assert "head.fc.bias" in found.tensors, path
    assert read_checkpoint("a.pth").record == {"best_acc1": pytest.approx(0.9)}
    extra = {"norm._extra_state": {"scale": torch.ones(1)}}
    torch.save({"net_g": {**tiny_weights, **extra}}, "d.pth")  # fewer tensors than the state dict that holds it
    assert [each.path for each in read_checkpoint("d.pth").sets] == ["net_g"]


def test_a_name_that_only_looks_like_another_is_kept(tmp_path):
    torch.save({"optimal_model": {"a": torch.ones(2), "b": torch.ones(1)}, "optim": {"c": torch.ones(2)}}, "a.pth")
    assert read_checkpoint("a.pth").origin.weights == "optimal_model"
    torch.save({"att.decay": torch.ones(2), "att.weight": torch.ones(2), "ema.decay": torch.tensor(0.9)}, "b.pth")
    assert read_checkpoint("b.pth").tensors.keys() == {"att.decay", "att.weight"}
    torch.save({"params": {"a": torch.ones(2)}, "params_ema": {"a": torch.ones(2)}}, "c.pth")
    assert "its moving average is --weights params_ema" in read_checkpoint("c.pth").origin.weights_reason


def test_a_mapping_that_a_file_refers_to_many_times_is_counted_once():
    class Counted(dict):
        read = 0

        def items(self):
            self.read += 1
            return super().items()

    weights = Counted({f"{place}.weight": torch.zeros(2) for place in range(3)})
    sets = [found for found, _, _ in _WeightSets().within({f"set{place}": weights for place in range(50)}, ".", 4)]
    assert [(each.path, each.tensors, each.parameters) for each in sets] == [(f"set{n}", 3, 6) for n in range(50)]
    assert weights.read == 1
    assert _find_prefix(Path("a.pth"), {f"set{place}": weights for place in range(50)}, "net") is None
    assert weights.read == 2


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"])
def test_names_that_torchs_wrappers_insert_are_removed_wherever_they_are(tmp_path, tiny_weights, wrapper):
    outer = {f"{wrapper}.{name}": tensor for name, tensor in tiny_weights.items()}
    inner = {name.replace(".mlp.", f".mlp.{wrapper}."): tensor for name, tensor in tiny_weights.items()}
    torch.save(tiny_weights, tmp_path / "plain.pth")
    plain = read_checkpoint(tmp_path / "plain.pth").tensors
    for weights in (outer, inner):
        torch.save(weights, tmp_path / "wrapped.pth")
        assert read_checkpoint(tmp_path / "wrapped.pth").tensors.keys() == plain.keys()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_weights_of_an_architecture_that_are_no_floating_point_numbers_are_refused(tmp_path, dtype):
    network = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))\n"
    (tmp_path / "own.py").write_text(network)
    conv = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).state_dict()
    torch.save({**conv, "0.weight": conv["0.weight"].to(dtype)}, tmp_path / "whole.pth")
    with pytest.raises(Refused, match=r"0.weight holds .*, not floating point numbers") as raised:
        rc.fold(tmp_path / "whole.pth", arch=f"{tmp_path / 'own.py'}:net", out=tmp_path / "run")
    assert raised.value.code == "checkpoint.dtype"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_whose_sum_overflows_are_finite_and_infinities_that_cancel_are_not(dtype):
    largest = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    require_sound({"weight": largest}, {})
    for bad in ([torch.inf, -torch.inf], [torch.nan], [torch.inf]):
        with pytest.raises(Refused, match=f"{len(bad)} of 10"):
            require_sound({"weight": torch.cat([largest[: 10 - len(bad)], torch.tensor(bad, dtype=dtype)])}, {})


def _joined_by(hint: str, monkeypatch) -> None:
    """Run the command in a hint that joins weights in several files."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    command = hint.partition(": ")[2].partition("; then repaconv fold")[0]
    subprocess.run(command, shell=True, check=True, capture_output=True)


@pytest.mark.parametrize("chosen", ["without:", "model,without:model", "without:model"])
def test_a_choice_of_no_names_or_of_no_prefix_is_refused(chosen):
    torch.save({"state_dict": {"model.0.weight": torch.ones(2, 2)}}, "one.pth")
    with pytest.raises(Refused, match="no set of weights named"):
        read_checkpoint("one.pth", chosen)


@pytest.mark.parametrize("script", [".", ".."])
def test_deepspeeds_script_is_found_from_inside_a_folder_of_its_files(script, tmp_path, monkeypatch):
    (tmp_path / "step1").mkdir()
    monkeypatch.chdir(tmp_path / "step1")
    Path("zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    Path(script, "zero_to_fp32.py").touch()
    command = several_files_hint(Path()).partition("python ")[2]
    assert Path(shlex.split(command)[0]).is_file()


def _refused_as_several(call: Callable[[], Any]) -> str:
    """The hint of a refusal of weights in several files."""
    with pytest.raises(Refused, match=r"several files|is a folder|no weights") as caught:
        call()
    return caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        lambda weights: [weights, {"lr": 1}],
        lambda weights: ("net", {"state_dict": weights}),
        lambda weights: [argparse.Namespace(lr=1), weights],
        lambda weights: [_module_of(weights)],
    ],
)
def test_a_list_is_folded_by_what_the_hint_says(tiny_weights, content, monkeypatch):
    torch.save(content(tiny_weights), "it's a list.pth")
    with pytest.raises(Refused, match=r"it is a (list|tuple), and entry [01] of it has them") as caught:
        rc.fold("it's a list.pth")
    assert caught.value.code == "checkpoint.no-weights"
    _joined_by(caught.value.hint, monkeypatch)
    assert rc.fold("it's a list.weights.pth").verdict == "passed"


def _module_of(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose state dict is these weights."""
    top = torch.nn.Module()
    for name, value in weights.items():
        *path, last = name.split(".")
        at = top
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))
    return top


def test_a_list_of_tensors_has_no_weights_by_name():
    torch.save([torch.ones(2), torch.ones(3)], "list.pth")
    with pytest.raises(Refused, match="it is a list without a state dict"):
        rc.fold("list.pth")


@pytest.mark.filterwarnings("ignore")  # torch warns that there is no process group
def test_a_distributed_checkpoint_is_folded_by_what_the_hint_says(tiny_weights, monkeypatch):
    import torch.distributed.checkpoint as dcp

    dcp.save({"state_dict": dict(tiny_weights)}, checkpoint_id="several")
    with pytest.raises(Refused, match="holds weights in several files") as caught:
        rc.fold("several")
    with pytest.raises(Refused, match="holds no weights") as part:
        rc.fold(next(Path("several").glob("*.distcp")))
    assert "dcp_to_torch" in part.value.hint
    assert _refused_as_several(partial(rc.inspect, "several")) == caught.value.hint
    _joined_by(caught.value.hint, monkeypatch)
    assert rc.fold("several.pth").verdict == "passed"


def test_files_of_deepspeed_are_distinguished_from_damaged_ones(tiny_weights):
    empty = {name: torch.empty(0) for name in tiny_weights}
    torch.save({"module": empty, "param_shapes": [], "ds_version": "0.16"}, "mp_rank_00_model_states.pt")
    with pytest.raises(Refused, match="ZeRO stage 3") as caught:
        rc.fold("mp_rank_00_model_states.pt")
    assert caught.value.code == "checkpoint.partitioned"
    Path("saved/global_step1").mkdir(parents=True)
    Path("saved/global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(Refused, match="several files") as caught:
        rc.fold("saved")
    joining = "python saved/zero_to_fp32.py saved saved.pth"
    assert joining in caught.value.hint
    assert joining in _refused_as_several(partial(rc.inspect, "saved"))
    Path("saved/zero_to_fp32.py").touch()
    Path("mp_rank_00_model_states.pt").rename("saved/global_step1/mp_rank_00_model_states.pt")
    assert joining in _refused_as_several(partial(rc.inspect, "saved/global_step1"))
    with pytest.raises(Refused, match="ZeRO stage 3") as caught:
        rc.fold("saved/global_step1/mp_rank_00_model_states.pt")
    assert joining in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "message"),
    [("torch.distributed.tensor\nDTensor", "full_tensor"), ("shard\nShardedTensor", "FULL_STATE_DICT")],
)
def test_parts_of_distributed_tensors_say_how_to_gather_them(kind, message):
    """With an object of a class within a class, which pickle gets by calling getattr."""
    nested = b"cbuiltins\ngetattr\n(cshard.properties\nProperties\nX\x06\x00\x00\x00FormattR)\x81"
    made = b"c" + kind.encode() + b"\n" + nested + b"\x85R"
    with zipfile.ZipFile("parts.pth", "w") as file:
        file.writestr("parts/data.pkl", b"\x80\x02}X\x05\x00\x00\x00model}X\x01\x00\x00\x00w" + made + b"ss.")
    with pytest.raises(Refused, match="holds no weights") as caught:
        rc.fold("parts.pth")
    assert message in caught.value.hint


def test_tensors_next_to_the_networks_own_are_left_out_by_what_the_hint_says(tiny_weights):
    mine = {f"net.{name}": value for name, value in tiny_weights.items()}
    torch.save({"state_dict": mine | {"criterion.weight": torch.ones(3)}}, "more.ckpt")
    with pytest.raises(Refused, match=r"criterion\.weight") as caught:
        rc.fold("more.ckpt")
    assert "--weights net reads those with that prefix alone" in caught.value.hint
    assert rc.fold("more.ckpt", weights="net").verdict == "passed"

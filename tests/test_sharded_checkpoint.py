"""A checkpoint in several files: it is read as one, and every command names, hashes and guards all of its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_named_architectures import CODE
from test_score_and_convert_commands import HEADS, images, plain_weights
from torch import Tensor

import repaconv as rc
from repaconv.checkpoints import read_checkpoint
from repaconv.core import run_folder
from repaconv.core.errors import Refused
from repaconv.core.sharded_checkpoint import WEIGHTS, sha256_of_checkpoint
from repaconv.sources.named_architectures import of_folder
from repaconv.stages.recipe.run import run as run_recipe

SAFETENSORS, BIN = WEIGHTS
INDEX = Path(f"big/{SAFETENSORS}.index.json")
PARTS = [Path(f"big/model-0000{number}-of-00003.safetensors") for number in (1, 2, 3)]


def save_in_parts(weights: dict[str, Tensor], folder: Path, name: str = SAFETENSORS) -> Path:
    """Write three parts and their index as ``save_pretrained`` does, and return the index."""
    folder.mkdir(exist_ok=True)
    save: Callable[[Any, Any], Any] = save_file if name == SAFETENSORS else torch.save
    names, (stem, suffix), place_of = list(weights), name.split("."), {}
    for number in range(3):
        part = f"{stem}-0000{number + 1}-of-00003.{suffix}"
        own = names[number::3]
        save({each: weights[each] for each in own}, folder / part)
        place_of |= dict.fromkeys(own, part)
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": place_of}, indent=2))
    return index


@pytest.fixture
def big(tiny_weights) -> Path:
    return save_in_parts(tiny_weights, Path("big"))


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_fold_is_that_of_the_joined_checkpoint(tiny_weights, name, repaconv):
    index = save_in_parts(tiny_weights, Path("big"), name)
    torch.save(tiny_weights, "joined.pth")
    joined = rc.fold("joined.pth")
    assert rc.fold(index).payload.sha256 == joined.payload.sha256
    code, out, err = repaconv("fold", "big", "--method", "riformer")
    assert (code, "passed: every fold" in out) == (0, True), err
    folded = rc.fold("big")
    assert (folded.verdict, folded.payload) == (joined.verdict, joined.payload)
    assert [Path(each).parts[1] for each in folded.output_files] == ["big", "big"]
    assert Path(f"repaconv-out/{name.partition('.')[0]}/fold.json").is_file()  # of the index
    verified = rc.verify("repaconv-out/big")
    assert verified.verdict == "passed"
    parts = sorted(str(each) for each in Path("big").glob("*-of-*"))
    assert [*folded.input_files] == [str(index), *parts]
    assert {str(each.resolve()) for each in map(Path, parts)} <= {*verified.input_files}


def test_later_commands_take_a_run_of_several_files(big):
    rc.fold(big)
    assert rc.export().verdict == "passed"
    report = rc.report()
    assert report.title == "model: riformer"
    assert "cannot be reproduced" not in str(report)
    assert rc.compare("big", "repaconv-out/model").verdict == "passed"


def test_all_weights_checksums_and_files_are_those_of_the_parts(tiny_weights):
    found = read_checkpoint(save_in_parts(tiny_weights, Path("big"), BIN))
    whole = read_checkpoint(save_in_parts(tiny_weights, Path("big")))
    for each, container in ((found, "torch zip in 3 parts"), (whole, "safetensors in 3 parts")):
        assert each.origin.container == container
        assert {name: tensor.tolist() for name, tensor in each.by_file_names.items()} == {
            name: tensor.tolist() for name, tensor in tiny_weights.items()
        }
        assert each.origin.bytes == sum(file.stat().st_size for file in each.stamps)
        assert len(each.stamps) == 4
    assert found.origin.checksums == "CRC-32 of each record"


def test_the_hash_is_what_sha256sum_prints_of_its_lines(big, repaconv):
    said = subprocess.run(
        "sha256sum model.safetensors.index.json model-*.safetensors | sha256sum",
        cwd="big",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    assert sha256_of_checkpoint(big) == said == rc.inspect("big").origin.sha256
    assert rc.fold(big, sha256=said).origin.sha256 == said
    code, _, err = repaconv("fold", "big", "--sha256", "0" * 64)
    assert (code, "file.sha256" in err) == (4, True)
    shutil.copytree("big", "copy")
    assert sha256_of_checkpoint(Path("copy") / big.name) == said


def test_a_run_knows_its_parts_where_they_are_now(big):
    rc.fold(big)
    shutil.move("big", "moved")
    with pytest.raises(Refused, match="is not there"):
        rc.verify()
    assert rc.verify(checkpoint="moved").verdict == "passed"
    shutil.move("moved", "big")
    other = load_file(PARTS[1])
    save_file({name: tensor + 1 for name, tensor in other.items()}, PARTS[1])
    with pytest.raises(Refused, match="its hash is another"):
        rc.verify()
    PARTS[1].unlink()
    with pytest.raises(Refused, match=r"model-00002-of-00003\.safetensors is missing"):
        rc.verify()


def test_a_part_that_changes_while_it_is_folded_is_noticed(big):
    with pytest.raises(Refused, match=r"model-00002-of-00003\.safetensors changed") as caught:
        rc.fold(big, progress=lambda *_: os.utime(PARTS[1], ns=(1, 1)))
    assert caught.value.code == "file.changed"
    assert not Path("repaconv-out/model").exists()


def _index_with(**changed: Any) -> None:
    INDEX.write_text(json.dumps(json.loads(INDEX.read_text()) | changed))


def _moved(tensor: str, part: str) -> None:
    _index_with(weight_map=json.loads(INDEX.read_text())["weight_map"] | {tensor: part})


def _with_tensor(tensor: str, part: Path) -> None:
    save_file(load_file(part) | {tensor: torch.ones(2)}, part)


def _cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-8])


def _without_last_tensor(part: Path) -> None:
    weights = load_file(part)
    weights.popitem()
    save_file(weights, part)


FIRST = "backbone.patch_embed.proj.weight"
"""A tensor of the first part."""
DAMAGE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a part is missing": (lambda: PARTS[2].unlink(), "checkpoint.part", "model-00003-of-00003.safetensors is missing"),
    "a part is a folder": (
        lambda: (PARTS[2].unlink(), PARTS[2].mkdir()),
        "checkpoint.part",
        "model-00003-of-00003.safetensors is not a regular file",
    ),
    "a part is a pipe": (
        lambda: (PARTS[2].unlink(), os.mkfifo(PARTS[2])),
        "checkpoint.part",
        "model-00003-of-00003.safetensors is not a regular file",
    ),
    "a part is cut": (lambda: _cut(PARTS[1]), "checkpoint.truncated", "model-00002-of-00003.safetensors is truncated"),
    "a part is empty": (lambda: PARTS[1].write_bytes(b""), "checkpoint.empty", "is empty"),
    "a part is text": (lambda: PARTS[1].write_text("nothing"), "checkpoint.type", "is not a checkpoint"),
    "a tensor is missing": (lambda: _without_last_tensor(PARTS[1]), "checkpoint.part", "has no tensor"),
    "a tensor is elsewhere": (lambda: _moved(FIRST, PARTS[1].name), "checkpoint.part", f"holds {FIRST}, which"),
    "a tensor is there twice": (
        lambda: _with_tensor(FIRST, PARTS[1]),
        "checkpoint.part",
        f"says is in {PARTS[0].name}",
    ),
    "no JSON": (lambda: INDEX.write_text("{"), "checkpoint.index", "is not the index"),
    "no text": (lambda: INDEX.write_bytes(b"\xff\xfe\x00\xd8"), "checkpoint.index", "is not the index"),
    "nested": (lambda: INDEX.write_text("[" * 100_000), "checkpoint.index", "is not the index"),
    "a list": (lambda: INDEX.write_text("[]"), "checkpoint.index", "no weight_map"),
    "nothing in it": (lambda: _index_with(weight_map={}), "checkpoint.index", "no weight_map"),
    "no file": (lambda: _moved(FIRST, None), "checkpoint.index", "no weight_map"),  # type: ignore[arg-type]
    "a tensor in two parts": (
        lambda: INDEX.write_text(INDEX.read_text().replace('"weight_map": {', f'"weight_map": {{"{FIRST}": "x",')),
        "checkpoint.index",
        f"it has '{FIRST}' twice",
    ),
    "out of its folder": (lambda: _moved(FIRST, "../big/x"), "checkpoint.index", "'../big/x', which is not inside"),
    "an absolute path": (lambda: _moved(FIRST, "/etc/passwd"), "checkpoint.index", "'/etc/passwd', which is not"),
    "a path of Windows": (lambda: _moved(FIRST, "a\\b"), "checkpoint.index", "with a backslash, as on Windows. ("),
    "no name": (lambda: _moved(FIRST, ""), "checkpoint.index", "'', which is not inside"),
    "an index": (lambda: _moved(FIRST, INDEX.name), "checkpoint.index", "an index, as a part"),
    "no letters": (lambda: _moved(FIRST, "\ud800"), "file.name", "letters that the encoding"),
    "no file name": (lambda: _moved(FIRST, "a\0"), "file.name", "is not a valid file name"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_refused_in_a_sentence(big, repaconv, damage):
    do, error, message = DAMAGE[damage]
    do()
    Path("net.py").write_text(CODE)
    for command in (("fold", "big"), ("fold", big, "--arch", "net.py:Net"), ("inspect", big)):
        code, out, err = repaconv(*command)
        assert (code, out) == (4, ""), err
        text = " ".join(err.split())
        assert message in text, command
        assert f"({error}) hint: " in text, command
    assert not Path("repaconv-out").exists()


def test_what_is_no_state_dict_in_a_part_is_refused(tiny_weights):
    index = save_in_parts(tiny_weights, Path("big"), BIN)
    part = Path("big/pytorch_model-00002-of-00003.bin")
    weights = torch.load(part)
    for content, message in (
        ({"state_dict": weights}, "has no tensor"),
        ([weights], "has no tensor"),
    ):
        torch.save(content, part)
        with pytest.raises(Refused, match=message) as caught:
            rc.fold(index)
        assert caught.value.code == "checkpoint.part"


def test_what_the_index_does_not_name_is_not_read(big, repaconv):
    """As in transformers: the index says what the checkpoint is."""
    plain = rc.fold(big, out="plain")
    _with_tensor("more", PARTS[1])
    code, _, err = repaconv("fold", big)
    assert (code, f"not read: more, which {INDEX.name} does not name" in " ".join(err.split())) == (0, True), err
    done = run_folder.fold_of(run_folder.Run(Path("repaconv-out/model")))
    assert done.origin.container == "safetensors in 3 parts, 1 tensor not read"
    assert done.payload.sha256 == plain.payload.sha256
    assert rc.verify().verdict == "passed"


@pytest.mark.parametrize("more", [{"epoch": 3}, {"__metadata__": 3}])
def test_numbers_in_a_part_are_not_read(tiny_weights, more):
    index = save_in_parts(tiny_weights, Path("big"), BIN)
    part = Path("big/pytorch_model-00002-of-00003.bin")
    torch.save(torch.load(part) | more, part)
    assert rc.fold(index).verdict == "passed"


def test_flipped_bytes_of_a_part_are_noticed(tiny_weights):
    index = save_in_parts(tiny_weights, Path("big"), BIN)
    part = Path("big/pytorch_model-00002-of-00003.bin")
    content = bytearray(part.read_bytes())
    content[content.find(tiny_weights[list(tiny_weights)[1]].numpy().tobytes())] ^= 1
    part.write_bytes(content)
    with pytest.raises(Refused, match=r"pytorch_model-00002-of-00003\.bin have the CRC-32") as caught:
        rc.fold(index)
    assert caught.value.code == "checkpoint.damaged"


def test_one_part_alone_is_told_of_its_index(big, repaconv):
    for command in ("fold", "inspect"):
        code, _, err = repaconv(command, PARTS[0])
        assert code == 4
        assert f"hint: Give the index, which names all of them: {big}" in " ".join(err.split())
    big.rename("elsewhere.index.json")
    _, _, err = repaconv("fold", PARTS[0])
    assert f"Download their index and all parts into this folder, and give the index: {big}" in " ".join(err.split())


def test_a_part_of_any_name_is_known_by_the_index_next_to_it(tiny_weights):
    names, place_of = list(tiny_weights), {}
    for part, own in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
        save_file({name: tiny_weights[name] for name in own}, part)
        place_of |= dict.fromkeys(own, part)
    Path("net.safetensors.index.json").write_text(json.dumps({"weight_map": place_of}))
    with pytest.raises(Refused, match="one of several files"):
        rc.inspect("a.safetensors")
    assert rc.fold("net.safetensors.index.json").verdict == "passed"
    assert Path("repaconv-out/net/fold.json").is_file()
    save_file(tiny_weights, "whole.safetensors")
    Path("one.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "whole.safetensors")}))
    assert rc.inspect("whole.safetensors").method == rc.inspect("one.safetensors.index.json").method == "riformer"
    with pytest.raises(Refused, match=r"several checkpoints: net\.safetensors\.index\.json, one"):
        rc.fold(".")


def test_an_index_of_another_name_is_told_how_it_is_named(big):
    with pytest.raises(Refused, match="not named as the index") as caught:
        rc.fold(big.rename("big/all.json"))
    assert str(big) in caught.value.hint


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see private memory")
def test_parts_are_mapped(tmp_path):
    size = 96 * 2**20
    index = save_in_parts({f"w{i}": torch.ones(size // 24) for i in range(6)}, tmp_path / "large")
    script = (
        "import sys; from repaconv.checkpoints import read_checkpoint\n"
        "def anon(): return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0]) * 1024\n"
        "before = anon(); c = read_checkpoint(sys.argv[1], sha256='0' * 64)\n"
        "print(anon() - before, sum(float(t.sum()) for t in c.tensors.values()))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(index)], capture_output=True, text=True, check=True)
    grown, total = done.stdout.split()
    assert float(total) == size / 4
    assert int(grown) < size / 6


def test_a_part_that_a_run_wrote_is_never_replaced(big):
    own = Path("repaconv-out/model")
    rc.fold(big)
    of_run = own / "again.safetensors.index.json"
    of_run.write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    with pytest.raises(Refused, match=r"model\.safetensors was written by the run"):
        run_folder.prepare_run(of_run, "0" * 64, own, force=True)
    before = {part: part.read_bytes() for part in PARTS}
    with pytest.raises(rc.RepaconvError, match="already exists"):
        rc.verify(own, out=PARTS[0])
    with pytest.raises(rc.RepaconvError, match="not a run folder"):
        rc.fold(big, out="big")
    assert {part: part.read_bytes() for part in PARTS} == before


def test_links_into_a_cache_are_followed(big, tiny_weights):
    """The cache of the Hugging Face hub has files named after their hashes, and a folder of links to them."""
    Path("blobs").mkdir()
    Path("snapshot").mkdir()
    for number, file in enumerate((big, *PARTS)):
        file.rename(f"blobs/{number}")
        Path("snapshot", file.name).symlink_to(f"../blobs/{number}")
    rc.fold("snapshot")
    assert rc.fold("snapshot", out="repaconv-out/snapshot").origin.path == str(Path("snapshot", big.name).absolute())
    assert rc.verify().verdict == "passed"


def test_a_hugging_face_folder_with_several_files_is_folded_by_its_architecture(tmp_path):
    Path("net.py").write_text(CODE)
    index = save_in_parts(
        {"place": torch.ones(1, 8, 2, 2), "stem.weight": torch.ones(8, 3, 4, 4), "stem.bias": torch.ones(8)},
        Path("big"),
    )
    Path("big/config.json").write_text(json.dumps({"architecture": "resnet18"}))
    assert of_folder(Path("big"))[1] == index
    folded = rc.fold("big", arch="./net.py:Net", settings={"image_size": "8x8"})
    assert (folded.verdict, folded.origin.path) == ("passed", str(index.resolve()))
    assert rc.verify().verdict == "passed"
    Path(f"big/{BIN}").touch()
    assert of_folder(Path("big"))[1] == index  # as transformers prefers them
    Path(f"big/{SAFETENSORS}").touch()
    assert of_folder(Path("big"))[1] == Path(f"big/{SAFETENSORS}")


def test_a_recipe_pins_all_files_and_notices_what_changed(big, repaconv):
    assert repaconv("new-recipe", "big", "-o", "big.toml")[0] == 0
    text = Path("big.toml").read_text()
    assert f'checkpoint = "{big}"' in text
    assert f'sha256 = "{sha256_of_checkpoint(big)}"' in text
    Path("net.toml").write_text(f'checkpoint = "{big}"\nbench = false\nexport = false\n')
    assert run_recipe(Path("net.toml")).steps[0].did == "ran"
    assert run_recipe(Path("net.toml")).steps[0].did == "up to date"
    save_file({name: 2 * tensor for name, tensor in load_file(PARTS[1]).items()}, PARTS[1])
    changed = run_recipe(Path("net.toml")).steps[0]
    assert (changed.did, changed.why) == ("ran", f"changed: {PARTS[1].name} next to {big}")


def test_parts_are_fetched_with_their_index(big):
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/parts/{file.name}": file.read_bytes() for file in (big, *PARTS)} | {"/parts/modeling.py": b"x"})
    fetched = rc.fetch("memory://parts")
    assert [Path(each.path).name for each in fetched.files] == sorted(file.name for file in (big, *PARTS))
    assert rc.inspect("memory://parts").origin.sha256 == sha256_of_checkpoint(big)
    assert rc.fold("memory://parts").verdict == "passed"
    memory.rm(f"/parts/{PARTS[1].name}")
    with pytest.raises(Refused, match=f"names the part {PARTS[1].name}, which is not in its folder"):
        rc.fetch("memory://parts")
    assert rc.fold("memory://parts").verdict == "passed"
    _moved(FIRST, "modeling.py")
    memory.pipe(f"/parts/{big.name}", big.read_bytes())
    memory.pipe(f"/parts/{PARTS[1].name}", b"")
    with pytest.raises(Refused, match=r"modeling\.py, which is no file of weights"):
        rc.fetch("memory://parts")


def test_bench_and_verify_say_what_to_do_with_an_index(big):
    for call in (rc.bench, rc.verify):
        with pytest.raises(rc.RepaconvError) as caught:
            call(big)
        assert f"repaconv fold {big}" in caught.value.hint
    for run in (rc.bench, rc.verify, rc.export, rc.tune, rc.report):
        with pytest.raises(
            rc.RepaconvError, match=r"big is not a run folder: it holds a checkpoint, model\.saf"
        ) as caught:
            run(big.parent)
        assert caught.value.hint == "Fold it first: repaconv fold big"


def test_a_conversion_takes_several_files():
    save_in_parts(plain_weights(), Path("vit"))
    np.savez("x.npz", input=images(), labels=np.arange(80) % 5)
    how: dict[str, Any] = {"inputs": "x.npz", "settings": {"num_heads": str(HEADS)}, "max_disagreement": 0.99}
    done = rc.convert("vit", method="pyra", keep=0.6, **how)
    assert done.parent.path == str(Path("vit/model.safetensors.index.json").absolute())
    assert len(done.input_files) == 4
    scored = rc.score("vit", inputs="x.npz", settings=how["settings"])
    drawing = next(each for each in scored.output_files if str(each).endswith(".svg"))
    assert "<title>vit: mean attention" in Path(drawing).read_text()
    assert rc.verify("repaconv-out/model-pyra", inputs="x.npz").verdict == "passed"

"""Damaged checkpoint files are refused by their name or give the same weights. There is never a traceback, and never
other weights without a message.
"""

from __future__ import annotations

import os
import zipfile

import pytest
import torch
from file_damage import sound, tally

import repaconv
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import Refused


def test_no_damage_is_silent_where_the_file_has_checksums_and_none_ends_in_a_traceback(tmp_path):
    found, wrong = tally(tmp_path, 150, seed=7)
    assert not wrong, wrong[0]
    assert all(found[container, "refused"] for container in ("zip", "legacy", "safetensors", "packed", "without"))
    assert any(ended == "other" for _, ended in found)  # what no checksum of the format can tell


def test_a_flipped_bit_in_a_weight_is_named(tmp_path):
    path = sound(tmp_path)["zip"]
    tensors = {name: tensor.clone() for name, tensor in read_checkpoint(path).tensors.items()}
    content = path.read_bytes()
    for name in ("blocks.0.mlp.fc1.weight", "norm.bias"):
        at = content.index(tensors[name].contiguous().numpy().tobytes())
        damaged = bytearray(content)
        damaged[at + 2] ^= 4
        path.write_bytes(damaged)
        assert not torch.equal(torch.load(path, weights_only=False)["model"][name], tensors[name])  # torch takes it
        with pytest.raises(Refused, match=f"^{name} is damaged") as caught:
            read_checkpoint(path)
        assert caught.value.code == "checkpoint.damaged"
        with pytest.raises(Refused, match=f"^{name} is damaged"):  # its hash is known by then, which tells nothing
            repaconv.fold(path, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_damage_next_to_the_selected_weights_is_not_theirs(tmp_path):
    weights = {"a.weight": torch.ones(40, 3), "a.bias": torch.ones(40)}
    path = tmp_path / "x.pth"
    torch.save({"model": weights, "optimizer": {"state": {0: torch.full((77,), 0.625)}}}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((77,), 0.625).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert read_checkpoint(path).tensors.keys() == weights.keys()


def test_checksums_in_a_file_are_reported(tmp_path):
    result = {name: read_checkpoint(path).origin.checksums for name, path in sound(tmp_path).items()}
    assert result["zip"] == result["packed"] == "CRC-32 of each record"
    assert result["without"] == "none: saved without"
    assert result["legacy"] == result["safetensors"] == "the format has none"


def test_two_records_of_one_name_a_pipe_and_a_bomb_are_refused(tmp_path):
    path = sound(tmp_path)["zip"]
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data/0"))
        first = archive.read(name)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, first)
    with pytest.raises(Refused, match="one name"):
        read_checkpoint(path)
    os.mkfifo(tmp_path / "pipe.pth")
    with pytest.raises(Refused, match="a pipe or a device"):
        read_checkpoint(tmp_path / "pipe.pth")
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 27))
    with pytest.raises(Refused, match="claims to unpack"):
        read_checkpoint(tmp_path / "bomb.pth")

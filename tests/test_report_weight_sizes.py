"""The report compares bytes of weights at one dtype, whatever the checkpoint's file is in."""

from __future__ import annotations

import torch

import repaconv as rc
from repaconv.core import plugins


def test_bytes_of_weights_do_not_depend_on_the_dtype_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = plugins.load(plugins.METHODS, "repavit").example("tiny", seed=1)
    found = []
    for name, dtype in (("half", torch.float16), ("single", torch.float32)):
        torch.save({key: value.to(dtype) for key, value in weights.items()}, f"{name}.pth")
        folded = rc.fold(f"{name}.pth", settings={"num_heads": "3"})
        rows = {row[0]: row[1:] for row in rc.report(f"repaconv-out/{name}").before_after}
        found.append(rows["bytes of weights in FP32"])
        assert found[-1] == (4 * folded.training.parameters, 4 * folded.deploy.parameters)
    assert found[0] == found[1]

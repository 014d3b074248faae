"""Imports that every child process needs, done once before the processes are forked."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import repaconv
from repaconv.core import plugins
from torture.small_checkpoints import net


def up() -> None:
    """Every method, and a fold of one."""
    for name in plugins.registered(plugins.METHODS):
        plugins.load(plugins.METHODS, name)
    with tempfile.TemporaryDirectory() as scratch:
        path, network = Path(scratch, "c.pth"), net("dwconv")
        torch.save(network.whole, path)
        repaconv.inspect(path, settings=network.settings)
        repaconv.fold(path, out=Path(scratch, "run"), settings=network.settings)

"""The commands of the how-to pages for other libraries run, where the library is installed.

Weights are random, with BatchNorm statistics of noise, so INT8 may fail its limits, but not otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from optional_libraries import library
from zoo_networks import drawn, measured

DOCS = Path(__file__).resolve().parents[1] / "docs" / "how-to"
PAGES = {
    "segmentation-models": ("segmentation_models_pytorch", 64),
    "spandrel": ("spandrel", 32),
    "ocr": ("doctr", 64),
    "timm": ("timm", 64),
    "hugging-face": ("transformers", 64),
}
INT8 = "## INT8"


def blocks(text, language):
    return [part.split("```")[0] for part in text.split(f"```{language}\n")[1:]]


def commands(text):
    """Of a part of a page: the lines of the commands, in order."""
    lines = [line for block in blocks(text, "console") for line in block.splitlines()]
    return [line.removeprefix("$ repaconv ").split() for line in lines if line.startswith("$ repaconv ")]


def prepared(page, text, side):
    """The files that a page speaks of, with weights that a training might have left."""
    if page == "timm":
        import timm

        net = timm.create_model("repghostnet_050", num_classes=5)
    else:
        code = next(block for block in blocks(text, "py") if block.startswith("# net.py\n"))
        Path("net.py").write_text(code)
        made: dict = {}
        exec(code, made)
        net = made["build"]()
    net = net.eval().requires_grad_(False)
    if page == "hugging-face":
        drawn(net)
        net.save_pretrained("my-segformer")
    else:
        measured(net, (3, side, side))
        drawn(net)
        torch.save(net.state_dict(), "net.pth")
    np.savez("images.npz", input=np.random.default_rng(0).standard_normal((64, 3, side, side), np.float32))


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_the_same_steps(page):
    text = (DOCS / f"{page}.md").read_text()
    exact, _, lossy = text.partition(INT8)
    if page == "hugging-face":
        exact = exact.partition("## A network for segmentation")[2]
    assert [command[0] for command in commands(exact)] == ["fold", "export", "verify", "build"]
    assert [command[:3] for command in commands(lossy.partition("\n## ")[0])] == [
        ["export", "--precision", "int8"],
        ["verify", "--inputs", "images.npz"],
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, repaconv):
    name, side = PAGES[page]
    library(name)
    torch.manual_seed(0)
    text = (DOCS / f"{page}.md").read_text()
    if page == "hugging-face":
        text = text.partition("## A network for segmentation")[2]
    exact, _, lossy = text.partition(INT8)
    prepared(page, text, side)
    for command in commands(exact):
        code, out, err = repaconv(*command)
        assert code == 0, (command, out, err)
    (folded,) = (json.loads(path.read_text()) for path in Path("repaconv-out").glob("*/fold.json"))
    # What a measurement reverts depends on the machine.
    for what in ("parameters", "nodes") if not folded["reverted"] else ():
        before, after = folded[what]
        assert f"| {what} | {before:,} | {after:,} |" in text
    for command in commands(lossy.partition("\n## ")[0]):
        code, out, err = repaconv(*command, "--format", "json")
        links = json.loads(out)["data"]["links"]
        lossy_links = [link for link in links if link["name"] == "int8"]
        assert lossy_links, err
        assert all(link["verdict"] == "not verified" or link["tolerance"]["kind"] == "lossy" for link in lossy_links)
        assert all(link["verdict"] != "failed" for link in links if link not in lossy_links)
        assert code == int(any(link["verdict"] == "failed" for link in lossy_links))

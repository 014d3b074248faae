"""The networks of a step, each in a folder: the checkpoint, its run, the manual baseline, the vanilla network."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from manual_baseline_models import MODELS, Model
from manual_baselines import dwconv, nondeep, repavit, vanilla
from numpy.typing import NDArray
from torch import Tensor, nn

import repaconv
from gpu.plan import ANY, OFFICIAL, OURS, TRAINING, VANILLA, Case
from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem
from repaconv.engines.contract import Network
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.onnx_export.bfloat16 import to_bf16
from repaconv.results.fold import FoldArtefact
from repaconv.sources.source_model import DEPLOY, SourceModel
from repaconv.sources.source_model import TRAINING as AS_TRAINED
from repaconv.sources.source_of_run import source_model_of
from repaconv.verification.input_batches import random_inputs

PROBES = 4
"""Images whose outputs are known in float64."""
REHEARSED = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True)
OTHERS = (
    Model("dwconv", "vit-base/6", None, partial(dwconv.deployed, heads=12), {}),
    Model("repavit", "tiny", None, partial(repavit.deployed, heads=3), {"args": REHEARSED}),
    Model("nondeep", "tiny", None, nondeep.deployed, {"meta": example_meta()}),
)


def model_of(name: str) -> Model:
    """By the name of its folder."""
    known = {Case(each.method, each.size, 1, None, each.note).model: each for each in (*MODELS, *OTHERS)}
    return known[name]


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Checkpoint or graph, run, official form, vanilla network, and what is right on some images."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{ANY}-"
    make = partial(_by_graph, name.removeprefix(prefix)) if name.startswith(prefix) else partial(_by_method, name)
    folded = make(folder)
    run = subject(folder)
    feeds = {"input": random_inputs((3, *folded.image_size), count=PROBES, seed=0).images}
    right = run.reference.run(feeds)["logits"]
    undecided = None
    if run.decides:
        run.exact.run(feeds)
        undecided = run.exact.undecided
    np.savez(
        folder / "truth.npz",
        images=feeds["input"],
        logits=right,
        undecided=np.zeros(PROBES, dtype=bool) if undecided is None else undecided,
    )
    return {"verdict": folded.verdict}


def _by_method(name: str, folder: Path) -> FoldArtefact:
    """The run of a method's checkpoint, the official form and the vanilla network."""
    model = model_of(name)
    checkpoint = model.checkpoint()
    torch.save(checkpoint, folder / "c.pth")
    torch.save(model.deployed(checkpoint), folder / "official.pt")
    if (plain := _vanilla(model, checkpoint)) is not None:
        torch.save(plain, folder / "vanilla.pt")
    settings = {"num_heads": "3"} if model.size == "tiny" and model.method == "repavit" else None
    return repaconv.fold(folder / "c.pth", force=True, out=folder / "run", settings=settings)


def _by_graph(name: str, folder: Path) -> FoldArtefact:
    """The run of the graph that torch writes of timm's network, and the network itself as the vanilla one.

    Raises:
        EnvironmentProblem: timm is not installed.
    """
    from zoo_networks import drawn, load_torchvision

    try:
        load_torchvision()
        import timm
    except ImportError as error:
        raise EnvironmentProblem("timm is not installed, which has the network.", code="step.needs") from error
    torch.manual_seed(0)
    module: nn.Module = timm.create_model(name).eval().requires_grad_(False)
    shape: tuple[int, int, int] = module.default_cfg["input_size"]  # type: ignore[assignment, index]
    drawn(module)
    torch.save(module, folder / "vanilla.pt")
    exported = torch.onnx.export(
        module,
        (torch.zeros(2, *shape),),
        input_names=["input"],
        output_names=["logits"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
    )
    assert exported is not None
    onnx.save(exported.model_proto, folder / "original.onnx")
    return repaconv.fold(folder / "original.onnx", force=True, out=folder / "run")


def _vanilla(model: Model, checkpoint: dict[str, Any]) -> nn.Module | None:
    """What the paper measured against; None of a size that it did not."""
    if model.method == "riformer":
        return vanilla.poolformer(model.deployed(checkpoint))  # type: ignore[arg-type]
    if model.size == "tiny":
        return vanilla.vit("rehearsal") if model.method == "repavit" else None
    sizes = {"deit-tiny/0.75": "tiny", "deit-base/0.75": "base", "vit-large/12": "large", "vit-base/6": "base"}
    by_method = {"nondeep": "tiny", "pyra": "base"}
    size = sizes.get(model.size) or by_method.get(model.method)
    return vanilla.vit(size) if size else None


def subject(folder: Path) -> SourceModel:
    """Of a folder's run."""
    return source_model_of(run_folder.find_run(folder / "run"))


def networks(folder: Path) -> dict[str, Network]:
    """All forms as modules in memory."""
    run = subject(folder)
    found = {OURS: run.network(DEPLOY), TRAINING: run.network(AS_TRAINED)}
    for name, file in ((OFFICIAL, "official.pt"), (VANILLA, "vanilla.pt")):
        if (folder / file).is_file():
            # written by the step before
            found[name] = Network(torch.load(folder / file, weights_only=False), *found[OURS][1:])
    return found


def truth(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_]]:
    """Images, their logits in float64, and whether float32 may decide otherwise in them."""
    with np.load(folder / "truth.npz") as kept:
        return kept["images"], kept["logits"], kept["undecided"]


def decides(folder: Path) -> bool:
    """Whether the network decides something discrete."""
    return subject(folder).decides


class In(nn.Module):
    """A module that computes in a type of its own, between float32 images and float32 logits."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.to(self.dtype)).float()


def graphs(folder: Path, target: str, precision: str) -> dict[str, Any]:
    """Every form but the training one as an ONNX graph of any batch, typed in that precision."""
    exported = repaconv.export(folder / "run", target=target, precision=precision)
    taken = run_folder.find_run(folder / "run")
    written = {OURS: run_folder.onnx_model_of(taken, exported), **manual_baseline(folder, precision)}
    (folder / f"graphs.{precision}.json").write_text(json.dumps({name: str(path) for name, path in written.items()}))
    return {"verdict": exported.verdict}


def manual_baseline(folder: Path, precision: str) -> dict[str, Path]:
    """The official form and the vanilla network as graphs, written where they are not there yet."""
    from manual_baselines import export_and_session

    written = {}
    for name, file in ((OFFICIAL, "official.pt"), (VANILLA, "vanilla.pt")):
        if not (folder / file).is_file():
            continue
        written[name] = folder / f"{Path(file).stem}.{precision}.onnx"
        if not written[name].is_file():
            module = torch.load(folder / file, weights_only=False)
            typed = In(module, torch.float16) if precision == "fp16" else module
            part = written[name].with_suffix(".part")  # a step may be ended in the middle of it
            export_and_session.export(typed, (2, *truth(folder)[0].shape[1:]), part, free_batch=True)
            if precision == "bf16":  # torch's own would have a Conv of a type that ONNX does not allow
                onnx.save(to_bf16(onnx.load(part)), part)
            part.replace(written[name])
    return written

"""Re-parameterized families: compare repaconv's fold of the training-time network with the family's own conversion.

    python benchmarks/reparameterized_networks.py [--seconds N] [--page] [NAME ...]

Networks of timm, Ultralytics, spandrel, docTR and transformers come from these packages, with their own conversions;
the blocks of the other families are in `reparameterized_blocks.py`. Weights are random; BatchNorm has varied
statistics. Each network is folded in a process of its own. A row has the numbers of layers (convolutions and matrix
products) and nodes of the exported network, of its own inference-time form, and after `fold model.onnx`, `fold --arch`
and `repaconv.fold(module)`. Rows go to `benchmarks/results/reparameterized_networks.jsonl`; networks that have one are
skipped, so that an interrupted run resumes. ``--page`` writes `docs/reparameterized-families.md` from the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import reparameterized_blocks as blocks
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).resolve()
RESULTS, PAGE = (
    HERE.parent / "results" / "reparameterized_networks.jsonl",
    HERE.parents[1] / "docs" / "reparameterized-families.md",
)
SEEDS, LIMIT_S = range(3), 900
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class Family(NamedTuple):
    """A network, and what its authors make of it for inference.

    Attributes:
        title: Its name and what is special in its structure.
        build: Builds it as it is trained.
        deployed: Makes its inference-time form; None if its authors have none.
        size: Height and width of an image.
        source: The package, or what it was written from.
        dynamo: Whether PyTorch's newer exporter takes it; it ends with a segmentation fault where a forward assigns
            weights.
    """

    title: str
    build: Callable[[], nn.Module]
    deployed: Callable[[nn.Module], nn.Module] | None
    size: tuple[int, int] = (32, 32)
    source: str = "own writing"
    dynamo: bool = True


# --- Networks of our own, one for each block.


def own(*parts: nn.Module, width: int = 16) -> nn.Module:
    """A stem, the parts with activations between, and a head."""
    inner = [part for each in parts for part in (each, nn.ReLU())]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def acnet() -> nn.Module:
    return own(blocks.Asymmetric(16, 16), blocks.Asymmetric(16, 24, 2), width=24)


def qarepvgg() -> nn.Module:
    return own(blocks.QuantizationAware(16, 16), blocks.QuantizationAware(16, 24, 2), width=24)


def replknet() -> nn.Module:
    return own(blocks.LargeKernel(16, 13, 5), nn.Conv2d(16, 16, 1), blocks.LargeKernel(16, 9, 3))


def unireplknet() -> nn.Module:
    first = blocks.Dilated(16, 13, ((5, 1), (7, 2), (3, 3), (3, 4), (3, 5)))
    second = blocks.Dilated(16, 9, ((5, 1), (5, 2), (3, 3), (3, 4)))
    return own(nn.Sequential(first, nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)), second)


def repnext() -> nn.Module:
    return own(blocks.Chunks(16), nn.Conv2d(16, 16, 1), blocks.Copies(16), width=32)


def span_blocks() -> nn.Module:
    return own(blocks.Padded(16, 16), blocks.Padded(16, 24), width=24)


def ecb() -> nn.Module:
    return own(blocks.EdgeOriented(16, 16), blocks.EdgeOriented(16, 24), width=24)


def ecb_online() -> nn.Module:
    return own(blocks.EdgeOriented(16, 32, online=True), blocks.EdgeOriented(32, 32, online=True), width=32)


def dbb() -> nn.Module:
    return own(blocks.Diverse(16, 16), blocks.Diverse(16, 24, 2, 2), blocks.Diverse(24, 24, groups=24), width=24)


def orepa() -> nn.Module:
    return own(blocks.Online(16, 32), blocks.Online(32, 48, 2), width=48)


def implicit() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(), blocks.Implicit(16, 18))


# --- Networks of packages.


def _tensors(network: nn.Module) -> nn.Module:
    from task_networks import Tensors

    return Tensors(network)


def _timm(name: str, **more: Any) -> nn.Module:
    import timm

    module: nn.Module = timm.create_model(name, **more)
    return module


def _by_timm(module: nn.Module) -> nn.Module:
    from timm.models import reparameterize_model

    found: nn.Module = reparameterize_model(module)
    return found


def repvgg() -> nn.Module:
    from timm.models.byobnet import ByobNet, ByoModelCfg, _rep_vgg_bcfg

    return ByobNet(ByoModelCfg(blocks=_rep_vgg_bcfg(d=(1, 2, 2, 1), wf=(0.25,) * 4), stem_type="rep", stem_chs=16))


def mobileone() -> nn.Module:
    from timm.models.byobnet import ByobNet, ByoModelCfg, _mobileone_bcfg

    cfg = _mobileone_bcfg(d=(1, 2, 2, 1), wf=(0.5,) * 4, num_conv_branches=2)
    return ByobNet(ByoModelCfg(blocks=cfg, stem_type="one", stem_chs=16))


def repghost() -> nn.Module:
    return _timm("repghostnet_050")


def repvit() -> nn.Module:
    return _timm("repvit_m0_9", distillation=False, depth=(1, 1, 2, 1))


def mobileclip() -> nn.Module:
    return _timm("fastvit_mci0", layers=(1, 1, 2, 1))


def fastvithd() -> nn.Module:
    from timm.models.fastvit import LayerNorm2d

    dims, mixers = (24, 48, 96, 192, 384), ("repmixer", "repmixer", "repmixer", "attention", "attention")
    more = {"layers": (1, 1, 2, 1, 1), "embed_dims": dims, "mlp_ratios": (4,) * 5, "token_mixers": mixers}
    return _timm("fastvit_mci3", norm_layer=partial(LayerNorm2d, eps=1e-5), **more)


def edgenext() -> nn.Module:
    return _timm("edgenext_xx_small", depths=(1, 1, 2, 1))


def efficientformer() -> nn.Module:
    return _timm("efficientformer_l1", depths=(1, 1, 2, 2))


def efficientformerv2() -> nn.Module:
    return _timm("efficientformerv2_s0", depths=(1, 1, 2, 2))


def levit() -> nn.Module:
    return _timm("levit_128s")


def repconv() -> nn.Module:
    from ultralytics.nn.modules import Conv, RepConv

    return nn.Sequential(Conv(3, 16, 3, 2), RepConv(16, 16, bn=True), RepConv(16, 24, s=2), RepConv(24, 24))


def repcsp() -> nn.Module:
    from ultralytics.nn.modules import Conv, RepC3, RepNCSPELAN4, RepVGGDW

    return nn.Sequential(Conv(3, 16, 3, 2), RepC3(16, 16, 2), RepVGGDW(16), RepNCSPELAN4(16, 16, 16, 8, 1))


def _by_ultralytics(module: nn.Module) -> nn.Module:
    """What `DetectionModel.fuse` does to these layers."""
    from ultralytics.nn.modules import Conv, RepConv, RepVGGDW
    from ultralytics.utils.torch_utils import fuse_conv_and_bn

    for part in module.modules():
        if isinstance(part, RepConv):
            part.fuse_convs()
            part.forward = part.forward_fuse
        elif isinstance(part, RepVGGDW):
            part.fuse()
            part.forward = part.forward_fuse
    for part in module.modules():
        if isinstance(part, Conv) and hasattr(part, "bn"):
            part.conv = fuse_conv_and_bn(part.conv, part.bn)
            del part.bn
            part.forward = part.forward_fuse
    return module


def span() -> nn.Module:
    from spandrel.architectures.SPAN import SPAN

    return SPAN(num_in_ch=3, num_out_ch=3, feature_channels=16, upscale=2)


def _by_spandrel(module: nn.Module) -> nn.Module:
    """Conv3XC computes its one kernel in every forward; here it is computed once."""
    from spandrel.architectures.SPAN.__arch import span as package

    for name, part in list(module.named_modules()):
        if isinstance(part, package.Conv3XC):
            part.update_params()
            assert not part.has_relu
            module.set_submodule(name, part.eval_conv)
    return module


def pp_lcnet() -> nn.Module:
    from transformers.models.pp_lcnet_v3 import configuration_pp_lcnet_v3, modeling_pp_lcnet_v3

    kind = modeling_pp_lcnet_v3.PPLCNetV3LearnableRepLayer
    assert configuration_pp_lcnet_v3
    return nn.Sequential(
        kind(3, 16, 3, "hardswish", 2, 4), kind(16, 16, 3, "hardswish", 1, 4, groups=16), kind(16, 24, 1, "relu", 1, 4)
    )


def fast() -> nn.Module:
    from doctr.models import detection

    return _tensors(detection.fast_tiny(pretrained=False, pretrained_backbone=False, exportable=True))


def _by_doctr(module: nn.Module) -> nn.Module:
    from doctr.models.detection.fast.pytorch import reparameterize

    reparameterize(module.network)  # type: ignore[arg-type]
    return module


FAMILIES: dict[str, Family] = {
    "repconv": Family("RepConv, one activation for all layers", repconv, _by_ultralytics, source="Ultralytics"),
    "repcsp": Family("RepC3, RepVGGDW, RepNCSPELAN4", repcsp, _by_ultralytics, source="Ultralytics"),
    "repvgg": Family("RepVGG (fewer layers)", repvgg, _by_timm, (64, 64), "timm"),
    "mobileone": Family("MobileOne (fewer layers)", mobileone, _by_timm, (64, 64), "timm"),
    "span_blocks": Family("SPAN's Conv3XC, as it is trained", span_blocks, blocks.deployed),
    "span": Family("SPAN, kernels computed in every forward", span, _by_spandrel, (24, 24), "spandrel", dynamo=False),
    "ecb": Family("ECB, as it is trained", ecb, blocks.deployed),
    "ecb_online": Family("ECB, kernel computed in every forward", ecb_online, blocks.deployed),
    "replknet": Family("RepLKNet's parallel kernels", replknet, blocks.deployed),
    "repnext": Family("RepNeXt's kernels of all shapes", repnext, blocks.deployed),
    "unireplknet": Family("UniRepLKNet's dilated branches", unireplknet, blocks.deployed),
    "dbb": Family("Diverse Branch Block, also grouped and depthwise", dbb, blocks.deployed),
    "acnet": Family("ACNet", acnet, blocks.deployed),
    "orepa": Family("OREPA, kernel computed in every forward", orepa, blocks.deployed),
    "repghost": Family("RepGhostNet-0.5x", repghost, _by_timm, (64, 64), "timm"),
    "repvit": Family("RepViT-M0.9 (fewer layers)", repvit, _by_timm, (64, 64), "timm"),
    "mobileclip": Family("MobileCLIP's image encoder (MCi0, fewer layers)", mobileclip, _by_timm, (256, 256), "timm"),
    "fastvithd": Family("FastViTHD's five stages (narrow)", fastvithd, _by_timm, (256, 256), "timm"),
    "edgenext": Family("EdgeNeXt-XXS (fewer layers)", edgenext, None, (64, 64), "timm"),
    "efficientformer": Family("EfficientFormer-L1 (fewer layers)", efficientformer, None, (224, 224), "timm"),
    "efficientformerv2": Family("EfficientFormerV2-S0 (fewer layers)", efficientformerv2, None, (224,) * 2, "timm"),
    "levit": Family("LeViT-128S", levit, _by_timm, (224, 224), "timm"),
    "implicit": Family("YOLOv7's implicit knowledge", implicit, blocks.deployed),
    "qarepvgg": Family("QARepVGG, BatchNorm behind the sum", qarepvgg, blocks.deployed),
    "pp_lcnet": Family("PP-LCNetV3's learnable layers", pp_lcnet, None, source="transformers"),
    "fast": Family("FAST-tiny, text detection", fast, _by_doctr, (64, 64), "docTR"),
}


# --- Rows.


def network(name: str) -> nn.Module:
    """It in eval mode with random weights, and statistics that noise of its size has, varied."""
    from zoo_networks import drawn, measured

    torch.manual_seed(0)
    family = FAMILIES[name]
    module = family.build().eval().requires_grad_(False)
    measured(module, (3, *family.size))
    drawn(module)
    return module


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """``--arch reparameterized_networks.py:arch_NAME`` builds the network as it is."""
    if name.startswith("arch_") and name.removeprefix("arch_") in FAMILIES:
        return FAMILIES[name.removeprefix("arch_")].build
    raise AttributeError(name)


def exported(module: nn.Module, family: Family, path: str) -> tuple[int, int]:
    """Write it as ONNX, as torch's exporter does in float32; layers and nodes."""
    import onnx

    images = (torch.zeros(1, 3, *family.size),)
    if family.dynamo:
        more = {"dynamo": True, "external_data": False, "verbose": False}
        torch.onnx.export(module.float(), images, path, opset_version=20, **more)
    else:
        torch.onnx.export(module.float(), images, path, opset_version=17, dynamo=False)
    return counts(onnx.load(path))


def counts(model: Any) -> tuple[int, int]:
    """Layers with weights or products, and nodes but constants, of a graph."""
    nodes = [node.op_type for node in model.graph.node if node.op_type != "Constant"]
    return sum(kind in PRODUCTS for kind in nodes), len(nodes)


def apart(module: nn.Module, other: nn.Module, size: tuple[int, int]) -> float:
    """The largest difference of two networks in float64, relative to the largest number of the output."""
    module, other, worst = deepcopy(module).double(), deepcopy(other).double(), 0.0
    for seed in SEEDS:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            ends = module(images), other(images)
        for right, found in zip(*map(tree_leaves, ends), strict=True):
            worst = max(worst, float((found - right).abs().max() / right.abs().max()))
    return worst


def trained(name: str) -> dict[str, Any]:
    """The network as it is trained, and its own inference-time form."""
    family, module = FAMILIES[name], network(name)
    found: dict[str, Any] = {"counts": exported(deepcopy(module), family, "model.onnx")}
    if family.deployed is not None:
        with torch.no_grad():
            own = family.deployed(deepcopy(module).double())
        found["error"] = apart(module, own, family.size)
        found["own"] = exported(own, family, "own.onnx")
    return found


def by_graph(name: str) -> dict[str, Any]:
    """``fold model.onnx``; the rewrites are compared in float64."""
    import onnx

    from repaconv.graph.element_type_conversion import to_float64
    from repaconv.graph.models_in_onnx_ir import rewritten
    from repaconv.rewrites.fold.fold_pipeline import FOLDS
    from repaconv.verification.float64_graphs import Float64

    size = FAMILIES[name].size
    if not Path("model.onnx").is_file():
        exported(network(name), FAMILIES[name], "model.onnx")
    found = _run("model.onnx")
    model = to_float64(onnx.load("model.onnx"))
    images = {model.graph.input[0].name: torch.randn(1, 3, *size, dtype=torch.float64).numpy()}
    ends = [Float64(each).run(images).values() for each in (model, rewritten(model, FOLDS)[0])]
    error = max(abs(after - before).max() / abs(before).max() for before, after in zip(*ends, strict=True))
    return {**found, "error": float(error)}


def by_arch(name: str) -> dict[str, Any]:
    """``fold weights.pth --arch reparameterized_networks.py:arch_NAME``; the command compares in float64."""
    torch.save(network(name).state_dict(), "weights.pth")
    height, width = FAMILIES[name].size
    return _run("weights.pth", arch=f"{HERE}:arch_{name}", settings={"image_size": f"{height}x{width}"})


def _run(path: str, **how: Any) -> dict[str, Any]:
    import onnx

    import repaconv
    from repaconv.core.errors import RepaconvError

    try:
        fold = repaconv.fold(path, measure=False, **how)
    except RepaconvError as error:
        return {"refused": f"{error.code}: {error.message}"}
    graph = onnx.load(next(Path("repaconv-out", Path(path).stem).glob("*.folded.onnx")))
    errors = [link.figures.error_in_float64 or 0.0 for link in fold.links]
    more = {"verdict": fold.verdict, "not_folded": fold.not_folded, "reverted": fold.reverted}
    return {"counts": counts(graph), "error": max(errors, default=0.0), **more}


def by_module(name: str) -> dict[str, Any]:
    """``repaconv.fold(module)`` in float64."""
    import repaconv
    from repaconv.core.errors import RepaconvError

    family, module = FAMILIES[name], network(name).double()
    example = torch.randn(2, 3, *family.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        folded = repaconv.fold(module, example=example)
    except RepaconvError as error:
        return {"refused": f"{error.code}: {error.message}"}
    error = apart(module, folded, family.size)
    left = [why for step in folded.fold_certificate for why in step.not_folded]
    return {"counts": exported(folded, family, "module.onnx"), "error": error, "not_folded": left}


ALL = "all"
DOORS: dict[str, Callable[[str], dict[str, Any]]] = {
    "trained": trained,
    "graph": by_graph,
    "arch": by_arch,
    "module": by_module,
}


def _in_its_own(name: str, door: str) -> dict[str, Any]:
    """The rows of one door or all, in a process and a folder of its own; of one that dies, how it did."""
    command = [sys.executable, str(HERE), name, "--door", door]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
        except subprocess.TimeoutExpired:
            return {door: {"problem": f"took longer than {LIMIT_S} s"}}
    if done.returncode:
        return {door: {"problem": f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"[:300]}}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def known() -> dict[str, dict[str, Any]]:
    """The rows so far, by name."""
    lines = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    return {name: rows[name] for name in FAMILIES if name in rows}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help=f"of {', '.join(FAMILIES)}; all if left out")
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no row after so many")
    options.add_argument("--page", action="store_true", help="write the page from the results only")
    options.add_argument("--door", choices=(*DOORS, ALL), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.door:
        doors = DOORS if given.door == ALL else [given.door]
        sys.stdout.write(json.dumps({door: DOORS[door](given.names[0]) for door in doors}) + "\n")
        return
    end = time.monotonic() + given.seconds
    for name in [] if given.page else given.names or [name for name in FAMILIES if name not in known()]:
        if time.monotonic() < end:
            found = _in_its_own(name, ALL)
            if ALL in found:  # one of them died
                found = {key: one for door in DOORS for key, one in _in_its_own(name, door).items()}
            row = {"name": name, **found}
            rows = {**known(), name: row}
            RESULTS.write_text("".join(json.dumps(rows[each]) + "\n" for each in FAMILIES if each in rows))
            sys.stdout.write(f"{name}: {', '.join(map(str, outcome_of(row)))}\n")
            sys.stdout.flush()
    PAGE.write_text(page())


def outcome_of(row: dict[str, Any]) -> list[str]:
    """The counts of a row, or what went wrong."""
    return [json.dumps(row[door].get("counts", row[door])) for door in DOORS]


# --- The page.

INTRODUCTION = """# Re-parameterized families

Each network is here as it is trained, with its parallel branches, layers in series and computed weights. The table
compares what repaconv leaves of it with what the family's own conversion leaves (`switch_to_deploy`, `reparameterize`,
`fuse`). *Layers* are convolutions and matrix products, *nodes* are all nodes of the ONNX graph that PyTorch's exporter
writes. Each network was folded in three ways: `fold model.onnx`, `fold weights.pth --arch` and
`repaconv.fold(module)`, which is exported afterwards. A fold *reaches* the own conversion if it has no more layers
and no more nodes; where it does not, the number is bold. `--arch` exports with a dynamic batch, which can take some
more nodes for shapes; the other columns are of one image.

The last column is the largest difference in float64 of all three, relative to the largest output; deep networks of
random weights amplify rounding, in their own conversion as well. Networks are small,
with random weights and varied BatchNorm statistics. *Own writing* means that the block was written for this table from
the paper's equations, conversion included, since no installed package has it.

`make bench-reparameterized` resumes and writes this page from `benchmarks/results/reparameterized_networks.jsonl`.
"""


def page() -> str:
    """The page, from the results."""
    rows = known()
    doors = {"graph": "`fold model.onnx`", "arch": "`--arch`", "module": "module"}
    reached = {door: sum(reaches(row, door) for row in rows.values()) for door in doors}
    own = sum("own" in row["trained"] for row in rows.values())
    message = ", ".join(f"{reached[door]} by {what}" for door, what in doors.items())
    head = "| Network | From | As trained: layers, nodes | Own conversion | `fold model.onnx` | `--arch` | module |"
    lines = [f"{head} float64 |", "|---|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        family = FAMILIES[name]
        cells = [_counted(row["trained"].get("counts")), _counted(row["trained"].get("own")) or "none"]
        cells += [_cell(row, door) for door in doors]
        errors = [row[door].get("error") for door in doors]
        error = max((one for one in errors if one is not None), default=0.0)
        lines.append(f"| {family.title} | {family.source} | {' | '.join(cells)} | {error:.0e} |")
    summary = f"Of {own} networks with a conversion of their own, these come to what it leaves, or to less: {message}."
    return "\n".join([INTRODUCTION, summary, "", *lines, "", *_left(rows)]).rstrip() + "\n"


def reaches(row: dict[str, Any], door: str) -> bool:
    """Whether a door leaves no more layers and nodes than the family's own conversion."""
    own, ours = row["trained"].get("own"), row[door].get("counts")
    return own is not None and ours is not None and all(a <= b for a, b in zip(ours, own, strict=True))


def _counted(found: list[int] | None) -> str:
    return f"{found[0]}, {found[1]}" if found else ""


def _cell(row: dict[str, Any], door: str) -> str:
    """The counts of a door; in bold where the own conversion leaves less."""
    if "counts" not in row[door]:
        return "refused" if "refused" in row[door] else "failed"
    missed = "own" in row["trained"] and not reaches(row, door)
    return f"**{_counted(row[door]['counts'])}**" if missed else _counted(row[door]["counts"])


def _left(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each door that gives no network."""
    problems = [
        f"- {FAMILIES[name].title}, {door}: {row[door].get('refused') or row[door]['problem']}"
        for name, row in rows.items()
        for door in ("graph", "arch", "module")
        if "counts" not in row[door]
    ]
    return ["## What is refused", "", *problems] if problems else []


if __name__ == "__main__":
    main()

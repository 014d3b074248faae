"""The arbitrary networks: classifiers, detectors, segmenters, super-resolution, text in images.

Weights are random and BatchNorm has varied statistics, but in the two networks of PP-OCR, which are the trained files
that the package `rapidocr-onnxruntime` installs. Each graph is what `torch.onnx.export` writes, or the file, with fixed
sizes. They come from timm, Ultralytics, segmentation_models_pytorch, spandrel and transformers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Original(NamedTuple):
    """A network.

    Attributes:
        name: Its name in `--rows`.
        shape: Channels, height and width of an image.
        build: Makes its module; None if there is only an ONNX file.
        file: Returns the path of its ONNX file, whose weights are trained.
    """

    name: str
    shape: tuple[int, int, int]
    build: Callable[[], nn.Module] | None = None
    file: Callable[[], Path] | None = None


class _FirstTensor(nn.Module):
    """A network whose only output is the first tensor that the wrapped network returns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        leaves = tree_leaves(self.network(images))
        return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    module: nn.Module = timm.create_model(name, **settings)
    return module


def _ultralytics(config: str) -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    network: nn.Module = DetectionModel(config, verbose=False)
    for part in network.modules():
        if hasattr(part, "export"):
            part.export, part.format = True, "onnx"
    return _FirstTensor(network)


def _smp(kind: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch

    module: nn.Module = getattr(segmentation_models_pytorch, kind)(encoder, encoder_weights=None, classes=21)
    return module


def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return _FirstTensor(SegformerForSemanticSegmentation(SegformerConfig()))  # its defaults are b0


def _compact() -> nn.Module:
    from spandrel.architectures.Compact import Compact

    module: nn.Module = Compact()
    return module


def _ocr(name: str) -> Path:
    found = find_spec("rapidocr_onnxruntime")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("pip install rapidocr-onnxruntime has the trained files of PP-OCR")
    return Path(found.origin).parent / "models" / name


def _of_timm(name: str, called: str = "", size: int = 224, **settings: Any) -> Original:
    return Original(name, (3, size, size), partial(_timm, called or name, **settings))


NETWORKS = (
    _of_timm("mobilenetv3_large", "mobilenetv3_large_100"),
    _of_timm("levit_128"),
    _of_timm("mobileone_s1"),
    _of_timm("fastvit_t8", size=256),
    _of_timm("efficientnet_b0"),
    _of_timm("efficientvit_b1"),
    _of_timm("vit_tiny", "vit_tiny_patch16_224"),
    _of_timm("mambaout_femto"),
    _of_timm("regnety_008"),
    _of_timm("repvgg_a0"),
    _of_timm("tiny_vit_11m", "tiny_vit_11m_224"),
    Original("yolov8n", (3, 320, 320), partial(_ultralytics, "yolov8n.yaml")),
    Original("yolo11n", (3, 320, 320), partial(_ultralytics, "yolo11n.yaml")),
    Original("ppocr_v4_recognizer", (3, 48, 320), file=partial(_ocr, "ch_PP-OCRv4_rec_infer.onnx")),
    Original("ppocr_v4_detector", (3, 320, 320), file=partial(_ocr, "ch_PP-OCRv4_det_infer.onnx")),
    Original("compact_x4", (3, 64, 64), _compact),
    Original("segformer_b0", (3, 224, 224), _segformer),
    Original("deeplabv3plus_mobilenet_v2", (3, 224, 224), partial(_smp, "DeepLabV3Plus", "mobilenet_v2")),
    _of_timm("resnet50"),
    _of_timm("deit_small", "deit_small_patch16_224"),
    _of_timm("coat_mini"),
    _of_timm("swin_tiny", "swin_tiny_patch4_window7_224"),
    _of_timm("convnext_tiny"),
    _of_timm("dinov2_small", "vit_small_patch14_dinov2", img_size=224),
    Original("unet_resnet18", (3, 224, 224), partial(_smp, "Unet", "resnet18")),
)
"""Sorted by size, the smallest first."""


def module_of(network: Original, weights: Path) -> nn.Module | None:
    """Its module in eval mode, with seeded weights that are saved to a file; None if there is only an ONNX file."""
    if network.build is None:
        return None
    from zoo_networks import drawn, load_torchvision, measured

    load_torchvision()
    torch.manual_seed(0)
    module = network.build().eval().requires_grad_(False)
    if weights.is_file():
        module.load_state_dict(torch.load(weights))
        return module
    drawn(module)
    measured(module, network.shape)
    torch.save(module.state_dict(), weights)
    return module


def write_graph(network: Original, module: nn.Module | None, path: Path, batch: int) -> None:
    """Write the original graph that every tool gets, with fixed sizes."""
    shape = (batch, *network.shape)
    if module is None:
        assert network.file is not None
        onnx.save(_fixed(onnx.load(network.file()), shape), path)
        return
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, (torch.zeros(shape),), dynamo=True, verbose=False)
    assert program is not None
    onnx.save(program.model_proto, path)


def _fixed(model: onnx.ModelProto, shape: tuple[int, ...]) -> onnx.ModelProto:
    """The model with that input shape, and with the output shapes that ONNX Runtime computes for it."""
    import onnxruntime

    for size, dim in zip(shape, model.graph.input[0].type.tensor_type.shape.dim, strict=True):
        dim.dim_value = size
    del model.graph.value_info[:]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {model.graph.input[0].name: np.zeros(shape, np.float32)})
    for output, array in zip(model.graph.output, found, strict=True):
        fixed = onnx.helper.make_tensor_value_info(output.name, output.type.tensor_type.elem_type, array.shape)
        output.CopyFrom(fixed)
    return model

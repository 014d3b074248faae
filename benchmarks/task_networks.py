"""Networks of every task but classification: detection, segmentation, restoration, text, keypoints, depth, embedding.

They come from Ultralytics, torchvision, transformers, segmentation-models-pytorch, timm, spandrel, docTR and RapidOCR,
which must be installed. Weights are random (those of RapidOCR are PP-OCR's trained ones); BatchNorm has varied
statistics. ``--arch task_networks.py:NAME`` builds each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo_networks import _move, drawn, load_torchvision, measured

load_torchvision(boxes=True)  # packages import it

Size = tuple[int, int]


class TaskNetwork(NamedTuple):
    """A network, and the images that it gets.

    Attributes:
        build: Builds it; None if it is an ONNX file of a package.
        task: What it is for.
        title: Its name, and what was reduced.
        package: Where it is from.
        size: Height and width of an image when it is folded and verified.
        timed: Height and width of an image when it is timed; None: the same.
        dynamo: Whether PyTorch's newer exporter takes it.
        file: The ONNX file, in the folder of its package.
    """

    build: Callable[[], nn.Module] | None
    task: str
    title: str
    package: str
    size: Size
    timed: Size | None = None
    dynamo: bool = True
    file: str = ""


class Tensors(nn.Module):
    """What a network gives, as tensors alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(self.network(images)) if isinstance(leaf, torch.Tensor))


class _Listed(nn.Module):
    """A detector of torchvision, which takes a list of images and gives a list of objects."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = self.network([*images.unbind(0)])
        return found


class _Heads(nn.Module):
    """The same without its choice of boxes: what its heads give for every anchor."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> Any:
        return self.network.head([*self.network.backbone(images).values()])  # type: ignore[operator]


# --- One function for each package.


def _ultralytics(kind: str, config: str) -> nn.Module:
    from ultralytics.nn import tasks

    network: nn.Module = getattr(tasks, kind)(config, verbose=False)
    for part in network.modules():
        if hasattr(part, "export"):
            part.export, part.format = True, "onnx"
    return Tensors(network)


def _torchvision(kind: str, name: str, **more: Any) -> nn.Module:
    from torchvision import models

    network: nn.Module = getattr(getattr(models, kind), name)(weights=None, weights_backbone=None, **more)
    return network


def _segmenter(name: str) -> nn.Module:
    return Tensors(_torchvision("segmentation", name, num_classes=5))


def _detector(name: str, *, heads: bool = False, **more: Any) -> nn.Module:
    return Tensors((_Heads if heads else _Listed)(_torchvision("detection", name, **more)))


def _retinanet(*, heads: bool = False) -> nn.Module:
    """Its ResNet has 18 layers."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    last = LastLevelP6P7(256, 256)
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, returned_layers=[2, 3, 4], extra_blocks=last, trainable_layers=5
    )
    sides = {"min_size": 320, "max_size": 320}
    return Tensors((_Heads if heads else _Listed)(RetinaNet(backbone, 91, **sides)))


def _faster_rcnn() -> nn.Module:
    """Boxes of random weights lie so far outside of the image that none is left, unless they move little."""
    network = _torchvision("detection", "fasterrcnn_mobilenet_v3_large_320_fpn", rpn_score_thresh=0.0)
    network.rpn.box_coder.weights = network.roi_heads.box_coder.weights = (1e5,) * 4  # type: ignore[union-attr,assignment]
    return Tensors(_Listed(network))


def _smp(decoder: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch

    network: nn.Module = getattr(segmentation_models_pytorch, decoder)(encoder, encoder_weights=None, classes=5)
    return Tensors(network)


def _spandrel(name: str, called: str = "", module: str = "", **settings: Any) -> nn.Module:
    from importlib import import_module

    package = import_module(f"spandrel.architectures.{name}{module}")
    return Tensors(getattr(package, called or name)(**settings))


def _doctr(kind: str, name: str) -> nn.Module:
    from doctr import models

    network = getattr(getattr(models, kind), name)
    return Tensors(network(pretrained=False, pretrained_backbone=False, exportable=True))


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    return Tensors(timm.create_model(name, **settings))


def _transformers(kind: str, config: Callable[[Any], dict[str, Any]] | None = None, **settings: Any) -> nn.Module:
    """A model of a configuration, which may be made of others."""
    import transformers

    more = config(transformers) if config else {}
    model = getattr(transformers, kind)
    return Tensors(model(model.config_class(**settings, **more)))


# --- Configurations that are made of others.

NARROW = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}


def _resnet(library: Any) -> dict[str, Any]:
    """A narrow backbone of RT-DETR."""
    backbone = library.RTDetrResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[2, 2, 2, 2], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    return {"backbone_config": backbone, "backbone": None, "use_timm_backbone": False}


def _resnet_of_detr(library: Any) -> dict[str, Any]:
    backbone = library.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[2, 2, 2, 2], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    return {"backbone_config": backbone, "backbone": None, "use_timm_backbone": False}


def _dinov2(library: Any) -> dict[str, Any]:
    backbone = library.Dinov2Config(
        image_size=224, patch_size=14, reshape_hidden_states=False, apply_layernorm=True,
        out_features=["stage2", "stage3", "stage5", "stage6"], **NARROW,
    )  # fmt: skip
    return {"backbone_config": backbone, "reassemble_hidden_size": 192}


def _vitpose(library: Any) -> dict[str, Any]:
    return {"backbone_config": library.VitPoseBackboneConfig(image_size=[256, 192], out_features=["stage6"], **NARROW)}


def _convnext(library: Any) -> dict[str, Any]:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    return {
        "backbone_config": library.ConvNextConfig(
            hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], out_features=stages
        )
    }


class _YOLOX(nn.Module):
    """YOLOX's structure in layers of Ultralytics: Focus, CSP stages, SPP, a PAN, heads of two branches."""

    def __init__(self, width: int = 16, classes: int = 80) -> None:
        from ultralytics.nn.modules import C3, SPP, Conv, Focus

        super().__init__()
        sizes = [width * 2**level for level in range(1, 5)]
        self.stem = Focus(3, width, 3)
        downs = zip([width, *sizes], sizes, strict=False)
        self.stages = nn.ModuleList(
            nn.Sequential(Conv(one, two, 3, 2), *([SPP(two, two)] if two == sizes[-1] else []), C3(two, two, 1))
            for one, two in downs
        )
        low, middle, high = sizes[1:]
        self.up = nn.Upsample(scale_factor=2)
        self.lateral = nn.ModuleList([Conv(high, middle, 1), Conv(middle, low, 1)])
        self.upper = nn.ModuleList([C3(2 * middle, middle, 1, False), C3(2 * low, low, 1, False)])
        self.down = nn.ModuleList([Conv(low, low, 3, 2), Conv(middle, middle, 3, 2)])
        self.lower = nn.ModuleList([C3(2 * low, middle, 1, False), C3(2 * middle, high, 1, False)])
        self.head_stems = nn.ModuleList(Conv(each, low, 1) for each in (low, middle, high))
        branch = partial(nn.ModuleList, [])
        self.classes, self.boxes = branch(), branch()
        self.class_layers, self.box_layers, self.object_layers = branch(), branch(), branch()
        for _ in range(3):
            self.classes.append(nn.Sequential(Conv(low, low, 3), Conv(low, low, 3)))
            self.boxes.append(nn.Sequential(Conv(low, low, 3), Conv(low, low, 3)))
            self.class_layers.append(nn.Conv2d(low, classes, 1))
            self.box_layers.append(nn.Conv2d(low, 4, 1))
            self.object_layers.append(nn.Conv2d(low, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps, x = [], self.stem(images)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        top = self.lateral[0](maps[3])
        between = self.lateral[1](self.upper[0](torch.cat([self.up(top), maps[2]], 1)))
        levels = [self.upper[1](torch.cat([self.up(between), maps[1]], 1))]
        for down, lower, other in zip(self.down, self.lower, (between, top), strict=True):
            levels.append(lower(torch.cat([down(levels[-1]), other], 1)))
        return torch.cat([self._objects(level, features) for level, features in enumerate(levels)], 1)

    def _objects(self, level: int, features: torch.Tensor) -> torch.Tensor:
        """Boxes in pixels, and probabilities, of one level."""
        features, stride = self.head_stems[level](features), 8 * 2**level
        of_box = self.boxes[level](features)
        classes = self.class_layers[level](self.classes[level](features)).sigmoid()
        found = torch.cat([self.box_layers[level](of_box), self.object_layers[level](of_box).sigmoid(), classes], 1)
        height, width = features.shape[2:]
        rows, columns = torch.arange(height), torch.arange(width)
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).reshape(1, -1, 2).to(features.dtype)
        found = found.flatten(2).transpose(1, 2)
        centers, sizes = (found[..., :2] + grid) * stride, nn.functional.softplus(found[..., 2:4]) * stride
        return torch.cat([centers, sizes, found[..., 4:]], -1)


DETECT, SEGMENT, RESTORE = "detection", "segmentation", "restoration"
TEXT, KEYPOINTS, DEPTH, EMBED = "text", "keypoints", "depth", "embedding"
YOLO, VISION, HF, SMP, SR, DOCTR, RAPID = (
    "Ultralytics",
    "torchvision",
    "transformers",
    "segmentation-models-pytorch",
    "spandrel",
    "docTR",
    "RapidOCR",
)


def _yolo(title: str, config: str, task: str = DETECT, kind: str = "DetectionModel") -> TaskNetwork:
    return TaskNetwork(partial(_ultralytics, kind, config), task, title, YOLO, (64, 64), (320, 320))


def _of_smp(decoder: str, encoder: str) -> TaskNetwork:
    size = (128, 128) if decoder == "PAN" else (64, 64)
    return TaskNetwork(partial(_smp, decoder, encoder), SEGMENT, f"{decoder}, {encoder}", SMP, size, (256, 256))


def _of_spandrel(title: str, name: str, timed: Size = (96, 96), **settings: Any) -> TaskNetwork:
    dynamo = settings.pop("dynamo", True)
    return TaskNetwork(partial(_spandrel, name, **settings), RESTORE, title, SR, (32, 32), timed, dynamo)


def _of_transformers(
    title: str, task: str, size: Size, timed: Size | None, kind: str, config: Any = None, **settings: Any
) -> TaskNetwork:
    return TaskNetwork(partial(_transformers, kind, config, **settings), task, title, HF, size, timed)


def _of_doctr(title: str, kind: str, name: str, size: Size, timed: Size | None = None) -> TaskNetwork:
    return TaskNetwork(partial(_doctr, kind, name), TEXT, title, DOCTR, size, timed)


def _of_torchvision(
    title: str, task: str, build: Callable[[], nn.Module], size: Size, timed: Size, **more: Any
) -> TaskNetwork:
    return TaskNetwork(build, task, title, VISION, size, timed, **more)


_SMALL_DETR = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
               "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}  # fmt: skip
_RT_DETR = {**_SMALL_DETR, "encoder_layers": 1, "encoder_hidden_dim": 128, "encoder_in_channels": [64, 96, 128],
            "decoder_in_channels": [128, 128, 128], "num_queries": 100}  # fmt: skip

NETWORKS: dict[str, TaskNetwork] = {
    "yolov8n": _yolo("YOLOv8n", "yolov8n.yaml"),
    "yolov9t": _yolo("YOLOv9t", "yolov9t.yaml"),
    "yolov10n": _yolo("YOLOv10n", "yolov10n.yaml"),
    "yolo11n": _yolo("YOLO11n", "yolo11n.yaml"),
    "yolo12n": _yolo("YOLO12n", "yolo12n.yaml"),
    "yolo26n": _yolo("YOLO26n", "yolo26n.yaml"),
    "rtdetr": TaskNetwork(
        partial(_ultralytics, "RTDETRDetectionModel", "rtdetr-l.yaml"),
        DETECT,
        "RT-DETR-L",
        YOLO,
        (160, 160),
        (320, 320),
    ),
    "rtdetr_transformers": _of_transformers(
        "RT-DETR, narrow", DETECT, (160, 160), (320, 320), "RTDetrForObjectDetection", _resnet, **_RT_DETR
    )._replace(dynamo=False),
    "rtdetrv2": _of_transformers(
        "RT-DETRv2, narrow", DETECT, (160, 160), (320, 320), "RTDetrV2ForObjectDetection", _resnet, **_RT_DETR
    )._replace(dynamo=False),
    "detr": _of_transformers(
        "DETR, narrow", DETECT, (96, 96), (320, 320), "DetrForObjectDetection", _resnet_of_detr, **_SMALL_DETR
    ),
    "yolos": _of_transformers(
        "YOLOS, narrow",
        DETECT,
        (224, 224),
        None,
        "YolosForObjectDetection",
        image_size=[224, 224],
        num_detection_tokens=50,
        **NARROW,
    ),
    "yolox": TaskNetwork(
        lambda: Tensors(_YOLOX()), DETECT, "YOLOX-nano's structure", "own writing", (64, 64), (320, 320)
    ),
    "ssdlite": _of_torchvision(
        "SSDLite, MobileNetV3, with NMS",
        DETECT,
        partial(_detector, "ssdlite320_mobilenet_v3_large"),
        (320, 320),
        (320, 320),
        dynamo=False,
    ),
    "ssdlite_heads": _of_torchvision(
        "SSDLite, MobileNetV3, without NMS",
        DETECT,
        partial(_detector, "ssdlite320_mobilenet_v3_large", heads=True),
        (64, 64),
        (320, 320),
    ),
    "faster_rcnn": _of_torchvision(
        "Faster R-CNN, MobileNetV3-320",
        DETECT,
        _faster_rcnn,
        (320, 320),
        (320, 320),
        dynamo=False,
    ),
    "retinanet": _of_torchvision(
        "RetinaNet, ResNet-18, with NMS", DETECT, _retinanet, (320, 320), (320, 320), dynamo=False
    ),
    "retinanet_heads": _of_torchvision(
        "RetinaNet, ResNet-18, without NMS", DETECT, partial(_retinanet, heads=True), (64, 64), (320, 320)
    ),
    "yolov8n_seg": _yolo("YOLOv8n-seg", "yolov8n-seg.yaml", SEGMENT, "SegmentationModel"),
    "yolo11n_seg": _yolo("YOLO11n-seg", "yolo11n-seg.yaml", SEGMENT, "SegmentationModel"),
    "smp_unet": _of_smp("Unet", "mobileone_s0"),
    "smp_fpn": _of_smp("FPN", "mit_b0"),
    "smp_deeplab": _of_smp("DeepLabV3Plus", "resnet18"),
    "smp_unetplusplus": _of_smp("UnetPlusPlus", "mobilenet_v2"),
    "smp_linknet": _of_smp("Linknet", "efficientnet-b0"),
    "smp_manet": _of_smp("MAnet", "timm-skresnet18"),
    "smp_pan": _of_smp("PAN", "timm-tf_efficientnet_lite0"),
    "smp_segformer": _of_smp("Segformer", "densenet121"),
    "smp_upernet": _of_smp("UPerNet", "tu-convnext_atto"),
    "lraspp": _of_torchvision(
        "LRASPP, MobileNetV3", SEGMENT, partial(_segmenter, "lraspp_mobilenet_v3_large"), (64, 64), (256, 256)
    ),
    "deeplabv3": _of_torchvision(
        "DeepLabV3, MobileNetV3", SEGMENT, partial(_segmenter, "deeplabv3_mobilenet_v3_large"), (64, 64), (256, 256)
    ),
    "fcn": _of_torchvision("FCN, ResNet-50", SEGMENT, partial(_segmenter, "fcn_resnet50"), (64, 64), (128, 128)),
    "segformer": _of_transformers("SegFormer-B0", SEGMENT, (64, 64), (256, 256), "SegformerForSemanticSegmentation"),
    "upernet": _of_transformers(
        "UPerNet, ConvNeXt, narrow",
        SEGMENT,
        (64, 64),
        (256, 256),
        "UperNetForSemanticSegmentation",
        _convnext,
        hidden_size=128,
        auxiliary_in_channels=192,
        num_labels=20,
    ),
    "sam": _of_transformers(
        "SAM's image encoder, narrow",
        SEGMENT,
        (256, 256),
        None,
        "SamVisionModel",
        image_size=256,
        window_size=7,
        global_attn_indexes=[2, 5],
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        mlp_dim=768,
    ),
    "esrgan": _of_spandrel("ESRGAN, 2 blocks of 16 channels", "ESRGAN", num_filters=16, num_blocks=2),
    "span": _of_spandrel(
        "SPAN, 16 channels", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=16, upscale=2, dynamo=False
    ),
    "realplksr": _of_spandrel(
        "RealPLKSR, 2 blocks", "PLKSR", called="RealPLKSR", n_blocks=2, dim=32, upscaling_factor=2
    ),
    "safmn": _of_spandrel("SAFMN, 2 blocks of 16 channels", "SAFMN", dim=16, n_blocks=2),
    "omnisr": _of_spandrel("OmniSR, 1 block", "OmniSR", num_feat=32, res_num=1, block_num=1, up_scale=2),
    "nafnet": _of_spandrel(
        "NAFNet, width 16",
        "NAFNet",
        (128, 128),
        width=16,
        middle_blk_num=1,
        enc_blk_nums=[1, 1, 2],
        dec_blk_nums=[1, 1, 1],
    ),
    "swinir": _of_spandrel(
        "SwinIR, 2 blocks of 30 channels",
        "SwinIR",
        (64, 64),
        upscale=2,
        img_size=64,
        window_size=8,
        img_range=1.0,
        depths=[2, 2],
        embed_dim=30,
        num_heads=[3, 3],
        mlp_ratio=2.0,
        upsampler="pixelshuffledirect",
    ),
    "compact": _of_spandrel(
        "Compact, 8 convolutions of 32 channels",
        "Compact",
        called="SRVGGNetCompact",
        module=".__arch.SRVGG",
        num_feat=32,
        num_conv=8,
    ),
    "dncnn": _of_spandrel("DnCNN, color", "DnCNN", in_nc=3, out_nc=3, nc=32, nb=10, act_mode="BR"),
    "drunet": _of_spandrel("DRUNet, narrow", "DRUNet", in_nc=3, out_nc=3, nc=[16, 32, 48, 64], nb=2),
    "fast": _of_doctr("FAST-tiny", "detection", "fast_tiny", (64, 64), (256, 256)),
    "dbnet": _of_doctr("DBNet, MobileNetV3", "detection", "db_mobilenet_v3_large", (64, 64), (256, 256)),
    "linknet": _of_doctr("LinkNet, ResNet-18", "detection", "linknet_resnet18", (64, 64), (256, 256)),
    "crnn": _of_doctr("CRNN, MobileNetV3", "recognition", "crnn_mobilenet_v3_small", (32, 128)),
    "vitstr": _of_doctr("ViTSTR-small", "recognition", "vitstr_small", (32, 128)),
    "viptr": _of_doctr("VIPTR-tiny", "recognition", "viptr_tiny", (32, 128)),
    "parseq": _of_doctr("PARSeq", "recognition", "parseq", (32, 128)),
    "ppocr_det": TaskNetwork(
        None, TEXT, "PP-OCRv4, detector, trained", RAPID, (320, 320), file="models/ch_PP-OCRv4_det_infer.onnx"
    ),
    "ppocr_rec": TaskNetwork(
        None, TEXT, "PP-OCRv4, recognizer, trained", RAPID, (48, 320), file="models/ch_PP-OCRv4_rec_infer.onnx"
    ),
    "ppocr_cls": TaskNetwork(
        None,
        TEXT,
        "PP-OCR, direction of a line, trained",
        RAPID,
        (48, 192),
        file="models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    ),
    "yolov8n_pose": _yolo("YOLOv8n-pose", "yolov8n-pose.yaml", KEYPOINTS, "PoseModel"),
    "yolo11n_pose": _yolo("YOLO11n-pose", "yolo11n-pose.yaml", KEYPOINTS, "PoseModel"),
    "vitpose": _of_transformers(
        "ViTPose, narrow",
        KEYPOINTS,
        (256, 192),
        None,
        "VitPoseForPoseEstimation",
        _vitpose,
        num_labels=17,
        scale_factor=4,
    ),
    "superpoint": _of_transformers("SuperPoint", KEYPOINTS, (64, 64), (240, 320), "SuperPointForKeypointDetection"),
    "dpt": _of_transformers(
        "DPT, narrow",
        DEPTH,
        (224, 224),
        None,
        "DPTForDepthEstimation",
        image_size=224,
        backbone_out_indices=[1, 3, 4, 5],
        neck_hidden_sizes=[48, 96, 192, 192],
        fusion_hidden_size=64,
        **NARROW,
    ),
    "depth_anything": _of_transformers(
        "Depth Anything, narrow",
        DEPTH,
        (224, 224),
        None,
        "DepthAnythingForDepthEstimation",
        _dinov2,
        neck_hidden_sizes=[24, 48, 96, 192],
        fusion_hidden_size=48,
    ),
    "glpn": _of_transformers("GLPN", DEPTH, (64, 64), (256, 256), "GLPNForDepthEstimation"),
    "clip": _of_transformers(
        "CLIP's image encoder, narrow",
        EMBED,
        (224, 224),
        None,
        "CLIPVisionModelWithProjection",
        patch_size=16,
        **NARROW,
    ),
    "siglip": _of_transformers(
        "SigLIP's image encoder, narrow",
        EMBED,
        (224, 224),
        None,
        "SiglipVisionModel",
        image_size=224,
        patch_size=16,
        **NARROW,
    ),
    "dinov2": _of_transformers(
        "DINOv2, narrow", EMBED, (224, 224), None, "Dinov2Model", image_size=224, patch_size=14, **NARROW
    ),
    "mobileclip": TaskNetwork(
        partial(_timm, "fastvit_mci0", num_classes=0), EMBED, "MobileCLIP-S0's image encoder", "timm", (256, 256)
    ),
}


def network(name: str) -> nn.Module:
    """It in eval mode with random weights, and statistics that noise of its size has, varied."""
    torch.manual_seed(0)
    made = NETWORKS[name]
    assert made.build is not None, f"{name} is an ONNX file"
    module = made.build().eval().requires_grad_(False)
    _move(module)
    measured(module, (3, *made.size))
    drawn(module)
    return module


def file_of(name: str) -> Path:
    """The ONNX file of a network that is one."""
    from importlib.util import find_spec

    spec = find_spec("rapidocr_onnxruntime")
    assert spec is not None, "rapidocr-onnxruntime is absent"
    assert spec.origin is not None
    return Path(spec.origin).parent / NETWORKS[name].file


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """``--arch task_networks.py:NAME`` builds the network."""
    if name in NETWORKS and (build := NETWORKS[name].build):
        return build
    raise AttributeError(name)

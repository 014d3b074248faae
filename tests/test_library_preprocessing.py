"""The preprocessing of published networks' images: the settings of their libraries, and the pixels that result."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from optional_libraries import library
from PIL import Image

from repaconv.graph.onnx_files import dims_of
from repaconv.method_api.preprocessing import FoundPreprocessing, Sized, images_by
from repaconv.method_api.settings import SettingsReader
from repaconv.onnx_export.preprocessing_nodes import with_preprocessing, without_preprocessing
from repaconv.results import Preprocessing
from repaconv.sources.library_preprocessing import KINDS, of_processor, of_timm, pixels_of
from repaconv.sources.named_architectures import Architecture
from repaconv.verification.image_files import prepared, read_image

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
GREY = {"mean": (127.5,) * 3, "std": (127.5,) * 3, "channel_order": "RGB"}


def made(own, reader, size):
    """How images of that size are made."""
    return images_by(own, reader, Sized(size, "a test")).preprocessing


def processor(**said: object) -> FoundPreprocessing:
    Path("preprocessor_config.json").write_text(json.dumps({**HALF, "resample": 3, **said}))
    return of_processor(Path())


@pytest.mark.parametrize(
    ("kind", "said", "values"),
    [
        ("ViTImageProcessor", {"size": 224}, {"image_size": (224, 224), "resize_edge": None, "keep_ratio": False}),
        ("ViTFeatureExtractor", {"size": {"height": 32, "width": 16}}, {"image_size": (32, 16), "keep_ratio": False}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 9}, "crop_size": 8}, {"resize_edge": 9, "keep_ratio": True}),
        ("DeiTImageProcessor", {"size": 256, "crop_size": 224}, {"resize_edge": 256, "keep_ratio": False}),
        ("LevitImageProcessorFast", {"size": 224, "crop_size": 224}, {"resize_edge": 256, "image_size": (224, 224)}),
        ("ConvNextImageProcessor", {"size": 224}, {"resize_edge": 256, "image_size": (224, 224), "keep_ratio": True}),
        ("ConvNextImageProcessor", {"size": 384}, {"resize_edge": None, "image_size": (384, 384), "keep_ratio": False}),
        ("ViTImageProcessor", {"size": 8, "do_rescale": False}, {"mean": (0.5,) * 3, "std": (0.5,) * 3}),
        ("MobileViTImageProcessor", {"size": 9, "crop_size": 8}, {"channel_order": "BGR", "mean": (0,), "std": (255,)}),
    ],
)  # fmt: skip
def test_what_a_processor_says(kind, said, values):
    found = processor(image_processor_type=kind, **said)
    assert not found.odd
    expected = {**GREY, "interpolation": "bicubic", **values}
    for name, value in expected.items():
        assert found.values[name] == (pytest.approx(value) if name in ("mean", "std") else value), name


@pytest.mark.parametrize(
    ("said", "odd"),
    [
        ({"image_processor_type": "DetrImageProcessor"}, "what a DetrImageProcessor does"),
        ({"do_pad": True}, "do_pad=True"),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, "longest_edge"),
        ({"image_processor_type": "SiglipImageProcessor", "size": {"shortest_edge": 8}}, "without a crop"),
        ({"do_resize": False}, "do_resize=False"),
        ({"size": {"height": 9, "width": 8}, "do_center_crop": True, "crop_size": 8}, "size="),
        ({"image_processor_type": "BitImageProcessor", "crop_size": 9}, "a crop of 9 x 9 from 8"),
        ({"resample": "bicubic"}, "resample=bicubic"),
    ],
)
def test_different_preprocessing_is_reported_and_nothing_is_used(said, odd):
    found = processor(**{"image_processor_type": "ViTImageProcessor", "size": 8, **said})
    assert odd in "; ".join(found.odd)
    assert made(found, SettingsReader({}), (8, 8)) is None


def test_a_processor_of_another_size_than_the_network_is_reported():
    assert of_processor(Path(), (8, 8)) == FoundPreprocessing("", {}, [])
    processor(image_processor_type="ViTImageProcessor", size=224)
    assert "where config.json says 8 x 8" in of_processor(Path(), (8, 8)).odd[0]


def test_what_timm_says():
    cfg = {"input_size": (3, 224, 224), "mean": (0.5,), "std": (0.25,), "crop_pct": 0.95, "interpolation": "bilinear"}
    found = of_timm(cfg)
    assert found.values == {
        "mean": (127.5,), "std": (63.75,), "image_size": (224, 224), "resize_edge": 235,
        "interpolation": "bilinear", "keep_ratio": True,
    }  # fmt: skip
    assert of_timm({**cfg, "crop_mode": "border"}).odd == ["crop_mode=border"]
    assert of_timm({**cfg, "input_size": (3, 224, 112)}).odd == ["a crop of 224 x 112"]
    assert of_timm({}).values == {}


def test_the_user_says_a_part_of_it_or_another_size():
    own = of_timm({"input_size": (3, 32, 32), "mean": (0.5,), "std": (0.25,), "crop_pct": 0.5})
    assert made(own, SettingsReader({}), (32, 32)).source == "timm's pretrained_cfg"
    found = made(own, SettingsReader({"interpolation": "box", "image_size": "48"}), (32, 32))
    assert (found.interpolation, found.image_size, found.resize_edge, found.mean) == ("box", (48, 48), 96, (127.5,))
    assert found.source.startswith("--set interpolation; else timm's pretrained_cfg")
    odd = own._replace(odd=["crop_mode=border"])
    assert "not taken from timm" in made(odd, SettingsReader({"mean": "1", "std": "2"}), (32, 32)).source


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_pixels_are_those_of_transformers(kind):
    transformers = library("transformers")
    named = f"{kind}ImageProcessorPil"
    made = getattr(transformers, named, None) or pytest.skip(f"no {named} in this version")
    made = partial(made, size={"shortest_edge": 288}) if kind == "MobileViT" else made  # else it pads
    made().save_pretrained(".")
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("image.png")
    right = np.asarray(made()(Image.open("image.png"))["pixel_values"][0])[None]
    found = of_processor(Path())
    wanted = images_by(found, SettingsReader({}), Sized(found.values["image_size"], "it")).preprocessing
    given = prepared(read_image(Path("image.png"), wanted, wanted.image_size, 3)[None], wanted)
    assert given.shape == right.shape
    step = 1.01 / min(wanted.std)  # a grey level
    assert np.abs(given - right).max() < step


@pytest.mark.slow
def test_torchvision_says_it_by_its_weights():
    models = library("torchvision.models")
    first = pixels_of(Architecture("torchvision:resnet50", {}), None, None)
    assert first.where.startswith("torchvision's IMAGENET1K_V1 (IMAGENET1K_V2 say other")
    second = pixels_of(Architecture("torchvision:resnet50.IMAGENET1K_V2", {}), None, None)
    assert (first.values["resize_edge"], second.values["resize_edge"]) == (256, 232)
    assert pixels_of(Architecture("torchvision:fcn_resnet50", {}), None, None).odd
    for name in models.list_models(module=models):
        assert not pixels_of(Architecture(f"torchvision:{name}", {}), None, None).odd, name


def test_normalization_in_a_graph_keeps_sizes_without_names_and_takes_no_name_of_the_networks():
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[?, 3, ?, 4] x) => (float[?, 3, 1, 1] y) {
        image = Sub(x, m)
        mean = Div(image, m)
        y = GlobalAveragePool(mean)
    }"""
    model = onnx.parser.parse_model(text.replace("mean", '"preprocessing.mean"').replace("?", "N"))
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    for number, node in enumerate(model.graph.node):
        node.name = f"preprocessing/{node.op_type}_{number}"
    model.graph.node[0].name = "preprocessing/Cast_0"
    model.graph.initializer.append(numpy_helper.from_array(np.full((3, 1, 1), 0.5, np.float32), "m"))
    wanted = Preprocessing(mean=(1, 2, 3), std=(4, 5, 6), image_size=(4, 4), source="a test")
    whole = with_preprocessing(model, wanted)
    onnx.checker.check_model(whole, full_check=True)
    assert dims_of(whole.graph.input[0]) == (None, None, 4, 3)
    assert len({node.name for node in whole.graph.node}) == len(whole.graph.node)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    images = ((pixels - np.float32([1, 2, 3])) / np.float32([4, 5, 6])).transpose(0, 3, 1, 2)
    (right,) = ReferenceEvaluator(model).run(None, {"x": images})
    (found,) = ReferenceEvaluator(whole).run(None, {whole.graph.input[0].name: pixels})
    (bare,) = ReferenceEvaluator(without_preprocessing(whole)).run(None, {"x": images})
    assert np.allclose(found, right, rtol=1e-6)
    assert np.array_equal(bare, right)
    assert dims_of(without_preprocessing(whole).graph.input[0]) == (None, 3, None, 4)

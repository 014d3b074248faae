"""What may be installed beside repaconv, what it is for, and whether it is here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """One of pyproject.toml's extras.

    Attributes:
        name: As in ``pip install 'repaconv[NAME]'``.
        packages: What it brings; none where repaconv itself is all that it takes.
        purpose: What works with it.
    """

    name: str
    packages: tuple[str, ...]
    purpose: str

    @property
    def line(self) -> str:
        """What installs it."""
        return f"pip install 'repaconv[{self.name}]'"

    def missing(self) -> list[str]:
        """The packages that are not here."""
        return [package for package in self.packages if not _is_here(package)]


EXTRAS = (
    Extra("timm", ("timm",), "networks of timm: --arch timm:NAME"),
    Extra("torchvision", ("torchvision",), "networks of torchvision: --arch torchvision:NAME"),
    Extra("transformers", ("transformers",), "Hugging Face folders"),
    Extra("hub", ("fsspec", "huggingface-hub"), "addresses: hf://OWNER/NAME@REVISION"),
    Extra("quantise", ("nncf",), "export --quantizer nncf; tune tries its int8 on OpenVINO"),
    Extra("openvino", ("openvino",), "target x86-64-openvino"),
    Extra("onnxruntime-gpu", ("onnxruntime-gpu", "nvidia-ml-py"), "target cuda-ort, in place of onnxruntime"),
    Extra("tensorrt", ("polygraphy", "tensorrt"), "targets a100, h100, t4 and Jetsons, where the card is"),
    Extra("tensorrt-rtx", ("tensorrt-rtx",), "targets rtx-30, rtx-40, rtx-50"),
    Extra("polygraphy", ("polygraphy",), "inputs for arbitrary ONNX models"),
    Extra("onnxslim", ("onnxslim",), "export --simplifier onnxslim"),
    Extra("farm", ("distributed", "pyyaml"), "worker, sweep and bench --scheduler: a Dask cluster"),
    Extra("train", ("scikit-learn",), "the digits that the demo's networks were trained on"),
    Extra("docs", ("mkdocs-material",), "make docs"),
)
"""All but ``all``, which is of those that need no card, and ``dev``; pyproject.toml has their versions."""


def _is_here(package: str) -> bool:
    """Installed by that name, or by another that brings the same module, as builds for one CUDA do."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return find_spec(package.replace("-", "_")) is not None

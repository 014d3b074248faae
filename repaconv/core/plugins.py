"""Plug-ins by entry point (methods, backbones, rewrites, engines, targets) and optional dependencies (extras)."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any, NamedTuple

from repaconv.core.errors import EnvironmentProblem, UsageProblem, did_you_mean

# Optional dependencies


class Extra(NamedTuple):
    """One of the extras in pyproject.toml: a group of optional dependencies.

    Attributes:
        name: As in ``pip install 'repaconv[NAME]'``.
        packages: The packages that it installs; empty if repaconv alone is sufficient.
        purpose: What it is needed for.
    """

    name: str
    packages: tuple[str, ...]
    purpose: str

    @property
    def line(self) -> str:
        """The command that installs it."""
        return f"pip install 'repaconv[{self.name}]'"

    def missing(self) -> list[str]:
        """Return its packages that are not installed."""
        return [package for package in self.packages if not _is_installed(package)]


EXTRAS = (
    Extra("timm", ("timm",), "networks of timm: --arch timm:NAME"),
    Extra("torchvision", ("torchvision",), "networks of torchvision: --arch torchvision:NAME"),
    Extra("transformers", ("transformers",), "Hugging Face folders"),
    Extra("hub", ("fsspec", "huggingface-hub"), "addresses: hf://OWNER/NAME@REVISION"),
    Extra("quantize", ("nncf",), "export --quantizer nncf; tune tries its int8 on OpenVINO"),
    Extra("openvino", ("openvino",), "target x86-64-openvino"),
    Extra("onnxruntime-gpu", ("onnxruntime-gpu", "nvidia-ml-py"), "target cuda-ort, in place of onnxruntime"),
    Extra("tensorrt", ("polygraphy", "tensorrt"), "targets a100, h100, t4 and Jetsons, on a machine with the GPU"),
    Extra("tensorrt-rtx", ("tensorrt-rtx",), "targets rtx-30, rtx-40, rtx-50"),
    Extra("polygraphy", ("polygraphy",), "inputs for arbitrary ONNX models"),
    Extra("onnxslim", ("onnxslim",), "export --simplifier onnxslim"),
    Extra("cluster", ("distributed", "pyyaml"), "worker, sweep and bench --scheduler: a Dask cluster"),
    Extra("coco", ("pycocotools",), "mAP50-95 by pycocotools instead of repaconv's own"),
    Extra("train", ("scikit-learn",), "the digits that the demo's networks were trained on"),
    Extra("docs", ("mkdocs-material",), "make docs"),
)
"""All extras except ``all`` (those that need no GPU) and ``dev``. pyproject.toml has their versions."""


def _is_installed(package: str) -> bool:
    """Return whether a package is installed, under this name or as another build of the same module (e.g. for one CUDA
    version)."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return find_spec(package.replace("-", "_")) is not None


# Plug-ins by entry point. The plug-ins of repaconv itself are registered in the same way.

METHODS = "repaconv.methods"
BACKBONES = "repaconv.backbones"
REWRITES = "repaconv.rewrites"
ENGINES = "repaconv.engines"
TARGETS = "repaconv.targets"
EXTRAS_GROUP = "extras"
"""Group name of optional dependencies in the rows of ``doctor``."""
GROUPS = (METHODS, BACKBONES, REWRITES, ENGINES, TARGETS)


REMOVED = {
    **dict.fromkeys(
        ("affine-as-batchnorm", "batchnorm-as-affine", "matmul-as-pointwise", "no-moves", "norm-affine"), ""
    ),
    **dict.fromkeys(("one-linear", "pointwise-as-matmul", "read-columns", "reduce-in-place", "scale-into-q"), ""),
    **dict.fromkeys(("scores-by-rank", "values-as-matrix", "values-by-rank"), ""),
    "gather-as-matmul": "rows-by-gathernd",
    "group-norm-flat": "norm-in-place",
}
"""Rewrites of release 0.1 that were faster in no benchmark, each with the one to use in its place, if there is one."""


class PluginRow(NamedTuple):
    """One row of ``doctor``: a plug-in that is registered, an extra, or with ``--target`` a command.

    Attributes:
        group: The entry-point group of a plug-in, e.g. ``repaconv.methods``, or ``extras``; with ``--target`` the name
            of the target.
        name: The name of the plug-in or the extra; with ``--target`` the command.
        value: What the entry point names, the packages of the extra, or the runtime of the target with its version.
        problem: Why it does not work; empty if it does.
        note: The version of a runtime or why it is not available, or what an extra is for.
    """

    group: str
    name: str
    value: str
    problem: str
    note: str = ""


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted. None of them is loaded."""
    return dict(_registered(group, tuple(sys.path)))


@cache
def _registered(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Cached for one ``sys.path``, because searching all installed packages takes milliseconds."""
    points = sorted(entry_points(group=group), key=lambda point: point.name)
    return {point.name: point for point in points if not (group == REWRITES and _is_removed(point))}


def _is_removed(point: EntryPoint) -> bool:
    """Return whether this is a removed rewrite of repaconv that an outdated editable install still lists.

    Plug-ins of other packages may use such a name.
    """
    return point.name in REMOVED and point.dist is not None and point.dist.name == "repaconv"


def load(group: str, name: str) -> Any:
    """Load one plug-in.

    Raises:
        UsageProblem: If nothing of that name is registered, or it was removed.
        EnvironmentProblem: If it is registered but cannot be imported.
    """
    points = registered(group)
    kind = group.rpartition(".")[2].rstrip("s")
    if name not in points and group == REWRITES and name in REMOVED:
        raise UsageProblem(
            f"the rewrite {name!r} was removed: it was faster in no benchmark.",
            hint=(f"Use {REMOVED[name]!r} in its place. " if REMOVED[name] else "Leave it out. ")
            + "If a result of `tune` names it, run `repaconv tune` again.",
            code="rewrite.removed",
        )
    if name not in points:
        raise UsageProblem(
            f"unknown {kind} {name!r}.",
            hint=did_you_mean(name, points)
            + f"Known: {', '.join(points) or 'none, because repaconv is not installed in this environment'}.",
            code=f"{kind}.unknown",
        )
    try:
        return points[name].load()
    except Exception as error:
        raise EnvironmentProblem(
            f"the {kind} {name!r} ({points[name].value}) cannot be loaded: {error}.",
            hint="`repaconv doctor` lists all plug-ins; update or remove the package that brings this one.",
            code=f"{kind}.broken",
        ) from error


def plugin_rows() -> list[PluginRow]:
    """Load every plug-in of every group and return one row each; a plug-in that cannot be loaded is a row with its
    problem."""
    found = []
    for group in GROUPS:
        for name, point in registered(group).items():
            try:
                plugin = load(group, name)
                note = "".join(_version_or_problem(plugin)) if group == ENGINES else ""
                found.append(PluginRow(group, name, point.value, "", note))
            except EnvironmentProblem as error:
                found.append(PluginRow(group, name, point.value, error.message))
    return found + [_extra(extra) for extra in EXTRAS]


def _extra(extra: Extra) -> PluginRow:
    lacks = extra.missing()
    here = "here" if extra.packages else "nothing more is needed"
    if lacks:
        here = f"{', '.join(lacks)} not here: {extra.line}"
    return PluginRow(EXTRAS_GROUP, extra.name, ", ".join(extra.packages), "", f"{extra.purpose}: {here}")


def runtime_version(name: str) -> str:
    """Return the version of a runtime; empty if it is not available on this machine."""
    return _version_or_problem(load(ENGINES, name))[0]


def _version_or_problem(engine: Any) -> tuple[str, str]:
    """The version of a runtime, and why it is not available; one of them is empty."""
    try:
        return str(engine.version()), ""
    except EnvironmentProblem as error:
        return "", f"not on this machine: {error.message}"

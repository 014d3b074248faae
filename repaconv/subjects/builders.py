"""What builds a network by name: a package's registry of architectures, or a function of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.errors import EnvironmentProblem, UsageProblem, nearest, said_by

if TYPE_CHECKING:
    from torch import nn

KNOWN = ("timm", "torchvision")
"""Packages with a registry of architectures."""


def package(name: str) -> Any:
    """An optional package, imported.

    Raises:
        EnvironmentProblem: If it is not here, or does not load.
    """
    with loading(name):
        return importlib.import_module(name)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Where something of an optional package is imported; transformers does so when it is asked for a network.

    Raises:
        EnvironmentProblem: If it is not here, or does not load.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        said = str(_first(error)).splitlines() or [type(error).__name__]
        why = "is not installed" if missing else f"does not load: {said[0].rstrip('.')}"
        builds = "torchvision's compiled operators are for one build of torch: install both from one index."
        raise EnvironmentProblem(
            f"{name} {why}.", hint=f"pip install 'repaconv[{name}]'" if missing else builds, code=f"{name}.missing"
        ) from error


def _first(error: BaseException) -> BaseException:
    """What was raised before it was wrapped."""
    return _first(error.__cause__) if error.__cause__ else error


def of_registry(library: Any, kind: str, name: str, config: Mapping[str, Any]) -> Callable[[int | None], nn.Module]:
    """What builds one of timm's or torchvision's for so many classes, its own number where None.

    Raises:
        UsageProblem: If it knows none of that name.
    """
    known = (
        set(library.list_models())
        if kind == "timm"
        else set(importlib.import_module("torchvision.models").list_models())
    )
    if name.partition(".")[0] not in known:
        raise UsageProblem(
            f"{kind} has no architecture {name!r}.",
            hint=f"{nearest(name, known)}It knows {len(known)}, as {min(known)}.",
            code="arch.unknown",
        )
    more = dict(config.get("model_args") or {})
    if isinstance(config.get("global_pool"), str):
        more["global_pool"] = config["global_pool"]

    def build(classes: int | None) -> nn.Module:
        given = {**more, **({} if classes is None else {"num_classes": classes})}
        if kind == "timm":
            module: nn.Module = library.create_model(name, **given)
            return module
        net: nn.Module = importlib.import_module("torchvision.models").get_model(
            name.partition(".")[0], weights=None, **given
        )
        return net

    return build


def own(path: Path, function: str) -> Callable[[], nn.Module]:
    """The user's own function; running the file, as Python would, is what he asked for.

    Raises:
        UsageProblem: If there is no such function, or it fails, or gives no module.
    """
    import torch

    name = f"arch of {path.stem}"  # no module's that is installed
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() and path.suffix == ".py" else None
    if spec is None or spec.loader is None or not function:
        bare = not function and path.suffix != ".py"
        raise UsageProblem(
            f"--arch {path} {'names no package' if bare else f'is no Python file with a function {function!r}'}.",
            hint=f"E.g. timm:{path} or torchvision:{path}; or a function of your own file: ./net.py:build."
            if bare
            else "E.g. --arch ./net.py:build, timm:mobileone_s1 or torchvision:resnet50.",
            code="arch.unknown",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
        build = getattr(module, function, None)
        made = build() if callable(build) else None
    except Exception as error:  # his own code may raise anything
        raise UsageProblem(
            f"{path}:{function} fails with {said_by(error)}.",
            hint="It is run as your own Python would run it; try it by itself.",
            code="arch.function",
        ) from error
    if build is None or not isinstance(made, torch.nn.Module):
        raise UsageProblem(
            f"{path} has no function {function} that gives a torch.nn.Module.",
            hint="It takes no arguments, and returns the network.",
            code="arch.function",
        )
    found: Callable[[], nn.Module] = build
    return found

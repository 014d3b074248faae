"""Fold a live nn.Module: the whole network if a method recognizes it, otherwise every known part of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins
from repaconv.core.errors import Refused, RepaconvError, UsageProblem, did_you_mean
from repaconv.results import NOTHING_TO_FOLD, FoldStep, Origin
from repaconv.sources.method_detection import choose_method

if TYPE_CHECKING:
    from torch import Tensor, nn

    from repaconv.checkpoints import Checkpoint


def fold_live(module: nn.Module, method: str, settings: Mapping[str, str], example: Any = None) -> nn.Module:
    """Return a folded copy of the module in eval mode, with its certificate in the attribute ``fold_certificate``.

    If a method recognizes the whole network by its state dict, and its deploy form gives the module's own output, the
    deploy form is returned. Otherwise, the known parts are folded in a copy of the user's own module. In both cases the
    whole network is run before and after in float64. If nothing folds, the copy is unchanged, and its certificate has
    one row, ``nothing to fold``. ``not_folded`` of the last row says what was not folded, and why.

    The fold is exact for the call that is run. Another method of the module, or the same call with a flag that selects
    another path, may read a value from the middle of a fold, such as the output of a norm whose affine went into the
    next layer.

    Args:
        module: The module, which is not changed. The result has its device and floating-point dtype.
        method: Its method, or ``auto``.
        settings: Settings that the module does not contain.
        example: An input of the module: a tensor, a tuple of its arguments, or a dict of named ones. If None, input
            sizes are tried that the module declares or its first layers suggest.

    Raises:
        Refused: If the module cannot be run as a whole, or ``method`` is given and folds nothing in it.
    """
    import torch

    from repaconv.torch_fold.float64_module_calls import keeping_random_states

    require_foldable(module)
    # A trace reads versions, which inference tensors lack.
    with torch.inference_mode(mode=False), keeping_random_states():
        try:
            return _fold_whole(module, method, settings, example)
        except RepaconvError as error:
            return _fold_in_parts(module, method, settings, example, error)


def require_foldable(module: nn.Module) -> None:
    """Refuse an object that is no module, and a module that has no weights yet or contains TorchScript.

    Raises:
        UsageProblem: If it is no module.
        Refused: If its weights are lazy or on the meta device, it has no ``forward``, or a submodule is TorchScript.
    """
    import torch
    from torch.nn.parameter import is_lazy

    kind = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        raise UsageProblem(
            f"an object of the type {kind} is neither a file nor a torch.nn.Module.",
            hint="Give the path of a checkpoint or an ONNX file, or a module with its weights loaded.",
            code="usage.live",
        )
    if getattr(module.forward, "__func__", None) is torch.nn.Module.forward:
        raise Refused(
            f"this {kind} has no forward() of its own, so it cannot be run and verified.",
            hint="Fold the network that it is a part of, or each of its parts.",
            code="live.forward",
        )
    scripted = (name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))
    if (name := next(scripted, None)) is not None:
        raise Refused(
            f"{f'{name} of ' * bool(name)}this {kind} is a TorchScript module; its calls cannot be traced.",
            hint="Build the network with the Python module that it was made from, fold that, then script or trace it."
            if name
            else "Fold the module that it was made from, then script or trace the folded one.",
            code="live.script",
        )
    tensors = [*module.parameters(), *module.buffers()]
    if any(map(is_lazy, tensors)):
        raise Refused(
            f"this {kind} has no numbers yet: a lazy layer in it was never called.",
            hint="Run it once on an input and load its weights, then fold it.",
            code="live.meta",
        )
    if any(tensor.is_meta for tensor in tensors):
        raise Refused(
            f"this {kind} has no numbers yet: it is on torch's meta device.",
            hint="Load its weights first, then fold it.",
            code="live.meta",
        )


def _fold_in_parts(
    module: nn.Module, method: str, settings: Mapping[str, str], example: Any, why: RepaconvError
) -> nn.Module:
    """Fold the known parts of a module; ``why`` is the reason that the network as a whole was not folded.

    Raises:
        Refused: If nothing in it folds, and a method or an idle ratio was given.
        RepaconvError: ``why``, if nothing in it folds and ``why`` can be corrected.
        UsageProblem: If a setting has no effect on parts.
    """
    from repaconv.method_api.settings import SettingsReader
    from repaconv.methods.repavit.active_channels import parse_idle_ratio
    from repaconv.torch_fold.known_submodule_folds import fold_parts

    ratio = SettingsReader(settings).maybe("idle_ratio", parse_idle_ratio)
    folded, steps = fold_parts(module, method, example, ratio)
    if steps[0].folded == (NOTHING_TO_FOLD,):
        steps = (_nothing_folded(steps[0], why),)
        if method != "auto" or ratio is not None:
            raise Refused(
                f"nothing in this {type(module).__name__} can be folded with this method or idle ratio: {why.message} "
                f"{'; '.join(steps[0].not_folded) or 'No part of it is a known fold.'}",
                hint="Leave out the method and the idle ratio: then everything is folded that can be.",
                code="live.nothing",
            )
    unused = [name for name in settings if name != "idle_ratio"]
    if unused:
        near = did_you_mean(unused[0], ("example", "method", "idle_ratio"))
        raise UsageProblem(
            f"{', '.join(unused)} has no effect here: no method knows the whole module ({why.message.rstrip('.')}), "
            "and its parts are folded without settings.",
            hint=f"{near}Remove {', '.join(unused)}.",
            code="setting.unknown",
        )
    return _with_certificate(folded, steps)


def _nothing_folded(step: FoldStep, why: RepaconvError) -> FoldStep:
    """The row of a module in which nothing folds; it adds ``why`` if the keys are those of a known network.

    Raises:
        RepaconvError: ``why``, if it is a known network with an error that can be corrected.
    """
    if not isinstance(why, Refused) or why.code not in ("method.mismatch", "live.other"):
        raise why
    return (
        step
        if why.code == "method.mismatch"
        else step.model_copy(update={"not_folded": (why.message, *step.not_folded)})
    )


def _fold_whole(module: nn.Module, method: str, settings: Mapping[str, str], example: Any) -> nn.Module:
    """Fold the module as the network that a method recognizes by its state dict."""
    import torch

    from repaconv.torch_fold.submodules import too_large
    from repaconv.verification.input_batches import random_inputs

    checkpoint = _as_checkpoint(module)
    chosen, detection = choose_method(checkpoint, method)
    if detection.form == "deploy":
        raise Refused("it is in deploy form already.", hint="Fold the module as trained.", code="method.deployed")
    trained = chosen.read(checkpoint, _accepted_settings(module, chosen, checkpoint, settings))
    backbone = plugins.load(plugins.BACKBONES, trained.backbone)
    tensors: dict[str, Tensor] = {}
    steps: list[FoldStep] = []
    for part in trained.parts():
        tensors.update(part.tensors)
        steps += [part.step] if part.step else []
    deploy = backbone.deploy(trained.config).double()
    deploy.load_state_dict(tensors, strict=True)
    size = backbone.image_size(trained.config, trained.preprocessing.image_size)
    images = torch.from_numpy(random_inputs((trained.config.in_channels, *size), count=2, seed=0).images).double()
    error = _difference(module, deploy, images if example is None else example)
    steps.append(FoldStep(module=".", folded=("the whole network -> its deploy form",), max_rel_error=error))
    first = next(module.parameters())
    if overflow := too_large(deploy.parameters(), first.dtype):
        raise Refused(f"{overflow}.", hint="Fold it in float32 or bfloat16.", code="live.other")
    deploy.requires_grad_(any(weight.requires_grad for weight in module.parameters()))
    return _with_certificate(deploy.to(device=first.device, dtype=first.dtype).eval(), tuple(steps))


def _difference(module: nn.Module, deploy: nn.Module, given: Any) -> float:
    """Float64 difference between the outputs of the deploy form and of the user's module.

    Raises:
        Refused: If the difference is too large: the module has the keys of a known network, but computes something
            else. Also if the module has hooks or keeps state, which the deploy form would not.
    """
    from repaconv.torch_fold.float64_module_calls import KEEPS_STATE, in_float64
    from repaconv.torch_fold.submodules import is_hooked
    from repaconv.torch_fold.whole_module_check import Whole
    from repaconv.verification.rounding import ALGEBRA_RTOL

    if any(is_hooked(part) for part in module.modules()):
        raise Refused("it has hooks, or a forward of its own, which its deploy form would not have.", code="live.other")
    try:
        whole = Whole.of(lambda: in_float64(module), given, ())
    except Refused as error:
        raise Refused(error.message, hint=error.hint, code="live.other") from error
    found = whole.compare(deploy.eval(), rtol=ALGEBRA_RTOL)  # the user's own code may round differently
    if not found.passed:
        raise Refused(
            f"its keys are those of a known network, but it computes another: the outputs differ by {found.error:.1e}.",
            hint="If a value is not the usual one (heads, eps), give it: repaconv.fold(model, num_heads=...).",
            code="live.other",
        )
    if whole.keeps_state():
        raise Refused(f"{KEEPS_STATE}, which its deploy form would not.", code="live.other")
    return found.error


def _as_checkpoint(module: nn.Module) -> Checkpoint:
    from torch import Tensor

    from repaconv.checkpoints import Checkpoint

    state = module.state_dict().items()  # it may also hold objects: extra states, settings of quantized layers
    tensors = {name: tensor.detach().cpu() for name, tensor in state if isinstance(tensor, Tensor)}
    origin = Origin(
        path=type(module).__name__, sha256="", bytes=0, container="live module", weights=".", weights_reason="live"
    )
    return Checkpoint(Path(type(module).__name__), origin, (), (), tensors, {name: name for name in tensors}, {})


def _accepted_settings(
    module: nn.Module, method: Any, checkpoint: Checkpoint, settings: Mapping[str, str]
) -> dict[str, str]:
    """The user's settings, and the module's attributes that the method accepts as settings."""
    hints = {**_hints(module), **settings}
    while True:
        try:
            method.read(checkpoint, hints)
            return hints
        except UsageProblem as error:
            unwanted = next((name for name in hints if name not in settings and f"'{name}'" in error.message), None)
            if error.code != "setting.unknown" or unwanted is None:
                raise
            del hints[unwanted]


def _hints(module: nn.Module) -> dict[str, str]:
    """Settings that no state dict contains, from the attributes that vision transformers usually have."""
    hints: dict[str, str] = {}
    for name, part in module.named_modules():
        heads = getattr(part, "num_heads", None)
        if isinstance(heads, int) and not isinstance(heads, bool):
            hints.setdefault("num_heads", str(heads))
        eps, last = getattr(part, "eps", None), name.rpartition(".")[2]
        if isinstance(eps, float) and name in ("norm", "fc_norm"):
            hints.setdefault("norm_eps", str(eps))
        if isinstance(eps, float) and name.endswith("attn.norm"):
            hints.setdefault("attn_eps", str(eps))
        if isinstance(eps, float) and last in ("norm2", "bn") and hasattr(part, "running_mean"):
            hints.setdefault("bn_eps", str(eps))
        if isinstance(side := getattr(getattr(part, "pool", None), "kernel_size", None), int):
            hints.setdefault("pool_size", str(side))
        if isinstance(merged := getattr(part, "merged", None), bool) and hasattr(part, "lora_A"):
            hints.setdefault("lora_merged", "yes" if merged else "no")
        scaling, rank = getattr(part, "scaling", None), getattr(part, "r", None)
        if isinstance(scaling, dict) and isinstance(rank, dict) and set(scaling) == set(rank) and scaling:
            first = next(iter(scaling))
            hints.setdefault("lora_alpha", str(float(scaling[first]) * rank[first]))
    return hints


def _with_certificate(module: nn.Module, steps: tuple[FoldStep, ...]) -> nn.Module:
    module.fold_certificate = steps  # type: ignore[assignment]
    return module

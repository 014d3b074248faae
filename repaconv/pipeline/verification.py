"""verify: every link whose two ends exist, measured against the float64 training form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv import registry, runs
from repaconv.artefact import ExportArtefact, FoldArtefact, Link, VerifyArtefact, read_artefact, write_artefact
from repaconv.errors import Refused, UsageProblem
from repaconv.pipeline.common import (
    DEPLOY,
    TRAINING,
    Progress,
    made_by,
    require_size,
    run_onnx,
    silent,
    stored_weights,
    training_form,
    with_files,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn


def verify(
    run: str | Path | None = None,
    *,
    inputs: str | Path | None = None,
    checkpoint: str | Path | None = None,
    images: int = 4,
    seed: int = 0,
    rtol: Mapping[str, float] | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> VerifyArtefact:
    """Prove the folded model, and the ONNX model where there is one, against the float64 training form.

    Args:
        run: The run's folder; the newest when None.
        inputs: .npz with ``input`` [N, C, H, W] and, where recorded, the official output.
        checkpoint: Where the checkpoint is now, if it has moved.
        images: How many random images, without ``inputs``.
        seed: Of the random images.
        rtol: Tolerances by link, in place of the policy's.
        out: Where the result goes; ``verify.json`` in the run's folder when None.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if any link's is.
    """
    from repaconv.proof import data, parity
    from repaconv.proof.runners import run_module

    taken = runs.find_run(Path(run) if run else None)
    folded = read_artefact(taken.fold_json, FoldArtefact)
    limits = _limits(folded, rtol)
    chosen, form, source = training_form(folded, checkpoint)
    channels = form.config.in_channels
    given = (
        data.npz_inputs(Path(inputs), channels)
        if inputs
        else data.random_inputs((channels, *folded.image_size), count=images, seed=seed)
    )
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    config = backbone.from_json(folded.config)
    require_size(backbone, config, *given.images.shape[2:])
    exact = {name: value for part in chosen.fold(form) for name, value in part.tensors.items()}
    stored = stored_weights(taken, folded)

    def run_form(what: str, module: nn.Module, tensors: Mapping[str, Tensor], *, double: bool) -> NDArray[np.floating]:
        progress(f"{what}, float{64 if double else 32}", 0, 0)
        return run_module(module, tensors, given.images, double=double)

    train64 = run_form(TRAINING, chosen.training(form), form.tensors, double=True)
    train32 = run_form(TRAINING, chosen.training(form), form.tensors, double=False)
    fold64 = run_form(DEPLOY, backbone.deploy(config), exact, double=True)
    fold32 = run_form(DEPLOY, backbone.deploy(config), stored, double=False)

    logits = folded.output == "logits"
    reference = (f"{TRAINING}, float64", train64)

    def link(name: str, candidate: tuple[str, Any], against: tuple[str, Any] = reference) -> Link:
        return parity.judge(name, against, candidate, logits=logits, tolerance=limits[name])

    links = [link("fold", ("folded, float64", fold64)), link("stored", ("folded as stored, float32", fold32))]
    if given.recorded is not None:
        if given.recorded.shape != train64.shape:
            raise Refused(
                f"{inputs}: {given.recorded_name} has shape {list(given.recorded.shape)}, the network gives "
                f"{list(train64.shape)}.",
                hint="Take the input and output of this very checkpoint.",
                code="inputs.shape",
            )
        links.insert(0, link("recorded", reference, (f"official output ({given.recorded_name})", given.recorded)))
    took = [source, taken.model]
    if taken.export_json.is_file():
        exported = read_artefact(taken.export_json, ExportArtefact)
        path = taken.payload(exported.payload)
        took.append(path)
        progress("ONNX, ONNX Runtime", 0, 0)
        links.append(_onnx_link(exported, path, given.images, link))
    failed = any(found.verdict == "failed" for found in links)
    artefact = VerifyArtefact(
        made_by=made_by("torch", "onnxruntime"),
        verdict="failed" if failed else "passed",
        unverified=folded.unverified,
        policy=parity.POLICY,
        inputs=given.name,
        input_shape=given.images.shape,
        model_sha256=folded.payload.sha256,
        links=tuple(links),
        for_scale={
            "training form in float32 against float64": parity.measure(train32, train64, logits=logits),
            "folded in float32 against training form in float32": parity.measure(fold32, train32, logits=logits),
        },
    )
    target = Path(out) if out else taken.verify_json
    write_artefact(target, artefact)
    return with_files(artefact, took + ([Path(inputs)] if inputs else []), [target])


def _limits(folded: FoldArtefact, rtol: Mapping[str, float] | None) -> dict[str, float]:
    for name in rtol or {}:
        if name not in folded.tolerances:
            raise UsageProblem(
                f"there is no link {name!r}.", hint=f"Links: {', '.join(folded.tolerances)}.", code="tolerance.unknown"
            )
    return {**folded.tolerances, **(rtol or {})}


def _onnx_link(
    exported: ExportArtefact, path: Path, images: NDArray[np.float32], link: Callable[[str, tuple[str, Any]], Link]
) -> Link:
    """The exported graph under ONNX Runtime, or why it could not be run on these images."""
    label = "ONNX under ONNX Runtime"
    fixed_batch = exported.batch != "dynamic" and len(images) % int(exported.batch)
    fixed_size = exported.image_size != "dynamic" and images.shape[2:] != exported.image_size
    if fixed_batch or fixed_size:
        shape = f"batch {exported.batch}, image size {exported.image_size}"
        return Link(
            name="onnx",
            reference=f"{TRAINING}, float64",
            candidate=label,
            tolerance=None,
            metrics=None,
            verdict="not verified",
            note=f"the graph takes {shape} only, the images are {list(images.shape)}",
        )
    at_once = None if exported.batch == "dynamic" else int(exported.batch)
    return link("onnx", (label, run_onnx(path, images, at_once)))

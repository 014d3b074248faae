"""Answers of the tuner that are kept: where, by all that they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv import registry
from repaconv.artefacts import FoldArtefact
from repaconv.files import cache_folder, canonical_json, sha256_of, sha256_of_bytes
from repaconv.orders.stages import TuneOrder
from repaconv.proof.policy import POLICY
from repaconv.steps.arms import Machine
from repaconv.steps.common import made_by
from repaconv.steps.forms import TUNED, shapes_sha256
from repaconv.steps.inputs import choose_inputs

if TYPE_CHECKING:
    from repaconv.subjects.subject import Subject


def place_of(folded: FoldArtefact, machine: Machine, asked: Mapping[str, Any]) -> Path:
    """Where the answer is kept: by shapes, machine, targets, all that measures and writes graphs, and what was asked.

    What was asked says of which cluster, too. The budget is in the answer: what is enough of one is the stage's to say.
    """
    from repaconv.measure.fingerprint import fingerprint, machine_key

    question = {
        "machine": machine_key(fingerprint(())),
        "targets": [device.model_dump(mode="json") for device in machine.devices],
        "runtimes": machine.versions,
        "made_by": made_by("torch", "onnx", "onnxscript", "onnxruntime"),
        **asked,
    }
    shapes = shapes_sha256(folded.shapes)
    digest = sha256_of_bytes(canonical_json(question).encode())
    return cache_folder(TUNED) / f"{shapes[:16]}-{digest[:16]}.json"


def brought_by(names: Sequence[str]) -> dict[str, str]:
    """Rewrites, with the package that each is from, and its version."""
    points = registry.registered(registry.REWRITES)
    packages = {name: points[name].dist for name in names if name in points}
    return {name: f"{dist.name} {dist.version}" if (dist := packages.get(name)) else "" for name in names}


def judged_by(order: TuneOrder, subject: Subject) -> dict[str, Any]:
    """What an answer with lower precision depends on besides: weights and images, by their hashes."""
    from repaconv.measure.fingerprint import version_of
    from repaconv.proof.images import image_files

    folded = subject.folded
    choose_inputs(subject, inputs=order.inputs, images=order.images)  # refuses what is none, before any work
    images = Path(order.images or "")
    files = [Path(order.inputs)] if order.inputs else image_files(images, None)
    return {
        "weights": folded.payload.sha256,
        "images": {str(file.relative_to(images) if order.images else file.name): sha256_of(file) for file in files},
        "preprocessing": folded.preprocessing.model_dump(mode="json") if folded.preprocessing else None,
        "policy": POLICY,
        "nncf": version_of("nncf"),
    }

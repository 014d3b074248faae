"""The run folder: one a checkpoint, a ``<stage>.json`` beside each payload, and the name of the newest."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from repaconv.artefact import Artefact, ExportArtefact, FoldArtefact, Payload
from repaconv.errors import GateFailed, Refused, UsageProblem
from repaconv.files import read_artefact, sha256_of, write_text

OUT = Path("repaconv-out")
LATEST = OUT / "latest"
# What a run folder may hold; a second fold of the same checkpoint removes these and nothing else.
LATER_STAGES = ("verify.json", "drift-*.svg", "model*.onnx", "model*.onnx.data", "export*.json")
BENCH, BUILD = "bench", "build"
PRECISIONS = ("fp32", "fp16", "bf16", "int8")


@dataclass(frozen=True)
class Run:
    """Paths in one run folder."""

    folder: Path

    @property
    def fold_json(self) -> Path:
        """Describes the folded model."""
        return self.folder / "fold.json"

    @property
    def model(self) -> Path:
        """Its weights."""
        return self.folder / "model.safetensors"

    @property
    def verify_json(self) -> Path:
        """The links that were verified."""
        return self.folder / "verify.json"

    def export_json(self, precision: str = "fp32") -> Path:
        """Describes the ONNX model of that precision."""
        return self.folder / ("export.json" if precision == "fp32" else f"export.{precision}.json")

    def onnx(self, precision: str = "fp32") -> Path:
        """Where the ONNX model goes unless the user says otherwise."""
        return self.folder / ("model.onnx" if precision == "fp32" else f"model.{precision}.onnx")

    def engine(self, target: str, precision: str, suffix: str) -> Path:
        """An engine for a target; its log and its ``.json`` lie beside it."""
        name = target if precision == "fp32" else f"{target}.{precision}"
        return self.folder / BUILD / f"{name}{suffix}"

    def bundle_json(self, target: str, precision: str) -> Path:
        """Describes the bundle for a board."""
        return self.engine(target, precision, ".bundle.json")

    def collected_json(self, target: str, precision: str) -> Path:
        """What that board made of it."""
        return self.engine(target, precision, ".collected.json")

    def drift_svg(self, link: str) -> Path:
        """The curve of a link's drift."""
        return self.folder / f"drift-{link}.svg"

    def bench_json(self, target: str) -> Path:
        """The measurement on one target."""
        return self.folder / BENCH / f"{target}.json"

    def history(self, target: str) -> Path:
        """Every measurement on one target; it outlives a second fold."""
        return self.folder / f"history-{target}.jsonl"

    @property
    def training_onnx(self) -> Path:
        """The training form, exported for comparison."""
        return self.folder / BENCH / "training.onnx"

    def payload(self, payload: Payload) -> Path:
        """The file that an artefact describes.

        Raises:
            Refused: If it is gone or its hash is another.
        """
        path = self.folder / payload.path
        if not path.is_file():
            raise Refused(
                f"{path} is gone.", hint="Run the stage that writes it again.", code="artefact.payload-missing"
            )
        if sha256_of(path) != payload.sha256:
            raise Refused(
                f"{path} is not the file that was written: its hash is another.",
                hint="Run the stage that writes it again.",
                code="artefact.hash",
            )
        return path


def graph_of(run: Run, exported: ExportArtefact) -> Path:
    """The ONNX model that an artefact describes, its weights looked at too where they have a file of their own.

    Raises:
        Refused: If one of them is gone or its hash is another.
    """
    if exported.data is not None:
        run.payload(exported.data)
    return run.payload(exported.payload)


def prepare_run(checkpoint: Path, sha256: str, out: Path | None, *, force: bool) -> Run:
    """The folder for a checkpoint's run; nothing is written yet.

    Raises:
        Refused: If the folder holds the run of another checkpoint, or files of another origin.
    """
    run = Run(out if out is not None else OUT / checkpoint.stem)
    if run.folder.exists() and not run.folder.is_dir():
        raise Refused(f"{run.folder} is a file, not a folder.", hint="Give another -o.", code="run.not-a-folder")
    if force:
        return run
    if run.fold_json.is_file():
        origin = read_artefact(run.fold_json, FoldArtefact).origin
        if sha256 != origin.sha256 and str(checkpoint.resolve()) != origin.path:
            raise Refused(
                f"{run.folder} holds the run of another checkpoint, {origin.path}.",
                hint="Give another folder with -o, or --force to replace it.",
                code="run.other-checkpoint",
            )
    elif run.model.exists():
        raise Refused(
            f"{run.model} is there and no fold.json beside it.",
            hint="Give another folder with -o, or --force to replace it.",
            code="run.foreign-files",
        )
    return run


def clear_later_stages(run: Run) -> None:
    """Remove what was made from an earlier fold."""
    for pattern in LATER_STAGES:
        for path in run.folder.glob(pattern):
            path.unlink(missing_ok=True)
    for folder in (BENCH, BUILD):
        shutil.rmtree(run.folder / folder, ignore_errors=True)


def remember(run: Run) -> None:
    """Make this the newest run of this folder."""
    inside = run.folder.parent.resolve() == OUT.resolve()
    write_text(LATEST, f"{run.folder.name if inside else run.folder.resolve()}\n")


def find_run(given: Path | None) -> Run:
    """The run that was given, or the newest one.

    Raises:
        UsageProblem: If there is none.
    """
    if given is None:
        if not LATEST.is_file():
            raise UsageProblem(
                f"there is no run yet in {OUT}/.",
                hint="Fold a checkpoint first: repaconv fold CKPT. Or give the run's folder.",
                code="run.none",
            )
        given = OUT / LATEST.read_text().strip()
    run = Run(given)
    if not run.fold_json.is_file():
        raise UsageProblem(
            f"{given} is not a run folder: it has no fold.json.",
            hint="Give the folder that `repaconv fold` wrote, or fold again.",
            code="run.none",
        )
    return run


def require_passed(artefact: Artefact, path: Path, *, unverified: bool) -> tuple[str, ...]:
    """Stop behind a failed verdict, or note it.

    Returns:
        What was overridden up to here, to be written into the next artefact.

    Raises:
        GateFailed: If the verdict is failed and ``unverified`` was not asked for.
    """
    if artefact.verdict != "failed":
        return artefact.unverified
    if not unverified:
        raise GateFailed(
            f"{path} says failed, so the chain stops here.",
            hint=f"Look into {path}; --unverified goes on and is recorded in every later artefact.",
            code=f"{artefact.stage}.failed",
        )
    return (*artefact.unverified, f"{artefact.stage} failed")

"""The run folder: one a checkpoint, a ``<stage>.json`` beside each payload, and the name of the newest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from repaconv.core.errors import GateFailed, Refused, UsageProblem
from repaconv.core.export_names import dotted
from repaconv.core.file_replacement import left_over, named_by, put, remove, require_ours
from repaconv.core.files import from_json, read_artefact, sha256_of, stage_of, write_text
from repaconv.core.notices import LOGGER
from repaconv.results import KINDS, Artefact, ExportArtefact, FoldArtefact, Payload, VerifyArtefact

OUT = Path("repaconv-out")
LATEST = OUT / "latest"
BENCH, BUILD, WEIGHTS, FOLDED, UNCONVERTED = "bench", "build", "model.safetensors", ".folded.onnx", "unconverted.onnx"
PRECISIONS, PLAN = ("fp32", "fp16", "bf16", "int8"), "plan.json"
OF_CONVERT = CONVERT_JSON, CONVERTED, SCORES = "convert.json", "converted.safetensors", "scores.svg"
OF_FINETUNE = FINETUNE_JSON, FINETUNED, UNDER_WAY = "finetune.json", "finetuned.safetensors", "finetune.state"
AnyFold = TypeVar("AnyFold", bound=FoldArtefact)
_HOW_FOLDED: dict[str, Any] = dict.fromkeys(
    ("made_by", "options", "other_files", "certificate", "changes", "not_folded", "links"), True
) | {"origin": {"path", "container", "checksums", "weights_reason"}}
"""Keys of a fold's result that say how it came about, and not what the folded network is."""


@dataclass(frozen=True)
class Run:
    """Paths in one run folder; ``variant`` is `repaconv.core.export_names.Variant.name`, or ``full`` where that is
    said."""

    folder: Path

    @property
    def fold_json(self) -> Path:
        """Describes the folded model."""
        return self.folder / "fold.json"

    @property
    def model(self) -> Path:
        """The weights of a fold that has a file of weights; see `payload_of_fold` for any."""
        return self.folder / WEIGHTS

    @property
    def convert_json(self) -> Path:
        """What a conversion cost, where the run is of one."""
        return self.folder / CONVERT_JSON

    def payload_of_fold(self, folded: FoldArtefact) -> Path:
        """The folded network's file."""
        return self.folder / folded.payload.path

    @property
    def verify_json(self) -> Path:
        """The links that were verified."""
        return self.folder / "verify.json"

    def export_json(self, variant: str) -> Path:
        """Describes an ONNX model."""
        return self.folder / f"export{dotted(variant)}.json"

    def onnx(self, variant: str) -> Path:
        """Where it goes unless the user says otherwise."""
        return self.folder / f"model{dotted(variant)}.onnx"

    def engine(self, full: str, suffix: str) -> Path:
        """An engine for a target; its log and its ``.json`` lie beside it."""
        return self.folder / BUILD / f"{full}{suffix}"

    def bundle_json(self, full: str) -> Path:
        """Describes the bundle for a board."""
        return self.engine(full, ".bundle.json")

    def collected_json(self, full: str) -> Path:
        """What that board made of it."""
        return self.engine(full, ".collected.json")

    def bench_json(self, full: str) -> Path:
        """A measurement; ``<full>.throughput`` and ``<full>.estimate`` lie beside it."""
        return self.folder / BENCH / f"{full}.json"

    def history(self, full: str) -> Path:
        """Every measurement of the same; it outlives a second fold."""
        return self.folder / f"history-{full}.jsonl"

    def training_onnx(self, variant: str) -> Path:
        """The training form, exported for comparison."""
        return self.folder / BENCH / f"training{dotted(variant)}.onnx"

    def later_stages(self) -> list[Path]:
        """The artefacts that were made from the fold; a copy under a name of the user's own is none."""
        folders = (self.folder, self.folder / BENCH, self.folder / BUILD)
        return [path for folder in folders for path in sorted(folder.glob("*.json")) if self._later(path)]

    def _later(self, path: Path) -> bool:
        stage = stage_of(path)
        variant = json.loads(path.read_text()).get("variant") if stage else None
        places = {
            "verify": self.verify_json,
            "export": self.export_json(str(variant)),
            "bench": self.bench_json(str(variant)),
            "estimate": self.bench_json(f"{variant}.estimate"),
            "throughput": self.bench_json(f"{variant}.throughput"),
            "training": self.training_onnx(str(variant)).with_suffix(".json"),
            "build": self.engine(str(variant), ".json"),
            "bundle": self.bundle_json(str(variant)),
            "collect": self.collected_json(str(variant)),
        }
        return stage in places and (variant is None or path == places[stage])

    def payload(self, payload: Payload) -> Path:
        """The file that an artefact describes.

        Raises:
            Refused: If it is gone or its hash is another.
        """
        path = self.folder / payload.path
        if not path.is_file():
            raise Refused(
                f"{path} is missing.", hint="Run the command that writes it again.", code="artefact.payload-missing"
            )
        if sha256_of(path) != payload.sha256:
            raise Refused(
                f"{path} was changed after it was written: its hash differs.",
                hint="Move it away, and run the command that writes it again.",
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


def fold_of(run: Run) -> FoldArtefact:
    """What `fold` wrote of a run, as what its network is.

    Raises:
        Refused: If it cannot be read, or is of a kind that this version does not know.
    """
    kind = "method"  # as of those of before it was said
    with suppress(OSError, ValueError, AttributeError):  # read_artefact says what is wrong with it
        kind = str(from_json(run.fold_json.read_text()).get("kind", kind))
    if kind not in KINDS:
        raise Refused(
            f"{run.fold_json} is the fold of a {kind!r}, which this version of repaconv does not know.",
            hint="Fold again with this version of repaconv.",
            code="artefact.schema",
        )
    return read_artefact(run.fold_json, KINDS[kind])


def usual_folder(source: Path) -> Path:
    """Where the run of a file is unless the user says otherwise: that of its name without the suffix.

    Where that holds the run of a file of another suffix (``net.pth`` next to ``net.onnx``), that of its name with the
    suffix: ``repaconv-out/net-onnx``. A folder that holds the run of this file already comes first.
    """
    usual, longer = OUT / source.stem, OUT / source.name.replace(".", "-")
    if source.is_dir():
        return OUT / source.name
    own = str(source.resolve())
    taken = {folder: path for folder in (usual, longer) if (path := _origin_of(folder))}
    for folder, path in taken.items():
        if path == own:
            return folder
    return longer if usual in taken and Path(taken[usual]).suffix != source.suffix else usual


def _origin_of(folder: Path) -> str:
    """The file that a run is of; empty where that cannot be read."""
    run = Run(folder)
    with suppress(Refused):
        return fold_of(run).origin.path if run.fold_json.is_file() else ""
    return ""


def prepare_run(
    checkpoint: Path, sha256: str, out: Path | None, *, force: bool, payload: str = WEIGHTS, files: Sequence[Path] = ()
) -> Run:
    """The folder for a run; nothing is written yet.

    Args:
        checkpoint: What is folded.
        sha256: Its hash.
        out: The folder; see `usual_folder` when None.
        force: Replace the run of another file.
        payload: What the folded network's file will be called.
        files: What else will be written.

    Raises:
        Refused: If the folder holds the run of another checkpoint and ``force`` was not asked for, or is no run's.
        UsageProblem: If what the fold would replace is not what was written there.
    """
    run = Run(out if out is not None else usual_folder(checkpoint))
    latest = run.folder.resolve() == LATEST.resolve()
    if latest or (run.folder.exists() and not run.folder.is_dir()):
        what = "where the name of the newest run is kept" if latest else "a file, not a folder"
        raise Refused(f"{run.folder} is {what}.", hint="Give another folder with -o.", code="run.not-a-folder")
    inside = sorted(path.name for path in run.folder.iterdir()) if run.folder.is_dir() else []
    own = (PLAN, *((*OF_CONVERT, UNCONVERTED) if stage_of(run.convert_json) == "convert" else ()))
    own += OF_FINETUNE if stage_of(run.folder / FINETUNE_JSON) == "finetune" else ()
    foreign = [name for name in inside if name not in own and not left_over(run.folder / name)]
    if foreign and stage_of(run.fold_json) != "fold":
        raise Refused(
            f"{run.folder} is not a run folder and contains other files, such as {foreign[0]}.",
            hint="Give a new or empty folder with -o.",
            code="run.foreign-files",
        )
    if foreign and not force:
        origin = fold_of(run).origin
        if sha256 != origin.sha256 and str(checkpoint.resolve()) != origin.path:
            raise Refused(
                f"{run.folder} contains the run of another file, {origin.path}.",
                hint="Give another folder with -o, or replace it with --force.",
                code="run.other-checkpoint",
            )
    require_ours(run.fold_json, "fold", run.folder / payload, *files)
    return run


def put_fold(run: Run, folded: AnyFold) -> AnyFold:
    """Write a fold's result. What was made from another fold before is removed, and a notice names it.

    If the folded network is the same as before, what was made from it is up to date and remains.

    Returns:
        The result as it was written. Its ``other_files`` name what lies outside the run folder, where a user asked for
        it, and remains: it may be replaced by an export of this fold.
    """
    if not _same_network(run, folded):
        stays = _clear_later_stages(run)
        folded = folded.model_copy(update={"other_files": (*folded.other_files, *stays)})
    return put(run.fold_json, folded)


def _same_network(run: Run, folded: FoldArtefact) -> bool:
    """Whether the run folder has the fold of the same weights into the same network."""
    with suppress(Refused):  # of a version that cannot be read any more
        before, now = (each.model_dump(mode="json", exclude=_HOW_FOLDED) for each in (fold_of(run), folded))
        return before == now
    return False


def _clear_later_stages(run: Run) -> tuple[Payload, ...]:
    """Remove what was made from an earlier fold, and name it.

    Returns:
        What of it lies elsewhere and remains.
    """
    made: list[Path] = []
    stays: list[Payload] = []
    for artefact in run.later_stages():
        made += [artefact.resolve(), *named_by(artefact)]
        stays += remove(artefact, run.folder)
    for folder in (BENCH, BUILD):
        with suppress(OSError):  # not there, or not empty: somebody has something of his own in it
            (run.folder / folder).rmdir()
    inside = run.folder.resolve()
    gone = [str(run.folder / file.relative_to(inside)) for file in dict.fromkeys(made) if not file.exists()]
    if gone:
        LOGGER.warning("removed: %s, made from the previous fold", ", ".join(gone))
    return tuple({payload.path: payload for payload in stays}.values())


def remember(run: Run) -> None:
    """Make this the newest run of this folder."""
    inside = run.folder.parent.resolve() == OUT.resolve()
    write_text(LATEST, f"{run.folder.name if inside else run.folder.resolve()}\n")


def is_newest(run: Run) -> bool:
    """Whether commands take it where no run is given."""
    return LATEST.is_file() and (OUT / LATEST.read_text().strip()).resolve() == run.folder.resolve()


def run_of(files: Iterable[str | Path]) -> Run | None:
    """The run in which the first of these files lies that lies in any; None where none does."""
    inside = (Run(folder) for file in files for folder in list(Path(file).parents)[:2])
    return next((run for run in inside if run.fold_json.is_file() or run.convert_json.is_file()), None)


def run_and_model(given: Path | None) -> tuple[Run, Path | None]:
    """The run that was given, and which of its ONNX models if that is what was given: one in it, or of the newest run.

    Raises:
        UsageProblem: See `find_run`.
    """
    if given is None or not given.is_file():
        return find_run(given), None
    return find_run(given.parent if Run(given.parent).fold_json.is_file() else None), given


def find_run(given: Path | None) -> Run:
    """The run that was given, or the newest one.

    Raises:
        UsageProblem: If there is none.
        Refused: If what was given is not there.
    """
    if given is None:
        if not LATEST.is_file():
            raise UsageProblem(
                f"there is no run in {OUT}/ yet.",
                hint="Fold a checkpoint first: repaconv fold CKPT. Or give the run folder.",
                code="run.none",
            )
        given = OUT / LATEST.read_text().strip()
        LOGGER.info("newest run: %s", given)
    elif not given.exists():
        raise Refused(f"there is no file or folder {given}.", hint="Check its path.", code="run.missing")
    run = Run(given)
    if not run.fold_json.is_file():
        raise UsageProblem(
            f"{given} is not a run folder: it has no fold.json.",
            hint="Give the folder that `repaconv fold` wrote, or fold again.",
            code="run.none",
        )
    return run


def require_sound(run: Run, folded: FoldArtefact, *later: tuple[Artefact, Path], unverified: bool) -> tuple[str, ...]:
    """What a failed verdict stops: every stage that works with the weights that it was about.

    Args:
        run: Its fold, and its verification if that was of these weights, are looked at.
        folded: The fold.
        later: What else the stage builds upon, and where it is written.
        unverified: Go on.

    Returns:
        What was overridden up to here, to be written into the next artefact.

    Raises:
        GateFailed: If a verdict is failed and ``unverified`` was not asked for.
    """
    behind: list[tuple[Artefact, Path]] = [(folded, run.fold_json)]
    if run.verify_json.is_file():
        verified = read_artefact(run.verify_json, VerifyArtefact)
        behind += [(verified, run.verify_json)] if verified.model_sha256 == folded.payload.sha256 else []
    noted = [require_passed(artefact, path, unverified=unverified) for artefact, path in (*behind, *later)]
    return tuple(dict.fromkeys(word for words in noted for word in words))


def require_passed(artefact: Artefact, path: Path, *, unverified: bool) -> tuple[str, ...]:
    """Stop behind one failed verdict, or note it; see `require_sound`."""
    if artefact.verdict != "failed":
        return artefact.unverified
    if not unverified:
        links = [
            f"{link.name} ({link.candidate})" for link in getattr(artefact, "links", ()) if link.verdict == "failed"
        ]
        raise GateFailed(
            f"{path}: the check failed{': ' if links else ''}{', '.join(links)}. Later steps stop here.",
            hint=f"Fix it and run `repaconv {artefact.stage}` again, or continue with --allow-unverified, which "
            "every later result records.",
            code=f"{artefact.stage}.failed",
        )
    return (*artefact.unverified, f"{artefact.stage} failed")

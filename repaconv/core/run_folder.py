"""The run folder: one per checkpoint, with a ``<stage>.json`` next to each output file; and which run is the newest."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from repaconv.core.errors import GateFailed, Refused, UsageProblem
from repaconv.core.export_variants import dotted
from repaconv.core.file_replacement import (
    files_named_by,
    is_left_over,
    remove_artifact,
    replace_artifact,
    require_replaceable,
)
from repaconv.core.files import (
    CHECKPOINT_SUFFIXES,
    is_utf8,
    parse_json,
    read_artefact,
    require_valid_name,
    sha256_of,
    stage_of,
    write_text,
)
from repaconv.core.progress import LOGGER
from repaconv.core.sharded_checkpoint import (
    INDEX,
    checkpoint_at,
    files_of,
    is_index,
    resolved_checkpoint,
    weights_in,
)
from repaconv.core.sharded_checkpoint import WEIGHTS as WEIGHTS_OF_FOLDERS
from repaconv.results import KINDS, Artefact, ExportArtefact, FoldArtefact, Link, Payload, VerifyArtefact

OUT = Path("repaconv-out")
LATEST = OUT / "latest"
BENCH, BUILD, WEIGHTS, FOLDED, UNCONVERTED = "bench", "build", "model.safetensors", ".folded.onnx", "unconverted.onnx"
PRECISIONS, PLAN = ("fp32", "fp16", "bf16", "int8"), "plan.json"
OF_CONVERT = CONVERT_JSON, CONVERTED, SCORES = "convert.json", "converted.safetensors", "scores.svg"
OF_FINETUNE = FINETUNE_JSON, FINETUNED, TRAINING_STATE = "finetune.json", "finetuned.safetensors", "finetune.state"
AnyFold = TypeVar("AnyFold", bound=FoldArtefact)
_HOW_FOLDED: dict[str, Any] = dict.fromkeys(
    ("made_by", "options", "other_files", "certificate", "changes", "not_folded", "links"), True
) | {"origin": {"path", "container", "checksums", "weights_reason"}}
"""Keys of a fold's result that describe how it was made, not what the folded network is."""


@dataclass(frozen=True)
class Run:
    """The paths in one run folder. ``variant`` is `repaconv.core.export_variants.Variant.name`; ``full`` is
    `repaconv.core.export_variants.Variant.full`."""

    folder: Path

    @property
    def fold_json(self) -> Path:
        """The description of the folded model."""
        return self.folder / "fold.json"

    @property
    def model(self) -> Path:
        """The weights of a fold whose file is a checkpoint; see `payload_of_fold` for any fold."""
        return self.folder / WEIGHTS

    @property
    def convert_json(self) -> Path:
        """The result of a conversion: its loss. Exists only if the run is of a conversion."""
        return self.folder / CONVERT_JSON

    def payload_of_fold(self, folded: FoldArtefact) -> Path:
        """Return the file of the folded network."""
        return self.folder / folded.payload.path

    @property
    def verify_json(self) -> Path:
        """The comparisons that were made by ``verify``."""
        return self.folder / "verify.json"

    def export_json(self, variant: str) -> Path:
        """Return the description of an ONNX model."""
        return self.folder / f"export{dotted(variant)}.json"

    def onnx(self, variant: str) -> Path:
        """Return the default path of an ONNX model."""
        return self.folder / f"model{dotted(variant)}.onnx"

    def engine(self, full: str, suffix: str) -> Path:
        """Return the path of an engine for a target; its log and its ``.json`` are next to it."""
        return self.folder / BUILD / f"{full}{suffix}"

    def bundle_json(self, full: str) -> Path:
        """Return the description of the bundle for a board."""
        return self.engine(full, ".bundle.json")

    def collected_json(self, full: str) -> Path:
        """Return the result of that bundle on the board."""
        return self.engine(full, ".collected.json")

    def bench_json(self, full: str) -> Path:
        """Return the path of a measurement; ``<full>.throughput`` and ``<full>.estimate`` are next to it."""
        return self.folder / BENCH / f"{full}.json"

    def history(self, full: str) -> Path:
        """Return the file with all measurements of the same variant; a new fold does not remove it."""
        return self.folder / f"history-{full}.jsonl"

    def training_onnx(self, variant: str) -> Path:
        """Return the path of the training-time network exported for comparison."""
        return self.folder / BENCH / f"training{dotted(variant)}.onnx"

    def later_stages(self) -> list[Path]:
        """Return the artifacts that were made from the fold, without copies under other names."""
        folders = (self.folder, self.folder / BENCH, self.folder / BUILD)
        return [path for folder in folders for path in sorted(folder.glob("*.json")) if self._later(path)]

    def _later(self, path: Path) -> bool:
        stage = stage_of(path)
        variant = json.loads(path.read_text("utf-8")).get("variant") if stage else None
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
        """Return the path of the file that an artifact describes, after checking its hash.

        Raises:
            Refused: If it is missing or its hash differs.
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


def onnx_model_of(run: Run, exported: ExportArtefact) -> Path:
    """Return the path of the ONNX model that an artifact describes, after checking its hash and that of its external
    weights.

    Raises:
        Refused: If one of them is missing or its hash differs.
    """
    if exported.data is not None:
        run.payload(exported.data)
    return run.payload(exported.payload)


def fold_of(run: Run) -> FoldArtefact:
    """Read the result of `fold` in a run.

    Raises:
        Refused: If it cannot be read, or is of a kind that this version does not know.
    """
    kind = "method"  # files of earlier versions have no kind
    with suppress(OSError, ValueError, AttributeError):  # read_artefact raises the error for these
        kind = str(parse_json(run.fold_json.read_text("utf-8")).get("kind", kind))
    if kind not in KINDS:
        raise Refused(
            f"{run.fold_json} is the fold of a {kind!r}, which this version of repaconv does not know.",
            hint="Fold again with this version of repaconv.",
            code="artefact.schema",
        )
    return read_artefact(run.fold_json, KINDS[kind])


def utf8_name(source: Path) -> Path:
    """Return the name of a file for what is made of it; of an index, the name that the checkpoint has in one file.

    Libraries open no name but UTF-8: other bytes are ``\\xff``.
    """
    name = source.name.removesuffix(INDEX) if is_index(source) else source.name
    return Path(os.fsencode(name).decode(errors="backslashreplace"))


def utf8_stem(source: Path) -> str:
    """Return the `utf8_name` of a file without its suffix."""
    return utf8_name(source).stem


def title_of(checkpoint: Path) -> str:
    """Return what a drawing calls a checkpoint: its file, or its folder if the file is named as in all such folders."""
    name = utf8_name(checkpoint)
    return str(utf8_name(checkpoint.resolve().parent) if name.name in WEIGHTS_OF_FOLDERS else name)


def default_folder(source: Path) -> Path:
    """Return the default run folder of a file: ``repaconv-out/<stem>``.

    If that folder contains the run of a file with another suffix (``net.pth`` next to ``net.onnx``), it is
    ``repaconv-out/net-onnx``. A folder that already contains the run of this file comes first.
    """
    name = utf8_name(source)
    usual, longer = OUT / name.stem, OUT / name.name.replace(".", "-")
    if source.is_dir():
        return OUT / name
    own = str(resolved_checkpoint(source))
    taken = {folder: path for folder in (usual, longer) if (path := _origin_of(folder))}
    for folder, path in taken.items():
        if path == own:
            return folder
    return longer if usual in taken and Path(taken[usual]).suffix != source.suffix else usual


def _origin_of(folder: Path) -> str:
    """Return the path of the file that was folded in a run folder; empty if that cannot be read."""
    run = Run(folder)
    with suppress(Refused):
        return fold_of(run).origin.path if run.fold_json.is_file() else ""
    return ""


def prepare_run(
    checkpoint: Path, sha256: str, out: Path | None, *, force: bool, payload: str = WEIGHTS, files: Sequence[Path] = ()
) -> Run:
    """Choose and check the folder for a run; nothing is written.

    Args:
        checkpoint: The file to fold.
        sha256: Its hash.
        out: The folder; see `default_folder` when None.
        force: Replace the run of another file.
        payload: File name of the folded network.
        files: Other files that will be written.

    Raises:
        Refused: If the folder contains the run of another checkpoint without ``force``, or is not a run folder.
        UsageProblem: If a file that the fold would replace was not written by repaconv, or was changed since.
    """
    run = Run(out if out is not None else default_folder(checkpoint))
    require_valid_name(run.folder / payload)
    if not is_utf8(run.folder):
        raise Refused(
            f"the name {run.folder} is not UTF-8, so that libraries could not open what is in it.",
            hint="Give another folder with -o.",
            code="file.name",
        )
    latest = run.folder.resolve() == LATEST.resolve()
    if latest or (run.folder.exists() and not run.folder.is_dir()):
        what = "where the name of the newest run is kept" if latest else "a file, not a folder"
        raise Refused(f"{run.folder} is {what}.", hint="Give another folder with -o.", code="run.not-a-folder")
    around = next((each for each in run.folder.parents if os.path.lexists(each)), Path())
    if not around.is_dir():
        raise Refused(
            f"{run.folder} cannot be a folder, since {around} is a file.",
            hint="Give another folder with -o.",
            code="run.not-a-folder",
        )
    inside = sorted(path.name for path in run.folder.iterdir()) if run.folder.is_dir() else []
    own = (PLAN, *((*OF_CONVERT, UNCONVERTED) if stage_of(run.convert_json) == "convert" else ()))
    own += OF_FINETUNE if stage_of(run.folder / FINETUNE_JSON) == "finetune" else ()
    foreign = [name for name in inside if name not in own and not is_left_over(run.folder / name)]
    if foreign and stage_of(run.fold_json) != "fold":
        raise Refused(
            f"{run.folder} is not a run folder and contains other files, such as {foreign[0]}.",
            hint="Give a new or empty folder with -o.",
            code="run.foreign-files",
        )
    written = files_named_by(run.fold_json, *run.later_stages())
    if lost := next((file for file in files_of(checkpoint) if file.resolve() in written), None):
        raise Refused(
            f"{lost} was written by the run in {run.folder}, which this fold would replace, and remove the file.",
            hint="Give another folder with -o.",
            code="run.other-checkpoint",
        )
    if foreign and not force:
        origin = fold_of(run).origin
        if sha256 != origin.sha256 and str(resolved_checkpoint(checkpoint)) != origin.path:
            raise Refused(
                f"{run.folder} contains the run of another file, {origin.path}.",
                hint="Give another folder with -o, or replace it with --force.",
                code="run.other-checkpoint",
            )
    require_replaceable(run.fold_json, "fold", run.folder / payload, *files)
    return run


def write_fold(run: Run, folded: AnyFold) -> AnyFold:
    """Write the result of a fold. Files that were made from another fold before are removed, and a notice names them.

    If the folded network is the same as before, the files that were made from it are up to date and remain.

    Returns:
        The result as it was written. Its ``other_files`` are files that the user had written outside the run folder.
        They remain, and an export of this fold may replace them.
    """
    if not _same_network(run, folded):
        stays = _clear_later_stages(run)
        folded = folded.model_copy(update={"other_files": (*folded.other_files, *stays)})
    return replace_artifact(run.fold_json, folded)


def _same_network(run: Run, folded: FoldArtefact) -> bool:
    """Return whether the run folder already contains the fold of the same weights into the same network."""
    with suppress(Refused):  # of a version that is no longer supported
        before, now = (each.model_dump(mode="json", exclude=_HOW_FOLDED) for each in (fold_of(run), folded))
        return before == now
    return False


def _clear_later_stages(run: Run) -> tuple[Payload, ...]:
    """Remove the files that were made from an earlier fold, and name them in a notice.

    Returns:
        The files among them that are outside the run folder and remain.
    """
    made: list[Path] = []
    stays: list[Payload] = []
    for artefact in run.later_stages():
        made += [artefact.resolve(), *files_named_by(artefact)]
        stays += remove_artifact(artefact, run.folder)
    for folder in (BENCH, BUILD):
        with suppress(OSError):  # missing, or not empty: it contains files of the user
            (run.folder / folder).rmdir()
    inside = run.folder.resolve()
    gone = [str(run.folder / file.relative_to(inside)) for file in dict.fromkeys(made) if not file.exists()]
    if gone:
        LOGGER.warning("removed: %s, made from the previous fold", ", ".join(gone))
    return tuple({payload.path: payload for payload in stays}.values())


_KEEPS_NEWEST = ContextVar("_KEEPS_NEWEST", default=False)


@contextmanager
def newest_kept() -> Iterator[None]:
    """Within it, no fold becomes the newest run: for a command that folds models into a folder of its own."""
    before = _KEEPS_NEWEST.set(True)
    try:
        yield
    finally:
        _KEEPS_NEWEST.reset(before)


def set_newest(run: Run) -> None:
    """Record this run as the newest in ``repaconv-out``, except within `newest_kept`."""
    if _KEEPS_NEWEST.get():
        return
    inside = run.folder.parent.resolve() == OUT.resolve()
    write_text(LATEST, f"{run.folder.name if inside else run.folder.resolve()}\n")


def is_newest(run: Run) -> bool:
    """Return whether this is the newest run, which commands use if none is given."""
    return LATEST.is_file() and (OUT / LATEST.read_text("utf-8").strip()).resolve() == run.folder.resolve()


def run_of(files: Iterable[str | Path]) -> Run | None:
    """Return the run folder that contains the first of these files that is in a run folder; None if there is none."""
    inside = (Run(folder) for file in files for folder in list(Path(file).parents)[:2])
    return next((run for run in inside if run.fold_json.is_file() or run.convert_json.is_file()), None)


def run_and_model(given: Path | None) -> tuple[Run, Path | None]:
    """Return the run that was given, and its ONNX model if a model was given: one in that folder, or of the newest run.

    Raises:
        UsageProblem: See `find_run`.
    """
    if given is None or not given.is_file():
        return find_run(given), None
    return find_run(given.parent if Run(given.parent).fold_json.is_file() else None), given


def find_run(given: Path | None) -> Run:
    """Return the run that was given, or the newest one.

    Raises:
        UsageProblem: If there is none.
        Refused: If the given path does not exist.
    """
    if given is None:
        if not LATEST.is_file():
            raise UsageProblem(
                f"there is no run in {OUT}/ yet.",
                hint="Fold a checkpoint first: repaconv fold CKPT. Or give the run folder.",
                code="run.none",
            )
        given = OUT / LATEST.read_text("utf-8").strip()
        LOGGER.info("newest run: %s", given)
    else:
        require_valid_name(given)
        if not given.exists():
            raise Refused(f"there is no file or folder {given}.", hint="Check its path.", code="run.missing")
    run = Run(given)
    if not run.fold_json.is_file():
        if weights := source_in(given):
            raise UsageProblem(
                f"{given} is not a run folder: it holds a checkpoint, {weights.name}.",
                hint=f"Fold it first: repaconv fold {shlex.quote(str(given))}",
                code="run.none",
            )
        raise UsageProblem(
            f"{given} is not a run folder: it has no fold.json.",
            hint=f"Fold it first: repaconv fold {shlex.quote(str(given))}"
            if given.suffix in (".onnx", *CHECKPOINT_SUFFIXES) or is_index(given)
            else "Give the folder that `repaconv fold` wrote, or fold again.",
            code="run.none",
        )
    return run


def source_in(folder: Path) -> Path | None:
    """The checkpoint that `fold` takes from a folder: the index of several files, or the weights of a model."""
    with suppress(Refused):  # several, which `fold` asks to choose from
        found = checkpoint_at(folder)
        return found if is_index(found) else weights_in(folder)
    return None


FOLD_LINKS = ("converted", "recorded", "fold", "stored")
"""Links of `verify` that compare the folded network itself. All others compare its exports and engines."""


def require_passed_checks(
    run: Run, folded: FoldArtefact, *later: tuple[Artefact, Path], unverified: bool, exports: bool = True
) -> tuple[str, ...]:
    """Refuse to continue from results whose verdict is failed.

    Args:
        run: The run; its verification is checked if it was of these weights.
        folded: The fold.
        later: Other artifacts that the stage uses, with their paths. If there is an export among them, failed links of
            other exports do not matter.
        unverified: Continue anyway.
        exports: Whether a failed check of an export stops the stage, too. It does not stop ``export``, which replaces
            it, nor ``tune``, which looks for a better one.

    Returns:
        The overridden verdicts so far, to be recorded in the next artifact.

    Raises:
        GateFailed: If a verdict is failed and ``unverified`` is false.
    """
    earlier: list[tuple[Artefact, Path]] = [(folded, run.fold_json)]
    if run.verify_json.is_file():
        verified = read_artefact(run.verify_json, VerifyArtefact)
        used = {artefact.variant for artefact, _ in later if isinstance(artefact, ExportArtefact)}
        failed = [link for link in verified.links if link.verdict == "failed"]
        stopping = [link for link in failed if link.name in FOLD_LINKS or (exports and not _of_another(link, used))]
        if stopping or not failed:
            verified = verified.model_copy(update={"links": tuple(stopping)})
            earlier += [(verified, run.verify_json)] if verified.model_sha256 == folded.payload.sha256 else []
    noted = [require_passed(artefact, path, unverified=unverified) for artefact, path in (*earlier, *later)]
    return tuple(dict.fromkeys(word for words in noted for word in words))


def failed_of_others(run: Run, folded: FoldArtefact, used: ExportArtefact) -> str:
    """Which links of other exports than the one that is used failed in `verify`, in words; empty if none did."""
    verified = read_artefact(run.verify_json, VerifyArtefact) if run.verify_json.is_file() else None
    if verified is None or verified.model_sha256 != folded.payload.sha256:
        return ""
    failed = [link for link in verified.links if link.verdict == "failed" and _of_another(link, {used.variant})]
    named = ", ".join(dict.fromkeys(f"{link.name} of {link.variant}" if link.variant else link.name for link in failed))
    return f"verify failed for another export, which was not measured: {named}" if named else ""


def _of_another(link: Link, used: Collection[str]) -> bool:
    """Whether a link is of an export of another variant than those that are used, if any are."""
    return bool(used and link.sha256) and link.name != "engine" and link.variant not in used


def require_passed(artefact: Artefact, path: Path, *, unverified: bool) -> tuple[str, ...]:
    """Refuse to continue after one failed verdict, or record that it was overridden; see `require_passed_checks`."""
    if artefact.verdict != "failed":
        return artefact.unverified
    if not unverified:
        links = [
            f"{link.name} ({link.candidate})" for link in getattr(artefact, "links", ()) if link.verdict == "failed"
        ]
        lossy = {"fp16", "bf16", "int8"} & {
            link.name for link in getattr(artefact, "links", ()) if link.verdict == "failed"
        }
        way = "Keep more layers in FP32 (--keep-fp32), give other images" if lossy else "Fix it"
        raise GateFailed(
            f"{path}: the check failed{': ' if links else ''}{', '.join(links)}. Later steps stop here.",
            hint=f"{way} and run `repaconv {artefact.stage}` again, or continue with --allow-unverified, which "
            "every later result records.",
            code=f"{artefact.stage}.failed",
        )
    return (*artefact.unverified, f"{artefact.stage} failed")

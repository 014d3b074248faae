"""`fetch`: download a model once and pin it by its hashes. No other stage downloads models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repaconv.core.errors import (
    EnvironmentProblem,
    Refused,
    RepaconvError,
    UsageProblem,
    describe_exception,
    first_line,
    require_module,
)
from repaconv.core.file_replacement import move_from, replace_artifact, require_replaceable, write_payload
from repaconv.core.files import CHECKPOINT_SUFFIXES, lock_folder, payload_of
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import INDEX, WEIGHTS, part_names, weights_in
from repaconv.core.temporary_folders import scratch_folder
from repaconv.results import Fetched
from repaconv.stages.shared.fetched_files import FETCHED, address_of, record_of
from repaconv.stages.shared.option_dataclasses import with_checked_paths
from repaconv.stages.shared.result_provenance import made_by, with_files

FOLDER = (*WEIGHTS, "config.json", "preprocessor_config.json")
"""Files that are downloaded from a folder, besides weights in several files; none of them is code."""


@with_checked_paths
def fetch(address: str | Path, *, progress: Progress = silent) -> Fetched:
    """Download a checkpoint, an ONNX file or a Hugging Face folder; `fold`, `convert` take its address.

    Args:
        address: ``hf://OWNER/NAME[@REVISION]``, or any address that fsspec opens.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        UsageProblem: If it is not an address.
        EnvironmentProblem: If the extra ``hub`` is not installed, or the address does not answer.
        Refused: If there is nothing at the address that can be folded.
    """
    asked = address_of(address)
    if asked is None:
        raise UsageProblem(
            f"{address} is not an address.", hint="E.g. repaconv fetch hf://OWNER/NAME@REVISION", code="address.none"
        )
    progress("fetch", 0, 0)
    record = record_of(asked)
    require_replaceable(record, "fetch")
    revision = _commit(asked) if asked.startswith("hf://") else ""
    exact = f"{asked.partition('@')[0]}@{revision}" if revision else asked
    place = Path(record.stem) / exact.rstrip("/").rpartition("/")[2]
    with lock_folder(FETCHED), scratch_folder(FETCHED) as work:
        brought = _download(exact, work / place.name)
        came = sorted(brought.iterdir()) if brought.is_dir() else [brought]
        files = [FETCHED / place.parent / each.relative_to(work) for each in came]
        require_replaceable(record, "fetch", *files)
        for each, file in zip(came, files, strict=True):
            write_payload(file, move_from(each))
        values = {"address": asked, "revision": revision, "path": str(place), "verdict": "passed", "made_by": made_by()}
        first, *others = (payload_of(each, FETCHED) for each in files)
        fetched = replace_artifact(record, Fetched.model_validate({**values, "payload": first, "other_files": others}))
    return with_files(fetched, [], [*files, record])


def _commit(address: str) -> str:
    """The commit that a branch or a tag currently points to."""
    hub: Any = require_module("huggingface_hub", "huggingface_hub", "pip install 'repaconv[hub]'")
    name, _, revision = address.removeprefix("hf://").partition("@")
    try:
        return str(hub.HfApi().model_info(name, revision=revision or None).sha)
    except Exception as error:
        raise _unreachable(address, error) from error


def _download(address: str, place: Path) -> Path:
    """Download a file, or the known files of a folder."""
    fsspec: Any = require_module("fsspec", "fsspec", "pip install 'repaconv[hub]'")
    try:
        system, path = fsspec.core.url_to_fs(address)
        if system.isfile(path):
            system.get_file(path, str(place))
            return place
        place.mkdir()
        there = {each.rpartition("/")[2]: each for each in system.ls(path, detail=False)}
        for name in filter(there.__contains__, FOLDER):
            system.get_file(there[name], str(place / name))
        if weights_in(place) is None:
            _download_parts(system, there, place)
    except RepaconvError:
        raise
    except Exception as error:  # the class of the error depends on the kind of address
        raise _unreachable(address, error) from error
    if weights_in(place) is None:
        raise Refused(
            f"{address} contains neither {' nor '.join(WEIGHTS)}, in one file or in several.",
            hint="Give the address of the file itself.",
            code="address.weights",
        )
    return place


def _download_parts(system: Any, there: Mapping[str, str], place: Path) -> None:
    """Download the index of weights in several files, if there is one, and the parts that it names.

    Args:
        system: The file system of fsspec.
        there: The paths of the files in the folder by their names.
        place: Where they are written.

    Raises:
        Refused: ``address.weights`` if a part is not in the folder, ``checkpoint.index`` if the index is damaged.
    """
    index = next((f"{name}{INDEX}" for name in WEIGHTS if f"{name}{INDEX}" in there), None)
    if index is None:
        return
    system.get_file(there[index], str(place / index))
    for name in part_names(place / index):
        if name not in there or Path(name).suffix not in CHECKPOINT_SUFFIXES:
            what = "is no file of weights" if name in there else "is not in its folder"
            raise Refused(
                f"{there[index]} names the part {name}, which {what}.",
                hint="The upload is incomplete or wrong: get the model elsewhere.",
                code="address.weights",
            )
        system.get_file(there[name], str(place / name))


def _unreachable(address: str, error: Exception) -> EnvironmentProblem:
    if isinstance(error, ImportError):  # fsspec's drivers of other protocols have packages of their own
        return EnvironmentProblem(
            f"{address} cannot be downloaded: {first_line(error)}.",
            hint="Install what it names with pip, or download the file with another tool and give its path.",
            code="address.package",
        )
    return EnvironmentProblem(
        f"{address} cannot be downloaded: {describe_exception(error)}.",
        hint="Check the address, the network connection and your access rights.",
        code="address.unreachable",
    )

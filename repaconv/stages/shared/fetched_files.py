"""Files that `repaconv fetch` downloaded, looked up by their address; nothing is downloaded here."""

from __future__ import annotations

import re
from pathlib import Path

from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.core.files import is_unchanged, read_artefact, require_reachable, require_valid_name
from repaconv.core.sharded_checkpoint import checkpoint_at, weights_in
from repaconv.results import Fetched

FETCHED = run_folder.OUT / "fetched"
"""Folder with a record for each address, next to the files fetched from there."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):(/{1,3})(.+)")


def address_of(source: str | Path) -> str | None:
    """The address, if it is one and not a file. A `Path` made of an address has lost a slash, which is put back.

    >>> address_of(Path("hf://owner/name@main"))
    'hf://owner/name@main'
    """
    found = _ADDRESS.fullmatch(str(source))
    if found is None or Path(source).exists():
        return None
    scheme, _, rest = found.groups()
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def record_of(address: str) -> Path:
    """Path of an address's record, which may not exist."""
    return FETCHED / f"{re.sub('[^A-Za-z0-9_.@-]+', '--', address)}.json"


def local_path(source: str | Path) -> Path:
    """The local path: of an address what was fetched from there, otherwise the path itself.

    Of ``.`` and ``..`` it is the folder's absolute path: files are named after it, and dots are no name.

    Raises:
        EnvironmentProblem: If the address was not fetched.
        Refused: If a file was changed after it was fetched, or the path cannot be a file's.
    """
    require_valid_name(Path(source))
    address = address_of(source)
    if address is None:
        require_reachable(Path(source))
        path = Path(source)
        return path if path.name.strip(".") else path.resolve()
    record = record_of(address)
    if not record.is_file():
        raise EnvironmentProblem(
            f"{address} is not on this machine, and only `repaconv fetch` downloads.",
            hint=f"Download it first: repaconv fetch {address}",
            code="address.offline",
        )
    fetched = read_artefact(record, Fetched)
    for each in fetched.files:
        path = record.parent / each.path
        if not is_unchanged(path, each.sha256):
            raise Refused(
                f"{path} was changed after it was fetched from {address}.",
                hint=f"Download it again: repaconv fetch {address}",
                code="address.changed",
            )
    return record.parent / fetched.path


def local_weights(source: str | Path) -> Path:
    """The local path as of `local_path`; of a folder with a checkpoint in several files, their index; of a folder that
    was fetched, its weights.

    Raises:
        EnvironmentProblem, Refused: As `local_path` does, or the folder holds several checkpoints.
    """
    path = local_path(source)
    fetched = address_of(source) is not None and path.is_dir()
    return (weights_in(path) if fetched else None) or checkpoint_at(path)

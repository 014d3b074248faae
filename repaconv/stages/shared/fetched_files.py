"""Addresses in place of files: what `repaconv fetch` brought from there, and nothing from a network."""

from __future__ import annotations

import re
from pathlib import Path

from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.core.files import read_artefact, sha256_of
from repaconv.results import Fetched
from repaconv.sources.named_architectures import WEIGHTS

FETCHED = run_folder.OUT / "fetched"
"""Where it lies: a record for each address, and beside it what came from there."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):(/{1,3})(.+)")


def address_of(source: str | Path) -> str | None:
    """The address, if it is one and no file; a `Path` of one has lost a slash.

    >>> address_of(Path("hf://owner/name@main"))
    'hf://owner/name@main'
    """
    found = _ADDRESS.fullmatch(str(source))
    if found is None or Path(source).exists():
        return None
    scheme, _, rest = found.groups()
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def record_of(address: str) -> Path:
    """Where an address's record lies, whether it is there or not."""
    return FETCHED / f"{re.sub('[^A-Za-z0-9_.@-]+', '--', address)}.json"


def here(source: str | Path) -> Path:
    """A file or folder as it is; of an address, what was fetched from there.

    Raises:
        EnvironmentProblem: If it was not fetched; nothing is, unless it is asked for.
        Refused: If what was fetched is not what lies there now.
    """
    address = address_of(source)
    if address is None:
        return Path(source)
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
        if not path.is_file() or sha256_of(path) != each.sha256:
            raise Refused(
                f"{path} was changed after it was fetched from {address}.",
                hint=f"Download it again: repaconv fetch {address}",
                code="address.changed",
            )
    return record.parent / fetched.path


def weights_here(source: str | Path) -> Path:
    """The same; of a folder that was fetched, its weights."""
    path = here(source)
    fetched = address_of(source) is not None and path.is_dir()
    return next((path / name for name in WEIGHTS if fetched and (path / name).is_file()), path)

"""Results of `fetch` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import plain, stdout

if TYPE_CHECKING:
    from repaconv.results import Fetched


def show_fetch(done: Fetched) -> None:
    """Print the downloaded files and their hashes."""
    revision = f", revision {done.revision}" if done.revision else ""
    stdout().print(f"{plain(done.address)}{revision}")
    for each in done.files:
        stdout().print(f"{plain(each.path)}: {each.bytes:,} bytes, sha256 {each.sha256}")

"""Results of `fetch` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import out, plain

if TYPE_CHECKING:
    from repaconv.results import Fetched


def show_fetch(done: Fetched) -> None:
    """Print the downloaded files and their hashes."""
    revision = f", revision {done.revision}" if done.revision else ""
    out().print(f"{plain(done.address)}{revision}")
    for each in done.files:
        out().print(f"{plain(each.path)}: {each.bytes:,} bytes, sha256 {each.sha256}")

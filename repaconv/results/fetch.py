"""The result of ``fetch``: what was downloaded from an address, with its hashes."""

from __future__ import annotations

from repaconv.results.records import Artefact, Payload


class Fetched(Artefact):
    """The result of ``fetch``: a file or folder that was downloaded, with its hashes.

    Attributes:
        stage: The command that wrote this result, ``fetch``.
        address: The address as it was given, e.g. ``hf://OWNER/NAME``.
        revision: The commit that the address stood for when it was downloaded; empty if it is not an ``hf://`` address.
        path: The file or folder, relative to the folder of this result.
        payload: The file, or the first file of the folder by name; the others are in ``other_files``.
    """

    stage: str = "fetch"
    address: str
    revision: str = ""
    path: str
    payload: Payload

    @property
    def files(self) -> tuple[Payload, ...]:
        """All downloaded files."""
        return self.payload, *self.other_files

"""What ``fetch`` leaves: what was brought from an address, pinned."""

from __future__ import annotations

from repaconv.artefacts.records import Artefact, Payload


class Fetched(Artefact):
    """A file or a folder that was brought from an address.

    ``path`` is where it lies, relative to this record's folder. ``revision`` is the commit that the address stood for,
    where its kind has commits; what lies here is known by the hashes of ``payload`` and of what is ``beside``.
    """

    stage: str = "fetch"
    address: str
    revision: str = ""
    path: str
    payload: Payload

    @property
    def files(self) -> tuple[Payload, ...]:
        """All of them."""
        return self.payload, *self.other_files

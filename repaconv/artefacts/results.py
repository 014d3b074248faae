"""Results that a command returns and does not store."""

from __future__ import annotations

from typing import ClassVar

from repaconv.artefacts.records import Record


class Result(Record):
    """A result that a command returns and does not store; its ``repr`` has only the fields that ``SHOWN`` names."""

    SHOWN: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        """What it is, and of what."""
        return f"<{' '.join([type(self).__name__, *(f'{name}={getattr(self, name)!r}' for name in self.SHOWN)])}>"

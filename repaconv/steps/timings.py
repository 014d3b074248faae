"""What TensorRT measured of kernels, kept from one build to the next, with a hash that pins it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.errors import Refused
from repaconv.files import cache_folder, sha256_of, write_bytes, write_text

if TYPE_CHECKING:
    from repaconv.targets import Target


class Timings(NamedTuple):
    """TensorRT's measurements of kernels for one target and version, and where they are kept."""

    path: Path
    content: bytes | None

    @classmethod
    def of(cls, given: Path | None, device: Target, version: str) -> Timings:
        """Read them, if they are still those that were written; the user's cache of that target when None.

        Raises:
            Refused: If their hash is another.
        """
        path = given or cache_folder("timings") / f"{device.name}-{device.runtime}-{version}.cache"
        if not path.is_file():
            return cls(path, None)
        pin = path.with_name(f"{path.name}.sha256")
        if pin.is_file() and pin.read_text().strip() != sha256_of(path):
            raise Refused(
                f"the timing cache {path} was changed after it was written: its hash differs.",
                hint=f"Delete it and {pin.name}; the builder then measures again.",
                code="build.timing-cache",
            )
        return cls(path, path.read_bytes())

    def keep(self, content: bytes) -> str:
        """Write them back with their hash, which the artefact records, too."""
        pin = self.path.with_name(f"{self.path.name}.sha256")
        pin.unlink(missing_ok=True)  # it never stands beside another's timings
        write_bytes(self.path, content)
        digest = sha256_of(self.path)
        write_text(pin, f"{digest}\n")
        return digest

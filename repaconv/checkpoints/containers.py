"""Detect the format of a checkpoint file and read it: torch zip, torch legacy (sequential and tar), safetensors.

Files are memory-mapped, and no code in them is run. Formats: torch/serialization.py (zip since torch 1.6; sequential
since 0.1.10; tar before), and the safetensors header. Pages are read when a tensor is used, so reading does not copy
the weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from repaconv.checkpoints.legacy_torch_files import open_sequential, open_tar, starts_with_magic
from repaconv.checkpoints.memory_mapping import Contents, truncated_file
from repaconv.checkpoints.torch_zip_files import open_zip
from repaconv.core import change_guard
from repaconv.core.errors import Refused, RepaconvError, describe_exception
from repaconv.core.files import require_valid_name


def open_container(path: Path) -> Contents:
    """Read a checkpoint file of any known format.

    Raises:
        Refused: With one of the codes ``checkpoint.missing``, ``.directory``, ``.empty``, ``.type``,
            ``.truncated``, ``.corrupt``, ``.unsafe-global``.
    """
    change_guard.install_sigbus_handler()
    require_valid_name(path)
    try:
        return _open_by_first_bytes(path)
    except RepaconvError:
        raise
    except Exception as error:  # a hostile or broken file can raise any error
        raise truncated_file(path, describe_exception(error)) from error


def _missing_file_hint(path: Path) -> str:
    """Return a hint for a missing file: OWNER/NAME without a suffix may be a repository on the hub."""
    text = path.as_posix()
    if path.suffix or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) or path.parent.exists():
        return "Check the path to the checkpoint."
    return f"Check the path to the checkpoint. For a model on the hub: repaconv fetch hf://{text}"


def _open_by_first_bytes(path: Path) -> Contents:
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a checkpoint.", hint=_inside(path), code="checkpoint.directory")
    if path.exists() and not path.is_file():
        raise Refused(
            f"{path} is a pipe or a device, not a regular file.",
            hint="Save it as a file first, because it is read more than once.",
            code="checkpoint.type",
        )
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except FileNotFoundError:
        raise Refused(f"there is no file {path}.", hint=_missing_file_hint(path), code="checkpoint.missing") from None
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {error.strerror}.",
            hint="Check its permissions.",
            code="checkpoint.missing",
        ) from error
    if not head:
        raise Refused(
            f"{path} is empty.", hint="The download or the save failed. Get the file again.", code="checkpoint.empty"
        )
    if head.startswith(b"PK"):
        return open_zip(path)
    if head[:2] == b"\x80\x02" and starts_with_magic(path):
        return open_sequential(path)
    if len(head) > 8 and head[8:9] == b"{":
        return _safetensors(path)
    if len(head) >= 262 and head[257:262] == b"ustar":
        return open_tar(path)
    raise Refused(
        f"{path} is not a checkpoint: {_what_it_looks_like(head)}.",
        hint="Give a .pth, .pt, .bin or .safetensors file that holds a state dict.",
        code="checkpoint.type",
    )


def _inside(path: Path) -> str:
    files = sorted(p for p in path.iterdir() if p.suffix in (".pth", ".pt", ".bin", ".safetensors"))
    return f"Give the file, e.g. {files[0]}." if files else "Give the .pth, .pt, .bin or .safetensors file."


def _what_it_looks_like(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, so run `git lfs pull` first"
    if head.lstrip()[:1] == b"<":
        return "it is a web page, so the download got an error page instead of the file"
    if head[:1] == b"\x80":
        return "it is a pickle that torch.save did not write"
    if (head[:1] == b"\x08" and b"onnx" in head.lower()) or b"pytorch" in head[:64]:
        return "it looks like an ONNX model"
    return f"it begins with {head[:8]!r}"


# safetensors.


def _safetensors(path: Path) -> Contents:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise truncated_file(path, str(error)) from error
    return Contents("safetensors", {**tensors, "__metadata__": {k: _maybe_json(v) for k, v in metadata.items()}})


def _maybe_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text

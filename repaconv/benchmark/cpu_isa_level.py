"""The family of a processor: what it multiplies with, which decides what is fast on it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

FAMILIES: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "amx": frozenset({"amx_tile", "amx_int8", "amx_bf16"}),
        "avx512-bf16": frozenset({"avx512_bf16", "avx512_vnni"}),
        "avx512-vnni": frozenset({"avx512_vnni"}),
        "avx512": frozenset({"avx512f"}),
        "avx-vnni": frozenset({"avx_vnni"}),
        "avx2": frozenset({"avx2"}),
    },
    "aarch64": {
        "i8mm": frozenset({"i8mm"}),
        "dot-product": frozenset({"asimddp"}),
        "neon": frozenset({"asimd"}),
    },
}
"""By architecture, the newest first: the flags, as Linux calls them, that a processor of that family has."""
OTHER = "none of these"
CPUINFO = Path("/proc/cpuinfo")
MULTIPLY_INT8 = frozenset({"amx", "avx512-bf16", "avx512-vnni", "avx-vnni"})
"""Of x86-64, those that add int8 products up in 32 bits; the others add two in 16, where large ones are clipped."""


def family(architecture: str, cpuinfo: Path = CPUINFO) -> str:
    """Of this machine's processor, if it is of that architecture; empty where it is another, or nothing tells.

    Whoever writes for another machine than this one does not know what it will run on.
    """
    if architecture != platform.machine() or not cpuinfo.is_file():
        return ""
    told = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    has = frozenset(told[1].split()) if told else frozenset[str]()
    known = FAMILIES.get(architecture, {})
    return next((name for name, flags in known.items() if flags <= has), OTHER) if has else ""


def clips_int8(architecture: str, cpuinfo: Path = CPUINFO) -> bool:
    """Whether such a processor may clip sums of int8 products: this machine's, if it is of that architecture."""
    return architecture == "x86_64" and family(architecture, cpuinfo) not in MULTIPLY_INT8

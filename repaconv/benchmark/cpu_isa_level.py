"""The CPU ISA level of this machine: its matrix multiplication instructions, which decide what is fast."""

from __future__ import annotations

import platform
import re
from pathlib import Path

ISA_LEVELS: dict[str, dict[str, frozenset[str]]] = {
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
"""By architecture, the ISA levels with the CPU flags that each requires (Linux names), newest first."""
OTHER = "none of these"
CPUINFO = Path("/proc/cpuinfo")
MULTIPLY_INT8 = frozenset({"amx", "avx512-bf16", "avx512-vnni", "avx-vnni"})
"""x86-64 levels that accumulate int8 products in 32 bits. Older ones add two in 16 bits, which may saturate."""


def isa_level(architecture: str, cpuinfo: Path = CPUINFO) -> str:
    """Return the ISA level of this machine's CPU.

    Empty if the CPU has another architecture, so that its level says nothing of the target, or if the flags are
    unavailable.
    """
    if architecture != platform.machine() or not cpuinfo.is_file():
        return ""
    flags_line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text("utf-8"), re.MULTILINE)
    has = frozenset(flags_line[1].split()) if flags_line else frozenset[str]()
    known = ISA_LEVELS.get(architecture, {})
    return next((name for name, flags in known.items() if flags <= has), OTHER) if has else ""


def int8_saturates(architecture: str, cpuinfo: Path = CPUINFO) -> bool:
    """Return whether int8 products may saturate on this architecture, or on this CPU if it has the architecture."""
    return architecture == "x86_64" and isa_level(architecture, cpuinfo) not in MULTIPLY_INT8

"""Devices as data, one TOML file each."""

from repaconv.targets.schema import Target as Target
from repaconv.targets.schema import from_file as from_file
from repaconv.targets.schema import packaged

X86_64 = packaged("x86-64")

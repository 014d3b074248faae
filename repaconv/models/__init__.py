"""Small trained networks that are shipped, one per method, with images that they never saw; `make train` makes them."""

from pathlib import Path

FOLDER = Path(__file__).parent
METHODS = ("repavit", "nondeep", "riformer", "dwconv", "pyra")
HELD_OUT = FOLDER / "digits.npz"
CALIBRATION = FOLDER / "calibration.npz"


def checkpoint(method: str) -> Path:
    """The trained network of one of ``METHODS``."""
    return FOLDER / f"{method}.pth"

"""Small trained networks that come along, one a method, with images that they never saw; `make train` makes them again.

``<method>.pth`` is a training-form checkpoint as that method's trainer would save it, in float16; ``<method>.json``
says how it was trained and how many of the images it gets right. They are scikit-learn's digits: ``digits.npz`` has 500
that were held out, ``calibration.npz`` 64 of those that were trained on, for the ranges of int8.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
METHODS = ("repavit", "nondeep", "riformer", "dwconv", "pyra")
HELD_OUT = FOLDER / "digits.npz"
CALIBRATION = FOLDER / "calibration.npz"


def checkpoint(method: str) -> Path:
    """The trained network of one of ``METHODS``."""
    return FOLDER / f"{method}.pth"

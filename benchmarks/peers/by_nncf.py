"""NNCF's quantiser with its defaults; run where NNCF is installed, in an environment of its own.

python by_nncf.py hand-made.onnx calibration.npz int8.xml
"""

from __future__ import annotations

import os
import sys

os.environ["NNCF_CI"] = "1"  # it tells its makers otherwise that it is used
import nncf
import numpy as np
import openvino


def main() -> None:
    """Quantise a graph by images [n, B, C, H, W]."""
    source, images, target = sys.argv[1:]
    quantised = nncf.quantize(openvino.Core().read_model(source), nncf.Dataset(list(np.load(images)["calls"])))
    openvino.save_model(quantised, target, compress_to_fp16=False)


if __name__ == "__main__":
    main()

"""NNCF's quantizer with its defaults, in a process of its own.

python nncf_process.py graph.onnx calibration.npz int8.xml
"""

from __future__ import annotations

import sys

import numpy as np

from repaconv.core.errors import require_module


def main() -> None:
    """Quantize a graph, calibrated on images [n, B, C, H, W]."""
    openvino, nncf = (require_module(name, name, "pip install 'repaconv[nncf]'") for name in ("openvino", "nncf"))
    source, images, target = sys.argv[1:]
    quantized = nncf.quantize(openvino.Core().read_model(source), nncf.Dataset(list(np.load(images)["calls"])))
    openvino.save_model(quantized, target, compress_to_fp16=False)


if __name__ == "__main__":
    main()

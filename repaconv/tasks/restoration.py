"""Image restoration (super-resolution, denoising, deblurring): PSNR and SSIM of the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, log10

import numpy as np

from repaconv.tasks.contract import (
    Array,
    Metric,
    NetworkFacts,
    Outputs,
    Row,
    Task,
    mean,
    only_output,
    require_same_shape,
)

PEAKS, DARK = (1.0, 255.0), 4.0
"""The peaks of images, and the value that none of the first kind exceeds."""
LARGEST_PSNR = 100.0
"""PSNR in dB of equal images, which would be infinite."""
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03
"""Of SSIM, as in Wang et al., IEEE Transactions on Image Processing 13 (2004)."""


class Restoration(Task):
    """Images [C, H, W]; 0 to 1, or 0 to 255 if the reference's numbers are that large."""

    name = "restore"
    accuracy = "SSIM"
    labels = "images (.npz with labels [N, C, H, W])"
    changed = "of SSIM lost"
    metrics = (
        Metric("PSNR", "dB", {"tf32": 50, "fp16": 50, "bf16": 40, "int8": 35}),
        Metric("SSIM", "share", {"tf32": 0.995, "fp16": 0.995, "bf16": 0.98, "int8": 0.95}),
    )

    def __init__(self, about: NetworkFacts) -> None:
        super().__init__(about)
        self.peak = 1.0

    def read(self, outputs: Outputs) -> list[Array]:
        """Read the images of a batch."""
        return list(only_output(outputs, (4,), "images [N, C, H, W]").astype(float))

    def truth(self, result: Array) -> Array:
        """The reference's image. All of them decide the peak, since some may be black."""
        if (np.abs(result) > DARK).any():
            self.peak = 255.0
        self.layout = f"images with a peak of {self.peak:g}"
        return result

    def row(self, result: Array, truth: Array) -> Row:
        """The mean squared error of one image, and its SSIM by peak."""
        require_same_shape(result, truth)
        return {"error": float(((result - truth) ** 2).mean()), "SSIM": ssim(result, truth, *PEAKS)}

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """The means over the images."""
        of_images = [{"PSNR": self.agreement(row), "SSIM": row["SSIM"][self.peak]} for row in rows]
        return {name: mean(of_images, name) for name in ("PSNR", "SSIM")}

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """Return 1 minus the SSIM."""
        return 1 - summary["SSIM"]

    def agreement(self, row: Row) -> float:
        """PSNR of one image."""
        error = row["error"]
        if not isfinite(error):
            return 0.0
        return min(LARGEST_PSNR, 10 * log10(self.peak**2 / error)) if error > 0 else LARGEST_PSNR


def ssim(a: Array, b: Array, *peaks: float) -> dict[float, float]:
    """The structural similarity of two images [C, H, W] by peak, the mean over channels and windows."""
    import torch

    side = min(WINDOW, *a.shape[1:])
    axis = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    line = torch.exp(-(axis**2) / (2 * SIGMA**2))
    kernel = torch.outer(line, line)[None, None] / line.sum() ** 2
    x, y = (torch.from_numpy(np.ascontiguousarray(each, np.float64))[:, None] for each in (a, b))

    def blurred(image: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(image, kernel)

    mean_x, mean_y = blurred(x), blurred(y)
    spread_x, spread_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
    common = blurred(x * y) - mean_x * mean_y

    def mean_of(peak: float) -> float:
        c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
        above = (2 * mean_x * mean_y + c1) * (2 * common + c2)
        return float((above / ((mean_x**2 + mean_y**2 + c1) * (spread_x + spread_y + c2))).mean())

    return {peak: mean_of(peak) for peak in peaks}

"""Networks of other tasks on the images of shapes.py: super-resolution, depth, keypoints, embeddings and text.

    python benchmarks/train/shape_networks.py [-o DIR] [--steps 600] [--seed 0]

trains all of them in some minutes on one CPU core and writes DIR/<kind>.pth. benchmarks/task_tolerances.py lowers their
precision and breaks them. All are fully convolutional with the training-time branches of shapes.py.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shapes
import torch
from numpy.typing import NDArray
from shapes import BATCH, MEAN, RATE, SIDE, STD, STRIDE, Branches, Detector, Shapes
from torch import Tensor, nn
from torch.nn import functional

POINTS = 5
"""The corners of a shape's box, and its middle."""
GROUND = 3.0
"""Depth of the ground; a shape's is `NEAREST` divided by its longer side in pixels."""
NEAREST = 28.0
GLYPHS, LETTERS, GLYPH_SIDE = 12, 6, 8
"""Letters of the text that is recognized, letters in a line, and the side of one in pixels."""
TEMPERATURE = 0.1


class Upscaler(nn.Module):
    """Images [N, 3, 32, 32] to twice the size, with numbers from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Branches(3, 24), Branches(24, 24), Branches(24, 24))
        self.tail = nn.Conv2d(24, 12, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 32, 32] to [N, 3, 64, 64]."""
        wide = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return wide * STD + MEAN + functional.pixel_shuffle(self.tail(self.body(x)), 2)


class DepthEstimator(nn.Module):
    """Depth above zero, by the size of what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = shapes.Segmenter()
        self.body.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 64, 64] to [N, 64, 64]."""
        return self.body(x)[:, 0].exp()


class Heatmaps(nn.Module):
    """One map for each point of the only shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Branches(3, 16, 2), Branches(16, 16))
        self.far = nn.Sequential(Branches(16, 32, 2), Branches(32, 32), Branches(32, 48, 2), Branches(48, 48))
        self.join = Branches(48, 16)
        self.head = nn.Conv2d(16, POINTS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 64, 64] to [N, 5, 32, 32]."""
        near = self.body(x)
        far = functional.interpolate(self.far(near), scale_factor=4.0, mode="bilinear", align_corners=False)
        return self.head(self.join(far) + near)


class Poser(Detector):
    """Boxes, one score and points [N, 5 + 3 * 5, 64] as Ultralytics exports them, of every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.score[1] = nn.Conv2d(32, 1, 1)
        nn.init.constant_(self.score[1].bias, -3.0)
        self.points = nn.Sequential(Branches(48, 32), nn.Conv2d(32, 2 * POINTS, 1))

    def places(self, x: Tensor) -> Tensor:
        """The points [N, 5, 2, M] in pixels."""
        off = STRIDE * self.points(self.backbone(x)).flatten(2)
        return off.unflatten(1, (POINTS, 2)) + self.centers[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 64, 64] to [N, 20, 64]."""
        boxes = super().forward(x)
        places = self.places(x)
        seen = torch.ones_like(places[:, :, :1]) * boxes[:, None, 4:5]
        return torch.cat([boxes, torch.cat([places, seen], 2).flatten(1, 2)], 1)


class Embedder(nn.Module):
    """Vectors of 32 numbers that are alike for two views of one image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Branches(3, 16, 2), Branches(16, 32, 2), Branches(32, 32), Branches(32, 48, 2), Branches(48, 48)
        )
        self.head = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 64, 64] to [N, 32]."""
        return self.head(self.body(x).mean((2, 3)))


class Recognizer(nn.Module):
    """Scores of letters along a line of text, the blank of CTC first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Branches(3, 24, 2), Branches(24, 32), Branches(32, 48), Branches(48, 48))
        self.head = nn.Conv2d(48, 1 + GLYPHS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 16, 64] to [N, 32, 13]."""
        return self.head(self.body(x).mean(2, keepdim=True))[:, :, 0].transpose(1, 2)


NETWORKS: dict[str, type[nn.Module]] = {
    "upscaler": Upscaler,
    "depth": DepthEstimator,
    "heatmaps": Heatmaps,
    "poser": Poser,
    "embedder": Embedder,
    "recognizer": Recognizer,
}


# --- Data: what goes in, and what should come out


class Examples(NamedTuple):
    """Inputs [N, 3, H, W], and what is right for each."""

    inputs: NDArray[np.float32]
    targets: Any


def made(kind: str, count: int, seed: int) -> Examples:
    """So many examples for a kind of network."""
    if kind == "recognizer":
        return _lines(count, seed)
    if kind == "heatmaps":  # of one shape each
        data = shapes.made(3 * count, seed)
        alone = [place for place, boxes in enumerate(data.boxes) if len(boxes) == 1][:count]
        data = Shapes(data.images[alone], [data.boxes[place] for place in alone], data.masks[alone])
        return Examples(data.images, _maps(np.stack([_points(boxes[0]) for boxes in data.boxes])))
    data = shapes.made(count, seed)
    if kind == "upscaler":
        small = functional.avg_pool2d(torch.from_numpy(data.images), 2).numpy()
        return Examples(small, (data.images * STD + MEAN).astype(np.float32))
    if kind == "depth":
        return Examples(data.images, np.stack([_depth(*each) for each in zip(data.boxes, data.masks, strict=True)]))
    return Examples(data.images, data.boxes)


def _points(box: NDArray[np.float32]) -> NDArray[np.float32]:
    left, top, right, bottom = box[:4]
    corners = [(left, top), (right, top), (left, bottom), (right, bottom), ((left + right) / 2, (top + bottom) / 2)]
    return np.asarray(corners, np.float32)


def _maps(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """Heatmaps [N, 5, 32, 32] with a hill at each point [N, 5, 2]."""
    places = 2 * np.arange(SIDE // 2, dtype=np.float32) + 1
    off = [(places - points[:, :, axis, None]) ** 2 for axis in (0, 1)]
    return np.exp(-(off[0][:, :, None] + off[1][:, :, :, None]) / (2 * 3.0**2)).astype(np.float32)


def _depth(boxes: NDArray[np.float32], mask: NDArray[np.uint8]) -> NDArray[np.float32]:
    found = np.full((SIDE, SIDE), GROUND, np.float32)
    for left, top, right, bottom, kind in boxes:
        window = (slice(int(top), int(bottom)), slice(int(left), int(right)))
        found[window][mask[window] == kind + 1] = NEAREST / max(right - left, bottom - top)
    return found


def _lines(count: int, seed: int) -> Examples:
    """Lines of up to six letters of fixed random pixels on texture, and the letter at each step [N, 32], 0 between."""
    alphabet = np.random.default_rng(0).random((GLYPHS, GLYPH_SIDE, GLYPH_SIDE)) > 0.5
    images, steps = np.zeros((count, 3, 16, SIDE), np.float32), np.zeros((count, SIDE // 2), np.int64)
    for number in range(count):
        random = np.random.default_rng([seed, number])
        rows, columns = np.mgrid[:16, :SIDE].astype(np.float32)
        image = shapes._texture(random, rows, columns)
        color, length = random.uniform(0, 1, (3, 1, 1)), random.integers(2, LETTERS + 1)
        for place, letter in enumerate(random.integers(1, GLYPHS + 1, length)):
            top, left = random.integers(2, 7), 2 + 10 * place + random.integers(0, 2)
            window = (slice(None), slice(top, top + GLYPH_SIDE), slice(left, left + GLYPH_SIDE))
            image[window] = np.where(alphabet[letter - 1], color, image[window])
            steps[number, left // 2 + 1 : left // 2 + 4] = letter
        images[number] = (image + shapes.NOISE * random.standard_normal(image.shape) - MEAN) / STD
    return Examples(images, steps)


# --- Training


def _loss(kind: str, net: Any, images: Tensor, right: Any) -> Tensor:
    if kind == "embedder":
        noise = [images + 0.3 * torch.randn_like(images) for _ in range(2)]
        one, other = (functional.normalize(net(each)) for each in (noise[0], noise[1].flip(3)))
        return functional.cross_entropy(one @ other.T / TEMPERATURE, torch.arange(len(images)))
    if kind == "poser":
        there, kinds, corners = shapes._targets([np.concatenate([b[:, :4], 0 * b[:, 4:]], 1) for b in right])
        loss = shapes._detector_loss(net, images, (there, kinds, corners))
        left, top, right_side, bottom = corners.transpose(0, 1)
        across, down = torch.stack([left, right_side] * 2, 1), torch.stack([top, top, bottom, bottom], 1)
        wanted = torch.stack([across, down], 2)
        wanted = torch.cat([wanted, wanted.mean(1, keepdim=True)], 1)
        off = functional.smooth_l1_loss(net.places(images), wanted, reduction="none").sum((1, 2))
        return loss + 0.2 * off[there].mean() / STRIDE
    if kind == "recognizer":
        return functional.cross_entropy(net(images).transpose(1, 2), right)
    found = net(images)
    if kind == "depth":
        return (found.log() - right.log()).abs().mean()
    if kind == "heatmaps":  # the hills are a small part of the maps
        return 10 * ((1 + 50 * right) * (found - right) ** 2).mean()
    return functional.mse_loss(found, right)


def trained(kind: str, data: Examples, *, steps: int, seed: int, batch: int = BATCH) -> nn.Module:
    """Train one with AdamW and one cosine cycle; the same seed gives the same network."""
    torch.manual_seed(seed)
    net = NETWORKS[kind]().train()
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=max(0.1, 2 / steps))
    images, chance = torch.from_numpy(data.inputs), np.random.default_rng(seed)
    for _ in range(steps):
        places = chance.choice(len(images), batch, replace=False)
        right: Any = [data.targets[place] for place in places]
        if isinstance(data.targets, np.ndarray):
            right = torch.from_numpy(data.targets[places])
        loss = _loss(kind, net, images[torch.from_numpy(places)], right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def main() -> None:
    """Train all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", dest="folder", type=Path, default=Path())
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kinds", nargs="*", default=list(NETWORKS))
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    for kind in given.kinds:
        start = time.monotonic()
        net = trained(kind, made(kind, given.count, given.seed), steps=given.steps, seed=given.seed)
        torch.save({"state_dict": net.state_dict()}, given.folder / f"{kind}.pth")
        print(f"{kind}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

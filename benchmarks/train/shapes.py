"""A detector and a segmenter of discs, squares and triangles on textures, trained in a few minutes on one CPU core.

    python benchmarks/train/shapes.py [-o DIR] [--steps 1500] [--seed 0]

writes detector.pth, segmenter.pth, shapes.calibration.npz, shapes.npz, and the labels of shapes.npz: shapes.json (COCO)
and masks/*.png. Images are 64 x 64 pixels, RGB, of one to three shapes. Both networks are fully convolutional, with
training-time branches (3 x 3, 1 x 1 and identity, each with BatchNorm) that ``repaconv fold --arch`` adds up:

    repaconv fold detector.pth --arch benchmarks/train/shapes.py:detector --task detect --set image_size=64
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

SIDE, CLASSES = 64, ("disc", "square", "triangle")
STRIDE, BATCH, RATE = 8, 32, 3e-3
MOST_SHAPES, LEAST, LARGEST = 3, 7.0, 14.0
NOISE, MEAN, STD = 0.08, 0.5, 0.25
CALIBRATION, HELD_OUT = 64, 200


class Shapes(NamedTuple):
    """Images [N, 3, 64, 64], normalized; boxes [K, 5] of each (x1, y1, x2, y2, class); masks [N, 64, 64].

    A mask has 0 for the ground, and the class number plus 1.
    """

    images: NDArray[np.float32]
    boxes: list[NDArray[np.float32]]
    masks: NDArray[np.uint8]


def made(count: int, seed: int) -> Shapes:
    """So many images; the first are the same however many there are."""
    parts = [_image(np.random.default_rng([seed, number])) for number in range(count)]
    return Shapes(
        np.stack([part[0] for part in parts]), [part[1] for part in parts], np.stack([part[2] for part in parts])
    )


def _image(random: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8]]:
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32) + 0.5
    image = _texture(random, rows, columns)
    owner = np.full((SIDE, SIDE), -1)
    shapes = []
    for number in range(random.integers(1, MOST_SHAPES + 1)):
        size = random.uniform(LEAST, LARGEST)
        y, x = random.uniform(size, SIDE - size, 2)
        kind = int(random.integers(len(CLASSES)))
        inside = _inside(kind, (rows - y) / size, (columns - x) / size)
        if (owner[inside] >= 0).any():
            continue  # shapes do not overlap
        image = np.where(inside, _texture(random, rows, columns), image)
        owner[inside] = number
        where = np.argwhere(inside)
        (top, left), (bottom, right) = where.min(0), where.max(0) + 1
        shapes.append((left, top, right, bottom, kind, number))
    image = image + NOISE * random.standard_normal(image.shape)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for *_, kind, number in shapes:
        mask[owner == number] = kind + 1
    boxes = np.asarray([shape[:5] for shape in shapes], np.float32).reshape(-1, 5)
    return ((image - MEAN) / STD).astype(np.float32), boxes, mask


def _inside(kind: int, y: NDArray[Any], x: NDArray[Any]) -> NDArray[np.bool_]:
    if kind == 0:
        return np.hypot(y, x) <= 1
    if kind == 1:
        return np.maximum(abs(y), abs(x)) <= 0.9
    return (y <= 0.9) & (y >= 2 * abs(x) - 0.95)


def _texture(random: np.random.Generator, rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[Any]:
    """Two colors mixed by a wave, [3, 64, 64]."""
    turn, period, phase = random.uniform(0, np.pi), random.uniform(3, 12), random.uniform(0, 2 * np.pi)
    wave = 0.5 + 0.5 * np.sin((np.cos(turn) * rows + np.sin(turn) * columns) * 2 * np.pi / period + phase)
    one, other = random.uniform(0, 1, (2, 3, 1, 1))
    return one + 0.35 * (other - one) * wave


# --- The networks


class Branches(nn.Module):
    """A 3 x 3 and a 1 x 1 convolution and, where shapes allow, the identity, each with BatchNorm, then ReLU."""

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out))
        self.narrow = nn.Sequential(nn.Conv2d(inside, out, 1, stride, 0, bias=False), nn.BatchNorm2d(out))
        self.identity = nn.BatchNorm2d(out) if inside == out and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, inside, H, W] to [N, out, H / stride, W / stride]."""
        found = self.wide(x) + self.narrow(x)
        return functional.relu(found if self.identity is None else found + self.identity(x))


class Detector(nn.Module):
    """Boxes and scores [N, 4 + 3, 64] as Ultralytics exports them: center, width and height in pixels, then scores."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            Branches(3, 16, 2), Branches(16, 32, 2), Branches(32, 32), Branches(32, 48, 2), Branches(48, 48)
        )
        self.box = nn.Sequential(Branches(48, 32), nn.Conv2d(32, 4, 1))
        self.score = nn.Sequential(Branches(48, 32), nn.Conv2d(32, len(CLASSES), 1))
        nn.init.constant_(self.score[1].bias, -3.0)
        places = (torch.arange(SIDE // STRIDE) + 0.5) * STRIDE
        rows, columns = torch.meshgrid(places, places, indexing="ij")
        self.register_buffer("centers", torch.stack([columns, rows]).flatten(1)[None], persistent=False)

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Corners [N, 4, M] in pixels, and logits [N, 3, M]."""
        features = self.backbone(x)
        distances = STRIDE * self.box(features).flatten(2).exp()
        corners = torch.cat([self.centers - distances[:, :2], self.centers + distances[:, 2:]], 1)
        return corners, self.score(features).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 64, 64] to [N, 7, 64]."""
        corners, logits = self.raw(x)
        low, high = corners[:, :2], corners[:, 2:]
        return torch.cat([(low + high) / 2, high - low, logits.sigmoid()], 1)


class Segmenter(nn.Module):
    """Scores [N, 4, 64, 64] of the ground and three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(Branches(3, 16, 2), Branches(16, 16))
        self.far = nn.Sequential(Branches(16, 32, 2), Branches(32, 32), Branches(32, 32, 2), Branches(32, 32))
        self.join = Branches(32, 16)
        self.head = nn.Conv2d(16, 1 + len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 64, 64] to [N, 4, 64, 64]."""
        near = self.near(x)
        far = functional.interpolate(self.far(near), scale_factor=4.0, mode="bilinear", align_corners=False)
        far = self.join(far) + near
        return functional.interpolate(self.head(far), scale_factor=2.0, mode="bilinear", align_corners=False)


def detector() -> nn.Module:
    """For ``--arch``."""
    return Detector()


def segmenter() -> nn.Module:
    """For ``--arch``."""
    return Segmenter()


# --- Training


def _targets(boxes: list[NDArray[np.float32]]) -> tuple[Tensor, Tensor, Tensor]:
    """Which grid places see a shape [N, M], its class [N, M] and its corners [N, 4, M]: those near its middle."""
    places = (np.arange(SIDE // STRIDE) + 0.5) * STRIDE
    rows, columns = (each.ravel() for each in np.meshgrid(places, places, indexing="ij"))
    count = len(rows)
    there, kinds = np.zeros((len(boxes), count), bool), np.zeros((len(boxes), count), np.int64)
    corners = np.zeros((len(boxes), 4, count), np.float32)
    for number, each in enumerate(boxes):
        for left, top, right, bottom, kind in each:
            y, x = (top + bottom) / 2, (left + right) / 2
            near = (abs(rows - y) < STRIDE) & (abs(columns - x) < STRIDE)
            there[number, near], kinds[number, near] = True, int(kind)
            corners[number][:, near] = np.asarray([left, top, right, bottom])[:, None]
    return torch.from_numpy(there), torch.from_numpy(kinds), torch.from_numpy(corners)


def _detector_loss(net: nn.Module, images: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    there, kinds, wanted = targets
    corners, logits = net.raw(images)
    right = functional.one_hot(kinds, logits.shape[1]).transpose(1, 2) * there[:, None]
    scores = logits.sigmoid()
    weight = torch.where(right > 0, (1 - scores) ** 2, scores**2).detach()
    loss = (weight * functional.binary_cross_entropy_with_logits(logits, right.float(), reduction="none")).sum()
    a, b = corners.transpose(1, 2)[there], wanted.transpose(1, 2)[there]
    inside = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    areas = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inside
    apart = functional.smooth_l1_loss(a, b, reduction="sum") / STRIDE
    return (loss + 2 * (1 - inside / areas).sum() + 0.2 * apart) / max(1, len(a))


def trained(kind: str, data: Shapes, *, steps: int, seed: int, batch: int = BATCH) -> nn.Module:
    """Train a ``detector`` or a ``segmenter`` with AdamW and one cosine cycle; the same seed gives the same network."""
    torch.manual_seed(seed)
    net = (Detector if kind == "detector" else Segmenter)().train()
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=max(0.1, 2 / steps))
    images, masks = torch.from_numpy(data.images), torch.from_numpy(data.masks).long()
    targets = _targets(data.boxes)
    chance = np.random.default_rng(seed)
    for _ in range(steps):
        places = torch.from_numpy(chance.choice(len(images), batch, replace=False))
        if kind == "detector":
            loss = _detector_loss(net, images[places], tuple(each[places] for each in targets))
        else:
            loss = functional.cross_entropy(net(images[places]), masks[places])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


# --- Files


def coco(data: Shapes) -> dict[str, Any]:
    """The boxes as COCO annotations; image n is called n.png."""
    annotations = [
        {
            "id": 1000 * number + place + 1,
            "image_id": number,
            "category_id": int(kind),
            "bbox": [float(left), float(top), float(right - left), float(bottom - top)],
            "area": float((right - left) * (bottom - top)),
            "iscrowd": 0,
        }
        for number, boxes in enumerate(data.boxes)
        for place, (left, top, right, bottom, kind) in enumerate(boxes)
    ]
    images = [
        {"id": number, "file_name": f"{number:04}.png", "width": SIDE, "height": SIDE}
        for number in range(len(data.boxes))
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_data(folder: Path, seed: int, *, calibration: int = CALIBRATION, held_out: int = HELD_OUT) -> None:
    """Write the images, and the labels of those that are held out."""
    from PIL import Image

    np.savez(folder / "shapes.calibration.npz", input=made(calibration, seed + 1).images)
    data = made(held_out, seed + 2)
    np.savez(folder / "shapes.npz", input=data.images)
    (folder / "shapes.json").write_text(json.dumps(coco(data)))
    (folder / "masks").mkdir(exist_ok=True)
    for number, mask in enumerate(data.masks):
        Image.fromarray(mask).save(folder / "masks" / f"{number:04}.png")


def main() -> None:
    """Train both."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", dest="folder", type=Path, default=Path())
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--count", type=int, default=4000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    write_data(given.folder, given.seed)
    data = made(given.count, given.seed)
    for kind in ("detector", "segmenter"):
        start = time.monotonic()
        net = trained(kind, data, steps=given.steps, seed=given.seed)
        torch.save({"state_dict": net.state_dict()}, given.folder / f"{kind}.pth")
        print(f"{kind}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

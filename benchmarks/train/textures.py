"""Synthetic images of 24 classes that neither texture nor arrangement alone identifies: 64 x 64 pixels, RGB.

    python benchmarks/train/textures.py -o DIR [--count 20000] [--seed 0]     # textures.npz, textures.held.npz

A class is a texture and an arrangement. Four textures (horizontal stripes, vertical stripes, checkerboard, dots) fill
two shapes. Six arrangements place the two: next to each other, one above the other, on either diagonal, one inside the
other, or one twice as large as the other. Colors, positions, sizes, the period and phase of a texture, its rotation,
the background's waves and noise are random: no mean, histogram or single patch identifies a class.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SIDE, TEXTURES, ARRANGEMENTS = 64, 4, 6
CLASSES = TEXTURES * ARRANGEMENTS
HELD_OUT, AT_ONCE = 2_000, 500
MEAN, STD = 0.5, 0.25
"""What the pixels, on the scale 0..1, are normalised by; near their own."""
NOISE = 0.06

Array = NDArray[np.float32]


class Images(NamedTuple):
    """Images [N, 3, 64, 64], normalised, and their classes [N]."""

    images: Array
    labels: NDArray[np.int64]


def made(count: int, seed: int) -> Images:
    """So many, all classes alike often; the first are the same however many there are."""
    parts = [_batch(min(AT_ONCE, count - start), start // AT_ONCE, seed) for start in range(0, count, AT_ONCE)]
    return Images(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _batch(count: int, number: int, seed: int) -> Images:
    random = np.random.default_rng([seed, number])
    labels = np.arange(AT_ONCE) % CLASSES
    random.shuffle(labels)
    draw = random.random((AT_ONCE, 24), dtype=np.float32)
    texture, arrangement = np.divmod(labels, ARRANGEMENTS)
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)[:, None] + 0.5
    first, second = _shapes(arrangement, draw, rows, columns)
    waves = _texture(texture, draw, rows, columns)
    figure = _two(draw[:, 12:18], waves)
    ground = _two(draw[:, 18:24], _ground(draw, rows, columns))
    inside = (first | second)[:, None]
    images = np.where(inside, figure, 0.75 * ground + 0.125)
    images += NOISE * random.standard_normal(images.shape, dtype=np.float32)
    return Images(((images - MEAN) / STD).astype(np.float32)[:count], labels[:count].astype(np.int64))


def _shapes(arrangement: NDArray[np.int64], draw: Array, rows: Array, columns: Array) -> tuple[NDArray[np.bool_], ...]:
    """Where the two shapes are: discs or squares, by chance and not by class."""
    apart, size = 13 + 3 * draw[:, 0], 7 + 3 * draw[:, 1]
    down = np.choose(arrangement, [0, 1, 0.75, -0.75, 0, 0]).astype(np.float32) * apart
    right = np.choose(arrangement, [1, 0, 0.75, 0.75, 0, 1]).astype(np.float32) * apart
    sizes = np.stack([np.where(arrangement == 4, 1.9 * size, size), size])
    sizes[0] = np.where(arrangement == 5, 1.5 * size, sizes[0])
    sizes[1] = np.where(arrangement == 5, 0.6 * size, sizes[1])
    swap = np.where(draw[:, 2] < 0.5, 1, -1)  # which of the two comes first is no class
    middle = SIDE / 2 + 10 * (draw[:, 3:5] - 0.5)
    found = []
    for n, sign in enumerate((swap, -swap)):
        y, x = (
            rows - (middle[:, 0] + sign * down)[:, None, None],
            columns - (middle[:, 1] + sign * right)[:, None, None],
        )
        round_, square = np.hypot(y, x), np.maximum(abs(y), abs(x))
        distance = np.where((draw[:, 5] < 0.5)[:, None, None], round_, square)
        found.append(distance < sizes[n][:, None, None])
    ring = abs(distance - sizes[1][:, None, None]) < 1.5  # parts what lies in the other from it
    within = (arrangement == 4)[:, None, None]
    return found[0] & ~(ring & within), found[1] & ~(ring & within)


def _texture(texture: NDArray[np.int64], draw: Array, rows: Array, columns: Array) -> Array:
    """Waves in 0..1: stripes across or along, a chequer, dots; turned a little, never so far that across is along."""
    turn, period = 0.5 * (draw[:, 6] - 0.5), 4 + 2 * draw[:, 7]
    cosine, sine = (f(turn)[:, None, None] for f in (np.cos, np.sin))
    rate = (2 * np.pi / period)[:, None, None]
    along = np.sin(rate * (cosine * columns + sine * rows) + 6.3 * draw[:, 8, None, None])
    across = np.sin(rate * (cosine * rows - sine * columns) + 6.3 * draw[:, 9, None, None])
    kind = texture[:, None, None]
    waves = np.choose(kind, [across, along, np.sign(across) * np.sign(along), 2 * (across + along > 0.9) - 1.0])
    return (0.5 + 0.5 * np.clip(2 * waves, -1, 1)).astype(np.float32)


def _ground(draw: Array, rows: Array, columns: Array) -> Array:
    """Slow waves of the ground, of no class."""
    angle = 6.3 * draw[:, 10, None, None]
    phase = 6.3 * draw[:, 11, None, None]
    return 0.5 + 0.5 * np.sin(0.2 * (np.cos(angle) * columns + np.sin(angle) * rows) + phase).astype(np.float32)


def _two(draw: Array, share: Array) -> Array:
    """[N, 3, H, W]: between two colours drawn apart from each other."""
    light, dark = 0.55 + 0.4 * draw[:, :3], 0.05 + 0.4 * draw[:, 3:]
    return light[:, :, None, None] * share[:, None] + dark[:, :, None, None] * (1 - share[:, None])


def main() -> None:
    """Write what is trained on, and what is held out, which is of another seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("textures", given.count, given.seed), ("textures.held", HELD_OUT, given.seed + 1)):
        found = made(count, seed)
        np.savez(given.out / f"{name}.npz", input=found.images, labels=found.labels)
        print(f"{name}.npz: {count} images, mean {found.images.mean():.2f}, deviation {found.images.std():.2f}")


if __name__ == "__main__":
    main()

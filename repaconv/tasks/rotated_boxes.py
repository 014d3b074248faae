"""Rotated boxes: their IoU, by the exact intersection of two rectangles."""

from __future__ import annotations

import numpy as np

from repaconv.tasks.contract import Array

TOUCHING = 1e-9
"""Share of a box's size within which a corner on the border of another box is inside it."""


def rotated_ious(a: Array, b: Array) -> Array:
    """IoU [M, N] of boxes [M, 5] and [N, 5]: center, width and height in pixels, and the angle in radians."""
    apart = np.linalg.norm(a[:, None, :2] - b[None, :, :2], axis=2)
    reach = [np.hypot(each[:, 2], each[:, 3]) / 2 for each in (a, b)]
    rows, columns = np.nonzero(apart < reach[0][:, None] + reach[1][None])
    areas = [np.abs(each[:, 2] * each[:, 3]) for each in (a, b)]
    found = np.zeros(apart.shape)
    inside = _intersections(a[rows].astype(float), b[columns].astype(float))
    union = areas[0][rows] + areas[1][columns] - inside
    found[rows, columns] = np.where(union > 0, inside / np.where(union > 0, union, 1), 0.0)
    return found


def _intersections(a: Array, b: Array) -> Array:
    """The areas [K] that pairs of rectangles [K, 5] share.

    They share a convex polygon, whose corners are the corners of either inside the other and where their sides cross.
    """
    first, second = (_corners(each, a[:, :2]) for each in (a, b))
    crossings, crossed = _crossings(first, second)
    points = np.concatenate([first, second, crossings], 1)
    valid = np.concatenate([_inside(first, b, a[:, :2]), _inside(second, a, a[:, :2]), crossed], 1)
    count = valid.sum(1)
    middle = (points * valid[..., None]).sum(1) / np.maximum(count, 1)[:, None]
    some = np.take_along_axis(points, valid.argmax(1)[:, None, None].repeat(2, 2), 1)
    points = np.where(valid[..., None], points, some) - middle[:, None]
    order = np.arctan2(points[..., 1], points[..., 0]).argsort(1)
    points = np.take_along_axis(points, order[..., None].repeat(2, 2), 1)
    area = np.abs(_cross(points, np.roll(points, -1, 1)).sum(1)) / 2
    return np.asarray(np.where(count >= 3, area, 0.0))


def _axes(boxes: Array) -> Array:
    """The directions of width and height [K, 2, 2]."""
    cosine, sine = np.cos(boxes[:, 4]), np.sin(boxes[:, 4])
    return np.stack([np.stack([cosine, sine], 1), np.stack([-sine, cosine], 1)], 1)


def _corners(boxes: Array, origin: Array) -> Array:
    """The corners [K, 4, 2] in their order around each box, relative to a point [K, 2]."""
    halves = _axes(boxes) * boxes[:, 2:4, None] / 2
    signs = np.asarray([[-1, -1], [1, -1], [1, 1], [-1, 1]], float)
    return np.asarray((boxes[:, :2] - origin)[:, None] + signs @ halves)


def _inside(points: Array, boxes: Array, origin: Array) -> Array:
    """Which points [K, P, 2], relative to an origin [K, 2], lie in the box of their row or on its border."""
    local = (points - (boxes[:, :2] - origin)[:, None]) @ _axes(boxes).transpose(0, 2, 1)
    half = np.abs(boxes[:, None, 2:4]) / 2
    return np.asarray((np.abs(local) <= half + TOUCHING * half.max(2, keepdims=True)).all(2))


def _crossings(first: Array, second: Array) -> tuple[Array, Array]:
    """Where the sides of two rectangles cross [K, 16, 2], and which of them do."""
    start, other = first[:, :, None], second[:, None]
    side, across = (np.roll(each, -1, 1) - each for each in (first, second))
    side, across = side[:, :, None], across[:, None]
    slope = _cross(side, across)
    parallel = np.abs(slope) < TOUCHING * np.linalg.norm(side, axis=-1) * np.linalg.norm(across, axis=-1)
    slope = np.where(parallel | (slope == 0), 1.0, slope)
    along, there = _cross(other - start, across) / slope, _cross(other - start, side) / slope
    crossed = ~parallel & (along >= 0) & (along <= 1) & (there >= 0) & (there <= 1)
    points = start + along[..., None] * side
    return points.reshape(len(first), 16, 2), crossed.reshape(len(first), 16)


def _cross(a: Array, b: Array) -> Array:
    return np.asarray(a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0])

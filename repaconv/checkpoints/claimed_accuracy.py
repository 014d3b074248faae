"""The accuracy that a checkpoint claims of itself: what its trainer wrote beside the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from repaconv.results import Claim

# timm's metric, Swin's max_accuracy, DeiT's max_accuracy and test_acc1, mmengine's accuracy/top1 and best_score, ...
MEASURES = {"acc", "accuracy", "metric", "score"}
# A training's own accuracy, the five best classes and a loss are other figures.
OTHERS = {"train", "5", "loss", "epoch", "name"}
# What was asked for, and what learning rates were, is no result.
ORDERS = re.compile(r"args|cfg|config|param|sched|scaler|arch")


def claimed_accuracy(record: Mapping[str, Any]) -> tuple[Claim, ...]:
    """Every first-class accuracy in a checkpoint's record, as a share of 1, with the key and figure that it is from."""
    return tuple(
        Claim(name="accuracy", value=value if value <= 1 else value / 100, source=f"the checkpoint's {key} ({value:g})")
        for key, value in _figures(record)
        if 0 <= value <= 100 and _is_accuracy(key)
    )


def _figures(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping) and not ORDERS.search(key.lower()):
            yield from _figures(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _is_accuracy(key: str) -> bool:
    words = set(re.findall(r"[a-z]+|\d+", key.lower()))
    return not words & OTHERS and bool(words & MEASURES or {"top", "1"} <= words)

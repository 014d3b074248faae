"""Find the accuracy that the training code recorded in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from repaconv.results import Claim

# timm's metric, Swin's max_accuracy, DeiT's max_accuracy and test_acc1, mmengine's accuracy/top1 and best_score, ...
ACCURACY_WORDS = {"acc", "accuracy", "metric", "score"}
# Words of other values: training accuracy, top-5 accuracy, loss.
OTHER_WORDS = {"train", "5", "loss", "epoch", "name"}
# Sections with settings and learning rates, which are not results.
SETTING_SECTIONS = re.compile(r"args|cfg|config|param|sched|scaler|arch")


def claimed_accuracy(record: Mapping[str, Any]) -> tuple[Claim, ...]:
    """Return every top-1 accuracy in a checkpoint's record, as a fraction, with its key and value."""
    return tuple(
        Claim(name="accuracy", value=value if value <= 1 else value / 100, source=f"the checkpoint's {key} ({value:g})")
        for key, value in _figures(record)
        if 0 <= value <= 100 and _is_accuracy(key)
    )


def _figures(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping) and not SETTING_SECTIONS.search(key.lower()):
            yield from _figures(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _is_accuracy(key: str) -> bool:
    words = set(re.findall(r"[a-z]+|\d+", key.lower()))
    return not words & OTHER_WORDS and bool(words & ACCURACY_WORDS or {"top", "1"} <= words)

"""Embeddings: the cosine similarity to the reference's vector, and whether the same image is found as the nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from repaconv.tasks.contract import Array, Metric, NothingToCompare, Outputs, Row, Task, mean, only_output

LEAST_IMAGES = 3
"""Images from which on there is a choice of the nearest one."""
SIMILARITY_MARGIN = 0.01
"""An image that the reference finds nearly as near as the nearest is as good an answer: within this share of how much
more similar the nearest is than the median of the others (benchmarks/task_tolerances.py)."""


class Embedding(Task):
    """Vectors [D]. The gallery are the reference's vectors of all images, the query is the candidate's of one."""

    name = "embed"
    changed = "of nearest images changed"
    counted = "images"
    metrics = (
        Metric("cosine", "share", {"tf32": 0.999, "fp16": 0.999, "bf16": 0.99, "int8": 0.95}),
        Metric("nearest image agreement", "share", {"tf32": 0.97, "fp16": 0.97, "bf16": 0.9, "int8": 0.85}),
    )

    def read(self, outputs: Outputs) -> list[Array]:
        """Read the vectors of a batch."""
        vectors = only_output(outputs, (2,), "vectors [N, D]").astype(float)
        self.layout = f"vectors of {vectors.shape[1]} numbers"
        return list(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30))

    def row(self, result: Array, truth: Array) -> Row:
        """The cosine of one image; 1 of two vectors of zeros."""
        cosine = float(result @ truth) if result.any() or truth.any() else 1.0
        return {"query": result, "vector": truth, "cosine": cosine}

    def settled(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Whether each image finds the nearest image of the reference, or one within `SIMILARITY_MARGIN` of it."""
        if len(rows) < LEAST_IMAGES:
            raise NothingToCompare(f"{len(rows)} images have no nearest one among them to choose")
        gallery = np.stack([row["vector"] for row in rows])
        found = []
        for place, row in enumerate(rows):
            similar = np.delete(gallery @ row["vector"], place)
            answer = similar[np.delete(gallery @ row["query"], place).argmax()]
            close = SIMILARITY_MARGIN * (similar.max() - np.median(similar))
            found.append({"cosine": row["cosine"], "nearest": float(similar.max() - answer <= close)})
        return found

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """The means over the images."""
        return {"cosine": mean(rows, "cosine"), "nearest image agreement": mean(rows, "nearest")}

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """The share of images with another nearest one."""
        return 1 - summary["nearest image agreement"]

    def agreement(self, row: Row) -> float:
        """The cosine of one image."""
        return float(row["cosine"])

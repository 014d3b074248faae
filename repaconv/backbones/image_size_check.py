"""Check that a network accepts images of a given size."""

from __future__ import annotations

from typing import Any

from repaconv.core.errors import UsageProblem


def require_size(backbone: Any, config: Any, height: int, width: int) -> None:
    """Refuse an image size that the network does not accept.

    Args:
        backbone: The registered backbone.
        config: The network's config.
        height: Of the images, in pixels.
        width: Of the images, in pixels.

    Raises:
        UsageProblem: If the network does not accept this size.
    """
    if backbone.takes(config, height, width):
        return
    if backbone.any_image_size:
        raise UsageProblem(
            f"images of {height} x {width} pixels are too small for this network.",
            hint="Give larger images (--image-size, --set image_size=N, --inputs).",
            code="image-size",
        )
    taken = " x ".join(map(str, backbone.image_size(config, (height, width))))
    raise UsageProblem(
        f"this network takes images of {taken} pixels only, not {height} x {width}.",
        hint="Its position embeddings have that size. Give images of that size, or leave --image-size out.",
        code="image-size",
    )

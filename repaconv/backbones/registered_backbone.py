"""A registered backbone: rebuilds the deploy form from ``fold.json``, without the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from repaconv.results import ImageSize


class Backbone:
    """What is registered for a network family; configurations are those of the family.

    Attributes:
        name: The name under which it is registered.
        any_image_size: Whether its networks accept images of any size. Otherwise their configuration has the
            ``image_size``.
    """

    def __init__(
        self, name: str, config: type[Any], network: Callable[[Any], nn.Module], *, any_image_size: bool = False
    ) -> None:
        """Describe a family by the class of its configurations, a dataclass, and what builds their deploy form."""
        self.name, self.any_image_size = name, any_image_size
        self._config, self._network = TypeAdapter(config), network

    def to_json(self, config: Any) -> dict[str, Any]:
        """Convert the config to plain values."""
        return asdict(config)

    def from_json(self, plain: dict[str, Any]) -> Any:
        """Convert the values of `to_json` back to a config."""
        return self._config.validate_python(plain)

    def image_size(self, config: Any, preferred: ImageSize) -> ImageSize:
        """The (height, width) that the network requires; ``preferred`` if it accepts any."""
        required: ImageSize = preferred if self.any_image_size else config.image_size
        return required

    def takes(self, config: Any, height: int, width: int) -> bool:
        """Whether the network accepts images of this size."""
        return min(height, width) > 0 and (height, width) == self.image_size(config, (height, width))

    def deploy(self, config: Any) -> nn.Module:
        """Build the deploy form, without weights."""
        return self._network(config).eval()

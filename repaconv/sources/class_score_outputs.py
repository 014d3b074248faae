"""Find the output that holds class scores: by --set classes, by the architecture or, assumed, by its shape."""

from __future__ import annotations

from collections.abc import Mapping

from repaconv.core.errors import UsageProblem
from repaconv.method_api.settings import SettingsReader, natural
from repaconv.results import ClassScores

LOGITS = "logits"
"""The usual name of an output of class scores."""


def asked_classes(reader: SettingsReader) -> int | None:
    """The number of classes given with --set classes; 0 for none, None if the option was not given."""
    return reader.user_value("classes", natural)


def class_scores(widths: Mapping[str, int], asked: int | None, head: int | None = None) -> ClassScores | None:
    """Return the output that holds class scores, or None. It is ``assumed`` if only its shape indicates it.

    Args:
        widths: The number of columns of the outputs of shape [images, numbers], by name.
        asked: See `asked_classes`.
        head: The architecture's number of classes; 0 for none, None where that is unknown.

    Raises:
        UsageProblem: No output, or several, have as many columns as --set classes says.
    """
    known = head if asked is None else asked
    if known == 0:
        return None
    fits = [name for name, width in widths.items() if width == known or (known is None and width > 1)]
    if LOGITS in fits:
        fits = [LOGITS]
    if asked is not None and len(fits) != 1:
        has = ", ".join(f"{name} [N, {width}]" for name, width in widths.items()) or "none of shape [N, numbers]"
        raise UsageProblem(
            f"--set classes={asked}: {'several outputs have' if fits else 'no output has'} {asked} numbers per image; "
            f"the outputs are {has}.",
            hint="Give the width of one output, or 0 if the network gives no class scores.",
            code="setting.value",
        )
    if len(fits) != 1:
        return None
    said = "--set classes" if asked else "the architecture" if head else "its name" if fits == [LOGITS] else ""
    return ClassScores(output=fits[0], classes=widths[fits[0]], source=said or "its shape", assumed=not said)

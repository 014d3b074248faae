"""Read the activation of a network, which no tensor shows: from --set, the checkpoint's metadata, or the default."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

from repaconv.backbones.shared_layers import ActivationKind
from repaconv.core.errors import Refused
from repaconv.method_api.settings import SettingsReader, one_of

ACTIVATIONS: tuple[str, ...] = get_args(ActivationKind)

# The names of timm, torch, mmengine and transformers, in lower case and without other characters.
_SPELLINGS = {
    "gelu": "GELU",
    "gelutanh": "GELU-tanh",
    "gelunew": "GELU-tanh",
    "gelufast": "GELU-tanh",
    "gelupytorchtanh": "GELU-tanh",
    "quickgelu": "QuickGELU",
    "relu": "ReLU",
    "silu": "SiLU",
    "swish": "SiLU",
}
_APPROXIMATE = {"none": "GELU", "tanh": "GELU-tanh"}
_KEYS = ("act", "act_layer", "activation", "hidden_act")
_PLACES = ("args", "arch", "cfg", "config", "hparams", "hyper_parameters", "meta", "model_args", "model_kwargs")


def activation_kind(value: Any) -> str | None:
    """Parse the name of an activation into one of `ACTIVATIONS`; None if it is not one of them.

    Dotted names and ``dict(type="GELU", approximate="tanh")`` are accepted too.
    """
    if isinstance(value, Mapping):
        kind, more = activation_kind(value.get("type")), set(value) - {"type", "inplace"}
        exact = kind == "GELU" and more == {"approximate"}
        return _APPROXIMATE.get(str(value["approximate"])) if exact else None if more else kind
    if not isinstance(value, str):
        return None
    return _SPELLINGS.get(re.sub(r"[^a-z]", "", value.rpartition(".")[2].lower()))


def read_activation(
    record: Mapping[str, Any], reader: SettingsReader, other: Any = None, where: str = ""
) -> ActivationKind:
    """Read the activation: from the setting ``act``, else from the file, else exact GELU.

    Args:
        record: Everything in the checkpoint except its tensors.
        reader: The user's settings.
        other: An activation that the caller found elsewhere in the file, if any.
        where: The part of the file that ``other`` comes from, or could have come from.

    Raises:
        Refused: If the file names two different activations, or an unknown one.
    """
    named = {**dict(_named_activations(record, "")), **({where: other} if other else {})}
    kinds = {activation_kind(value) or str(value): place for place, value in named.items()}
    if len(kinds) > 1:
        raise Refused(
            "the file names two activations: "
            + ", ".join(f"{place} {named[place]!r}" for place in kinds.values())
            + ".",
            hint="Save the checkpoint with the activation that it was trained with.",
            code="activation.ambiguous",
        )
    found, where = next(iter(kinds.items()), (None, where))
    act = reader.take("act", one_of(*ACTIVATIONS), "GELU", found, where)
    if act not in ACTIVATIONS:
        raise Refused(
            f"{where} names the activation {act!r}, which is unknown.",
            hint=(
                f"Known activations: {', '.join(ACTIVATIONS)}. If it is one of them under another name: --set act=... "
                "--force."
            ),
            code="activation.unknown",
        )
    return cast(ActivationKind, act)


def _named_activations(record: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the paths in the record that name an activation, with their values."""
    for key, value in record.items():
        if key in _KEYS and value and not isinstance(value, (bool, int, float)):
            yield f"{prefix}{key}", value
        elif key in _PLACES and isinstance(value, Mapping):
            yield from _named_activations(value, f"{prefix}{key}.")

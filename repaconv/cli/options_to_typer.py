"""Orders as options: a command takes an order, and Typer sees the order's fields in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_type_hints

import typer

from repaconv.cli.shell_completion import completion_of
from repaconv.cli.text_and_json_output import show_all
from repaconv.options.option_definitions import ORDER, Asked, Order, knobs


def joined(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with options in place of its parameters that are orders; Typer reads signatures."""
    hints = {name: _as_written(hint) for name, hint in get_type_hints(command, include_extras=True).items()}
    own = signature(command).parameters
    orders = {name: hints[name] for name in own if _is_order(hints[name])}

    def options() -> Iterator[Parameter]:
        for name, parameter in own.items():
            if name in orders:
                yield from map(_option, knobs(orders[name]))
            else:
                yield parameter.replace(annotation=_completed(name, hints[name]), kind=Parameter.KEYWORD_ONLY)
        if "quiet" in own:
            all_of_it = typer.Option(False, "-v", "--verbose", help="Print every row and column of tables.")
            yield Parameter("verbose", Parameter.KEYWORD_ONLY, default=all_of_it, annotation=bool)

    @wraps(command)
    def called(**typed: Any) -> Any:
        show_all(typed.pop("verbose", False))
        return command(**{name: _made(orders[name], typed) if name in orders else typed[name] for name in own})

    listed = sorted(options(), key=_panel)
    called.__signature__ = signature(command).replace(parameters=listed)  # type: ignore[attr-defined]
    called.former_options = {  # type: ignore[attr-defined]
        f"--{each.knob.former.replace('_', '-')}": each.option
        for order in orders.values()
        for each in knobs(order)
        if each.knob.former
    } | getattr(command, "former_options", {})
    return called


def _panel(parameter: Parameter) -> int:
    """The place of an option's group in the help; options of no group come first, as Typer prints them."""
    described = [parameter.default, *getattr(parameter.annotation, "__metadata__", ())]
    panel = next((found for each in described if (found := getattr(each, "rich_help_panel", None))), None)
    return ORDER.index(panel) if panel in ORDER else -1


def _as_written(hint: Any) -> Any:
    """Before Python 3.11, what has None for its default comes in an Optional of its own, which hides what it is."""
    inside = [each for each in get_args(hint) if hasattr(each, "__metadata__")]
    return inside[0] if inside and not hasattr(hint, "__metadata__") else hint


def _made(order: type[Order], typed: Mapping[str, Any]) -> Order:
    """The order; what was not typed is its own default."""
    return order(**{each.name: each.read(typed[each.name]) for each in knobs(order) if typed[each.name] is not None})


def _is_order(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Order)


def _completed(name: str, hint: Any) -> Any:
    """The hint of an argument or an option, with what a shell offers for it; hints of several commands are one."""
    offered, described = completion_of(name), getattr(hint, "__metadata__", ())
    if offered is None or not described:
        return hint
    parameter = copy(described[0])
    parameter.autocompletion = offered
    return Annotated[hint.__origin__, parameter]


def _option(field: Asked) -> Parameter:
    """A field as Typer reads it."""
    knob = field.knob
    names = knob.option or (() if field.default is True else (field.option,))
    offered = completion_of(field.name)
    option = typer.Option(
        field.typed_default,
        *names,
        help=knob.help,
        metavar=knob.metavar,
        min=knob.least,
        autocompletion=offered,
        show_default=knob.default_text or True,
        rich_help_panel=knob.panel,
    )
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=option, annotation=field.typed_as)

"""Command options as Typer parameters, the options shared by several commands, and how a command exits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum
from functools import cached_property, wraps
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from repaconv.cli.shell_completion import completion_of
from repaconv.core.terminal import discard, set_verbose
from repaconv.deprecation import Deprecation
from repaconv.stages.shared.option_dataclasses import (
    GENERAL,
    NAMES,
    PANEL_ORDER,
    SHARE,
    SIZE,
    NoEffect,
    OptionField,
    Options,
    Text,
    options_of,
    refuse_without_effect,
    require_valid_names,
)

if TYPE_CHECKING:
    from repaconv.results import Record

# The groups in which `repaconv --help` lists the commands

STEPS = "Main steps"
WORKFLOWS = "Whole workflows"
SEARCH = "Search and conversion"
FLEET = "Fleet and boards"
ENVIRONMENT = "Information and environment"


# A command takes an `Options` object. Typer sees one parameter per field instead.


def with_typer_parameters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with one Typer parameter per field of its `Options` (Typer reads signatures)."""
    hints = {name: _as_written(hint) for name, hint in get_type_hints(command, include_extras=True).items()}
    own = signature(command).parameters
    types = {name: hints[name] for name in own if _is_options(hints[name])}

    def options() -> Iterator[Parameter]:
        for name, parameter in own.items():
            if name in types:
                yield from map(_option, options_of(types[name]))
            else:
                yield parameter.replace(annotation=_with_completion(name, hints[name]), kind=Parameter.KEYWORD_ONLY)
        if "quiet" in own:
            all_of_it = typer.Option(
                False,
                "-v",
                "--verbose",
                help="Print every row and column of tables.",
                rich_help_panel=GENERAL,
            )
            yield Parameter("verbose", Parameter.KEYWORD_ONLY, default=all_of_it, annotation=bool)

    @wraps(command)
    def called(**typed: Any) -> Any:
        set_verbose(typed.get("verbose", False))
        require_valid_names(value for value in typed.values() if isinstance(value, Path))
        return command(**{name: _options_from(types[name], typed) if name in types else typed[name] for name in own})

    listed = sorted(options(), key=_panel)
    called.__signature__ = signature(command).replace(parameters=listed)  # type: ignore[attr-defined]
    called.placeholders = {  # type: ignore[attr-defined]
        **{name: _placeholder(hint) for name, hint in hints.items()},
        **{
            each.name: _placeholder(each.typed_as, each.definition.text)
            for one in types.values()
            for each in options_of(one)
        },
    }
    called.options_types = tuple(types.values())  # type: ignore[attr-defined]
    called.former_options = {  # type: ignore[attr-defined]
        spelled: former._replace(what=spelled, use=each.option)
        for options in types.values()
        for each in options_of(options)
        if (former := each.definition.former) and (spelled := f"--{former.what.replace('_', '-')}")
    }
    return called


def _panel(parameter: Parameter) -> int:
    """Return the position of an option's group in the help. Options without a group come first, as in Typer."""
    described = [parameter.default, *getattr(parameter.annotation, "__metadata__", ())]
    panel = next((found for each in described if (found := getattr(each, "rich_help_panel", None))), None)
    return PANEL_ORDER.index(panel) if panel in PANEL_ORDER else -1


def _as_written(hint: Any) -> Any:
    """Return the annotation as written: before Python 3.11, a default of None wraps it in another Optional."""
    inside = [each for each in get_args(hint) if hasattr(each, "__metadata__")]
    return inside[0] if inside and not hasattr(hint, "__metadata__") else hint


def _options_from(options: type[Options], typed: Mapping[str, Any]) -> Options:
    """Create the options object; options that were not given on the command line have their defaults."""
    return options(
        **{each.name: each.read(typed[each.name]) for each in options_of(options) if typed[each.name] is not None}
    )


def _is_options(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Options)


def _with_completion(name: str, hint: Any) -> Any:
    """Add shell completion to the annotation of an argument. Commands share annotations, so it is copied."""
    offered, described = completion_of(name), getattr(hint, "__metadata__", ())
    if offered is None or not described:
        return hint
    parameter = copy(described[0])
    parameter.autocompletion = offered
    return Annotated[hint.__origin__, parameter]


def _option(field: OptionField) -> Parameter:
    definition = field.definition
    names = definition.option or (() if field.default is True else (field.option,))
    offered = completion_of(field.name)
    option = typer.Option(
        field.typed_default,
        *names,
        help=definition.help,
        metavar=definition.metavar,
        min=definition.least,
        max=definition.most,
        autocompletion=offered,
        show_default=definition.default_text or True,
        rich_help_panel=definition.panel,
    )
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=option, annotation=field.typed_as)


PLACEHOLDERS = {SIZE: "N|HxW", SHARE: "X%", NAMES: "NAME,..."}


def _placeholder(typed: Any, text: Text | None = None) -> str:
    """The value of an option in the help, if its definition names none: short, so that the help has the width."""
    typed = getattr(typed, "__origin__", typed) if hasattr(typed, "__metadata__") else typed
    plain = next((each for each in get_args(typed) if each is not type(None)), typed)
    if isinstance(plain, type) and issubclass(plain, Enum):
        return "|".join(each.value for each in plain)
    if text is not None and text in PLACEHOLDERS:
        return PLACEHOLDERS[text]
    return {bool: "", int: "N", float: "X", Path: "PATH"}.get(plain, "NAME")


# The app, the options shared by several commands, and how a command exits

Command = TypeVar("Command", bound=Callable[..., Any])


def _keep_text_for_completion(command: Any, ctx: Any) -> None:
    """Leave the words as they are if they are only parsed for completion: Typer imports pydantic to convert them."""
    if ctx.resilient_parsing:
        for parameter in command.get_params(ctx):
            parameter.process_value = lambda _ctx, value: value


class _Group(TyperGroup):
    """All commands as one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the command's own."""
        _keep_text_for_completion(self, ctx)
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def _for_help(parameter: Any, placeholders: Mapping[str, str]) -> Any:
    """A parameter as the help shows it: an argument without the type that its name tells, numbers without limits."""
    shown = copy(parameter)
    shown.min = shown.max = None
    if shown.param_type_name == "argument":
        shown.display_type_rich = lambda **_: ""
    elif shown.metavar is None:
        shown.metavar = placeholders.get(shown.name, "")
    return shown


class Strict(TyperCommand):
    """A Typer command that refuses options without effect and accepts the former names of options."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return ``--help``, which is listed among the general options."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = GENERAL
            option.metavar = ""
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line; Typer writes {FILE} for an argument that must be given."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with the width for what is said, not for types and limits."""
        shown, placeholders = copy(self), getattr(self.callback, "placeholders", {})
        shown.params = [_for_help(each, placeholders) for each in self.params]
        super(Strict, shown).format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. The former name of an option is replaced by the current one, with a notice."""
        from repaconv.core import terminal

        _keep_text_for_completion(self, ctx)
        former: dict[str, Deprecation] = getattr(self.callback, "former_options", {})
        ends = args.index("--") if "--" in args else len(args)
        for place, word in enumerate(args[:ends]):
            name, mark, value = word.partition("=")
            if name in former:
                terminal.print_message(str(former[name]))
                args[place] = f"{former[name].use}{mark}{value}"
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Refuse options without effect, then run the command."""

        typed = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
        flags = {str(option.name): option.opts[0] for option in self.params if option.name in typed}
        refuse_idle(str(ctx.info_name), ctx.params, flags)
        for options in getattr(self.callback, "options_types", ()):
            hint = f"Leave it out, and see `repaconv {ctx.info_name} --help`."
            refuse_without_effect(options.NO_EFFECT, _options_from(options, ctx.params), flags, hint)
        return super().invoke(ctx)


class _Command(CommandInfo):
    """A command whose Typer parameters are made when Typer asks for its callback: a process runs one command."""

    def __init__(self, written: Callable[..., Any], **settings: Any) -> None:
        described = [" ".join(each.split()) for each in cleandoc(written.__doc__ or "").split("\n\n")]
        super().__init__(written.__name__.replace("_", "-"), cls=Strict, help="\n\n".join(described), **settings)
        self.written = written
        del self.callback

    @cached_property
    def callback(self) -> Callable[..., Any]:  # type: ignore[override]
        return with_typer_parameters(self.written)


class _Commands(typer.Typer):
    """Typer app whose commands take `Options` objects."""

    def command(self, **settings: Any) -> Callable[[Command], Command]:  # type: ignore[override]
        """Register a command by the name of its function."""

        def registered(written: Command) -> Command:
            self.registered_commands.append(_Command(written, **settings))
            return written

        return registered

    def only(self, words: Sequence[str]) -> _Commands:
        """Return an app with the command that these words begin with, all commands if it is none of them: to make the
        parameters of every command takes longer than most of what is asked of one."""
        named = [each for each in self.registered_commands if [each.name] == words[:1]]
        found = copy(self)
        found.registered_commands = named or self.registered_commands
        return found


app = _Commands(
    name="repaconv",
    cls=_Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fold a trained vision network exactly into its fastest inference-time form; verify, export and benchmark it.",
    epilog="Start: repaconv fold FILE. Each command prints the one that usually comes next. Without a file: "
    "repaconv demo.\n\nExit codes: 0 done and verified, 1 a gate failed, 2 usage, 3 environment, 4 input refused, "
    "5 inconclusive, 130 interrupted (by SIGTERM 143, by SIGHUP 129).",
)


class Format(str, Enum):
    """The format of the results on stdout."""

    text = "text"
    json = "json"


def out_option(help: str, default_text: str | None = None, panel: str | None = None) -> Any:
    """The option of what a command writes, ``-o``."""
    return typer.Option("-o", "--out", help=help, show_default=default_text or True, rich_help_panel=panel)


FormatOption = Annotated[
    Format, typer.Option("--format", help="Format of the results on stdout.", rich_help_panel=GENERAL)
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print results and notices only: no progress, no list of files.",
        rich_help_panel=GENERAL,
    ),
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Run folder made by `fold`.",
        show_default="the newest run",
    ),
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN|MODEL.onnx",
        help="Run folder made by `fold`, or one of its ONNX models if it has several.",
        show_default="the newest run",
    ),
]
FoldArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Checkpoint (.pth, .pt, .bin, .safetensors, or the .index.json of several such files), ONNX model (.onnx) "
        "or Hugging Face folder.",
    ),
]
ConvertArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Checkpoint (.pth, .pt, .bin, .safetensors, or the .index.json of several such files) of a plain vision "
        "transformer.",
    ),
]
InspectArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="Checkpoint, ONNX model or engine; no code in it is run.")
]


def run_and_exit(
    command: str,
    format: Format,
    quiet: bool,
    stage: Callable[..., Record],
    shown: Callable[[Record], None] | None = None,
) -> None:
    """Run a stage, print its result (by ``shown``, or by `print_result`), and exit with the code of its verdict."""
    from repaconv.cli import text_and_json_output
    from repaconv.cli.text_and_json_output import print_result

    with text_and_json_output.progress(quiet=quiet or format is Format.json) as progress:
        done = stage(progress=progress)
    code = 1 if getattr(done, "verdict", "passed") == "failed" else 0
    unproved = getattr(done, "links", ()) and getattr(done, "verdict", "") == "not verified"
    if not code and (unproved or getattr(done, "inconclusive", False)):
        code = 5
    with readers_may_stop():
        if format is Format.json:
            text_and_json_output.print_json(command, code, text_and_json_output.plain_data(done))
        else:
            text_and_json_output.print_files(
                getattr(done, "input_files", ()), getattr(done, "output_files", ()), quiet=quiet
            )
            (shown or print_result)(done)
            text_and_json_output.print_overridden(getattr(done, "unverified", ()))
            if not quiet:
                what_follows = text_and_json_output.print_remedy if code else text_and_json_output.print_next_step
                what_follows(command, done)
    raise typer.Exit(code)


@contextmanager
def readers_may_stop() -> Iterator[None]:
    """Within it, who reads stdout may close the pipe, as `head` does: the rest is discarded, and the exit code remains.

    Typer ends the process with 1 there, which says that a check failed.
    """
    try:
        yield
    except (BrokenPipeError, SystemExit) as closed:
        if isinstance(closed, SystemExit) and not isinstance(closed.__context__, BrokenPipeError):
            raise
        discard(sys.stdout)


# --- Rules that refuse options that would have no effect, so that users notice the mistake.
#
# An option whose effect is there anyway, such as ``--quiet`` with ``--format json``, is accepted.

Values = Mapping[str, Any]
"""All parameters of a command by their Python names."""


class IdleOptions(NamedTuple):
    """Options of some commands that have no effect in a case, and the reason."""

    commands: tuple[str, ...]
    options: tuple[str, ...]
    where: Callable[[Values], Any]
    why: str

    @property
    def no_effect(self) -> NoEffect:
        """The same rule without the commands."""
        return NoEffect(self.options, self.where, self.why)


def _no_checkpoint(given: Values) -> bool:
    from repaconv.stages.inspect.stage import NOT_CHECKPOINTS

    return Path(given["checkpoint"]).suffix in NOT_CHECKPOINTS


CLUSTER = ("tls_ca", "tls_cert", "tls_key", "wait_s")
BASELINE = ("baseline", "max_regression", "update_baseline", "accept_inconclusive")
PROTOCOL = ("against", "threads", "image_size", "rounds", "protocol", "profile", "seed", "out", "scheduler", *CLUSTER)

IDLE = (
    IdleOptions(("report",), ("paper",), lambda given: len(given["run"] or ()) > 1, "several runs show none"),
    IdleOptions(("inspect",), ("weights", "settings"), _no_checkpoint, "the file is no checkpoint"),
    IdleOptions(
        ("bench",),
        ("against", "rounds", "protocol", "profile", "seed", "host", "scheduler", *CLUSTER, *BASELINE),
        lambda given: given["estimate"],
        "--estimate measures nothing",
    ),
    IdleOptions(
        ("bench",),
        (*PROTOCOL, *BASELINE),
        lambda given: given["host"],
        "the board measures what is in the bundle, by its own trtexec",
    ),
    IdleOptions(
        ("bench",),
        ("protocol", "profile", "estimate", "host", "scheduler", *CLUSTER, *BASELINE),
        lambda given: given["objective"] == "throughput",
        "throughput is measured here, and is no latency to be held against one",
    ),
    IdleOptions(
        ("bench",), ("streams",), lambda given: given["objective"] != "throughput", "it is of --objective throughput"
    ),
    IdleOptions(
        ("bench",), ("out", *BASELINE), lambda given: given["scheduler"], "a worker's figures go to the run alone"
    ),
    IdleOptions(
        ("bench", "tune", "sweep"), CLUSTER, lambda given: not given["scheduler"], "it is for a cluster (--scheduler)"
    ),
    IdleOptions(
        ("bench",),
        ("precision",),
        lambda given: given["model"] and Path(given["model"]).is_file(),
        "a file has its precision; it chooses among the models of a run",
    ),
    IdleOptions(
        ("bench",),
        ("preset",),
        lambda given: given["estimate"] or given["host"] or given["scheduler"],
        "it brings settings of runtimes that run here",
    ),
    IdleOptions(
        ("tune",),
        ("settings",),
        lambda given: given["source"] is None or Path(given["source"]).is_dir(),
        "a run is folded already",
    ),
)


def refuse_idle(command: str, given: Values, typed: Mapping[str, str]) -> None:
    """Refuse options on the command line that have no effect.

    Args:
        command: Name of the command.
        given: See `Values`.
        typed: The options given on the command line as they were spelled, by their Python names.

    Raises:
        UsageProblem: If one of them has no effect.
    """
    rules = [rule.no_effect for rule in IDLE if command in rule.commands]
    refuse_without_effect(rules, given, typed, f"Leave it out, and see `repaconv {command} --help`.")

"""The app, the options that several commands have, and how each of them ends."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from repaconv.cli.options_to_typer import joined

if TYPE_CHECKING:
    from repaconv.results import Record


Command = TypeVar("Command", bound=Callable[..., Any])


class Strict(TyperCommand):
    """A command that refuses options which do nothing where they stand, and still takes those of former names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what was typed; an option's former name is replaced by its name, and that is said."""
        from repaconv.cli import text_and_json_output

        former: dict[str, str] = getattr(self.callback, "former_options", {})
        ends = args.index("--") if "--" in args else len(args)
        for place, word in enumerate(args[:ends]):
            name, mark, value = word.partition("=")
            if name in former:
                text_and_json_output.told(
                    f"{name} is now called {former[name]}; the old name goes with the next release"
                )
                args[place] = f"{former[name]}{mark}{value}"
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run it, with what was typed looked at first."""
        from repaconv.cli.idle_options import refuse_idle

        typed = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
        flags = {str(option.name): option.opts[0] for option in self.params if option.name in typed}
        refuse_idle(str(ctx.info_name), ctx.params, flags)
        return super().invoke(ctx)


class _Commands(typer.Typer):
    """Commands whose orders are joined to their options."""

    def command(self, *names: Any, **settings: Any) -> Callable[[Command], Command]:
        """Register one."""
        register = super().command(*names, cls=Strict, **settings)

        def joining(command: Command) -> Command:
            register(joined(command))
            return command

        return joining


app = _Commands(
    name="repaconv",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fold a trained vision network exactly into its fastest inference-time form; verify, export and benchmark it.",
    epilog="Exit codes: 0 done and verified, 1 a gate failed, 2 usage, 3 environment, 4 input refused, "
    "5 inconclusive, 130 interrupted.",
)


class Format(str, Enum):
    """How results are printed."""

    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Format of the results on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only: no progress, no list of files.")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="Run folder made by `fold`.",
        show_default="the newest run",
    ),
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN|MODEL.onnx]",
        help="Run folder made by `fold`, or one of its ONNX models if it has several.",
        show_default="the newest run",
    ),
]
FoldArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Checkpoint (.pth, .pt, .bin, .safetensors), ONNX model (.onnx) or Hugging Face folder."
    ),
]
InspectArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="Checkpoint, ONNX model or engine; no code in it is run.")
]


def finish(
    command: str,
    format: Format,
    quiet: bool,
    stage: Callable[..., Record],
    shown: Callable[[Record], None] | None = None,
) -> None:
    """Run a stage, show its artefact (by ``shown``, or as all are), leave with its verdict."""
    from repaconv.cli import text_and_json_output
    from repaconv.cli.result_text import show

    with text_and_json_output.progress(quiet=quiet or format is Format.json) as progress:
        done = stage(progress=progress)
    code = 1 if getattr(done, "verdict", "passed") == "failed" else 0
    unproved = getattr(done, "links", ()) and getattr(done, "verdict", "") == "not verified"
    if not code and (unproved or getattr(done, "inconclusive", False)):
        code = 5
    if format is Format.json:
        text_and_json_output.envelope(command, code, text_and_json_output.plain_data(done))
    else:
        text_and_json_output.files(getattr(done, "input_files", ()), getattr(done, "output_files", ()), quiet=quiet)
        (shown or show)(done)
        text_and_json_output.overridden(getattr(done, "unverified", ()))
        if not code and not quiet:
            text_and_json_output.next_step(command, done)
    raise typer.Exit(code)

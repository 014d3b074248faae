"""Definition of a command's options: one dataclass, from which CLI options and Python arguments are derived."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.deprecation import Deprecation

if TYPE_CHECKING:
    from repaconv.results import ImageSize

# Values that are read from text and written as text again


class Text(NamedTuple):
    """How a value is read from text and written as text.

    Attributes:
        read: Makes the value from (text, option); from (texts, option) if the option is repeatable.
        format: Makes the text from the value; several texts if the option is repeatable.
        several: Whether the option is repeatable.
    """

    read: Callable[[Any, str], Any]
    format: Callable[[Any], str | list[str]]
    several: bool = False


def image_size(text: str, option: str) -> tuple[int, int]:
    """``224`` or ``140x126`` (height x width) in pixels."""
    from repaconv.results import parse_image_size

    try:
        return parse_image_size(text)
    except ValueError as error:
        raise UsageProblem(
            f"{option} {text} is {error}.", hint=f"E.g. {option} 224.", code="usage.image-size"
        ) from None


def positive_or_dynamic(text: str, option: str) -> int | None:
    """A whole number above zero; None for ``dynamic``."""
    from repaconv.results import whole_number

    if text == "dynamic":
        return None
    number = whole_number(text)
    if not number:
        raise UsageProblem(
            f"{option}: {text!r} is neither dynamic nor a whole number above zero.",
            hint=f"Give {option} dynamic or, for example, {option} 8.",
            code="usage.number",
        )
    return number


def positive_number(text: str, option: str, example: str) -> float:
    """A float above zero; ``example`` is one as it is typed, for the hint."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise UsageProblem(
            f"{option}: {text!r} is not a number above zero.", hint=f"E.g. {option} {example}.", code="usage.number"
        )
    return value


def share(text: str, option: str) -> float:
    """``5%`` or ``0.05``.

    Raises:
        UsageProblem: If it is no positive number, or a number above 1 without %, which may be meant as percent.
    """
    number = positive_number(text.removesuffix("%"), option, "5%")
    if text.endswith("%"):
        return number / 100
    if number > 1:
        raise UsageProblem(
            f"{option} {text} is more than the whole.",
            hint=f"Give percent with the sign: {option} {text}%.",
            code="usage.number",
        )
    return number


def pairs(words: Sequence[str], option: str, separator: str = "=", example: str = "") -> dict[str, str]:
    """``name=value`` words as a dict; ``example`` is one that the option takes, for the hint."""
    found = {}
    for word in words:
        name, mark, value = word.partition(separator)
        if not name or not mark:
            raise UsageProblem(
                f"{option} {word} is not NAME{separator}VALUE.",
                hint=f"E.g. {option} {example or ('num_heads=3' if separator == '=' else 'onnx:1e-6')}.",
                code="usage.pair",
            )
        if name in found:
            raise UsageProblem(f"{option} gives {name} twice.", hint="Give each name once.", code="usage.pair")
        found[name] = value
    return found


def _tolerances(words: Sequence[str], option: str) -> dict[str, float]:
    found = pairs(words, option, ":")
    return {name: positive_number(value, option, f"{name}:1e-6") for name, value in found.items()}


def _joined(value: Mapping[str, Any], mark: str) -> list[str]:
    return [f"{name}{mark}{each}" for name, each in value.items()]


SIZE = Text(image_size, lambda value: "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value))
BATCH = Text(positive_or_dynamic, lambda value: "dynamic" if value is None else str(value))
SHARE = Text(share, lambda value: f"{100 * value:.10g}%")
NAMES = Text(lambda text, _: tuple(text.split(",")), ",".join)
LINKS = Text(lambda words, _: tuple(words), list, several=True)
PATTERNS = LINKS
SETTINGS = Text(pairs, lambda value: _joined(value, "="), several=True)
TOLERANCES = Text(_tolerances, lambda value: _joined(value, ":"), several=True)


def as_image_size(size: int | str | ImageSize | None) -> ImageSize | None:
    """A size as (height, width): from one number, for a square, or from text such as ``140x126``.

    Raises:
        UsageProblem: If the text is not an image size.
    """
    return None if size is None else image_size(str(SIZE.format(size)), "image_size")


# Option definitions, and what is derived from them

Result = TypeVar("Result")
Given = ParamSpec("Given")
AnyOptions = TypeVar("AnyOptions", bound="Options")


@dataclass(frozen=True)
class Option:
    """The definition of one option, written in the ``Annotated`` of a field of `Options`.

    Attributes:
        help: Description: the option's help, and the argument's documentation.
        option: Names on the command line, if they differ from the field's name.
        metavar: Placeholder of the value in the help.
        least: The smallest accepted number.
        most: The largest accepted number.
        text: How the value is read from text, if it is not a plain number, word or path.
        usual: Default on the command line as text, if it differs from the field's default.
        default_text: How the help describes the default, if it is not a plain value ("from the target").
        panel: The group of `--help` that lists the option; see `repaconv.stages.shared.option_dataclasses`.
        recorded: Whether results record it. Paths of results and limits that they are compared with are not recorded.
        former: The field's former name, which is still accepted in Python, in recipes and as an option, and the field's
            name.
    """

    help: str
    option: tuple[str, ...] = ()
    metavar: str | None = None
    least: int | None = None
    most: int | None = None
    text: Text | None = None
    usual: str | None = None
    default_text: str | None = None
    panel: str | None = None
    recorded: bool = True
    former: Deprecation | None = None

    __is_annotated_types_grouped_metadata__ = True

    def __iter__(self) -> Iterator[Any]:
        """Constraints for pydantic, which checks options that are read from a file."""
        from annotated_types import Ge, Le

        if self.least is not None:
            yield Ge(self.least)
        if self.most is not None:
            yield Le(self.most)


def output(help: str, default_text: str | None = None) -> Option:
    """The option of what a command writes, ``-o``; results do not record it."""
    return Option(help, option=("-o", "--out"), recorded=False, default_text=default_text, panel=OUTPUT)


class NoEffect(NamedTuple):
    """Options of a command that have no effect in some situation.

    Attributes:
        options: Names of the fields.
        where: Whether the command's `Options` are in this situation.
        why: The reason, as the end of a sentence.
    """

    options: tuple[str, ...]
    where: Callable[[Any], Any]
    why: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command. Subclasses are frozen dataclasses with an `Option` in every field's annotation."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012, as pydantic reads it

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = ()
    """Combinations that are refused on the command line, in recipes and in Python."""

    @classmethod
    def of(cls: type[AnyOptions], other: Options, **changed: Any) -> AnyOptions:
        """Options of this class with the values of another object, which has at least the same fields."""
        return cls(
            **{each.name: getattr(other, each.name) for each in options_of(cls) if each.name not in changed}, **changed
        )

    def changed(self) -> dict[str, str]:
        """Names of the fields that differ from their default, each mapped to itself."""
        return {each.name: each.name for each in options_of(type(self)) if getattr(self, each.name) != each.default}

    def words(self) -> tuple[str, ...]:
        """The options as command-line arguments, as results record them and the report repeats them.

        Defaults, empty values and options that are not recorded are omitted.
        """
        words: list[str] = []
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if each.definition.recorded and value != each.default and value not in (None, (), [], {}):
                words += each.words(value)
        return tuple(words)


@dataclass(frozen=True)
class OptionField:
    """A field of an options class with its definition; ``default`` is `inspect.Parameter.empty` if it is required."""

    name: str
    type: Any
    definition: Option
    default: Any

    @property
    def option(self) -> str:
        """Its name on the command line, the longest if there are several."""
        return max(self.definition.option, key=len, default=f"--{self.name.replace('_', '-')}")

    @property
    def is_path(self) -> bool:
        """Whether its type includes paths."""
        return Path in (get_args(self.type) or (self.type,))

    def words(self, value: Any) -> list[str]:
        """A value as command-line arguments."""
        if isinstance(value, bool):
            return [self.option if value else f"--no-{self.option[2:]}"]
        text = self.definition.text.format(value) if self.definition.text else str(value)
        return [word for each in ([text] if isinstance(text, str) else text) for word in (self.option, each)]

    def read(self, typed: Any) -> Any:
        """The value of what was typed; None if nothing was typed."""
        return typed if typed is None or self.definition.text is None else self.definition.text.read(typed, self.option)

    @property
    def typed_as(self) -> Any:
        """The type on the command line: text if it is read from text, a path if it may be one, else the field's."""
        if self.definition.text is not None:
            return list[str] | None if self.definition.text.several else str if self.definition.usual else str | None
        members = get_args(self.type) or (self.type,)
        plain = Path if self.is_path else next(member for member in members if member is not type(None))
        return plain | None if type(None) in members else plain

    @property
    def typed_default(self) -> Any:
        """The default on the command line."""
        if self.definition.usual is not None or self.definition.text is not None:
            return self.definition.usual
        return ... if self.default is inspect.Parameter.empty else self.default


def options_of(options: type[Options]) -> tuple[OptionField, ...]:
    """The fields of an options class, in their order."""
    hints = get_type_hints(options, include_extras=True)
    return tuple(_option_field(field, hints[field.name]) for field in fields(options))


def _option_field(field: Field[Any], hint: Any) -> OptionField:
    assert get_origin(hint) is Annotated, field.name
    of, definition, *_ = get_args(hint)
    return OptionField(
        field.name, of, definition, inspect.Parameter.empty if field.default is MISSING else field.default
    )


def deprecations(options: type[Options]) -> dict[str, Deprecation]:
    """Former field names that are still accepted, with what to use in their place."""
    return {old.what: old for each in options_of(options) if (old := each.definition.former)}


def renamed(given: Mapping[str, Any], options: type[Options]) -> dict[str, Any]:
    """Arguments by name, with former names replaced; each is reported by a `DeprecationWarning`."""
    former = deprecations(options)
    for name in former.keys() & given.keys():
        former[name].warn(stacklevel=3)
    return {former[name].use if name in former else name: value for name, value in given.items()}


def setting_text(value: Any) -> str:
    """Return a setting that was given in Python or in a recipe as the text that the command line takes."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _as_field(asked: OptionField, value: Any) -> Any:
    """Text as the command line reads it, settings and the path of a target or preset as text; others as they are."""
    text = asked.definition.text
    if text is SETTINGS and isinstance(value, Mapping):
        return {name: setting_text(each) for name, each in value.items()}
    if isinstance(value, Path) and not asked.is_path:
        return str(value)
    if text is SIZE and value is not None and type(value) is not int:  # whose sentence names both ways to give one
        value = SIZE.format(value)
    if not isinstance(value, str) or text is None:
        return value
    return text.read([value] if text.several else value, asked.name)


def validated(options: type[AnyOptions], given: Mapping[str, Any]) -> AnyOptions:
    """The options object of arguments given in Python, with the checks that the command line and recipes make, too.

    Raises:
        UsageProblem: If an argument is of another type, or a number is too small.
        Refused: If a path cannot be a file's.
    """
    from pydantic import TypeAdapter, ValidationError

    from repaconv.core.toml_positions import problems
    from repaconv.engines.targets import Target

    known = {each.name: each for each in options_of(options)}
    targets = {name: one for name, one in given.items() if isinstance(one, Target)}
    plain = {**given, **{name: one.name for name, one in targets.items()}}
    try:
        found = TypeAdapter(options).validate_python({name: _as_field(known[name], one) for name, one in plain.items()})
    except ValidationError as error:
        wrong = problems(error, "", {})[0]
        name, said = wrong.keys[0], wrong.message.partition(": ")[2]
        if type(given[name]).__name__ in ("ndarray", "Tensor"):
            raise UsageProblem(
                f"{name} is an array in memory; it must be a path.",
                hint=f"Save it, e.g. numpy.savez('inputs.npz', input=array), and give {name}='inputs.npz'.",
                code="usage.arguments",
            ) from None
        raise UsageProblem(
            f"{name}={given[name]!r}: {said}",
            hint=f"{name}: {known[name].definition.help}",
            code="usage.arguments",
        ) from None
    require_valid_names(getattr(found, name) for name in given if known[name].is_path)
    return replace(found, **targets)


def require_valid_names(given: Iterable[Any]) -> None:
    """Refuse paths that cannot be a file's; whatever is no path is not looked at."""
    from repaconv.core.files import require_valid_name

    for value in given:
        if isinstance(value, (str, Path)):
            require_valid_name(Path(value))


def refuse_without_effect(rules: Iterable[NoEffect], values: Any, given: Mapping[str, str], hint: str) -> None:
    """Refuse options that were given and have no effect, because the user expects an effect.

    Args:
        rules: Which options have no effect in which situation.
        values: What the rules are asked about: the options of a command, or its parameters by name.
        given: The names of the options that were given, each with its spelling in the message.
        hint: What to do about it.

    Raises:
        UsageProblem: If one of them has no effect.
    """
    for rule in rules:
        idle = [given[name] for name in rule.options if name in given]
        if idle and rule.where(values):
            raise UsageProblem(f"{', '.join(idle)} has no effect here: {rule.why}.", hint=hint, code="usage.idle")


PATHS = {"str", "Path", "None", "Sequence"}
"""What the annotation of an argument names that is a path, or several."""


def require_paths(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments of a function that are annotated as paths and are none, and paths that cannot be a file's.

    A progress callback that cannot be called is refused, too.

    Args:
        function: The function; its annotations are text.
        given: Its arguments by name.

    Raises:
        UsageProblem: If an argument is of another type, or one that must be given is empty.
        Refused: If a path cannot be a file's.
    """
    for name, known in inspect.signature(function).parameters.items():
        words = set(re.findall(r"\w+", str(known.annotation)))
        if name == "progress" and name in given:
            require_progress(given[name])
        if name not in given or "Path" not in words or not words <= PATHS:
            continue
        value = given[name]
        for each in value if "Sequence" in words and isinstance(value, (list, tuple)) else [value]:
            if "None" not in words or (each is not None and str(each) != ""):
                require_path(name, each)


def require_progress(value: object) -> None:
    """Refuse a progress callback that cannot be called.

    Raises:
        UsageProblem: ``usage.arguments``.
    """
    if not callable(value):
        raise UsageProblem(
            f"progress={value!r}: input should be a function.",
            hint="It is called with (step, number done, total), e.g. progress=print; leave it out for none.",
            code="usage.arguments",
        )


def require_path(name: str, value: object) -> None:
    """Refuse the value of one argument, as `require_paths` does."""
    if not isinstance(value, (str, Path)):
        raise UsageProblem(
            f"{name}={value!r}: input should be a path.",
            hint="Give a text, or a pathlib.Path.",
            code="usage.arguments",
        )
    if value == "":
        raise UsageProblem(
            f"{name} is empty.", hint="Give a path; that of the current folder is '.'.", code="usage.arguments"
        )
    require_valid_names([value])


def with_checked_paths(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorate a function, so that it refuses arguments that are no paths where it takes paths; see `require_paths`."""
    signature = inspect.signature(function)

    @wraps(function)
    def called(*positional: Given.args, **named: Given.kwargs) -> Result:
        require_paths(function, signature.bind(*positional, **named).arguments)
        return function(*positional, **named)

    return called


def by_name(stage: Callable[..., Result], options: type[Options]) -> Callable[..., Result]:
    """The Python function of a stage: it takes the fields of the options class as keyword arguments.

    Args:
        stage: ``<name>_by``, whose first argument is the options object.
        options: The class of that object.
    """
    others = list(inspect.signature(stage).parameters.values())[1:]
    parameters = sorted(
        [*_parameters(options), *others], key=lambda each: each.kind
    )  # positional arguments first, then the options, then other keywords
    signature = inspect.signature(stage).replace(parameters=parameters)

    @wraps(stage)
    def called(*positional: Any, **given: Any) -> Result:
        given = renamed(given, options)
        if unknown := next((name for name in given if name not in signature.parameters), ""):
            near = did_you_mean(unknown, signature.parameters)
            raise TypeError(f"{called.__name__}() has no argument {unknown!r}. {near}".rstrip())
        require_paths(stage, signature.bind(*positional, **given).arguments)
        own = [each.name for each in options_of(options) if each.name in given]
        wanted = validated(options, {name: given.pop(name) for name in own})
        refuse_without_effect(wanted.NO_EFFECT, wanted, wanted.changed(), "Leave it out.")
        return stage(wanted, *positional, **given)

    called.__name__ = called.__qualname__ = stage.__name__.removesuffix("_by")
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__doc__ = _with_argument_help(stage, options)
    return called


def show_options(function: Callable[..., Any], options: type[Options]) -> None:
    """Give a function that passes on any keyword argument the signature and help of the options that it takes.

    Args:
        function: Its arguments of the same names as options keep their place and their help.
        options: The class of the options; the docstring has the line ``options: The options.``
    """
    signature = inspect.signature(function)
    own = signature.parameters
    asked = {each.name: own.get(each.name, each) for each in _parameters(options)}
    others = [each for each in own.values() if each.name not in asked]
    parameters = sorted([*asked.values(), *others], key=lambda each: each.kind)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__doc__ = _with_argument_help(function, options, own)


def _parameters(options: type[Options]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in options_of(options)
    ]


def _with_argument_help(function: Callable[..., Any], options: type[Options], but: Collection[str] = ()) -> str:
    """The docstring with a line per option in place of ``options: The options.``"""
    lines = "\n".join(
        f"    {each.name}: {_argument_help(each)}" for each in options_of(options) if each.name not in but
    )
    return inspect.cleandoc(function.__doc__ or "").replace("    options: The options.", lines)


def _argument_help(each: OptionField) -> str:
    """The help of an option as that of an argument, which takes all values at once where the option is repeated."""
    help, several = each.definition.help, each.definition.text is not None and each.definition.text.several
    if not several:
        return help
    given = "A dict of names and values" if each.definition.text in (SETTINGS, TOLERANCES) else "A tuple"
    return f"{help.removesuffix('.').removesuffix('; repeatable')}. {given}."


# The groups in which `--help` lists the options of a command

INPUT = "Input"
TARGET = "Target"
IMAGES = "Images and labels"
SHAPES = "Shapes"
PRECISION = "Precision"
GRAPH = "Graph"
CONVERSION = "Conversion"
TRAINING = "Training"
SEARCH = "Search"
MEASURE = "Measurement"
BASELINE = "Baseline"
VERIFICATION = "Verification"
CLUSTER = "Cluster"
OUTPUT = "Output"
ENGINE = "TensorRT"
GENERAL = "General"

PANEL_ORDER = (
    INPUT,
    TARGET,
    PRECISION,
    IMAGES,
    SHAPES,
    CONVERSION,
    TRAINING,
    SEARCH,
    MEASURE,
    BASELINE,
    OUTPUT,
    ENGINE,
    GRAPH,
    VERIFICATION,
    CLUSTER,
    GENERAL,
)
"""The order of the groups in `--help`: what is given most often comes first."""

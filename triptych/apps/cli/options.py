"""Click options made of config fields."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from triptych.base.config import WorkerRange, format_size, parse_size, parse_workers
from triptych.base.config.flags import AUTO, Config, Flag, config_from, flags_of
from triptych.base.errors import ConfigError

C = TypeVar("C", bound=Config)
Command = Callable[..., None]

MODEL_HELP = (
    "MODEL is a checkpoint folder (config.json and *.safetensors) or a hub id; without it, the demo model."
)


class FiniteRange(click.FloatRange):
    """A number within bounds: neither NaN, which is within any, nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class SizeType(click.ParamType[int]):
    """A number of bytes in the bounds of its flag, written like 512MiB; where it may be "auto" that is 0."""

    name = "size"

    def __init__(self, flag: Flag) -> None:
        self._auto = flag.auto
        self.min, self.max = flag.bounds

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if self._auto and value.strip().lower() == AUTO:
            return 0
        try:
            size = parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if self.min is not None and size < self.min:
            self.fail(f"{value} is too small: give {format_size(self.min)} or more", param, ctx)
        if self.max is not None and size > self.max:
            self.fail(f"{value} is too large: give {format_size(self.max)} or less", param, ctx)
        return size


class CountType(click.ParamType[int]):
    """A whole number, or the word "auto", which is 0."""

    name = "integer|auto"

    def __init__(self, flag: Flag) -> None:
        self._range = click.IntRange(*flag.whole_bounds)
        self.min = self._range.min

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        auto = isinstance(value, str) and value.strip().lower() == AUTO
        return 0 if auto else int(self._range(value, param, ctx))


class WorkerRangeType(click.ParamType[WorkerRange]):
    """A number of workers like 4, or a range like 0..4, in the bounds of its flag."""

    name = "n|least..most"

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def convert(
        self, value: str | WorkerRange, param: click.Parameter | None, ctx: click.Context | None
    ) -> WorkerRange:
        if isinstance(value, WorkerRange):
            return value
        minimum, maximum = self._flag.whole_bounds
        assert minimum is not None and maximum is not None
        return parse_workers(
            value, self._flag.option, minimum=minimum, maximum=maximum, to_zero=self._flag.to_zero
        )


def configured(config: type[C]) -> Callable[[Callable[[C], None]], Command]:
    """Turns a function of a config into one of the config's options, which click decorates further."""

    def decorate(function: Callable[[C], None]) -> Command:
        @functools.wraps(function)
        def with_options(**values: object) -> None:
            function(config_from(config, values))

        command: Command = with_options
        for flag in reversed(flags_of(config)):
            command = option(flag)(command)
        return command

    return decorate


def model_argument(command: Command) -> Command:
    """The optional argument MODEL."""
    return click.argument("model", default="", envvar="TRIPTYCH_MODEL")(command)


def option(flag: Flag) -> Callable[[Command], Command]:
    """The option of one flag, with its help text, default and variable."""
    several = flag.joined or isinstance(flag.default, tuple)
    names = [flag.option]
    if flag.default is True or (flag.default is False and flag.variable):
        names = [f"{flag.option}/{flag.negation}"]
    # To click None is a default, too: an option that has one is never missing.
    default: dict[str, Any] = {} if flag.required else {"default": () if several else _default_of(flag)}
    return click.option(
        *names,
        *([flag.short] if flag.short else []),
        flag.name,
        type=_type_of(flag),
        is_flag=flag.default in (True, False) and isinstance(flag.default, bool),
        multiple=several,
        callback=_join if flag.joined else None,
        **default,
        show_default=_shown_of(flag),
        required=flag.required,
        envvar=flag.variable or None,
        show_envvar=bool(flag.variable),
        help=flag.help,
    )


def _join(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> str:
    return ",".join(given)


def _type_of(flag: Flag) -> click.ParamType[Any] | None:
    if isinstance(flag.default, bool):
        return None
    if flag.size:
        return SizeType(flag)
    if flag.auto:
        return CountType(flag)
    if flag.kind is WorkerRange:
        return WorkerRangeType(flag)
    if flag.choices:
        return click.Choice(flag.choices)
    if flag.bounds != (None, None):
        return click.IntRange(*flag.whole_bounds) if flag.kind is int else FiniteRange(*flag.bounds)
    if issubclass(flag.kind, Path):
        return click.Path(exists=flag.exists, dir_okay=False, path_type=Path)
    return click.types.convert_type(flag.kind)


def _default_of(flag: Flag) -> object:
    """The default as click takes it: a size or "auto" as written, none for a choice that may be left open."""
    if flag.auto and not flag.default:
        return AUTO
    if flag.size and isinstance(flag.default, int):
        return format_size(flag.default)
    return flag.default if flag.default != "" or not flag.choices else None


def _shown_of(flag: Flag) -> bool | str:
    """What --help shows as the default."""
    if flag.shown:
        return flag.shown
    if flag.variable and flag.default == "":
        return "none"
    return flag.default not in (None, "", ())

"""Turns config fields into command-line options and options back into configs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import click

from triptych.config import flags_of, format_size, parse_size
from triptych.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")

ENV_PREFIX = "TRIPTYCH_"
#: A size that the process chooses.
AUTO = "auto"
MODEL_HELP = (
    "MODEL is a checkpoint folder (config.json and *.safetensors) or a hub id; without it, the demo model."
)


class SizeType(click.ParamType[int]):
    """Bytes, written as people write them."""

    name = "size"

    def __init__(self, *, auto: bool = False) -> None:
        """With `auto` that word is 0."""
        self._auto = auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if self._auto and value.strip().lower() == AUTO:
            return 0
        try:
            return parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def option(name: str, default: Any, metadata: dict[str, Any]) -> Callable[[F], F]:
    """One option with its help text, its default and its TRIPTYCH_* variable."""
    flag = "--" + name.replace("_", "-")
    common: dict[str, Any] = {
        "default": default,
        "show_default": True,
        "envvar": ENV_PREFIX + name.upper(),
        "show_envvar": True,
        "help": metadata["help"],
    }
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", **common)
    if metadata.get("size"):
        size = {"type": SizeType(auto=metadata["auto"]), "default": _written(default, metadata)}
        return click.option(flag, **common | size)
    if metadata.get("choices"):
        return click.option(flag, **common, type=click.Choice(metadata["choices"]))
    if metadata.get("many"):
        common |= {"multiple": True, "default": (), "show_default": "none"}
        return click.option(flag, **common, callback=lambda context, option, given: ",".join(given))
    if default == "":
        common["show_default"] = "none"
    return click.option(flag, **common, type=type(default))


def _written(nbytes: int, metadata: dict[str, Any]) -> str:
    """A size as its flag's help shows it."""
    return AUTO if metadata["auto"] and not nbytes else format_size(nbytes)


def _flags(configs: Iterable[type[Any]]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Default and metadata by field name; those of a later config win."""
    return {name: (default, metadata) for config in configs for name, default, metadata in flags_of(config)}


def config_options(*configs: type[Any], without: Iterable[str] = ()) -> Callable[[F], F]:
    """All flags of the configs, each once; a later config's default of the same flag wins."""
    table = _flags(configs)

    def decorate(function: F) -> F:
        for name, (default, metadata) in reversed(table.items()):
            if name not in set(without):
                function = option(name, default, metadata)(function)
        return function

    return decorate


def build(config: type[C], values: dict[str, Any], **given: Any) -> C:
    """A config from parsed options; options of other configs are left aside."""
    names = {f.name for f in fields(config)}  # type: ignore[arg-type]
    return config(**{k: v for k, v in (values | given).items() if k in names})


def arguments(
    config: type[Any] | Iterable[type[Any]], values: dict[str, Any], without: Iterable[str] = ()
) -> list[str]:
    """The command line that gives a process of our own these values of the configs' flags, but secrets."""
    words: list[str] = []
    for name, (default, metadata) in _flags((config,) if isinstance(config, type) else config).items():
        if metadata["secret"] or name in set(without):
            continue
        value = values.get(name, default)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, AUTO if metadata["auto"] and not value else str(value)]
    return words


def secrets_of(config: type[Any], values: dict[str, Any]) -> dict[str, str]:
    """The variables that give a process of our own the secrets among the config's flags."""
    return {
        ENV_PREFIX + name.upper(): str(values.get(name, default))
        for name, default, metadata in flags_of(config)
        if metadata["secret"]
    }

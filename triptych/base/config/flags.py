"""Flags: config fields that are command-line options, declared once and written and read by code.

A field made by `flag` is an option (`--max-model-len`) with a documented default, and for services also an
environment variable (`TRIPTYCH_MAX_MODEL_LEN`). A field made by `part` is a config inside a config: its flags
are the outer one's too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from triptych.base.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", bound="Config")

#: A size or count that the process chooses.
AUTO = "auto"

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
#: The shortest and the longest time, in seconds, of a flag that cannot do without one.
MOMENT = 0.001
DAY = 86400
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line option. Its name and default are those of the field."""

    default: object
    help: str
    name: str = ""
    #: The environment variable that gives it, too; "": none.
    variable: str = ""
    #: The type of a value, where the default is None or empty.
    kind: type = str
    #: Written like "512MiB", held in bytes.
    size: bool = False
    #: 0 is written "auto".
    auto: bool = False
    choices: tuple[str, ...] = ()
    #: The least and the greatest number; None: no bound.
    bounds: tuple[float | None, float | None] = (None, None)
    #: A range of workers may begin at 0.
    to_zero: bool = False
    #: Reaches our own processes by an inherited file, never by their command line; no repr shows it.
    secret: bool = False
    #: May be given several times; the values are joined by commas.
    joined: bool = False
    required: bool = False
    #: A path that must exist.
    exists: bool = False
    #: The default, as --help shows it.
    shown: str = ""
    #: A one-letter name, like "-o".
    short: str = ""

    @property
    def whole_bounds(self) -> tuple[int | None, int | None]:
        """The bounds of a number that has no fraction."""
        minimum, maximum = (None if bound is None else int(bound) for bound in self.bounds)
        return minimum, maximum

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def negation(self) -> str:
        """The option that switches a boolean flag off."""
        return "--no-" + self.name.replace("_", "-")

    def words(self, value: object) -> list[str]:
        """The command line that gives this value; none for a choice that is left open."""
        if self.choices and value not in self.choices:
            return []
        if isinstance(value, bool):
            return [self.option if value else self.negation]
        return [self.option, AUTO if self.auto and not value else str(value)]


def flag(
    default: T,
    help: str,
    *,
    kind: type = str,
    minimum: float | None = None,
    maximum: float | None = None,
    **more: Any,
) -> T:
    """A field that is a flag; `more` are further fields of `Flag`."""
    kind = kind if default in (None, ()) else type(default)
    declared = Flag(default, help, kind=kind, bounds=(minimum, maximum), **more)
    return field(default=default, metadata={"flag": declared}, repr=not declared.secret)


def part(config: type[C], *, without: Collection[str] = ()) -> C:
    """A field that is a config. Its flags in `without` are no options of the outer one: defaults hold."""
    metadata = {"part": config, "without": frozenset(without)}
    return field(default_factory=config, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """Base of all configs: frozen dataclasses, built once and passed down."""

    #: In front of the variables' names; "": flags have no variable but one that they name.
    env_prefix: ClassVar[str] = "TRIPTYCH_"


@dataclass(frozen=True, slots=True)
class CommandOptions(Config):
    """Base of the options of commands that people run, which no variable gives."""

    env_prefix: ClassVar[str] = ""


def flags_of(config: type[Config]) -> list[Flag]:
    """Every flag of a config, each once, in order; of two with one name the later field's."""
    flags: dict[str, Flag] = {}
    for each in fields(config):
        if inner := each.metadata.get("part"):
            hidden = each.metadata["without"]
            flags |= {one.name: one for one in flags_of(inner) if one.name not in hidden}
        elif declared := each.metadata.get("flag"):
            prefixed = config.env_prefix and config.env_prefix + each.name.upper()
            flags[each.name] = replace(declared, name=each.name, variable=declared.variable or prefixed)
    return list(flags.values())


def config_from(config: type[C], values: Mapping[str, object]) -> C:
    """A config of parsed options; those of other configs are ignored, and None is the default."""
    given: dict[str, object] = {}
    for each in fields(config):
        if inner := each.metadata.get("part"):
            hidden = each.metadata["without"]
            given[each.name] = config_from(inner, {k: v for k, v in values.items() if k not in hidden})
        elif values.get(each.name) is not None:
            given[each.name] = values[each.name]
    make: Callable[..., C] = config
    return make(**given)


def arguments(config: Config) -> list[str]:
    """The command line that gives a process of our own this config, but for its secrets."""
    return [word for one, value in _values(config) if not one.secret for word in one.words(value)]


def public_values(config: Config) -> dict[str, object]:
    """The values of a config, but for its secrets; `config_from` makes a config of them."""
    secret = {one.name for one in flags_of(type(config)) if one.secret}
    return {name: value for name, value in _by_name(config).items() if name not in secret}


def secrets_of(config: Config) -> dict[str, str]:
    """The variables that give a process of our own the config's secrets."""
    return {one.variable: str(value) for one, value in _values(config) if one.secret}


def _values(config: Config) -> Iterator[tuple[Flag, object]]:
    """The flags of a config with their values."""
    values = _by_name(config)
    return ((one, values[one.name]) for one in flags_of(type(config)))


def _by_name(config: Config) -> dict[str, object]:
    """The values of the flags that are options, by name."""
    values: dict[str, object] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if "part" in each.metadata:
            hidden = each.metadata["without"]
            value = {name: inner for name, inner in _by_name(value).items() if name not in hidden}
        values |= value if "part" in each.metadata else {each.name: value}
    return values


#: For embeddings, in a PD worker whose memory is not measured.
EMBEDDING_MEMORY = 256 * MIB
#: For states of recurrent layers, likewise.
STATE_MEMORY = 256 * MIB
#: Of the memory that is free before workers start, what they may use: of a GPU, and of a machine or cgroup.
CUDA_SHARE = 0.9
CPU_SHARE = 0.5
#: What a process holds of a GPU beside its tensors: the context, kernels and the workspaces of libraries.
CUDA_CONTEXT_BYTES = 600 * MIB
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2g" or "1048576"; units are powers of 1024. ConfigError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write it like 512MiB or 2GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def format_size(nbytes: float) -> str:
    """Bytes for people: "512.0 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError

"""What is measured: systems, loads and the cells that join them, read from a TOML file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych_bench.goodput.launch import parse_shape
from triptych_bench.goodput.measure.slo import Slo, parse_slo, preset

Kind = Literal["capacity", "fixed", "search"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Part of file names.
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9-]*$")]
Count = Annotated[int, msgspec.Meta(gt=0)]
_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: Given to a system's words by the runner when it starts it, with the names of `ports`.
OWN_VARIABLES = ("MODEL", "SCRATCH")


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server under test: `launch` with `words` of `triptych serve`, or `commands` of any server.

    Every name in `ports` becomes a free port that `${NAME}` stands for; `${SCRATCH}` is a folder in memory
    that is emptied between cells. `ready` are paths of `url`, or URLs, that answer 200 once it serves.
    `pause`: its process groups are stopped between cells, for servers that take CPU while idle.
    """

    name: Name
    launch: str = ""
    words: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    url: str = ""
    ready: tuple[str, ...] = ("/health",)
    ports: tuple[str, ...] = ()
    env: dict[str, str] = {}
    timeout: Annotated[float, msgspec.Meta(gt=0, lt=3600)] = 600.0
    pause: bool = False
    about: str = ""


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Closed loop of `concurrency`, `requests` measured; the rates of `fixed` come from `of`."""

    of: str = "colocated"
    concurrency: int = 16
    requests: int = 160


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One window at `share` of the capacity, until `requests`, at most `seconds` of sending."""

    requests: Count = 300
    seconds: float = 150.0
    share: float = 0.7
    warm_up: float = 5.0


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Definition (c): `windows` of `seconds` vote on a rate, `confirmations` more on the one found."""

    seconds: float = 20.0
    warm_up: float = 3.0
    windows: int = 1
    confirmations: int = 2
    resolution: float = 0.1


class Cells(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every load with every system."""

    kind: Kind
    loads: tuple[str, ...]
    systems: tuple[str, ...]


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One TOML file. `loads`: the preset's name and its SLO; `tail`: the percentile that is compared;
    `content`: what pictures show, where it is not what the loads' own do.
    """

    name: Name
    model: str
    loads: dict[str, str]
    system: tuple[System, ...]
    cells: tuple[Cells, ...]
    tail: Literal[90, 99] = 99
    repeats: Count = 3
    about: str = ""
    rates: dict[str, float] = {}
    capacity: Capacity = Capacity()
    fixed: Fixed = Fixed()
    search: Search = Search()
    content: str = ""

    def named(self, name: str) -> System:
        return next(system for system in self.system if system.name == name)

    def slo(self, load: str) -> Slo:
        return parse_slo([self.loads[load]])


def read_matrix(path: Path, environment: Mapping[str, str] = os.environ) -> Matrix:
    """ConfigError naming the file, the field and the remedy."""
    try:
        matrix = msgspec.convert(tomllib.loads(path.read_text()), Matrix)
        _check(matrix)
        return _expanded(matrix, environment)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def expand(text: str, values: Mapping[str, str], where: str, keep: Collection[str] = ()) -> str:
    """`${NAME}` replaced; names in `keep` stay. ConfigError for a name without a value."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in keep:
            return match[0]
        if name not in values:
            raise ConfigError(f"{where} needs the environment variable {name}: set it")
        return values[name]

    return _VARIABLE.sub(value, text)


def expand_system(system: System, values: Mapping[str, str], keep: Collection[str] = ()) -> System:
    """`expand` over all texts of the system."""

    def expanded(value: object) -> object:
        if isinstance(value, str):
            return expand(value, values, f"system {system.name!r}", keep)
        if isinstance(value, tuple):
            return tuple(map(expanded, value))
        return {name: expanded(one) for name, one in value.items()} if isinstance(value, dict) else value

    fields = {name: expanded(getattr(system, name)) for name in system.__struct_fields__}
    return System(**fields)  # type: ignore[arg-type]


def _expanded(matrix: Matrix, environment: Mapping[str, str]) -> Matrix:
    systems = (expand_system(one, environment, (*OWN_VARIABLES, *one.ports)) for one in matrix.system)
    model = expand(matrix.model, environment, "model")
    return msgspec.structs.replace(matrix, model=model, system=tuple(systems))


def _check(matrix: Matrix) -> None:
    names = [system.name for system in matrix.system]
    if len(set(names)) < len(names):
        raise ConfigError("two systems have one name: give each its own")
    for load in matrix.loads:
        preset(load)
        if not matrix.slo(load).limits:
            raise ConfigError(f"loads.{load} has no SLO: write one like ttft:1000 tpot:100")
    for system in matrix.system:
        _check_system(system)
    for index, cells in enumerate(matrix.cells):
        _known(f"cells[{index}].loads", cells.loads, matrix.loads)
        _known(f"cells[{index}].systems", cells.systems, names)
    _known("rates", matrix.rates, matrix.loads)
    _check_capacity(matrix)
    if not matrix.search.windows % 2:
        raise ConfigError("search.windows must be odd, so that a majority decides")


def _check_capacity(matrix: Matrix) -> None:
    """Every load of a fixed cell gets its rate from somewhere."""
    fixed = {load for cells in matrix.cells if cells.kind == "fixed" for load in cells.loads}
    measured = {
        load
        for cells in matrix.cells
        if cells.kind == "capacity" and matrix.capacity.of in cells.systems
        for load in cells.loads
    }
    for load in sorted(fixed - measured - set(matrix.rates)):
        raise ConfigError(
            f"load {load!r} has fixed cells and no rate: add a capacity cell of {matrix.capacity.of!r} "
            f"on it, or rates.{load}"
        )


def _check_system(system: System) -> None:
    where = f"system {system.name!r}"
    if bool(system.launch) == bool(system.commands):
        raise ConfigError(f"{where} needs either launch or commands")
    if system.launch:
        parse_shape(system.launch)
        if system.pause:
            raise ConfigError(f"{where}: pause is for commands; workers of a launched cluster must report")
    elif not system.url:
        raise ConfigError(f"{where} has commands and no url: say where it answers")


def _known(where: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is not known: use one of {', '.join(known)}")


def asked_of(matrix: Matrix, kind: str, load: str, system: str) -> JsonObject:
    """What decides a cell's figures, as JSON has it: two cells of another asking are not comparable."""
    fields = {
        "slo": dict(matrix.slo(load).limits),
        "model": matrix.model,
        "settings": getattr(matrix, kind),
        "system": msgspec.structs.replace(matrix.named(system), about="", pause=False, timeout=1.0),
    }
    return dict(msgspec.json.decode(msgspec.json.encode(fields)))


def as_fields(matrix: Matrix) -> JsonObject:
    """For JSON: what a report has to know of it."""
    return dict(msgspec.to_builtins(matrix))

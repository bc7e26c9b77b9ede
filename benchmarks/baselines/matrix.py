"""What is measured: systems, loads and the cells that join them, read from a TOML file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych.goodput.launch import parse_shape
from triptych.goodput.measure.slo import Slo, parse_slo, preset

KINDS = ("capacity", "fixed", "search")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: Given to a system's words by the runner when it starts it, with the names of `ports`.
OWN_VARIABLES = ("MODEL", "SCRATCH")


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server under test: `launch` with `words` of `triptych serve`, or `commands` of any server.

    Every name in `ports` becomes a free port that `${NAME}` stands for; `${SCRATCH}` is a folder in memory
    that is emptied between cells. `ready` are paths of `url`, or URLs, that answer 200 once it serves.
    `brief`: it runs only while one of its cells does. `pause`: its process groups are stopped between cells,
    for servers that take CPU while idle. `variant_of`: these are other settings of that system.
    """

    name: str
    launch: str = ""
    words: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    url: str = ""
    ready: tuple[str, ...] = ("/health",)
    ports: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    timeout: float = 600.0
    brief: bool = False
    pause: bool = False
    variant_of: str = ""
    about: str = ""


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Closed loop of `concurrency`, `requests` measured; the rates of `fixed` come from `of`."""

    of: str = "colocated"
    concurrency: int = 16
    requests: int = 160


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One window at `share` of the capacity, until `requests`, at most `seconds` of sending."""

    requests: int = 300
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
    """Every load with every system; `repeats` 0 means the file's."""

    kind: str
    loads: tuple[str, ...]
    systems: tuple[str, ...]
    repeats: int = 0


class Roles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which systems the report sets against each other."""

    ours: str = "epd-shared"
    colocated: str = "colocated"
    other: str = "vllm"


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One TOML file. `loads`: the preset's name and its SLO; `tail`: the percentile that is compared."""

    name: str
    model: str
    loads: dict[str, str]
    system: tuple[System, ...]
    cells: tuple[Cells, ...]
    tail: int = 99
    repeats: int = 3
    about: str = ""
    rates: dict[str, float] = {}
    capacity: Capacity = Capacity()
    fixed: Fixed = Fixed()
    search: Search = Search()
    roles: Roles = Roles()
    #: What pictures show, of `--image-content`; the loads' own where it is empty.
    content: str = ""

    def named(self, name: str) -> System:
        return next(system for system in self.system if system.name == name)

    def slo(self, load: str) -> Slo:
        return parse_slo([self.loads[load]])


def read_matrix(path: Path, environment: Mapping[str, str] = os.environ) -> Matrix:
    """ConfigError naming the file, the field and the remedy."""
    try:
        raw = tomllib.loads(path.read_text())
        matrix = msgspec.convert(raw, Matrix)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        _check(matrix)
        return _expanded(matrix, environment)
    except ConfigError as error:
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


def expand_system(system: System, put: Callable[[str, str], str]) -> System:
    """`put(text, where)` over every text of the system that may hold variables."""

    def at(field: str) -> str:
        return f"system {system.name!r}: {field}"

    return msgspec.structs.replace(
        system,
        words=tuple(put(word, at("words")) for word in system.words),
        commands=tuple(tuple(put(word, at("commands")) for word in one) for one in system.commands),
        url=put(system.url, at("url")),
        ready=tuple(put(path, at("ready")) for path in system.ready),
        env={name: put(value, at(f"env.{name}")) for name, value in system.env.items()},
        cwd=put(system.cwd, at("cwd")),
    )


def _expanded(matrix: Matrix, environment: Mapping[str, str]) -> Matrix:
    def system(one: System) -> System:
        own = (*OWN_VARIABLES, *one.ports)
        return expand_system(one, lambda text, where: expand(text, environment, where, own))

    return msgspec.structs.replace(
        matrix,
        model=expand(matrix.model, environment, "model"),
        system=tuple(system(one) for one in matrix.system),
    )


def _check(matrix: Matrix) -> None:
    names = [system.name for system in matrix.system]
    for name in (matrix.name, *names):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"name {name!r} is part of file names: use small letters, digits and hyphens")
    if len(set(names)) < len(names):
        raise ConfigError("two systems have one name: give each its own")
    for load in matrix.loads:
        preset(load)
        if not matrix.slo(load).limits:
            raise ConfigError(f"loads.{load} has no SLO: write one like ttft:1000 tpot:100")
    for system in matrix.system:
        _check_system(system, names)
    for index, cells in enumerate(matrix.cells):
        _known(f"cells[{index}].kind", (cells.kind,), KINDS)
        _known(f"cells[{index}].loads", cells.loads, matrix.loads)
        _known(f"cells[{index}].systems", cells.systems, names)
    _known("rates", matrix.rates, matrix.loads)
    _check_capacity(matrix)
    if matrix.tail not in (90, 99):
        raise ConfigError(f"tail {matrix.tail}: use 90 or 99")
    if not (matrix.repeats > 0 and matrix.fixed.requests > 0 and matrix.search.windows % 2):
        raise ConfigError("repeats and fixed.requests must be above 0, search.windows odd")


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


def _check_system(system: System, names: Collection[str]) -> None:
    where = f"system {system.name!r}"
    if bool(system.launch) == bool(system.commands):
        raise ConfigError(f"{where} needs either launch or commands")
    if system.launch:
        parse_shape(system.launch)
        if system.pause:
            raise ConfigError(f"{where}: pause is for commands; workers of a launched cluster must report")
    elif not system.url:
        raise ConfigError(f"{where} has commands and no url: say where it answers")
    if not 0 < system.timeout < 3600:
        raise ConfigError(f"{where}: timeout {system.timeout:g} must be above 0 and below 3600 seconds")
    if system.variant_of:
        _known(f"{where}: variant_of", (system.variant_of,), names)


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

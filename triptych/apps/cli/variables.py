"""Environment variables that no command reads, and look like one that some command does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

import click

from triptych.apps.launch.secrets import VARIABLE
from triptych.base.config.flags import Config
from triptych.base.parent import CAUSE_VARIABLE, PARENT_VARIABLE

#: What our own processes tell each other, and containers tell them.
_OWN = (VARIABLE, CAUSE_VARIABLE, PARENT_VARIABLE, "TRIPTYCH_SERVICE", "TRIPTYCH_CPU_REQUEST")
#: The part of two names that is equal, from which one is taken for the other.
_NEAR = 0.92


def variables_of(group: click.Group) -> Iterator[str]:
    """The variables of all parameters of the group's commands."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from variables_of(command)
        for one in command.params:
            yield from [one.envvar] if isinstance(one.envvar, str) else one.envvar or ()


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> list[tuple[str, str]]:
    """The variables that nothing reads, each with the one that is probably meant.

    None in our own child processes: their parent, which had the same ones, has warned.
    """
    if PARENT_VARIABLE in environment:
        return []
    names = {*known, *_OWN}
    unknown = sorted(name for name in environment if name.startswith(Config.env_prefix) and name not in names)
    near = ((name, get_close_matches(name, names - {*_OWN}, 1, _NEAR)) for name in unknown)
    return [(name, meant[0]) for name, meant in near if meant]

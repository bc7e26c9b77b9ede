"""The command line as tables, from click: docs/cli.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click

from triptych.apps.cli.app import app

Commands = Iterator[tuple[str, click.Command]]


@dataclass(frozen=True, slots=True)
class Option:
    """One option as a row: what it is called, its default, its variable and its help."""

    names: str
    default: str
    variable: str
    meaning: str


def commands(group: click.Group = app, before: str = "triptych") -> Commands:
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        words = f"{before} {name}"
        if isinstance(command, click.Group):
            yield from commands(command, words)
        else:
            yield words, command


def option_names() -> frozenset[str]:
    """Every flag of every command, short and negated ones too."""
    names = {"--help", "--help-all", "--version", "-h"}
    for _, command in commands():
        for parameter in command.params:
            names |= {*parameter.opts, *parameter.secondary_opts}
    return frozenset(names)


def variables() -> frozenset[str]:
    """The environment variables that the options read."""
    return frozenset(
        parameter.envvar
        for _, command in commands()
        for parameter in command.params
        if isinstance(parameter.envvar, str)
    )


def page() -> str:
    """The commands, then all options in one table."""
    parts = ["## Commands", "", "| command | what it does |", "| --- | --- |"]
    found: dict[Option, list[str]] = {}
    for words, command in commands():
        context = click.Context(command, info_name=words)
        arguments = "".join(
            f" {one.make_metavar(context)}" for one in command.params if isinstance(one, click.Argument)
        )
        parts.append(f"| `{words}{arguments}` | {_cell(command.help or '')} |")
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                found.setdefault(_option(parameter, context), []).append(words.removeprefix("triptych "))
    parts += [
        "",
        "## Options",
        "",
        "| option | default | variable | of | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one, users in sorted(found.items(), key=lambda row: (row[0].names, row[1])):
        of = ", ".join(f"`{user}`" for user in users)
        parts.append(f"| {one.names} | {one.default} | {one.variable} | {of} | {one.meaning} |")
    return "\n".join(parts)


def _option(option: click.Option, context: click.Context) -> Option:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if not option.is_flag:
        kind = option.make_metavar(context)
        names += f" {_cell(kind).lower()}"
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    default = (
        f"`{_cell(str(shown))}`" if isinstance(shown, str | int | float) and shown not in ("", False) else ""
    )
    if option.required:
        default = "required"
    variable = f"`{option.envvar}`" if isinstance(option.envvar, str) else ""
    return Option(names, default, variable, _cell(option.help or ""))


def _cell(text: str) -> str:
    """Text for a cell of a table, on one line."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

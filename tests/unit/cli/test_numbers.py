"""Numbers on the command line: none is outside of what its option can do."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from support.options import assert_refused, triptych
from triptych.apps.cli.app import app
from triptych.apps.cli.options import CountType, SizeType

_NUMBERS = (click.types.IntParamType, click.types.FloatParamType, SizeType, CountType)


def _options(group: click.Group, name: str) -> Iterator[tuple[str, click.Option]]:
    for command in group.commands.values():
        called = f"{name} {command.name}"
        if isinstance(command, click.Group):
            yield from _options(command, called)
        else:
            yield from ((called, one) for one in command.params if isinstance(one, click.Option))


def test_every_number_of_every_command_has_a_least_value():
    numbers = [(called, one) for called, one in _options(app, "triptych") if isinstance(one.type, _NUMBERS)]
    unbounded = [
        f"{called} {one.opts[0]}" for called, one in numbers if getattr(one.type, "min", None) is None
    ]
    assert len(numbers) > 100
    assert unbounded == []


@pytest.mark.parametrize(
    ("command", "option", "value", "told"),
    [
        ("proxy", "--max-body", "0", "1.0 KiB or more"),
        # A store without an item takes more.
        ("serve", "--store-memory", "1MiB", "4.0 MiB or more"),
        ("proxy", "--max-media-bytes", "65MiB", "64.0 MiB or less"),
        ("proxy", "--request-timeout", "-1", "range"),
        ("proxy", "--request-timeout", "nan", "finite"),
        ("encoder", "--max-video-seconds", "inf", "finite"),
        ("proxy", "--max-queue", "0", "range"),
        ("encoder", "--max-image-pixels", "0", "range"),
        ("encoder", "--decode-threads", "-1", "range"),
        ("pd", "--block-size", "0", "range"),
        ("embed", "--dimensions", "-1", "range"),
        ("bench goodput", "--concurrency", "-1", "range"),
        ("bench goodput", "--seconds", "nan", "finite"),
        ("pd", "--port", "99999", "range"),
    ],
)
def test_a_number_that_no_process_could_work_with_is_refused_by_name(
    command: str, option: str, value: str, told: str
) -> None:
    assert_refused(triptych(*command.split(), option, value), option, value, told)

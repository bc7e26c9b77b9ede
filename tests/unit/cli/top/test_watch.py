"""The loop: a server that comes and goes is waited for, an error that stays ends it."""

from __future__ import annotations

import io
from collections.abc import Iterator

import msgspec
import pytest
from rich.console import Console

from support.fakes.live_view import EXAMPLE
from triptych.apps.cli.top.screen import watch
from triptych.base.errors import NotFound, RequestError, Unauthorized, Unavailable
from triptych.proxy.live.objects import ClusterSnapshot

SEEN = msgspec.convert(EXAMPLE["snapshot"], ClusterSnapshot)


def followed(*replies: ClusterSnapshot | RequestError) -> tuple[str, type[BaseException]]:
    """What stands on the terminal after these replies, and how the loop has ended."""
    left: Iterator[ClusterSnapshot | RequestError] = iter(replies)
    output = io.StringIO()

    def read() -> ClusterSnapshot:
        reply = next(left, None)
        if reply is None:
            raise KeyboardInterrupt
        if isinstance(reply, RequestError):
            raise reply
        return reply

    console = Console(file=output, width=80, height=40, force_terminal=True, color_system=None)
    with pytest.raises((RequestError, KeyboardInterrupt)) as ended:
        watch(read, console, pause=lambda seconds: False)
    return output.getvalue(), ended.type


def test_a_proxy_that_does_not_answer_for_a_while_is_waited_for() -> None:
    text, ended = followed(SEEN, Unavailable("no server answers at x"), SEEN)
    assert ended is KeyboardInterrupt
    assert "no server answers at x; trying again" in text


@pytest.mark.parametrize("error", [Unauthorized("no key"), NotFound("no page")])
def test_an_error_that_stays_ends_it(error: RequestError) -> None:
    assert followed(SEEN, error)[1] is type(error)


def test_a_first_look_without_an_answer_ends_it() -> None:
    assert followed(Unavailable("no server answers")) == ("", Unavailable)

"""The loop of `triptych top`: asks once a second and redraws, until it is ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from triptych.apps.cli.top.screen import Trends, screen
from triptych.base.errors import NotFound, RequestError, Unauthorized
from triptych.proxy.live.objects import ClusterSnapshot

SECONDS = 1.0
#: Errors that do not pass: a key that is not valid, or a proxy without live data.
_FINAL = (Unauthorized, NotFound)


def watch(
    read: Callable[[], ClusterSnapshot], console: Console, pause: Callable[[float], None] = time.sleep
) -> None:
    """Never returns by itself. RequestError of the first look, and of any that does not pass."""
    trends, problem = Trends(), ""
    seen = read()
    trends.add(seen)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(seen, trends, console.width, console.height, problem), refresh=True)
            pause(SECONDS)
            try:
                seen, problem = read(), ""
                trends.add(seen)
            except _FINAL:
                raise
            except RequestError as error:
                problem = f"{error.message}; trying again, below is what was seen before"

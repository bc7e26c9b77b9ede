"""The screen of `triptych top`: one snapshot as text of a width and height, and its keys."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from triptych.apps.cli.top.tables import (
    duration,
    encoder_table,
    failure_lines,
    latency,
    number,
    pd_table,
    percent,
    request_table,
    size,
    sparkline,
)
from triptych.base.errors import NotFound, RequestError, Unauthorized, printable
from triptych.proxy.live.objects import ClusterSnapshot, PoolScaling

#: From this width on the two pools stand side by side.
WIDE = 140
#: Values of a trend that are kept; on a narrow screen fewer of them are drawn.
TREND = 60
_MAX_FAILURES = 4
#: Lines of the head, on a narrow terminal with two that are broken, and of a table beside its rows.
_HEAD_LINES, _TABLE_LINES = 9, 3
#: Rows of a table without a height, and at least.
_MAX_ROWS, _MIN_ROWS = 64, 2
_MAX_MODELS = 4


class Trends:
    """Rates of the last polls."""

    def __init__(self) -> None:
        self.requests: deque[float] = deque(maxlen=TREND)
        self.tokens: deque[float] = deque(maxlen=TREND)

    def add(self, seen: ClusterSnapshot) -> None:
        self.requests.append(seen.rates.requests)
        self.tokens.append(seen.rates.tokens)


def screen(
    seen: ClusterSnapshot, trends: Trends, width: int, height: int = 0, problem: str = ""
) -> RenderableType:
    """The whole screen; with a `height` of 0 it takes the lines that it needs. `problem`: it is of before."""
    wide = width >= WIDE
    failures = failure_lines(seen.failures, _MAX_FAILURES)
    said = [Text("Failures", style="bold"), *failures] if failures else []
    workers, requests = _rows(seen, height, wide, sum(-(-line.cell_len // width) for line in said))
    pools: list[RenderableType] = [encoder_table(seen.encoders, workers), pd_table(seen.pd_workers, workers)]
    return Group(
        *([Text(printable(problem), style="bold red")] if problem else []),
        *_head(seen, trends, width),
        *([_beside(pools)] if wide else pools),
        request_table(seen.requests, seen.proxy.in_flight, requests),
        *said,
    )


def _rows(seen: ClusterSnapshot, height: int, wide: bool, below: int) -> tuple[int, int]:
    """Rows for the workers of each pool, and for requests, with this many lines `below` them."""
    if not height:
        return _MAX_ROWS, _MAX_ROWS
    free = height - _HEAD_LINES - _TABLE_LINES * (2 if wide else 3) - below
    workers = max(free // (2 if wide else 3), _MIN_ROWS)
    listed = [min(len(pool), workers) for pool in (seen.encoders, seen.pd_workers)]
    return workers, max(free - (max(listed) if wide else sum(listed)), _MIN_ROWS)


def _beside(pools: list[RenderableType]) -> Table:
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=3)
    grid.add_column(ratio=4)
    grid.add_row(*pools)
    return grid


def _head(seen: ClusterSnapshot, trends: Trends, width: int) -> list[RenderableType]:
    trend = max(min(width - 60, TREND), 0)
    lines = [_proxy_line(seen), *_rate_lines(seen, trends, trend)]
    return [*lines, _goodput_line(seen), _store_line(seen), _scaling_line(seen), Text()]


def _proxy_line(seen: ClusterSnapshot) -> Text:
    proxy = seen.proxy
    line = Text(f"triptych {printable(seen.version)}", style="bold")
    models = ", ".join(printable(name) for name in seen.models[:_MAX_MODELS]) or "no model yet"
    line.append(f"  {models}", style="cyan")
    proxies = "1 proxy" if seen.proxies == 1 else f"{seen.proxies} proxies"
    line.append(f"  up {duration(seen.uptime)}  {proxies}", style="not bold")
    taken = f"  in flight {proxy.in_flight}/{proxy.max_queue} ({proxy.queued} queued)"
    line.append(f"{taken}  {size(proxy.memory_bytes)}", style="not bold")
    if proxy.draining:
        line.append("  draining", style="bold yellow")
    return line


def _rate_lines(seen: ClusterSnapshot, trends: Trends, trend: int) -> list[Text]:
    rates = seen.rates
    requests = Text(f"requests {number(rates.requests)}/s".ljust(18))
    requests.append(f"errors {number(rates.errors)}/s".ljust(15), style="red" if rates.errors else "")
    requests.append(f"refused {number(rates.refused)}/s".ljust(16))
    requests.append(sparkline(list(trends.requests)[-trend:] if trend else ()), style="cyan")
    tokens = Text(f"tokens {number(rates.tokens)}/s".ljust(18))
    tokens.append(f"items {number(rates.items)}/s".ljust(15))
    tokens.append(f"hit rate {percent(rates.hit_rate)}".ljust(16))
    tokens.append(sparkline(list(trends.tokens)[-trend:] if trend else ()), style="cyan")
    return [requests, tokens]


def _goodput_line(seen: ClusterSnapshot) -> Text:
    goodput = seen.goodput
    line = Text("SLO met ")
    line.append(percent(goodput.met), style="bold")
    for name, p50, p99, slo in (
        ("TTFT", goodput.ttft_p50, goodput.ttft_p99, goodput.ttft_slo),
        ("TPOT", goodput.tpot_p50, goodput.tpot_p99, goodput.tpot_slo),
    ):
        line.append(f"  {name} p50 {latency(p50)} p99 {latency(p99)} ≤ {latency(slo)}")
    return line


def _store_line(seen: ClusterSnapshot) -> Text:
    store = seen.store
    line = Text("store ")
    line.append("up" if store.up else "down", style="green" if store.up else "bold red")
    budget = f" of {size(store.max_bytes)}" if store.max_bytes else ""
    line.append(f" {size(store.used_bytes)}{budget}, {store.evictions} evictions")
    loads = [f"{way} {number(flow.items)}" for way, flow in seen.flows.items() if way != "encoded"]
    line.append("  loads/s " + " ".join(map(printable, loads)))
    return line


def _scaling_line(seen: ClusterSnapshot) -> Text:
    pools = (("encoder workers", seen.scaling.encoder), ("PD workers", seen.scaling.pd))
    return Text("  ".join(f"{name} {_sizes(pool)}" for name, pool in pools))


def _sizes(pool: PoolScaling) -> str:
    if pool.desired is None:
        return f"{pool.live} live"
    return f"{pool.live} live, {pool.desired} desired ({printable(pool.reason)})"


SECONDS = 1.0
#: Errors that do not pass: a key that is not valid, or a proxy without live data.
_FINAL = (Unauthorized, NotFound)


def watch(read: Callable[[], ClusterSnapshot], console: Console, pause: Callable[[float], bool]) -> None:
    """Shows the cluster every second until `pause` is True. RequestError of the first poll, and of any that
    does not pass."""
    trends, problem = Trends(), ""
    seen = read()
    trends.add(seen)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(seen, trends, console.width, console.height, problem), refresh=True)
            if pause(SECONDS):
                return
            try:
                seen, problem = read(), ""
                trends.add(seen)
            except _FINAL:
                raise
            except RequestError as error:
                problem = f"{error.message}; trying again, below is what was seen before"


@contextmanager
def end_keys(keyboard: TextIO | None = None) -> Iterator[Callable[[float], bool]]:
    """A function that waits some seconds, or until `q` is pressed, and then is True. An input that is no
    terminal is left alone."""
    keyboard = keyboard or sys.stdin
    if not keyboard.isatty():
        yield lambda seconds: threading.Event().wait(seconds)
        return

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(0.0, deadline - time.monotonic()))[0]:
            keys = os.read(keyboard.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
        return False

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield wait
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)

"""Tables of the terminal view: workers, requests, failures. Every name goes through `plain`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich import box
from rich.table import Table
from rich.text import Text

from triptych.apps.cli.top.words import bar, duration, number, plain
from triptych.proxy.live.objects import EncoderState, FailureRow, PDWorkerState, RequestRow

_COLORS = {"serving": "green", "draining": "yellow", "stalled": "red", "lost": "red", "mismatched": "red"}
_BAR = 8


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text, and the others numbers to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        expand=True,
        show_edge=False,
    )
    table.padding = (0, 1, 0, 0)
    for index, column in enumerate(columns):
        left = index == 0 or column in ("state", "stage", "model", "PD worker", "KV", "cache")
        table.add_column(column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _state(state: str) -> Text:
    return Text(plain(state), style=_COLORS.get(state, ""))


def encoder_table(encoders: Sequence[EncoderState], most: int) -> Table:
    table = _table(_title("Encoder workers", len(encoders), most), *_ENCODER_COLUMNS)
    for row in encoders[:most]:
        table.add_row(
            Text(plain(row.name)),
            _state(row.state),
            number(row.jobs),
            f"{row.work_seconds:.1f}s",
            number(row.done),
            number(row.encode_ms),
        )
    return table


_ENCODER_COLUMNS = ("worker", "state", "jobs", "work", "done", "ms")


def pd_table(workers: Sequence[PDWorkerState], most: int) -> Table:
    columns = ("worker", "state", "mine", "run", "wait", "KV", "cache", "tok/s")
    table = _table(_title("PD workers", len(workers), most), *columns)
    for row in workers[:most]:
        table.add_row(
            Text(plain(row.name)),
            _state(row.state),
            number(row.requests),
            number(row.running),
            number(row.waiting),
            bar(row.kv_usage, _BAR),
            bar(row.cache_usage, _BAR),
            number(row.tokens_per_second),
        )
    return table


def request_table(rows: Sequence[RequestRow], in_flight: int, most: int) -> Table:
    """The newest requests in flight."""
    columns = ("request", "stage", "model", "age", "items", "tokens", "try", "PD worker")
    table = _table(f"Requests in flight: {in_flight}", *columns)
    for row in rows[:most]:
        table.add_row(
            plain(row.id),
            plain(row.stage),
            Text(plain(row.model)),
            duration(row.age),
            f"{row.items_ready}/{row.items}",
            number(row.tokens),
            number(row.attempt),
            Text(plain(row.pd_worker)),
        )
    return table


def failure_lines(failures: Sequence[FailureRow], most: int) -> list[Text]:
    """The newest failures, each with its remedy."""
    lines = []
    for row in failures[:most]:
        when = datetime.fromtimestamp(row.time).strftime("%H:%M:%S")
        times = f" ({row.count} times)" if row.count > 1 else ""
        line = Text(f" {when} ", style="dim")
        line.append(plain(row.what) + times, style="red")
        line.append(f": {plain(row.remedy)}")
        lines.append(line)
    return lines


def _title(name: str, count: int, most: int) -> str:
    return f"{name}: {count}, {most} of them shown" if count > most else f"{name}: {count}"

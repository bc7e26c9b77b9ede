"""Tables of the terminal view: workers, requests, failures. Every name goes through `printable`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich import box
from rich.table import Table
from rich.text import Text

from triptych.base.config import GIB, MIB
from triptych.base.errors import printable
from triptych.proxy.live.objects import EncoderState, FailureRow, PDWorkerState, RequestRow

_BARS = "▁▂▃▄▅▆▇█"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_KIB = 1 << 10


def size(nbytes: float) -> str:
    """Bytes with three digits or so."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (_KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{0 if nbytes >= 100 * unit else 1}f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    whole = int(seconds)
    if whole >= _DAY:
        return f"{whole // _DAY}d{whole % _DAY // _HOUR:02}h"
    if whole >= _HOUR:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02}m"
    if whole >= _MINUTE:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02}s"
    return f"{seconds:.1f}s"


def latency(seconds: float | None) -> str:
    """Milliseconds below a second; a dash for nothing."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.2f}s"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"


def number(value: float | None) -> str:
    """A whole number, or one digit after the point where it is small; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def bar(share: float | None, width: int) -> str:
    """A share between 0 and 1 as a bar with its number."""
    if share is None:
        return "-"
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled) + f" {percent(share)}"


def sparkline(values: Iterable[float]) -> str:
    """Values over time, each as a column by the largest of them."""
    known = list(values)
    highest = max(known, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(known)
    return "".join(_BARS[min(int(value / highest * len(_BARS)), len(_BARS) - 1)] for value in known)


_COLORS = {"serving": "green", "draining": "yellow", "stalled": "red", "lost": "red", "mismatched": "red"}
_BAR = 4


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
        left = index == 0 or column in ("state", "stage", "model", "PD worker", "busy")
        table.add_column(column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _state(state: str, role: str = "") -> Text:
    """The state; of a worker that serves, its role where it has one."""
    shown = role if role and state == "serving" else state
    return Text(printable(shown), style=_COLORS.get(state, ""))


def encoder_table(encoders: Sequence[EncoderState], max_rows: int) -> Table:
    columns = ("worker", "state", "busy", "jobs", "work", "done", "ms", *_memory_columns(encoders))
    table = _table(_title("Encoder workers", len(encoders), max_rows), *columns)
    for row in encoders[:max_rows]:
        table.add_row(
            Text(printable(row.name)),
            _state(row.state),
            bar(row.busy, _BAR),
            number(row.jobs),
            f"{row.work_seconds:.1f}s",
            number(row.done),
            number(row.encode_ms),
            *_memory(row, gpu="GPU" in columns),
        )
    return table


def _memory_columns(rows: Sequence[EncoderState | PDWorkerState]) -> tuple[str, ...]:
    """The worker's memory, and its GPU where there is any."""
    return ("memory", "GPU") if any(row.gpu is not None for row in rows) else ("memory",)


def _memory(row: EncoderState | PDWorkerState, *, gpu: bool) -> list[str]:
    memory = row.memory_bytes if row.gpu is None else row.gpu.memory_bytes
    cells = ["-" if memory is None else size(memory)]
    return [*cells, "-" if row.gpu is None else percent(row.gpu.use)] if gpu else cells


def pd_table(workers: Sequence[PDWorkerState], max_rows: int) -> Table:
    measured = _memory_columns(workers)
    columns = ("worker", "state", "busy", "mine", "run", "wait", "KV", "cache", "tok/s", *measured)
    table = _table(_title("PD workers", len(workers), max_rows), *columns)
    for row in workers[:max_rows]:
        table.add_row(
            Text(printable(row.name)),
            _state(row.state, "" if row.role == "both" else row.role),
            bar(row.busy, _BAR),
            number(row.requests),
            number(row.running),
            number(row.waiting),
            percent(row.kv_usage),
            percent(row.cache_usage),
            number(row.tokens_per_second),
            *_memory(row, gpu="GPU" in columns),
        )
    return table


def request_table(rows: Sequence[RequestRow], in_flight: int, max_rows: int) -> Table:
    """The newest requests in flight."""
    columns = ("request", "stage", "model", "age", "items", "tokens", "try", "PD worker")
    table = _table(f"Requests in flight: {in_flight}", *columns)
    for row in rows[:max_rows]:
        table.add_row(
            printable(row.id),
            printable(row.stage),
            Text(printable(row.model)),
            duration(row.age),
            f"{row.items_ready}/{row.items}",
            number(row.tokens),
            number(row.attempt),
            Text(printable(row.pd_worker)),
        )
    return table


def failure_lines(failures: Sequence[FailureRow], max_rows: int) -> list[Text]:
    """The newest failures, each with its remedy."""
    lines = []
    for row in failures[:max_rows]:
        when = datetime.fromtimestamp(row.time).strftime("%H:%M:%S")
        times = f" ({row.count} times)" if row.count > 1 else ""
        line = Text(f" {when} ", style="dim")
        line.append(printable(row.what) + times, style="red")
        line.append(f": {printable(row.remedy)}")
        lines.append(line)
    return lines


def _title(name: str, count: int, max_rows: int) -> str:
    return f"{name}: {count}, {max_rows} of them listed" if count > max_rows else f"{name}: {count}"

"""Steps as tasks of rich, which estimates the time left and lays out their bars; and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from triptych.base.config.flags import format_size
from triptych.base.errors import printable
from triptych.base.progress.progress import BYTES, StepState


def duration(seconds: float) -> str:
    """Seconds for people: "12 s", "3 min 20 s", "2 h 5 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = whole // 60
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def remaining(left: float | None) -> str:
    """What is left, "" for what is not known."""
    return "" if left is None else f"about {duration(max(1.0, left))} left"


def amount(state: StepState) -> str:
    """What is done of the total, in its unit; "" where there is nothing to count."""
    if state.unit == BYTES:
        done = format_size(state.done)
        return done if state.total is None else f"{done} of {format_size(state.total)}"
    unit = f" {state.unit}" if state.unit else ""
    if state.total is None:
        return f"{state.done:g}{unit}" if state.done else ""
    return f"{state.done:.6g} of {state.total:.6g}{unit}"


def line(state: StepState, seconds: float, left: float | None) -> str:
    """One line for a log: what, how far, how long it has taken or will."""
    share = state.share
    parts = [] if share is None else [f"{int(share * 100)} %"]
    parts += [amount(state), state.note]
    if state.ended:
        parts.append(f"{'given up after' if state.failed else 'in'} {duration(seconds)}")
    elif share is not None:
        parts.append(remaining(left) if share < 1 else "")
    elif seconds >= 1:
        parts.append(f"for {duration(seconds)}")
    shown = ", ".join(part for part in parts if part)
    return f"{state.label}: {shown}" if shown else state.label


#: The time whose advances rich estimates from: a step may need a minute for each.
_ESTIMATE_SECONDS = 300.0
_BAR_WIDTH = 24
_MAX_LABEL = 32


class StepTasks:
    """The tasks of the steps that run, in the order in which they came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._by_key: dict[str, Task] = {}
        self._progress = Progress(*_columns(), get_time=clock, speed_estimate_period=_ESTIMATE_SECONDS)

    def follow(self, state: StepState) -> Task:
        """The task of this state's step; a new one where the step has another label or begins again."""
        task = self._by_key.get(state.key)
        if task is None or task.fields["state"].label != state.label or task.fields["state"].ended:
            if task is not None:
                self._progress.remove_task(task.id)
            self._progress.add_task(printable(state.label), total=state.total)
            task = self._by_key[state.key] = self._progress.tasks[-1]
        now = task.get_time()
        self._progress.update(task.id, total=state.total, completed=state.done, state=state, at=now)
        return task

    def __len__(self) -> int:
        return len(self._by_key)

    def forget(self, key: str) -> None:
        """Without effect for an unknown key."""
        if task := self._by_key.pop(key, None):
            self._progress.remove_task(task.id)

    def clear(self) -> None:
        for key in list(self._by_key):
            self.forget(key)

    def table(self, rows: int) -> Table:
        """The first `rows` steps, one line each."""
        return self._progress.make_tasks_table(list(self._by_key.values())[:rows])


def seconds(task: Task) -> float:
    """Since the step began; a clock that goes back counts as standing."""
    return max(0.0, task.elapsed or 0.0)


def left(task: Task) -> float | None:
    """Seconds, by the work's own word where it gives one, else by its pace; None while nothing is known."""
    state: StepState = task.fields["state"]
    at: float = task.fields["at"]
    if state.left is not None:
        return max(0.0, state.left - max(0.0, task.get_time() - at))
    return task.time_remaining


class _TextColumn(ProgressColumn):
    """A column of plain text in one line, cut where the terminal is narrow: a `first` one before others."""

    def __init__(
        self, text: Callable[[Task], str], *, first: bool = False, max_width: int | None = None
    ) -> None:
        super().__init__(Column(no_wrap=not first, max_width=max_width))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(task), no_wrap=True, overflow="ellipsis")


def _columns() -> Sequence[ProgressColumn]:
    bar = BarColumn(_BAR_WIDTH, complete_style="cyan", finished_style="cyan", pulse_style="cyan")
    return (
        _TextColumn(lambda task: task.description, max_width=_MAX_LABEL),
        bar,
        _TextColumn(_numbers),
        _TextColumn(lambda task: printable(task.fields["state"].note), first=True),
    )


def _numbers(task: Task) -> str:
    state: StepState = task.fields["state"]
    parts = ["" if state.share is None else f"{int(state.share * 100):3d} %", amount(state)]
    if not state.ended:
        parts.append(duration(seconds(task)) if state.share is None else remaining(left(task)))
    return printable("  ".join(part for part in parts if part))

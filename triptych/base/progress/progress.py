"""Reports of long work, from where it is done to where it is shown.

The renderer is the process's, as a log handler is: weights are read eight calls below the command that knows
whether there is a terminal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Protocol, TypeVar

import msgspec

#: As a launcher takes it from a worker.
ShortText = Annotated[str, msgspec.Meta(max_length=200)]
#: The unit of steps that are counted in bytes: shown as sizes.
BYTES = "bytes"

_keys = itertools.count()


@dataclass(frozen=True, slots=True)
class StepState:
    """A step at one moment: `done` of `total` units; None: nobody knows how much there is.

    `key` tells steps apart that run at once. `left`: seconds, where the work itself knows better than its
    pace so far. `ended`: nothing follows; `failed`: it ended by an exception.
    """

    key: ShortText
    label: ShortText
    done: float = 0.0
    total: float | None = None
    unit: ShortText = ""
    note: ShortText = ""
    left: float | None = None
    ended: bool = False
    failed: bool = False

    @property
    def share(self) -> float | None:
        """Between 0 and 1; None where the total is unknown. Nothing to do is all done."""
        if self.total is None:
            return None
        return min(max(self.done / self.total, 0.0), 1.0) if self.total > 0 else 1.0


class Renderer(Protocol):
    """Shows steps to people. `interval`: seconds between two states of a step that are worth showing."""

    interval: float

    def show(self, state: StepState) -> None:
        """Shows this state; the first one and the ended one of every step come in any case."""
        ...

    def ready(self) -> None:
        """The process's start is over: no step follows."""
        ...


class Silent:
    """A renderer that shows nothing."""

    interval = float("inf")

    def show(self, state: StepState) -> None:
        pass

    def ready(self) -> None:
        pass


def new_key() -> str:
    """A key that no other step of this process has."""
    return str(next(_keys))


T = TypeVar("T")

_renderer: Renderer = Silent()


def set_renderer(renderer: Renderer) -> Renderer:
    """Makes `renderer` that of this process's steps; the one before."""
    global _renderer
    before, _renderer = _renderer, renderer
    return before


def current_renderer() -> Renderer:
    """The renderer of this process's steps."""
    return _renderer


@contextmanager
def shown_by(renderer: Renderer) -> Iterator[None]:
    """Has `renderer` show this process's steps within the `with`."""
    before = set_renderer(renderer)
    try:
        yield
    finally:
        set_renderer(before)


class Progress:
    """One step of long work: started, advanced, finished; or a `with`, which finishes it.

    For one thread. `advance` costs a look at the clock and shows no more often than the renderer's interval.
    """

    def __init__(
        self,
        label: str,
        renderer: Renderer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._renderer = renderer
        self._clock = clock
        self._key = new_key()
        self._total: float | None = None
        self._unit = self._note = ""
        self._done = 0.0
        self._left: float | None = None
        self._shown_at = 0.0
        self._running = False

    def start(self, total: float | None = None, unit: str = "") -> Progress:
        """Shows the step with nothing done of `total` units; None: the total is unknown."""
        if self._renderer is None:
            self._renderer = _renderer
        self._total, self._unit, self._done, self._running = total, unit, 0.0, True
        self._show()
        return self

    def advance(
        self,
        count: float = 1,
        *,
        total: float | None = None,
        note: str | None = None,
        left: float | None = None,
    ) -> None:
        """Counts `count` more units as done. A `total` that has become known, a `note`, and the seconds that
        are `left` replace those before.
        """
        self._done += count
        if total is not None:
            self._total = total
        if note is not None:
            self._note = note
        self._left = left
        now = self._clock()
        # A clock that went back does not silence the step.
        if self._renderer is not None and not 0 <= now - self._shown_at < self._renderer.interval:
            self._show()

    def finish(self, *, failed: bool = False) -> None:
        """Ends the step, with all of it done unless it `failed`. Without effect once it has ended."""
        if not self._running:
            return
        self._running = False
        if not failed and self._total is not None:
            self._done = max(self._done, self._total)
        self._show(ended=True, failed=failed)

    def _show(self, *, ended: bool = False, failed: bool = False) -> None:
        assert self._renderer is not None
        self._shown_at = self._clock()
        state = StepState(
            self._key, self._label, self._done, self._total, self._unit, self._note, self._left, ended, failed
        )
        self._renderer.show(state)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(failed=kind is not None)


def ready() -> None:
    """Says that this process has started: its work from now on is its service."""
    _renderer.ready()


def step(label: str, total: float | None = None, unit: str = "") -> Progress:
    """A started step, to be used in a `with`."""
    return Progress(label).start(total, unit)


def each(label: str, items: Sequence[T], unit: str = "") -> Iterator[T]:
    """The items, as a step that is one unit further with each."""
    with step(label, len(items), unit) as running:
        for item in items:
            yield item
            running.advance()

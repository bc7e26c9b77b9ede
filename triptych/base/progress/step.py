"""One step of long work as it stands, and where steps are shown."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Protocol

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

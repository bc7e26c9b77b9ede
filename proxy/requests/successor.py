"""The attempt that is to take a request over from a prefill worker, and what it repeats of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.protos.pd_pb2 import KVHandOff
from triptych.proxy.events import Accepted, AttemptEvent, Refused, told
from triptych.proxy.requests.instructions import HandOver, HandOverInstruction, KeepAttempt

#: Output tokens that a decode worker may repeat, for which the client's stream stands still: at its first
#: try, and twice as many at each further one, up to the most. A short step is soon repeated.
FIRST_REPEATED, MOST_REPEATED = 4, 64
#: Attempts to hand one request over.
MOST_TRIES = 8


@dataclass(slots=True)
class Repeated:
    """Where an attempt stands that puts out again what is known: `position` tokens and `chars` characters.

    Tokens are a function of what is before them, and text of the tokens: both come again as they were.
    """

    position: int
    chars: int

    def new_part(
        self, position: int, token_ids: list[int], text: str, known: Sequence[int], known_chars: int
    ) -> tuple[list[int], str] | None:
        """The tokens and the text of a frame that are new; None where it is another output, or has a gap."""
        count = max(0, min(len(known) - position, len(token_ids)))
        if position != self.position or token_ids[:count] != list(known[position : position + count]):
            return None
        self.position += len(token_ids)
        self.chars += len(text)
        new = min(max(self.chars - known_chars, 0), len(text))
        return token_ids[count:], text[len(text) - new :]


class Successor:
    """The attempt at a decode worker, while the prefill worker's goes on. It numbers all attempts.

    It takes over with its first tokens. Where these are far behind what has come meanwhile, it begins again
    at the same worker, which has computed all of it by now. Nothing that happens to it is a loss.
    """

    def __init__(self) -> None:
        self._drawn = 0
        #: None where there is none.
        self.attempt: int | None = None
        #: Its worker has taken it.
        self.taken = False
        #: From where on it goes on; None before it is sent.
        self.repeated: Repeated | None = None
        self._tries = 0

    def draw(self) -> int:
        """The number of a further attempt of the request."""
        self._drawn += 1
        return self._drawn

    def offered(self, kv: KVHandOff | None = None) -> Sequence[HandOverInstruction]:
        """The prefill worker offers the request, and may keep its `kv` for the next worker."""
        if self.attempt is not None:
            return ()
        self._tries = 0
        return self._next_try(kv=kv)

    def sent(self, position: int, chars: int) -> None:
        """Its worker is sent so many tokens of the output and characters of its text."""
        self.repeated = Repeated(position, chars)

    def observe(self, event: AttemptEvent) -> Sequence[HandOverInstruction]:
        """What its worker, or the proxy, says of it before its first tokens."""
        if isinstance(event, Accepted):
            self.taken = True
        elif isinstance(event, Refused) or told(event) == "item_missing":
            return self._keep()
        elif told(event) in ("lost", "finished"):
            return self._next_try()
        return ()

    def begun(self, behind: int) -> Sequence[HandOverInstruction]:
        """Its first tokens have come, so many `behind` the output. Nothing follows where it takes over."""
        if behind <= min(FIRST_REPEATED << self._tries - 1, MOST_REPEATED):
            return ()
        return self._next_try(behind=True)

    def clear(self) -> None:
        self.attempt, self.repeated, self.taken = None, None, False

    def _next_try(
        self, *, behind: bool = False, kv: KVHandOff | None = None
    ) -> Sequence[HandOverInstruction]:
        if self._tries == MOST_TRIES:
            return self._keep()
        self.clear()
        self._tries += 1
        self.attempt = self.draw()
        return [HandOver(self.attempt, behind=behind, kv=kv)]

    def _keep(self) -> Sequence[HandOverInstruction]:
        self.clear()
        return [KeepAttempt()]

"""A fair lock on the device of a replica: a tower call, a decoder step, and so on."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.errors import InternalError


class DeviceLock(StepPacer):
    """A first-in-first-out lock, held by `with`: two engines that both wait for it alternate.

    A wait of more than `patience` seconds is an InternalError: the other engine's step hangs.
    """

    def __init__(self, patience: float = 600.0) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._held = False
        self._gates: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return len(self._gates)

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
        if not gate.acquire(timeout=self._patience):
            self._give_up(gate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._gates:
                # It stays held: handed over, so that no third thread can acquire it in between.
                self._gates.popleft().release()
            else:
                self._held = False

    def _give_up(self, gate: threading.Lock) -> None:
        with self._lock:
            if gate not in self._gates:
                return  # handed over just now
            self._gates.remove(gate)
        raise InternalError(f"the device was not free for {self._patience:g} s")

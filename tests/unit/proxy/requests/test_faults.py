"""The table of faults on a request's state machine alone: a script of events, and what it has done."""

from __future__ import annotations

from collections import deque

import pytest

from support.faults import DAMAGE, FAULTS, Fault, Job
from triptych.base.errors import InternalError
from triptych.base.types import ItemPlan, Usage
from triptych.proxy import events
from triptych.proxy.call.chat import Delta, Started
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.lifecycle import MAX_ITEM_LOSSES, Lifecycle

TOKENS, HELD_AT = 12, 5
PLAN = ItemPlan("k", "n", "image", 1, 1, "float32", 1)
#: Digests that the PD worker reports as missing, one after the other.
LOSSES = {
    "loses the item": [""],
    "damages the item": [DAMAGE],
    "loses the item every time": [""] * MAX_ITEM_LOSSES,
}
HERE = [
    fault
    for fault in FAULTS
    if fault.act in LOSSES
    or fault.act in ("fails every try", "refuses as unavailable", "repeats every frame")
    or (fault.act, fault.stage) in (("dies", "saved"), ("dies", "stream"))
    or fault.act == "ends the request as unavailable"
]


class World:
    """Encoders, store and PD workers of one request: what each instruction leads to."""

    def __init__(self, fault: Fault) -> None:
        self.machine, self.fault = Lifecycle(), fault
        self.losses = list(LOSSES.get(fault.act, ()))
        self.jobs: list[Job] = []
        self.shown: list[int] = []
        self.status = 0
        self._due: deque[events.RequestEvent] = deque([events.Fetched({"k": ""}, 0.0)])
        self._broken = fault.act in LOSSES or fault.act in ("fails every try", "repeats every frame")

    def run(self) -> None:
        while self._due:
            for instruction in self.machine.deliver(self._due.popleft()):
                self._carry_out(instruction)

    def _carry_out(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.LookUpItems():
                self._due.append(events.LookedUp({}, {}))
            case do.StartJobs():
                self._encode(instruction)
            case do.Submit():
                self._submit(instruction.attempt, instruction.ready)
            case do.NotifyItems():
                self._load(self.machine.attempt)
            case do.Fail(error=error):
                self.status = error.status
            case do.Emit(output=output) if not isinstance(output, Started):
                self.status = 200

    def _encode(self, job: do.StartJobs) -> None:
        self.jobs.append((job.re_encode, job.damaged_digest, ""))
        if self.fault.act == "fails every try":
            self._due.append(events.JobFailed("k", InternalError("the tower failed")))
            return
        self._due += [
            events.ItemPlanned("k", PLAN),
            events.ItemReady("k", events.JobReady(PLAN, False, 0.0, 0.0)),
        ]

    def _submit(self, attempt: int, ready: frozenset[str]) -> None:
        if self._breaks("refuses as unavailable"):
            self._due.append(events.Lost(attempt))
            return
        self._due += [events.Accepted(attempt), events.Admitted(attempt, Started((7, 8)), [(0, 1)])]
        if ready:
            self._load(attempt)

    def _load(self, attempt: int) -> None:
        if self.fault.stage == "saved" and self._breaks("dies"):
            self._due.append(events.Lost(attempt))
        elif self.losses:
            self._due.append(events.MissReported(attempt, "k", self.losses.pop(0)))
        else:
            self._due.append(events.LoadReported(attempt, "k", 0.0))
            self._stream(attempt)

    def _stream(self, attempt: int) -> None:
        for index in range(len(self.machine.output_token_ids), TOKENS):
            if index == HELD_AT and self._breaks(self.fault.act):
                self._due.append(events.Lost(attempt))
                return
            for _ in range(2 if self.fault.act == "repeats every frame" else 1):
                found = self.machine.tokens(attempt, index, [1000 + index], f"t{index} ")
                self.shown += found.token_ids if isinstance(found, Delta) else []
        self._due.append(events.Finished(attempt, "length", Usage(2, TOKENS)))

    def _breaks(self, act: str) -> bool:
        """Whether the fault is to happen now: once."""
        now = not self._broken and self.fault.act == act
        self._broken |= now
        return now


@pytest.mark.parametrize("fault", HERE, ids=str)
def test_a_fault_ends_as_the_table_says(fault: Fault) -> None:
    world = World(fault)
    world.run()
    assert world.machine.ended
    assert world.status == fault.status
    assert world.shown == ([1000 + index for index in range(TOKENS)] if fault.status == 200 else [])
    if fault.pool == "store" and fault.jobs is not None:
        assert tuple(world.jobs) == fault.jobs
    if fault.stage != "saved":
        assert world.machine.attempt == fault.attempts

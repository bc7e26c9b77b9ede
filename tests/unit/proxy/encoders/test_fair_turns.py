from __future__ import annotations

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.fair_turns import FairTurns
from triptych.proxy.encoders.job import EncoderSlot, StartPlan, StartRun
from triptych.proxy.encoders.job_table import EncoderJobTable


def test_work_of_one_tenant_keeps_its_order() -> None:
    turns = FairTurns()
    assert [turns.draw("a").number for _ in range(3)] == [1, 2, 3]


def test_a_tenant_that_comes_late_is_next_but_for_one() -> None:
    turns = FairTurns()
    drawn = [turns.draw("a") for _ in range(100)]
    turns.begin(drawn[9].number)
    assert (turns.draw("b").number, turns.draw("b").number) == (11, 12)


def test_tenants_that_have_gone_are_forgotten() -> None:
    turns = FairTurns()
    for number in range(1000):
        turns.begin(turns.draw(f"tenant {number}").number)
    assert len(turns._drawn) <= 65


def plan_of(name: str) -> ItemPlan:
    return ItemPlan(name, "n", "image", 1, 1, "float32", 1, None, ())


def test_one_tenants_picture_is_planned_and_encoded_while_another_has_queued_hundreds() -> None:
    table = EncoderJobTable(1 << 30, lambda plan: 1)
    table.set_encoders([EncoderSlot("e0", ("n",), 1, 1)])
    for number in range(300):
        table.want(f"a{number}", f"ra{number}", "n", tenant="a")
    planned: list[str] = []
    encoded: list[str] = []
    for step in range(40):
        if step == 10:
            table.want("b", "rb", "n", tenant="b")
        for action in table.pump(0.0):
            job = action.job
            if isinstance(action, StartPlan):
                planned.append(job.mm_hash)
                table.planned(job.try_id, plan_of(job.mm_hash))
                table.admit(next(iter(job.waiters)))
            elif isinstance(action, StartRun):
                encoded.append(job.mm_hash)
                table.ready(job.try_id, plan_of(job.mm_hash))
    assert planned.index("b") <= 12
    assert encoded.index("b") <= 13


def test_one_tenants_admitted_picture_runs_while_another_has_hundreds_admitted() -> None:
    table = EncoderJobTable(1 << 30, lambda plan: 1)
    table.set_encoders([EncoderSlot("e0", ("n",), 1000, 1)])
    names = [f"a{number}" for number in range(300)]
    for name in names:
        table.want(name, f"r{name}", "n", tenant="a")
    table.want("b", "rb", "n", tenant="b")
    for action in table.pump(0.0):
        table.planned(action.job.try_id, plan_of(action.job.mm_hash))
    for name in [*names, "b"]:
        table.admit(f"r{name}")
    encoded: list[str] = []
    for _ in range(10):
        for action in table.pump(0.0):
            encoded.append(action.job.mm_hash)
            table.ready(action.job.try_id, plan_of(action.job.mm_hash))
    assert encoded.index("b") <= 2

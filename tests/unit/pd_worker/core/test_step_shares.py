"""The crowd of one tenant sits out while requests of others begin, for as long as its last step took, and
starts few at once while they come and go."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine.engine_requests import Make, ModellessEngine, finished, make_request
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.step_shares import (
    CROWD_ROWS,
    FIRST_TOKENS,
    LEAST_STARTS,
    LONG_SECONDS,
    RECENT_SECONDS,
    StepShares,
)

LEAST_ROWS = 128
CROWD = Counter(a=CROWD_ROWS, b=1)


def running(tenant: str, tokens: int) -> Any:
    return SimpleNamespace(tenant=tenant, output_token_ids=[1] * tokens)


def after(rows: Counter[str], seconds: float = 1.0) -> StepShares:
    shares = StepShares(LEAST_ROWS)
    shares.computed(rows, seconds)
    return shares


def test_it_rests_while_others_could_start_or_have_hardly_begun():
    assert after(CROWD).resting({"a", "b"}, []) == "a"
    assert after(CROWD).resting((), [running("a", 0), running("b", FIRST_TOKENS - 1)]) == "a"
    assert after(CROWD).resting({"a"}, [running("a", 0), running("b", FIRST_TOKENS)]) is None


@pytest.mark.parametrize("rows", [Counter(a=CROWD_ROWS - 1), Counter(a=CROWD_ROWS, b=CROWD_ROWS), Counter()])
def test_few_rows_and_those_of_many_tenants_are_no_crowd(rows):
    assert after(rows).resting({"b"}, []) is None


def test_it_rests_for_as_long_as_its_last_step_took_and_no_longer():
    shares = after(CROWD, 1.0)
    for _ in range(3):
        assert shares.resting({"b"}, []) == "a"
        shares.computed(Counter(b=1), 0.4)
    assert shares.resting({"b"}, []) is None
    shares.computed(CROWD, 0.1)
    shares.computed(CROWD, 0.2)
    shares.computed(Counter(b=1), 0.2)
    assert shares.resting({"b"}, []) is None


def test_beside_others_more_may_start_in_each_step_while_none_is_long():
    shares = StepShares(LEAST_ROWS)
    shares.several(0.0)
    allowed = [shares.starts.count]
    for _ in range(4):
        shares.ended(int(shares.starts.count), 0, 0.1 * LONG_SECONDS, 1.0)
        allowed.append(shares.starts.count)
    assert allowed == [8, 12, 18, 27, 40]
    shares.ended(39, 0, 0.1 * LONG_SECONDS, 1.0)  # more were not asked for
    shares.several(1.0)
    assert shares.starts.count == 40


def test_tenants_that_come_by_turns_are_several_though_none_is_there_with_another():
    shares = StepShares(LEAST_ROWS)
    shares.came("a", 0.0)
    shares.came("a", 1.0)
    assert shares.starts.count == math.inf
    shares.came("b", 2.0)
    assert shares.starts.count == LEAST_STARTS


def test_beside_others_fewer_start_in_a_step_after_one_that_was_long_with_them():
    shares = StepShares(LEAST_ROWS)
    shares.several(0.0)
    shares.ended(64, 0, 4 * LONG_SECONDS, 1.0)
    assert shares.starts.count == 16
    shares.ended(16, 0, LONG_SECONDS, 1.0)  # as many as may, and not too long
    assert shares.starts.count == 17
    shares.ended(3, 0, 100 * LONG_SECONDS, 1.0)  # it was not for them
    assert shares.starts.count == 17
    shares.ended(17, 0, 100 * LONG_SECONDS, 1.0)
    assert shares.starts.count == LEAST_STARTS


def test_beside_others_prompts_have_fewer_rows_in_a_step_after_one_that_was_long_with_them():
    shares = StepShares(LEAST_ROWS)
    shares.several(0.0)
    shares.ended(2, 600, 2 * LONG_SECONDS, 1.0)
    assert shares.rows.count == 300
    shares.ended(2, 300, LONG_SECONDS, 1.0)
    assert shares.rows.count == 300 + LEAST_ROWS // 8
    shares.ended(2, LEAST_ROWS, 100 * LONG_SECONDS, 1.0)  # it was not for them
    assert shares.rows.count == 300 + LEAST_ROWS // 8
    shares.ended(2, 300, 100 * LONG_SECONDS, 1.0)
    assert shares.rows.count == LEAST_ROWS
    shares.ended(2, LEAST_ROWS, 100 * LONG_SECONDS, 1.0 + RECENT_SECONDS)
    assert shares.rows.count > 100_000


def test_a_tenant_alone_starts_as_many_in_a_step_as_there_is_room_for():
    shares = StepShares(LEAST_ROWS)
    shares.ended(64, 0, 4 * LONG_SECONDS, 1.0)
    assert shares.starts.count > 1000
    shares.several(1.0)
    shares.ended(64, 0, 4 * LONG_SECONDS, 1.0)
    shares.ended(8, 0, LONG_SECONDS, 1.0 + RECENT_SECONDS)
    assert shares.starts.count > 1000


# With the scheduler.


def crowded(make: Make) -> ModellessEngine:
    """A runs 32 long answers, and as many wait."""
    engine = make(num_blocks=8192, block_size=4, budget=64, max_num_seqs=32, max_model_len=8192)
    for number in range(64):
        engine.add(of("a", f"a{number}", max_tokens=2000, arrival=number / 1000))
    for _ in range(40):
        engine.step(seconds=lasting)
    return engine


def of(tenant: str, name: str, prompt: int = 12, **more: Any) -> Any:
    request = make_request(name, [hash((name, i)) % 50 for i in range(prompt)], **more)
    request.tenant = tenant
    return request


def tenants(output: SchedulerOutput) -> set[str]:
    return {chunk.state.tenant for chunk in output.chunks}


def lasting(output: SchedulerOutput) -> float:
    """A step of the crowd takes a second, others a tenth."""
    return 1.0 if "a" in tenants(output) else 0.1


def test_a_small_request_ends_without_a_step_of_the_crowd(make):
    engine = crowded(make)
    engine.add(of("b", "b", arrival=9.0, max_tokens=FIRST_TOKENS))
    steps = [tenants(engine.step(seconds=lasting)) for _ in range(FIRST_TOKENS)]
    assert steps == [{"b"}] * FIRST_TOKENS
    assert "b" in finished(engine)
    assert tenants(engine.step(seconds=lasting)) == {"a"}
    end(engine)


def test_a_crowd_of_small_requests_starts_few_in_a_step_soon_after_another_tenant_was_here(make):
    engine = make(num_blocks=8192, block_size=4, budget=2048, max_num_seqs=64, max_model_len=8192)
    engine.add(of("b", "b", max_tokens=1))
    while not engine.idle:
        engine.step(seconds=lasting)
    for number in range(200):
        engine.add(of("a", f"a{number}", max_tokens=2, arrival=number / 1000))
    starts = [engine.step(seconds=lasting).starts for _ in range(4)]
    assert starts == [LEAST_STARTS] * 4
    end(engine, 200)


def test_long_prompts_of_a_crowd_have_few_rows_in_a_step_while_another_tenant_comes_and_goes(make):
    engine = make(num_blocks=8192, block_size=4, budget=512, max_num_seqs=64, max_model_len=8192)
    for number in range(40):
        engine.add(of("a", f"a{number}", prompt=300, max_tokens=1, arrival=number / 1000))
    engine.add(of("b", "b", arrival=9.0, max_tokens=1))
    rows = [engine.step(seconds=lasting).prompt_rows for _ in range(9)]
    assert set(rows) == {128}
    engine.run_out()


def test_a_tenant_that_begins_again_and_again_leaves_the_crowd_half_of_the_time(make):
    engine = crowded(make)
    spent = Counter[bool]()
    for number in range(300):
        if engine.scheduler.num_running < 34:
            engine.add(of("b", f"b{number}", arrival=9.0, max_tokens=2))
        before = engine.now
        output = engine.step(seconds=lasting)
        spent["a" in tenants(output)] += engine.now - before
    assert spent[True] >= 0.45 * spent.total()
    end(engine)


def test_a_long_stream_beside_a_crowd_shares_its_steps(make):
    engine = crowded(make)
    engine.add(of("b", "b", arrival=9.0, max_tokens=100))
    steps = [tenants(engine.step(seconds=lasting)) for _ in range(100)]
    assert steps[FIRST_TOKENS:] == [{"a", "b"}] * (100 - FIRST_TOKENS)
    end(engine)


def test_a_crowd_goes_on_where_what_others_begin_cannot(make):
    engine = make(num_blocks=40, block_size=4, budget=32, max_num_seqs=8, max_model_len=160)
    engine.add(of("a", "a", 120, max_tokens=20))
    engine.step(seconds=lasting)
    engine.add(of("b", "b", 100, max_tokens=20, arrival=9.0))  # for which there are no blocks now
    while not engine.idle:
        assert engine.step(seconds=lasting).computes
    assert len(finished(engine)) == 2


def test_an_engine_with_one_tenant_computes_all_in_each_step(make):
    engine = crowded(make)
    begun = len(engine.of("tokens"))
    for _ in range(10):
        engine.step(seconds=lasting)
    assert len(engine.of("tokens")) - begun == 320
    end(engine)


def end(engine: ModellessEngine, crowd: int = 64) -> None:
    engine.scheduler.cancel([f"a{number}" for number in range(crowd)], "proxy")
    engine.run_out()

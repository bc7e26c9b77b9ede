"""What a request of an encoder-decoder model takes of the KV blocks, and what it gives back, to the block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import ModellessEngine, finished, make_cross, make_request, publish
from triptych.base.errors import InternalError
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.pd_worker.core.kv_cache.cross_kv_manager import TableState
from triptych.pd_worker.core.request_events import RequestFinished

STORE = MemoryStore()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), prompt=st.integers(1, 20), block_size=st.integers(1, 9), users=st.integers(1, 4)
)
def test_users_of_one_output_take_its_table_once_and_their_own_each(
    rows: int, prompt: int, block_size: int, users: int
) -> None:
    STORE.clear()
    text = make_cross("text", rows)
    publish(STORE, text)
    engine = ModellessEngine(
        STORE, cross=True, block_size=block_size, num_blocks=256, budget=512, prefix_caching=False
    )
    names = [f"r{number}" for number in range(users)]
    requests = [
        make_request(name, prompt, [text], max_tokens=60, arrival=number) for number, name in enumerate(names)
    ]
    engine.add(*requests)
    while not engine.step().chunks:
        assert engine.kv.num_free > 0
    cross, own = -(-rows // block_size), -(-prompt // block_size)
    assert engine.kv.num_used == cross + users * own
    assert engine.kv.num_free == 256 - cross - users * own
    for left in range(users - 1, -1, -1):
        engine.scheduler.cancel([names[left]], "proxy")
        assert engine.kv.num_used == (cross + left * own if left else 0)
        # What was given back is not given back again.
        engine.scheduler.cancel([names[left]], "proxy")
        for state_id in (names[left], f"proxy/{names[left]}/1"):
            engine.kv.free(state_id)
            assert engine.tables is not None
            engine.tables.release(state_id)
        assert engine.kv.num_used == (cross + left * own if left else 0)
    assert engine.kv.num_free == 256
    engine.assert_at_rest()
    STORE.clear()


def test_a_reset_brings_the_totals_of_both_devices_back() -> None:
    STORE.clear()
    text = make_cross("text", 6)
    publish(STORE, text)
    engine = ModellessEngine(STORE, cross=True, num_blocks=12, host_blocks=12, max_num_seqs=2, budget=64)
    prompts = [make_request(f"r{i}", [9] * 8, [text], max_tokens=24, arrival=i) for i in range(2)]
    engine.add(*prompts)
    assert engine.swap is not None
    while not engine.swap.num_used:
        engine.step()
    # As an error in the middle of the bookkeeping would leave them.
    engine.kv.pool.allocate()
    events = engine.scheduler.reset(InternalError("lost"))
    assert {event.request_id for event in events if isinstance(event, RequestFinished)} >= {"r1"}
    assert (engine.kv.num_free, engine.swap.num_free) == (12, 12)
    assert engine.tables is not None and engine.tables.num_tables == 0
    assert engine.tables.state(text.plan) is TableState.ABSENT
    engine.add(make_request("again", [9] * 8, [text], max_tokens=2, arrival=9))
    engine.run_out()
    again = finished(engine)["again"]
    assert again.error is None and again.usage.cached_tokens == 0
    engine.assert_at_rest()
    STORE.clear()

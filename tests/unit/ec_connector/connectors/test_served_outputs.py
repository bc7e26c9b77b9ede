"""Memory of served outputs: what is used again, and what keeps its bytes."""

from __future__ import annotations

import pytest

from support.data.items import make_plan
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.connectors.served_outputs import ServedOutputs

SIZE = 64 << 10


def served(limit: int = 1 << 20) -> ServedOutputs:
    return ServedOutputs(limit, socket="a socket", address="")


def offered(outputs: ServedOutputs, name: str) -> tuple[ItemPlan, EmbeddingSource]:
    plan = make_plan(name, rows=100, width=16)
    source = outputs.offer(plan, b"a head", memoryview(bytes(plan.nbytes)))
    assert source is not None
    return plan, source


def read(outputs: ServedOutputs, source: EmbeddingSource) -> bool:
    with outputs.reading(source.name) as output:
        return output is not None


@pytest.mark.parametrize("first", ["read", "stored"])
def test_what_is_read_and_stored_gives_its_memory_to_the_next_output(first: str) -> None:
    outputs = served()
    plan, source = offered(outputs, "one")
    if first == "read":
        assert read(outputs, source)
    outputs.stored(plan.mm_hash)
    if first == "stored":
        assert read(outputs, source)
    _, second = offered(outputs, "two")
    assert outputs.nbytes == SIZE
    assert not read(outputs, source) and read(outputs, second)


@pytest.mark.parametrize("used", ["not at all", "read", "stored"])
def test_what_is_not_both_read_and_stored_stays_while_there_is_room(used: str) -> None:
    outputs = served()
    plan, source = offered(outputs, "one")
    if used == "read":
        assert read(outputs, source)
    elif used == "stored":
        outputs.stored(plan.mm_hash)
    offered(outputs, "two")
    assert outputs.nbytes == 2 * SIZE
    assert read(outputs, source)


def test_what_is_being_read_again_keeps_its_bytes() -> None:
    outputs = served()
    plan, source = offered(outputs, "one")
    outputs.stored(plan.mm_hash)
    assert read(outputs, source)
    with outputs.reading(source.name) as output:
        assert output is not None
        before = bytes(output.view)
        offered(outputs, "two")
        assert bytes(output.view) == before and outputs.nbytes == 2 * SIZE

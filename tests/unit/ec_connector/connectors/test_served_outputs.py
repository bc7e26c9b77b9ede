"""Memory of served outputs: what is used again, and what keeps its bytes."""

from __future__ import annotations

import pytest
import torch

from support.data.items import make_plan
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.connectors.served_outputs import NotFiniteError, ServedOutputs
from triptych.store.codec import PendingHead, encode_head, write_id_of

SIZE = 64 << 10


def served(limit: int = 1 << 20) -> ServedOutputs:
    return ServedOutputs(limit, socket="a socket", address="")


def offered(outputs: ServedOutputs, name: str) -> tuple[ItemPlan, EmbeddingSource]:
    plan = make_plan(name, rows=100, width=16)
    output = outputs.offer(plan, PendingHead(plan, ttl=60), memoryview(bytes(plan.nbytes)))
    assert output is not None
    return plan, output.source


def test_the_one_pass_makes_the_value_that_the_store_gets() -> None:
    outputs, plan = served(), make_plan("one", rows=100, width=16)
    body = memoryview(torch.randn(plan.rows, plan.width).view(torch.uint8).numpy().tobytes())
    output = outputs.offer(plan, PendingHead(plan, ttl=60), body)
    assert output is not None and outputs.get(plan) is output
    assert output.head == encode_head(plan, body, ttl=60, write_id=write_id_of(output.head))
    with outputs.reading(output.source.name):
        assert bytes(output.view) == output.head + bytes(body)


def test_what_is_not_finite_is_not_served_and_gives_its_memory_back() -> None:
    outputs, plan = served(SIZE), make_plan("one", rows=100, width=16)
    body = torch.full((plan.rows, plan.width), torch.inf).view(torch.uint8).numpy().data.cast("B")
    with pytest.raises(NotFiniteError):
        outputs.offer(plan, PendingHead(plan, ttl=60), body)
    assert outputs.get(plan) is None
    offered(outputs, "two")


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

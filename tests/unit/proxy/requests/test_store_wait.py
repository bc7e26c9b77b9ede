"""Who waits for a store that no worker reaches, and who goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.waiting import until
from triptych.base.errors import RequestError
from triptych.base.types import ItemPlan
from triptych.proxy.call.chat import Started
from triptych.proxy.events import (
    Accepted,
    Admitted,
    ClientLeft,
    Fetched,
    LoadReported,
    LookedUp,
    Lost,
    RequestEvent,
    RequestFailed,
)
from triptych.proxy.requests.item_supply import StoreWait
from triptych.proxy.requests.lifecycle import Lifecycle

PLAN = ItemPlan("a", "n", "image", 1, 1, "float32", 1)


def looked_up(*stored: ItemPlan) -> Lifecycle:
    machine = Lifecycle()
    machine.deliver(Fetched({"a": "field"}, 0.0))
    machine.deliver(LookedUp({plan.mm_hash: plan for plan in stored}))
    return machine


def test_an_item_without_an_embedding_waits_for_encoders_and_one_that_is_stored_for_pd_workers() -> None:
    assert looked_up().waits_for("encoder")
    assert not looked_up().waits_for("pd")
    stored = looked_up(PLAN)
    assert (stored.waits_for("encoder"), stored.waits_for("pd")) == (False, True)
    stored.deliver(Accepted(1))
    stored.deliver(Admitted(1, Started((7,)), [(0, 1)]))
    stored.deliver(LoadReported(1, "a"))
    assert not stored.waits_for("pd")


def test_an_attempt_elsewhere_has_loaded_nothing_yet() -> None:
    machine = looked_up(PLAN)
    machine.deliver(Accepted(1))
    machine.deliver(LoadReported(1, "a"))
    machine.deliver(Lost(1))
    assert machine.waits_for("pd")


def test_text_and_what_has_ended_wait_for_no_store() -> None:
    text = Lifecycle()
    text.deliver(Fetched({}, 0.0))
    assert not text.waits_for("encoder") and not text.waits_for("pd")
    gone = looked_up()
    gone.deliver(ClientLeft())
    assert not gone.waits_for("encoder")


class Proxy:
    """Requests that wait with a limit of no time, and the errors that they get."""

    def __init__(self) -> None:
        self.lost = {"encoder"}
        self.errors: dict[str, RequestError] = {}
        self.requests: dict[str, Any] = {}
        pool: Any = SimpleNamespace(store_lost=lambda pool: pool in self.lost)
        events: Any = SimpleNamespace(deliver=self._failed)
        self.limit = StoreWait(pool, self.requests, events, 0.0)

    def _failed(self, name: str, event: RequestEvent) -> None:
        assert isinstance(event, RequestFailed)
        self.errors[name] = event.error

    def add(self, name: str, machine: Lifecycle, first_token: float | None = None) -> None:
        self.requests[name] = SimpleNamespace(
            request_id=name,
            lifecycle=machine,
            first_token=first_token,
            binding=object(),
            content=SimpleNamespace(items=("a",)),
        )
        self.limit.watch(self.requests[name])


@pytest.mark.parametrize("before", [True, False])
async def test_who_waits_with_nothing_streamed_gets_503_with_retry_after(before: bool) -> None:
    proxy = Proxy()
    if before:  # the loss comes before the request
        proxy.limit.pool_changed()
    proxy.add("streams", looked_up(), first_token=1.0)
    proxy.add("waits", looked_up())
    proxy.limit.pool_changed()
    await until(lambda: proxy.errors)
    assert list(proxy.errors) == ["waits"]
    error = proxy.errors["waits"]
    assert error.status == 503 and error.retry_after
    assert "encoder worker reaches the embedding store" in error.message


async def test_a_store_that_is_back_in_time_costs_no_request() -> None:
    proxy = Proxy()
    proxy.limit.pool_changed()
    proxy.add("waits", looked_up())
    proxy.lost.clear()
    proxy.limit.pool_changed()
    proxy.lost.add("encoder")
    proxy.add("later", looked_up())
    proxy.limit.pool_changed()
    del proxy.requests["waits"]
    await until(lambda: proxy.errors)
    assert list(proxy.errors) == ["later"]

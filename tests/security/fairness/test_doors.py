"""Whatever a client can ask of a proxy, a flood of it is tried beside another key's requests."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from grpc import aio
from starlette.routing import Route

from benchmarks.fairness.floods import FLOODS, covered
from support.waiting import until
from triptych.base.config import ProxyConfig
from triptych.proxy import service
from triptych.proxy.openai.app import FrontDoor


@pytest.fixture
async def doors(monkeypatch: pytest.MonkeyPatch, store: Any, store_url: str) -> frozenset[str]:
    """The paths and methods that a proxy's own service opens."""
    methods: set[str] = set()
    routes: set[str] = set()
    make_app, add = service.make_app, aio._server.Server.add_generic_rpc_handlers

    def app_of(*arguments: Any, **options: Any) -> FrontDoor:
        front = make_app(*arguments, **options)
        for route in front._rest.routes:
            assert isinstance(route, Route), route
            path = route.path.replace(":path}", "}")
            routes.update(f"{method} {path}" for method in (route.methods or ()) if method != "HEAD")
        return front

    def added(server: Any, handlers: Any) -> None:
        methods.update(name for handler in handlers for name in handler._method_handlers)
        add(server, handlers)

    monkeypatch.setattr(service, "make_app", app_of)
    monkeypatch.setattr(aio._server.Server, "add_generic_rpc_handlers", added)
    config = ProxyConfig(store=store_url, port=0, grpc_port=0)
    task = asyncio.create_task(service.run(config))
    try:
        await until(lambda: task.done() or routes, "the proxy's routes")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return frozenset(methods | routes)


async def test_every_path_and_method_has_a_flood(doors):
    assert doors - covered() == set(), "name it among the `doors` of a flood in benchmarks/fairness/floods.py"


async def test_every_flood_is_of_a_path_or_method_that_is_served(doors):
    assert covered() - doors == set()


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_sends_to_the_doors_that_it_names(flood):
    """A door with a part in braces is met by any path in its place."""
    sent = {door for send in flood.make(1 / 256) for door in send.doors}
    patterns = {name: re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name))) for name in flood.doors}
    met = {door: [name for name, pattern in patterns.items() if pattern.fullmatch(door)] for door in sent}
    assert [door for door, names in met.items() if not names] == []
    assert flood.doors - {name for names in met.values() for name in names} == set()

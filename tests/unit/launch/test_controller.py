"""The controller, and the ports that it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import until
from triptych.apps.cli.app import app
from triptych.apps.launch import scaling, serve
from triptych.apps.launch.scaling import PoolChange, PoolController, PoolWorkers, plan_change
from triptych.base.config import ProxyConfig, WorkerRange
from triptych.base.errors import ConfigError
from triptych.base.rpc import ports as probes
from triptych.base.scaling import ScalingDecision
from triptych.store.control import StoreUnavailable


class _Board:
    """Decisions by pool, or the error that reading them ends with."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.error: Exception | None = None
        self.hangs = False
        self.asked = 0

    async def decision(self, pool: str) -> ScalingDecision | None:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        wanted = self.wanted.get(pool)
        return None if wanted is None else ScalingDecision(wanted, "flow", active=True)


class _Host:
    """Workers that start at once and drain until `finish`."""

    def __init__(self) -> None:
        self.running: dict[str, list[str]] = {"encoder": [], "pd": ["pd-0"]}
        self.draining: list[str] = []
        self.calls: list[str] = []

    def workers(self, pool: str) -> PoolWorkers:
        return PoolWorkers([f"{pool}-{n}" for n in range(8)], tuple(self.running[pool]), self.draining)

    def start(self, name: str) -> None:
        self.calls.append(f"+{name}")
        self.running[name.partition("-")[0]].append(name)

    def drain(self, name: str) -> None:
        self.calls.append(f"-{name}")
        self.running[name.partition("-")[0]].remove(name)
        self.draining.append(name)


@pytest.fixture
def board() -> _Board:
    return _Board()


@pytest.fixture
def host() -> _Host:
    return _Host()


@pytest.fixture
def following(board: _Board, host: _Host) -> PoolController:
    return PoolController(board, {"encoder": WorkerRange(0, 3), "pd": WorkerRange(1, 2)}, host)


async def test_a_decision_outside_of_the_range_goes_to_its_end(board, host, following):
    board.wanted = {"encoder": 99, "pd": 0}
    for pool in ("encoder", "pd"):
        await following.follow(pool)
    assert host.running == {"encoder": ["encoder-0", "encoder-1", "encoder-2"], "pd": ["pd-0"]}


@pytest.mark.parametrize("error", [StoreUnavailable("down"), None])
async def test_without_a_store_or_a_decision_the_count_stays(board, host, following, error):
    board.wanted = {"encoder": 2}
    await following.follow("encoder")
    board.wanted, board.error = {}, error
    await following.follow("encoder")
    assert host.calls == ["+encoder-0", "+encoder-1"]


async def test_a_store_that_is_silent_keeps_nothing_else_waiting(board, host, following, monkeypatch):
    monkeypatch.setattr(scaling, "STORE_SECONDS", 0.01)
    board.hangs = True
    await following.follow("encoder")
    assert host.calls == []


async def test_the_controller_goes_on_after_an_outage_and_after_an_error_of_its_own(
    board: _Board, host: _Host, following: PoolController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "FOLLOW_SECONDS", 0.01)
    board.error = RuntimeError("what nobody expects")
    task = asyncio.create_task(following.run())
    try:
        for error in (StoreUnavailable("down"), None):
            # Both pools' polls have met the error, and it polls on.
            before = board.asked
            await until(lambda before=before: board.asked > before + 2, "the next poll")
            board.error = error
        board.wanted = {"encoder": 1}
        await until(lambda: host.calls == ["+encoder-0"], "the start after the outage")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


NAMES = ("encoder-0", "encoder-1", "encoder-2", "encoder-3")


def _pool(running: str = "", draining: str = "") -> PoolWorkers:
    return PoolWorkers(NAMES, [f"encoder-{n}" for n in running], [f"encoder-{n}" for n in draining])


def _change(start: str = "", drain: str = "") -> PoolChange:
    return PoolChange(tuple(f"encoder-{n}" for n in start), tuple(f"encoder-{n}" for n in drain))


@pytest.mark.parametrize(
    ("pool", "wanted", "change"),
    [
        (_pool(), 0, _change()),
        (_pool(), 2, _change(start="01")),
        (_pool("0"), 4, _change(start="123")),
        (_pool("012"), 3, _change()),
        (_pool("012"), 1, _change(drain="21")),
        (_pool("012"), 0, _change(drain="210")),
        (_pool("12"), 3, _change(start="0")),
        (_pool("120"), 2, _change(drain="0")),
        (_pool("0", draining="1"), 2, _change(start="2")),
        (_pool("0", draining="123"), 3, _change()),
        (_pool("0", draining="12"), 1, _change()),
        (_pool("0123"), 9, _change()),
        (_pool("01"), -3, _change(drain="10")),
    ],
)
def test_free_names_start_and_the_newest_are_drained(pool, wanted, change):
    assert plan_change(pool, wanted) == change


@settings(deadline=None)
@given(wanted=st.lists(st.integers(0, 5), max_size=12), ended=st.lists(st.booleans(), min_size=12))
def test_a_pool_has_what_is_wanted_or_waits_for_a_drain_and_never_turns_both_ways(wanted, ended):
    running: list[str] = []
    draining: list[str] = []
    for number, all_ended in zip(wanted, ended, strict=False):
        change = plan_change(PoolWorkers(NAMES, running, draining), number)
        assert not (change.start and change.drain)
        assert not set(change.start) & {*running, *draining}
        assert list(change.drain) == running[::-1][: len(change.drain)]
        assert not change.start or number >= len(running) + len(change.start)
        held_back = len(draining)
        running = [name for name in (*running, *change.start) if name not in change.drain]
        assert len(running) == min(number, len(NAMES)) or len(running) == len(NAMES) - held_back < number
        draining = [] if all_ended else [*draining, *change.drain]
        assert len(running) + len(draining) <= len(NAMES)


def _chosen(
    monkeypatch: pytest.MonkeyPatch, taken: Collection[int], fixed: Collection[str] = (), **ports: int
) -> tuple[int, int]:
    """HTTP's and gRPC's port, where others have the ports in `taken`."""

    def port_error(host: str, port: int) -> str:
        return "Address already in use" if port in taken else ""

    for module in (serve, probes):
        monkeypatch.setattr(module, "port_error", port_error)
    proxy = serve.with_free_ports(ProxyConfig(**ports), fixed)
    return proxy.port, proxy.grpc_port


@pytest.mark.parametrize(
    ("taken", "fixed", "ports", "chosen"),
    [
        ((), (), {}, (8000, 8001)),
        ((8000, 8001), (), {}, (8002, 8003)),
        ((8000,), (), {}, (8002, 8003)),
        ((8001, 8002), (), {}, (8004, 8005)),
        ((8001,), ("port",), {"port": 9000}, (9000, 8003)),
        ((8001,), ("port",), {"port": 8003}, (8003, 8005)),
        ((8000,), ("grpc_port",), {"grpc_port": 8002}, (8004, 8002)),
        ((), ("port", "grpc_port"), {"port": 0, "grpc_port": 0}, (0, 0)),
    ],
)
def test_the_next_free_pair_is_taken_and_what_was_named_stays(monkeypatch, taken, fixed, ports, chosen):
    assert _chosen(monkeypatch, taken, fixed, **ports) == chosen


@pytest.mark.parametrize(
    ("taken", "fixed", "flag"),
    [
        ((8000,), ("port",), "--port 8000"),
        ((8001,), ("grpc_port",), "--grpc-port 8001"),
        (range(8000, 9000), (), "--port 8000"),
    ],
)
def test_a_port_that_was_named_and_a_full_range_are_refused_by_flag(monkeypatch, taken, fixed, flag):
    with pytest.raises(ConfigError, match=flag):
        _chosen(monkeypatch, taken, fixed)


@pytest.mark.parametrize(
    ("arguments", "variables", "fixed"),
    [((), {}, set()), (("--port", "8000"), {}, {"port"}), ((), {"TRIPTYCH_GRPC_PORT": "9"}, {"grpc_port"})],
)
def test_a_port_is_named_by_its_flag_or_its_variable(monkeypatch, arguments, variables, fixed):
    calls: list[Collection[str]] = []
    monkeypatch.setattr(serve, "serve_cluster", lambda config, fixed: calls.append(fixed))
    CliRunner().invoke(app, ["serve", *arguments], env=variables, catch_exceptions=False)
    assert calls == [fixed]

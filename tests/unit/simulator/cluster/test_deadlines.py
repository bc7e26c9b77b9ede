"""The simulated encoders' queues follow deadlines as the proxy's do, since they are the proxy's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.simulated import COSTS, MIX, PICTURE, run
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.encoders.fair_turns import FairTurns
from triptych.simulator.cluster.context import Simulation
from triptych.simulator.cluster.proxy import SimulatedProxy
from triptych.simulator.cluster.requests import SimulatedRequest
from triptych.simulator.cluster.shape import on_devices

SLOW = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0.5))


def burst(load: object = PICTURE) -> Simulation:
    return run(on_devices(1, 1), load, rate=200, count=60, costs=SLOW)


def test_one_timeout_for_all_leaves_every_request_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    by_slack = [burst(load) for load in (PICTURE, MIX)]
    monkeypatch.setattr(FairTurns, "hurry", lambda *arguments: [])
    assert by_slack == [burst(load) for load in (PICTURE, MIX)]


def test_a_request_with_a_short_timeout_is_answered_before_earlier_ones(monkeypatch):
    patient = burst().records[-1].ttft
    call_of = SimulatedProxy._call

    def call(proxy: SimulatedProxy, request: SimulatedRequest) -> ChatCall:
        made = call_of(proxy, request)
        return replace(made, timeout=60.0) if request.index == 59 else made

    monkeypatch.setattr(SimulatedProxy, "_call", call)
    last = next(record for record in burst().records if record.index == 59)
    assert last.ok and last.ttft < patient / 2

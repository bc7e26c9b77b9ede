"""What requests ask of the PD workers of a model or a role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.base.scaling import ScalingRules, ScalingTarget
from triptych.base.types import WorkerInfo
from triptych.proxy.pd.work import PDWork, token_share, work_of
from triptych.proxy.ports import PDLoadReport
from triptych.proxy.scaling.pools import PDDemand
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.matching import ROLE, ROLES

RULES = ScalingRules(1, 9, 0.1)
#: By address: model, role, requests there and what it reports.
WORKERS = {
    "p": ("a", "prefill", 2, PDLoadReport(2, 0, 0.9, 0.0, 50.0)),
    "d": ("a", "decode", 5, PDLoadReport(5, 0, 0.4, 0.0, 25.0)),
    "b": ("b", "both", 3, PDLoadReport(3, 0, 0.3, 0.0, 300.0)),
}


def request(model: str, address: str, *, prefills: bool = False, successor: str = "") -> Any:
    return SimpleNamespace(
        call=SimpleNamespace(model=model),
        pd_address=address,
        successor_link=SimpleNamespace(address=successor) if successor else None,
        lifecycle=SimpleNamespace(awaits_prefill=prefills, prompt_tokens=100),
    )


REQUESTS = [
    *(request("a", "p", prefills=True), request("a", "p", successor="d"), request("a", "", prefills=True)),
    *(*[request("a", "d")] * 4, *[request("b", "b")] * 2, request("b", "b", prefills=True)),
    request("b", "", prefills=True),
]


def work(**target: str) -> PDWork:
    known = KnownWorkers()
    links: dict[str, Any] = {}
    for address, (model, role, count, report) in WORKERS.items():
        info = WorkerInfo(address, "pd", address, model, model, capacity={ROLE: ROLES.index(role)})
        known.workers["pd", address] = Worker(info)
        links[address] = SimpleNamespace(
            address=address, in_flight=count, load=lambda now, report=report: report
        )
    asked = ScalingTarget("pd", **target)
    return work_of(asked, RULES, REQUESTS, lambda each: not each.pd_address, links, known, 0.0)


def test_a_models_requests_are_its_own_and_all_of_them_those_of_the_pool() -> None:
    whole, a, b = work(), work(model="a"), work(model="b")
    assert (whole.in_flight, whole.unplaced) == (11, 2)
    # One of them is at two workers, and counts once.
    assert (a.in_flight, a.unplaced) == (2 + 5 - 1 + 1, 1)
    assert (b.in_flight, b.unplaced) == (3 + 1, 1)
    assert (whole.prompts.items.known, a.prompts.items.known, b.prompts.items.known) == (4.0, 2.0, 2.0)


def test_prompts_ask_for_prefill_workers_and_what_goes_on_for_decode_workers() -> None:
    prefill, decode = work(model="a", role="prefill"), work(model="a", role="decode")
    assert (prefill.in_flight, prefill.unplaced, prefill.prompts.items.known) == (3, 1, 2.0)
    assert (decode.in_flight, decode.unplaced, decode.prompts.items.known) == (5, 0, 0.0)
    assert decode.kv_usage == pytest.approx(0.4)
    # Five requests share 25 tokens a second: a token takes each 0.2 s, twice what it may.
    assert decode.token_usage == pytest.approx(2.0) and prefill.token_usage == 0.0


def test_slow_tokens_ask_for_decode_workers_as_slots_and_kv_caches_do() -> None:
    held = PDDemand()
    for second in range(600):
        demand = held.poll(work(model="a", role="decode"), 256, float(second))
    assert demand.slow == pytest.approx(2.0, rel=1e-3)


def test_a_request_alone_is_as_fast_as_it_gets() -> None:
    assert token_share(1, PDLoadReport(1, 0, 0.1, 0.0, 2.0), 0.1) == 0.0
    assert token_share(4, None, 0.1) == token_share(4, PDLoadReport(4, 0, 0.1, 0.0, 0.0), 0.1) == 0.0


def test_items_are_encoded_by_their_own_models_encoders_unless_only_another_ones_are_there() -> None:
    known = KnownWorkers()
    assert known.encoded_by("shared", "b") == "b"
    known.declare(WorkerInfo("e", "encoder", "i", "ka", "a", ("shared",)))
    assert known.encoded_by("shared", "b") == "a"
    known.declare(WorkerInfo("f", "encoder", "j", "kb", "b", ("shared",)))
    assert known.encoded_by("shared", "b") == "b" and known.encoded_by("shared", "a") == "a"

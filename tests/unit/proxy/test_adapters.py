"""LoRA adapters as the proxy knows them: names that requests may use, and the workers that have each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.errors import InvalidRequest, NotFound
from triptych.base.types import SamplingParams, WorkerInfo
from triptych.proxy.call.chat import ChatCall, ChatMessage
from triptych.proxy.splitter import prompt_chain
from triptych.proxy.workers import Binding, KnownWorkers, Worker

PD = WorkerInfo("p:1", "pd", "i", "key", "qwen", capacity={"max_model_len": 4096})


def known(*infos: WorkerInfo) -> KnownWorkers:
    workers = KnownWorkers()
    for at, info in enumerate(infos):
        info = replace(info, address=f"w:{at}")
        workers.workers[info.pool, info.address] = Worker(info)
        workers.declare(info)
    return workers


def test_adapters_are_named_beside_the_model_that_they_are_of() -> None:
    workers = known(PD, replace(PD, adapters={"sql": "1", "chat": "2"}))
    assert (workers.models(), workers.adapters()) == (["qwen"], ["chat", "sql"])
    assert [workers.base_of(name) for name in ("sql", "qwen", "other")] == ["qwen", "", ""]
    assert workers.resolve_model("sql") == "sql"
    # Without a name a request means the model, of which there is one.
    assert workers.resolve_model("") == "qwen"
    with pytest.raises(NotFound, match="there is qwen, chat, sql") as error:
        workers.resolve_model("sqlite")
    assert error.value.status == 404


async def test_a_request_is_bound_to_the_adapters_weights_and_goes_to_workers_that_have_them() -> None:
    plain, old, new = PD, replace(PD, adapters={"sql": "old"}), replace(PD, adapters={"sql": "new"})
    workers = known(old, plain, new)
    bound = await workers.bind("sql", media=False)
    assert bound == Binding("key", "", "new"), "the newest"
    assert [bound.served_by(info) for info in (plain, old, new)] == [False, False, True]
    workers.workers["pd", "w:2"].alive = False
    assert await workers.bind("sql", media=False) == Binding("key", "", "old"), "the one that is there"
    alone = await workers.bind("qwen", media=False)
    assert [alone.served_by(info) for info in (plain, old, new)] == [True] * 3
    assert not alone.served_by(replace(PD, model_key="other"))


async def test_an_adapter_is_bound_to_the_model_key_of_a_worker_that_has_it() -> None:
    older = replace(PD, model_key="older", adapters={"sql": "1"})
    workers = known(older, PD)
    assert (await workers.bind("sql", media=False)).model_key == "older"
    assert (await workers.bind("qwen", media=False)).model_key == "key"


def test_lengths_are_those_of_workers_that_have_the_adapter() -> None:
    workers = known(PD, replace(PD, capacity={"max_model_len": 512}, adapters={"sql": "1"}))
    assert sorted(workers.limits_of("qwen")) == [512, 4096]
    assert workers.limits_of("sql") == [512]


def test_a_model_goes_before_an_adapter_of_its_name_and_of_two_models_the_first() -> None:
    workers = known(replace(PD, adapters={"b": "1", "sql": "2"}), replace(PD, model_key="k2", model="b"))
    assert (workers.base_of("b"), workers.adapters()) == ("", ["sql"])
    workers.declare(replace(PD, model_key="k2", model="b", adapters={"sql": "3"}))
    assert workers.base_of("sql") == "b"


def test_a_key_sees_and_uses_what_it_is_allowed_alone() -> None:
    workers = known(replace(PD, adapters={"sql": "1", "chat": "2"}), replace(PD, model_key="k2", model="b"))
    allowed = frozenset({"qwen", "sql", "gone"})
    assert (workers.models(allowed), workers.adapters(allowed)) == (["qwen"], ["sql"])
    assert workers.resolve_model("", allowed) == "qwen"
    for name in ("chat", "b", "nothing"):
        with pytest.raises(NotFound, match="there is qwen, sql$"):
            workers.resolve_model(name, allowed)
    with pytest.raises(InvalidRequest, match="must name one of sql"):
        workers.resolve_model("", frozenset({"sql"}))
    with pytest.raises(NotFound, match="none for this key"):
        workers.resolve_model("qwen", frozenset({"gone"}))


def test_prefixes_of_two_adapters_are_no_reason_for_one_worker() -> None:
    call = ChatCall("r", "qwen", (ChatMessage("user", "x"),), SamplingParams(), 10.0)
    chains = [prompt_chain(replace(call, adapter=name), "hello") for name in ("", "sql", "chat")]
    assert len(set(chains)) == 3

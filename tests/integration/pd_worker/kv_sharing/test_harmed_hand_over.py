"""KV that a decode worker cannot use, or finds no more, is computed there, and the answer is its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.engine.pd_serving import served_model, serving, tiny_model
from support.engine.sharing import LOADED, blocks_in, damage_blocks, hold
from support.stores.server import StoreServer
from triptych.pd_worker.kv_sharing import prefix_sharing, stored_kv
from triptych.pd_worker.kv_sharing.stored_kv import StoredKV
from triptych.pd_worker.native import NativeWorker
from triptych.protos import pd_pb2

TEXT = "Say something about the weather, and then about the sea, the hills and all that lies behind them. "
SAMPLING = {"max_tokens": 80, "ignore_eos": True, "temperature": 0.0}
MINE, OTHERS = "\0004:mine", "\0006:others"


@dataclass(frozen=True)
class Harm:
    """What is done between an offer and the hand-over, or is otherwise at the decode worker."""

    to_store: Callable[[StoreServer], object] = lambda server: None
    patch: Callable[[pytest.MonkeyPatch], object] = lambda monkeypatch: None
    flags: dict[str, Any] = field(default_factory=dict)
    salt: str = MINE


def other_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_kv, "LAYOUT_VERSION", stored_kv.LAYOUT_VERSION + 1)


def other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_sharing, "StoredKV", functools.partial(StoredKV, ranks=2))


HARMS = {
    "a store that was flushed": Harm(to_store=lambda server: server.call("FLUSHALL")),
    "damaged values": Harm(to_store=damage_blocks),
    "another dtype": Harm(flags={"dtype": "bfloat16"}),
    "another block size": Harm(flags={"block_size": 32}),
    "another layout": Harm(patch=other_layout),
    "another number of ranks": Harm(patch=other_ranks),
    "another tenant": Harm(salt=OTHERS),
}


def loaded(worker: NativeWorker) -> float:
    registry = worker.engine._metrics._metrics.registry
    return registry.get_sample_value(LOADED, {"model_name": "tiny"}) or 0.0


@pytest.mark.parametrize("name", ["nothing", *HARMS])
async def test_what_a_decode_worker_cannot_use_is_computed(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, harm = served_model("qwen3_vl"), HARMS.get(name, Harm())
    async with serving(model, server.url, role="prefill") as (first, p):
        hold(first.engine)
        submit = p.message("r", TEXT, **SAMPLING)
        submit.salt = MINE
        await p.submit(submit)
        await p.has("r", "offer")
        whole = await p.until("r")
    assert blocks_in(server)
    harm.to_store(server)
    harm.patch(monkeypatch)
    resume = pd_pb2.Resume(
        prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:5], planned=True
    )
    other = tiny_model("qwen3_vl", **harm.flags) if harm.flags else model
    async with serving(other, server.url, role="decode", **harm.flags) as (second, d):
        for request_id, salt in (("alone", "\0005:alone"), ("handed", harm.salt)):
            assert loaded(second) == 0
            submit = d.message(request_id, "", attempt=2, resume=resume, **SAMPLING)
            submit.salt = salt
            assert (await d.submit(submit)).status == pd_pb2.SubmitReply.STATUS_QUEUED
            await d.until(request_id)
        assert (loaded(second) > 0) is (name == "nothing")
        assert d.answers["handed"].token_ids == d.answers["alone"].token_ids
        if not harm.flags.get("dtype"):
            assert d.answers["alone"].token_ids == whole.token_ids

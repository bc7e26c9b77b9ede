"""Starts of both kinds of workers that cannot work: refused at once, by the flag."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.encoder_worker import service as encoder_service
from triptych.pd_worker import service as pd_service

Start = Callable[..., Any]


def encoder(**flags: Any) -> Any:
    return encoder_service.run(EncoderConfig(**flags))


def pd(**flags: Any) -> Any:
    return pd_service.run(PDConfig(**flags))


@pytest.fixture
def good(store_url: str) -> dict[str, Any]:
    return {"store": store_url, "model": str(build_checkpoint("qwen3_vl")), "threads": 1}


OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"store": ""}, "--store"),
    ({"store": "unix:///nowhere/store.sock"}, "--store"),
    ({"host": "0.0.0.0"}, "--internal-token"),
    ({"host": "0.0.0.0", "internal_token": "t"}, "--tls-cert-file"),
    ({"host": "0.0.0.0", "internal_token": "t", "insecure": True}, "--advertise"),
    ({"advertise": "0.0.0.0:1"}, "--advertise"),
    ({"device": "toaster"}, "--device"),
    ({"device": "cuda:99"}, "--device"),
    ({"model": "/nowhere"}, "MODEL"),
]
OF_PD = [({"kv_memory": 1000}, "--kv-memory"), ({"max_model_len": 10_000_000}, "--max-model-len")]


@pytest.mark.parametrize(
    ("start", "flags", "named"),
    [(start, *row) for start in (encoder, pd) for row in OF_BOTH] + [(pd, *row) for row in OF_PD],
)
async def test_what_cannot_work_is_refused_at_the_start(good, start, flags, named):
    with pytest.raises(ConfigError, match=named):
        await start(**{**good, **flags})


@pytest.mark.parametrize("flag", ["port", "metrics_port"])
@pytest.mark.parametrize("start", [encoder, pd])
async def test_a_taken_port_is_refused_at_the_start(good: dict[str, Any], start: Start, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="already in use"):
            await start(**good, **{flag: taken.getsockname()[1]})

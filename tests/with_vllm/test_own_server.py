"""A vLLM that a PD worker starts for itself: the longest request that it can hold, its places, its token."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.data.adapters import write_adapter
from support.vllm_engine.server import HOME, vllm_environment
from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.pd_worker.vllm.connection import connected
from triptych.pd_worker.vllm.own_server import own_server, with_dtype
from triptych.pd_worker.vllm.worker import load_front_model, proven_tickets

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

#: More than a gibibyte of KV cache can hold.
TOKENS = 4_000_000
TOKEN = "t" * 32


@pytest.fixture
def long_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, which says that its requests may be very long."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "long"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def test_it_takes_what_its_memory_holds_and_says_so(long_checkpoint, monkeypatch):
    for name, value in vllm_environment().items():
        monkeypatch.setenv(name, value)
    config = with_dtype(
        PDConfig(model=str(long_checkpoint), store="redis://127.0.0.1:1/0", engine="vllm", dtype="float32")
    )
    program = str(HOME / "venv" / "bin" / "vllm")
    async with (
        asyncio.timeout(500),
        own_server(config, program, asyncio.Event(), TOKEN) as served,
        connected(served, asyncio.Event()) as engine,
    ):
        assert engine is not None
        longest = engine.info.max_model_len
        assert 0 < longest < TOKENS
        assert engine.info.max_num_seqs > PDConfig().max_num_seqs, "its own number"
        assert load_front_model(served, longest).prompts._max_model_len == longest, "as the door checks"
        with pytest.raises(ConfigError, match="--max-model-len"):
            load_front_model(replace(served, max_model_len=TOKENS), longest)
        assert await proven_tickets(served, engine, TOKEN) is not None
        assert await proven_tickets(served, engine, "u" * 32) is None


async def test_it_has_the_adapters_and_the_drafts_that_it_is_given(checkpoint, tmp_path, monkeypatch):
    for name, value in vllm_environment().items():
        monkeypatch.setenv(name, value)
    adapter = write_adapter(checkpoint, tmp_path / "sql", 1)
    config = PDConfig(
        model=str(checkpoint),
        store="redis://127.0.0.1:1/0",
        engine="vllm",
        dtype="float32",
        max_model_len=2048,
        lora_modules=f"sql={adapter}",
        speculative_config='{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}',
    )
    program = str(HOME / "venv" / "bin" / "vllm")
    async with (
        asyncio.timeout(500),
        own_server(with_dtype(config), program, asyncio.Event(), TOKEN) as served,
        connected(served, asyncio.Event()) as engine,
    ):
        assert engine is not None
        assert (engine.info.adapters, engine.info.speculates) == (("sql",), True)

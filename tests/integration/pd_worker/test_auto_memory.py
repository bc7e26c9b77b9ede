"""--kv-memory auto of a PD worker, and decodes that are gathered in groups."""

from __future__ import annotations

import logging

import pytest

from support.data.oracle import assert_exact
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference
from support.engine.pd_serving import tiny_model
from triptych.base.config import MIB
from triptych.base.errors import ConfigError
from triptych.pd_worker.attention.metadata import plan_gathers
from triptych.pd_worker.ranks import share
from triptych.pd_worker.runner import batch

LONG = Prompt(" ".join(["Say something about the weather, and then about the sea."] * 8))
SHORT = [Prompt("Say something about the weather, and then about the sea."), Prompt("Name five rivers.")]


def test_a_worker_without_the_flag_finds_its_memory_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = tiny_model("qwen3_vl", kv_memory=0, max_num_seqs=3)
    longest = -(-512 // 16)
    assert model.kv_memory == 3 * longest * 2 * 3 * 16 * 2 * 16 * 4, "three requests of 512 tokens"
    assert "memory of cpu" in caplog.text and "KV cache (--kv-memory)" in caplog.text


def test_memory_that_holds_nothing_is_refused_with_the_table() -> None:
    with pytest.raises(ConfigError, match=r"nothing is left for the KV cache(.|\n)*of this worker"):
        tiny_model("qwen3_vl", kv_memory=0, device_memory=MIB)


def test_a_length_that_the_memory_left_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow:
        share = 1.0

        def free(self) -> int:
            return 40 * MIB

        def used(self) -> int:
            return 0

        def reset_peak(self) -> None:
            return

        def peak(self) -> int:
            return 0

    monkeypatch.setattr(share, "memory_of", lambda device: Narrow())
    flags = {"kv_memory": 0, "max_model_len": 4096, "max_num_seqs": 1}
    with pytest.raises(ConfigError, match="holds no request of --max-model-len 4096"):
        tiny_model("qwen3_vl", encoder_cache_memory=28 * MIB, **flags)
    assert tiny_model("qwen3_vl", encoder_cache_memory=MIB, **flags).kv_memory > 0


@pytest.mark.parametrize(
    ("family", "backend"), [("qwen3_vl", "sdpa"), ("llava", "sdpa"), ("qwen3_vl", "blockwise")]
)
def test_decodes_that_are_gathered_in_groups_answer_as_generate(
    monkeypatch: pytest.MonkeyPatch, family: str, backend: str
) -> None:
    planned: list[int] = []

    def counted(blocks: list[int], most: int) -> object:
        groups = plan_gathers(blocks, 8)
        planned.append(len(groups))
        return groups

    monkeypatch.setattr(batch, "plan_gathers", counted)
    monkeypatch.setattr(batch, "attends_in_runs", lambda runs: False)
    checkpoint = Checkpoint.open(family)
    prompts = [LONG, *SHORT, SHORT[0], LONG]
    results = [reference(checkpoint.path, prompt, 24) for prompt in prompts]
    with engine_cell(checkpoint, block_size=8, max_num_batched_tokens=64, attention_backend=backend) as cell:
        assert_exact(results, cell.answer(prompts, 24), min_distinct=10)
        cell.assert_at_rest()
    assert max(planned) >= 3

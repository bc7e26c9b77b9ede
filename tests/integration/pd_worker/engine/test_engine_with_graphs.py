"""Engines whose decode steps are graphs, against transformers' `generate`.

`recorded` replays the operators of one recorded run, as a CUDA graph does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from support.data.oracle import assert_exact
from support.encdec.batches import ENC_DEC, answers_in_batches
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.prompts import DOG, MIXED, ONE, TEXT
from support.graphs import RecordingBackend
from support.matrix import matrix
from triptych.base.delta import Delta
from triptych.base.errors import ConfigError, InternalError
from triptych.ec_connector.base import EncoderOutput
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.runner import graph_start

GRAPHS = {"decode_graphs": "static", "max_num_seqs": 4, "block_size": 8}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_start, "graph_backend", lambda mode, device, flag: RecordingBackend())


def test_requests_that_end_at_different_steps_answer_as_generate(checkpoint: Checkpoint) -> None:
    """Batches shrink, and grow again by requests that waited for a place."""
    lengths = [24, 9, 17, 4, 24, 12]
    prompts = [*MIXED, TEXT, ONE]
    results = [reference(checkpoint.path, prompt, 24) for prompt in prompts]
    with engine_cell(checkpoint, **GRAPHS) as cell:
        requests = [
            cell.request(prompt, result.prompt_token_ids, length)
            for prompt, result, length in zip(prompts, results, lengths, strict=True)
        ]
        outputs = cell.finish(requests)
        assert outputs == [r.token_ids[:length] for r, length in zip(results, lengths, strict=True)]
        assert cell.metric("triptych_pd_graph_steps_total") >= 20
        cell.assert_at_rest()


@pytest.mark.parametrize("preemption", matrix(["swap", "recompute"]))
def test_preempted_requests_answer_alike(checkpoint: Checkpoint, preemption: str) -> None:
    geometry = checkpoint.decoder.geometry
    block = 2 * geometry.num_layers * 8 * geometry.num_kv_heads * geometry.head_dim * 4
    flags = {**GRAPHS, "kv_memory": 26 * block, "max_model_len": 200, "prefix_caching": False}
    prompts = [ONE, MIXED[3], TEXT, ONE]
    with engine_cell(checkpoint, preemption=preemption, **flags) as cell:
        results = [reference(checkpoint.path, prompt, 24) for prompt in prompts]
        assert_exact(results, cell.answer(prompts, 24), min_distinct=10)
        assert cell.metric("vllm:num_preemptions_total") > 0
        assert cell.metric("triptych_pd_graph_steps_total") > 0
        cell.assert_at_rest()


def test_a_request_that_is_no_number_ends_and_those_beside_it_are_exact(checkpoint: Checkpoint) -> None:
    others = [TEXT, Prompt("And this?", (DOG,))]
    expected = [reference(checkpoint.path, prompt, 8).token_ids for prompt in others]
    with engine_cell(checkpoint, kv_memory=1 << 19, prefix_caching=False, **GRAPHS) as cell:
        request = cell.request(ONE, reference(checkpoint.path, ONE, 8).prompt_token_ids, 8)
        [feature] = request.features
        rows = checkpoint.rows(feature.mm_hash).clone()
        rows[-1, 3] = float("nan")
        cell.store[feature.mm_hash] = EncoderOutput(feature.plan, rows)
        cell.engine.submit(request)
        assert cell.answer(others, 8) == expected
        assert cell.wait(request.request_id, "finished").error.code == InternalError.code
        cell.assert_at_rest()
        cache = cell.engine.runner.kv_cache
        assert all(tensor.isfinite().all() for tensor in (*cache.keys, *cache.values))


def test_what_a_step_computes_in_half_precision_is_what_it_computes_without_graphs() -> None:
    """Up to rounding: which requests share a batch, and so the shape of its matrix products, varies."""
    half = Checkpoint.open("llava", dtype=torch.float16)
    with engine_cell(half, **{**GRAPHS, "decode_graphs": "off"}) as cell:
        expected = distributions(cell, MIXED, 8)
    with engine_cell(half, **GRAPHS) as cell:
        computed = distributions(cell, MIXED, 8)
        assert cell.metric("triptych_pd_graph_steps_total") > 0
    same_tokens = 0
    for without, graphs in zip(expected, computed, strict=True):
        for one, other in zip(without, graphs, strict=True):
            assert dict(one.top)[other.chosen[0]] == pytest.approx(other.chosen[1], abs=0.02)
            assert dict(other.top)[one.chosen[0]] == pytest.approx(one.chosen[1], abs=0.02)
            if one.chosen[0] != other.chosen[0]:
                # A tie: from here on the two answers have different contexts.
                break
            same_tokens += 1
    assert same_tokens >= 16


def distributions(cell: EngineCell, prompts: Sequence[Prompt], max_tokens: int) -> list[list[RawLogprobs]]:
    """The likeliest tokens at every output position of each prompt."""
    requests = []
    for prompt in prompts:
        token_ids = reference(cell.checkpoint.path, prompt, max_tokens).prompt_token_ids
        request = cell.request(prompt, token_ids, max_tokens)
        request.sampling = replace(request.sampling, logprobs=5)
        requests.append(request)
    cell.finish(requests)
    found: dict[str, list[RawLogprobs]] = {request.request_id: [] for request in requests}
    for event in cell.events:
        if isinstance(event, Delta):
            found[event.request_id].extend(event.logprobs)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_mixed_prompts_match_over_64_tokens(family: str, recorded: None) -> None:
    flags = {"max_num_batched_tokens": 33, **GRAPHS}
    with engine_cell(Checkpoint.open(family), **flags) as cell:
        results = [reference(cell.checkpoint.path, prompt, 64) for prompt in MIXED]
        for _ in range(2):
            assert_exact(results, cell.answer(MIXED, 64), min_distinct=20)
        assert cell.metric("vllm:prefix_cache_hits_total") > 0
        assert cell.metric("triptych_pd_graph_steps_total") > 100
        cell.assert_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("family", ENC_DEC)
def test_every_encoder_decoder_family_in_batches_of_one_to_eight(family: str, recorded: None) -> None:
    answers_in_batches(family, range(1, 9), decode_graphs="static")


class Failing(RecordingBackend):
    def capture(self, run: object) -> None:  # type: ignore[override]
        raise RuntimeError("no room for a graph")


def test_a_capture_that_fails_is_an_error_that_names_the_flag_and_the_remedy(checkpoint, monkeypatch):
    monkeypatch.setattr(graph_start, "graph_backend", lambda mode, device, flag: Failing())
    with (
        pytest.raises(ConfigError, match="--decode-graphs static: .* no room for a graph; use .* off"),
        engine_cell(checkpoint, **GRAPHS),
    ):
        pass


def test_with_auto_a_capture_that_fails_is_a_warning_and_steps_run_without_graphs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_start, "graph_backend", lambda mode, device, flag: Failing())
    monkeypatch.setattr("triptych.pd_worker.native.uses_graphs", lambda config, device, geometry: True)
    with caplog.at_level(logging.WARNING), engine_cell(checkpoint, decode_graphs="auto") as cell:
        assert "without graphs" in caplog.text
        assert cell.answer([ONE], 8) == [reference(checkpoint.path, ONE, 8).token_ids]
        assert cell.metric("triptych_pd_graph_steps_total") == 0

"""Encoder-decoder models through the engine against transformers' `generate`, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.sounds import sound
from support.encdec.batches import ENC_DEC, answers_in_batches
from support.encdec.cell import EncDecCheckpoint
from support.encdec.oracle import Inputs, audio_inputs
from support.encdec.oracle import greedy as oracle
from support.engine.engine_cell import EngineCell, engine_cell
from support.matrix import matrix
from triptych.base.delta import Delta
from triptych.models.registry import generation_defaults

TOKENS = 32
LENGTHS = (5, 23, 16, 1, 40, 9, 33, 12)


@pytest.fixture(scope="module")
def bart() -> EncDecCheckpoint:
    return EncDecCheckpoint.open(build_checkpoint("bart"))


@pytest.fixture(scope="module")
def t5() -> EncDecCheckpoint:
    return EncDecCheckpoint.open(build_checkpoint("t5"))


@pytest.fixture(scope="module")
def whisper() -> EncDecCheckpoint:
    return EncDecCheckpoint.open(build_checkpoint("whisper"))


def text_of(checkpoint: EncDecCheckpoint, length: int, seed: int = 0) -> Inputs:
    """A text of `length` token ids."""
    rng = random.Random(seed * 1000 + length)
    vocab = checkpoint.decoder.geometry.vocab_size
    return {"input_ids": torch.tensor([[rng.randrange(5, vocab) for _ in range(length)]])}


def answers(
    cell: EngineCell, checkpoint: EncDecCheckpoint, lengths: tuple[int, ...], prompt: list[int] | None = None
) -> None:
    """All texts at once, each equal to what transformers says of it alone."""
    prompt = prompt or list(checkpoint.decoder.prompt_defaults({}).token_ids)
    texts = [text_of(checkpoint, length) for length in lengths]
    requests = [checkpoint.request(cell, inputs, prompt, TOKENS) for inputs in texts]
    outputs = cell.finish(requests)
    said = set()
    ends = generation_defaults(checkpoint.path).eos_token_ids
    for inputs, tokens in zip(texts, outputs, strict=True):
        expected = oracle(checkpoint.path, inputs, max_new_tokens=TOKENS, decoder_ids=prompt)
        # The reference ends where an end is said, the engine's output here only by its length.
        assert tokens[: len(expected.token_ids)] == expected.token_ids
        assert len(expected.token_ids) == TOKENS or expected.token_ids[-1] in ends
        said |= set(expected.token_ids)
    assert len(said) >= 20


@pytest.mark.parametrize("backend", matrix(["cpu", "sdpa"]))
def test_t5_answers_alike_in_chunks_and_with_a_prefix(t5: EncDecCheckpoint, backend: str) -> None:
    start = t5.decoder.prompt_defaults({}).start
    prompt = [start, *range(20, 51)]
    flags = {"max_model_len": 128, "max_num_batched_tokens": 16, "block_size": 8}
    with engine_cell(t5, attention_backend=backend, **flags) as cell:
        for _ in range(2):
            answers(cell, t5, LENGTHS[:8], prompt)
        assert cell.metric("vllm:prefix_cache_hits_total") > 0
        cell.assert_at_rest()


@pytest.mark.parametrize(
    ("count", "backend"), matrix([(8, "cpu"), (3, "sdpa"), (1, "cpu"), (4, "cpu")], quick=2)
)
def test_a_batch_of_texts_of_mixed_lengths_answers_as_each_alone(bart, count, backend):
    with engine_cell(bart, max_model_len=128, attention_backend=backend) as cell:
        answers(cell, bart, LENGTHS[:count])
        cell.assert_at_rest()


@pytest.mark.parametrize("family", matrix(["bart", "t5"]))
def test_prepacked_layers_answer_alike(family: str, prepack_all: None) -> None:
    checkpoint = EncDecCheckpoint.open(build_checkpoint(family))
    with engine_cell(checkpoint, max_model_len=128) as cell:
        answers(cell, checkpoint, LENGTHS[:4])


def test_three_tasks_on_one_sound_answer_alike_and_project_it_once(whisper: EncDecCheckpoint) -> None:
    inputs = audio_inputs(whisper.path, sound(3.0, seed=1))
    defaults = generation_defaults(whisper.path)
    tasks = [{}, {"task": "translate"}, {"timestamps": True}]
    with engine_cell(whisper, max_model_len=64) as cell:
        projected = counted(cell, whisper)
        prompts = [list(whisper.decoder.prompt_defaults(task).token_ids) for task in tasks]
        requests = [
            whisper.request(cell, inputs, prompt, TOKENS, rules=whisper.decoder.logits_rules(defaults, task))
            for prompt, task in zip(prompts, tasks, strict=True)
        ]
        outputs = cell.finish(requests)
        assert projected == [1]
        cell.assert_at_rest()
    assert len({tuple(prompt) for prompt in prompts}) == 3
    for prompt, tokens in zip(prompts[:2], outputs[:2], strict=True):
        expected = oracle(whisper.path, inputs, max_new_tokens=TOKENS, decoder_ids=prompt).token_ids
        assert tokens[: len(expected)] == expected
        assert len(set(expected)) >= 20


@pytest.mark.parametrize(("backend", "seconds"), matrix([("cpu", (2, 9)), ("sdpa", (2, 9))]))
def test_sounds_of_a_batch_answer_as_each_alone(whisper, backend, seconds):
    prompt = list(whisper.decoder.prompt_defaults({}).token_ids)
    sounds = [audio_inputs(whisper.path, sound(length, seed=length)) for length in seconds]
    with engine_cell(whisper, max_model_len=64, attention_backend=backend) as cell:
        outputs = cell.finish([whisper.request(cell, inputs, prompt, TOKENS) for inputs in sounds])
        for inputs, tokens in zip(sounds, outputs, strict=True):
            expected = oracle(whisper.path, inputs, max_new_tokens=TOKENS, decoder_ids=prompt).token_ids
            assert tokens[: len(expected)] == expected
        cell.assert_at_rest()


@pytest.mark.parametrize("preemption", matrix(["swap", "recompute"]))
def test_preempted_requests_answer_alike(bart: EncDecCheckpoint, preemption: str) -> None:
    geometry = bart.decoder.geometry
    block = 2 * geometry.num_layers * 4 * geometry.num_kv_heads * geometry.head_dim * 4
    flags = {"block_size": 4, "kv_memory": 26 * block, "max_model_len": 64, "preemption": preemption}
    with engine_cell(bart, **flags) as cell:
        answers(cell, bart, (23, 9, 16, 31))
        assert cell.metric("vllm:num_preemptions_total") > 0
        cell.assert_at_rest()


def test_choices_of_one_text_share_its_table_and_differ_by_their_seeds_alone(bart: EncDecCheckpoint) -> None:
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    inputs = text_of(bart, 23)
    with engine_cell(bart, max_model_len=128) as cell:
        projected = counted(cell, bart)
        requests = [bart.request(cell, inputs, prompt, TOKENS) for _ in range(3)]
        for choice, request in enumerate(requests):
            request.sampling = replace(request.sampling, temperature=1.0, seed=7, choice=choice)
        together = cell.finish(requests)
        assert projected == [1]
    assert len({tuple(tokens) for tokens in together}) == 3
    with engine_cell(bart, max_model_len=128) as cell:
        for choice, tokens in enumerate(together):
            request = bart.request(cell, inputs, prompt, TOKENS)
            request.sampling = replace(request.sampling, temperature=1.0, seed=7, choice=choice)
            assert cell.finish([request]) == [tokens]


def counted(cell: EngineCell, checkpoint: EncDecCheckpoint) -> list[int]:
    """A list whose one number counts the projections from now on."""
    count = [0]
    runner = cell.engine.runner
    project = runner._project

    def counting(projection: Any) -> None:
        count[0] += 1
        project(projection)

    runner._project = counting  # type: ignore[method-assign]
    return count


def test_decode_computes_queries_only_and_prefill_adds_one_projection_of_the_encoder(bart):
    inputs = text_of(bart, 30)
    prompt = [bart.decoder.prompt_defaults({}).start, 0, 11, 12]
    calls: list[tuple[str, int]] = []
    with engine_cell(bart, max_model_len=128) as cell, watched_gemms(bart, calls):
        cell.finish([bart.request(cell, inputs, prompt, 3)])
    layers = bart.decoder.geometry.num_layers
    kv = sorted(call for call in calls if call[0] in ("k_proj", "v_proj"))
    assert kv == [("k_proj", 30)] * layers + [("v_proj", 30)] * layers, "once, over the encoder's rows"
    queries = [rows for name, rows in calls if name == "q_proj"]
    assert queries == [4] * layers + [1] * layers * 2, "a prefill of four tokens and two decodes"


@contextmanager
def watched_gemms(checkpoint: EncDecCheckpoint, calls: list[tuple[str, int]]) -> Iterator[None]:
    """Every product of a cross-attention's projections: its name and how many rows it was of."""
    cross = [m for m in checkpoint.decoder.module.modules() if getattr(m, "is_cross", False)]
    handles = [
        getattr(module, name).register_forward_hook(
            lambda _, given, out, name=name: calls.append((name, out.numel() // out.shape[-1]))
        )
        for module in cross
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    assert len(handles) == 3 * checkpoint.decoder.geometry.num_layers
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_the_table_stays_as_it_was_written_while_others_come_and_go(bart: EncDecCheckpoint) -> None:
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    with engine_cell(bart, max_model_len=128, prefix_caching=False) as cell:
        first = bart.request(cell, text_of(bart, 23), prompt, 90)
        cell.engine.submit(first)
        cell.wait(first.request_id, "tokens")
        manager = cell.engine.scheduler.items.cross
        blocks = list(manager.table("proxy/" + first.request_id + "/1"))
        before = [keys[blocks].clone() for keys in cell.engine.runner.kv_cache.keys]
        cell.finish([bart.request(cell, text_of(bart, n), prompt, 20) for n in (5, 16, 9)])
        cell.wait(first.request_id, "finished")
        after = [keys[blocks] for keys in cell.engine.runner.kv_cache.keys]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_stands_beside_a_request_changes_nothing_of_its_logits(bart: EncDecCheckpoint) -> None:
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    mine = text_of(bart, 23)
    seen = []
    for others in ((), (5,), (40, 1, 33), (23, 16)):
        with engine_cell(bart, max_model_len=128) as cell:
            request = bart.request(cell, mine, prompt, 8)
            request.sampling = replace(request.sampling, logprobs=5)
            crowd = [bart.request(cell, text_of(bart, n, seed=1), prompt, 20) for n in others]
            cell.finish([*crowd[:1], request, *crowd[1:]])
            events = [e for e in cell.events if e.request_id == request.request_id]
            raw = [p for e in events if isinstance(e, Delta) for p in e.logprobs]
            seen.append([pair for position in raw for pair in position.top])
    for other in seen[1:]:
        assert [token for token, _ in other] == [token for token, _ in seen[0]]
        assert [value for _, value in other] == pytest.approx([value for _, value in seen[0]], abs=1e-4)


@pytest.mark.parametrize("family", ["mbart", "trocr"])
def test_a_batch_is_answered_as_by_generate(family: str) -> None:
    answers_in_batches(family, (4,))


@pytest.mark.slow
@pytest.mark.parametrize("family", ENC_DEC)
def test_batches_of_one_to_eight_are_answered_as_by_generate(family: str) -> None:
    answers_in_batches(family, range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa"])
@pytest.mark.parametrize("family", ENC_DEC)
def test_every_backend_answers_as_generate(family: str, backend: str) -> None:
    answers_in_batches(family, (1, 5), backend=backend)

"""Penalties, bias, seeds and log-probabilities through the real worker, against transformers."""

from __future__ import annotations

import pytest

from support.data.oracle import generate
from triptych.pd_worker.core.sampling import bad_word_ids
from triptych.protos import pd_pb2

TEXT = "Tell me of the sea, please."
GREEDY = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}


async def ask(client, name: str, text: str = TEXT, **fields):
    reply = await client.submit(client.message(name, text, **fields))
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


async def test_repetition_penalty_gives_what_generate_gives(client, model):
    messages = [{"role": "user", "content": TEXT}]
    plain, _ = generate(model.path, messages, max_new_tokens=40)
    expected, _ = generate(model.path, messages, max_new_tokens=40, repetition_penalty=1.8)
    assert expected != plain
    answer = await ask(client, "penalised", repetition_penalty=1.8, **GREEDY)
    assert answer.token_ids == expected


async def test_logprobs_are_the_log_softmax_of_the_models_own_logits(client, model):
    messages = [{"role": "user", "content": TEXT}]
    expected, logits = generate(model.path, messages, max_new_tokens=40, repetition_penalty=1.8)
    reference = logits.log_softmax(-1)
    answer = await ask(client, "probed", repetition_penalty=1.8, logprobs=20, **GREEDY)
    none = await ask(client, "chosen-only", logprobs=0, **GREEDY)
    plain = await ask(client, "without", **GREEDY)
    assert answer.token_ids == expected
    assert [position.chosen.token_id for position in answer.logprobs] == expected
    for row, position in zip(reference, answer.logprobs, strict=True):
        assert position.chosen.logprob == pytest.approx(float(row[position.chosen.token_id]), abs=1e-4)
        values = [token.logprob for token in position.top]
        assert values == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)
        assert values == [pytest.approx(float(row[token.token_id]), abs=1e-4) for token in position.top]
    assert [len(position.top) for position in none.logprobs] == [0] * 40
    assert not plain.logprobs


async def test_a_bad_word_stays_away_also_where_a_resume_parts_its_tokens(client, model):
    messages = [{"role": "user", "content": TEXT}]
    plain, _ = generate(model.path, messages, max_new_tokens=40)
    word = next(
        text
        for at in range(5, 30)
        if (text := model.tokenizer.decode(plain[at : at + 2])).isprintable()
        and model.tokenizer.encode(text, add_special_tokens=False).ids == plain[at : at + 2]
        and text == text.lstrip()
    )
    banned = bad_word_ids([word], lambda text: model.tokenizer.encode(text, add_special_tokens=False).ids)
    expected, _ = generate(model.path, messages, max_new_tokens=40, bad_words_ids=list(map(list, banned)))
    whole = await ask(client, "whole", bad_words=[word], **GREEDY)
    for split in range(1, 40, 3):
        resume = pd_pb2.Resume(
            prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:split]
        )
        given = {"attempt": 2, "resume": resume, "bad_words": [word], **GREEDY}
        resumed = await ask(client, f"resumed-{split}", "", **given)
        assert resumed.token_ids == whole.token_ids
    assert whole.token_ids != plain
    assert word not in model.tokenizer.decode(whole.token_ids)
    assert whole.token_ids == expected


async def test_stop_strings_hold_back_text_and_not_logprobs(client):
    free = await ask(client, "free", max_tokens=30, ignore_eos=True, temperature=1.0, seed=4)
    stop = free.text[8:11]
    answer = await ask(
        client, "cut", max_tokens=30, ignore_eos=True, temperature=1.0, seed=4, stop=[stop], logprobs=0
    )
    assert answer.finished.reason == "stop"
    assert free.text.startswith(answer.text)
    assert stop not in answer.text
    assert [position.chosen.token_id for position in answer.logprobs] == answer.token_ids


async def test_a_top_k_above_all_tokens_does_no_harm(client):
    assert (await ask(client, "all", max_tokens=2, top_k=2**32 - 1)).finished.completion_tokens

"""Prompts that no chat template touches, and tokenising without generating."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

from transformers import AutoTokenizer

from support.waiting import until
from triptych.base.hashing import tenant_digest
from triptych.pd_worker.frontend.input_processor import InputProcessor
from triptych.pd_worker.native import LoadedModel
from triptych.pd_worker.server import LARGE_MESSAGE
from triptych.protos import common_pb2, pd_pb2

TEXT = "<|im_start|>user\nGrüße 你好<|im_end|>"


def ids_of(model: LoadedModel, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model.path)(text)["input_ids"]


def raw(client, name: str, **prompt) -> pd_pb2.SubmitRequest:
    message = client.message(name, "", max_tokens=4, ignore_eos=True, temperature=0.0)
    message.messages = b""
    message.prompt.CopyFrom(pd_pb2.RawPrompt(**prompt))
    return message


async def test_a_text_and_its_token_ids_are_one_prompt(client, model):
    ids = ids_of(model, TEXT)
    await client.submit(raw(client, "text", text=TEXT))
    await client.submit(raw(client, "ids", token_ids=common_pb2.TokenIds(ids=ids)))
    answers = [await client.until(name) for name in ("text", "ids")]
    assert [list(answer.admitted.prompt_token_ids) for answer in answers] == [ids, ids]
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids) == 4


async def test_a_token_that_the_model_has_no_row_for_is_refused_by_the_field(client, model, monkeypatch):
    """Tokenizers of published checkpoints have such: it would fail every request of its step."""
    last = max(ids_of(model, TEXT))
    cut = replace(model.decoder.geometry, vocab_size=last)
    monkeypatch.setattr(model.decoder, "geometry", cut)
    text = await client.submit(raw(client, "text", text=TEXT))
    chat = await client.submit(client.message("chat", "Go", max_tokens=3))
    assert [reply.error.param for reply in (text, chat)] == ["prompt", "messages"]
    assert f"prompt: its text has the token {last}, and the model's vocabulary ends at" in text.error.message


async def test_tokenising_answers_what_submit_would_make(client, model):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Look"}]}]
    text = await client.stub.Tokenize(pd_pb2.TokenizeRequest(prompt=pd_pb2.RawPrompt(text=TEXT)))
    chat = await client.stub.Tokenize(pd_pb2.TokenizeRequest(messages=json.dumps(messages).encode()))
    back = await client.stub.Detokenize(pd_pb2.DetokenizeRequest(token_ids=chat.token_ids))
    bad = await client.stub.Tokenize(pd_pb2.TokenizeRequest(messages=b"{"))
    beyond = await client.stub.Detokenize(pd_pb2.DetokenizeRequest(token_ids=[10**6]))
    assert list(text.token_ids) == ids_of(model, TEXT)
    assert text.max_model_len == 512
    assert list(chat.token_ids).count(model.decoder.image_token_id) == 1
    assert back.text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Look<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bad.error.param == "messages"
    assert beyond.error.param == "tokens"


async def test_a_small_question_is_answered_while_long_ones_of_another_tenant_are(client, monkeypatch):
    tokenize, begun, go_on = InputProcessor.tokenize, [], threading.Event()

    def slowly(processor: InputProcessor, message: pd_pb2.TokenizeRequest) -> pd_pb2.TokenizeReply:
        begun.append(message.tenant)
        if message.ByteSize() > LARGE_MESSAGE:
            go_on.wait(20)
        return tokenize(processor, message)

    def ask(tenant: str, text: str):
        question = pd_pb2.TokenizeRequest(prompt=pd_pb2.RawPrompt(text=text), tenant=tenant_digest(tenant))
        return client.stub.Tokenize(question, timeout=20)

    monkeypatch.setattr(InputProcessor, "tokenize", slowly)
    long = [ask("a", "x " * LARGE_MESSAGE) for _ in range(4)]
    try:
        await until(lambda: begun)
        assert (await ask("b", TEXT)).token_ids
        assert not any(question.done() for question in long)
    finally:
        go_on.set()
    assert all([(await question).max_model_len for question in long])

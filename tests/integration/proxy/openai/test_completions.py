"""POST /v1/completions with the openai package as its client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, InternalServerError

from support.fakes.fake_workers import MODEL, choice_text, whole_text
from support.fakes.proxy_fakes import FakeCluster
from triptych.protos import common_pb2


async def _complete(cluster: FakeCluster, prompt: Any, **options: Any) -> Any:
    return await cluster.client.completions.create(model=MODEL, prompt=prompt, **options)


async def _streamed(cluster: FakeCluster, prompt: Any, **options: Any) -> tuple[dict[int, str], list[Any]]:
    """The text of every choice, and all chunks."""
    chunks = [chunk async for chunk in await _complete(cluster, prompt, stream=True, **options)]
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, chunks


async def test_a_text_goes_to_the_worker_as_it_is(cluster: FakeCluster) -> None:
    reply = await _complete(cluster, "Once", max_tokens=3)
    assert (reply.object, reply.choices[0].text) == ("text_completion", whole_text(3))
    assert (reply.choices[0].finish_reason, reply.choices[0].logprobs) == ("length", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 3)
    submit = cluster.pd_workers[0].submits[0]
    assert (submit.prompt.text, submit.messages) == ("Once", b"")


async def test_token_ids_go_to_the_worker_as_they_are(cluster: FakeCluster) -> None:
    reply = await _complete(cluster, [5, 6], max_tokens=1, extra_body={"return_token_ids": True})
    assert list(cluster.pd_workers[0].submits[0].prompt.token_ids.ids) == [5, 6]
    assert reply.choices[0].token_ids == [1000]
    assert reply.choices[0].prompt_token_ids == [1, 2, 3]


async def test_several_prompts_with_several_choices_are_told_apart(cluster: FakeCluster) -> None:
    reply = await _complete(cluster, ["a", "b"], max_tokens=2, n=2)
    expected = ["".join(choice_text(c, i) for i in range(2)) for c in (0, 1)] * 2
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 8)
    texts, chunks = await _streamed(
        cluster, ["a", "b"], max_tokens=2, n=2, stream_options={"include_usage": True}
    )
    assert [texts[index] for index in range(4)] == expected
    assert chunks[-1].usage.completion_tokens == 8
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == ["length"] * 4


async def test_echo_puts_the_prompt_in_front(cluster: FakeCluster) -> None:
    reply = await _complete(cluster, "Once", max_tokens=2, echo=True)
    assert reply.choices[0].text == "Once" + whole_text(2)
    reply = await _complete(cluster, [[72, 105], [33]], max_tokens=1, echo=True)
    assert [choice.text for choice in reply.choices] == ["Hi" + whole_text(1), "!" + whole_text(1)]
    texts, _ = await _streamed(cluster, "Once", max_tokens=2, echo=True)
    assert texts == {0: "Once" + whole_text(2)}


async def test_an_echo_asks_for_texts_in_a_querys_place_and_names_the_clients_field(
    cluster: FakeCluster,
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await _complete(cluster, [[72], [0x110000]], max_tokens=1, echo=True)
    assert refused.value.param == "prompt"
    asked = len(cluster.pd_workers[0].questions)
    cluster.dispatcher.drain()
    with pytest.raises(InternalServerError, match="stopping"):
        await _complete(cluster, [[72], [73]], max_tokens=1, echo=True)
    assert len(cluster.pd_workers[0].questions) == asked


async def test_a_refusal_of_one_prompt_ends_the_request(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].refusals = [
        common_pb2.Error(code="invalid_request_error", message="prompt: too long", param="prompt")
    ]
    with pytest.raises(BadRequestError, match="too long"):
        await _complete(cluster, ["a", "b", "c"], max_tokens=500)

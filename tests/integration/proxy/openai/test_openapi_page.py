"""What the OpenAPI document promises, held against what is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
from httpx2 import AsyncClient, Response
from jsonschema import Draft202012Validator

from support.fakes.fake_workers import END_TOKEN, FIRST_TIME
from support.fakes.proxy_fakes import FakeCluster
from support.openapi.document import FORM_OPERATIONS, OPERATIONS
from triptych.base.types import Task
from triptych.store.embedding_store import EmbeddingStore

#: A whole segment, from its first timestamp to its last.
SPOKEN = [FIRST_TIME, 72, 105, FIRST_TIME + 100, END_TOKEN]


def _http(cluster: FakeCluster) -> AsyncClient:
    return AsyncClient(base_url=f"http://127.0.0.1:{cluster.port}")


def _check(document: dict[str, Any], path: str, method: str, reply: Response) -> None:
    """The reply is of a status, a type and a shape that the document names."""
    promised = document["paths"][path][method]["responses"][str(reply.status_code)]
    kind = reply.headers["content-type"].split(";")[0]
    schema = promised["content"][kind]["schema"]
    if kind == "application/json":
        root = {**schema, "components": document["components"]}
        Draft202012Validator(root).validate(reply.json())


@pytest.mark.parametrize("task", ["generate", "token_embed"])
async def test_every_example_is_answered_in_the_promised_shape(store: EmbeddingStore, task: Task) -> None:
    cluster = FakeCluster(store)
    cluster.pd_workers[0].task = task
    async with cluster, _http(cluster) as http:
        document = (await http.get("/openapi.json")).json()
        for operation in OPERATIONS:
            if (operation.path == "/pooling") != (task == "token_embed"):
                continue
            for body in (operation.examples or {"": None}).values():
                path = operation.path.replace("{model}", "demo")
                reply = await http.request(operation.method, path, json=body)
                assert reply.status_code == 200, (operation.path, reply.text)
                _check(document, operation.path, operation.method, reply)
                if operation.events and not (body or {}).get("stream"):
                    reply = await http.post(operation.path, json={**(body or {}), "stream": True})
                    assert reply.status_code == 200
                    _check(document, operation.path, operation.method, reply)
        await cluster.at_rest()


EXAMPLES = [(op.path, name, body) for op in OPERATIONS for name, body in (op.encoder_decoder or {}).items()]


@pytest.mark.parametrize(("path", "name", "body"), EXAMPLES, ids=[name for _, name, _ in EXAMPLES])
async def test_examples_for_encoder_decoder_models_are_answered_by_them(store, path, name, body):
    modality = next(iter(body.get("multi_modal_data", {"text": ""})))
    async with FakeCluster(store, modality=modality, encoder_decoder=True) as cluster:
        async with _http(cluster) as http:
            reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        await cluster.at_rest()


async def test_examples_of_forms_are_answered_in_the_promised_shape(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="audio") as cluster, _http(cluster) as http:
        document = (await http.get("/openapi.json")).json()
        for operation in FORM_OPERATIONS:
            for fields in (operation.examples or {}).values():
                cluster.pd_workers[0].answers = [[4000], SPOKEN] if "language" not in fields else [SPOKEN]
                rest = {name: value for name, value in fields.items() if name != "file"}
                file = {"file": (fields["file"].removeprefix("@"), b"RIFF....WAVE")}
                reply = await http.post(operation.path, data=rest, files=file)
                assert reply.status_code == 200, reply.text
                _check(document, operation.path, "post", reply)
        await cluster.at_rest()


async def test_every_refusal_has_the_promised_shape(store: EmbeddingStore) -> None:
    async with FakeCluster(store, max_body=4000) as cluster, _http(cluster) as http:
        document = (await http.get("/openapi.json")).json()
        for operation in OPERATIONS:
            if operation.body is None:
                continue
            example = next(iter(operation.examples.values()))  # type: ignore[union-attr]
            wrong = [b"{", b"", b"[]", b"{}", b"x" * 5000, json.dumps({**example, "model": "none"}).encode()]
            statuses = []
            for body in wrong:
                reply = await http.post(operation.path, content=body)
                _check(document, operation.path, "post", reply)
                statuses.append(reply.status_code)
            assert statuses == [400, 400, 400, 400, 413, 404], operation.path


async def test_another_method_is_refused_and_the_right_one_named(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster, _http(cluster) as http:
        for operation in OPERATIONS:
            reply = await http.request("DELETE", operation.path)
            assert reply.status_code == 405
            assert operation.method.upper() in reply.headers["allow"]


async def test_tokens_are_those_of_the_pd_worker(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster, _http(cluster) as http:
        reply = await http.post("/tokenize", json={"prompt": "Hi"})
        assert reply.json() == {"count": 2, "max_model_len": 4096, "tokens": [72, 105]}
        messages = [{"role": "user", "content": "x"}]
        body = {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
        assert (await http.post("/tokenize", json=body)).json()["tokens"] == [1, 2, 3]
        question = cluster.pd_workers[0].questions[-1]
        assert json.loads(question.messages) == messages
        assert question.template.no_generation_prompt
        assert json.loads(question.template.variables) == {"a": 1}
        assert (await http.post("/detokenize", json={"tokens": [72, 105]})).json() == {"prompt": "Hi"}
        refused = await http.post("/detokenize", json={"tokens": [1 << 30]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
        for wrong in ({}, {"prompt": "x", "messages": messages}, {"prompt": "x", "return_token_strs": True}):
            assert (await http.post("/tokenize", json=wrong)).status_code == 400

"""Pooled requests at vLLM: calls of its pooling endpoint, and the vectors and scores of its answers."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import JsonObject, MMFeature, Task
from triptych.base.vllm_classes import GRIDS
from triptych.models.checkpoint.folder import read_config
from triptych.models.checkpoint.pooling import PoolingDefaults, read_pooling
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.vllm.http.call import range_of
from triptych.pd_worker.vllm.http.replies import EngineGarbage, PooledAnswer

#: vLLM's names of what a server pools for.
_TASKS: dict[Task, str] = {"embed": "embed", "score": "classify"}
_NATIVE = "serve it by --engine native"


@dataclass(frozen=True, slots=True)
class PooledCalls:
    """The calls of one checkpoint; `defaults` are how its server pools. `width`: of an embedding."""

    defaults: PoolingDefaults
    tokenizer: Tokenizer
    width: int

    def check(self, request: EngineRequest) -> None:
        """InvalidRequest for a pooled request that this server does not compute."""
        pooling, defaults = request.pooling, self.defaults
        if pooling is None:
            return
        if defaults.generates:
            raise InvalidRequest(
                f"this worker's engine, vLLM, generates and gives no embeddings of this model: {_NATIVE}",
                param="model",
            )
        if not pooling.scores and defaults.task == "score":
            raise InvalidRequest(
                f"this worker's engine, vLLM, gives scores of this model, no embeddings: {_NATIVE}",
                param="model",
            )
        if not pooling.scores and pooling.method != defaults.method:
            raise InvalidRequest(
                f"pooling: this worker's engine, vLLM, pools {defaults.method}: leave it out, or {_NATIVE}",
                param="pooling",
            )

    def body_of(self, request: EngineRequest) -> JsonObject:
        """The body of the call of a pooled request, whose texts beside pictures are tokenised for it.

        InvalidRequest for pictures and texts that vLLM would read otherwise. vLLM neither cuts vectors nor
        applies the sigmoid here: `result` does, as for the native engine.
        """
        body = task_fields(self.defaults.task)
        # Of model, adapter and tenant: tenants share no blocks of vLLM's prefix cache.
        body |= {"use_activation": False, "cache_salt": request.prefix_root.hex()}
        if request.adapter:
            body["model"] = request.adapter
        if not request.features:
            return body | {"input": [list(request.prompt_token_ids)]}
        return body | self._conversation(request.prompt_token_ids, request.features)

    def _conversation(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> JsonObject:
        """The prompt as one message, since vLLM takes no items beside token ids that it is to pool.

        Its template writes the parts as they are, an item as its placeholder's token. InvalidRequest where
        vLLM would read other tokens.
        """
        parts: list[JsonObject] = []
        end = 0
        for feature in features:
            place, plan = range_of(feature.placement), feature.plan
            if plan.modality != "image" or not plan.grid_thw:
                raise InvalidRequest(
                    f"messages: this worker's engine, vLLM, pools pictures of Qwen's classes only: {_NATIVE}",
                    param="messages",
                )
            parts += self._text(token_ids[end : place["offset"]])
            parts.append(
                {
                    "type": "image_embeds",
                    "image_embeds": {GRIDS[0]: list(plan.grid_thw)},
                    "uuid": feature.mm_hash,
                }
            )
            end = place["offset"] + place["length"]
        parts += self._text(token_ids[end:])
        item = json.dumps(self.tokenizer.id_to_token(token_ids[range_of(features[0].placement)["offset"]]))
        template = (
            "{% for message in messages %}{% for part in message['content'] %}"
            "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ " + item + " }}{% endif %}"
            "{% endfor %}{% endfor %}"
        )
        return {"messages": [{"role": "user", "content": parts}], "chat_template": template}

    def _text(self, token_ids: Sequence[int]) -> list[JsonObject]:
        if not token_ids:
            return []
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        if self.tokenizer.encode(text, add_special_tokens=False).ids != list(token_ids):
            raise InvalidRequest(
                "messages: texts beside pictures hold the words of special tokens, or are cut inside a "
                f"character, which this worker's engine, vLLM, would read otherwise: {_NATIVE}",
                param="messages",
            )
        return [{"type": "text", "text": text}]

    def result(self, request: EngineRequest, answer: PooledAnswer) -> bytes:
        """The vector or score as the native engine gives it; EngineGarbage for an answer that is neither."""
        pooling, count = request.pooling, len(request.prompt_token_ids)
        assert pooling is not None
        if answer.usage.prompt_tokens != count:
            raise EngineGarbage(f"pooled {answer.usage.prompt_tokens} tokens of {count}")
        try:
            row = np.frombuffer(base64.b64decode(answer.data[0].data, validate=True), "<f4")
        except (binascii.Error, ValueError) as error:
            raise EngineGarbage(f"not float32 in base64: {error}") from error
        width = 1 if pooling.scores else self.width
        if len(row) != width or not np.isfinite(row).all():
            raise EngineGarbage(f"pooled {len(row)} numbers, not {width} finite ones")
        if pooling.scores:
            row = 1 / (1 + np.exp(-row))
        elif pooling.dimensions:
            row = row[: pooling.dimensions]
        if not pooling.scores and pooling.normalize:
            row = row / max(float(np.linalg.norm(row)), 1e-12)
        return row.astype("<f4").tobytes()


def probe_of(task: Task) -> JsonObject | None:
    """The body of a call by which a server shows that it pools for `task`; None for one that generates."""
    return None if task == "generate" else task_fields(task) | {"input": [[0]]}


def task_fields(task: Task) -> JsonObject:
    """The fields of every call of the pooling endpoint."""
    return {"task": _TASKS[task], "encoding_format": "base64", "endianness": "little"}


def pooling_flags(path: Path, architecture: str) -> list[str]:
    """vLLM's flags for a checkpoint that generates nothing, as its files say; empty for another.

    A reranker's two tokens become the class's head.
    """
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    defaults = read_pooling(path, tokenizer)
    if defaults.generates:
        return []
    flags = ["--runner", "pooling", "--trust-request-chat-template"]
    if defaults.task == "embed":
        return [
            *flags,
            "--convert",
            "embed",
            "--pooler-config",
            json.dumps({"pooling_type": defaults.method.upper()}),
        ]
    if not defaults.score_ids:
        return [*flags, "--convert", "classify"]
    if len(defaults.score_ids) != 2:
        raise ConfigError(f"MODEL={path} scores by one token, which vLLM does not: use --engine native")
    config = read_config(path)
    stem = architecture.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    overrides = {
        "architectures": [f"{stem}ForSequenceClassification"],
        "classifier_from_token": [tokenizer.id_to_token(token) for token in reversed(defaults.score_ids)],
        "method": "from_2_way_softmax",
        # vLLM reads it in the text model's part, where transformers 5 does not write it.
        "text_config": {"tie_word_embeddings": bool(config.get("tie_word_embeddings"))},
    }
    return [*flags, "--hf-overrides", json.dumps(overrides)]

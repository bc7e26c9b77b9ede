"""Every class is handed over with everything that can be asked for: the answers are those of one worker.

36 requests at once on a checkpoint of a printed seed: greedy, seeded, several choices, log-probabilities,
forms and calls, with and without pictures; then once more, and the worker dies that takes them over.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.stages import hold
from support.data.checkpoints import build_checkpoint
from support.data.traffic import Case, client_of, mixed_cases
from support.engine.sharing import FEW
from support.processes.cluster import Cluster, running_cluster
from support.processes.families import encoded_cases
from support.vllm_engine.checkpoints import reseeded
from support.waiting import within
from support.zoo.checkpoint import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--prefill-threshold", "0")
#: Small steps: a hand-over has the time of its answer.
STEPS = ("--threads", "1", "--max-num-batched-tokens", "64")
REQUESTS, TOKENS = 36, 200
#: Times that they are asked: on a busy machine some answers are over before the decode worker has room.
ROUNDS = 5
CLASSES = {
    "dense": "llava",
    "DeepStack": "qwen3_vl",
    "M-RoPE": "qwen2_5_vl",
    "spans": "Gemma3ForConditionalGeneration",
    "hybrid": "Qwen3_5ForConditionalGeneration",
    "experts": "Qwen3VLMoeForConditionalGeneration",
    "encoder-decoder": "bart",
}
#: Of a class with states of recurrent layers.
MORE = {"hybrid": ("--state-memory", "16MiB")}
NOTE = {
    "type": "object",
    "properties": {"note": {"type": "string", "minLength": 90, "maxLength": 120}},
    "required": ["note"],
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 54, "top_p": 0.9, "top_k": FEW},
    "several choices": {"temperature": 0.8, "seed": 7, "n": 3, "top_k": FEW},
    "log-probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "a form": {"temperature": 0, "guided_regex": "[a-e]{140,180}"},
    "a call": {"temperature": 0, "tools": [TOOL], "tool_choice": "required"},
}
#: The same where there are no conversations.
OF_COMPLETIONS = {**FEATURES, "log-probabilities": {"temperature": 0, "logprobs": 2}}
del OF_COMPLETIONS["a call"]
_WRITES_TOOLS = "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}"


def drawn(name: str, folder: Path, seed: int) -> Path:
    """A checkpoint of the class with weights of this seed, whose template writes tools."""
    made = checkpoint(name) if name.endswith("Generation") else build_checkpoint(name)
    shutil.copytree(made, folder)
    template = folder / "chat_template.jinja"
    if template.exists() and "tools" not in (text := template.read_text(encoding="utf-8")):
        template.write_text(_WRITES_TOOLS + text, encoding="utf-8")
    return reseeded(folder, seed)


class Asked:
    """36 requests, in turn of each kind and with each feature."""

    def __init__(self, name: str, seed: int) -> None:
        self._chats = name != "bart"
        features = FEATURES if self._chats else OF_COMPLETIONS
        self.cases: Sequence[Any] = (
            mixed_cases(REQUESTS, seed=seed)
            if self._chats
            else encoded_cases(name, [f"{case.parts[0]}" for case in mixed_cases(4 * REQUESTS, seed)[::4]])
        )
        # Of the four kinds of `mixed_cases` each feature has its part.
        names = list(features)
        self.features = [names[(at // 4 + at) % len(names)] for at in range(REQUESTS)]
        self._fields = features
        self._tokens = TOKENS if self._chats else TOKENS // 2  # of 256 positions

    async def all(self, cluster: Cluster, salt: str) -> list[dict[str, Any]]:
        """The replies; of another salt each: none finds what another one has computed."""
        async with client_of(cluster.url) as client:
            replies = (self._ask(client, at, f"{salt} {at}") for at in range(REQUESTS))
            return list(await within("all answers", asyncio.gather(*replies)))

    async def _ask(self, client: Any, at: int, salt: str) -> dict[str, Any]:
        case, feature = self.cases[at], self.features[at]
        body = {"model": "", "max_tokens": self._tokens, "cache_salt": salt, "return_token_ids": True}
        body |= self._fields[feature]
        if isinstance(case, Case):
            body["messages"] = case.client_messages()
        else:
            body |= {**case.fields(), "prompt": None, "decoder_prompt": list(case.decoder_ids)}
        if feature not in ("a form", "a call"):
            body["ignore_eos"] = True
        path = "/chat/completions" if self._chats else "/completions"
        label = {"X-Request-ID": f"number-{at}"}
        reply = await client.post(path, body=body, cast_to=object, options={"headers": label})
        assert isinstance(reply, dict)
        return reply

    def handed_over(self, cluster: Cluster) -> list[str]:
        """The feature of each request that has gone on at the decode worker."""
        found = re.findall(r"request number-(\d+) .*goes on at PD worker", cluster.log.read_text())
        return [self.features[int(at)] for at in found]


def assert_equal(asked: Asked, got: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]]) -> None:
    for at, feature in enumerate(asked.features):
        for one, other in zip(got[at]["choices"], whole[at]["choices"], strict=True):
            assert _shown(one) == _shown(other), f"{feature}, {asked.cases[at]}"
            assert _logprobs(one) == pytest.approx(_logprobs(other), abs=1e-3)
        counts = ("prompt_tokens", "completion_tokens")
        assert [got[at]["usage"][each] for each in counts] == [whole[at]["usage"][each] for each in counts]
        # Of its own salt: neither worker had anything of it before.
        assert got[at]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, feature


def _shown(choice: dict[str, Any]) -> dict[str, Any]:
    """All but log-probabilities, which differ in their last digits, and the ids of calls, which are drawn."""
    message = dict(choice.get("message") or {})
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls") or ()]
    return {**choice, "logprobs": None, "message": message}


def _logprobs(choice: dict[str, Any]) -> list[float]:
    found = choice.get("logprobs") or {}
    return found.get("token_logprobs") or [each["logprob"] for each in found.get("content") or ()]


async def killed(cluster: Cluster, asked: Asked, whole: Sequence[dict[str, Any]], salt: str) -> None:
    """All once more: the decode worker dies once it has taken the first ones over."""
    decode, before = cluster.pid("pd-1"), len(asked.handed_over(cluster))
    again = asyncio.create_task(asked.all(cluster, salt))
    await hold("hand-overs", lambda: len(asked.handed_over(cluster)) > before or again.done())
    cluster.kill("pd-1")
    assert_equal(asked, await again, whole)
    await hold("its replacement", lambda: cluster.pids("pd").get("pd-1", decode) != decode)


@pytest.mark.parametrize("kind", CLASSES)
async def test_36_requests_at_once_are_answered_as_by_one_worker(kind: str, tmp_path: Path) -> None:
    name, seed = CLASSES[kind], random.SystemRandom().randrange(1 << 20)
    print(f"weights and requests are of seed {seed}")
    folder, asked = drawn(name, tmp_path / name, seed), Asked(name, seed)
    flags = (*STEPS, *MORE.get(kind, ()))
    with running_cluster(folder, tmp_path / "whole", "--pd-workers", "1", *flags) as cluster:
        whole = await asked.all(cluster, "whole")
    said = {token for reply in whole for choice in reply["choices"] for token in choice["token_ids"]}
    assert len(said) > 20, "answers that say nothing prove nothing"
    with running_cluster(folder, tmp_path / "roles", *ROLES, *flags) as cluster:
        for turn in range(ROUNDS):
            assert_equal(asked, await asked.all(cluster, f"handed over {turn}"), whole)
            if set(asked.handed_over(cluster)) == set(asked.features):
                break
        assert set(asked.handed_over(cluster)) == set(asked.features)
        assert cluster.total("proxy", "triptych_resumes_total") == 0, "a hand-over is no loss"
        if name != "bart":  # its cross table is made of its item again
            assert cluster.total("pd", "triptych_pd_shared_kv_loaded_tokens_total") > 0
        for turn in range(ROUNDS):
            await killed(cluster, asked, whole, f"killed {turn}")
            if cluster.total("proxy", "triptych_resumes_total") > 0:
                break
        assert cluster.total("proxy", "triptych_resumes_total") > 0, "nothing was lost with it"
        await asyncio.to_thread(assert_at_rest, cluster)

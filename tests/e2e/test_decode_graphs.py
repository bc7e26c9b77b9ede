"""Through all processes, with decode steps over static buffers: the tokens of transformers' generate."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.pictures import picture
from support.data.traffic import ask_all, expected, mixed_cases
from support.encdec.oracle import greedy, image_inputs, model_of, text_inputs
from support.processes.cluster import PATIENCE, Cluster, data_url, start_cluster

TOKENS = 40
STATIC = ("--decode-graphs", "static", "--max-num-seqs", "8", "--threads", "1")

pytestmark = pytest.mark.timeout(300)


async def test_mixed_requests_at_once_are_exact(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl")
    cluster = start_cluster(path, tmp_path, "--served-model-name", "qwen3_vl", *STATIC)
    try:
        cases = mixed_cases(8, seed=17)
        answers = await ask_all(cluster.url, cases, TOKENS, model="qwen3_vl")
        assert_exact(expected(path, cases, TOKENS), [answer.token_ids for answer in answers])
        assert cluster.total("pd", "triptych_pd_graph_steps_total") > TOKENS
    finally:
        cluster.stop()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart", "trocr"])
async def test_encoder_decoder_models_are_exact(tmp_path: Path, family: str) -> None:
    path = build_checkpoint(family)
    cluster = start_cluster(path, tmp_path, "--served-model-name", family, *STATIC)
    try:
        for number in range(3):
            assert ask_encoder_decoder(cluster, family, number) == said_by_generate(path, family, number)
        assert cluster.total("pd", "triptych_pd_graph_steps_total") > TOKENS
    finally:
        cluster.stop()


def _text(number: int) -> str:
    return "The rain in Spain " * (number + 1)


def _picture(number: int) -> Image.Image:
    return picture(number, 70 + 9 * number, 40)


def ask_encoder_decoder(cluster: Cluster, family: str, number: int) -> list[int]:
    body: dict[str, Any] = {"model": family, "max_tokens": TOKENS, "return_token_ids": True}
    if family == "trocr":
        body["multi_modal_data"] = {"image": {"url": data_url(_picture(number))}}
    else:
        body["prompt"] = _text(number)
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        tokens: list[int] = json.loads(reply.read())["choices"][0]["token_ids"]
    return tokens


def said_by_generate(path: Path, family: str, number: int) -> list[int]:
    inputs = image_inputs(path, _picture(number)) if family == "trocr" else text_inputs(path, _text(number))
    forced = model_of(path).generation_config.forced_eos_token_id
    return greedy(path, inputs, max_new_tokens=TOKENS, ignore_eos=False, forced_eos_token_id=forced).token_ids

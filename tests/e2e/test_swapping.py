"""Requests that are swapped, and models that share a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.data import traffic
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import Case, picture
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWAP = ("--threads", "1", "--preemption", "swap", "--swap-memory", "64MiB")
TOKENS = 64


def assert_swapped(cluster: Cluster) -> None:
    assert cluster.total("pd", "vllm:num_preemptions_total") > 0
    assert cluster.total("pd", "triptych_pd_swapped_blocks_total") > 0
    assert_at_rest(cluster)
    assert cluster.total("pd", "triptych_pd_host_blocks_used") == 0


async def test_sounds_answer_alike_where_requests_are_swapped_with_their_tables(tmp_path: Path) -> None:
    path = build_checkpoint("whisper", tmp_path / "whisper")
    words = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"
    prompt = tuple(tokenizer_of(path).convert_tokens_to_ids(words.split()))
    cases = [EncDecCase((1.0 + seed, seed), prompt) for seed in range(8)]
    # So long that any two that meet want more than there is, however slowly their sounds come.
    tokens = 2 * TOKENS - 8
    reference = encdec_traffic.expected(path, cases, tokens)
    # A block of 16 rows is 24 KiB: 4 tables of 94 blocks, and 12 more for requests that will want 8 each.
    memory = ("--kv-memory", "9312KiB", "--max-model-len", "128")
    with running_cluster(path, tmp_path / "run", *SWAP, *memory) as cluster:
        got = await asyncio.gather(*(encdec_traffic.ask(cluster.url, case, tokens) for case in cases))
        assert_exact(reference, [answer.token_ids for answer in got], min_distinct=10)
        await asyncio.to_thread(assert_swapped, cluster)


MODEL_TOKENS = 40
#: The bytes that both models get: only the namespace tells their keys apart.
PICTURES = [picture(70 + number, 64, 64) for number in range(4)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: build_checkpoint(family, folder / family) for family in ("qwen3_vl", "trocr", "bart")}


@pytest.fixture(scope="module")
def clusters(
    paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Cluster]]:
    """Three clusters, each with a proxy; the first one's store serves all."""
    folder = tmp_path_factory.mktemp("clusters")
    with ExitStack() as stack:
        running: dict[str, Cluster] = {}
        # Proxies meet all workers of the store: they need one token.
        words: tuple[str, ...] = ("--internal-token", "token of all clusters")
        for family, path in paths.items():
            cluster = running_cluster(path, folder / family, "--threads", "1", *words)
            running[family] = stack.enter_context(cluster)
            words = (*words[:2], "--store", running["qwen3_vl"].store_url)
        for cluster in running.values():
            wait_for("all models", lambda cluster=cluster: cluster.models().keys() == paths.keys())
        yield running


async def test_the_same_pictures_and_texts_at_once_are_answered_by_each_model_as_by_generate(clusters, paths):
    seen = [Case((0, f"what is picture {number}"), (image,)) for number, image in enumerate(PICTURES)]
    read = [EncDecCase(image, (2,)) for image in PICTURES]
    texts = [EncDecCase(f"what is picture {number}", (2, 0)) for number in range(len(PICTURES))]
    reference = traffic.expected(paths["qwen3_vl"], seen, MODEL_TOKENS)
    written = encdec_traffic.expected(paths["trocr"], read, MODEL_TOKENS)
    retold = encdec_traffic.expected(paths["bart"], texts, MODEL_TOKENS)
    tower = clusters["qwen3_vl"].total("encoder", "triptych_encoder_tower_items_total")
    # Every proxy knows every model of the store: all are asked through each of them.
    asked = [
        asyncio.gather(
            traffic.ask_all(cluster.url, seen, MODEL_TOKENS, "qwen3_vl"),
            *(encdec_traffic.ask(cluster.url, case, MODEL_TOKENS, "trocr") for case in read),
            *(encdec_traffic.ask(cluster.url, case, MODEL_TOKENS, "bart") for case in texts),
        )
        for cluster in clusters.values()
    ]
    for answers, *others in await asyncio.gather(*asked):
        assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=10)
        ids = [answer.token_ids for answer in others]
        assert_exact(written, ids[: len(read)], min_distinct=10)
        assert_exact(retold, ids[len(read) :], min_distinct=10)
    # Pictures at two models and the texts: each once, whatever proxy asked first.
    done = clusters["qwen3_vl"].total("encoder", "triptych_encoder_tower_items_total")
    assert done == tower + 3 * len(PICTURES)
    for cluster in clusters.values():
        await asyncio.to_thread(assert_at_rest, cluster)
